"""FaultyStore, a helper of other tests, injects the configured faults and never returns wrong bytes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvtier.storage import MemoryStore, ObjectStatus, Read
from storage_support import LABEL, Clock, Fault, FaultyStore, get, has, key_of, payload_of, put

FAULTS = st.builds(
    Fault,
    error=st.sampled_from(["", "", "no route"]),
    hangs=st.booleans(),
    flip_bit=st.none() | st.integers(0, 10**6),
    cut_to=st.none() | st.integers(0, 5000),
    only=st.sampled_from([lambda _: True, lambda key: key[0] % 2 == 0]),
)


def test_error_or_hang_of_faulty_store_yields_failed_result():
    clock = Clock()
    store = FaultyStore(MemoryStore(1 << 20), [Fault(error="no route"), Fault(hangs=True), Fault()], clock, timeout_s=3)
    assert put(store, 1)[0].reason == "no route"
    assert store.contains([key_of(1)], timeout_s=2)[0].status is ObjectStatus.FAILED
    assert clock.now == 2
    assert has(store, 1) == [False]


def test_damaged_object_is_corrupt_when_read_and_then_missing():
    first = key_of(1)
    store = FaultyStore(MemoryStore(1 << 20), [Fault(), Fault(flip_bit=77, only=lambda key: key == first)])
    put(store, 1, 2)
    buffers = [bytearray(5000), bytearray(5000)]
    results = store.read_into([Read(key_of(n), LABEL, buffer) for n, buffer in zip((1, 2), buffers, strict=True)])
    assert [outcome.status for outcome in results] == [ObjectStatus.CORRUPT, ObjectStatus.FOUND]
    assert (buffers[0], buffers[1]) == (bytes(5000), payload_of(2))
    assert has(store, 1, 2) == [False, True]
    assert store.stats.num_quarantined == 1


@given(st.lists(FAULTS, max_size=12))
def test_faulty_store_never_serves_wrong_bytes(faults):
    store = FaultyStore(MemoryStore(1 << 20), faults)
    for version in range(2):
        put(store, 1, 2, version=version)
        for number in (1, 2):
            outcome, buffer = get(store, number)
            good = [payload_of(number, version=v) for v in range(version + 1)]
            assert buffer in good if outcome.ok else buffer == b"\xee" * 5000
