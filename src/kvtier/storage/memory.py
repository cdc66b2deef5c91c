"""MemoryStore: the store that is a dictionary. The double for tests of what uses a store, and the shortest example."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.errors import ArgumentError, ClosedError
from kvtier.storage.checksum import checksum
from kvtier.storage.codec import copy_bytes, encode, mismatch
from kvtier.storage.record import RECORD_BYTES, Record
from kvtier.storage.store import (
    Kind,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    StoredObject,
    StoreStats,
    Write,
    check_keys,
    view_of,
)


@dataclass(slots=True, eq=False)
class MemoryObject:
    """A stored object; tests damage its payload."""

    record: Record
    payload: bytearray
    token_ids: bytes

    @property
    def nbytes(self) -> int:
        """What it counts for."""
        return RECORD_BYTES + self.record.total_bytes


class MemoryStore:
    """Objects in a dictionary, bounded by bytes, least recently used first out. Checksums are verified as on disk."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ArgumentError(f"a store needs room, got max_bytes={max_bytes}")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._meter = Meter()
        self._used_bytes = self._num_evicted = self._num_quarantined = 0
        self._is_closed = False
        self.objects: OrderedDict[bytes, MemoryObject] = OrderedDict()
        """From the least to the most recently used."""

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        """Which of these objects are there."""
        begin = self._begin(keys)
        with self._lock:
            outcomes = [
                ObjectResult(ObjectStatus.FOUND if key in self.objects else ObjectStatus.MISSING) for key in keys
            ]
        return self._end(Kind.LOOKUP, outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        """Fill the given memory."""
        begin = self._begin([read.key for read in reads])
        views = [view_of(read.into, writable=True) for read in reads]
        with self._lock:
            outcomes = [self._read(read, view) for read, view in zip(reads, views, strict=True)]
        return self._end(Kind.READ, outcomes, begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        """Store objects."""
        begin = self._begin([write.key for write in writes])
        views = [view_of(write.payload) for write in writes]
        with self._lock:
            outcomes = [self._write(write, view) for write, view in zip(writes, views, strict=True)]
        return self._end(Kind.WRITE, outcomes, begin)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        """Forget objects."""
        begin = self._begin(keys)
        with self._lock:
            outcomes = [ObjectResult(ObjectStatus.REMOVED if self._drop(key) else ObjectStatus.MISSING) for key in keys]
        return self._end(Kind.REMOVAL, outcomes, begin)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:  # noqa: ARG002
        """The inventory, in the order of keys."""
        begin = self._begin([])
        after = bytes.fromhex(cursor)
        with self._lock:
            keys = sorted(key for key in self.objects if key > after)[: limit + 1]
            records = [self.objects[key].record for key in keys[:limit]]
        objects = tuple(StoredObject(r.key, r.label, r.nbytes) for r in records)
        return Page(objects, keys[limit - 1].hex() if len(keys) > limit else "", time.perf_counter() - begin)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._is_closed = True
            self.objects.clear()
            self._used_bytes = 0

    @property
    def stats(self) -> StoreStats:
        """What it did and holds."""
        with self._lock:
            return replace(
                self._meter.stats,
                num_objects=len(self.objects),
                used_bytes=self._used_bytes,
                max_bytes=self._max_bytes,
                num_evicted=self._num_evicted,
                num_quarantined=self._num_quarantined,
            )

    def _begin(self, keys: Sequence[bytes]) -> float:
        if self._is_closed:
            raise ClosedError("this MemoryStore is closed")
        check_keys(keys)
        return time.perf_counter()

    def _end(self, kind: Kind, outcomes: Sequence[ObjectResult], begin: float) -> Results:
        return self._meter.count(kind, Results(tuple(outcomes), time.perf_counter() - begin))

    def _read(self, read: Read, into: memoryview) -> ObjectResult:
        held = self.objects.get(read.key)
        if held is None:
            return ObjectResult(ObjectStatus.MISSING)
        missed = mismatch(held.record.label, held.record.nbytes, read, len(into))
        if missed:
            return missed
        self.objects.move_to_end(read.key)
        if len(held.payload) != held.record.nbytes or checksum(held.payload, held.token_ids) != held.record.checksum:
            self._drop(read.key)
            self._num_quarantined += 1
            return ObjectResult(ObjectStatus.CORRUPT, reason="the checksum differs")
        copy_bytes(into, memoryview(held.payload))
        return ObjectResult(ObjectStatus.FOUND, len(into))

    def _write(self, write: Write, payload: memoryview) -> ObjectResult:
        record, _ = encode(write.key, write.label, payload)
        new = MemoryObject(record, bytearray(payload), write.label.token_ids)
        if new.nbytes > self._max_bytes:
            return ObjectResult(ObjectStatus.FAILED, reason=f"{new.nbytes} bytes in a store of {self._max_bytes}")
        self._drop(write.key)
        while self._used_bytes + new.nbytes > self._max_bytes:
            self._drop(next(iter(self.objects)))
            self._num_evicted += 1
        self.objects[write.key] = new
        self._used_bytes += new.nbytes
        return ObjectResult(ObjectStatus.STORED, len(payload))

    def _drop(self, key: bytes) -> bool:
        gone = self.objects.pop(key, None)
        if gone is not None:
            self._used_bytes -= gone.nbytes
        return gone is not None
