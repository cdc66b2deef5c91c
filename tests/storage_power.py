"""A DiskStore on a simulated disk that loses random unsynced data in a power failure."""

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
"""Name of the call, numbers of the objects, and size of each object in bytes."""


class Versions:
    """Sizes of all written versions of each object, by the number of the object."""

    def __init__(self) -> None:
        self.sizes: dict[int, list[int]] = {number: [] for number in range(12)}

    def next_write(self, number: int, nbytes: int):
        self.sizes[number].append(nbytes)
        return write_of(number, nbytes, len(self.sizes[number]) - 1)

    def check_read(self, store: DiskStore, number: int) -> int | None:
        """Read an object and check its bytes. Return its version, or None if no read succeeds."""
        for nbytes in reversed(self.sizes[number]):
            result, target = get(store, number, nbytes)
            if not result.ok:
                assert target == b"\xee" * nbytes, "a miss changed the caller's memory"
                if "expected" not in result.reason:
                    return None
                continue  # the stored version has another size
            matching = [v for v, n in enumerate(self.sizes[number]) if n == nbytes]
            found = [v for v in matching if payload_of(number, nbytes, v) == target]
            assert found, f"the {nbytes} bytes of object {number} equal no version of this size"
            return found[-1]
        return None


class PowerFailure:
    """Runs store calls on a simulated disk. The power fails before disk operation `at`, or when `fail` is called.

    Disk operations are numbered from 1, so with at=0 the power fails only when `fail` is called. `left` is the disk
    after the failure, and None before. `durable` contains the objects whose last change was reported as durable. It
    maps the number of each object to its version, or to None after a removal. Evicted objects are not in `durable`.
    """

    def __init__(
        self, folder: str, max_bytes: int, sync: Sync, at: int, seed: int, secret: bytes | None = None
    ) -> None:
        self.disk, self.versions, self.left = SimulatedDisk(), Versions(), None
        self.durable: dict[int, int | None] = {}
        self._at, self._random = at, random.Random(seed)
        self._settings = {"segment_bytes": 48 << 10, "min_free_bytes": 0, "num_threads": 1, "secret": secret}
        self.folder, self.max_bytes = folder, max_bytes
        self.disk.before = self._count
        self.restart(sync)

    def _count(self, _, number: int) -> None:
        if number == self._at:
            self.fail()

    def restart(self, sync: Sync) -> None:
        """Open the store on the current disk. The previous store must be closed or killed."""
        self.store = DiskStore(self.folder, self.max_bytes, files=self.disk, sync=sync, **self._settings)

    def fail(self, keep: float = 0.5) -> None:
        """Simulate a power failure. `keep` is the probability that an unsynced change remains."""
        self.left = self.disk.after_crash(lambda: self._random.random() < keep)

    def kill(self) -> None:
        """End the store without a sync. Its writes remain in the page cache, as after SIGKILL."""
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
            reported = {n: len(self.versions.sizes[n]) - 1 for n, o in zip(numbers, results, strict=True) if o.ok}
        else:
            results = self.store.remove([key_of(n) for n in numbers])
            reported = dict.fromkeys(numbers)
        for number in numbers:  # the state of the objects is unknown, unless the call is durable
            self.durable.pop(number, None)
        if self.left is None and results.is_durable:
            self.durable |= reported
        kept = {n: v for n, v in self.durable.items() if v is None or self.store.contains([key_of(n)])[0].ok}
        self.durable = kept  # without evicted objects

    def reopen(self) -> DiskStore:
        return DiskStore(self.folder, self.max_bytes, files=self.left, **self._settings)

    def run_until_failure(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if self.left is None:
                self.run(*call)
        if self.left is None:
            self.fail()
        self.disk.before = lambda *_: None
        self.store.close()

    def inspect(self) -> Checked:
        """Open the store after the failure and read all objects. Then write each object again and read it."""
        store = self.reopen()
        found = lost = refilled = 0
        for number in range(12):
            version = self.versions.check_read(store, number)  # fails on a wrong byte
            found += version is not None
            if number in self.durable:
                lost += not same_bytes(self.versions, number, version, self.durable[number])
        check_disk(store)  # fails if the store has lost space
        assert store.stats.used_bytes <= self.max_bytes
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
    """Result of an inspection after a power failure."""

    found: int
    durable: int
    """Number of objects that were reported as durably stored or removed."""
    lost: int
    """Number of durable objects whose state differs from the reported state."""
    refilled: int
    """Number of the 12 objects that were read correctly after they had been written again."""
    leaked_bytes: int
    """Number of bytes in the quarantine folder.

    The store moves segments with an invalid superblock to this folder. A power failure must not create such segments.
    """


def same_bytes(versions: Versions, number: int, found: int | None, expected: int | None) -> bool:
    if found is None or expected is None:
        return found is expected
    first, second = (payload_of(number, versions.sizes[number][v], v) for v in (found, expected))
    return first == second
