"""Tests that every store must pass. Test modules define a `store` fixture and import all tests from here."""

from __future__ import annotations

import itertools
import mmap
import random
import threading

import numpy as np
import pytest

from kvtier.errors import ArgumentError, ClosedError
from kvtier.storage import Label, ObjectStatus, Read, Scattered, Write
from storage_support import (
    LABEL,
    NAMESPACE,
    OTHER_NAMESPACE,
    all_keys,
    all_objects,
    get,
    has,
    key_of,
    payload_of,
    put,
    write_of,
)


def test_written_objects_are_read_back(store):
    written = put(store, 1, 2, 3)
    assert [result.status for result in written] == [ObjectStatus.STORED] * 3
    assert written.nbytes == 15000
    assert written.seconds > 0
    for number in (3, 1, 2):
        result, target = get(store, number)
        assert (result.status, result.nbytes, result.reason) == (ObjectStatus.FOUND, 5000, "")
        assert target == payload_of(number)


def test_results_follow_order_of_batch(store):
    put(store, 1, 3)
    targets = [bytearray(5000) for _ in range(4)]
    results = store.read_into([Read(key_of(n), LABEL, targets[n]) for n in range(4)])
    assert [result.status.value for result in results] == ["missing", "found", "missing", "found"]
    assert (len(results), results.ok, results.nbytes) == (4, False, 10000)
    assert [bytes(target) for target in targets] == [bytes(5000), payload_of(1), bytes(5000), payload_of(3)]


def test_miss_leaves_memory_unchanged(store):
    result, target = get(store, 1)
    assert result.status is ObjectStatus.MISSING
    assert target == b"\xee" * 5000


def test_empty_batch_returns_no_results(store):
    for results in (store.contains([]), store.read_into([]), store.write([]), store.remove([])):
        assert results.outcomes == ()
        assert results.ok
    assert store.scan().objects == ()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4095, 4096, 4097, 8192, 100_000])
@pytest.mark.parametrize("ids", [b"", bytes(range(64))])
def test_objects_of_any_length_are_read_back(store, nbytes, ids):
    label = Label.of(NAMESPACE, ids, keep_ids=True)
    assert store.write([write_of(7, nbytes, label=label)]).ok
    result, target = get(store, 7, nbytes, label)
    assert result.ok
    assert target == payload_of(7, nbytes)


def test_memory_of_any_kind_and_alignment_is_accepted(store):
    aligned = memoryview(mmap.mmap(-1, 16384))
    array = np.arange(2048, dtype=np.float64)
    sources = [
        aligned,
        aligned[4096:12288],
        aligned[1:8001],
        array,
        memoryview(array).toreadonly(),
        bytearray(77),
        b"x",
    ]
    aligned[:] = payload_of(1, 16384)
    assert store.write([Write(key_of(i), LABEL, source) for i, source in enumerate(sources)]).ok
    targets = [np.zeros(memoryview(source).nbytes, np.uint8) for source in sources]
    assert store.read_into([Read(key_of(i), LABEL, target) for i, target in enumerate(targets)]).ok
    for source, target in zip(sources, targets, strict=True):
        assert target.tobytes() == bytes(memoryview(source).cast("B"))


@pytest.mark.parametrize("sizes", [[5000], [4096, 4096], [1, 0, 4095, 63, 3], [64] * 40, [], [0, 0], [70_000, 4096]])
def test_objects_of_several_pieces_are_read_back(store, sizes):
    """Reads and writes accept a list of buffers per object.

    A read may divide an object into buffers of other sizes than the write.
    """
    nbytes = sum(sizes)
    content = payload_of(3, nbytes)
    cuts = np.cumsum([0, *sizes]).tolist()
    pieces = [memoryview(content)[low:high] for low, high in itertools.pairwise(cuts)]
    assert store.write([Write(key_of(1), LABEL, pieces), Write(key_of(2), LABEL, content)]).ok
    whole = bytearray(nbytes)
    targets = [bytearray(size) for size in reversed(sizes)]
    results = store.read_into([Read(key_of(1), LABEL, whole), Read(key_of(2), LABEL, targets)])
    assert [result.nbytes for result in results] == [nbytes] * 2
    assert bytes(whole) == content
    assert b"".join(map(bytes, targets)) == content
    too_small = [bytearray(b"\xee" * size) for size in sizes] + [bytearray(b"\xee")]
    assert store.read_into([Read(key_of(1), LABEL, too_small)])[0].status is ObjectStatus.MISSING
    assert set(b"".join(map(bytes, too_small))) == {0xEE}


@pytest.mark.parametrize("size", [64, 100, 4096, 12_288])
@pytest.mark.parametrize("start", [0, 64, 4096])
@pytest.mark.parametrize("count", [2, 9, 1500])
def test_objects_scattered_in_one_buffer_are_read_back(store, start, size, count):
    """The pieces are in reversed order, with gaps between them. One system call accepts fewer than 1,500 pieces."""
    count = min(count, 200_000 // size)
    memory = mmap.mmap(-1, 4096 + 2 * count * size + 4096)
    offsets = start + 2 * size * np.arange(count)[::-1]
    pieces = Scattered(memoryview(memory), offsets, np.full(count, size))
    content = payload_of(4, count * size)
    for number, piece in enumerate(pieces):
        piece[:] = content[number * size : (number + 1) * size]
    before = bytes(memory)
    assert store.write([Write(key_of(1), LABEL, pieces), Write(key_of(2), LABEL, content)]).ok
    whole = bytearray(count * size)
    assert store.read_into([Read(key_of(1), LABEL, whole)]).ok
    assert whole == content
    for piece in pieces:
        piece[:] = bytes(size)
    assert store.read_into([Read(key_of(2), LABEL, pieces)])[0].nbytes == count * size
    assert bytes(memory) == before, "a read changed bytes between the pieces"
    del piece, pieces


def test_scattered_memory_outside_its_buffer_raises(store):
    target = memoryview(bytearray(100))
    for offsets, sizes in (([90], [11]), ([-1], [5]), ([0], [-1]), ([0, 1], [1]), ([], [])):
        with pytest.raises(ArgumentError, match="100 bytes"):
            Scattered(target, np.array(offsets, np.int64), np.array(sizes, np.int64))
    read_only = Scattered(memoryview(bytes(100)), np.array([0, 50]), np.array([50, 0]))
    assert store.write([Write(key_of(1), LABEL, read_only)]).ok
    with pytest.raises(ArgumentError, match="writable"):
        store.read_into([Read(key_of(1), LABEL, read_only)])


def test_invalid_arguments_raise(store):
    with pytest.raises(ArgumentError, match="32 bytes, got 3"):
        store.contains([b"key"])
    with pytest.raises(ArgumentError, match="writable"):
        store.read_into([Read(key_of(1), LABEL, b"read-only")])
    with pytest.raises(ArgumentError, match="contiguous"):
        store.write([Write(key_of(1), LABEL, memoryview(bytes(10))[::2])])
    with pytest.raises(ArgumentError, match="namespace of 32 bytes"):
        Label(b"short")
    assert put(store, 1).ok  # the store still works


@pytest.mark.parametrize(
    ("label", "nbytes", "reason"),
    [
        (Label(OTHER_NAMESPACE), 5000, "another namespace"),
        (Label.of(NAMESPACE, b"other tokens"), 5000, "other tokens"),
        (LABEL, 4999, "stored 5000 bytes, expected 4999"),
    ],
)
def test_read_with_different_label_or_length_is_miss(store, label, nbytes, reason):
    put(store, 1)
    result, target = get(store, 1, nbytes, label)
    assert result.status is ObjectStatus.MISSING
    assert reason in result.reason
    assert target == b"\xee" * nbytes
    assert get(store, 1)[0].ok


def test_keyed_digest_depends_on_secret():
    assert Label.of(NAMESPACE, b"tokens", secret=b"a") != Label.of(NAMESPACE, b"tokens", secret=b"b")
    assert Label.of(NAMESPACE, b"tokens").token_ids == b""


def test_write_replaces_object(store):
    put(store, 1)
    assert put(store, 1, version=1).ok
    assert get(store, 1)[1] == payload_of(1, version=1)
    assert put(store, 1, nbytes=9000, version=2).ok
    assert get(store, 1, 9000)[1] == payload_of(1, 9000, version=2)
    assert all_keys(store) == [key_of(1)]


def test_last_write_of_key_in_batch_wins(store):
    put(store, 1, version=2)
    assert store.write([write_of(1, version=v) for v in (0, 1, 2)]).ok
    assert get(store, 1)[1] == payload_of(1, version=2)


def test_removed_object_is_missing(store):
    put(store, 1, 2)
    results = store.remove([key_of(1), key_of(3)])
    assert [result.status for result in results] == [ObjectStatus.REMOVED, ObjectStatus.MISSING]
    assert has(store, 1, 2, 3) == [False, True, False]
    assert not get(store, 1)[0].ok
    assert get(store, 2)[0].ok


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_scan_lists_every_object_once(store, limit):
    label = Label.of(NAMESPACE, b"tokens")
    store.write([write_of(n, 100 + n, label=label) for n in range(7)])
    assert sorted(all_keys(store, limit)) == sorted(key_of(n) for n in range(7))
    listed = {stored.key: stored for stored in all_objects(store, limit)}
    assert (listed[key_of(3)].nbytes, listed[key_of(3)].label) == (103, label)


def test_stats_count_calls_and_bytes(store):
    put(store, 1, 2)
    store.contains([key_of(1), key_of(9)])
    get(store, 1)
    get(store, 9)
    store.remove([key_of(2)])
    stats = store.stats
    assert (stats.writes.num_done, stats.writes.nbytes, stats.writes.num_calls) == (2, 10000, 1)
    assert (stats.lookups.num_done, stats.lookups.num_missing) == (1, 1)
    assert (stats.reads.num_done, stats.reads.num_missing, stats.reads.nbytes) == (1, 1, 5000)
    assert (stats.removals.num_done, all_keys(store)) == (1, [key_of(1)])
    assert stats.reads.seconds > 0


def test_calls_after_close_raise_and_close_is_idempotent(store):
    put(store, 1)
    store.close()
    store.close()
    for call in (
        lambda: has(store, 1),
        lambda: get(store, 1),
        lambda: put(store, 1),
        lambda: store.remove([]),
        lambda: store.scan(),
    ):
        with pytest.raises(ClosedError):
            call()


def test_concurrent_threads_never_read_wrong_bytes(store):
    """Read, write and remove objects concurrently. Some of the tested stores are too small for all objects."""
    problems = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(40):
            numbers = rng.sample(range(40), 4)
            if rng.random() < 0.4:
                store.write([write_of(n, 30_000) for n in numbers])
            elif rng.random() < 0.2:
                store.remove([key_of(n) for n in numbers])
            else:
                targets = [bytearray(30_000) for _ in numbers]
                results = store.read_into([Read(key_of(n), LABEL, r) for n, r in zip(numbers, targets, strict=True)])
                for number, target, result in zip(numbers, targets, results, strict=True):
                    if result.status not in (ObjectStatus.FOUND, ObjectStatus.MISSING) or (
                        result.ok and bytes(target) != payload_of(number, 30_000)
                    ):
                        problems.append((number, result))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
