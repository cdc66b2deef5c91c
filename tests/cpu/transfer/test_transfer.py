"""TransferManager: transfers of any layout are exact, also during other transfers, and failed blocks are reported."""

import gc
import random
import threading
import weakref
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import (
    ArgumentError,
    CancelledTransferError,
    ClosedError,
    CopyError,
    LayerSwapTimeoutError,
    RangeError,
    StateError,
    TransferError,
    TransferTimeoutError,
)
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, Event, Placement
from kvtier.memory.copy_paths import run_path
from kvtier.transfer import (
    DeviceCache,
    GrowthState,
    HostMemory,
    LayerDoneCounter,
    TransferConfig,
    TransferManager,
    TransferStatus,
    block_checksums,
)
from support import held_back, new_stream
from transfer_support import (
    FORMS,
    arrival_ms,
    device_bytes,
    filled_cache,
    groups,
    host_bytes,
    in_flight_bytes,
    layout_of,
    num_layers_done,
    ready_host,
)

DEVICES = [CPU, *([Placement("cuda", 0)] if torch.cuda.is_available() else [])]
STRATEGIES = [None, "direct", "kernel", "staged"]  # on the CPU, all of them copy directly
SMALL = CacheGroup.attention("main", 4, 2, 8, "bf16", 4)


@pytest.fixture(params=DEVICES, ids=str, scope="session")
def device(request):
    return request.param


def managed(group, device, *, form="layer-first", num_blocks=12, num_slots=17, seed=0, config=None, **options):
    """Return the manager of one group, its device tensors and its host memory. All memory has random bytes."""
    manager = TransferManager(layout_of(group), device, config, **options)
    cache, views = filled_cache(group, num_blocks, form, device, seed)
    host = ready_host(group, num_slots, device, seed, piece_bytes=group.slot_bytes * 5)
    manager.register(cache, host)
    return manager, views, host


# ---- bytes ----


@given(data=st.data(), group=groups(), form=st.sampled_from(FORMS), strategy=st.sampled_from(STRATEGIES))
@settings(max_examples=120, deadline=None)
def test_transfer_round_trip_is_exact_for_every_tensor(device, data, group, form, strategy):
    config = TransferConfig(
        slice_bytes=data.draw(st.sampled_from([1, 3 * group.block_bytes, 1 << 30])),
        max_in_flight_bytes=data.draw(st.sampled_from([1, 1 << 30])),
        chunk_bytes=data.draw(st.sampled_from([group.block_bytes + 256, 1 << 20])),
        group_piece_bytes=data.draw(st.sampled_from([1, 1 << 20])),
    )
    seed = data.draw(st.integers(0, 1 << 20))
    manager, views, host = managed(group, device, form=form, config=config, seed=seed)
    chosen, count = np.random.default_rng(seed), data.draw(st.integers(0, 12))
    out, slots, back = chosen.permutation(12)[:count], chosen.permutation(17)[:count], chosen.permutation(12)[:count]
    on_device, on_host = device_bytes(group, views), host_bytes(host)
    urgent = data.draw(st.booleans())
    with manager:
        report = manager.save(out, slots, urgent=urgent, strategy=strategy).wait(60)
        on_host[slots] = on_device[out]
        assert (report.status, report.failures, report.nbytes) == (TransferStatus.DONE, (), count * group.block_bytes)
        assert report.moved == tuple(zip(out.tolist(), slots.tolist(), strict=True))
        assert np.array_equal(host_bytes(host), on_host)
        load = manager.load(back, slots, urgent=not urgent, layer_wise=data.draw(st.booleans()), strategy=strategy)
        assert load.wait(60).status is TransferStatus.DONE
        on_device[back] = on_host[slots]
        assert np.array_equal(device_bytes(group, views), on_device)
        assert np.array_equal(host_bytes(host), on_host)


@pytest.mark.parametrize("form", FORMS)
def test_transfer_of_some_layers_keeps_the_other_layers(device, form):
    manager, views, host = managed(SMALL, device, form=form)
    expected, span = host_bytes(host), SMALL.span(range(1, 3))
    part = slice(span.offset, span.offset + span.nbytes)
    expected[[7, 2], part] = device_bytes(SMALL, views)[[3, 4], part]
    with manager:
        manager.submit(manager.compile("d2h", [3, 4], [7, 2], layers=range(1, 3))).wait(60)
        assert np.array_equal(host_bytes(host), expected)
        with pytest.raises(RangeError, match="4"):
            manager.compile("d2h", [3], [7], layers=range(2, 5))


def test_groups_have_separate_caches_and_slots(device):
    window = CacheGroup.mla("window", 2, 32, "f16", 4)
    manager = TransferManager(layout_of(SMALL, window), device)
    sides = {}
    for group in (SMALL, window):
        cache, views = filled_cache(group, 6, "block-first", device, 1)
        sides[group.name] = (group, views, ready_host(group, 9, device, 2))
        manager.register(cache, sides[group.name][2])
    with manager:
        for name, (group, views, host) in sides.items():
            expected = host_bytes(host)
            expected[[8, 1]] = device_bytes(group, views)[[0, 5]]
            manager.save([0, 5], [8, 1], group=name).wait(60)
            assert np.array_equal(host_bytes(host), expected)


def test_compiled_transfer_can_run_again(device):
    manager, views, host = managed(SMALL, device)
    with manager:
        compiled = manager.compile("d2h", [1, 2], [3, 4])
        for value in (5, 6):
            for view in views.values():
                view.fill_(value)
            assert manager.submit(compiled).wait(60).num_copies == compiled.num_copies
            assert set(host_bytes(host)[[3, 4]].flatten().tolist()) == {value}


def test_adjacent_blocks_in_a_piece_of_slots_are_one_copy(device):
    group = CacheGroup.mla("main", 2, 128, "u8", 16)  # a block has 4,096 bytes, so a slot has no padding
    manager, _, _ = managed(group, device, form="block-first", num_blocks=17)
    with manager:
        assert manager.save(range(17), range(17)).wait(60).num_copies == 4  # one copy per piece of 5 slots
        assert manager.save(range(4, -1, -1), range(4, -1, -1)).wait(60).num_copies == 1
        assert manager.save([0, 2, 4], [0, 2, 4]).wait(60).num_copies == 3


# ---- traffic ----


class FaultyMover:
    """A mover that raises with probability `share`, and in every call that touches an address in `broken`."""

    def __init__(self, share=0.0, seed=0):
        self.broken, self._share, self._random, self._lock = [], share, random.Random(seed), threading.Lock()

    def __call__(self, path, job, pieces):
        with self._lock:
            unlucky = self._random.random() < self._share
        if unlucky or any(
            ((pieces.table[row] <= at) & (at < pieces.table[row] + pieces.table[2])).any()
            for at in self.broken
            for row in (0, 1)
        ):
            raise CopyError("the copy failed, injected by the test")
        return run_path(path, job, pieces)


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("form", FORMS)
def test_concurrent_saves_and_loads_keep_every_byte(device, form, share):
    """Each thread moves known bytes between its own blocks and slots. Failures affect only the reported blocks."""
    mover = FaultyMover(share)
    config = TransferConfig(slice_bytes=2 * SMALL.block_bytes, max_in_flight_bytes=4 * SMALL.block_bytes)
    manager, views, host = managed(
        SMALL, device, form=form, num_blocks=24, num_slots=24, config=config, mover=mover, seed=3
    )
    expected = device_bytes(SMALL, views)
    errors, num_failed = [], [0]

    def work(number):
        try:
            own, rng = np.arange(number * 6, number * 6 + 6), np.random.default_rng(number)
            for turn in range(12):
                slots, urgent = rng.permutation(own), bool(rng.integers(2))
                saved = manager.save(own, slots, urgent=urgent).wait(60)
                assert {pair[0] for pair in saved.moved} | {each.device_id for each in saved.failures} == {*own}
                for block, slot in saved.moved:
                    assert np.array_equal(host.block(slot).numpy(), expected[block])
                if not saved.moved:
                    continue
                blocks, kept = zip(*saved.moved, strict=True)
                loaded = manager.load(blocks, kept, urgent=not urgent, layer_wise=turn % 2 == 0).wait(60)
                num_failed[0] += len(saved.failures) + len(loaded.failures)
                for failure in loaded.failures:  # the bytes of the block are undefined until a load succeeds
                    while manager.load([failure.device_id], [failure.host_id]).wait(60).failures:
                        num_failed[0] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert np.array_equal(device_bytes(SMALL, views), expected)
    assert (num_failed[0] > 0) == (share > 0)
    manager.close()


def test_failed_copy_is_reported_only_for_its_slice(device):
    mover = FaultyMover()
    config = TransferConfig(slice_bytes=2 * SMALL.block_bytes)
    manager, views, host = managed(SMALL, device, form="block-first", mover=mover, config=config)
    before, source = host_bytes(host), device_bytes(SMALL, views)
    mover.broken = [host.block(4).data()]
    with manager:
        broken = manager.save(range(8), range(8))
        fine = manager.save([9], [9])
        report = broken.wait(60)
        assert report.status is TransferStatus.FAILED
        assert {each.host_id for each in report.failures} == {4, 5}  # both blocks of the slice
        assert {slot for _, slot in report.moved} == {0, 1, 2, 3, 6, 7}
        assert all("injected" in str(each.error) for each in report.failures)
        assert fine.wait(60).status is TransferStatus.DONE
        expected = before.copy()
        expected[[0, 1, 2, 3, 6, 7, 9]] = source[[0, 1, 2, 3, 6, 7, 9]]
        assert np.array_equal(host_bytes(host)[[0, 1, 2, 3, 6, 7, 9, 10]], expected[[0, 1, 2, 3, 6, 7, 9, 10]])
        assert {each.id for each in manager.poll()} <= {broken.id, fine.id}


def test_save_after_failed_compute_fails_but_next_save_works():
    manager, _, _ = managed(SMALL, CPU)
    with manager, new_stream() as compute:
        compute.enqueue(lambda: int("not a number"))
        report = manager.save([1, 2], [3, 4], after=compute.record()).wait(60)
        assert report.status is TransferStatus.FAILED
        assert [each.host_id for each in report.failures] == [3, 4]
        assert isinstance(report.failures[0].error, ValueError)
        assert manager.save([1], [3], after=Event()).wait(60).status is TransferStatus.DONE


# ---- order ----


def test_save_waits_for_the_compute_event():
    manager, views, host = managed(SMALL, CPU)
    with manager, new_stream() as compute:
        with held_back(compute):
            compute.enqueue(lambda: [view.fill_(9) for view in views.values()])
            save = manager.save([1], [2], after=compute.record())
            with pytest.raises(TransferTimeoutError, match="still"):
                save.wait(0)
            assert manager.poll() == []
        assert save.wait(60).status is TransferStatus.DONE
        assert set(host.block(2).tolist()) == {9}


def test_urgent_load_overtakes_bulk_transfers():
    gate = threading.Event()

    def mover(path, job, pieces):
        if pieces.table.shape[1] == 1:  # a slice of a bulk transfer, which has one block here
            gate.wait(60)
        return run_path(path, job, pieces)

    config = TransferConfig(slice_bytes=SMALL.block_bytes, max_in_flight_bytes=SMALL.block_bytes)
    manager, _, _ = managed(SMALL, CPU, form="block-first", config=config, mover=mover)
    with manager:
        bulk, save = manager.load(range(10), range(10), urgent=False), manager.save(range(10), range(10))
        assert manager.load([10, 11], [11, 13]).wait(60).status is TransferStatus.DONE
        assert bulk.report is save.report is None
        gate.set()
        assert bulk.wait(60).status is save.wait(60).status is TransferStatus.DONE


def test_urgent_load_beyond_the_limit_is_queued():
    gate = threading.Event()

    def mover(path, job, pieces):
        gate.wait(60)
        return run_path(path, job, pieces)

    size = SMALL.block_bytes
    config = TransferConfig(slice_bytes=size, max_in_flight_bytes=3 * size, max_urgent_bytes=2 * size)
    manager, _, _ = managed(SMALL, CPU, form="block-first", config=config, mover=mover)
    with manager:
        bulk = manager.save(range(12), range(12))
        first, second = manager.load([0], [13]), manager.load([1, 2], [14, 15])
        assert in_flight_bytes(manager, "h2d", urgent=True) == size  # both loads together exceed the limit
        assert second.status is TransferStatus.QUEUED
        assert in_flight_bytes(manager, "d2h", urgent=False) <= 3 * size
        gate.set()
        assert {each.wait(60).status for each in (bulk, first, second)} == {TransferStatus.DONE}
        assert in_flight_bytes(manager, "d2h", urgent=False) == 0


# ---- completion ----


def blocked_manager(**options):
    """Return (gate, manager, tensors, host memory) on the CPU. The copies of the manager wait for the gate."""
    gate = threading.Event()

    def mover(path, job, pieces):
        gate.wait(60)
        return run_path(path, job, pieces)

    config = TransferConfig(slice_bytes=SMALL.block_bytes, max_in_flight_bytes=2 * SMALL.block_bytes)
    manager, views, host = managed(SMALL, CPU, form="block-first", config=config, mover=mover, **options)
    return gate, manager, views, host


def wait_for_slices(transfer, count):
    """Wait until `count` slices of a queued transfer are in flight."""
    with transfer._changed:
        assert transfer._changed.wait_for(lambda: len(transfer._ends) >= count, 60)


def test_cancel_drops_queued_slices_but_not_submitted_slices():
    gate, manager, views, host = blocked_manager()
    before, source = host_bytes(host), device_bytes(SMALL, views)
    with manager:
        save = manager.save(range(8), range(8))
        wait_for_slices(save, 2)
        assert save.cancel()
        assert save.report is None  # two slices are in flight and can still write
        gate.set()
        report = save.wait(60)
        assert report.status is TransferStatus.CANCELLED
        assert report.moved == ((0, 0), (1, 1))
        assert [each.host_id for each in report.failures] == [2, 3, 4, 5, 6, 7]
        assert all(isinstance(each.error, CancelledTransferError) for each in report.failures)
        assert not save.cancel()
        before[[0, 1]] = source[[0, 1]]
        assert np.array_equal(host_bytes(host), before)


def test_late_transfer_reports_blocks_that_were_not_moved():
    gate, manager, _, _ = blocked_manager()
    with manager:
        ahead = manager.save(range(4), range(4))
        wait_for_slices(ahead, 2)
        late = manager.save([5, 6], [5, 6], timeout=0.0)
        report = late.wait(60)
        assert (report.status, report.moved) == (TransferStatus.LATE, ())
        assert [each.host_id for each in report.failures] == [5, 6]
        assert isinstance(report.failures[0].error, TransferTimeoutError)
        gate.set()
        assert ahead.wait(60).status is TransferStatus.DONE


def test_poll_reports_each_transfer_once(device):
    manager, _, _ = managed(SMALL, device)
    with manager:
        ids = {manager.save([k], [k]).id for k in range(5)}
        manager.wait_all(60)
        assert {report.id for report in manager.poll()} == ids
        assert manager.poll() == []
        assert len(manager._live) == 0


def test_poll_only_urgent_keeps_bulk_reports_for_later(device):
    manager, _, _ = managed(SMALL, device)
    with manager:
        save, load = manager.save([0, 1], [0, 1]), manager.load([2, 3], [2, 3])
        manager.wait_all(60)
        assert [report.id for report in manager.poll(only_urgent=True)] == [load.id]
        assert [report.id for report in manager.poll(only_urgent=True)] == []
        assert [report.id for report in manager.poll()] == [save.id]


def test_transfers_waited_for_are_forgotten_without_poll(device):
    manager, _, _ = managed(SMALL, device)
    with manager:
        for _ in range(20):
            manager.save([1], [1]).wait(60)
        assert len(manager._live) <= 1


def test_empty_load_has_all_layers_done(device):
    manager, _, _ = managed(SMALL, device)
    with manager:
        load = manager.load([], [], layer_wise=True)
        load.layers.wait_all()
        assert num_layers_done(load) == 4
        assert arrival_ms(load, 3) == 0
        assert load.wait(60).moved == ()


def test_close_cancels_queued_and_refuses_new_transfers():
    gate, manager, _, _ = blocked_manager()
    save = manager.save(range(8), range(8))
    wait_for_slices(save, 2)
    gate.set()
    manager.close()
    manager.close()
    assert save.wait(60).status in (TransferStatus.CANCELLED, TransferStatus.DONE)
    with pytest.raises((ClosedError, StateError)):
        manager.save([0], [0])


# ---- register and release ----


def test_manager_release_drops_tensors_and_keeps_host_blocks(device):
    manager, views, host = managed(SMALL, device, form="layer-first")
    with manager:
        manager.save([0, 1], [3, 4]).wait(60)
        compiled = manager.compile("h2d", [0], [3])
        kept = host_bytes(host)
        seen = [weakref.ref(view) for view in views.values()]
        manager.release()  # an engine that goes to sleep calls this
        views.clear()
        gc.collect()
        assert [each() for each in seen] == [None] * len(seen)
        with pytest.raises(ClosedError, match="released"):
            manager.submit(compiled)
        with pytest.raises(StateError, match="no cache"):
            manager.save([0], [0])
        cache, views = filled_cache(SMALL, 6, "block-first", device, 7)  # the engine wakes with another cache layout
        manager.register(cache, host)
        manager.load([5, 2], [3, 4]).wait(60)
        assert np.array_equal(device_bytes(SMALL, views)[[5, 2]], kept[[3, 4]])
        assert np.array_equal(host_bytes(host), kept)


def test_registering_a_second_or_mismatched_cache_raises():
    manager, _, host = managed(SMALL, CPU)
    cache, _ = filled_cache(SMALL, 3, "layer-first", CPU, 0)
    other = CacheGroup.attention("main", 5, 2, 8, "bf16", 4)
    with manager:
        with pytest.raises(StateError, match="release"):
            manager.register(cache, host)
        manager.release()
        with pytest.raises(ArgumentError, match="another layout"):
            manager.register(cache, ready_host(other, 2, CPU))
        with pytest.raises(ArgumentError, match="no cache group"):
            manager.compile("d2h", [0], [0], group="draft")


def test_device_cache_of_mismatched_tensors_raises():
    key = torch.zeros(4, SMALL.layers[0].tensors[0].nbytes, dtype=torch.uint8)
    layers = [{"key": key, "value": key.clone()} for _ in range(4)]
    DeviceCache.layer_first(SMALL, layers)
    with pytest.raises(ArgumentError, match="4 layers, and 3 were given"):
        DeviceCache.layer_first(SMALL, layers[:3])
    with pytest.raises(ArgumentError, match=r"mismatch is layer 2, which needs \['key', 'value'\], got \['key'\]"):
        DeviceCache.layer_first(SMALL, [*layers[:2], {"key": key}, layers[3]])
    with pytest.raises(ArgumentError, match="64 bytes per block, but group 'main' needs 128"):
        DeviceCache.layer_first(SMALL, [*layers[:3], {"key": key[:, :64], "value": key}])
    with pytest.raises(ArgumentError, match="the same number of blocks"):
        DeviceCache.layer_first(SMALL, [*layers[:3], {"key": key[:3], "value": key}])
    with pytest.raises(ArgumentError, match="has 128 bytes"):
        DeviceCache.block_first(SMALL, key)


def test_block_first_cache_has_one_segment_per_block():
    tensor = torch.zeros(5, 4, 2, 4, 2, 8, dtype=torch.bfloat16)
    cache = DeviceCache.block_first(SMALL, tensor)
    assert len(cache.part(range(4))) == 1
    assert len(cache.part(range(1, 3))) == 1
    views = [{"key": tensor[:, layer, 0], "value": tensor[:, layer, 1]} for layer in range(4)]
    assert len(DeviceCache.layer_first(SMALL, views).part(range(4))) == 1  # adjacent parts are joined


def test_registering_a_cache_inside_host_memory_raises():
    host = HostMemory(SMALL, 8, background=False)
    whole = host._memory.tensor.view(8, SMALL.slot_bytes)[:, : SMALL.block_bytes]
    with TransferManager(layout_of(SMALL), CPU) as manager, pytest.raises(ArgumentError, match="overlap in memory"):
        manager.register(DeviceCache.block_first(SMALL, whole), host)


def test_host_memory_free_waits_for_running_copies():
    gate, manager, _, host = blocked_manager()
    save = manager.save([1], [2], urgent=True)
    freed = threading.Thread(target=host.free)
    freed.start()
    assert save.report is None
    gate.set()
    freed.join(60)
    assert save.wait(60).status is TransferStatus.DONE
    with pytest.raises(ClosedError, match="freed"):
        manager.save([1], [2])
    manager.close()


def test_queued_save_completes_after_host_memory_free():
    gate, manager, views, host = blocked_manager()
    slots = host.slots()
    expected = device_bytes(SMALL, views)[:8]
    with manager:
        save = manager.save(range(8), range(8))
        wait_for_slices(save, 2)  # the other six slices are queued, and their copy tables are not built yet
        freed = threading.Thread(target=host.free)
        freed.start()
        with host._changed:
            assert host._changed.wait_for(lambda: host.growth is GrowthState.FREED, 60)
        keep = save._keep[-1]  # keeps the memory alive for the comparison below
        gate.set()
        assert save.wait(60).status is TransferStatus.DONE
        assert np.array_equal(slots[:8, : SMALL.block_bytes].numpy(), expected)
        freed.join(60)
        del keep


# ---- layers ----


def test_layers_arrive_in_groups_and_in_order(device):
    config = TransferConfig(group_piece_bytes=1 << 30, min_layer_groups=2)
    manager, views, host = managed(SMALL, device, config=config)
    with manager:
        load = manager.load([1, 2], [3, 4], layer_wise=True)
        assert load.layers.groups == (range(2), range(2, 4))
        load.layers.wait(3, timeout=60)
        assert num_layers_done(load) == 4
        assert 0 <= arrival_ms(load, 0) <= arrival_ms(load, 3)
        assert np.array_equal(device_bytes(SMALL, views)[[1, 2]], host_bytes(host)[[3, 4]])
        with pytest.raises(RangeError, match="layer 4"):
            load.layers.wait(4)


def test_compute_on_a_stream_starts_when_its_layer_arrives():
    gates = [threading.Event(), threading.Event()]
    calls = iter(range(9))

    def mover(path, job, pieces):
        gates[next(calls)].wait(60)
        return run_path(path, job, pieces)

    config = TransferConfig(group_piece_bytes=1 << 30, min_layer_groups=2)
    manager, views, host = managed(SMALL, CPU, config=config, mover=mover)
    expected, seen = host_bytes(host)[5], {}
    with manager, new_stream() as compute:
        load = manager.load([2], [5], layer_wise=True)
        for layer in range(4):
            load.layers.wait(layer, compute)  # returns immediately
            compute.enqueue(lambda layer=layer: seen.update({layer: views[layer, "key"][2].numpy().copy()}))
        assert not seen
        gates[0].set()
        load.layers.wait(1, timeout=60)
        assert (load.layers.is_done(0), load.layers.is_done(2), num_layers_done(load)) == (True, False, 2)
        with pytest.raises(LayerSwapTimeoutError, match="layer 2"):
            load.layers.wait(2, timeout=0)
        gates[1].set()
        compute.synchronize()
        for layer in range(4):
            span = SMALL.tensor_span(layer, "key")
            assert np.array_equal(seen[layer], expected[span.offset : span.offset + span.nbytes])


def test_failed_layer_raises_in_host_wait():
    mover = FaultyMover()
    config = TransferConfig(group_piece_bytes=1 << 30, min_layer_groups=2)
    manager, views, _ = managed(SMALL, CPU, mover=mover, config=config)
    mover.broken = [views[2, "key"][1].data_ptr()]
    with manager, new_stream() as compute:
        load = manager.load([1], [1], layer_wise=True)
        load.layers.wait(0, timeout=60)
        with pytest.raises(TransferError, match="layer 3 did not arrive"):
            load.layers.wait(3, timeout=60)
        load.layers.wait(3, compute)  # the stream continues, and the report names the failed block
        compute.synchronize()
        assert num_layers_done(load) == 2
        report = load.wait(60)
        assert [each.device_id for each in report.failures] == [1]


def test_wait_for_a_layer_of_a_cancelled_load_raises():
    gate, manager, _, _ = blocked_manager()
    with manager:
        ahead = manager.load(range(4), range(4), urgent=False)
        wait_for_slices(ahead, 2)
        queued = manager.load([5], [5], urgent=False, layer_wise=True)
        with pytest.raises(LayerSwapTimeoutError, match="not been submitted"):
            queued.layers.wait(0, timeout=0)
        queued.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            queued.layers.wait(0, timeout=60)
        gate.set()


def test_layer_swap_timeout_error_is_a_timeout_error():
    counter = LayerDoneCounter([range(2)])
    for kind in (LayerSwapTimeoutError, TransferTimeoutError, TimeoutError):
        with pytest.raises(kind):
            counter.wait(0, timeout=0)


# ---- checksums ----


def test_block_checksums_equal_crc32(device):
    manager, views, host = managed(SMALL, device)
    with manager:
        manager.save([3, 1], [0, 9]).wait(60)
        source = device_bytes(SMALL, views)
        expected = {0: zlib.crc32(source[3].tobytes()), 9: zlib.crc32(source[1].tobytes())}
        assert block_checksums(host, [0, 9]) == expected
        host.block(9)[5] = (host.block(9).at(5) + 1) % 256
        assert block_checksums(host, [0, 9])[9] != expected[9]


def test_block_checksums_without_compiler_equal_native_checksums(monkeypatch):
    from kvtier.native_code import Native

    host = ready_host(SMALL, 4, CPU)
    fast = block_checksums(host, [3, 0], threads=2)
    monkeypatch.setattr("kvtier.transfer.host_memory.native", lambda: Native(None, "a test"))
    assert block_checksums(host, [3, 0]) == fast


# ---- devices ----


def test_transfer_keeps_the_current_cuda_device(device):
    manager, views, host = managed(SMALL, device, form="layer-first")
    before = torch.cuda.current_device() if device.is_device else None
    expected = host_bytes(host)
    expected[[1, 2, 3]] = device_bytes(SMALL, views)[[1, 2, 3]]
    reports = []

    def work():
        reports.append(manager.save([1, 2, 3], [1, 2, 3], urgent=True).wait(60))

    with manager:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert reports[0].status is TransferStatus.DONE
        assert np.array_equal(host_bytes(host), expected)
        assert before is None or torch.cuda.current_device() == before
        for lane in manager._lanes.values():
            assert {stream.placement for stream in lane._streams.values()} == {device}
