"""DiskStore against a dictionary: any order of calls, restarts, damage and crashes."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.storage import Compression, DiskStore, Read, Status, Sync
from storage_support import LABEL, SimulatedDisk, all_keys, get, key_of, payload_of, write_of

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=4)
SIZES = st.sampled_from([0, 100, 4096, 5000, 12_000])
COMMON = {"segment_bytes": 48 << 10, "min_free_bytes": 0, "num_threads": 2}


class Versions:
    """What was ever written under each number, and the last of it."""

    def __init__(self) -> None:
        self.sizes: dict[int, list[int]] = {number: [] for number in range(12)}

    def next_write(self, number: int, nbytes: int):
        self.sizes[number].append(nbytes)
        return write_of(number, nbytes, len(self.sizes[number]) - 1)

    def check_read(self, store: DiskStore, number: int) -> int | None:
        """The version that is there, after checking that every byte is that version's; None if it is not there."""
        for version, nbytes in reversed([*enumerate(self.sizes[number])]):
            outcome, room = get(store, number, nbytes)
            if not outcome.ok:
                assert room == b"\xee" * nbytes, "a miss changed the caller's memory"
                if "asked for" not in outcome.reason:
                    return None
                continue
            matching = [v for v, n in enumerate(self.sizes[number]) if n == nbytes]
            found = [v for v in matching if payload_of(number, nbytes, v) == room]
            assert found, f"bytes that nobody wrote under {number}, version at most {version}"
            return found[-1]
        return None


class DiskMachine(RuleBasedStateMachine):
    """A store with room for some of the objects: what is found is always the last written, and what was evicted is
    only ever missing."""

    @initialize(
        direct=st.booleans(),
        sync=st.sampled_from(Sync),
        compression=st.sampled_from(Compression),
        slots=st.integers(6, 40),
    )
    def start(self, direct, sync, compression, slots):
        self.folder = Path(tempfile.mkdtemp())
        self.settings = {"direct": direct, "sync": sync, "compression": compression, **COMMON}
        self.max_bytes = slots * 8192
        self.versions = Versions()
        self.last: dict[int, int | None] = {}
        """Number -> its last version, None once it was removed. What is evicted may be missing."""
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
            assert self.store.contains([key_of(number) for number in numbers]).ok, "evicted by its own batch"

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
                assert same_bytes(self.versions, number, version, last), (
                    f"an older version of {number}, or a removed one"
                )

    @rule()
    def restart(self):
        before = sorted(all_keys(self.store))
        self.store.close()
        self.open()
        assert sorted(all_keys(self.store)) == before
        assert self.store.stats.num_quarantined == 0

    @rule(where=st.integers(0, 10**9), bit=st.integers(0, 7))
    def damage(self, where, bit):
        """A bit flips somewhere while the store is closed."""
        self.store.close()
        files = sorted(path for path in (self.folder / "store").glob("segment*"))
        if files:
            path = files[where % len(files)]
            data = bytearray(path.read_bytes())
            data[where // 7 % len(data)] ^= 1 << bit
            path.write_bytes(data)
        self.open()

    @invariant()
    def books_agree(self):
        if hasattr(self, "store"):
            self.store.check()
            aside = self.folder / "store" / "quarantine"
            files = [*(self.folder / "store").glob("segment*"), *(aside.glob("*") if aside.exists() else ())]
            assert sum(path.stat().st_size for path in files) == self.store.stats.used_bytes

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


def test_disk_machine():
    run_state_machine_as_test(
        DiskMachine, settings=settings(max_examples=80 * SOAK, stateful_step_count=25, deadline=None)
    )


CALLS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "write", "remove", "read"]), NUMBERS, st.sampled_from([100, 5000])),
    min_size=1,
    max_size=10,
)


class PowerFailure:
    """Runs calls on a simulated disk until, before its n-th operation, the power fails: `left` is what the next process
    finds. `durable` is what had been reported durable then: number -> version, None for what was reported removed."""

    def __init__(self, folder: str, room: int, sync: Sync, at: int, seed: int) -> None:
        self.disk, self.versions, self.left = SimulatedDisk(), Versions(), None
        self.durable: dict[int, int | None] = {}
        self._at, self._random = at, random.Random(seed)
        self._settings = {"segment_bytes": 48 << 10, "min_free_bytes": 0, "num_threads": 1}
        self.folder, self.room = folder, room
        self.disk.before = self._count
        self.store = DiskStore(folder, room, files=self.disk, sync=sync, **self._settings)

    def _count(self, _, number: int) -> None:
        if number == self._at:
            self.fail()

    def fail(self) -> None:
        self.left = self.disk.after_crash(lambda: self._random.random() < 0.5)

    def run(self, call: str, numbers: list[int], nbytes: int) -> None:
        if call == "read":
            self.store.read_into([Read(key_of(n), LABEL, bytearray(nbytes)) for n in numbers])
            return
        if call == "write":
            results = self.store.write([self.versions.next_write(n, nbytes) for n in numbers])
            told = {n: len(self.versions.sizes[n]) - 1 for n, o in zip(numbers, results, strict=True) if o.ok}
        else:
            results = self.store.remove([key_of(n) for n in numbers])
            told = dict.fromkeys(numbers)
        for number in numbers:  # in doubt while the call ran, and after it unless it says better
            self.durable.pop(number, None)
        if self.left is None and results.is_durable:
            self.durable |= told
        kept = {n: v for n, v in self.durable.items() if v is None or self.store.contains([key_of(n)])[0].ok}
        self.durable = kept  # evicted: neither here nor there

    def reopen(self) -> DiskStore:
        return DiskStore(self.folder, self.room, files=self.left, **self._settings)


@pytest.mark.parametrize("room", [64 << 10, 1 << 20], ids=["evicting", "roomy"])
@given(calls=CALLS, sync=st.sampled_from(Sync), at=st.integers(1, 150), seed=st.integers(0, 2**32))
@settings(max_examples=300 * SOAK, deadline=None)
def test_whatever_a_power_failure_leaves_of_unsynced_writes_no_wrong_byte_is_served_soak(room, calls, sync, at, seed):
    """What was not synced is there, or not, or in part, sector by sector, file by file, name by name."""
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, room, sync, at, seed)
        for call in calls:
            if run.left is None:
                run.run(*call)
        if run.left is None:
            run.fail()
        run.disk.before = lambda *_: None
        run.store.close()
        store = run.reopen()
        for number in range(12):
            version = run.versions.check_read(store, number)  # no wrong byte
            if number in run.durable:
                assert same_bytes(run.versions, number, version, run.durable[number]), (
                    "what was reported durable is not"
                )
        store.check()  # no space is lost
        assert store.stats.used_bytes <= room
        for number in range(12):
            assert store.write([run.versions.next_write(number, 5000)])[0].status is Status.STORED
            assert run.versions.check_read(store, number) == len(run.versions.sizes[number]) - 1
        store.close()


def same_bytes(versions: Versions, number: int, found: int | None, expected: int | None) -> bool:
    if found is None or expected is None:
        return found is expected
    first, second = (payload_of(number, versions.sizes[number][v], v) for v in (found, expected))
    return first == second


@pytest.mark.parametrize("gone_by", ["replacement", "eviction", "whole segments"])
@pytest.mark.parametrize("seed", range(20))
def test_what_was_reported_removed_does_not_come_back_in_an_older_version_after_a_power_failure(gone_by, seed):
    """Its older record, in a table of its own, is blank on disk, too."""
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 100 << 10, Sync.WRITE, at=0, seed=seed)
        run.run("write", [0], 100)
        if gone_by == "replacement":
            run.run("write", [0], 5000)
        else:
            size = 100 if gone_by == "eviction" else 5000
            for number in range(1, 12):
                run.run("write", [number], size)
            for _ in range(20):
                run.store.write([write_of(100 + _, size)])
        run.run("remove", [0], 0)
        run.fail()
        run.store.close()
        store = run.reopen()
        assert run.versions.check_read(store, 0) is None
        store.close()


def test_a_store_that_was_closed_in_order_loses_nothing_in_a_power_failure():
    with tempfile.TemporaryDirectory() as folder:
        run = PowerFailure(folder, 1 << 20, Sync.CLOSE, at=0, seed=1)
        run.run("write", [*range(12)], 5000)
        run.run("remove", [3], 0)
        run.store.close()
        run.fail()
        store = run.reopen()
        assert [run.versions.check_read(store, n) for n in range(12)] == [None if n == 3 else 0 for n in range(12)]
        store.close()
