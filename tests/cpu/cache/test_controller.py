"""CacheController with real tensors, host memory and stores: copied bytes, reported failures and layer waits."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest
import torch

from controller_support import KEYS, LAYOUT, NAMESPACE, SECRET, Hangs, Rig, caches_of, disk_at, draft_of
from kvtier.errors import ArgumentError, LayerSwapTimeoutError
from kvtier.memory import CPU
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Drop, Plan, Probe, Report, Route, StoreLookup, TransferRequest, slot_bytes
from kvtier.storage import Label, MemoryStore, Write, digest_tokens
from kvtier.worker.controller import CacheController, layout_of
from kvtier.worker.layer_waits import LayerWaits
from storage_support import Fault, FaultyStore


@pytest.fixture(params=["memory", "disk"])
def any_store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore(1 << 20)
    return disk_at(tmp_path)


# ---- copied bytes --------------------------------------------------------------------------------------------------


def test_round_trip_through_store_keeps_bytes_of_all_groups(rigs, any_store):
    rig = rigs(stores={"disk": any_store})
    before = [rig.device(slot) for slot in range(8)]
    assert all(outcome.ok for outcome in rig.run(rig.save([5, 0, 3], [2, 7, 4])))
    assert [rig.host(slot) for slot in (2, 7, 4)] == [before[slot] for slot in (5, 0, 3)]
    (stored,) = rig.run(rig.store([2, 7, 4], [0, 1, 2]))
    assert stored.ok
    assert stored.num_bytes == 3 * sum(group.block_bytes for group in LAYOUT.groups)
    for cache in rig.caches:
        cache.zero_()
    for slot in range(8):
        rig.fill_host(slot, 0)
    (fetched,) = rig.run(rig.fetch([2, 0, 1], [1, 0, 6]))
    assert fetched.ok
    (loaded,) = rig.run(rig.load([0, 6, 1], [4, 5, 6]))
    assert loaded.ok
    assert [rig.device(slot) for slot in (4, 5, 6)] == [before[slot] for slot in (5, 0, 3)]
    assert not any(any(part) for slot in (0, 1, 2, 3, 7) for part in rig.device(slot))


def test_controller_fetches_blocks_of_earlier_controller(rigs, tmp_path):
    first = rigs(stores={"disk": disk_at(tmp_path)})
    expected = first.device(1)
    first.run(first.save([1], [0]))
    first.run(first.store([0], [3]))
    first.controller.close()
    second = rigs(stores={"disk": disk_at(tmp_path)})
    second.run(Probe(9, "disk"))
    assert [(each.present, each.probe_id) for each in second.lookups] == [(KEYS[3], 0), (b"", 9)]
    (outcome,) = second.run(second.fetch([3], [5]))
    assert outcome.ok
    assert second.host(5) == expected


def test_fetch_of_block_without_draft_object_is_a_miss(rigs):
    store = MemoryStore(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1], [0, 1]))
    rig.run(rig.store([0, 1], [0, 1]))
    assert len(store.objects) == 4
    del store.objects[draft_of(KEYS[0])]
    (outcome,) = rig.run(rig.fetch([0, 1], [4, 5]))
    assert (outcome.ok, outcome.arrived) == (False, b"\0\1")
    assert rig.lookups == [StoreLookup("disk", absent=KEYS[0])]


def test_probe_reports_block_without_draft_object_as_absent(rigs):
    store = MemoryStore(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1], [0, 1]))
    rig.run(rig.store([0, 1], [0, 1]))
    del store.objects[draft_of(KEYS[0])]
    rig.run(Probe(5, "disk", KEYS[0] + KEYS[1] + KEYS[2]))
    assert rig.lookups == [StoreLookup("disk", KEYS[1], KEYS[0] + KEYS[2], 5)]


# ---- failures ------------------------------------------------------------------------------------------------------


def test_failed_load_reports_its_blocks_as_not_arrived(rigs):
    broken = threading.Event()

    def mover(*arguments):
        if broken.is_set():
            raise RuntimeError("the link is down")
        return run_path(*arguments)

    rig = rigs(mover=mover)
    rig.run(rig.save([0, 1], [0, 1]))
    before = rig.device(6)
    broken.set()
    (outcome,) = rig.run(rig.load([0, 1], [6, 7]))
    assert not outcome.ok
    assert "the link is down" in outcome.reason
    assert outcome.arrived == b"\0\0"
    broken.clear()
    (again,) = rig.run(rig.load([0, 1], [6, 7]))
    assert again.ok
    assert rig.device(6) == rig.device(0) != before


def test_slot_out_of_range_fails_only_its_transfer(rigs):
    rig = rigs(4, 4, stores={"disk": MemoryStore(1 << 20)})
    outcomes = rig.run(
        rig.save([0], [99]), rig.save([99], [0]), rig.load([0], [-1]), rig.store([99], [0]), rig.save([1], [2])
    )
    assert {outcome.transfer_id: outcome.ok for outcome in outcomes} == {
        1: False,
        2: False,
        3: False,
        4: False,
        5: True,
    }
    assert all(outcome.reason for outcome in outcomes if not outcome.ok)
    assert rig.host(2) == rig.device(1)


@pytest.mark.parametrize(
    "fault",
    [Fault("an error"), Fault(hangs=True), Fault(flip_bit=77), Fault(cut_to=3)],
    ids=["error", "hang", "flip", "cut"],
)
def test_failed_read_leaves_host_slot_of_its_block_unchanged(rigs, fault):
    memory = MemoryStore(1 << 20)
    fault.only = lambda key: key in (KEYS[1], draft_of(KEYS[1]))
    rig = rigs(stores={"disk": memory})
    rig.run(rig.save([0, 1, 2], [0, 1, 2]))
    rig.run(rig.store([0, 1, 2], [0, 1, 2]))
    rig.controller._stores._stores["disk"] = FaultyStore(memory, [fault])
    rig.fill_host(5, 0xEE)
    (outcome,) = rig.run(rig.fetch([0, 1, 2], [4, 5, 6]))
    assert outcome.arrived == b"\1\0\1"
    assert outcome.reason
    assert set(rig.host(5)[0]) == {0xEE}
    assert rig.host(4) == rig.device(0)
    damaged = fault.flip_bit is not None or fault.cut_to is not None
    assert rig.lookups == ([StoreLookup("disk", absent=KEYS[1])] if damaged else [])


class Raises:
    """A store whose calls raise OSError, except `close`."""

    def __getattr__(self, name):
        def call(*_, **__):
            raise OSError(f"cannot {name}")

        if name in ("register", "unregister"):  # these methods are optional
            raise AttributeError(name)
        return call if name != "close" else lambda: None


def test_transfers_fail_and_probes_end_if_the_store_raises(rigs):
    rig = rigs(stores={"disk": Raises(), "other": MemoryStore(1 << 20)})
    rig.run(rig.save([0], [0]))
    outcomes = rig.run(
        rig.store([0], [0]), rig.fetch([0], [1]), Probe(77, "disk", KEYS[0]), Probe(78, "disk"), Drop("disk")
    )
    assert [outcome.ok for outcome in outcomes] == [False, False]
    assert all("OSError: cannot" in outcome.reason for outcome in outcomes)
    assert {each.probe_id: (each.present, each.absent) for each in rig.lookups} == {
        77: (b"", KEYS[0]),
        78: (b"", b""),
    }
    others = rig.run(rig.store([0], [0], "other"), rig.fetch([0], [1], "other"))
    assert any(outcome.ok for outcome in others)  # the fetch is a miss if it runs before the write


def test_probe_and_drop_end_if_a_scan_fails_halfway(rigs):
    class HalfScanned(MemoryStore):
        def scan(self, cursor="", limit=1000, *, timeout_s=None):
            page = super().scan(cursor, min(limit, 2), timeout_s=timeout_s)
            return type(page)((), cursor, 0.0, "the disk failed") if cursor else page

    store = HalfScanned(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1, 2], [0, 1, 2]))
    rig.run(rig.store([0, 1, 2], [0, 1, 2]))
    rig.run(Probe(4, "disk"))
    assert rig.lookups[-1] == StoreLookup("disk", probe_id=4)
    assert rig.run(Drop("disk")) == []  # a drop ends even if the scan fails


def test_hanging_store_does_not_delay_other_transfers(rigs):
    hanging, good = Hangs(), MemoryStore(1 << 20)
    rig = rigs(stores={"slow": hanging, "disk": good})
    rig.run(rig.save([0], [0]))
    rig.controller.submit(Plan(2, 0, (rig.store([0], [0], "slow"), rig.fetch([0], [1], "slow"))))
    assert hanging.called.wait(30)
    rig.controller.submit(Plan(3, 0, (rig.store([0], [1]), rig.save([1], [2]))))
    done: list[Report] = []
    while sum(len(report.results) for report in done) < 2:
        rig.controller.wait(1.0)
        done += rig.controller.poll()
    rig.controller.submit(Plan(4, 0, (rig.fetch([1], [3]),)))
    while sum(len(report.results) for report in done) < 3:
        rig.controller.wait(1.0)
        done += rig.controller.poll()
    assert rig.host(3) == rig.device(0)
    hanging.may_go.set()
    assert len(rig.drain()) == 2


def test_close_finishes_transfers_in_flight(tmp_path):
    rig = Rig(stores={"disk": disk_at(tmp_path)})
    expected = rig.device(0)
    rig.run(rig.save([0], [0]))
    rig.controller.submit(Plan(2, 0, (rig.store([0], [0]), rig.save([1, 2, 3], [1, 2, 3]), rig.load([0], [7]))))
    rig.controller.close()
    rig.controller.close()
    assert rig.device(7) == expected
    again = Rig(stores={"disk": disk_at(tmp_path)})
    again.run(again.fetch([0], [4]))
    assert again.host(4) == expected
    again.controller.close()


# ---- drops and namespaces ------------------------------------------------------------------------------------------


def test_drop_all_keeps_objects_of_other_models(rigs):
    store = MemoryStore(1 << 20)
    other_key = hashlib.sha256(b"other").digest()
    store.write([Write(other_key, Label(hashlib.sha256(b"another model").digest()), b"other block")])
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1], [0, 1]))
    rig.run(rig.store([0, 1], [0, 1]))
    rig.run(Probe(3, "disk"))
    assert {each.present for each in rig.lookups} == {b"".join(sorted(KEYS[:2])), b""}
    rig.run(Drop("disk"))
    assert list(store.objects) == [other_key]


def test_drop_of_keys_removes_objects_of_all_groups(rigs):
    store = MemoryStore(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0, 1], [0, 1]))
    rig.run(rig.store([0, 1], [0, 1]))
    rig.run(Drop("disk", KEYS[0]))
    assert set(store.objects) == {KEYS[1], draft_of(KEYS[1])}


@pytest.mark.parametrize(
    ("label", "ok"),
    [
        (Label(NAMESPACE, digest_tokens(KEYS[0], SECRET)), True),
        (Label(NAMESPACE, digest_tokens(KEYS[1], SECRET)), False),
        (Label(NAMESPACE, digest_tokens(KEYS[0])), False),
        (Label(hashlib.sha256(b"another model").digest(), digest_tokens(KEYS[0], SECRET)), False),
    ],
    ids=["right label", "other tokens", "no secret", "other model"],
)
def test_read_with_wrong_label_is_a_miss(rigs, label, ok):
    """A read must compare the label of an object, and not only its key."""
    store = MemoryStore(1 << 20)
    rig = rigs(stores={"disk": store})
    rig.run(rig.save([0], [0]))
    rig.run(rig.store([0], [0]))
    saved = rig.host(0)
    assert store.write([Write(KEYS[0], label, bytes(saved[0]))]).ok
    rig.fill_host(5, 0xEE)
    (outcome,) = rig.run(rig.fetch([0], [5]))
    assert outcome.ok is ok
    assert rig.host(5)[0] == (saved[0] if ok else b"\xee" * len(saved[0]))


def test_poll_reports_corrupt_host_blocks_as_damaged(rigs):
    rig = rigs(stores={"disk": MemoryStore(1 << 20)})
    rig.run(rig.save([0, 1], [3, 4]))
    rig.run(rig.store([3], [0]))
    rig.run(rig.fetch([0, 5], [6, 7]))  # block 5 is not in the store, so slot 7 is not verified
    deadline = time.monotonic() + 30
    while set(rig.controller._scrubber._sums) != {3, 4, 6}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rig.fill_host(4, 0xEE)
    rig.fill_host(6, 0xEE)
    rig.fill_host(7, 0xEE)
    reports: list[Report] = []
    while not reports:
        assert time.monotonic() < deadline
        reports = rig.controller.poll()
        time.sleep(0.01)
    assert np.frombuffer(reports[0].damaged, "<i4").tolist() == [4, 6]


# ---- memory --------------------------------------------------------------------------------------------------------


def test_resize_host_keeps_blocks_in_remaining_slots(rigs):
    rig = rigs(8, 6, stores={"disk": MemoryStore(1 << 20)})
    rig.run(rig.save([0, 1, 2], [0, 3, 5]))
    kept = [rig.host(slot) for slot in (0, 3)]
    rig.controller.resize_host(4, rig.caches)
    assert [rig.host(slot) for slot in (0, 3)] == kept
    rig.controller.resize_host(12, rig.caches)
    assert [rig.host(slot) for slot in (0, 3)] == kept
    (outcome,) = rig.run(rig.save([4], [11]))
    assert outcome.ok
    assert rig.host(11) == rig.device(4)
    (outcome,) = rig.run(rig.store([11], [6]))  # store transfers also use the new memory
    (outcome,) = rig.run(rig.fetch([6], [10]))
    assert outcome.ok
    assert rig.host(10) == rig.device(4)
    assert rig.sizes[-1] == 12


def test_release_frees_device_tensors_and_keeps_host_blocks(rigs):
    import gc
    import weakref

    rig = rigs()
    rig.run(rig.save([3], [2]))
    expected = rig.device(3)
    rig.controller.release()
    references = [weakref.ref(cache) for cache in rig.caches]
    rig.caches = []
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    (outcome,) = rig.run(rig.load([2], [0]))
    assert not outcome.ok  # the load fails without device tensors
    rig.caches = caches_of(4, seed=9)
    rig.controller.register(rig.caches)
    (outcome,) = rig.run(rig.load([2], [3]))
    assert outcome.ok
    assert rig.device(3) == expected


def test_poll_reports_new_host_slots_once(rigs):
    rig = rigs(4, 5000)
    assert rig.controller.num_host_ready >= 1
    for host in rig.controller._hosts:
        host.wait_ready()
    (report,) = rig.controller.poll()
    assert report.num_host_slots == 5000
    assert rig.controller.poll() == []  # reported once


def test_layer_waits_return_after_layers_have_arrived(rigs):
    rig = rigs()
    rig.run(rig.save([0, 1], [0, 1]))
    transfer = rig.load([0, 1], [6, 7])
    rig.controller.submit(Plan(2, 0, (transfer,)))
    waits = rig.controller.layer_waits((transfer.id,))
    for layer in range(3):
        waits.before_layer(layer)
    waits.before_layer(0, group=1)
    assert waits.arrived()
    assert rig.device(6) == rig.device(0)
    assert [outcome.ok for outcome in rig.drain()] == [True]


def test_layer_waits_return_if_the_load_fails(rigs):
    def mover(*_):
        raise RuntimeError("the link is down")

    rig = rigs(mover=mover)
    transfer = rig.load([0, 1], [6, 7])
    rig.controller.submit(Plan(2, 0, (transfer,)))
    waits = rig.controller.layer_waits((transfer.id,))
    for layer in range(3):
        waits.before_layer(layer)
    assert not waits.arrived()
    assert [outcome.ok for outcome in rig.drain()] == [False]


def test_report_has_the_epoch_of_the_last_plan(rigs):
    rig = rigs()
    (outcome,) = rig.run(rig.save([0], [0]), epoch=7)  # `run` checks the epoch of every report
    assert outcome.ok


def test_controller_with_mismatched_caches_raises():
    with pytest.raises(ArgumentError, match="each of 2 groups"):
        CacheController(LAYOUT, caches_of(4)[:1], 4)
    with pytest.raises(ArgumentError, match="got 2 caches and 0"):
        CacheController(LAYOUT, caches_of(4), 0)


def test_copy_seconds_exclude_the_time_until_poll():
    """Regression: a load during a step of 1 s was measured as 1 s.

    As a result, loading seemed slow, and all later prefixes were recomputed.
    """
    caches = [torch.zeros(4, 1, 2, 2, 1, 2)]
    controller = CacheController(layout_of(caches, 2), caches, 2)
    slots = slot_bytes(np.array([1], np.int32))
    began = time.perf_counter()
    controller.submit(Plan(1, 0, (TransferRequest(1, Route.DEVICE_TO_HOST, "device", "host", slots, slots),)))
    controller.layer_waits([1]).arrived()
    ended = time.perf_counter()
    while time.perf_counter() - ended < 0.2:
        pass
    outcomes = [outcome for report in controller.poll() for outcome in report.results]
    assert outcomes[0].ok
    assert outcomes[0].seconds <= ended - began
    controller.close()


def test_layer_waits_report_failure_if_load_cannot_start():
    """Regression: a step treated a load that could not start as finished, and sampled a token from invalid KV."""
    caches = [torch.zeros(4, 1, 2, 2, 1, 2)]
    controller = CacheController(layout_of(caches, 2), caches, 2)
    good, bad = slot_bytes(np.array([1], np.int32)), slot_bytes(np.array([9], np.int32))
    transfers = [
        TransferRequest(number, Route.HOST_TO_DEVICE, "host", "device", slots, good)
        for number, slots in ((1, good), (2, bad))
    ]
    controller.submit(Plan(1, 0, (transfers[0],)))
    assert controller.layer_waits([1]).arrived()
    controller.poll()
    controller.submit(Plan(2, 0, (transfers[1],)))
    waits = controller.layer_waits([2])
    waits.before_layer(0)
    assert not waits.arrived()
    (report,) = controller.poll()
    assert not report.results[0].ok
    controller.close()


def test_controller_init_failure_leaves_no_thread():
    before = set(threading.enumerate())
    wrong = [torch.zeros(8, group.block_bytes + 2, dtype=torch.uint8) for group in LAYOUT.groups]
    with pytest.raises(ArgumentError, match="bytes, but a block of group"):
        CacheController(LAYOUT, wrong, 8, stores={"disk": MemoryStore(1 << 20)}, namespace=NAMESPACE)
    assert not [thread.name for thread in set(threading.enumerate()) - before if "scrub" in thread.name]
    assert not [thread.name for thread in set(threading.enumerate()) - before if "disk" in thread.name]


def test_layer_waits_are_repeated_after_a_timeout():
    """Regression: a wait timed out, and the layer was computed before its blocks arrived."""
    may_go = threading.Event()

    def held(path, job, pieces):
        assert may_go.wait(60)
        return run_path(path, job, pieces)

    rig = Rig(mover=held)
    expected = [host.slots()[3].clone() for host in rig.controller._hosts]
    move = TransferRequest(
        1, Route.HOST_TO_DEVICE, "host", "device", *(slot_bytes(np.array([slot], np.int32)) for slot in (3, 5))
    )
    rig.controller.submit(Plan(1, 0, (move,)))
    job = rig.controller._in_flight[1]
    counter, timeouts = job.copies[0].layers, []
    wait = counter.wait

    def counted(*arguments):
        try:
            wait(*arguments)
        except LayerSwapTimeoutError:
            timeouts.append(1)
            if len(timeouts) == 3:
                may_go.set()
            raise

    counter.wait = counted
    waits = LayerWaits([job.copies], CPU, timeout=0.01)
    waits.before_layer(0)
    assert len(timeouts) >= 3
    first = LAYOUT.groups[0].span(range(1))
    assert torch.equal(rig.caches[0][5][: first.nbytes], expected[0][: first.nbytes])
    assert waits.arrived()
    rig.controller.close()
