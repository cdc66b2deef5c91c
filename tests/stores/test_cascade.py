"""Check Cascade, which combines several stores into one store."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvtier.errors import ArgumentError, StoreError
from kvtier.storage import DiskStore, MemoryStore, ObjectStatus, Read, ShardStores, Sync
from kvtier.storage.cascade import Cascade
from storage_support import LABEL, Clock, Fault, FaultyStore, all_keys, get, has, key_of, payload_of, put

ROOM = 1 << 20


def test_cascade_reads_missing_keys_from_next_store():
    near, far = MemoryStore(ROOM), MemoryStore(ROOM)
    put(near, 1)
    put(far, 1, 2, version=1)
    store = Cascade([near, far])
    targets = [bytearray(5000) for _ in range(3)]
    results = store.read_into([Read(key_of(n), LABEL, target) for n, target in zip((1, 2, 3), targets, strict=True)])
    assert [outcome.status.value for outcome in results] == ["found", "found", "missing"]
    assert (targets[0], targets[1]) == (payload_of(1), payload_of(2, version=1))
    assert (near.stats.reads.num_missing, far.stats.reads.num_done) == (2, 1)
    assert has(store, 1, 2, 3) == [True, True, False]
    assert (store.stats.reads.num_done, store.stats.num_objects) == (2, 3)


def test_cascade_write_succeeds_if_one_store_succeeds():
    near, far = MemoryStore(ROOM), MemoryStore(ROOM)
    store = Cascade([FaultyStore(near, [Fault(error="no route")]), far])
    outcome = put(store, 1)[0]
    assert (outcome.status, outcome.nbytes, outcome.reason) == (ObjectStatus.STORED, 5000, "no route")
    assert (has(near, 1), has(far, 1)) == ([False], [True])
    put(store, 2)
    assert (has(near, 2), has(far, 2)) == ([True], [True])


def test_cascade_never_writes_to_read_only_store():
    ours, theirs = MemoryStore(ROOM), MemoryStore(ROOM)
    put(theirs, 1)
    store = Cascade([ours, theirs], [True, False])
    put(store, 2)
    assert [outcome.status.value for outcome in store.remove([key_of(1), key_of(2)])] == ["missing", "removed"]
    assert (has(theirs, 1, 2), has(ours, 2)) == ([True, False], [False])


def test_cascade_miss_is_failure_if_one_store_failed():
    store = Cascade([FaultyStore(MemoryStore(ROOM), [Fault(error="no route")] * 4), MemoryStore(ROOM)])
    assert store.contains([key_of(1)])[0].status is ObjectStatus.FAILED
    assert get(store, 1)[0].reason == "no route"
    assert store.remove([key_of(1)])[0].status is ObjectStatus.FAILED
    assert store.scan().reason == "no route"


def test_cascade_divides_deadline_among_stores():
    clock, far = Clock(), MemoryStore(ROOM)
    put(far, 1)
    store = Cascade([FaultyStore(MemoryStore(ROOM), [Fault(hangs=True)], clock), far])
    outcome = store.read_into([Read(key_of(1), LABEL, bytearray(5000))], timeout_s=6)[0]
    assert outcome.ok
    assert 2.9 < clock.now <= 3


def test_cascade_reads_damaged_object_from_next_store():
    near, far = MemoryStore(ROOM), MemoryStore(ROOM)
    store = Cascade([near, far])
    put(store, 1)
    near.objects[key_of(1)].payload[7] ^= 1
    assert get(store, 1) == (get(far, 1)[0], payload_of(1))


def test_cascade_scan_lists_objects_of_all_stores():
    near, far = MemoryStore(ROOM), MemoryStore(ROOM)
    put(near, 1, 2, 3)
    put(far, 3, 4)
    store = Cascade([near, far])
    assert sorted(all_keys(store, 2)) == sorted(key_of(n) for n in (1, 2, 3, 3, 4))
    with pytest.raises(ArgumentError, match="not a cursor"):
        store.scan("7|")


def test_cascade_write_is_durable_if_one_store_is_durable(tmp_path):
    disk = DiskStore(tmp_path, ROOM, sync=Sync.WRITE, segment_bytes=128 << 10, min_free_bytes=0)
    store = Cascade([MemoryStore(ROOM), disk])
    assert put(store, 1).is_durable
    assert not store.remove([key_of(1)]).is_durable, "a removal must be durable in all stores"
    store.close()
    assert not put(Cascade([MemoryStore(ROOM)]), 1).is_durable


class RegisteringStore(MemoryStore):
    """Records registered memory. If `refuses` is set, `register` and `unregister` raise StoreError with this text."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__(ROOM)
        self.memory: list[memoryview] = []
        self._refuses = refuses

    def register(self, memory: memoryview) -> None:
        if self._refuses:
            raise StoreError(self._refuses)
        self.memory.append(memory)

    def unregister(self, memory: memoryview) -> None:
        if self._refuses:
            raise StoreError(self._refuses)
        self.memory.remove(memory)


@pytest.mark.parametrize(
    "combine", [Cascade, lambda stores: ShardStores(tuple(stores))], ids=["Cascade", "ShardStores"]
)
def test_register_reaches_all_stores_despite_errors(combine):
    first, last, memory = RegisteringStore(), RegisteringStore(), memoryview(bytearray(16))
    store = combine([first, MemoryStore(ROOM), last])
    store.register(memory)
    assert first.memory == last.memory == [memory]
    store.unregister(memory)
    assert first.memory == last.memory == []
    store = combine([first, RegisteringStore("no memory to lock"), last])
    with pytest.raises(StoreError, match="no memory to lock"):
        store.register(memory)
    assert first.memory == last.memory == [memory]
    with pytest.raises(StoreError, match="no memory to lock"):
        store.unregister(memory)
    assert first.memory == last.memory == []


def test_cascade_with_invalid_stores_raises():
    with pytest.raises(ArgumentError):
        Cascade([])
    with pytest.raises(ArgumentError):
        Cascade([MemoryStore(1)], [True, False])


FAULTS = st.builds(
    Fault,
    error=st.sampled_from(["", "", "no route"]),
    hangs=st.booleans(),
    flip_bit=st.none() | st.integers(0, 10**6),
    cut_to=st.none() | st.integers(0, 5000),
)


@given(st.lists(FAULTS, max_size=8), st.lists(FAULTS, max_size=8))
def test_cascade_never_returns_wrong_bytes(first, second):
    store = Cascade([FaultyStore(MemoryStore(ROOM), first), FaultyStore(MemoryStore(ROOM), second)])
    for version in range(2):
        put(store, 1, 2, version=version)
        for number in (1, 2):
            outcome, target = get(store, number)
            good = [payload_of(number, version=v) for v in range(version + 1)]
            assert target in good if outcome.ok else target == b"\xee" * 5000
