"""MemoryStore: a store in a dictionary, for tests and as the shortest example of a Store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.errors import ArgumentError
from kvtier.storage.codec import decode, encode, joined, mismatch, scatter
from kvtier.storage.record import RECORD_BYTES, Record
from kvtier.storage.store import (
    MISSING,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    StoreStats,
    Write,
    num_bytes,
    views_of,
)


@dataclass(slots=True, eq=False)
class MemoryObject:
    """A stored object. The payload includes the token ids, and is mutable, so that tests can damage it."""

    record: Record
    payload: bytearray

    @property
    def nbytes(self) -> int:
        return RECORD_BYTES + self.record.total_bytes


class MemoryStore:
    """Objects in a dictionary, limited in bytes, with LRU eviction. Checksums are verified as in a DiskStore."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ArgumentError(f"max_bytes must be at least 1, got {max_bytes}")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._meter = Meter("this MemoryStore")
        self._used_bytes = self._num_evicted = self._num_quarantined = 0
        self.objects: OrderedDict[bytes, MemoryObject] = OrderedDict()
        """Objects by key, sorted from the least to the most recently used."""

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        begin = self._meter.begin(keys)
        with self._lock:
            outcomes = [ObjectResult(ObjectStatus.FOUND) if key in self.objects else MISSING for key in keys]
        return self._meter.end("lookups", outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        begin = self._meter.begin([read.key for read in reads])
        views = [views_of(read.into, writable=True) for read in reads]
        with self._lock:
            outcomes = [self._read(read, view) for read, view in zip(reads, views, strict=True)]
        return self._meter.end("reads", outcomes, begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        begin = self._meter.begin([write.key for write in writes])
        views = [joined(views_of(write.payload)) for write in writes]
        with self._lock:
            outcomes = [self._write(write, view) for write, view in zip(writes, views, strict=True)]
        return self._meter.end("writes", outcomes, begin)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        begin = self._meter.begin(keys)
        with self._lock:
            outcomes = [ObjectResult(ObjectStatus.REMOVED) if self._drop(key) else MISSING for key in keys]
        return self._meter.end("removals", outcomes, begin)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:  # noqa: ARG002
        begin = self._meter.begin()
        after = bytes.fromhex(cursor)
        with self._lock:
            keys = sorted(key for key in self.objects if key > after)[: limit + 1]
            objects = tuple(self.objects[key].record.stored_object for key in keys[:limit])
        return Page(objects, keys[limit - 1].hex() if len(keys) > limit else "", time.perf_counter() - begin)

    def close(self) -> None:
        with self._lock:
            self._meter.is_closed = True
            self.objects.clear()
            self._used_bytes = 0

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return replace(
                self._meter.stats,
                num_objects=len(self.objects),
                used_bytes=self._used_bytes,
                max_bytes=self._max_bytes,
                num_evicted=self._num_evicted,
                num_quarantined=self._num_quarantined,
            )

    def _read(self, read: Read, into: Sequence[memoryview]) -> ObjectResult:
        stored = self.objects.get(read.key)
        if stored is None:
            return MISSING
        missed = mismatch(stored.record.label, stored.record.nbytes, read, num_bytes(into))
        if missed:
            return missed
        self.objects.move_to_end(read.key)
        payload, wrong = decode(stored.record, memoryview(stored.payload))
        if wrong:
            self._drop(read.key)
            self._num_quarantined += 1
            return ObjectResult(ObjectStatus.CORRUPT, reason=wrong)
        scatter(into, payload)
        return ObjectResult(ObjectStatus.FOUND, len(payload))

    def _write(self, write: Write, payload: memoryview) -> ObjectResult:
        record, _ = encode(write.key, write.label, payload)
        new = MemoryObject(record, bytearray(payload) + write.label.token_ids)
        if new.nbytes > self._max_bytes:
            return ObjectResult(ObjectStatus.FAILED, reason=f"{new.nbytes} bytes exceed the limit of {self._max_bytes}")
        self._drop(write.key)
        while self._used_bytes + new.nbytes > self._max_bytes:
            self._drop(next(iter(self.objects)))
            self._num_evicted += 1
        self.objects[write.key] = new
        self._used_bytes += new.nbytes
        return ObjectResult(ObjectStatus.STORED, len(payload))

    def _drop(self, key: bytes) -> bool:
        dropped = self.objects.pop(key, None)
        if dropped is not None:
            self._used_bytes -= dropped.nbytes
        return dropped is not None
