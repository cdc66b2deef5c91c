"""Compare simulated links with a simulation in steps of one second, and simulated stores with a plain LRU cache."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError
from kvtier.messages import Drop, Plan, Probe, Route, TransferRequest, slot_bytes
from kvtier.replay.hardware import DiskSpec
from kvtier.replay.sim_worker import TO_DEVICE, TO_HOST, SimulatedStore, SimulatedWorker

ENDS = {
    Route.HOST_TO_DEVICE: ("host", "device"),
    Route.DEVICE_TO_HOST: ("device", "host"),
    Route.STORE_TO_HOST: ("disk", "host"),
    Route.HOST_TO_STORE: ("host", "disk"),
}
DISK = DiskSpec(read_bandwidth=1.0, write_bandwidth=0.5, latency_seconds=0.0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def transfer(id: int, route: Route, count: int, first_key: int = 0) -> TransferRequest:
    slots = slot_bytes(np.arange(count, dtype=np.int32))
    keys = b"".join(key(first_key + i) for i in range(count))
    match route:
        case Route.STORE_TO_HOST:
            return TransferRequest(id, route, *ENDS[route], b"", slots, keys)
        case Route.HOST_TO_STORE:
            return TransferRequest(id, route, *ENDS[route], slots, b"", keys)
        case _:
            return TransferRequest(id, route, *ENDS[route], slots, slots)


def worker(num_blocks: int = 1000, **options) -> SimulatedWorker:
    stores = {"disk": SimulatedStore(num_blocks)}
    return SimulatedWorker(1, 1.0, disk=DISK, stores=stores, **{"latency_seconds": 0.0, **options})


def simulate_in_ticks(jobs: list[tuple[int, Route, int]]) -> dict[int, tuple[int, int]]:
    """Simulate one link second by second. Return the start and the end of each job by job number.

    A job is (arrival, route, seconds). In each second, the link runs the first unfinished read that has arrived. If
    there is no such read, the link runs the first unfinished write.
    """
    left = {i: seconds for i, (_, _, seconds) in enumerate(jobs)}
    begins: dict[int, int] = {}
    ends: dict[int, tuple[int, int]] = {}
    for now in range(1000):
        ready = [i for i in left if jobs[i][0] <= now]
        ready.sort(key=lambda i: (jobs[i][1] in (Route.DEVICE_TO_HOST, Route.HOST_TO_STORE), i))
        if ready:
            begins.setdefault(ready[0], now)
            left[ready[0]] -= 1
            if not left[ready[0]]:
                ends[ready[0]] = begins[ready[0]], now + 1
                del left[ready[0]]
    return ends


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([Route.STORE_TO_HOST, Route.HOST_TO_STORE]), st.integers(1, 6)),
        max_size=12,
    ),
    polls=st.lists(st.floats(0, 200), max_size=8),
)
@settings(deadline=None)
def test_disk_link_runs_reads_before_writes(jobs, polls):
    jobs = sorted(jobs, key=lambda job: job[0])
    ours = worker()
    ours.stores["disk"].write([key(i) for i in range(6)])
    found: dict[int, float] = {}
    # DISK reads one block per second and writes one block in two seconds.
    timed = [(time, route, count * (1 if route is Route.STORE_TO_HOST else 2)) for time, route, count in jobs]
    expected = simulate_in_ticks(timed)
    events = [(time, 0, i) for i, (time, _, _) in enumerate(jobs)] + [(time, 1, 0) for time in polls] + [(900, 1, 0)]
    for now, is_poll, i in sorted(events):
        for report in ours.poll(now):
            found.update((outcome.transfer_id, outcome.seconds) for outcome in report.results)
        assert {*found} == {i for i, (_, end) in expected.items() if end <= now}
        if not is_poll:
            ours.submit(Plan(i, 0, (transfer(i, jobs[i][1], jobs[i][2]),)), now)
    assert found == pytest.approx({i: end - begin for i, (begin, end) in expected.items()})
    busy = sum(seconds for _, _, seconds in timed)
    assert ours.links["disk"].busy_seconds == pytest.approx(busy)
    assert ours.links["disk"].num_bytes == sum(count for _, _, count in jobs)
    assert ours.next_end == math.inf


def test_link_directions_are_independent():
    ours = worker(latency_seconds=0.5)
    ours.submit(Plan(1, 0, (transfer(1, Route.DEVICE_TO_HOST, 10), transfer(2, Route.HOST_TO_DEVICE, 10))), 0.0)
    assert ours.next_end == 10.5
    assert ours.end_of((2,)) == 10.5
    assert ours.end_of((7,)) == 0.0
    (report,) = ours.poll(10.5)
    assert {outcome.transfer_id for outcome in report.results} == {1, 2}
    assert {use.name: use.num_bytes for use in ours.links.values()} == {TO_HOST: 10, TO_DEVICE: 10, "disk": 0}


def test_later_load_waits_for_earlier_load():
    ours = worker()
    ours.submit(Plan(1, 0, (transfer(1, Route.HOST_TO_DEVICE, 4),)), 0.0)
    ours.submit(Plan(2, 0, (transfer(2, Route.HOST_TO_DEVICE, 3),)), 1.0)
    assert ours.end_of((1, 2)) == 7.0


def test_block_evicted_by_store_is_reported_absent():
    ours = worker(num_blocks=2)
    ours.submit(Plan(1, 3, (transfer(1, Route.HOST_TO_STORE, 3),)), 0.0)
    ours.poll(10.0)
    assert len(ours.stores["disk"]) == 2
    assert ours.stores["disk"].num_evicted == 1
    ours.submit(Plan(2, 3, (transfer(2, Route.STORE_TO_HOST, 3),), (Probe(9, "disk", key(0) + key(2)),)), 10.0)
    (first,) = ours.poll(10.0)
    assert [(p.probe_id, p.present, p.absent) for p in first.lookups] == [(9, key(2), key(0))]
    (report,) = ours.poll(20.0)
    (outcome,) = report.results
    assert (report.epoch, outcome.ok, outcome.arrived, outcome.num_bytes) == (3, False, b"\0\1\1", 2)
    assert report.lookups[0].absent == key(0)


def test_probe_without_keys_lists_blocks_left_after_drop():
    ours = worker()
    ours.stores["disk"].write([key(1), key(2)])
    ours.submit(Plan(1, 0, (), (Probe(1, "disk"),), (Drop("disk", key(1)),)), 0.0)
    assert ours.poll(0.0)[0].lookups[0].present == key(2)
    ours.submit(Plan(2, 0, (), (Probe(2, "disk"),), (Drop("disk"),)), 0.0)
    assert ours.poll(0.0)[0].lookups[0].present == b""
    assert ours.poll(0.0) == []


@given(
    calls=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))),
    size=st.integers(1, 6),
)
def test_simulated_store_evicts_like_plain_lru(calls, size):
    store, plain = SimulatedStore(size), OrderedDict()
    for is_write, names in calls:
        if is_write:
            store.write([key(name) for name in names])
            for name in names:
                plain.pop(name, None)
                plain[name] = None
            while len(plain) > size:
                plain.popitem(last=False)
        else:
            assert list(store.read([key(name) for name in names])) == [name in plain for name in names]
            for name in names:
                if name in plain:
                    plain.move_to_end(name)
        assert store.lookup([])[0] == [key(name) for name in plain]


def test_worker_with_invalid_tier_or_store_raises():
    with pytest.raises(ArgumentError, match="unknown tier 'tape'"):
        worker().submit(Plan(1, 0, (), (Probe(1, "tape"),)), 0.0)
    with pytest.raises(ArgumentError, match="need a disk"):
        SimulatedWorker(1, 1.0, stores={"disk": SimulatedStore(1)})
    with pytest.raises(RangeError, match="room for at least 1 block"):
        SimulatedStore(0)
