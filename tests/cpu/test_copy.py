"""copy(), clear() and empty_like(): bytes of every element type, overlap, streams, and invalid arguments."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import ArgumentError, ClosedError, DTypeError, RangeError, StateError
from kvtier.memory import CPU, Allocator, Buffer, Placement, Stream, best_host, clear, context, copy, empty_like
from support import held_back

names = [dtype.name for dtype in dt.ALL]
packed = [dtype.name for dtype in dt.ALL if dtype.is_packed]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def bits_of(data: np.ndarray | bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes(data), np.uint8), bitorder="little")


@functools.cache  # all hypothesis examples share one stream per placement
def stream_of(placement: Placement) -> Stream:
    return Stream(placement)


# ---- whole and partial copies ----


@pytest.mark.parametrize("name", names)
def test_copy_of_whole_buffer_copies_every_byte(name, placement, make, read):
    raw = np.arange(48, dtype=np.uint8)
    source, target = make(placement, raw, name), make(placement, np.zeros(48, np.uint8), name)
    copy(source, target)
    assert read(target).tobytes() == raw.tobytes()
    assert read(source).tobytes() == raw.tobytes()


@pytest.mark.parametrize("direction", ["to", "from"])
def test_copy_works_between_placements(direction, placement, make, read):
    raw = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    for other in {CPU, best_host()}:
        source, target = (other, placement) if direction == "to" else (placement, other)
        copied = Buffer(raw.size, "u8", target)
        copy(make(source, raw), copied)
        assert np.array_equal(read(copied), raw)


def test_copy_of_n_elements_keeps_remaining_elements(placement, make, read):
    source, target = make(placement, np.arange(8, dtype=np.int32)), make(placement, np.full(6, -1, np.int32))
    copy(source, 3, target)
    assert read(target).view(np.int32).tolist() == [0, 1, 2, -1, -1, -1]


def test_copy_into_slice_writes_only_slice(placement, make, read):
    source, target = make(placement, np.arange(8, dtype=np.int32)), make(placement, np.full(6, -1, np.int32))
    copy(source[5:7], target[1:3])
    assert read(target).view(np.int32).tolist() == [-1, 5, 6, -1, -1, -1]


def test_copy_returns_rest_of_destination(placement, make, read):
    a, b = make(placement, np.array([1, 2], np.int16)), make(placement, np.array([3, 4, 5], np.int16))
    target = make(placement, np.zeros(6, np.int16))
    rest = copy(b, 1, copy(a, 2, target))
    assert rest == target[3:]
    assert copy(b, rest) == target[6:]
    assert read(target).view(np.int16).tolist() == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize(("name", "n"), [("u4", 3), ("fp4", 1), ("u2", 6)])
def test_copy_that_ends_inside_byte_returns_empty_rest(name, n, placement):
    rest = copy(Buffer(8, name, placement), n, Buffer(8, name, placement))
    assert not rest
    assert (rest.size, rest.dtype.name, rest.placement) == (0, name, placement)


@pytest.mark.parametrize("name", packed)
@pytest.mark.parametrize("n", range(9))
def test_copy_that_ends_inside_byte_keeps_other_elements(name, n, placement, make, read):
    source, target = make(placement, b"\x00" * 5, name), make(placement, b"\xff" * 5, name)
    copy(source, n, target)
    bits = bits_of(read(target)).reshape(-1, dt.dtype(name).bits)
    assert not bits[:n].any()
    assert bits[n:].all()


def test_copy_of_zero_elements_changes_nothing(placement, make, read):
    target = make(placement, b"abc")
    assert copy(Buffer(5, "u8", placement), 0, target) == target
    copy(target[:0], target[3:])
    assert read(target).tobytes() == b"abc"
    assert copy(Buffer(dtype="u8"), Buffer(dtype="u8")) == Buffer(dtype="u8")


@pytest.mark.parametrize("name", names)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_overlapping_copy_matches_memmove(name, placement, make, data):
    element, raw = dt.dtype(name), data.draw(st.binary(min_size=48, max_size=48))
    buffer = make(placement, raw, element)
    starts = st.integers(0, buffer.size // element.per_byte).map(lambda start: start * element.per_byte)
    src, dst = data.draw(starts), data.draw(starts)
    n = data.draw(st.integers(0, buffer.size - max(src, dst)))
    expected = bits_of(raw)
    moved = expected[src * element.bits : (src + n) * element.bits].copy()
    expected[dst * element.bits : (dst + n) * element.bits] = moved
    with context(stream=data.draw(st.sampled_from([None, stream_of(placement)]))):
        copy(buffer[src:], n, buffer[dst:])
        assert buffer.view("u8").tolist() == np.packbits(expected, bitorder="little").tolist()


@pytest.mark.parametrize("gap", [-(1 << 20), -4096, -1, 1, 64, 4096, 1 << 20])
def test_large_overlapping_copy_matches_memmove(gap, placement, make, read):
    raw = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    buffer, n = make(placement, raw), (4 << 20) - abs(gap)
    src, dst = max(0, -gap), max(0, gap)
    copy(buffer.slice(src, n), buffer.slice(dst, n))
    expected = raw.copy()
    ctypes.memmove(expected.ctypes.data + dst, raw.ctypes.data + src, n)
    assert np.array_equal(read(buffer), expected)


# ---- streams ----


def test_host_copy_without_stream_is_synchronous():
    source, target = Buffer.wrap(bytearray(b"abc")), Buffer.wrap(memory := bytearray(3))
    copy(source, target)
    assert memory == b"abc"


@pytest.mark.parametrize("how", ["argument", "context"])
def test_copy_on_host_stream_runs_in_stream_order(how):
    stream, target = Stream("cpu"), Buffer.wrap(memory := bytearray(3))
    with held_back(stream):
        if how == "argument":
            copy(Buffer.wrap(b"abc"), target, stream=stream)
        else:
            with context(stream=stream):
                copy(Buffer.wrap(b"abc"), target)
        assert memory == bytes(3), "the copy ran before earlier tasks"
    stream.synchronize()
    assert memory == b"abc"
    stream.close()


def test_stream_runs_work_in_call_order(placement, make, read):
    stream, buffer = Stream(placement), make(placement, np.zeros(8, np.uint8))
    buffer.fill(1, stream)
    copy(buffer[:4], 4, buffer[4:], stream)
    clear(buffer[:2], stream)
    buffer[2:4].fill(3, stream)
    copy(buffer[2:], 2, buffer[6:], stream)
    stream.synchronize()
    assert read(buffer).tolist() == [0, 0, 3, 3, 1, 1, 3, 3]


def test_pending_copy_keeps_memory_alive():
    stream, array, target = Stream("cpu"), np.arange(4, dtype=np.uint8), Buffer.wrap(memory := bytearray(4))
    alive = weakref.ref(array)
    with held_back(stream):
        copy(Buffer.wrap(array), target, stream=stream)
        target.close()
        del array
        gc.collect()
        assert alive() is not None
    stream.synchronize()
    gc.collect()
    assert memory == bytes([0, 1, 2, 3])
    assert alive() is None
    stream.close()


@needs_gpu
def test_copy_of_gpu_memory_on_host_stream_raises():
    device = Buffer(4, "u8", "cuda:0")
    with pytest.raises(ArgumentError, match=r"cuda:0 .* stream on cpu"):
        copy(device, Buffer(4, "u8"), stream=Stream("cpu"))
    # a stream on pinned memory is a host stream, so synchronizing this stream would not wait for the GPU
    with pytest.raises(ArgumentError, match=r"cuda:0 .* stream on pinned"):
        copy(device, Buffer(4, "u8", "pinned"), stream=Stream("pinned"))
    with context(stream=Stream("cpu")), pytest.raises(ArgumentError, match=r"cuda:0 .* stream on cpu"):
        copy(device, Buffer(4, "u8"))


@needs_gpu
def test_host_copy_on_gpu_stream_runs_in_stream_order(make):
    device, host, twin = make(Placement("cuda", 0), bytes([7] * 8)), Buffer(8, "u8", "pinned"), Buffer(8, "u8")
    stream = Stream("cuda:0")
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(100_000_000)  # about 50 ms
    copy(device, host, stream=stream)
    copy(host, twin, stream=stream)
    stream.synchronize()
    assert twin.tolist() == [7] * 8


# ---- invalid arguments ----


@pytest.mark.parametrize(("source", "target"), [("f16", "bf16"), ("u8", "i8"), ("u4", "fp4"), ("u8", "u4")])
def test_copy_between_different_dtypes_raises(source, target, placement):
    with pytest.raises(DTypeError, match=rf"copy {source} elements into a Buffer of {target}"):
        copy(Buffer(8, source, placement), Buffer(8, target, placement))


@pytest.mark.parametrize(("sizes", "n"), [((8, 4), 5), ((4, 8), 5), ((4, 4), -1), ((4, 4), 1 << 62), ((0, 4), 1)])
def test_copy_count_out_of_range_raises(sizes, n, placement, make, read):
    source, target = Buffer(sizes[0], "u8", placement), make(placement, b"\xff" * sizes[1])
    with pytest.raises(RangeError, match=rf"{n} elements from a Buffer of {sizes[0]} into a Buffer of {sizes[1]}"):
        copy(source, n, target)
    assert read(target).tobytes() == b"\xff" * sizes[1]


def test_copy_between_whole_buffers_of_unequal_size_raises():
    for sizes in ((3, 4), (4, 3), (0, 1)):
        with pytest.raises(RangeError, match=rf"equal sizes, got {sizes[0]} and {sizes[1]}"):
            copy(Buffer(sizes[0], "u8"), Buffer(sizes[1], "u8"))


@pytest.mark.parametrize("n", [1.0, "1", None])
def test_copy_with_non_integer_count_raises(n):
    with pytest.raises((TypeError, ArgumentError)):
        copy(Buffer(4, "u8"), n, Buffer(4, "u8"))


def test_copy_without_destination_raises():
    with pytest.raises((TypeError, ArgumentError), match="destination"):
        copy(Buffer(4, "u8"), 4)


def test_copy_with_two_destinations_raises():
    with pytest.raises((TypeError, ArgumentError)):
        copy(Buffer(4, "u8"), Buffer(4, "u8"), Buffer(4, "u8"))


def test_copy_into_read_only_buffer_raises():
    target = Buffer.wrap(b"abcd")
    with pytest.raises(ArgumentError, match="read-only"):
        copy(Buffer(4, "u8"), target)
    assert target.tolist() == list(b"abcd")


def test_copy_and_clear_of_closed_buffer_raise(placement):
    closed, open_buffer = Buffer(4, "u8", placement), Buffer(4, "u8", placement)
    closed.close()
    with pytest.raises(ClosedError):
        copy(closed, open_buffer)
    with pytest.raises(ClosedError):
        copy(open_buffer, closed)
    with pytest.raises(ClosedError):
        clear(closed)


# ---- clear ----


@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_clear_of_slice_zeroes_only_the_slice(name, size, placement, make, read):
    buffer = make(placement, b"\xff" * 64, name)
    clear(buffer.slice(0, size))
    bits = bits_of(read(buffer)).reshape(-1, dt.dtype(name).bits)
    assert not bits[:size].any()
    assert bits[size:].all()


def test_clear_runs_in_stream_order():
    stream, buffer = Stream("cpu"), Buffer.wrap(memory := bytearray(b"abc"))
    with held_back(stream):
        clear(buffer, stream)
        assert memory == b"abc"
    stream.synchronize()
    assert memory == bytes(3)
    stream.close()


# ---- empty_like ----


@pytest.mark.parametrize("name", names)
def test_empty_like_allocates_same_size_and_dtype(name, placement):
    buffer = Buffer(7, name, placement)
    twin = empty_like(buffer)
    assert (twin.size, twin.dtype, twin.placement) == (7, buffer.dtype, placement)
    assert twin.data() != buffer.data()
    assert not twin.readonly


def test_empty_like_with_dtype_keeps_element_count(placement):
    twin = empty_like(Buffer(7, "f32", placement), "u4")
    assert (twin.size, twin.dtype, twin.nbytes, twin.placement) == (7, dt.u4, 4, placement)
    assert empty_like(twin, dtype=dt.bf16).dtype == dt.bf16


def test_empty_like_with_placement_keeps_dtype(placement):
    twin = empty_like(Buffer(7, "f32"), placement=placement)
    assert (twin.size, twin.dtype, twin.placement) == (7, dt.f32, placement)
    assert empty_like(twin, placement="cpu").placement == CPU


def test_empty_like_accepts_dtype_and_placement(placement):
    twin = empty_like(Buffer(7, "f32"), "i64", str(placement))
    assert (twin.size, twin.dtype, twin.placement) == (7, dt.i64, placement)


def test_empty_like_uses_context_allocator():
    memory = bytearray(64)
    block = (ctypes.c_char * 64).from_buffer(memory)
    allocator = Allocator("cpu", lambda _nbytes: ctypes.addressof(block), lambda _pointer, _nbytes: None)
    with context(allocator=allocator):
        twin = empty_like(Buffer.wrap(b"abc"))
    twin.fill(7)
    assert memory[:4] == b"\x07\x07\x07\x00"


def test_empty_like_of_slice_has_size_of_slice():
    assert empty_like(Buffer(100, "u8")[3:8]).nbytes == 5


def test_empty_like_of_empty_buffer_is_empty():
    twin = empty_like(Buffer(dtype="bf16"))
    assert (twin.size, twin.dtype) == (0, dt.bf16)
    with pytest.raises((DTypeError, StateError)):
        empty_like(Buffer())


def test_empty_like_with_unknown_dtype_or_placement_raises():
    with pytest.raises(DTypeError, match="'f8'"):
        empty_like(Buffer(1, "u8"), "f8")
    with pytest.raises(ArgumentError, match="'gpu'"):
        empty_like(Buffer(1, "u8"), placement="gpu")
