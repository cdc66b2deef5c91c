"""DiskStore: blocks in a folder of preallocated files, verified on every read. docs/storage.md has the whole story."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from kvtier.errors import ArgumentError, ClosedError, StoreError
from kvtier.storage.calls import Batch, Breaker, CallRunner
from kvtier.storage.codec import Compression, copy_bytes, decode, encode, lay_out, mismatch
from kvtier.storage.disk.catalog import Entry, SlotRef
from kvtier.storage.disk.files import Files, OsFiles
from kvtier.storage.disk.space import FULL, DiskLimits, SlotAllocator
from kvtier.storage.record import Record
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
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
from kvtier.storage.workers import Job, Scratch, Workers, round_up

MISSING = ObjectResult(ObjectStatus.MISSING)


class Sync(Enum):
    """When bytes must be on the disk itself, and not only with the operating system."""

    CLOSE = "close"
    """When the store is closed. Everything stored survives the end of the process, however it ends; a power failure
    may cost what was stored since the store was opened, and is noticed by the checksums."""
    WRITE = "write"
    """When `write` and `remove` return: what they report done survives a power failure."""


def default_threads() -> int:
    """Two per core, from 8 to 16: some wait for the disk while others check what came.

    On 2 cores 8 threads read at 89 % of the bare calls of as many threads, 4 at 71 % (virtual disk, 2026-11-15).
    """
    return min(16, max(8, 2 * len(os.sched_getaffinity(0))))


class DiskStore:
    """A store in a local folder, for one process at a time.

        with_room_for_200_gib = DiskStore("/mnt/nvme/kv", 200 << 30)

    `max_bytes` bounds all files of the folder. `direct` bypasses the page cache where the filesystem allows it: what is
    hot is in the host tier anyway. I/O is done by `num_threads` threads (None: two per core, from 8 to 16), one object
    each at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        segment_bytes: int = 256 << 20,
        min_free_bytes: int = 1 << 30,
        sync: Sync = Sync.CLOSE,
        direct: bool = True,
        compression: Compression = Compression.NONE,
        num_threads: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        breaker: Breaker | None = None,
        files: Files | None = None,
    ) -> None:
        num_threads = default_threads() if num_threads is None else num_threads
        if min(max_bytes, segment_bytes, num_threads) < 1 or min_free_bytes < 0 or timeout_s <= 0:
            raise ArgumentError(
                f"a DiskStore needs positive {max_bytes=}, {segment_bytes=}, {num_threads=}, {timeout_s=}, "
                f"and {min_free_bytes=} of at least 0"
            )
        limits = DiskLimits(max_bytes, min(segment_bytes, max_bytes), min_free_bytes)
        is_synced = sync is Sync.WRITE
        self._space = SlotAllocator(os.fspath(folder), limits, files or OsFiles(), direct=direct, sync=is_synced)
        self._folder, self._max_bytes = os.fspath(folder), max_bytes
        self._sync, self._compression, self._timeout_s = sync, compression, timeout_s
        self._breaker = breaker or Breaker()
        self._workers = Workers(num_threads, "kvtier-disk")
        self._calls = CallRunner(self._workers, self._breaker, timeout_s)
        self._meter = Meter()
        self._close_lock = threading.Lock()
        self._is_closed = False

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        """Which of these objects are there; answered from memory."""
        begin = self._begin(keys)
        refusal = self._breaker.opinion()
        if refusal:
            outcomes = [ObjectResult(ObjectStatus.FAILED, reason=refusal)] * len(keys)
        else:
            outcomes = [ObjectResult(ObjectStatus.FOUND) if self._space.find(key) else MISSING for key in keys]
        return self._end(Kind.LOOKUP, outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        """Fill the given memory; where the outcome is not FOUND it holds what it held."""
        begin = self._begin([read.key for read in reads])
        views = [view_of(read.into, writable=True) for read in reads]

        def plan(batch: Batch) -> list[Job]:
            jobs: list[Job] = []
            for index, (read, view) in enumerate(zip(reads, views, strict=True)):
                entry = self._space.hold(read.key)
                missed = mismatch(entry.record.label, entry.record.nbytes, read, len(view)) if entry else MISSING
                if missed is None:
                    assert entry is not None
                    jobs.append(functools.partial(self._load, batch, index, entry, view))
                    continue
                if entry is not None:
                    self._space.release(entry)
                batch.settle({index: missed})
            return jobs

        return self._end(Kind.READ, self._calls.run(len(reads), plan, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store objects, replacing others of their keys, evicting the least recently used as need be."""
        begin = self._begin([write.key for write in writes])
        views = [view_of(write.payload) for write in writes]
        last = {write.key: index for index, write in enumerate(writes)}  # of several under one key it counts

        def plan(batch: Batch) -> list[Job]:
            staged = _Staged(len(last))
            numbered = enumerate(zip(self._space.next_sequences(len(last)), last.values(), strict=True))
            return [
                functools.partial(self._stage, batch, staged, i, n, writes[at], views[at]) for i, (n, at) in numbered
            ]

        outcomes = dict(zip(last, self._calls.run(len(last), plan, timeout_s), strict=True))
        told = [
            outcomes[w.key] if last[w.key] == i else replace(outcomes[w.key], nbytes=0) for i, w in enumerate(writes)
        ]
        return self._end(Kind.WRITE, told, begin)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Forget objects. Unless the breaker turns the call away they are not found from now on, even if the outcome is
        FAILED; and where writes are synced, a power failure does not bring them back."""
        begin = self._begin(keys)

        def plan(batch: Batch) -> list[Job]:
            entries = [self._space.discard(key) for key in keys]
            gone = {index: entry for index, entry in enumerate(entries) if entry is not None}
            if not gone and self._sync is Sync.CLOSE:
                batch.settle(dict.fromkeys(range(len(keys)), MISSING))
                return []
            return [functools.partial(self._wipe, batch, gone)]

        return self._end(Kind.REMOVAL, self._calls.run(len(keys), plan, timeout_s), begin)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:  # noqa: ARG002
        """The inventory by place on disk; answered from memory."""
        begin = self._begin([])
        refusal = self._breaker.opinion()
        if refusal:
            return Page((), cursor, time.perf_counter() - begin, refusal)
        segment, _, slot = cursor.partition(":")
        records = self._space.list_after(int(segment or 0), int(slot or 0), limit + 1)
        last = f"{records[limit].segment}:{records[limit].slot}" if len(records) > limit else ""
        objects = tuple(StoredObject(r.key, r.label, r.nbytes) for r in records[:limit])
        return Page(objects, last, time.perf_counter() - begin)

    def close(self) -> None:
        """Finish what was begun, have everything on disk, end the threads, let others have the folder.

        Each takes at most the deadline. If the disk hangs, the files stay open and the folder locked until the process
        ends. A StoreError if the disk fails.
        """
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._workers.close(self._timeout_s):
                return
            errors: list[OSError] = []
            last = Workers(1, "kvtier-disk-close")
            last.submit(lambda _: errors.extend(self._space.sync_all()))
            if last.close(self._timeout_s):
                self._space.close()
        if errors:
            raise StoreError(f"the store in {self._folder!r} could not be written out when closed: {errors[0]}")

    @property
    def stats(self) -> StoreStats:
        """What it did and holds."""
        space = self._space
        return replace(
            self._meter.stats,
            num_objects=space.num_objects,
            used_bytes=space.used_bytes,
            max_bytes=self._max_bytes,
            num_evicted=space.num_evicted,
            num_quarantined=space.num_quarantined,
            num_refused=self._breaker.num_refused,
        )

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache: asked for, and not refused by the filesystem."""
        return self._space.is_direct

    def check(self) -> None:
        """Raise AssertionError unless the books agree with each other; for tests, when nothing runs."""
        self._space.check()

    # --- every call

    def _begin(self, keys: Sequence[bytes]) -> float:
        if self._is_closed:
            raise ClosedError(f"the DiskStore in {self._folder!r} is closed")
        check_keys(keys)
        return time.perf_counter()

    def _end(self, kind: Kind, outcomes: Sequence[ObjectResult], begin: float) -> Results:
        is_durable = self._sync is Sync.WRITE and kind in (Kind.WRITE, Kind.REMOVAL)
        return self._meter.count(kind, Results(tuple(outcomes), time.perf_counter() - begin, is_durable))

    # --- jobs, on the workers' threads

    def _load(self, batch: Batch, index: int, entry: Entry, into: memoryview, scratch: Scratch) -> None:
        try:
            if batch.is_expired:
                return  # it waited behind a read that hung
            record = entry.record
            room = scratch.take(round_up(record.total_bytes))
            count = self._space.segment(entry.place).read_slot(record.slot, room)
            payload, wrong = decode(record, room[:count])
            if wrong:
                self._space.quarantine(entry)
                batch.settle({index: ObjectResult(ObjectStatus.CORRUPT, reason=wrong)})
            else:
                batch.settle(
                    {index: ObjectResult(ObjectStatus.FOUND, record.nbytes)}, lambda: copy_bytes(into, payload)
                )
        except OSError as error:
            batch.trouble = str(error)
            batch.settle({index: ObjectResult(ObjectStatus.FAILED, reason=str(error))})
        finally:
            self._space.release(entry)

    def _stage(
        self, batch: Batch, staged: _Staged, index: int, sequence: int, write: Write, view: memoryview, scratch: Scratch
    ) -> None:
        """Write one object; whoever is the last of the batch publishes all of them."""
        try:
            if not batch.is_expired:
                staged.outcomes[index] = self._put(staged, sequence, write, view, scratch)
        except OSError as error:
            staged.outcomes[index] = ObjectResult(ObjectStatus.FAILED, reason=str(error))
            if error.errno not in FULL:
                batch.trouble = str(error)
        finally:
            if staged.count_down():
                self._commit(batch, staged)

    def _put(self, staged: _Staged, sequence: int, write: Write, view: memoryview, scratch: Scratch) -> ObjectResult:
        record, stored = encode(write.key, write.label, view, self._compression)
        if self._space.hold_same(record):
            return ObjectResult(ObjectStatus.STORED, reason="was there already")
        place = self._space.reserve(record.total_bytes)
        if isinstance(place, str):
            return ObjectResult(ObjectStatus.FAILED, reason=place)
        segment = self._space.segment(place)
        record = record.at(place.segment, place.slot, sequence)
        try:
            segment.write_slot(place.slot, lay_out(stored, write.label.token_ids, scratch, aligned=segment.is_direct))
        except OSError:
            self._space.give_back([place])
            raise
        staged.packed[place] = record.pack()  # here, while others write, and not at the end of the batch
        staged.records.append(record)
        return ObjectResult(ObjectStatus.STORED, record.nbytes)

    def _commit(self, batch: Batch, staged: _Staged) -> None:
        """Let all objects of a batch be found, unless the caller may have changed his memory while it was read."""
        records = sorted(staged.records, key=lambda record: record.sequence)
        segments = sorted({record.segment for record in records})
        is_sound = False
        try:
            if not batch.is_expired:
                if self._sync is Sync.WRITE:
                    self._space.sync_slots(segments)
                self._space.write_records(staged.packed)
                if self._sync is Sync.WRITE:
                    self._space.sync_tables(segments)
                is_sound = True
        finally:
            if not is_sound:
                self._space.give_back(staged.packed)
        if is_sound:
            self._space.wipe(self._space.publish(records))
            batch.settle(staged.outcomes)

    def _wipe(self, batch: Batch, gone: dict[int, Entry], _: Scratch) -> None:
        self._space.wipe([*gone.values()])
        if self._sync is Sync.WRITE:
            self._space.sync_blanks()
        removed = ObjectResult(ObjectStatus.REMOVED)
        batch.settle({index: removed if index in gone else MISSING for index in range(batch.num_objects)})


class _Staged:
    """The objects of one write that are in their slots and not published yet."""

    def __init__(self, count: int) -> None:
        self.records: list[Record] = []
        self.packed: dict[SlotRef, bytes] = {}
        self.outcomes: dict[int, ObjectResult] = {}
        self._num_left = count
        self._lock = threading.Lock()

    def count_down(self) -> bool:
        """True for the last one."""
        with self._lock:
            self._num_left -= 1
            return not self._num_left
