"""The swap functions copy the same bytes as numpy, on the CPU and, if there is one, on a GPU."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError
from kvtier.memory import CPU, Buffer, Placement, context
from kvtier.transfer import (
    Direction,
    HostMemory,
    swap_cache_all_layers,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
)
from support import held_back, new_stream
from transfer_support import groups, host_bytes, ready_host, run_in_thread

DEVICES = [CPU, *([Placement("cuda", 0)] if torch.cuda.is_available() else [])]
DTYPES = [torch.bfloat16, torch.float16, torch.uint8, torch.float32, torch.float8_e4m3fn]


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    return request.param


def random_blocks(shape, dtype, device):
    items = torch.empty(shape, dtype=dtype)
    items.view(torch.uint8).copy_(torch.randint(0, 256, items.view(torch.uint8).shape, dtype=torch.uint8))
    return items.to(device.torch)


def raw(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy().copy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 2, 16, 8), (7, 3, 5), (7, 1, 1, 3), (1, 4, 4)], ids=str)
def test_swap_round_trip_keeps_every_byte(device, shape, dtype):
    cache, host = random_blocks(shape, dtype, device), random_blocks((9, *shape[1:]), dtype, CPU)
    before, random = raw(cache), np.random.default_rng(1)
    device_ids, host_ids = random.permutation(shape[0]), random.permutation(9)[: shape[0]]
    swap_cache_per_layer(cache, host, device_ids, host_ids, Direction.D2H)
    assert np.array_equal(raw(host)[host_ids], before[device_ids])
    elsewhere = random.permutation(shape[0])
    swap_cache_per_layer(cache, host, elsewhere, host_ids, "h2d")
    assert np.array_equal(raw(cache)[elsewhere], before[device_ids])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_swap_moves_exactly_the_given_blocks(data):
    num, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 99))
    direction = data.draw(st.sampled_from(list(Direction)))
    cache = torch.randint(0, 256, (num, size), dtype=torch.uint8)
    host = torch.randint(0, 256, (num + 3, size), dtype=torch.uint8)
    count = data.draw(st.integers(0, num))
    start = data.draw(st.integers(0, num - count))
    ids = np.arange(start, start + count)
    kind = data.draw(st.sampled_from(["run", "reversed", "shuffled"]))
    order = {"run": ids, "reversed": ids[::-1], "shuffled": np.random.default_rng(num).permutation(ids)}[kind]
    expected = [cache.numpy().copy(), host.numpy().copy()]
    if direction is Direction.D2H:
        expected[1][order + 3] = expected[0][order]
    else:
        expected[0][order] = expected[1][order + 3]
    result = swap_cache_per_layer(cache, host, order.tolist(), (order + 3).tolist(), direction)
    assert np.array_equal(cache.numpy(), expected[0])
    assert np.array_equal(host.numpy(), expected[1])
    assert result.num_calls == count
    assert result.num_entries == (1 if count else 0)  # adjacent blocks are merged into one copy


def test_swap_all_layers_uses_one_batch(device):
    caches = [random_blocks((6, 2, 4), torch.float16, device) for _ in range(5)]
    hosts = [random_blocks((6, 2, 4), torch.float16, CPU) for _ in range(5)]
    expected = [raw(each)[[4, 0]] for each in caches]
    result = swap_cache_all_layers(caches, hosts, [4, 0], [1, 5], "d2h")
    assert result.num_calls == 10
    for host, blocks in zip(hosts, expected, strict=True):
        assert np.array_equal(raw(host)[[1, 5]], blocks)


@given(group=groups())
@settings(max_examples=30, deadline=None)
def test_swap_copies_between_cache_and_view_of_host_memory(group):
    host = ready_host(group, 5, CPU, piece_bytes=group.slot_bytes * 2)
    expected = host_bytes(host)
    layer, spec, span = list(group.tensors())[-1]
    cache = torch.zeros(4, spec.nbytes, dtype=torch.uint8)
    swap_cache_per_layer(cache, host.block_view(layer, spec.name), [3, 0, 1], [1, 2, 3], "h2d")
    part = expected[:, span.offset : span.offset + span.nbytes]
    assert np.array_equal(cache.numpy()[[3, 0, 1]], part[[1, 2, 3]])
    cache.fill_(7)
    swap_cache_per_layer(cache, host.block_view(layer, spec.name), [2], [4], "d2h")
    expected[4, span.offset : span.offset + span.nbytes] = 7
    assert np.array_equal(host_bytes(host), expected)


def test_swap_of_a_buffer_uses_block_size_of_the_other_side():
    host = Buffer(40, "u8")
    host.numpy()[:] = np.arange(40)
    cache = torch.zeros(4, 10, dtype=torch.uint8)
    swap_cache_per_layer(cache, host, [0], [3], "h2d")
    assert cache[0].tolist() == list(range(30, 40))
    swap_cache_per_layer(host, cache, [1], [0], "h2d")  # the Buffer is on the device side
    assert host.tolist()[10:20] == list(range(30, 40))


def test_swap_async_runs_in_stream_order_without_blocking():
    cache, host = torch.ones(2, 4, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    with new_stream() as stream:
        with held_back(stream):
            swap_cache_per_layer_async(cache, host, [0], [1], "d2h", stream=stream)
            assert host.sum() == 0
        stream.synchronize()
        assert host[1].tolist() == [1] * 4
        with context(stream=stream), held_back(stream):
            swap_cache_per_layer_async(cache, host, [0], [0], "d2h")
            assert host[0].sum() == 0
        stream.synchronize()
        assert host[0].tolist() == [1] * 4


def test_swap_waits_for_its_copies_on_the_stream():
    cache, host = torch.ones(2, 4, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    gate = threading.Event()
    with new_stream() as stream:
        stream.enqueue(gate.wait)
        swap = run_in_thread(lambda: swap_cache_per_layer(cache, host, [0], [1], "d2h", stream=stream))
        opener = run_in_thread(gate.set)
        assert swap.result(60).num_calls == 1
        assert host[1].tolist() == [1] * 4
        opener.result(60)


BAD = {
    "device id too large": (([4], [0], "d2h"), RangeError, r"device_ids\[0\] is 4, outside 0..3"),
    "host id negative": (([0, 1], [0, -1], "d2h"), RangeError, r"host_ids\[1\] is -1, outside 0..5"),
    "unequal lengths": (([0, 1], [0], "h2d"), ArgumentError, "2 and 1"),
    "host block twice": (([0, 1], [3, 3], "d2h"), ArgumentError, "block 3 occurs twice in host_ids"),
    "device block twice": (([2, 2], [0, 1], "h2d"), ArgumentError, "block 2 occurs twice in device_ids"),
    "no such direction": (([0], [0], "sideways"), ArgumentError, "d2h"),
    "not whole numbers": (([0.5], [0], "d2h"), ArgumentError, "whole numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_swap_with_invalid_arguments_raises_before_any_copy(name):
    arguments, kind, message = BAD[name]
    cache, host = torch.ones(4, 8, dtype=torch.uint8), torch.zeros(6, 8, dtype=torch.uint8)
    with pytest.raises(kind, match=message):
        swap_cache_per_layer(cache, host, *arguments)
    assert int(host.sum()) == 0
    assert int(cache.sum()) == 32


def test_swap_can_copy_one_source_to_two_destinations():
    cache, host = torch.tensor([[5], [6]], dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)
    swap_cache_per_layer(cache, host, [1, 1], [0, 2], "d2h")
    assert host.flatten().tolist() == [6, 0, 6]


def test_swap_of_mismatched_or_scattered_blocks_raises():
    cache = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="cache has 8 bytes, but a block of the host memory has 9"):
        swap_cache_per_layer(cache, torch.zeros(4, 9, dtype=torch.uint8), [0], [0], "d2h")
    with pytest.raises(ArgumentError, match="contiguous"):
        swap_cache_per_layer(torch.zeros(4, 8, 2)[:, :, 0], cache, [0], [0], "d2h")
    with pytest.raises(ArgumentError, match="overlap"):
        swap_cache_per_layer(torch.zeros(1, 8).expand(4, 8), cache, [0], [0], "d2h")
    with pytest.raises(ArgumentError, match="1 and 2"):
        swap_cache_all_layers([cache], [cache, cache], [0], [0], "d2h")


def test_swap_with_host_slot_out_of_range_raises():
    from kvtier.layout import CacheGroup

    group = CacheGroup.mla("main", 1, 64, "u8", 64)
    host = HostMemory(group, 4, background=False)
    cache = torch.zeros(4, group.block_bytes, dtype=torch.uint8)
    with pytest.raises(RangeError, match=r"outside 0..3"):
        swap_cache_per_layer(cache, host.block_view(), [0], [4], "d2h")
