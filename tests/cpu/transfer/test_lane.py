"""Lanes: the order of transfers, the bytes in flight, threads, and closing."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ClosedError, StateError, TransferTimeoutError
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, context
from kvtier.transfer import GrowthState, TransferManager, TransferStatus
from support import held_back, new_stream
from transfer_support import (
    SMALL,
    arrival_ms,
    device_bytes,
    filled_cache,
    host_bytes,
    in_flight_bytes,
    layout_of,
    num_layers_done,
    ready_host,
    run_in_thread,
    stepped,
)

SIZE = SMALL.block_bytes


def lane_threads():
    return {each for each in threading.enumerate() if each.name in ("kvtier-d2h", "kvtier-h2d")}


def wait_for_status(transfer, status):
    """Wait until a transfer has this status."""
    with transfer._changed:
        assert transfer._changed.wait_for(lambda: transfer.status is status, 60)


# ---- order ----


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=6), st.sampled_from(["h2d", "d2h"]))
@settings(max_examples=25, deadline=None)
def test_lane_runs_urgent_transfers_before_bulk_transfers(requests, direction):
    manager, mover, _ = stepped(max_urgent_bytes=3 * SIZE)
    with manager:
        submitted, at = [], 2
        first = manager.submit(manager.compile(direction, [0, 1], [0, 1], urgent=True), urgent=True)
        for urgent, count in requests:
            blocks = list(range(at, at + count))
            compiled = manager.compile(direction, blocks, blocks, urgent=urgent)
            submitted.append((urgent, blocks, manager.submit(compiled, urgent=urgent, timeout=3600)))
            at += count
            assert in_flight_bytes(manager, direction, urgent=True) <= 3 * SIZE
            assert in_flight_bytes(manager, direction, urgent=False) == 0
        mover.open()
        assert {each.wait(60).status for _, _, each in submitted} == {first.wait(60).status} == {TransferStatus.DONE}
    urgents = [blocks for urgent, blocks, _ in submitted if urgent]
    bulk = [[block] for urgent, blocks, _ in submitted if not urgent for block in blocks]
    assert mover.slots == [[0, 1], *urgents, *bulk]
    assert {str(job) for job in mover.jobs} == {"cpu to cpu"}


def test_bulk_bytes_in_flight_reach_but_never_exceed_the_limit():
    manager, mover, _ = stepped(max_in_flight_bytes=3 * SIZE)
    with manager:
        save = manager.save(range(9), range(9))
        for moved in range(7):
            with save._changed:
                assert save._changed.wait_for(lambda moved=moved: len(save._ends) >= moved + 3, 60)
            assert len(save._ends) == moved + 3
            assert in_flight_bytes(manager, "d2h", urgent=False) == 3 * SIZE
            mover.permits.release()
            save._ends[moved].synchronize(60)
        mover.open()
        assert save.wait(60).moved == tuple((block, block) for block in range(9))


@pytest.mark.parametrize(("urgent", "count"), [(False, 2), (True, 5)])
def test_transfer_within_limits_starts_no_thread(urgent, count):
    before = lane_threads()
    manager, mover, _ = stepped(max_urgent_bytes=5 * SIZE)
    with manager:
        save = manager.save(range(count), range(count), urgent=urgent)
        assert save.status is TransferStatus.RUNNING
        assert in_flight_bytes(manager, "d2h", urgent=urgent) == count * SIZE
        assert lane_threads() == before
        mover.open()
        assert save.wait(60).status is save.status is TransferStatus.DONE


def test_urgent_transfers_are_not_split_into_slices():
    manager, _, _ = stepped()
    with manager:
        assert [each.nbytes for each in manager.compile("d2h", [1, 2], [3, 4], urgent=True).slices] == [2 * SIZE]
        assert [each.nbytes for each in manager.compile("d2h", [1, 2], [3, 4]).slices] == [SIZE, SIZE]


def test_save_without_event_waits_for_the_current_stream():
    manager, mover, views = stepped()
    mover.open()
    with manager, new_stream() as compute:
        with context(stream=compute), held_back(compute):
            compute.enqueue(lambda: [view.fill_(9) for view in views.values()])
            save = manager.save([1], [2])
        assert save.wait(60).status is TransferStatus.DONE
        assert set(mover.host.block(2).tolist()) == {9}


def test_idle_lane_runs_transfers_queued_later():
    manager, mover, _ = stepped()
    mover.open()
    with manager:
        for first in (0, 6, 12):
            slots = range(first, first + 6)
            assert manager.save(slots, slots).wait(60).status is TransferStatus.DONE
    assert mover.slots == [[slot] for slot in range(18)]


# ---- loads of several slices ----


def test_layers_of_bulk_load_are_done_after_their_last_slice():
    manager, mover, _ = stepped(form="layer-first", min_layer_groups=2, group_piece_bytes=1 << 30)
    with manager:
        compiled = manager.compile("h2d", [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], layer_wise=True)
        assert [each.layer_group for each in compiled.slices] == [0, 0, 0, 1, 1, 1]  # per group: 2, 2 and 1 blocks
        load = manager.submit(compiled)
        for layer in (0, 2):
            mover.permits.release(2)
            with pytest.raises(TransferTimeoutError):
                load.layers.wait(layer, timeout=0.01)
            assert num_layers_done(load) == layer
            mover.permits.release()
            load.layers.wait(layer, timeout=60)
            assert num_layers_done(load) == layer + 2
        report = load.wait(60)
        assert arrival_ms(load, 0) < arrival_ms(load, 3) <= 1e3 * report.seconds


def test_report_is_made_after_every_slice_has_ended():
    manager, mover, _ = stepped()
    with manager:
        save = manager.save([0, 1], [0, 1])
        mover.permits.release()
        save._ends[0].synchronize(60)
        assert (save.report, save.status, manager.poll()) == (None, TransferStatus.RUNNING, [])
        with pytest.raises(TransferTimeoutError, match="still running"):
            save.wait(0.01)
        with pytest.raises(TransferTimeoutError, match="still running"):
            manager.wait_all(0.01)
        waiters = [run_in_thread(each) for each in (save.wait, lambda: save.wait(60), lambda: manager.wait_all(60))]
        mover.open()
        assert waiters[0].result(60) is waiters[1].result(60) is save.report
        waiters[2].result(60)


# ---- closing ----


def test_close_cancels_queued_transfers_and_stops_every_thread():
    before = {*threading.enumerate()}
    manager, mover, _ = stepped()
    with manager:
        save = manager.save(range(6), range(6))
        load = manager.load(range(10, 16), range(10, 16), urgent=False)
        for transfer in (save, load):
            with transfer._changed:
                assert transfer._changed.wait_for(lambda transfer=transfer: len(transfer._ends) == 2, 60)
        assert all(each.daemon for each in lane_threads())
        compiled = manager.compile("d2h", [0], [0])
        closing = run_in_thread(manager.close)
        for transfer in (save, load):
            wait_for_status(transfer, TransferStatus.CANCELLED)
            assert transfer.report is None  # two slices are in flight
        mover.open()
        closing.result(60)
        assert len(save.wait(60).moved) == len(load.wait(60).moved) == 2
    assert compiled.cache.is_released
    with pytest.raises(ClosedError, match="this TransferManager was closed"):
        manager.submit(compiled)
    # the threads of run_in_thread have names such as Thread-1
    assert {each for each in threading.enumerate() if not each.name.startswith("Thread-")} <= before


def test_manager_closes_at_end_of_with_block_or_when_dropped():
    managers = [stepped()[0] for _ in range(2)]
    caches = [manager._caches["main"][0] for manager in managers]
    with managers[0]:
        pass
    assert [each.is_released for each in caches] == [True, False]
    managers.clear()
    assert caches[1].is_released


@pytest.mark.parametrize("action", ["free", "release"])
def test_free_and_release_wait_for_copies_in_flight(action):
    manager, mover, views = stepped()
    order = []
    with manager:
        save = manager.save([1], [2], urgent=True)
        source = device_bytes(SMALL, views)[1]

        def free_or_release():
            (mover.host.free if action == "free" else manager.release)()
            order.append((action, list(mover.slots)))

        slot = mover.host.slots()[2, :SIZE]
        keep = mover.host.keep()  # keeps the memory alive for the comparison below
        freeing = run_in_thread(free_or_release)
        if action == "free":
            with mover.host._changed:
                assert mover.host._changed.wait_for(lambda: mover.host.growth is GrowthState.FREED, 60)
        mover.open()
        freeing.result(60)
        assert order == [(action, [[2]])]
        assert save.wait(60).status is TransferStatus.DONE
        assert (slot.numpy() == source).all()
        del keep


def test_release_of_one_group_keeps_the_other_group():
    window = CacheGroup.mla("window", 2, 32, "f16", 4)
    manager = TransferManager(layout_of(SMALL, window), CPU)
    for group in (SMALL, window):
        manager.register(filled_cache(group, 4, "block-first", CPU, 1)[0], ready_host(group, 4, CPU, 2))
    with manager:
        manager.release("window")
        manager.release("window")
        assert manager.save([0], [1]).wait(60).status is TransferStatus.DONE
        with pytest.raises(StateError, match="no cache is registered for group 'window'"):
            manager.save([0], [1], group="window")


def test_save_on_a_closed_stream_is_reported_as_failed():
    manager, mover, _ = stepped()
    mover.open()
    before = host_bytes(mover.host)
    lane = next(iter(manager._lanes.values()))
    for stream in lane._streams.values():
        stream.close()
    report = manager.save([0, 1], [4, 5]).wait(60)
    assert report.status is TransferStatus.FAILED
    assert [each.host_id for each in report.failures] == [4, 5]
    assert all(isinstance(each.error, ClosedError) for each in report.failures)
    assert (report.nbytes, report.seconds) == (0, 0.0)
    assert (host_bytes(mover.host) == before).all()
    assert mover.jobs == []
    manager.close()
