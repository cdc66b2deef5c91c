"""Copy tables: staged and direct tables copy the same bytes, chunks fit into staging memory, adjacent parts merge."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import ArgumentError
from kvtier.layout import CacheGroup, LayerSpec, TensorSpec
from kvtier.memory import CPU, PINNED, Buffer
from kvtier.memory.region import MemoryRef
from kvtier.transfer import BlockView, DeviceCache, Direction, TransferConfig, TransferManager
from kvtier.transfer.compiled import (
    _FIRST_SHARE,
    _STAGE_ALIGNMENT,
    _direct_tables,
    _stage_stride,
    _staged_chunks,
    _staged_tables,
    compile_transfer,
    sort_moves,
)
from kvtier.transfer.strategy import FIRST_CHUNK_BYTES
from transfer_support import FORMS, SMALL, device_bytes, filled_cache, groups, host_bytes, layout_of, ready_host


def run_copies(table, row=None, base=0):
    """Execute the copies of a table. If `row` is given, the addresses in this row are relative to `base`."""
    for copy in table.T.tolist():
        if row is not None:
            copy[row] += base
        ctypes.memmove(copy[1], copy[0], copy[2])


@given(data=st.data(), group=groups(), form=st.sampled_from(FORMS), direction=st.sampled_from(Direction))
@settings(max_examples=60, deadline=None)
def test_staged_and_direct_tables_move_same_bytes_as_numpy(data, group, form, direction):
    first = data.draw(st.integers(0, group.num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, group.num_layers)))
    span = group.span(layers)
    inside = slice(span.offset, span.offset + span.nbytes)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    on_device, on_host = random.permutation(7)[:5], random.permutation(9)[:5]
    chosen = slice(1, 4)
    for staged in (False, True):
        cache, views = filled_cache(group, 7, form, CPU, 1)
        host = ready_host(group, 9, CPU, 2, piece_bytes=group.slot_bytes * 4)
        moves = sort_moves(on_device, on_host, direction, 7, 9)
        expected = [device_bytes(group, views), host_bytes(host)]
        a, b = moves.sorted_device[chosen], moves.sorted_host[chosen]
        if direction is Direction.D2H:
            expected[1][b, inside] = expected[0][a, inside]
        else:
            expected[0][a, inside] = expected[1][b, inside]
        if staged:
            copies, within = _staged_tables(moves, chosen, cache.part(layers), host, direction)
            stage = np.zeros(3 * _stage_stride(span.nbytes), np.uint8)
            # (table, row of the table with the offsets in staging memory), in the order of execution
            steps = [(within, 1), (copies, 0)] if direction is Direction.D2H else [(copies, 1), (within, 0)]
            for table, row in steps:
                ends = table[row] + table[2]
                assert table[row].min() >= 0
                assert ends.max() <= stage.size
                run_copies(table, row, stage.ctypes.data)
        else:
            copies, within = _direct_tables(moves, chosen, cache.part(layers), host, direction)
            assert within is None
            run_copies(copies)
        assert np.array_equal(device_bytes(group, views), expected[0])
        assert np.array_equal(host_bytes(host), expected[1])


@given(st.integers(1, 1 << 20))
def test_stage_stride_is_rounded_up_to_alignment(span_bytes):
    assert _stage_stride(span_bytes) % _STAGE_ALIGNMENT == 0
    assert span_bytes <= _stage_stride(span_bytes) < span_bytes + _STAGE_ALIGNMENT


@given(st.integers(1, 3000), st.integers(1, 1 << 21), st.integers(1, 40), st.booleans())
def test_staged_chunks_are_nearly_equal_except_small_first(count, span_bytes, per_chunk, ramp):
    stride = _stage_stride(span_bytes)
    sizes = _staged_chunks(count, span_bytes, per_chunk * stride + stride - 1, ramp=ramp)
    assert sum(sizes) == count
    assert all(1 <= size <= per_chunk for size in sizes)
    others = sizes
    if ramp:
        first, *others = sizes
        assert first <= max(1, FIRST_CHUNK_BYTES // stride, count // _FIRST_SHARE)
        # the next larger size exceeds `count`, `per_chunk`, or both FIRST_CHUNK_BYTES and count / _FIRST_SHARE
        larger = first + 1
        assert larger > min(count, per_chunk) or larger * stride > FIRST_CHUNK_BYTES
        assert larger > min(count, per_chunk) or larger * _FIRST_SHARE > count
    assert len(others) == -(-sum(others) // per_chunk)
    assert not others or max(others) - min(others) <= 1


def test_staging_a_block_larger_than_a_chunk_raises():
    assert _staged_chunks(2, 512, 512, ramp=False) == [1, 1]
    with pytest.raises(ArgumentError, match="512 bytes does not fit into a staging chunk of 511"):
        _staged_chunks(2, 512, 511, ramp=False)


@given(st.integers(1, 20), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_compile_fills_bulk_slices_up_to_slice_bytes(count, sixths):
    cache, _ = filled_cache(SMALL, 20, "block-first", CPU, 1)
    host = ready_host(SMALL, 20, CPU)
    slice_bytes = sixths * SMALL.block_bytes // 6
    ids = np.arange(count)[::-1]
    parts = [range(SMALL.num_layers)]
    compiled = compile_transfer(cache, host, Direction.D2H, ids, ids, parts, TransferConfig(), slice_bytes=slice_bytes)
    sizes = [len(each.blocks) for each in compiled.slices]
    step = max(1, sixths // 6)
    assert sizes == [step] * (count // step) + ([count % step] if count % step else [])
    assert [each.nbytes for each in compiled.slices] == [size * SMALL.block_bytes for size in sizes]
    assert compiled.nbytes == count * SMALL.block_bytes
    # `blocks` has positions in `ids`, sorted by host id. The host ids count down to 0, so the last position is first.
    assert np.concatenate([each.blocks for each in compiled.slices]).tolist() == ids.tolist()
    assert compiled.num_copies == 0  # a table is made at its first use
    assert [each.made for each in compiled.slices] == [None] * len(sizes)
    assert compiled.slices[0].tables is compiled.slices[0].tables is compiled.slices[0].made
    assert compiled.num_copies == compiled.slices[0].tables[0].shape[1]


def test_compile_with_host_memory_of_another_group_raises():
    cache, _ = filled_cache(SMALL, 4, "block-first", CPU, 1)
    host = ready_host(CacheGroup.mla("main", 2, 32, "f16", 4), 4, CPU)
    with pytest.raises(ArgumentError, match="another cache group than 'main'"):
        compile_transfer(cache, host, Direction.D2H, [0], [0], [range(4)], TransferConfig(), slice_bytes=1)


# ---- the parts of a block in the device cache ----

PAIR = CacheGroup("main", (LayerSpec((TensorSpec("key", dt.u8, (4, 2)), TensorSpec("value", dt.u8, (4, 4)))),))


def view_of(memory, start, stride, nbytes, blocks=3):
    return torch.as_strided(memory, (blocks, nbytes), (stride, 1), start)


def other_allocation(memory, start, stride, nbytes):
    """Return a tensor at the same addresses as `view_of`, but with its own torch storage."""
    base = Buffer.from_pointer(memory.data_ptr(), memory.numel(), "u8", CPU, owner=memory).numpy()
    return torch.from_numpy(np.lib.stride_tricks.as_strided(base[start:], (3, nbytes), (stride, 1)))


def test_device_cache_joins_adjacent_parts():
    memory = torch.zeros(256, dtype=torch.uint8)
    key = view_of(memory, 64, 24, 8)
    cases = {
        "adjacent": (view_of(memory, 72, 24, 16), 1),
        "gap between the parts": (view_of(memory, 73, 25, 16), 2),
        "reverse order": (view_of(memory, 48, 24, 16), 2),
        "other stride": (view_of(memory, 72, 32, 16), 2),
        "other allocation": (other_allocation(memory, 72, 24, 16), 2),
    }
    for name, (value, expected) in cases.items():
        segments = DeviceCache.layer_first(PAIR, [{"key": key, "value": value}]).part(range(1))
        assert len(segments) == expected, name
        assert int(segments.nbytes.sum()) == 24
        assert segments.offset.tolist() == [0, 8][:expected]
        assert segments.pointer.tolist() == [key.data_ptr(), value.data_ptr()][:expected]
        assert segments.stride.tolist() == [24, value.stride(0)][:expected]


def test_device_cache_on_two_devices_raises():
    views = [BlockView.of(torch.zeros(3, nbytes, dtype=torch.uint8)) for nbytes in (8, 16)]
    pinned = replace(views[1], holding=MemoryRef(views[1].pointer, 48, PINNED))
    DeviceCache(PAIR, [(0, 0, views[0]), (0, 8, views[1])])
    with pytest.raises(ArgumentError, match="one device"):
        DeviceCache(PAIR, [(0, 0, views[0]), (0, 8, pinned)])


def test_registering_cache_that_overlaps_host_memory_raises():
    host = ready_host(PAIR, 4, CPU)
    begin, end = host.pointer, host.pointer + len(host.view())

    def register(start):
        memory = Buffer.from_pointer(start, 64, "u8", CPU, owner=host).numpy()  # this memory is never accessed
        key = torch.zeros(2, 8, dtype=torch.uint8)
        value = torch.from_numpy(np.lib.stride_tricks.as_strided(memory, (2, 16), (24, 1)))
        with TransferManager(layout_of(PAIR), CPU) as manager:
            manager.register(DeviceCache.layer_first(PAIR, [{"key": key, "value": value}]), host)

    for start in (end, begin - 40):  # the last byte of the second block is at start + 39
        register(start)
    for start in (end - 1, begin - 39):
        with pytest.raises(ArgumentError, match="overlap in memory"):
            register(start)


# ---- block views ----


def test_block_view_end_is_after_the_last_block():
    tensor = torch.zeros(5, 4, 6, dtype=torch.int16)[:, :2]
    view = BlockView.of(tensor)
    assert (view.stride, view.block_bytes, view.num_blocks) == (48, 24, 5)
    assert view.end - view.pointer == 4 * 48 + 24
    assert view.addresses(np.array([2, 0])).tolist() == [view.pointer + 96, view.pointer]
    assert BlockView.of(tensor[:0]).end == 0
    assert BlockView.of(view) is view


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 4), (2, 1, 5, 1)], ids=str)
def test_block_view_accepts_dense_tensors_of_any_shape(shape):
    tensor = torch.zeros(shape, dtype=torch.float32)
    view = BlockView.of(tensor)
    assert view.block_bytes * shape[0] == tensor.nbytes
    assert view.num_blocks == shape[0]


def test_block_view_of_invalid_tensor_raises():
    for wrong in (torch.tensor(1), np.zeros(3)):
        with pytest.raises(ArgumentError, match="tensor whose first dimension is blocks"):
            BlockView.of(wrong)
    with pytest.raises(ArgumentError, match="overlap: 8 bytes at stride 4"):
        BlockView.of(torch.as_strided(torch.zeros(12, dtype=torch.uint8), (2, 8), (4, 1)))
    assert BlockView.of(torch.as_strided(torch.zeros(8, dtype=torch.uint8), (1, 8), (4, 1))).num_blocks == 1
    with pytest.raises(ArgumentError, match="overlap: 16 bytes at stride 14"):
        BlockView.of(torch.as_strided(torch.zeros(15, dtype=torch.int16), (2, 8), (7, 1)))
    with pytest.raises(ArgumentError, match="contiguous"):
        BlockView.of(torch.zeros(3, 2, 4)[:, :, ::2])
    with pytest.raises(ArgumentError, match="meta"):
        BlockView.of(torch.zeros(3, 2, device="meta"))


@pytest.mark.parametrize(("nbytes", "block_bytes"), [(10, 4), (10, None), (10, 0)])
def test_block_view_of_buffer_with_partial_block_raises(nbytes, block_bytes):
    with pytest.raises(ArgumentError, match="does not consist of blocks"):
        BlockView.of(Buffer(nbytes, "u8"), block_bytes)
    assert BlockView.of(Buffer(12, "u8"), 4).num_blocks == 3
