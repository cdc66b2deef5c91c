"""Element types: sizes, byte offsets of packed elements, and names in numpy and ml_dtypes."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import ArgumentError, DTypeError, RangeError

UNPACKED = {
    "bool": np.bool_,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
PACKED = {"u2": (ml_dtypes.uint2, 2), "u4": (ml_dtypes.uint4, 4), "fp4": (ml_dtypes.float4_e2m1fn, 4)}
NUMPY = {**UNPACKED, **{name: each for name, (each, _) in PACKED.items()}}
BITS = {
    **{name: np.dtype(each).itemsize * 8 for name, each in UNPACKED.items()},
    **{name: bits for name, (_, bits) in PACKED.items()},
}
any_type = st.sampled_from(dt.ALL)
packed_type = st.sampled_from([each for each in dt.ALL if BITS[each.name] < 8])
counts = st.integers(0, 1 << 40)


def test_all_dtypes_have_expected_bits():
    assert {each.name: each.bits for each in dt.ALL} == BITS


@pytest.mark.parametrize("name", BITS)
def test_dtype_is_found_by_name_and_by_numpy_type(name):
    found = dt.dtype(name)
    assert found.name == name == str(found)
    assert dt.dtype(found) is found
    assert dt.dtype(np.dtype(NUMPY[name]).name) is found
    assert dt.dtype(np.dtype(NUMPY[name])) is found
    assert dt.dtype(NUMPY[name]) is found


@pytest.mark.parametrize("name", BITS)
def test_numpy_type_of_dtype_is_from_numpy_or_ml_dtypes(name):
    assert dt.dtype(name).numpy == np.dtype(NUMPY[name])


@pytest.mark.parametrize(("name", "per_byte"), [("u2", 4), ("u4", 2), ("fp4", 2)])
def test_packed_dtype_has_several_elements_per_byte(name, per_byte):
    packed = dt.dtype(name)
    assert packed.is_packed
    assert (packed.per_byte, packed.item_bytes) == (per_byte, 1)


@pytest.mark.parametrize("name", UNPACKED)
def test_item_size_of_unpacked_dtype_equals_numpy_item_size(name):
    unpacked = dt.dtype(name)
    assert not unpacked.is_packed
    assert (unpacked.per_byte, unpacked.item_bytes) == (1, np.dtype(NUMPY[name]).itemsize)


@pytest.mark.parametrize(
    ("name", "count", "nbytes"),
    # the first three sizes would be one byte short if they were rounded down
    [("u4", 3, 2), ("u2", 5, 2), ("fp4", 1, 1), ("u2", 4, 1), ("u4", 0, 0), ("bf16", 3, 6), ("u64", 2, 16)],
)
def test_dtype_nbytes_rounds_up(name, count, nbytes):
    assert dt.dtype(name).nbytes(count) == nbytes


@given(any_type, counts)
def test_nbytes_is_smallest_size_that_fits(element, count):
    bits = count * BITS[element.name]
    assert bits <= element.nbytes(count) * 8 < bits + 8


@given(any_type, st.integers(0, 2000))
def test_nbytes_equals_numpy_packbits_size(element, count):
    assert element.nbytes(count) == np.packbits(np.zeros(count * BITS[element.name], np.uint8)).size


@given(any_type, st.integers(max_value=-1))
def test_nbytes_of_negative_count_raises(element, count):
    with pytest.raises(RangeError, match=rf"{element}.* {count}$"):
        element.nbytes(count)


@given(any_type, counts)
def test_byte_offset_on_byte_boundary_is_bit_offset_over_eight(element, count):
    start = count * element.per_byte
    assert element.offset_bytes(start) * 8 == start * BITS[element.name]


@given(packed_type, counts, st.data())
def test_byte_offset_of_element_inside_byte_raises(element, whole_bytes, data):
    per_byte = 8 // BITS[element.name]
    index = whole_bytes * per_byte + data.draw(st.integers(1, per_byte - 1))
    with pytest.raises(ArgumentError, match=rf"element {index} of {element} .*multiples of {per_byte} elements"):
        element.offset_bytes(index)


@given(any_type, st.integers(1, 1 << 40))
def test_byte_offset_of_negative_index_raises(element, before):
    with pytest.raises(RangeError, match=f"-{before * element.per_byte}"):
        element.offset_bytes(-before * element.per_byte)


@pytest.mark.parametrize(
    "name", ["", "null", "f8", "int4", "BF16", "float", "fp6", "complex64", np.complex64, "u6", object, "void8"]
)
def test_error_for_unknown_dtype_lists_known_names(name):
    with pytest.raises(DTypeError, match=r"unknown element type .* known: bool, u8, .*fp4"):
        dt.dtype(name)


def test_dtype_of_none_raises():
    # np.dtype(None), in contrast, returns float64
    with pytest.raises(DTypeError):
        dt.dtype(None)


def test_numpy_type_with_foreign_byte_order_raises():
    swapped = np.dtype(np.int32).newbyteorder()
    with pytest.raises(DTypeError, match=r"byte order|unknown"):
        dt.dtype(swapped)


def test_dtypes_compare_by_value():
    assert dt.dtype("bf16") == dt.bf16 != dt.f16
    assert len(set(dt.ALL)) == len(dt.ALL) == len({each.name for each in dt.ALL})
    assert dt.null not in dt.ALL


def test_error_without_ml_dtypes_contains_package_and_dtype():
    code = """
import sys
sys.modules["ml_dtypes"] = None
from kvtier import dtype as dt
from kvtier.errors import UnavailableError
assert dt.f32.numpy.name == "float32"
try:
    dt.bf16.numpy
except UnavailableError as error:
    assert "ml_dtypes" in str(error) and "bf16" in str(error), error
else:
    raise AssertionError("bf16 has a numpy type")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
