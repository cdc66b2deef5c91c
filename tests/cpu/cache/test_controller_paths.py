"""CacheController and StoreWorker: freed memory, one result per transfer, waits, and stores that fail or hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from controller_support import KEYS, LAYOUT, Call, Gate, Hangs, Rig, caches_of, draft_of
from kvtier.errors import ClosedError, OutOfMemoryError
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Drop, Plan, Probe, Route, StoreLookup, TransferRequest, slot_bytes
from kvtier.storage import MemoryStore, ObjectResult, ObjectStatus, Results
from kvtier.transfer import HostMemory, TransferConfig
from kvtier.transfer.host_memory import GrowthState
from kvtier.worker.controller import CacheController, layout_of

BLOCK_BYTES = sum(group.block_bytes for group in LAYOUT.groups)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_close_frees_host_memory_and_stops_all_threads():
    before = set(threading.enumerate())
    rig = Rig(stores={"disk": MemoryStore(1 << 20)})
    rig.run(rig.save([0], [0]))
    hosts = rig.controller._hosts
    rig.controller.close()
    assert [host.growth for host in hosts] == [GrowthState.FREED] * 2
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


class FailingClose(MemoryStore):
    def close(self) -> None:
        super().close()
        raise OSError("no space")


def test_close_with_failing_store_closes_others_and_frees_memory():
    other = MemoryStore(1 << 20)
    rig = Rig(stores={"bad": FailingClose(1 << 20), "disk": other})
    hosts = rig.controller._hosts
    with pytest.raises(OSError, match="no space"):
        rig.controller.close()
    assert [host.growth for host in hosts] == [GrowthState.FREED] * 2
    with pytest.raises(ClosedError):
        other.contains(KEYS[:1])


def test_present_is_deprecated():
    rig = Rig()
    with pytest.warns(DeprecationWarning, match="record_event"):
        rig.controller.present()
    rig.controller.close()


def test_close_waits_for_a_running_copy():
    gate = Gate(is_open=False)
    rig = Rig(mover=gate)
    rig.controller.submit(Plan(1, 0, (rig.save([0], [0]),)))
    assert gate.reached.wait(30)
    closing = Call(rig.controller.close)
    closing.must_wait()
    gate.open()
    closing.must_end()


@pytest.mark.parametrize("num_host", [1, 3, 20])
def test_resize_host_frees_old_memory_and_reports_new_slots(rigs, num_host):
    rig = rigs(8, 6)
    (first,) = rig.controller.poll()
    assert (first.epoch, first.num_host_slots) == (0, 6)
    old = rig.controller._hosts
    rig.controller.resize_host(num_host, rig.caches)
    assert [host.growth for host in old] == [GrowthState.FREED] * 2
    with pytest.raises(ClosedError):
        old[0].block(0)
    (report,) = rig.controller.poll()
    assert report.num_host_slots == num_host
    assert rig.controller.poll() == []


def test_poll_reports_a_single_host_slot(rigs):
    rig = rigs(2, 1)
    (report,) = rig.controller.poll()
    assert report.num_host_slots == 1


def test_num_host_ready_is_the_minimum_over_cache_groups(monkeypatch):
    """The memory of the main group grows by two slots at a time.

    The first two slots wait for `may_begin`, and all later slots wait for `may_go`.
    """
    may_begin, may_go, make_present, made = threading.Event(), threading.Event(), HostMemory._make_present, []

    def held(self, offset: int, nbytes: int) -> None:
        if self.group.name == "main":
            assert (may_go if offset else may_begin).wait(60)
        make_present(self, offset, nbytes)

    monkeypatch.setattr(HostMemory, "_make_present", held)
    monkeypatch.setitem(HostMemory.__init__.__kwdefaults__, "piece_bytes", 2 * LAYOUT.groups[0].slot_bytes)
    making = Call(lambda: made.append(Rig(8, 8)))
    making.must_wait()  # the constructor waits for the first slots
    may_begin.set()
    making.must_end()  # the constructor does not wait for the other slots
    controller = made[0].controller
    main, draft = controller._hosts
    assert (draft.wait_ready(), main.num_ready) == (8, 2)
    assert controller.num_host_ready == 2
    (report,) = controller.poll()
    assert report.num_host_slots == 2
    may_go.set()
    assert main.wait_ready() == controller.num_host_ready == 8
    assert [report.num_host_slots for report in controller.poll()] == [8]
    controller.close()


def test_failed_resize_host_frees_new_and_keeps_old_memory(rigs, monkeypatch):
    rig = rigs(8, 6)
    rig.run(rig.save([3], [2]))
    made: list[HostMemory] = []
    make_present = HostMemory._make_present

    def refused(self, offset: int, nbytes: int) -> None:
        if self.num_slots == 100:
            made.append(self)
            raise OutOfMemoryError("the driver cannot pin more memory")
        make_present(self, offset, nbytes)

    monkeypatch.setattr(HostMemory, "_make_present", refused)
    with pytest.raises(OutOfMemoryError):
        rig.controller.resize_host(100, rig.caches)
    assert [memory.growth for memory in made] == [GrowthState.FREED] * 2
    (outcome,) = rig.run(rig.load([2], [7]))
    assert outcome.ok
    assert rig.device(7) == rig.device(3)


def test_resize_host_keeps_scrubbing_remaining_slots(rigs):
    rig = rigs(8, 6)
    scrubber = rig.controller._scrubber
    rig.run(rig.save([0, 1, 2], [1, 3, 4]))
    settle(scrubber)
    rig.controller.resize_host(4, rig.caches)
    assert set(scrubber._sums) == {1, 3}
    rig.controller.resize_host(8, rig.caches)
    assert set(scrubber._sums) == {1, 3}
    rig.fill_host(3, 0xEE)
    settle(scrubber)
    (report,) = rig.controller.poll()
    assert np.frombuffer(report.damaged, "<i4").tolist() == [3]


def settle(scrubber) -> None:
    """Verify every new slot, and then all slots again."""
    while scrubber._new:
        scrubber._verify_some()
    scrubber._verify_some()


@pytest.mark.parametrize("route", [Route.DEVICE_TO_HOST, Route.STORE_TO_HOST])
def test_rewritten_slot_is_not_reported_as_damaged(rigs, route):
    rig = rigs(stores={"disk": MemoryStore(1 << 20)})
    rig.run(rig.save([0, 1], [3, 4]))
    rig.run(rig.store([4], [0]))
    settle(rig.controller._scrubber)
    (outcome,) = rig.run(rig.save([1], [3]) if route is Route.DEVICE_TO_HOST else rig.fetch([0], [3]))
    assert outcome.ok
    assert rig.host(3) == rig.device(1)
    settle(rig.controller._scrubber)
    assert rig.controller.poll() == []
    rig.fill_host(3, 0xEE)
    settle(rig.controller._scrubber)
    (report,) = rig.controller.poll()
    assert np.frombuffer(report.damaged, "<i4").tolist() == [3]


def test_register_with_too_few_tensors_raises(rigs):
    rig = rigs()
    rig.controller.release()
    with pytest.raises(ValueError, match="shorter"):
        rig.controller.register(rig.caches[:1])


def test_draft_groups_are_not_sharded_over_ranks():
    caches = [torch.zeros(4, layers, 2, 2, 4, 2) for layers in (2, 1, 1)]
    layout = layout_of(caches, 2)
    assert [group.name for group in layout.groups] == ["main", "draft-1", "draft-2"]
    sizes = [group.block_bytes for group in layout.groups]
    assert sizes == [cache[0].nbytes for cache in caches]
    assert [group.block_bytes for group in layout.of_rank(4).groups] == [sizes[0] // 4, *sizes[1:]]


# ---- one result per transfer ---------------------------------------------------------------------------------------


def test_each_save_of_a_plan_has_its_own_result(rigs):
    rig = rigs()
    transfers = [rig.save([0], [0]), rig.save([1, 2, 3], [1, 2, 3]), rig.save([4, 5], [4, 5])]
    began = time.perf_counter()
    outcomes = rig.run(*transfers)
    elapsed = time.perf_counter() - began
    assert [outcome.transfer_id for outcome in outcomes] == [transfer.id for transfer in transfers]
    assert [outcome.num_bytes for outcome in outcomes] == [count * BLOCK_BYTES for count in (1, 3, 2)]
    assert all(outcome.ok and 0 <= outcome.seconds <= elapsed for outcome in outcomes)
    assert not rig.controller.is_busy
    assert rig.controller.poll() == []


def test_copy_seconds_are_the_maximum_over_cache_groups(rigs):
    calls = []

    def slow_at_first(*arguments):
        calls.append(1)
        if len(calls) == 1:
            began = time.perf_counter()
            while time.perf_counter() - began < 0.1:
                pass
        return run_path(*arguments)

    rig = rigs(mover=slow_at_first)
    (outcome,) = rig.run(rig.save([0], [0]))
    assert len(calls) == 2  # one copy per cache group
    assert outcome.seconds >= 0.1


def test_copy_failure_fails_only_the_affected_transfers(rigs):
    """Each block is copied separately, and the third copy fails."""
    calls = []

    def breaks_once(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the link is down")
        return run_path(*arguments)

    rig = rigs(mover=breaks_once, config=TransferConfig(slice_bytes=1))
    transfers = [rig.save([0, 1], [4, 5]), rig.save([2, 3], [6, 7])]
    first, second = rig.run(*transfers)
    assert (first.transfer_id, first.ok, first.arrived) == (transfers[0].id, True, b"")
    assert (second.transfer_id, second.ok, second.arrived) == (transfers[1].id, False, b"\0\1")
    assert "the link is down" in second.reason
    assert [rig.host(slot) for slot in (4, 5, 7)] == [rig.device(slot) for slot in (0, 1, 3)]
    settle(rig.controller._scrubber)
    assert set(rig.controller._scrubber._sums) == {4, 5, 7}


def test_save_that_cannot_start_does_not_fail_other_saves(rigs):
    rig = rigs(4, 4)
    good, bad = rig.save([1], [2]), rig.save([0], [99])
    outcomes = {outcome.transfer_id: outcome for outcome in rig.run(good, bad)}
    assert len(outcomes) == 2
    assert outcomes[good.id].ok
    assert (outcomes[bad.id].ok, outcomes[bad.id].num_bytes, outcomes[bad.id].arrived) == (False, 0, b"")
    assert outcomes[bad.id].reason
    assert rig.host(2) == rig.device(1)


def test_submit_waits_for_started_copy_if_another_group_fails():
    """The tensor of the second group is too short, so its copy cannot start. The copy of the first group runs."""
    gate = Gate()
    caches = [caches_of(8)[0], caches_of(4)[1]]
    controller = CacheController(LAYOUT, caches, 8, mover=gate)
    slots = [slot_bytes(np.array([slot], np.int32)) for slot in (0, 6)]
    gate.close()
    submitting = Call(
        lambda: controller.submit(Plan(1, 3, (TransferRequest(1, Route.HOST_TO_DEVICE, "host", "device", *slots),)))
    )
    submitting.must_wait()
    gate.open()
    submitting.must_end()
    assert controller.is_busy
    assert not controller.is_copying
    assert not controller.layer_waits([1]).arrived()
    (report,) = [each for each in controller.poll() if each.results]
    assert (report.epoch, [(each.transfer_id, each.ok) for each in report.results]) == (3, [(1, False)])
    assert not controller.is_busy
    assert controller.poll() == []
    controller.close()


def test_layer_waits_do_not_depend_on_other_loads(rigs):
    rig = rigs(8, 4)
    rig.run(rig.save([0], [0]))
    good, bad = rig.load([0], [6]), rig.load([99], [7])
    rig.controller.submit(Plan(2, 0, (good, bad)))
    assert rig.controller.layer_waits([good.id]).arrived()
    assert not rig.controller.layer_waits([good.id, bad.id]).arrived()
    assert not rig.controller.layer_waits([bad.id]).arrived()
    assert {outcome.transfer_id: outcome.ok for outcome in rig.drain()} == {good.id: True, bad.id: False}


def test_layer_waits_report_failure_if_one_load_fails(rigs):
    broken = threading.Event()

    def mover(*arguments):
        if broken.is_set():
            raise RuntimeError("the link is down")
        return run_path(*arguments)

    rig = rigs(mover=mover)
    first, second = rig.load([0], [6]), rig.load([1], [7])
    rig.controller.submit(Plan(1, 0, (first,)))
    assert rig.controller.layer_waits([first.id]).arrived()
    broken.set()
    rig.controller.submit(Plan(2, 0, (second,)))
    assert not rig.controller.layer_waits([first.id, second.id]).arrived()
    assert not rig.controller.layer_waits([second.id]).arrived()
    assert {outcome.transfer_id: outcome.ok for outcome in rig.drain()} == {first.id: True, second.id: False}


def test_poll_of_loads_only_does_not_return_saves(rigs):
    rig = rigs()
    rig.run(rig.save([0], [0]))
    save, load = rig.save([1], [1]), rig.load([0], [7])
    rig.controller.submit(Plan(2, 0, (save, load)))
    for each in rig.controller._in_flight.values():
        for copy in each.copies:
            copy.settle(30)
    (report,) = rig.controller.poll(loads_only=True)
    assert [outcome.transfer_id for outcome in report.results] == [load.id]
    assert rig.controller.is_copying
    assert [outcome.transfer_id for outcome in rig.drain()] == [save.id]
    assert not rig.controller.is_copying


# ---- waiting -------------------------------------------------------------------------------------------------------


def test_wait_returns_when_a_copy_ends():
    gate = Gate(is_open=False)
    caches = [torch.zeros(4, 1, 2, 2, 1, 2)]
    controller = CacheController(layout_of(caches, 2), caches, 2, mover=gate)
    controller.poll()
    slots = slot_bytes(np.array([1], np.int32))
    controller.submit(Plan(1, 0, (TransferRequest(1, Route.DEVICE_TO_HOST, "device", "host", slots, slots),)))
    assert controller.is_busy
    assert controller.is_copying
    controller.wait(0.001)  # a timeout is not an error
    waiting = Call(lambda: controller.wait(60))
    waiting.must_wait()
    assert controller.poll() == []
    gate.open()
    waiting.must_end()
    (report,) = controller.poll()
    assert [outcome.ok for outcome in report.results] == [True]
    controller.close()


def test_wait_returns_when_a_load_ends_before_a_save(rigs):
    gate = Gate(is_open=False)
    rig = rigs(mover=gate)
    rig.controller.submit(Plan(1, 0, (rig.save([0], [0]),)))
    assert gate.reached.wait(30)
    load = rig.load([1], [7])
    rig.controller.submit(Plan(2, 0, (load,)))
    waiting = Call(lambda: rig.controller.wait(60))
    waiting.must_end()  # the save is still blocked
    rig.controller._in_flight[load.id].copies[1].settle(30)
    outcomes = [outcome for report in rig.controller.poll() for outcome in report.results]
    assert [outcome.transfer_id for outcome in outcomes] == [load.id]
    gate.open()
    assert len(rig.drain()) == 1


def test_wait_returns_when_a_store_has_answered(rigs):
    store = Hangs()
    rig = rigs(stores={"disk": store})
    rig.controller.poll()
    rig.controller.submit(Plan(1, 0, (rig.fetch([0], [0]),)))
    assert store.called.wait(30)
    assert rig.controller.is_busy
    waiting = Call(lambda: rig.controller.wait(60))
    waiting.must_wait()
    store.may_go.set()
    waiting.must_end()
    (report,) = rig.controller.poll()
    assert [outcome.ok for outcome in report.results] == [False]
    assert report.lookups == (StoreLookup("disk", absent=KEYS[0]),)
    assert not rig.controller.is_busy


def test_wait_returns_soon_if_a_store_hangs_and_copies_run(rigs):
    store, gate = Hangs(), Gate(is_open=False)
    rig = rigs(stores={"disk": store}, mover=gate)
    rig.controller.submit(Plan(1, 0, (rig.fetch([0], [0]), rig.save([1], [1]))))
    assert store.called.wait(30)
    Call(lambda: rig.controller.wait(60)).must_end()
    gate.open()
    store.may_go.set()
    assert len(rig.drain()) == 2


# ---- the store worker ----------------------------------------------------------------------------------------------


def test_store_worker_is_busy_until_results_are_taken(rigs):
    rig = rigs(stores={"disk": MemoryStore(1 << 20)})
    rig.run(rig.save([0], [0]))
    worker = rig.controller._stores
    assert (worker.is_busy, worker.wait(0.0)) == (False, False)
    worker.move(rig.store([0], [0]))
    assert worker.wait(30) is True
    assert worker.is_busy
    results, lookups = worker.take()
    assert (len(results), lookups) == (1, [])
    assert (worker.take(), worker.is_busy) == (([], []), False)
    worker.probe(Probe(7, "disk", KEYS[0] + KEYS[1]))
    assert worker.wait(30) is True
    assert worker.is_busy
    assert worker.take() == ([], [StoreLookup("disk", KEYS[0], KEYS[1], 7)])
    assert (worker.take(), worker.is_busy) == (([], []), False)


class SmallPages(MemoryStore):
    """A store that scans two objects per page."""

    def scan(self, cursor="", limit=1000, *, timeout_s=None):
        return super().scan(cursor, min(limit, 2), timeout_s=timeout_s)


def test_probe_and_drop_of_all_keys_read_every_page(rigs):
    store = SmallPages(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]))
    rig.run(rig.store([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]))
    del store.objects[draft_of(KEYS[2])]
    rig.run(Probe(3, "disk"))
    present_keys = [
        key for each in rig.lookups for key in [each.present[i : i + 32] for i in range(0, len(each.present), 32)]
    ]
    assert sorted(present_keys) == sorted(KEYS[i] for i in (0, 1, 3, 4))
    assert [each.probe_id for each in rig.lookups if each.probe_id] == [3]
    assert not any(each.absent for each in rig.lookups)
    rig.run(Drop("disk"))
    assert not store.objects


class FailingWrites(MemoryStore):
    """A store whose writes fail with a different reason for each object."""

    def write(self, writes, **_):
        return Results(tuple(ObjectResult(ObjectStatus.FAILED, reason=f"reason {i}") for i in range(len(writes))), 0.0)


def test_failed_write_reports_at_most_three_reasons(rigs):
    rig = rigs(stores={"disk": FailingWrites(1 << 20)})
    rig.run(rig.save([0, 1, 2], [0, 1, 2]))
    (outcome,) = rig.run(rig.store([0, 1, 2], [0, 1, 2]))
    assert (outcome.ok, outcome.arrived, outcome.num_bytes) == (False, b"\0\0\0", 0)
    assert outcome.reason == "reason 0; reason 1; reason 2"
    assert rig.lookups == []


def test_fetch_seconds_do_not_exceed_elapsed_time(rigs):
    rig = rigs(stores={"disk": MemoryStore(1 << 20)})
    began = time.perf_counter()
    (outcome,) = rig.run(rig.fetch([0], [0]))
    assert 0 < outcome.seconds <= time.perf_counter() - began


class SlowUnregister(MemoryStore):
    """A store whose `unregister` blocks until `may_go` is set."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.may_go = threading.Event()
        self.calls: list[str] = []

    def register(self, memory: memoryview) -> None:
        self.calls.append("register" if len(memory) else "nothing")

    def unregister(self, memory: memoryview) -> None:
        assert self.may_go.wait(60)
        memory[0] = memory[0]  # fails if the memory is not mapped
        self.calls.append("unregister")


def test_resize_host_waits_until_stores_unregister_old_memory(rigs):
    quick, slow = SlowUnregister(), SlowUnregister()
    quick.may_go.set()
    rig = rigs(stores={"quick": quick, "slow": slow})
    resizing = Call(lambda: rig.controller.resize_host(4, rig.caches))
    resizing.must_wait()
    slow.may_go.set()
    resizing.must_end()
    rig.run(rig.save([0], [0]))
    rig.run(rig.store([0], [0], "quick"), rig.store([0], [0], "slow"))  # these writes run after the registration
    # One call per cache group: the old memory is registered and unregistered, then the new memory is registered.
    assert quick.calls == slow.calls == ["register"] * 2 + ["unregister"] * 2 + ["register"] * 2


def test_process_exits_if_controller_is_not_closed():
    code = """
import torch
from kvtier.worker.controller import CacheController, layout_of
from kvtier.storage import MemoryStore
caches = [torch.zeros(4, 1, 2, 2, 1, 2)]
controller = CacheController(layout_of(caches, 2), caches, 2, stores={"disk": MemoryStore(1 << 20)})
print("made", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "made\n"
