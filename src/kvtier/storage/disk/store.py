"""DiskStore: blocks in a folder of preallocated files. Every read is verified. See docs/storage.md."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from kvtier.errors import ArgumentError, FormatError, StoreError
from kvtier.storage.calls import Batch, Breaker, CallRunner, Job
from kvtier.storage.checksum import checksum, checksum_joined
from kvtier.storage.codec import ALIGNMENT, Compression, Scratch, decode, encode, lay_out, mismatch, round_up, scatter
from kvtier.storage.disk.catalog import Entry, SlotRef
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKey, TenantKeys
from kvtier.storage.disk.sealing import open_payload, room_bytes, seal_payload, seal_record
from kvtier.storage.disk.space import FULL, SlotAllocator
from kvtier.storage.disk.wear import WriteBudget
from kvtier.storage.record import RECORD_BYTES, Record, Seal
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
    MISSING,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    StoreStats,
    Write,
    last_writes,
    num_bytes,
    outcomes_of,
    views_of,
)

KEYS = "keys"
"""Name of the folder with the keys of an encrypted store, in the folder of the store."""
_KEY_DELETED = ObjectResult(ObjectStatus.MISSING, reason="its key was deleted")


class Sync(Enum):
    """The time at which bytes are flushed from the operating system to the disk."""

    CLOSE = "close"
    """When the store is closed. Stored objects survive any end of the process. A power failure may damage objects
    that were stored since the store was opened; the checksums detect the damage."""
    WRITE = "write"
    """Before `write` and `remove` return, so that their results survive a power failure."""


def default_threads() -> int:
    """Return two threads per core, at least 8 and at most 16. Some threads verify while others wait for the disk.

    On 2 cores, 8 threads reach 89 % of the rate without verification, and 4 threads 71 % (virtual disk, 2026-11-15).
    """
    return min(16, max(8, 2 * len(os.sched_getaffinity(0))))


class DiskStore:
    """A store in a local folder, for one process at a time.

        store = DiskStore("/mnt/nvme/kv", 200 << 30)

    `max_bytes` limits the size of all files together. `direct` bypasses the page cache if the filesystem supports that,
    because hot blocks are in the host tier. Each of the `num_threads` threads reads or writes one object at a time.

    `secret` (32 bytes, extra `crypto`) encrypts all objects, with one key per tenant. The keys are files in
    `key_folder`, by default the subfolder `keys`; deleting one deletes the data of a tenant. `bytes_per_day` limits the
    bytes that are written in 24 hours; 0 means no limit.
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
        secret: bytes | None = None,
        key_folder: str | os.PathLike[str] | None = None,
        bytes_per_day: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        num_threads = default_threads() if num_threads is None else num_threads
        if min(max_bytes, segment_bytes, num_threads) < 1 or min(min_free_bytes, bytes_per_day) < 0 or timeout_s <= 0:
            raise ArgumentError(
                f"a DiskStore needs positive {max_bytes=}, {segment_bytes=}, {num_threads=}, {timeout_s=}, "
                f"and {min_free_bytes=} and {bytes_per_day=} of at least 0"
            )
        self._folder, files = os.fspath(folder), files or Files()
        key_folder = os.path.join(self._folder, KEYS) if key_folder is None else os.fspath(key_folder)
        self._keys = None if secret is None else TenantKeys(key_folder, secret, files)
        self._is_synced, self._compression, self._timeout_s = sync is Sync.WRITE, compression, timeout_s
        self._space = SlotAllocator(
            self._folder,
            files,
            max_bytes=max_bytes,
            segment_bytes=min(segment_bytes, max_bytes),
            min_free_bytes=min_free_bytes,
            direct=direct,
            sync=self._is_synced,
            keys=self._keys,
        )
        self._budget = WriteBudget(self._folder, bytes_per_day, clock)
        self._budget.load()
        self._breaker = breaker or Breaker()
        self._calls = CallRunner(num_threads, "kvtier-disk", self._breaker, timeout_s)
        self._meter = Meter(f"the DiskStore in {self._folder!r}")
        self._close_lock = threading.Lock()

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:  # noqa: ARG002
        begin = self._meter.begin(keys)
        refusal = self._breaker.refusal(is_try=False)
        if refusal:
            outcomes = [ObjectResult(ObjectStatus.FAILED, reason=refusal)] * len(keys)
        else:
            outcomes = [ObjectResult(ObjectStatus.FOUND) if self._space.find(key) else MISSING for key in keys]
        return self._meter.end("lookups", outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([read.key for read in reads])
        views = [views_of(read.into, writable=True) for read in reads]

        def plan(batch: Batch) -> list[Job]:
            jobs: list[Job] = []
            for index, (read, view) in enumerate(zip(reads, views, strict=True)):
                entry = self._space.hold(read.key)
                missed = mismatch(entry.record.label, entry.record.nbytes, read, num_bytes(view)) if entry else MISSING
                if missed is None:
                    assert entry is not None
                    jobs.append(functools.partial(self._load, batch, index, entry, view))
                    continue
                if entry is not None:
                    self._space.release(entry)
                batch.settle({index: missed})
            return jobs

        return self._meter.end("reads", self._calls.run(len(reads), plan, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([write.key for write in writes])
        views = [views_of(write.payload) for write in writes]
        last = last_writes(writes)

        def plan(batch: Batch) -> list[Job]:
            staged = _Staged(len(last))
            numbered = enumerate(zip(self._space.next_sequences(len(last)), last.values(), strict=True))
            return [
                functools.partial(self._stage, batch, staged, i, n, writes[at], views[at]) for i, (n, at) in numbered
            ]

        outcomes = outcomes_of(writes, last, self._calls.run(len(last), plan, timeout_s))
        return self._meter.end("writes", outcomes, begin, is_durable=self._is_synced)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Delete objects. Unless the breaker refuses the call, the objects are missing from now on, even if the result
        is FAILED. With Sync.WRITE they stay missing after a power failure."""
        begin = self._meter.begin(keys)

        def plan(batch: Batch) -> list[Job]:
            entries = [self._space.discard(key) for key in keys]
            removed = {index: entry for index, entry in enumerate(entries) if entry is not None}
            if not removed and not self._is_synced:
                batch.settle(dict.fromkeys(range(len(keys)), MISSING))
                return []
            return [functools.partial(self._wipe, batch, removed)]

        outcomes = self._calls.run(len(keys), plan, timeout_s)
        return self._meter.end("removals", outcomes, begin, is_durable=self._is_synced)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:  # noqa: ARG002
        """Return a page of the inventory from memory, in the order of slots."""
        begin = self._meter.begin()
        refusal = self._breaker.refusal(is_try=False)
        if refusal:
            return Page((), cursor, time.perf_counter() - begin, refusal)
        segment, _, slot = cursor.partition(":")
        records = self._space.list_after(int(segment or 0), int(slot or 0), limit + 1)
        last = f"{records[limit].segment}:{records[limit].slot}" if len(records) > limit else ""
        objects = tuple(record.stored_object for record in records[:limit])
        return Page(objects, last, time.perf_counter() - begin)

    def close(self) -> None:
        """Finish running calls, flush everything to the disk, stop the threads and unlock the folder.

        Waiting for calls and flushing take at most the deadline each. If the disk hangs, the files stay open and the
        folder stays locked until the process ends. Raises StoreError if the disk fails.
        """
        with self._close_lock:
            if self._meter.is_closed:
                return
            self._meter.is_closed = True
            if not self._calls.close():
                return
            errors: list[OSError] = []
            flush = threading.Thread(
                target=lambda: errors.extend(self._space.sync_all()), name="kvtier-disk-close", daemon=True
            )
            flush.start()
            flush.join(self._timeout_s)
            if not flush.is_alive():
                self._budget.save()
                self._space.close()
        if errors:
            raise StoreError(f"flushing the store in {self._folder!r} failed at close: {errors[0]}")

    @property
    def stats(self) -> StoreStats:
        calls = replace(
            self._meter.stats,
            num_refused=self._breaker.num_refused,
            written_bytes=self._budget.written_bytes,
            day_bytes=self._budget.day_bytes,
            max_day_bytes=self._budget.max_day_bytes,
        )
        return self._space.fill_in(calls)

    @property
    def is_direct(self) -> bool:
        """True if I/O bypasses the page cache. False if `direct` is False or the filesystem does not support it."""
        return self._space.is_direct

    # --- jobs, on the threads

    def _load(self, batch: Batch, index: int, entry: Entry, into: Sequence[memoryview], scratch: Scratch) -> None:
        try:
            if batch.is_expired:
                return  # the job waited behind a read that hung
            record = entry.record
            key = None
            if record.seal is not None:
                assert self._keys is not None
                key = self._keys.find(record.seal.key_id)
                if key is None:
                    self._space.forget(entry)
                    batch.settle({index: _KEY_DELETED})
                    return
            payload, wrong = self._read(entry, key, scratch)
            if wrong:
                self._space.quarantine(entry)
                batch.settle({index: ObjectResult(ObjectStatus.CORRUPT, reason=wrong)})
            else:
                batch.settle({index: ObjectResult(ObjectStatus.FOUND, record.nbytes)}, lambda: scatter(into, payload))
        except OSError as error:
            batch.trouble = str(error)
            batch.settle({index: ObjectResult(ObjectStatus.FAILED, reason=str(error))})
        finally:
            self._space.release(entry)

    def _read(self, entry: Entry, key: TenantKey | None, scratch: Scratch) -> tuple[memoryview, str]:
        """Read and verify an object. If it is invalid, return empty memory and the reason."""
        record = entry.record
        slot_bytes = round_up(record.total_bytes)
        room = scratch.take(slot_bytes if key is None else room_bytes(record))
        count = self._space.segment(entry.place).read_slot(record.slot, room[:slot_bytes])
        if key is None:
            return decode(record, room[:count])
        try:
            return decode(record, open_payload(key, record, room, count))
        except FormatError as error:
            return memoryview(b""), str(error)

    def _stage(
        self,
        batch: Batch,
        staged: _Staged,
        index: int,
        sequence: int,
        write: Write,
        pieces: Sequence[memoryview],
        scratch: Scratch,
    ) -> None:
        """Write one object. The last write of a batch publishes all objects of the batch."""
        try:
            if not batch.is_expired:
                staged.outcomes[index] = self._put(staged, sequence, write, pieces, scratch)
        except OSError as error:
            staged.outcomes[index] = ObjectResult(ObjectStatus.FAILED, reason=str(error))
            if error.errno not in FULL:
                batch.trouble = str(error)
        finally:
            if staged.count_down():
                self._commit(batch, staged)

    def _put(
        self, staged: _Staged, sequence: int, write: Write, pieces: Sequence[memoryview], scratch: Scratch
    ) -> ObjectResult:
        key = None if self._keys is None else self._keys.key_for(write.tenant)
        known = None
        if key is None and len(pieces) > 1 and self._compression is Compression.NONE and not write.label.token_ids:
            known = checksum_joined(pieces)  # reads the pieces into the cache, from which they are gathered
        view = scratch.gather(pieces)
        if key is not None:
            known = checksum(view[:ALIGNMENT])  # the seal verifies the rest
        record, stored = encode(write.key, write.label, view, self._compression, known)
        if key is not None:
            record = replace(record, seal=Seal(key.id))
        if self._is_stored(record, key, (stored, write.label.token_ids), scratch):
            return ObjectResult(ObjectStatus.STORED, reason="already stored")
        refusal = self._budget.take(round_up(record.total_bytes) + RECORD_BYTES)
        place = refusal or self._space.reserve(record.total_bytes)
        if isinstance(place, str):
            return ObjectResult(ObjectStatus.FAILED, reason=place)
        segment = self._space.segment(place)
        record = record.at(place.segment, place.slot, sequence)
        try:
            if key is None:
                buffers = lay_out(stored, write.label.token_ids, scratch, aligned=segment.is_direct)
            else:
                record, buffers = seal_payload(key, record, stored, write.label.token_ids, scratch)
            segment.write_slot(place.slot, buffers)
        except OSError:
            self._space.give_back([place])
            raise
        # packed here, in parallel with other writes
        staged.packed[place] = record.pack() if key is None else seal_record(record, key)
        staged.records.append(record)
        return ObjectResult(ObjectStatus.STORED, record.nbytes)

    def _is_stored(
        self, record: Record, key: TenantKey | None, parts: Sequence[memoryview | bytes], scratch: Scratch
    ) -> bool:
        """True if an equal object is stored. The checksum of a sealed object covers only its beginning, so the object
        is read if the checksum is equal."""
        if key is None:
            return self._space.hold_same(record)
        entry = self._space.hold(record.key)
        if entry is None:
            return False
        try:
            if not record.is_same_object(entry.record):
                return False
            room = scratch.take(room_bytes(entry.record))
            slot_bytes = round_up(entry.record.total_bytes)
            count = self._space.segment(entry.place).read_slot(entry.record.slot, room[:slot_bytes])
            opened = open_payload(key, entry.record, room, count)
            return opened[: len(parts[0])] == parts[0] and opened[len(parts[0]) :] == parts[1]
        except FormatError:
            return False  # damaged, and now replaced
        finally:
            self._space.release(entry)

    def _commit(self, batch: Batch, staged: _Staged) -> None:
        """Publish all objects of a batch, but nothing if the call has returned, since the memory may have changed."""
        records = sorted(staged.records, key=lambda record: record.sequence)
        segments = sorted({record.segment for record in records})
        is_sound = False
        try:
            if not batch.is_expired:
                if self._is_synced:
                    self._space.sync_slots(segments)
                self._space.write_records(staged.packed)
                if self._is_synced:
                    self._space.sync_tables(segments)
                is_sound = True
        finally:
            if not is_sound:
                self._space.give_back(staged.packed)
        if is_sound:
            self._space.wipe(self._space.publish(records))
            batch.settle(staged.outcomes)

    def _wipe(self, batch: Batch, removed: dict[int, Entry], _: Scratch) -> None:
        self._space.wipe([*removed.values()])
        if self._is_synced:
            self._space.sync_blanks()
        done = ObjectResult(ObjectStatus.REMOVED)
        batch.settle({index: done if index in removed else MISSING for index in range(batch.num_objects)})


class _Staged:
    """Objects of one write that are in their slots but not yet published."""

    def __init__(self, count: int) -> None:
        self.records: list[Record] = []
        self.packed: dict[SlotRef, bytes] = {}
        self.outcomes: dict[int, ObjectResult] = {}
        self._num_left = count
        self._lock = threading.Lock()

    def count_down(self) -> bool:
        with self._lock:
            self._num_left -= 1
            return not self._num_left
