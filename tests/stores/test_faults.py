"""Remote stores with faults of servers and networks. Reads never return wrong bytes, and calls end by their deadline.

A store whose circuit breaker is open sends no requests.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

import pytest

from kvtier.storage import Breaker, Label, ObjectResult, ObjectStatus, Page, Read
from kvtier.storage.cipher import Cipher
from kvtier.storage.record import RECORD_BYTES, VERSION
from kvtier.storage.remote.envelope import Envelope
from kvtier.storage.remote.store import RemoteStore
from storage_support import (
    LABEL,
    OTHER_NAMESPACE,
    Clock,
    all_keys,
    get,
    has,
    key_of,
    payload_of,
    put,
    resealed,
    write_of,
)
from store_faults import FAST, Setup
from store_proxy import Faults
from store_servers import NotInstalled, redis_server, wait_for

SHORT_S = 1.0  # deadline for calls to a server that hangs
NUM_THREADS = 4  # number of threads of each store that Setup.store creates


def check_read(store, number, nbytes=5000) -> ObjectResult:
    """Read an object. Check its bytes, or that a failed read left the memory unchanged. Return the result."""
    outcome, target = get(store, number, nbytes)
    assert target == (payload_of(number, nbytes) if outcome.ok else b"\xee" * nbytes)
    return outcome


def wait_until_healthy(store) -> None:
    """Wait until a call succeeds. The breaker stays open until all hanging calls have returned."""
    wait_for(lambda: store.contains([key_of(0)])[0].status is not ObjectStatus.FAILED, "the store to answer", 20)


def random_faults(rng: random.Random) -> Faults:
    answer_bytes = 6 * 30_000
    return rng.choice(
        [
            Faults(),
            Faults(refuses=rng.randrange(1, 5)),
            Faults(flips=tuple(rng.randrange(answer_bytes * 8) for _ in range(rng.choice((1, 1, 3, 200))))),
            Faults(flips=tuple(rng.randrange(300 * 8) for _ in range(3))),  # flips in the protocol headers
            Faults(cut_at=rng.randrange(answer_bytes)),
            Faults(cut_at=rng.randrange(400)),
            Faults(delay_s=0.01),
        ]
    )


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIER_SOAK", "1"))))
@pytest.mark.parametrize("is_sealed", [False, True])
def test_remote_store_never_returns_wrong_bytes(setup, is_sealed, seed):
    rng = random.Random(seed)
    store = setup.store(envelope=Envelope(Cipher(bytes(32)) if is_sealed else None), timeout_s=SHORT_S)
    seen = set()
    for _ in range(60):
        setup.proxy.set(Faults())
        put(store, *range(6), nbytes=30_000)
        setup.proxy.set(random_faults(rng))
        targets = [bytearray(b"\xee" * 30_000) for _ in range(6)]
        outcomes = store.read_into([Read(key_of(n), LABEL, target) for n, target in enumerate(targets)])
        for number, (target, outcome) in enumerate(zip(targets, outcomes, strict=True)):
            assert target == (payload_of(number, 30_000) if outcome.ok else b"\xee" * 30_000), outcome
            seen.add(outcome.status)
    assert {ObjectStatus.FOUND, ObjectStatus.FAILED} <= seen
    setup.proxy.set(Faults())
    wait_until_healthy(store)
    assert put(store, *range(6), nbytes=30_000).ok
    assert [check_read(store, number, 30_000).ok for number in range(6)] == [True] * 6


def test_write_over_faulty_network_never_stores_wrong_bytes(setup):
    rng = random.Random(7)
    writer, reader = setup.store(timeout_s=SHORT_S), setup.store()
    for version in range(25):
        setup.proxy.set(random_faults(rng))
        put(writer, 1, version=version)
        writer.remove([key_of(2)])
        setup.proxy.set(Faults())
        wait_until_healthy(reader)
        outcome, target = get(reader, 1)
        assert (
            target in {payload_of(1, version=v) for v in range(version + 1)} if outcome.ok else target == b"\xee" * 5000
        )


def test_hanging_server_opens_breaker_after_one_deadline(setup):
    clock = Clock()
    store = setup.store(breaker=Breaker(clock=clock), timeout_s=SHORT_S)
    put(store, 1)
    setup.proxy.set(Faults(hangs=True))
    outcome = check_read(store, 1)  # returns at the deadline, because the server hangs
    assert outcome.status is ObjectStatus.FAILED
    assert "not done within 1 s" in outcome.reason
    traffic = setup.proxy.num_asked, setup.proxy.num_connections
    for _ in range(20):
        assert "breaker open" in check_read(store, 1).reason
        assert "breaker open" in store.contains([key_of(1)])[0].reason
        assert "breaker open" in put(store, 2)[0].reason
        assert "breaker open" in store.remove([key_of(1)])[0].reason
        page = store.scan()
        assert isinstance(page, Page)
        assert "breaker open" in page.reason
    assert (setup.proxy.num_asked, setup.proxy.num_connections) == traffic
    assert store.stats.num_refused == 100
    setup.proxy.set(Faults())
    clock.now = 1000.0
    wait_until_healthy(store)
    assert check_read(store, 1).ok


def test_errors_are_retried_and_three_failed_calls_open_breaker(setup):
    clock = Clock()
    store = setup.store(breaker=Breaker(clock=clock))
    put(store, 1)
    setup.proxy.set(Faults(refuses=1000))
    setup.proxy.drop()
    for _ in range(3):
        before = setup.proxy.num_connections
        assert check_read(store, 1).status is ObjectStatus.FAILED
        assert setup.proxy.num_connections - before >= 2, "the call was not retried"
    before = setup.proxy.num_connections
    assert "breaker open" in check_read(store, 1).reason
    assert setup.proxy.num_connections == before
    setup.proxy.set(Faults())
    clock.now = 1000.0
    assert check_read(store, 1).ok


def test_read_is_retried_after_broken_connection(setup):
    store = setup.store()
    put(store, 1)
    setup.proxy.set(Faults(refuses=1))
    setup.proxy.drop()
    assert check_read(store, 1).ok


def test_number_of_round_trips_depends_on_threads_not_keys(redis_port):
    with contextlib.closing(Setup("redis", redis_port)) as setup:
        store = setup.store()
        keys = [key_of(n) for n in range(100)]
        put(store, *range(100), nbytes=100_000)
        # Every thread opens its connection now, so that no handshake adds round trips to the calls below.
        assert store.read_into([Read(key, LABEL, bytearray(100_000)) for key in keys]).ok
        calls = {
            "contains": lambda: store.contains(keys),
            "read": lambda: store.read_into([Read(key, LABEL, bytearray(100_000)) for key in keys[:32]]),
            "remove": lambda: store.remove(keys),
        }
        for name, call in calls.items():
            setup.proxy.num_turns = 0
            assert call().ok
            assert 1 <= setup.proxy.num_turns <= 2 * NUM_THREADS, f"{name}: more than two round trips per thread"


@pytest.mark.parametrize("num_objects", [1, 9, 10, 11, 23, 32, 41, 47])
def test_each_thread_makes_at_most_one_round_trip_per_batch(redis_port, num_objects):
    with contextlib.closing(Setup("redis", redis_port)) as setup:
        store = setup.store()
        put(store, *range(num_objects), nbytes=100_000)
        reads = [Read(key_of(n), LABEL, bytearray(100_000)) for n in range(num_objects)]
        num_connections = -1
        # Opening a connection adds round trips, so repeat the call until it opens no connection.
        while setup.proxy.num_connections != num_connections:
            num_connections = setup.proxy.num_connections
            setup.proxy.num_turns = 0
            assert store.read_into(reads).ok
            assert setup.proxy.num_connections < 16, "connections are not reused"
        assert 1 <= setup.proxy.num_turns <= NUM_THREADS


def test_read_waits_for_slow_response(setup):
    store = setup.store()
    put(store, 1)
    setup.proxy.set(Faults(delay_s=0.02))
    assert check_read(store, 1).ok


def test_store_is_empty_but_usable_after_wipe(setup):
    store = setup.store()
    put(store, 1, 2)
    setup.raw.wipe()
    assert [check_read(store, n).status for n in (1, 2)] == [ObjectStatus.MISSING] * 2
    assert (has(store, 1, 2), all_keys(store)) == ([False, False], [])
    assert put(store, 1).ok
    assert check_read(store, 1).ok


def flip(value: bytes, bit: int) -> bytes:
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_damaged_object_is_detected_and_deleted(setup, is_sealed):
    envelope = Envelope(Cipher(bytes(32)) if is_sealed else None)
    store, rng, name = setup.store(envelope=envelope), random.Random(3), envelope.name(key_of(1))
    put(store, 1)
    good = setup.raw.get(name)
    assert good is not None
    changes = [flip(good, rng.randrange(RECORD_BYTES * 8)) for _ in range(8)]
    changes += [flip(good, rng.randrange(RECORD_BYTES * 8, len(good) * 8)) for _ in range(8)]
    changes += [good[:n] for n in (1, 100, 255, 256, 284, 3000, len(good) - 1)]
    changes += [os.urandom(len(good)), b"an object of another program"]
    for changed in changes:
        setup.raw.set(name, changed)
        outcome = check_read(store, 1)
        assert outcome.status is ObjectStatus.CORRUPT, outcome
        assert outcome.reason
        assert setup.raw.get(name) is None
        assert check_read(store, 1).status is ObjectStatus.MISSING
    assert store.stats.num_quarantined == len(changes)
    assert put(store, 1).ok
    assert check_read(store, 1).ok


@pytest.mark.parametrize("nbytes", [4000, 6000])
def test_remote_object_with_inconsistent_lengths_is_corrupt(setup, nbytes):
    """The record claims 5,000 bytes, but the payload is shorter or longer.

    Copying the payload would leave a part of the caller's memory unwritten, or write past the end of the memory.
    """
    store, name = setup.store(), key_of(1).hex()
    put(store, 1, nbytes=nbytes)
    value = setup.raw.get(name)
    record = resealed(value[:RECORD_BYTES], 112, (5000).to_bytes(8, "little"))  # the size of the object is at byte 112
    setup.raw.set(name, record + value[RECORD_BYTES:])
    target = bytearray(b"\xee" * 8000)
    outcome = store.read_into([Read(key_of(1), LABEL, memoryview(target)[:5000])])[0]
    assert (outcome.status, target) == (ObjectStatus.CORRUPT, b"\xee" * 8000)
    assert setup.raw.get(name) is None


@pytest.mark.parametrize("is_sealed", [False, True])
def test_object_under_wrong_key_is_corrupt(setup, is_sealed):
    envelope = Envelope(Cipher(bytes(32)) if is_sealed else None)
    store = setup.store(envelope=envelope)
    put(store, 1, 2)
    setup.raw.set(envelope.name(key_of(1)), setup.raw.get(envelope.name(key_of(2))))
    assert check_read(store, 1).status is ObjectStatus.CORRUPT
    assert check_read(store, 2).ok


class OvertakenBucket:
    """A bucket that returns wrong values: the first `times` reads of name `n` return the value of name `wrong[n]`.

    Mooncake returns a wrong value if an object is removed during a read and another object reuses its memory. After
    each wrong read, `event` is called with the name.
    """

    def __init__(self, bucket, wrong: dict[str, str], times: int, event: Callable[[str], object]) -> None:
        self._bucket, self._wrong, self._event = bucket, wrong, event
        self._left = dict.fromkeys(wrong, times)

    def fetch(self, names, limits, scratch):
        overtaken = [name for name in names if self._left.get(name, 0) > 0]
        names_to_read = [self._wrong[name] if name in overtaken else name for name in names]
        values = self._bucket.fetch(names_to_read, limits, scratch)
        for name in overtaken:
            self._left[name] -= 1
            self._event(name)
        return values

    def __getattr__(self, name):
        return getattr(self._bucket, name)


def overtaken_store(setup, wrong: dict[int, int], times: int = 1, event: Callable[[str], object] = lambda _: None):
    store = setup.store()
    names = {key_of(number).hex(): key_of(other).hex() for number, other in wrong.items()}
    store._bucket = OvertakenBucket(store._bucket, names, times, event)
    return store


def read_many(store, *numbers) -> list[ObjectResult]:
    targets = [bytearray(b"\xee" * 5000) for _ in numbers]
    outcomes = store.read_into([Read(key_of(n), LABEL, target) for n, target in zip(numbers, targets, strict=True)])
    for number, target, outcome in zip(numbers, targets, outcomes, strict=True):
        assert target == (payload_of(number) if outcome.ok else b"\xee" * 5000)
    return list(outcomes)


def test_read_overtaken_by_removal_is_repeated(setup):
    other = setup.store()
    put(other, 1, 2, 3)
    removed = key_of(2)
    store = overtaken_store(
        setup, {1: 3, 2: 3, 3: 1}, event=lambda name: name == removed.hex() and other.remove([removed])
    )
    assert [outcome.status for outcome in read_many(store, 1, 2, 3)] == [
        ObjectStatus.FOUND,
        ObjectStatus.MISSING,
        ObjectStatus.FOUND,
    ]
    assert (has(other, 1, 2, 3), store.stats.num_quarantined) == ([True, False, True], 0)


def test_object_whose_repeated_read_is_wrong_is_deleted(setup):
    store = overtaken_store(setup, {1: 4, 2: 4, 3: 4}, times=2)  # both reads of 1, 2 and 3 return object 4
    put(store, 1, 2, 3, 4)
    assert [outcome.status for outcome in read_many(store, 1, 2, 3)] == [ObjectStatus.CORRUPT] * 3
    assert (has(store, 1, 2, 3), store.stats.num_quarantined) == ([False] * 3, 3)


def test_error_in_second_read_fails_only_suspect_objects(redis_port):
    with contextlib.closing(Setup("redis", redis_port)) as setup:  # Redis reads all objects in one request
        store = overtaken_store(setup, {})
        put(store, 1, 2, 3)
        name = Envelope().name(key_of(2))
        setup.raw.set(name, flip(setup.raw.get(name), 5000))
        reset = store._bucket.reset

        def die() -> None:  # `reset` is called between the two reads of object 2
            setup.proxy.set(Faults(refuses=1000))
            setup.proxy.drop()
            reset()

        store._bucket.reset = die
        assert [each.status for each in read_many(store, 1, 2, 3)] == [
            ObjectStatus.FOUND,
            ObjectStatus.FAILED,
            ObjectStatus.FOUND,
        ]


def test_object_mixed_from_two_sealed_versions_is_corrupt(setup):
    envelope = Envelope(Cipher(bytes(32)))
    store, name = setup.store(envelope=envelope), envelope.name(key_of(1))
    put(store, 1)
    first = setup.raw.get(name)
    store.remove([key_of(1)])
    put(store, 1)
    second = setup.raw.get(name)
    assert first != second
    setup.raw.set(name, first[: envelope.head_bytes] + second[envelope.head_bytes :])
    assert check_read(store, 1).status is ObjectStatus.CORRUPT


def test_object_of_other_model_is_missing_but_not_deleted(setup):
    store = setup.store()
    theirs = Label(OTHER_NAMESPACE)
    store.write([write_of(1, label=theirs)])
    outcome = check_read(store, 1)
    assert (outcome.status, "another namespace" in outcome.reason) == (ObjectStatus.MISSING, True)
    assert get(store, 1, label=theirs)[0].ok


def test_object_of_newer_format_is_missing_but_not_deleted(setup):
    store, name = setup.store(), key_of(1).hex()
    put(store, 1)
    value = setup.raw.get(name)
    record = resealed(value[:RECORD_BYTES], 8, (VERSION + 1).to_bytes(2, "little"))  # the format version is at byte 8
    newer = record + value[RECORD_BYTES:]
    setup.raw.set(name, newer)
    outcome = check_read(store, 1)
    assert (outcome.status, "format version" in outcome.reason) == (ObjectStatus.MISSING, True)
    assert setup.raw.get(name) == newer


def test_store_with_other_secret_finds_no_objects(setup):
    ours, theirs = (setup.store(envelope=Envelope(Cipher(bytes([n]) * 32))) for n in (1, 2))
    put(ours, 1)
    assert check_read(theirs, 1).status is ObjectStatus.MISSING
    pages = [theirs.scan()]
    while pages[-1].cursor:  # a page before the last one can be empty
        pages.append(theirs.scan(pages[-1].cursor))
    assert not any(page.objects for page in pages)
    assert sum(page.num_unreadable for page in pages) == 1
    assert check_read(ours, 1).ok


def test_sealed_object_reveals_no_key_no_tokens_and_no_payload(setup):
    envelope = Envelope(Cipher(bytes(32)))
    store = setup.store(envelope=envelope)
    label = Label.of(LABEL.namespace, b"some tokens", keep_ids=True)
    store.write([write_of(1, label=label)])
    value = setup.raw.get(envelope.name(key_of(1)))
    for secret in (key_of(1), label.namespace, label.token_digest, b"some tokens", payload_of(1)[:32]):
        assert secret not in value
    assert setup.raw.get(key_of(1).hex()) is None


def test_token_ids_are_never_sent_to_server(setup):
    store = setup.store()
    label = Label.of(LABEL.namespace, b"some tokens", keep_ids=True)
    store.write([write_of(1, label=label)])
    assert b"some tokens" not in setup.raw.get(key_of(1).hex())
    assert get(store, 1, label=label)[0].ok


def test_expired_objects_are_missing_and_deleted(setup):
    clock = Clock()
    clock.now = 1e9
    store = setup.store(envelope=Envelope(ttl_s=100, clock=clock))
    put(store, 1, 2)
    clock.now += 99
    assert check_read(store, 1).ok
    clock.now += 2
    assert check_read(store, 1).reason == "expired"
    assert setup.raw.get(key_of(1).hex()) is None
    assert all_keys(store) == []
    assert put(store, 2).ok  # a rewrite renews the TTL
    assert check_read(store, 2).ok


def test_store_recovers_after_redis_restart(tmp_path):
    from kvtier.storage.remote.redis import RedisBucket

    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(redis_server(tmp_path))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        store = RemoteStore(
            RedisBucket(port=port, num_connections=4, timeout_s=5.0), "redis", breaker=Breaker(retry_s=0), **FAST
        )
        put(store, *range(8), nbytes=200_000)
    outcome = check_read(store, 1, 200_000)  # the server has been killed
    assert (outcome.status, "redis" in outcome.reason) == (ObjectStatus.FAILED, True)
    with redis_server(tmp_path, port=port):
        wait_until_healthy(store)
        assert check_read(store, 1, 200_000).status is ObjectStatus.MISSING
        assert put(store, 1).ok
        assert check_read(store, 1).ok
    store.close()
