"""Buffer: construction, slices, views, elements of every type, streams, closing, and packing."""

from __future__ import annotations

import copy as copy_module
import ctypes
import gc
import math
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import (
    ArgumentError,
    ClosedError,
    DTypeError,
    OutOfMemoryError,
    RangeError,
    StateError,
)
from kvtier.memory import CPU, PINNED, Allocator, Buffer, Placement, Stream, clear, context, copy, save
from kvtier.memory.torch_types import from_torch, torch_dtype
from support import held_back

names = [dtype.name for dtype in dt.ALL]
packed_names = [dtype.name for dtype in dt.ALL if dtype.bits < 8]
integer_names = [name for name in names if name[0] in "ui" and name not in packed_names]


def counting(count: int, name: str = "i32") -> np.ndarray:
    return np.arange(count, dtype=dt.dtype(name).numpy)


class RecordingMemory:
    """Allocates memory with torch, and records each allocation and deallocation."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.live: dict[int, torch.Tensor] = {}
        self.requested: list[int] = []
        self.returned: list[tuple[int, int]] = []

    def allocator(self) -> Allocator:
        return Allocator(self.placement, self._allocate, self._deallocate)

    def _allocate(self, nbytes: int) -> int:
        pinned = self.placement == PINNED
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.placement.torch, pin_memory=pinned)
        self.live[tensor.data_ptr()] = tensor
        self.requested.append(nbytes)
        return tensor.data_ptr()

    def _deallocate(self, pointer: int, nbytes: int) -> None:
        del self.live[pointer]
        self.returned.append((pointer, nbytes))


# ---- construction ----


def test_buffer_without_arguments_is_empty_untyped_and_falsy():
    buffer = Buffer()
    assert not buffer
    assert (len(buffer), buffer.size, buffer.nbytes, buffer.base) == (0, 0, 0, 0)
    assert buffer.dtype == dt.null
    assert buffer.placement == CPU
    assert buffer == Buffer()


@pytest.mark.parametrize("name", names)
def test_buffer_with_only_dtype_is_empty_typed_and_falsy(name, placement):
    buffer = Buffer(dtype=name, placement=placement)
    assert not buffer
    assert (buffer.size, buffer.nbytes, buffer.dtype, buffer.placement) == (0, 0, dt.dtype(name), placement)
    assert buffer == Buffer(dtype=name, placement=placement) != Buffer()
    assert list(buffer) == buffer.tolist() == []


@pytest.mark.parametrize("name", names)
def test_buffer_has_memory_for_its_elements(name, placement):
    buffer = Buffer(13, name, placement)
    assert buffer
    assert (len(buffer), buffer.size, buffer.dtype, buffer.placement) == (13, 13, dt.dtype(name), placement)
    assert buffer.nbytes == math.ceil(13 * dt.dtype(name).bits / 8)
    assert buffer.bytes_tensor().numel() == buffer.nbytes
    assert buffer.bytes_tensor().device == placement.torch
    assert buffer.base == 0
    assert not buffer.readonly


def test_buffer_accepts_placement_by_name(placement):
    assert Buffer(1, "u8", str(placement)).placement == placement


def test_buffer_of_zero_elements_is_truthy(placement):
    buffer = Buffer(0, "bf16", placement)
    assert buffer, "a buffer is true if it has memory, even without elements"
    assert (buffer.size, buffer.nbytes, buffer.tolist()) == (0, 0, [])
    buffer.fill(1)
    clear(buffer)
    assert buffer.torch().shape == (0,)
    assert buffer.slice(0).view("u4").size == 0


def test_buffer_memory_is_returned_to_allocator_exactly_once(placement):
    memory_pool = RecordingMemory(placement)
    allocator = memory_pool.allocator()
    buffer = Buffer(5, "u4", allocator=allocator)
    assert (buffer.placement, buffer.data() in memory_pool.live, memory_pool.requested) == (placement, True, [3])
    part, pointer = buffer[2:], buffer.data()
    del buffer
    gc.collect()
    assert memory_pool.returned == [], "the slice must keep the memory alive"
    part.fill(3)
    del part
    gc.collect()
    assert memory_pool.returned == [(pointer, 3)]
    assert allocator.stats.num_live == 0


def test_buffer_uses_allocator_from_context(placement):
    memory_pool = RecordingMemory(placement)
    with context(allocator=memory_pool.allocator()):
        buffer = Buffer(8, "u8", placement)
        assert buffer.data() in memory_pool.live
    assert Buffer(8, "u8", placement).data() not in memory_pool.live


def test_buffer_from_exhausted_allocator_raises_out_of_memory():
    exhausted = Allocator("cpu", lambda _nbytes: 0, lambda _pointer, _nbytes: None)
    with pytest.raises(OutOfMemoryError, match="12,345 bytes of cpu memory"):
        Buffer(12345, "u8", allocator=exhausted)


def test_from_pointer_does_not_own_memory(placement, make, read):
    memory = make(placement, counting(6))
    buffer = Buffer.from_pointer(memory.data() + 4, 4, "i32", placement)
    assert (buffer.data(), buffer.tolist()) == (memory.data() + 4, [1, 2, 3, 4])
    buffer.fill(-1)
    assert read(memory).view(np.int32).tolist() == [0, -1, -1, -1, -1, 5]
    del buffer
    assert memory.tolist() == [0, -1, -1, -1, -1, 5]


def test_from_pointer_keeps_owner_alive(placement, make):
    class Owner:
        def __init__(self) -> None:
            self.memory = make(placement, counting(4))

    owner = Owner()
    owner_ref = weakref.ref(owner)
    buffer = Buffer.from_pointer(owner.memory.data(), 4, "i32", placement, owner=owner)[1:]
    del owner
    gc.collect()
    assert owner_ref() is not None
    assert buffer.tolist() == [1, 2, 3]
    del buffer
    gc.collect()
    assert owner_ref() is None


def test_buffer_negative_size_raises(placement):
    with pytest.raises(RangeError, match="-3"):
        Buffer(-3, "u8", placement)
    with pytest.raises(RangeError, match="-3"):
        Buffer.from_pointer(4096, -3, "u8", placement)


def test_buffer_size_without_dtype_raises_and_shows_example():
    with pytest.raises(DTypeError, match=r"Buffer\(7, 'bf16'\)"):
        Buffer(7)


@pytest.mark.parametrize("size", [1.0, "4", np.float32(3)])
def test_buffer_non_integer_size_raises(size):
    with pytest.raises(TypeError):
        Buffer(size, "u8")


@pytest.mark.parametrize("size", [1.0, "4", None])
def test_from_pointer_non_integer_size_raises(size):
    with pytest.raises((TypeError, ArgumentError)):
        Buffer.from_pointer(Buffer(64, "u8").data(), size, "u8")


def test_buffer_accepts_numpy_integer_size():
    buffer = Buffer(np.int64(3), "u8")
    assert type(buffer.size) is int
    assert buffer.size == 3


def test_buffer_unknown_dtype_raises():
    with pytest.raises(DTypeError, match="'f128'"):
        Buffer(1, "f128")


def test_buffer_with_allocator_of_other_placement_raises(placement):
    elsewhere = Allocator(Placement("cuda", 7), lambda _nbytes: 4096, lambda _pointer, _nbytes: None)
    with pytest.raises(ArgumentError, match=f"allocator of cuda:7 memory cannot allocate {placement}"):
        Buffer(1, "u8", placement, allocator=elsewhere)


def test_from_pointer_null_address_raises_unless_size_is_zero():
    with pytest.raises(ArgumentError, match=r"0x0 .* 16 bytes"):
        Buffer.from_pointer(0, 4, "i32")
    assert Buffer.from_pointer(0, 0, "i32").tolist() == []


def test_from_pointer_negative_address_raises():
    with pytest.raises(ArgumentError, match="-0x8"):
        Buffer.from_pointer(-8, 4, "u8")


@pytest.mark.parametrize(("name", "offset"), [("i64", 4), ("f32", 1), ("bf16", 1)])
def test_from_pointer_misaligned_address_raises(name, offset):
    memory = Buffer(64, "u8")
    item = dt.dtype(name).item_bytes
    with pytest.raises(ArgumentError, match=rf"{memory.data() + offset:#x} is not a multiple of {item}\b.*{name}"):
        Buffer.from_pointer(memory.data() + offset, 1, name)


# ---- equality, truth, repr ----


def test_buffers_over_same_elements_are_equal():
    buffer = Buffer(8, "i32")
    assert buffer == buffer[:] == buffer.slice(0, 8)
    same = [buffer.slice(2, 4), buffer[2:6], buffer[1:][1:5], buffer[2:6].view("u8").view("i32")]
    assert all(part == same[0] for part in same)
    assert len(set(same)) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda buffer: buffer[1:],
        lambda buffer: buffer[:3],
        lambda buffer: buffer.view("u32"),
        lambda _: Buffer(4, "i32"),
        lambda _: Buffer(dtype="i32"),
        lambda buffer: buffer.tolist(),
        lambda buffer: buffer.data(),
    ],
    ids=["base", "size", "dtype", "memory", "empty", "contents", "address"],
)
def test_buffer_is_not_equal_to_other_buffers_or_values(other):
    buffer = Buffer(4, "i32")
    assert buffer != other(buffer)


def test_buffer_equality_ignores_contents(placement, make):
    assert make(placement, b"same") != make(placement, b"same")


def test_borrowed_buffer_equals_its_owner():
    buffer = Buffer(4, "i32")
    assert buffer.borrow() == buffer
    assert hash(buffer.borrow()) == hash(buffer)


def test_buffers_wrapping_one_array_are_equal():
    array = counting(4)
    assert Buffer.wrap(array) == Buffer.wrap(array)


def test_buffer_is_falsy_after_close(placement):
    buffer = Buffer(2, "u8", placement)
    part, borrowed = buffer[:0], buffer.borrow()
    assert (bool(buffer), bool(part), bool(borrowed)) == (True, True, True)
    buffer.close()
    assert (bool(buffer), bool(part), bool(borrowed)) == (False, False, False)


def test_buffer_repr_shows_type_and_state(placement):
    buffer = Buffer(3, "bf16", placement)
    assert repr(buffer) == f"Buffer(3, 'bf16', '{placement}')"
    buffer.close()
    assert repr(buffer) == f"Buffer(3, 'bf16', '{placement}', closed)"
    assert repr(Buffer(dtype="u4")) == "Buffer(0, 'u4', 'cpu', empty)"
    assert repr(Buffer()) == "Buffer(0, 'null', 'cpu', empty)"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_buffer_raises_and_names_save_and_load(protocol):
    with pytest.raises(TypeError, match=r"use kvtier\.memory\.save and kvtier\.memory\.load"):
        pickle.dumps(Buffer(1, "u8"), protocol)


@pytest.mark.parametrize("duplicate", [copy_module.copy, copy_module.deepcopy])
def test_copying_buffer_with_copy_module_raises(duplicate):
    with pytest.raises(TypeError, match=r"use kvtier\.memory\.save and kvtier\.memory\.load"):
        duplicate(Buffer(1, "u8"))


# ---- addresses ----


def test_data_returns_address_of_first_element(placement):
    buffer = Buffer(8, "i32", placement)
    assert buffer.data() == buffer.raw_data() == buffer.torch().data_ptr()
    assert buffer[3:].data() == buffer.data() + 12


def test_data_with_other_dtype_raises():
    buffer = Buffer(8, "i32")
    assert buffer.data("i32") == buffer.data(dt.i32) == buffer.data()
    with pytest.raises(DTypeError, match="holds i32, not f32"):
        buffer.data("f32")


@pytest.mark.parametrize(("name", "offset", "nbytes"), [("i64", 3, 24), ("u8", 8, 8), ("u4", 6, 3), ("u2", 8, 2)])
def test_raw_data_offset_counts_elements(name, offset, nbytes):
    buffer = Buffer(8, name)
    assert buffer.raw_data(offset) == buffer.data() + nbytes


@pytest.mark.parametrize("offset", [-1, 9, 1 << 40])
def test_raw_data_out_of_range_raises(offset):
    with pytest.raises(RangeError, match=rf"{offset} is outside 0\.\.8"):
        Buffer(8, "i32").raw_data(offset)


def test_raw_data_inside_byte_raises():
    with pytest.raises(ArgumentError, match="element 3 of u4"):
        Buffer(8, "u4").raw_data(3)


def test_data_or_returns_default_only_when_empty(placement):
    buffer = Buffer(8, "i32", placement)
    assert buffer.data_or(7) == buffer.data()
    assert Buffer(dtype="i32").data_or(7) == Buffer().data_or(7) == 7


@pytest.mark.parametrize("empty", [Buffer(), Buffer(dtype="u4"), Buffer(dtype="bf16")], ids=repr)
@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.data(),
        lambda b: b.raw_data(),
        lambda b: b.bytes_tensor(),
        lambda b: b.torch(),
        lambda b: b.numpy(),
        lambda b: b.memoryview(),
        lambda b: b.fill(0),
        lambda b: b.holding,
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack_device__(),
    ],
    ids=["data", "raw_data", "bytes_tensor", "torch", "numpy", "memoryview", "fill", "holding", "dlpack", "device"],
)
def test_empty_buffer_memory_access_raises(empty, use):
    with pytest.raises(StateError, match=rf"empty .*\b{empty.dtype}\b"):
        use(empty)


def test_empty_buffer_supports_borrow_slice_iterate_close():
    empty = Buffer(dtype="i32")
    assert empty.borrow() == empty.slice(0, 0) == empty.slice(0) == empty[:] == empty
    assert list(empty) == []
    empty.close()
    assert repr(empty) == "Buffer(0, 'i32', 'cpu', empty)"
    clear(empty)
    with pytest.raises(RangeError, match=r"1 elements from 0 of a Buffer of 0"):
        empty.slice(0, 1)
    with pytest.raises(RangeError, match="index 0"):
        empty.at(0)


# ---- slices ----


def test_slice_shares_memory(placement, make, read):
    buffer = make(placement, counting(10))
    part = buffer.slice(3, 2)
    assert (part.size, part.base, part.nbytes, part.dtype, part.placement) == (2, 3, 8, dt.i32, placement)
    assert part.data() == buffer.data() + 12
    part.fill(-1)
    assert read(buffer).view(np.int32).tolist() == [0, 1, 2, -1, -1, 5, 6, 7, 8, 9]


def test_nested_slices_add_their_bases():
    buffer = Buffer(100, "bf16")
    part = buffer.slice(10, 50).slice(5).slice(7, 3)
    assert (part.base, part.size, part.data()) == (22, 3, buffer.data() + 44)


def test_slice_without_size_extends_to_end():
    buffer = Buffer(10, "i32")
    assert buffer.slice(4).size == 6
    assert buffer.slice(10).size == 0


@pytest.mark.parametrize(
    ("base", "size", "requested"),
    [
        (-1, 2, "2 elements from -1"),
        (0, -1, "-1 elements from 0"),  # -1 does not mean "to the end"
        (2, -2, "-2 elements from 2"),
        (0, 11, "11 elements from 0"),
        (8, 3, "3 elements from 8"),
        (11, 0, "0 elements from 11"),
        (11, None, "all elements from 11"),
        (-1, None, "all elements from -1"),
        (1 << 62, 1 << 62, f"{1 << 62} elements from {1 << 62}"),
    ],
)
def test_buffer_slice_out_of_range_raises(base, size, requested, placement):
    with pytest.raises(RangeError, match=rf"{requested} of a Buffer of 10$"):
        Buffer(10, "i32", placement).slice(base, size)


@pytest.mark.parametrize(("base", "size"), [(1.0, 2), (0, 2.0), (0.5, None), ("1", None)])
def test_buffer_slice_non_integer_raises(base, size):
    with pytest.raises((TypeError, ArgumentError)):
        Buffer(10, "u8").slice(base, size)


@pytest.mark.parametrize(("name", "base"), [("u4", 3), ("u4", 1), ("fp4", 5), ("u2", 1), ("u2", 2), ("u2", 7)])
def test_packed_slice_starting_inside_byte_raises(name, base):
    with pytest.raises(ArgumentError, match=rf"element {base} of {name} starts at bit {base * dt.dtype(name).bits}\b"):
        Buffer(8, name).slice(base, 1)
    with pytest.raises(ArgumentError, match=rf"element {base} of {name}"):
        Buffer(8, name)[base:]


def test_packed_slice_can_end_inside_byte():
    buffer = Buffer(8, "u2")
    assert (buffer.slice(4, 3).size, buffer.slice(4, 3).nbytes, buffer[:5].nbytes) == (3, 1, 2)


@given(
    st.sampled_from(names),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(-15, 15)),
    st.one_of(st.none(), st.integers(-15, 15)),
)
def test_subscript_slice_matches_list_slice(name, size, start, stop):
    buffer, indices = Buffer(size, name), list(range(size))[start:stop]
    first = slice(start, stop).indices(size)[0]
    if first * dt.dtype(name).bits % 8:
        with pytest.raises(ArgumentError, match=f"element {first}"):
            buffer[start:stop]
        return
    part = buffer[start:stop]
    assert part.size == len(indices)
    assert part.base == first


@pytest.mark.parametrize("step", [-1, 2, 3])
def test_subscript_slice_with_step_raises(step):
    with pytest.raises(ArgumentError, match=f"step 1, got {step}"):
        Buffer(8, "u8")[::step]


# ---- views ----


def test_view_reinterprets_bytes_as_other_dtype(placement, make):
    buffer = make(placement, np.array([1.0, -2.5], np.float32))
    words = buffer.view("u32")
    assert (words.size, words.dtype, words.placement, words.data()) == (2, dt.u32, placement, buffer.data())
    assert words.tolist() == [0x3F800000, 0xC0200000]
    assert buffer.view("u8").size == 8
    assert buffer.view("u2").size == 32
    assert words.view("f32") == buffer


def test_view_of_slice_keeps_address(placement):
    part = Buffer(8, "i64", placement).slice(2, 4)
    view = part.view("i32")
    assert (view.size, view.base, view.data()) == (8, 4, part.data())


def test_view_with_partial_element_raises():
    with pytest.raises(ArgumentError, match=r"7 elements of u8 \(56 bits\) .* whole number of i32 \(32 bits\)"):
        Buffer(7, "u8").view("i32")
    with pytest.raises(ArgumentError, match=r"3 elements of u4 \(12 bits\)"):
        Buffer(3, "u4").view("u8")
    with pytest.raises(ArgumentError, match=r"2 elements of u2 \(4 bits\)"):
        Buffer(2, "u2").view("fp4")  # a view needs whole bytes


def test_misaligned_view_raises():
    part = Buffer(16, "u8").slice(3, 4)
    with pytest.raises(ArgumentError, match=rf"{part.data():#x} is not a multiple of 4, the size of one i32"):
        part.view("i32")


def test_view_with_same_dtype_equals_buffer():
    buffer = Buffer(3, "u4")
    assert buffer.view("u4") == buffer


def test_view_as_unknown_dtype_raises():
    with pytest.raises(DTypeError, match="'u6'"):
        Buffer(8, "u8").view("u6")


def test_view_of_empty_buffer_keeps_placement():
    empty = Buffer(dtype="i32", placement="pinned").view("bf16")
    assert not empty
    assert (empty.dtype, str(empty.placement)) == (dt.bf16, "pinned")


def test_typed_with_other_dtype_raises():
    buffer = Buffer(2, "bf16")
    assert buffer.typed("bf16") is buffer
    assert buffer.typed(dt.bf16) is buffer
    assert Buffer(dtype="u4").typed("u4").size == 0
    with pytest.raises(DTypeError, match=r"holds bf16, not f16; view\('f16'\)"):
        buffer.typed("f16")
    with pytest.raises(DTypeError, match="holds null, not f16"):
        Buffer().typed("f16")


# ---- borrowing ----


def test_borrowed_buffer_reads_and_writes_owner_memory(placement, make):
    owner = make(placement, counting(4))
    borrowed = owner.borrow()
    assert (borrowed.data(), borrowed.size, borrowed.dtype) == (owner.data(), 4, dt.i32)
    borrowed[1] = 9
    assert owner.tolist() == borrowed.tolist() == [0, 9, 2, 3]


def test_borrowed_buffer_raises_after_owner_is_freed(placement):
    memory_pool = RecordingMemory(placement)
    owner = Buffer(4, "i32", allocator=memory_pool.allocator())
    borrowed = owner[1:].borrow()
    part = borrowed[1:].view("u8")
    borrowed.fill(1)
    assert borrowed.tolist() == [1, 1, 1]
    del owner
    gc.collect()
    assert len(memory_pool.returned) == 1
    for stale in (borrowed, part):
        assert not stale
        with pytest.raises(ClosedError, match="memory that was freed"):
            stale.data()
        with pytest.raises(ClosedError, match="memory that was freed"):
            stale.fill(1)


def test_borrowed_buffer_raises_after_owner_close(placement):
    owner = Buffer(4, "i32", placement)
    borrowed = owner.borrow()
    owner.close()
    with pytest.raises(ClosedError):
        borrowed.tolist()


def test_closing_borrowed_buffer_leaves_owner_open(placement, make):
    owner = make(placement, counting(3))
    borrowed = owner.borrow()
    borrowed.close()
    assert not borrowed
    assert owner.tolist() == [0, 1, 2]


# ---- elements ----


@dataclass(frozen=True)
class Oracle:
    """Reference for an element type. It converts bit patterns (lowest bit first) to values with numpy."""

    name: str

    @property
    def bits(self) -> int:
        return dt.dtype(self.name).bits

    @property
    def numpy(self) -> np.dtype:
        return dt.dtype(self.name).numpy

    def value(self, pattern: np.ndarray) -> Any:
        return np.packbits(pattern, bitorder="little").view(self.numpy)[0].item()

    def values(self, bits: np.ndarray) -> list[Any]:
        return [self.value(pattern) for pattern in bits.reshape(-1, self.bits)]

    def patterns(self) -> st.SearchStrategy[np.ndarray]:
        """Generate bit patterns of any value except NaN. The bit pattern of a bool is 0 or 1."""
        codes = st.integers(0, 1 if self.name == "bool" else (1 << self.bits) - 1)
        patterns = codes.map(lambda code: np.array([code >> place & 1 for place in range(self.bits)], np.uint8))
        return patterns.filter(lambda pattern: self.value(pattern) == self.value(pattern))


def same_values(actual: list[Any], expected: list[Any]) -> bool:
    return len(actual) == len(expected) and all(
        (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
        for a, b in zip(actual, expected, strict=True)
    )


def bits_of(data: np.ndarray | bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes(data), np.uint8), bitorder="little")


@pytest.mark.parametrize("name", names)
def test_elements_match_numpy(name, placement, make):
    oracle = Oracle(name)
    # all bit patterns of small types, some bit patterns of large types, and only 0 and 1 for bool
    raw = np.arange(256, dtype=np.uint8)[:2] if name == "bool" else np.arange(256, dtype=np.uint8)
    buffer, expected = make(placement, raw, name), oracle.values(bits_of(raw))
    assert same_values(buffer.tolist(), expected)
    assert same_values(list(buffer), expected)
    for index in (0, 1, buffer.size // 2, buffer.size - 1):
        assert same_values([buffer.at(index), buffer[index], buffer[index - buffer.size]], [expected[index]] * 3)


def test_packed_elements_start_in_lowest_bits(make):
    assert make(CPU, b"\x21\xe4", "u4").tolist() == [1, 2, 4, 14]
    assert make(CPU, b"\xe4", "u2").tolist() == [0, 1, 2, 3]
    assert make(CPU, b"\x72\xf9", "fp4").tolist() == [1.0, 6.0, -0.5, -6.0]


@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("index", [-1, 5, 1 << 40, -(1 << 40)])
def test_at_out_of_range_raises(name, index):
    with pytest.raises(RangeError, match=rf"index {index} is outside 0\.\.4 of a Buffer of 5"):
        Buffer(5, name).at(index)


@pytest.mark.parametrize("index", [-6, 5, 1 << 40])
def test_subscript_out_of_range_raises_with_given_index(index):
    buffer = Buffer(5, "u8")
    with pytest.raises(IndexError, match=rf"index {index}\b"):
        buffer[index]
    with pytest.raises(RangeError, match=rf"index {index}\b.*5"):
        buffer[index] = 1


@pytest.mark.parametrize("index", [1.0, "0", None])
def test_subscript_non_integer_raises(index):
    buffer = Buffer(2, "u8")
    with pytest.raises(TypeError):
        buffer.at(index)
    with pytest.raises(TypeError):
        buffer[index]
    with pytest.raises(TypeError):
        buffer[index] = 1


def test_slice_assignment_raises():
    buffer = Buffer(2, "u8")
    with pytest.raises(TypeError):
        buffer[:] = 1


@pytest.mark.parametrize("name", names)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_setitem_changes_only_the_bits_of_one_element(name, placement, make, read, data):
    oracle = Oracle(name)
    raw = data.draw(st.binary(min_size=24, max_size=24))
    buffer = make(placement, raw, name)
    index = data.draw(st.integers(-buffer.size, buffer.size - 1))
    pattern = data.draw(oracle.patterns())
    buffer[index] = oracle.value(pattern)
    expected = bits_of(raw)
    expected.reshape(-1, oracle.bits)[index] = pattern
    assert np.array_equal(bits_of(read(buffer)), expected)
    assert same_values([buffer[index]], [oracle.value(pattern)])


@pytest.mark.parametrize("name", names)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_fill_of_slice_changes_no_bit_outside_slice(name, placement, make, read, data):
    oracle = Oracle(name)
    raw = data.draw(st.binary(min_size=24, max_size=24))
    buffer = make(placement, raw, name)
    per_byte = dt.dtype(name).per_byte
    base = data.draw(st.integers(0, buffer.size // per_byte)) * per_byte
    size = data.draw(st.integers(0, buffer.size - base))
    pattern = data.draw(oracle.patterns())
    part = buffer.slice(base, size)
    part.fill(oracle.value(pattern))
    expected = bits_of(raw)
    expected.reshape(-1, oracle.bits)[base : base + size] = pattern
    assert np.array_equal(bits_of(read(buffer)), expected)
    assert same_values(part.tolist(), [oracle.value(pattern)] * size)


@pytest.mark.parametrize("name", packed_names)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_write_to_partial_last_byte_keeps_other_elements(name, size, placement, make, read):
    oracle = Oracle(name)
    for write in (
        lambda part: part.fill(0),
        clear,
        lambda part: part.__setitem__(-1, 0),
        lambda part: copy(make(placement, bytes(part.nbytes), name, part.size), part),
    ):
        buffer = make(placement, b"\xff" * 4, name)
        write(buffer.slice(0, size))
        bits = bits_of(read(buffer)).reshape(-1, oracle.bits)
        assert not bits[size - 1].any()
        assert bits[size:].all()


@pytest.mark.parametrize("name", integer_names)
def test_integer_dtype_holds_limits_and_rejects_values_beyond(name):
    limits, buffer = np.iinfo(dt.dtype(name).numpy), Buffer(3, name)
    buffer.fill(int(limits.max))
    buffer[0] = int(limits.min)
    assert buffer.tolist() == [limits.min, limits.max, limits.max]
    for beyond in (int(limits.min) - 1, int(limits.max) + 1, 1 << 70):
        with pytest.raises(RangeError, match=rf"{name}\b.*{beyond}"):
            buffer.fill(beyond)
        with pytest.raises(RangeError, match=rf"{name}\b.*{beyond}"):
            buffer[1] = beyond
    assert buffer.tolist() == [limits.min, limits.max, limits.max]


@pytest.mark.parametrize(("name", "top"), [("u2", 3), ("u4", 15)])
def test_packed_dtype_holds_limits_and_rejects_values_beyond(name, top):
    buffer = Buffer(3, name)
    buffer.fill(top)
    assert buffer.tolist() == [top] * 3
    for beyond in (-1, top + 1):
        with pytest.raises(RangeError, match=rf"{name} .* 0 to {top}, got {beyond}"):
            buffer.fill(beyond)
        with pytest.raises(RangeError, match=rf"{name} .* 0 to {top}, got {beyond}"):
            buffer[1] = beyond
    assert buffer.tolist() == [top] * 3


@pytest.mark.parametrize("value", [0.25, 7.0, -5.0, math.inf, math.nan])
def test_value_that_fp4_cannot_represent_raises(value):
    with pytest.raises(RangeError, match="fp4 cannot hold"):
        Buffer(3, "fp4").fill(value)


@pytest.mark.parametrize("name", [*integer_names, "u2", "u4"])
@pytest.mark.parametrize("value", [1.5, math.inf, math.nan])
def test_fractional_value_for_integer_dtype_raises(name, value):
    with pytest.raises(RangeError, match=f"{name}.*{value}"):
        Buffer(3, name).fill(value)


@pytest.mark.parametrize("name", ["bool", "u8", "i64", "bf16", "u4", "fp4"])
@pytest.mark.parametrize("value", ["1", None, [1, 2], (1,)], ids=repr)
def test_fill_with_non_number_raises(name, value):
    with pytest.raises((TypeError, ArgumentError)):
        Buffer(3, name).fill(value)


# ---- random operation chains compared with numpy ----


@dataclass(frozen=True)
class Window:
    """A Buffer, and the range of bits that the Buffer covers in the tested memory."""

    buffer: Buffer
    start: int
    name: str
    size: int

    @property
    def width(self) -> int:
        return Oracle(self.name).bits

    def of(self, bits: np.ndarray, count: int | None = None) -> np.ndarray:
        return bits[self.start : self.start + (self.size if count is None else count) * self.width]


def slice_window(window: Window, base: int, size: int | None) -> Window | None:
    count = window.size - base if size is None else size
    error = None
    if base < 0 or count < 0 or base + count > window.size:
        error = RangeError
    elif base * window.width % 8:
        error = ArgumentError
    if error is not None:
        with pytest.raises(error):
            window.buffer.slice(base, size)
        return None
    return Window(window.buffer.slice(base, size), window.start + base * window.width, window.name, count)


def view_window(window: Window, name: str) -> Window | None:
    bits, unit = window.size * window.width, max(8, Oracle(name).bits)
    if name != window.name and (bits % unit or window.start % unit):
        with pytest.raises(ArgumentError):
            window.buffer.view(name)
        return None
    return Window(window.buffer.view(name), window.start, name, bits // Oracle(name).bits)


def copy_window(source: Window, count: int, target: Window, bits: np.ndarray) -> None:
    if source.name != target.name or not 0 <= count <= min(source.size, target.size):
        with pytest.raises(DTypeError if source.name != target.name else RangeError):
            copy(source.buffer, count, target.buffer)
        return
    copy(source.buffer, count, target.buffer)
    target.of(bits, count)[:] = source.of(bits, count).copy()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_operation_chain_matches_numpy_bits(placement, make, read, data):
    raw = data.draw(st.binary(min_size=1, max_size=48), label="memory")
    root = make(placement, raw)
    bits = bits_of(raw)
    windows = [Window(root, 0, "u8", len(raw))]
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        window = data.draw(st.sampled_from(windows))
        derived = None
        match data.draw(st.sampled_from(["slice", "view", "fill", "set", "copy"])):
            case "slice":
                base = data.draw(st.integers(-1, window.size + 1))
                derived = slice_window(window, base, data.draw(st.none() | st.integers(-1, window.size + 1)))
            case "view":
                derived = view_window(window, data.draw(st.sampled_from(names)))
            case "fill":
                pattern = data.draw(Oracle(window.name).patterns())
                window.buffer.fill(Oracle(window.name).value(pattern))
                window.of(bits).reshape(-1, window.width)[:] = pattern
            case "set" if window.size:
                pattern = data.draw(Oracle(window.name).patterns())
                index = data.draw(st.integers(0, window.size - 1))
                window.buffer[index] = Oracle(window.name).value(pattern)
                window.of(bits).reshape(-1, window.width)[index] = pattern
            case "copy":
                target = data.draw(st.sampled_from(windows))
                copy_window(window, data.draw(st.integers(-1, min(window.size, target.size) + 1)), target, bits)
        if derived is not None:
            windows.append(derived)
    assert np.array_equal(bits_of(read(root)), bits)
    for window in windows:
        if window.name != "bool":  # bytes other than 0 and 1 are not valid bools
            assert same_values(window.buffer.tolist(), Oracle(window.name).values(window.of(bits)))


# ---- streams ----


def test_fill_on_host_stream_runs_in_stream_order():
    buffer, stream = Buffer(4, "u4"), Stream("cpu")
    clear(buffer)
    with held_back(stream):
        buffer.fill(9, stream)
        assert buffer.tolist() == [0, 0, 0, 0]
    stream.synchronize()
    assert buffer.tolist() == [9, 9, 9, 9]
    stream.close()


def test_element_access_follows_order_of_context_stream(placement):
    buffer = Buffer(4, "i32", placement)
    with context(stream=Stream(placement)):
        buffer.fill(7)
        buffer[2] = 8
        assert buffer.tolist() == [7, 7, 8, 7]
        buffer.fill(9)
        assert buffer.at(3) == 9


def test_close_during_stream_write_defers_free():
    memory_pool, stream = RecordingMemory(CPU), Stream("cpu")
    buffer = Buffer(4, "u8", allocator=memory_pool.allocator())
    with held_back(stream):
        buffer.fill(1, stream)
        buffer.close()
        del buffer
        gc.collect()
        assert memory_pool.returned == []
    stream.synchronize()
    gc.collect()
    assert len(memory_pool.returned) == 1
    stream.close()


def test_fill_of_gpu_memory_on_host_stream_raises():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    with pytest.raises(ArgumentError, match=r"cuda:0.*cpu"):
        Buffer(4, "u8", "cuda:0").fill(1, Stream("cpu"))


# ---- closing ----

USES = {
    "data": lambda b: b.data(),
    "data with dtype": lambda b: b.data("u4"),
    "raw_data": lambda b: b.raw_data(),
    "data_or": lambda b: b.data_or(0),
    "slice": lambda b: b.slice(0, 1),
    "empty slice": lambda b: b.slice(0, 0),
    "python slice": lambda b: b[:],
    "view": lambda b: b.view("u8"),
    "view with same dtype": lambda b: b.view("u4"),
    "borrow": lambda b: b.borrow(),
    "at": lambda b: b.at(0),
    "subscript": lambda b: b[-1],
    "subscript assignment": lambda b: b.__setitem__(0, 1),
    "fill": lambda b: b.fill(1),
    "clear": clear,
    "iterate": list,
    "tolist": lambda b: b.tolist(),
    "bytes_tensor": lambda b: b.bytes_tensor(),
    "torch": lambda b: b.torch(),
    "numpy": lambda b: b.numpy(),
    "np.asarray": np.asarray,
    "unpack": lambda b: b.unpack(),
    "memoryview": lambda b: b.memoryview(),
    "array interface": lambda b: b.__array_interface__,
    "dlpack": lambda b: b.__dlpack__(),
    "dlpack device": lambda b: b.__dlpack_device__(),
    "wrap": Buffer.wrap,
    "copy from": lambda b: copy(b, Buffer(8, "u4")),
    "copy to": lambda b: copy(Buffer(8, "u4"), b),
    "copy zero elements from": lambda b: copy(b, 0, Buffer(8, "u4")),
    "save": lambda b: save(b, bytearray(5000)),
    "holding": lambda b: b.holding,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_buffer_use_after_close_raises(use):
    buffer = Buffer(8, "u4")
    part, borrowed = buffer.slice(0, 8), buffer.borrow()
    buffer.close()
    for closed in (buffer, part, borrowed):
        with pytest.raises(ClosedError):
            use(closed)


def test_closing_a_view_closes_buffer_and_all_views(placement):
    buffer = Buffer(8, "u8", placement)
    part = buffer[2:4]
    part.view("i8").close()
    with pytest.raises(ClosedError, match="closed"):
        buffer.data()
    assert not part


def test_buffer_close_twice_is_allowed(placement):
    buffer = Buffer(8, "u8", placement)
    buffer.close()
    buffer.close()
    assert not buffer


def test_closed_buffer_keeps_its_attributes(placement):
    buffer = Buffer(6, "u4", placement)[2:]
    buffer.close()
    assert (buffer.size, len(buffer), buffer.nbytes, buffer.dtype, buffer.base) == (4, 4, 2, dt.u4, 2)
    assert buffer.placement == placement
    assert isinstance(hash(buffer), int)


def test_buffer_close_frees_memory_immediately(placement):
    memory_pool = RecordingMemory(placement)
    buffer = Buffer(4, "i32", allocator=memory_pool.allocator())
    part = buffer[1:]
    pointer = buffer.data()
    buffer.fill(3)
    assert part.tolist() == [3, 3, 3]
    buffer.close()
    gc.collect()
    assert memory_pool.returned == [(pointer, 16)]
    assert not part


# ---- read-only memory ----


def readonly_buffer() -> tuple[Buffer, np.ndarray]:
    array = np.arange(8, dtype=np.int32)
    array.flags.writeable = False
    return Buffer.wrap(array), array


@pytest.mark.parametrize("part", [lambda b: b, lambda b: b[2:], lambda b: b.view("u8"), lambda b: b.borrow()])
def test_read_only_buffer_write_raises(part):
    whole, array = readonly_buffer()
    buffer = part(whole)
    assert buffer.readonly
    for write in (
        lambda: buffer.fill(1),
        lambda: buffer.__setitem__(0, 1),
        lambda: clear(buffer),
        lambda: copy(Buffer(buffer.size, buffer.dtype), buffer),
        lambda: copy(Buffer(1, buffer.dtype), 1, buffer),
        lambda: buffer.torch(),  # torch has no read-only tensors
        lambda: buffer.bytes_tensor(write=True),
    ):
        with pytest.raises(ArgumentError, match="read-only"):
            write()
    assert array.tolist() == list(range(8))


def test_packed_read_only_buffer_write_raises():
    buffer = Buffer.wrap(b"\xff\xff").view("u4")[:3]
    with pytest.raises(ArgumentError, match="read-only"):
        buffer.fill(0)
    with pytest.raises(ArgumentError, match="read-only"):
        buffer[0] = 0
    assert buffer.tolist() == [15, 15, 15]


def test_read_only_buffer_is_readable():
    buffer, array = readonly_buffer()
    assert buffer.tolist() == array.tolist()
    assert buffer[3] == buffer.at(3) == 3
    target = Buffer(8, "i32")
    copy(buffer, target)
    assert target.tolist() == array.tolist()
    assert not target.readonly


# ---- element types and torch ----


@pytest.mark.parametrize("name", [name for name in names if name not in packed_names])
def test_torch_dtype_matches_numpy_dtype(name):
    of_torch = torch_dtype(dt.dtype(name))
    assert str(of_torch) == f"torch.{dt.dtype(name).numpy.name}"
    assert from_torch(of_torch) == dt.dtype(name)
    assert of_torch.itemsize == dt.dtype(name).item_bytes


def test_torch_dtype_of_packed_dtype_is_uint8_except_for_fp4():
    assert torch_dtype(dt.u2) == torch_dtype(dt.u4) == torch.uint8
    assert torch_dtype(dt.fp4) == torch.float4_e2m1fn_x2
    assert from_torch(torch.float4_e2m1fn_x2) == dt.fp4
    assert from_torch(torch.uint8) == dt.u8


@pytest.mark.parametrize("foreign", [torch.complex64, torch.float8_e4m3fnuz, torch.uint4], ids=str)
def test_from_torch_unsupported_dtype_raises(foreign):
    with pytest.raises(DTypeError, match=str(foreign)):
        from_torch(foreign)


# ---- packing ----


@pytest.mark.parametrize("name", packed_names)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pack_then_unpack_round_trips(name, data):
    oracle = Oracle(name)
    codes = data.draw(st.lists(st.integers(0, (1 << oracle.bits) - 1), max_size=9))
    elements = np.array(codes, np.uint8).view(oracle.numpy)
    for values in (elements, np.array(codes, np.uint8)):
        buffer = Buffer.pack(values, name)
        assert (buffer.size, buffer.nbytes) == (len(codes), math.ceil(len(codes) * oracle.bits / 8))
        assert same_values(buffer.tolist(), elements.tolist())
        unpacked = buffer.unpack()
        assert unpacked.dtype == oracle.numpy
        assert unpacked.view(np.uint8).tolist() == codes


def test_pack_with_invalid_values_or_dtype_raises():
    with pytest.raises(RangeError, match="codes of u2 must be 0 to 3, got 4"):
        Buffer.pack(np.array([1, 4], np.uint8), "u2")
    with pytest.raises(DTypeError, match="bf16 is not packed"):
        Buffer.pack(np.zeros(2, np.uint8), "bf16")
    with pytest.raises(DTypeError, match="int64"):
        Buffer.pack(np.zeros(2, np.int64), "u4")
    with pytest.raises(DTypeError, match="f32 is not packed"):
        Buffer(2, "f32").unpack()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.array([-1], np.int8), "u4"),
        (np.array([1.0], dt.fp8_e4m3.numpy), "fp4"),
        (np.array([15], dt.u4.numpy), "u2"),
        (np.array([1.0], dt.fp4.numpy), "u4"),
    ],
    ids=lambda case: str(getattr(case, "dtype", case)),
)
def test_packing_elements_of_other_dtype_raises(values, name):
    with pytest.raises(ArgumentError):
        Buffer.pack(values, name)


# ---- foreign memory ----


def test_from_pointer_wraps_ctypes_memory():
    block = (ctypes.c_int32 * 4)(5, 6, 7, 8)
    buffer = Buffer.from_pointer(ctypes.addressof(block), 4, "i32", owner=block)
    buffer[0] = -5
    assert list(block) == [-5, 6, 7, 8]
