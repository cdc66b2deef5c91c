"""Compare DiskStore with a dictionary under random calls, restarts, damage and power failures."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.storage import Compression, DiskStore, ObjectStatus, Sync
from storage_power import PowerFailure, Versions, same_bytes
from storage_support import all_keys, check_disk, key_of, write_of

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=4)
SIZES = st.sampled_from([0, 100, 4096, 5000, 12_000])
COMMON = {"segment_bytes": 48 << 10, "min_free_bytes": 0, "num_threads": 2}


class DiskMachine(RuleBasedStateMachine):
    """Calls a store that is often too small for all objects.

    A read must return the last stored version or miss. It must not return an older version or a removed object.
    """

    @initialize(
        direct=st.booleans(),
        sync=st.sampled_from(Sync),
        compression=st.sampled_from(Compression),
        secret=st.sampled_from([None, bytes(32)]),
        slots=st.integers(6, 40),
    )
    def start(self, direct, sync, compression, secret, slots):
        self.folder = Path(tempfile.mkdtemp())
        self.settings = {"direct": direct, "sync": sync, "compression": compression, "secret": secret, **COMMON}
        self.max_bytes = slots * 8192
        self.versions = Versions()
        self.last: dict[int, int | None] = {}
        """Last stored version of each object by number, or None if the object was removed later."""
        self.open()

    def open(self):
        self.store = DiskStore(self.folder / "store", self.max_bytes, **self.settings)

    @rule(numbers=NUMBERS, nbytes=SIZES)
    def write(self, numbers, nbytes):
        results = self.store.write([self.versions.next_write(number, nbytes) for number in numbers])
        for number, outcome in zip(numbers, results, strict=True):
            assert outcome.ok or "no room" in outcome.reason
            assert results.is_durable == (self.settings["sync"] is Sync.WRITE)
            if outcome.ok:
                self.last[number] = len(self.versions.sizes[number]) - 1
        if results.ok:
            assert self.store.contains([key_of(number) for number in numbers]).ok, "a batch evicted its own objects"

    @rule(numbers=NUMBERS)
    def remove(self, numbers):
        self.store.remove([key_of(number) for number in numbers])
        self.last.update(dict.fromkeys(numbers))

    @rule(numbers=NUMBERS)
    def read(self, numbers):
        for number in numbers:
            version = self.versions.check_read(self.store, number)
            last = self.last.get(number)
            if version is not None:
                assert same_bytes(self.versions, number, version, last), f"read an old version of object {number}"

    @rule()
    def restart(self):
        before = sorted(all_keys(self.store))
        self.store.close()
        self.open()
        assert sorted(all_keys(self.store)) == before
        assert self.store.stats.num_quarantined == 0

    @rule(where=st.integers(0, 10**9), bit=st.integers(0, 7))
    def damage(self, where, bit):
        """Flip one bit in a segment file while the store is closed."""
        self.store.close()
        files = sorted(path for path in (self.folder / "store").glob("segment*"))
        if files:
            path = files[where % len(files)]
            data = bytearray(path.read_bytes())
            data[where // 7 % len(data)] ^= 1 << bit  # // 7, because `where` also chooses the file
            path.write_bytes(data)
        self.open()

    @invariant()
    def check_store_and_files(self):
        if hasattr(self, "store"):
            check_disk(self.store)
            quarantine = self.folder / "store" / "quarantine"
            files = [*(self.folder / "store").glob("segment*"), *(quarantine.glob("*") if quarantine.exists() else ())]
            assert sum(path.stat().st_size for path in files) == self.store.stats.used_bytes

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


def test_disk_store_matches_dictionary_under_random_calls():
    run_state_machine_as_test(
        DiskMachine, settings=settings(max_examples=80 * SOAK, stateful_step_count=25, deadline=None)
    )


CALLS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "write", "remove", "read"]), NUMBERS, st.sampled_from([100, 5000])),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("max_bytes", [64 << 10, 1 << 20], ids=["small store", "large store"])
@given(calls=CALLS, sync=st.sampled_from(Sync), at=st.integers(1, 150), seed=st.integers(0, 2**32))
@settings(max_examples=300 * SOAK, deadline=None)
def test_reads_after_power_failure_return_no_wrong_bytes(max_bytes, calls, sync, at, seed):
    """Whether an unsynced sector, file or file name survives the failure is random."""
    check_power_failure(max_bytes, calls, sync, at, seed)


@given(
    max_bytes=st.sampled_from([64 << 10, 1 << 20]),
    calls=CALLS,
    sync=st.sampled_from(Sync),
    at=st.integers(1, 150),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150 * SOAK, deadline=None)
def test_encrypted_reads_after_power_failure_are_correct(max_bytes, calls, sync, at, seed):
    """The folder of keys is on the same disk. If a key were lost, durable objects would be unreadable."""
    check_power_failure(max_bytes, calls, sync, at, seed, bytes(32))


def check_power_failure(max_bytes, calls, sync, at, seed, secret=None):
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, max_bytes, sync, at, seed, secret)
        run.run_until_failure(calls)
        checked = run.inspect()
        assert checked.lost == 0, "a durable object was lost"
        assert (checked.refilled, checked.leaked_bytes) == (12, 0), "the store lost space"


@pytest.mark.parametrize("removed_by", ["replacement", "eviction", "segment deletion"])
@pytest.mark.parametrize("seed", range(20))
def test_removed_object_stays_removed_after_power_failure(removed_by, seed):
    """Object 0 is replaced or evicted, or its segment is deleted. Then object 0 is removed.

    The first record of the object must be erased on the disk too, not only in the page cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 100 << 10, Sync.WRITE, at=0, seed=seed)
        run.run("write", [0], 100)
        if removed_by == "replacement":
            run.run("write", [0], 5000)
        else:
            size = 100 if removed_by == "eviction" else 5000
            for number in range(1, 12):
                run.run("write", [number], size)
            for number in range(100, 120):
                run.store.write([write_of(number, size)])
        run.run("remove", [0], 0)
        run.fail()
        run.store.close()
        store = run.reopen()
        assert run.versions.check_read(store, 0) is None
        store.close()


def test_closed_store_keeps_its_objects_after_power_failure():
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 1 << 20, Sync.CLOSE, at=0, seed=1)
        run.run("write", [*range(12)], 5000)
        run.run("remove", [3], 0)
        run.store.close()
        run.fail()
        store = run.reopen()
        assert [run.versions.check_read(store, n) for n in range(12)] == [None if n == 3 else 0 for n in range(12)]
        store.close()


def test_reopening_with_sync_makes_existing_objects_durable():
    """A killed process leaves its objects only in the page cache. A store with Sync.WRITE must sync these objects."""
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 1 << 20, Sync.CLOSE, at=0, seed=1)
        run.run("write", [*range(12)], 5000)
        run.kill()
        run.restart(Sync.WRITE)
        again = run.store.write([write_of(number, 5000) for number in range(12)])
        assert again.ok
        assert again.is_durable
        run.fail(keep=0.0)
        run.store.close()
        store = run.reopen()
        assert [run.versions.check_read(store, number) for number in range(12)] == [0] * 12
        store.close()


@pytest.mark.parametrize("max_bytes", [64 << 10, 32 << 10], ids=["one segment fits", "no segment fits"])
def test_segments_deleted_for_smaller_limit_stay_deleted(max_bytes):
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 1 << 20, Sync.WRITE, at=0, seed=1)
        run.run("write", [*range(12)], 5000)
        run.store.close()
        run.max_bytes = max_bytes
        run.restart(Sync.WRITE)
        removed = run.store.remove([key_of(number) for number in range(12)])
        assert ObjectStatus.MISSING in [outcome.status for outcome in removed]
        assert removed.is_durable
        run.fail(keep=0.0)
        run.store.close()
        run.max_bytes = 1 << 20
        store = run.reopen()
        assert not all_keys(store)
        store.close()
