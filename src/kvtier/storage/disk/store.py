"""DiskStore: blocks in a folder of preallocated files. Every read is verified. See docs/storage.md."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from kvtier.errors import ArgumentError, FormatError, StoreError
from kvtier.storage.calls import Batch, Breaker, CallRunner, Job
from kvtier.storage.checksum import checksum, checksum_joined
from kvtier.storage.codec import (
    ALIGNMENT,
    Compression,
    Scratch,
    decode,
    encode,
    is_aligned,
    lay_out,
    mismatch,
    record_of,
    round_up,
    scatter,
)
from kvtier.storage.disk.catalog import Entry, SlotRef
from kvtier.storage.disk.client import SlotClient
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKey, TenantKeys
from kvtier.storage.disk.participant import Participant
from kvtier.storage.disk.sealing import open_payload, room_bytes, seal_payload, seal_record
from kvtier.storage.disk.space import ALREADY_STORED, FULL, SlotAllocator
from kvtier.storage.disk.wear import WriteBudget
from kvtier.storage.record import Record, Seal
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
"""Default name of the subfolder with the keys of an encrypted store."""
FOUND = ObjectResult(ObjectStatus.FOUND)
_OWNER_ENDED = ObjectResult(ObjectStatus.FAILED, reason="the process that managed the folder has ended")
"""Result if the folder's owner has ended. `_call` checks for this instance, and tries again with the next owner."""
_MIN_ANSWER_S = 1.0
"""Minimum timeout of a request to the owner."""
Slots = SlotAllocator | SlotClient
Views = Sequence[memoryview]
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Plan = Callable[[Slots, Batch, Sequence[Item]], list[Job]]
_KEY_DELETED = ObjectResult(ObjectStatus.MISSING, reason="the encryption key of the object was deleted")


class Sync(Enum):
    """When bytes are flushed from the operating system to the disk."""

    CLOSE = "close"
    """Flush when the store is closed. Stored objects survive any end of the process. A power failure may damage objects
    that were stored since the store was opened, but the checksums detect the damage."""
    WRITE = "write"
    """Flush before `write` and `remove` return, so that their changes survive a power failure."""


def default_threads() -> int:
    """Return the number of threads: two per core, but at least 8 and at most 16.

    Some threads verify while others wait for the disk. On 2 cores, 8 threads reach 89 % of the read rate that is
    possible without verification, and 4 threads reach 71 % (virtual disk, 2026-11-15).
    """
    return min(16, max(8, 2 * len(os.sched_getaffinity(0))))


class DiskStore:
    """A store in a local folder, for one or several processes of a user.

        store = DiskStore("/mnt/nvme/kv", 200 << 30)

    The first process that opens the folder owns it and manages the slots (places for objects in the files). The other
    processes request slots from the owner, but read and write the payloads themselves. When the owner ends, another
    process takes over. All processes should use the same settings.

    `max_bytes` limits the total size of all files. If processes use different values, the smallest one applies.
    `direct` bypasses the page cache, which would only duplicate hot blocks of the host tier. It has no effect if the
    filesystem does not support direct I/O. Each of the `num_threads` threads reads or writes one object at a time.

    `secret` (32 bytes) encrypts all objects, with one key per tenant, and needs the extra `crypto`. The keys are files
    in `key_folder`, by default the subfolder `keys`. After a key file is deleted, the tenant's objects are unreadable.
    `bytes_per_day` limits the bytes that are written in 24 hours; 0 means no limit.
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
                "a DiskStore needs max_bytes, segment_bytes and num_threads of at least 1, timeout_s above 0, and "
                f"min_free_bytes and bytes_per_day of at least 0, got {max_bytes=}, {segment_bytes=}, {num_threads=}, "
                f"{timeout_s=}, {min_free_bytes=}, {bytes_per_day=}"
            )
        self._folder, files = os.fspath(folder), files or Files()
        key_folder = os.path.join(self._folder, KEYS) if key_folder is None else os.fspath(key_folder)
        self._keys = None if secret is None else TenantKeys(key_folder, secret, files)
        self._is_synced, self._compression, self._timeout_s = sync is Sync.WRITE, compression, timeout_s
        own = functools.partial(
            SlotAllocator,
            self._folder,
            files,
            max_bytes=max_bytes,
            segment_bytes=min(segment_bytes, max_bytes),
            min_free_bytes=min_free_bytes,
            direct=direct,
            sync=self._is_synced,
            budget=WriteBudget(self._folder, bytes_per_day, clock),
            keys=self._keys,
        )
        connect = functools.partial(
            SlotClient,
            self._folder,
            files,
            self._keys,
            max_bytes=max_bytes,
            direct=direct,
            timeout_s=max(timeout_s, _MIN_ANSWER_S),
        )
        self._participant = Participant(self._folder, own, connect, is_sealed=self._keys is not None)
        self._participant.open()
        self._figures, self._is_direct = dict[str, int](), direct
        self._breaker = breaker or Breaker()
        self._calls = CallRunner(num_threads, "kvtier-disk", self._breaker, timeout_s)
        self._meter = Meter(f"the DiskStore in {self._folder!r}")
        self._close_lock = threading.Lock()

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin(keys)
        found = self._ask(lambda slots: slots.contains(keys), timeout_s)
        if isinstance(found, ObjectResult):
            return self._meter.end("lookups", [found] * len(keys), begin)
        return self._meter.end("lookups", [FOUND if is_found else MISSING for is_found in found], begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([read.key for read in reads])
        items = [(read, views_of(read.into, writable=True)) for read in reads]
        return self._meter.end("reads", self._call(items, self._plan_reads, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([write.key for write in writes])
        last = last_writes(writes)
        views = [views_of(write.payload) for write in writes]
        items = [(writes[at], views[at]) for at in last.values()]
        outcomes = outcomes_of(writes, last, self._call(items, self._plan_writes, timeout_s))
        return self._meter.end("writes", outcomes, begin, is_durable=self._is_synced)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Delete objects. With Sync.WRITE, they stay deleted after a power failure.

        In the folder's owner, objects leave the index before their records are erased. If erasing fails, the result is
        FAILED, but the object can no longer be found. A call that the breaker refuses removes nothing.
        """
        begin = self._meter.begin(keys)
        outcomes = self._call(keys, self._plan_removals, timeout_s)
        return self._meter.end("removals", outcomes, begin, is_durable=self._is_synced)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """Return a page of the inventory in the order of slots. The owner keeps the inventory in memory."""
        begin = self._meter.begin()
        segment, _, slot = cursor.partition(":")
        records = self._ask(lambda slots: slots.list_after(int(segment or 0), int(slot or 0), limit + 1), timeout_s)
        if isinstance(records, ObjectResult):
            return Page((), cursor, time.perf_counter() - begin, records.reason)
        last = f"{records[limit].segment}:{records[limit].slot}" if len(records) > limit else ""
        objects = tuple(record.stored_object for record in records[:limit])
        return Page(objects, last, time.perf_counter() - begin)

    def close(self) -> None:
        """Finish running calls, stop the threads, flush everything to the disk and unlock the folder.

        Wait at most `timeout_s` for calls and at most `timeout_s` for flushing. If the disk hangs, the files stay open
        and the folder stays locked until the process ends. Raise StoreError if flushing fails.
        """
        with self._close_lock:
            if self._meter.is_closed:
                return
            self._meter.is_closed = True
            if not self._calls.close():
                self._participant.leave(0.0)
                return
            errors: list[OSError] = []
            flush = threading.Thread(target=lambda: errors.extend(self._flush()), name="kvtier-disk-close", daemon=True)
            flush.start()
            flush.join(self._timeout_s)
            if not flush.is_alive():
                owned = self._participant.owned
                if owned is not None:
                    owned.close()
                self._participant.unlock()
        if errors:
            raise StoreError(f"flushing the store in {self._folder!r} failed at close: {errors[0]}")

    def _flush(self) -> list[OSError]:
        """Flush, end the connections and, in the owner, flush again. Return all errors. Hangs if the disk hangs."""
        slots = self._participant.owned or self._participant.client
        errors = [] if slots is None else slots.sync_all()  # flushes most bytes before the connections end
        while not self._participant.leave(self._timeout_s):
            pass  # a request of another process hangs
        owned = self._participant.owned
        return errors if owned is None else errors + owned.sync_all()  # each flush returns only new errors

    @property
    def stats(self) -> StoreStats:
        """Statistics of this store and its folder.

        The numbers of the folder cover all processes that use it. The folder's counters begin when its owner opens it.
        If the numbers of the folder cannot be read, for example after `close`, return the last known numbers.
        """
        if not self._meter.is_closed:
            figures = self._ask(lambda slots: slots.figures(), _MIN_ANSWER_S)
            self._figures = self._figures if isinstance(figures, ObjectResult) else figures
        calls = replace(self._meter.stats, num_refused=self._breaker.num_refused)
        return replace(calls, **self._figures)  # type: ignore[arg-type]

    @property
    def is_direct(self) -> bool:
        """True if I/O bypasses the page cache: `direct` is set, and the filesystem supports direct I/O."""
        return self._participant.slots().is_direct()

    # --- calls

    def _ask(self, question: Callable[[Slots], Answer], timeout_s: float | None) -> Answer | ObjectResult:
        """Return the result of `question` for the slots, or a failure of the store. `question` must do no disk I/O."""
        refusal = self._breaker.refusal(is_try=False)
        if refusal:
            return ObjectResult(ObjectStatus.FAILED, reason=refusal)
        owned = self._participant.owned
        if owned is not None:
            return question(owned)
        answers: list[Answer] = []

        def plan(slots: Slots, batch: Batch, _: Sequence[None]) -> list[Job]:
            answers.append(question(slots))
            batch.settle({0: FOUND})
            return []

        result = self._call([None], plan, timeout_s)[0]
        return answers[-1] if result.ok else result

    def _call(self, items: Sequence[Item], plan: Plan[Item], timeout_s: float | None) -> list[ObjectResult]:
        """Return one result per item. `plan` settles the items that need no I/O and returns jobs for the other items.

        In the owner, `plan` runs at once on the calling thread. In other processes it runs on a thread of the store,
        because it waits for the owner. If the owner ends, the remaining items are planned again with the next owner.
        """
        left_s = self._timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + left_s
        outcomes: list[ObjectResult] = []
        left = list(range(len(items)))
        while left and left_s >= 0:
            results = self._calls.run(len(left), self._first_jobs([items[i] for i in left], plan), left_s)
            answered = dict(zip(left, results, strict=True))
            outcomes = [answered.get(index, before) for index, before in enumerate(outcomes)] or list(results)
            left = [index for index, outcome in enumerate(outcomes) if outcome is _OWNER_ENDED]
            left_s = give_up - time.monotonic()
        return outcomes

    def _first_jobs(self, items: Sequence[Item], plan: Plan[Item]) -> Callable[[Batch], list[Job]]:
        owned = self._participant.owned
        if owned is not None:
            return lambda batch: plan(owned, batch, items)

        def ask_owner(batch: Batch, _: Scratch) -> None:
            try:
                self._calls.submit(batch, plan(self._participant.slots(self._timeout_s), batch, items))
            except ConnectionError:
                batch.settle(dict.fromkeys(range(len(items)), _OWNER_ENDED))

        return lambda batch: [functools.partial(ask_owner, batch)]

    def _plan_reads(self, slots: Slots, batch: Batch, items: Sequence[tuple[Read, Views]]) -> list[Job]:
        jobs: list[Job] = []
        entries = slots.hold([read.key for read, _ in items])
        for index, ((read, views), entry) in enumerate(zip(items, entries, strict=True)):
            missed = mismatch(entry.record.label, entry.record.nbytes, read, num_bytes(views)) if entry else MISSING
            if missed is None:
                assert entry is not None
                jobs.append(functools.partial(self._load, batch, index, slots, entry, views))
                continue
            if entry is not None:
                slots.release([entry])
            batch.settle({index: missed})
        return jobs

    def _plan_writes(self, slots: Slots, batch: Batch, items: Sequence[tuple[Write, Views]]) -> list[Job]:
        staged = _Staged(slots, len(items))
        numbered = enumerate(zip(slots.next_sequences(len(items)), items, strict=True))
        return [functools.partial(self._stage, batch, staged, i, n, *item) for i, (n, item) in numbered]

    def _plan_removals(self, slots: Slots, batch: Batch, items: Sequence[bytes]) -> list[Job]:
        places = slots.discard(items)
        removed = {index: place for index, place in enumerate(places) if place is not None}
        if not removed and not self._is_synced:
            batch.settle(dict.fromkeys(range(len(items)), MISSING))
            return []
        return [functools.partial(self._wipe, batch, slots, removed)]

    # --- jobs, on the threads

    def _load(self, batch: Batch, index: int, slots: Slots, entry: Entry, into: Views, scratch: Scratch) -> None:
        try:
            if batch.is_expired:
                return  # the call returned before this job started
            record = entry.record
            key = None
            if record.seal is not None:
                assert self._keys is not None
                key = self._keys.find(record.seal.key_id)
                if key is None:
                    slots.forget(entry)
                    batch.settle({index: _KEY_DELETED})
                    return
            payload, wrong = self._read(slots, entry, key, scratch)
            if wrong:
                slots.check_owner()
                slots.quarantine(entry)
                batch.settle({index: ObjectResult(ObjectStatus.CORRUPT, reason=wrong)})
            else:
                batch.settle({index: ObjectResult(ObjectStatus.FOUND, record.nbytes)}, lambda: scatter(into, payload))
        except ConnectionError:
            batch.settle({index: _OWNER_ENDED})
        except OSError as error:
            batch.trouble = str(error)
            batch.settle({index: ObjectResult(ObjectStatus.FAILED, reason=str(error))})
        finally:
            slots.release([entry])

    def _read(self, slots: Slots, entry: Entry, key: TenantKey | None, scratch: Scratch) -> tuple[memoryview, str]:
        """Return the verified payload and an empty text, or empty memory and the reason why the object is invalid."""
        record = entry.record
        slot_bytes = round_up(record.total_bytes)
        room = scratch.take(slot_bytes if key is None else room_bytes(record))
        count = slots.read_slot(entry.place, room[:slot_bytes])
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
        pieces: Views,
        scratch: Scratch,
    ) -> None:
        """Write one object into a slot. The job that finishes last publishes all objects of the batch."""
        try:
            if not batch.is_expired:
                staged.outcomes[index] = self._put(staged, sequence, write, pieces, scratch)
        except ConnectionError:
            staged.outcomes[index] = _OWNER_ENDED
        except OSError as error:
            staged.outcomes[index] = ObjectResult(ObjectStatus.FAILED, reason=str(error))
            if error.errno not in FULL:
                batch.trouble = str(error)
        finally:
            if staged.count_down():
                self._commit(batch, staged)

    def _put(self, staged: _Staged, sequence: int, write: Write, pieces: Views, scratch: Scratch) -> ObjectResult:
        slots, token_ids = staged.slots, write.label.token_ids
        key = None if self._keys is None else self._keys.key_for(write.tenant)
        record, stored = self._encode(write, pieces, key, scratch)
        if key is not None and self._is_stored(slots, record, key, (stored[0], token_ids), scratch):
            return ALREADY_STORED
        place = slots.reserve(record, sync=self._is_synced)
        if isinstance(place, ObjectResult):
            return place
        record = record.at(place.segment, place.slot, sequence)
        try:
            if key is not None:
                record, stored = seal_payload(key, record, stored[0], token_ids, scratch)
            elif len(stored) == 1 or (slots.is_direct(place) and not is_aligned(stored)):
                stored = lay_out(scratch.gather(stored), token_ids, scratch, aligned=slots.is_direct(place))
            slots.write_slot(place, stored)
        except OSError:
            slots.give_back([place])
            raise
        # pack the record here, in parallel with other writes
        staged.packed[place] = record.pack() if key is None else seal_record(record, key)
        staged.records.append(record)
        return ObjectResult(ObjectStatus.STORED, record.nbytes)

    def _encode(
        self, write: Write, pieces: Views, key: TenantKey | None, scratch: Scratch
    ) -> tuple[Record, Sequence[memoryview]]:
        """Return the record and the buffers to store: the pieces themselves if possible, or one new buffer."""
        if key is not None:
            view = scratch.gather(pieces)
            known = checksum(view[:ALIGNMENT])  # sufficient, because encryption authenticates the whole object
            record, stored = encode(write.key, write.label, view, self._compression, known)
            return replace(record, seal=Seal(key.id)), (stored,)
        if len(pieces) == 1 or self._compression is not Compression.NONE or write.label.token_ids:
            record, stored = encode(write.key, write.label, scratch.gather(pieces), self._compression)
            return record, (stored,)
        if is_aligned(pieces) or not self._is_direct:
            return record_of(write.key, write.label, num_bytes(pieces), checksum_joined(pieces)), pieces
        view, known = scratch.gather_checksum(pieces)
        return record_of(write.key, write.label, len(view), known), (view,)

    def _is_stored(
        self, slots: Slots, record: Record, key: TenantKey, parts: Sequence[memoryview | bytes], scratch: Scratch
    ) -> bool:
        """True if an equal encrypted object is stored. If this store flushes its writes, flush the object.

        The checksum of an encrypted object covers only its beginning. If the records agree, the stored object is
        therefore read and compared.
        """
        entry = slots.hold([record.key])[0]
        if entry is None:
            return False
        try:
            if not record.is_same_object(entry.record):
                return False
            room = scratch.take(room_bytes(entry.record))
            slot_bytes = round_up(entry.record.total_bytes)
            count = slots.read_slot(entry.place, room[:slot_bytes])
            opened = open_payload(key, entry.record, room, count)
            is_same = opened[: len(parts[0])] == parts[0] and opened[len(parts[0]) :] == parts[1]
            if is_same and self._is_synced:
                slots.sync_object(entry)
            return bool(is_same)
        except FormatError:
            return False  # the stored object is damaged, and will be replaced
        finally:
            slots.release([entry])

    def _commit(self, batch: Batch, staged: _Staged) -> None:
        """Publish the objects of a batch. If the call has already returned, free their slots instead.

        Once the call has returned, the caller may change its memory, so the slots may contain changed bytes.
        """
        records = sorted(staged.records, key=lambda record: record.sequence)
        if batch.is_expired:
            staged.slots.give_back(staged.packed)
            return
        try:
            if records:
                staged.slots.commit(staged.packed, records, sync=self._is_synced)
        except ConnectionError:
            staged.outcomes = dict.fromkeys(staged.outcomes, _OWNER_ENDED)
        batch.settle(staged.outcomes)

    def _wipe(self, batch: Batch, slots: Slots, removed: dict[int, SlotRef], _: Scratch) -> None:
        done = ObjectResult(ObjectStatus.REMOVED)
        outcomes = {index: done if index in removed else MISSING for index in range(batch.num_objects)}
        try:
            slots.wipe([*removed.values()])
            if self._is_synced:
                slots.sync_blanks()
        except ConnectionError:
            outcomes = dict.fromkeys(outcomes, _OWNER_ENDED)
        batch.settle(outcomes)


class _Staged:
    """Objects of one call to `write` that are in their slots but not yet published."""

    def __init__(self, slots: Slots, count: int) -> None:
        self.slots = slots
        self.records: list[Record] = []
        self.packed: dict[SlotRef, bytes] = {}
        self.outcomes: dict[int, ObjectResult] = {}
        self._num_left = count
        self._lock = threading.Lock()

    def count_down(self) -> bool:
        with self._lock:
            self._num_left -= 1
            return not self._num_left
