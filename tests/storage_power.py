"""A DiskStore on a disk that loses, when the power fails, any part of what was not synced."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import StoreError
from kvtier.storage import DiskStore, Read, Sync
from storage_support import LABEL, SimulatedDisk, check_disk, get, key_of, payload_of, write_of

Call = tuple[str, list[int], int]
"""What is done, to which numbers, with how many bytes each."""


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
                if "expected" not in outcome.reason:
                    return None
                continue
            matching = [v for v, n in enumerate(self.sizes[number]) if n == nbytes]
            found = [v for v in matching if payload_of(number, nbytes, v) == room]
            assert found, f"bytes that nobody wrote under {number}, version at most {version}"
            return found[-1]
        return None


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
        self.restart(sync)

    def _count(self, _, number: int) -> None:
        if number == self._at:
            self.fail()

    def restart(self, sync: Sync) -> None:
        """Open the store on the disk as it is; it is closed or killed before."""
        self.store = DiskStore(self.folder, self.room, files=self.disk, sync=sync, **self._settings)

    def fail(self, keep: float = 0.5) -> None:
        """Each unsynced part is kept with this probability."""
        self.left = self.disk.after_crash(lambda: self._random.random() < keep)

    def kill(self) -> None:
        """End the store without a sync, as kill -9 does: what it wrote is with the operating system."""
        self.disk.before = _refuse_sync
        with contextlib.suppress(StoreError):
            self.store.close()
        self.disk.before = self._count

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

    def run_until_it_fails(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if self.left is None:
                self.run(*call)
        if self.left is None:
            self.fail()
        self.disk.before = lambda *_: None
        self.store.close()

    def inspect(self) -> Checked:
        """Open what is left, read everything, then see that there is room for everything again."""
        store = self.reopen()
        found = lost = refilled = 0
        for number in range(12):
            version = self.versions.check_read(store, number)  # raises at a wrong byte
            found += version is not None
            if number in self.durable:
                lost += not same_bytes(self.versions, number, version, self.durable[number])
        check_disk(store)  # no space is lost
        assert store.stats.used_bytes <= self.room
        leaked = sum(self.left.list(f"{self.folder}/quarantine").values())
        for number in range(12):
            stored = store.write([self.versions.next_write(number, 5000)])[0]
            last = len(self.versions.sizes[number]) - 1
            refilled += stored.ok and self.versions.check_read(store, number) == last
        store.close()
        return Checked(found, len(self.durable), lost, refilled, leaked)


def _refuse_sync(operation: str, _: int) -> None:
    if operation == "sync":
        raise OSError(errno.EIO, "Input/output error")


@dataclass(frozen=True)
class Checked:
    """What was found after the power failed."""

    found: int
    durable: int
    """Objects that were reported stored or removed for good."""
    lost: int
    """Of those, the ones that are not so."""
    refilled: int
    """Of 12 objects that were written anew, the ones that are there."""
    leaked_bytes: int
    """Set aside for good, though nothing was damaged."""


def same_bytes(versions: Versions, number: int, found: int | None, expected: int | None) -> bool:
    if found is None or expected is None:
        return found is expected
    first, second = (payload_of(number, versions.sizes[number][v], v) for v in (found, expected))
    return first == second
