"""SlotAllocator: manages the slots of a disk store, in memory and in files, within a size limit. Thread-safe."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from kvtier.errors import StoreError
from kvtier.storage.codec import round_up
from kvtier.storage.disk.catalog import Catalog, Entry, SlotRef
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKeys
from kvtier.storage.disk.recovery import recover
from kvtier.storage.disk.sealing import pack_record
from kvtier.storage.disk.segment import Segment, SegmentHeader
from kvtier.storage.disk.wear import WriteBudget
from kvtier.storage.record import BLANK, RECORD_BYTES, Flags, Record
from kvtier.storage.store import ObjectResult, ObjectStatus

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of a disk that is healthy but full."""
ALREADY_STORED = ObjectResult(ObjectStatus.STORED, reason="already stored")
_MAX_NAMES = 100
"""Maximum number of segment numbers to skip because their file names are in use."""


def slot_bytes_for(nbytes: int) -> int:
    """Round `nbytes` up to one of a few slot sizes: by at most 4095 bytes or a sixteenth, whichever is greater."""
    return round_up(max(nbytes, 1), max(4096, 1 << max(0, nbytes.bit_length() - 5)))


class SlotAllocator:
    """The slots of a folder, with their metadata and files.

    A segment consists of slots of equal size, and a table with one record per slot. A record describes the object in
    its slot. To blank a record means to overwrite it with zeros, so that the slot can be reused.

    `_lock` protects the metadata. It is never held during I/O, so that a hanging disk blocks only the threads that
    access the disk. `_growth` ensures that only one thread at a time creates or deletes segments, or evicts objects.
    """

    def __init__(
        self,
        folder: str,
        files: Files,
        *,
        max_bytes: int,
        segment_bytes: int,
        min_free_bytes: int,
        direct: bool,
        sync: bool,
        budget: WriteBudget,
        keys: TenantKeys | None = None,
    ) -> None:
        """Open the folder, which the caller has locked."""
        self._folder, self._files, self._direct, self.keys = folder, files, direct, keys
        self._budget = budget
        self._max_bytes, self._segment_bytes, self._min_free_bytes = max_bytes, segment_bytes, min_free_bytes
        self._lock = threading.Lock()
        self._growth = threading.Lock()
        self._catalog = Catalog()
        self._segments: dict[int, Segment] = {}
        self._blanked: set[int] = set()
        """Segments with blanked records that are perhaps not on the disk yet."""
        self._unsynced: set[int] = set()
        """Segments with objects that are perhaps not on the disk yet, because they were written without sync."""
        self._going: set[SlotRef] = set()
        """Slots of replaced objects whose records are being blanked."""
        self._wiped = threading.Condition(self._lock)
        self._discarded: dict[SlotRef, Entry] = {}
        """Objects that `discard` has removed but whose records are not blanked yet."""
        self._folder_id = self._find_folder()
        self._late: set[SlotRef] = set()
        """Slots to which a client (another process) still writes after its connection ended. Freed later."""
        try:
            self._recover(sync)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot open the store in {folder!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _recover(self, sync: bool) -> None:
        found = recover(self._files, self._folder, self._max_bytes, direct=self._direct, keys=self.keys)
        self._budget.load()
        self._segments = found.segments
        self._quarantine_bytes, self.num_quarantined = found.quarantine_bytes, found.num_bad
        self._last_number = found.last_number
        self._sequence = max((r.sequence for r in (*found.records, *found.quarantined)), default=0)
        for number, segment in self._segments.items():
            occupied, bad = ([r.slot for r in rs if r.segment == number] for rs in (found.records, found.quarantined))
            foreign = [place.slot for place in found.foreign if place.segment == number]
            late = self._late_slots(segment, occupied)
            self._late.update(SlotRef(number, slot) for slot in late)
            self._blank(SlotRef(number, slot) for slot in late)  # clients are overwriting the payloads of these slots
            last = [slot for slot in (*bad, *foreign) if slot not in late]
            self._catalog.add_segment(segment.shape, [*occupied, *late], last)
        for record in found.records:
            self._catalog.publish(record)
        if sync:  # flush writes of an earlier process that may still be in the page cache
            self.sync_slots(self._segments)
            self.sync_tables(self._segments)
        else:
            self._blanked, self._unsynced = set(self._segments), set(self._segments)
        self._trim()

    def limit(self, max_bytes: int) -> None:
        """Lower the size limit of the folder to the limit of another process. Ignore a limit that is not lower."""
        with self._growth:
            if max_bytes < self._max_bytes:
                self._max_bytes = max_bytes
                self._segment_bytes = min(self._segment_bytes, max_bytes)
                self._trim()

    def _trim(self) -> None:
        """Delete the least recently used segments until the files fit the limit. Keep segments with held objects."""
        while self.used_bytes > self._max_bytes:
            with self._lock:
                coldest = self._catalog.coldest_segment()
            if coldest is None:
                return
            self._drop(coldest)

    def _late_slots(self, segment: Segment, occupied: Sequence[int]) -> set[int]:
        """Return the free slots to which clients of the previous owner are still writing."""
        if not segment.is_locked(0, segment.shape.num_slots):
            return set()
        return {n for n in set(range(segment.shape.num_slots)).difference(occupied) if segment.is_locked(n)}

    # --- lookups

    def find(self, key: bytes) -> Record | None:
        with self._lock:
            entry = self._catalog.find(key)
            return entry.record if entry else None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._catalog.find(key) is not None for key in keys]

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the object of each key, or None. The bytes of an object do not change until `release`."""
        with self._lock:
            entries = [self._catalog.find(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    self._catalog.hold(entry)
            return entries

    def _use_same(self, record: Record, sync: bool) -> bool:
        """True if an equal object is stored. If so, count a use of the stored object, and with `sync`, flush it."""
        with self._lock:
            entry = self._catalog.find(record.key)
            if entry is None or not record.is_same_object(entry.record):
                return False
            self._catalog.hold(entry)
        try:
            if sync:
                self.sync_object(entry)
        finally:
            self.release([entry])
        return True

    def sync_object(self, entry: Entry) -> None:
        """Flush the segment of a held object, unless all objects of the segment are known to be on the disk."""
        if entry.record.segment in self._unsynced:
            self._sync_objects([entry.record.segment])

    def _sync_objects(self, numbers: Sequence[int]) -> None:
        """Flush all objects of these segments. The caller must prevent the deletion of the segments."""
        self._unsynced.difference_update(numbers)
        try:
            self.sync_slots(numbers)
            self.sync_tables(numbers)
        except OSError:
            self._unsynced.update(numbers)
            raise

    def release(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._catalog.release(entry)

    def list_after(self, segment: int, slot: int, limit: int) -> list[Record]:
        with self._lock:
            return list(islice(self._catalog.after(segment, slot), limit))

    # --- changes

    def next_sequences(self, count: int) -> range:
        with self._lock:
            self._sequence += count
            return range(self._sequence - count + 1, self._sequence + 1)

    def reserve(self, record: Record, *, sync: bool) -> SlotRef | ObjectResult:
        """Reserve a slot for an object. Evict other objects if space is short.

        Return a result instead of a slot if an equal object is already stored, if there is no room, or if the daily
        write limit is reached. With `sync`, an equal stored object is flushed to the disk. Encrypted objects are
        compared by the caller, not here.
        """
        if record.seal is None and self._use_same(record, sync):
            return ALREADY_STORED
        refusal = self._budget.take(round_up(record.total_bytes) + RECORD_BYTES)
        if refusal:
            return ObjectResult(ObjectStatus.FAILED, reason=refusal)
        slot_bytes = slot_bytes_for(record.total_bytes)
        with self._lock:
            place = self._catalog.take(slot_bytes)
        if place is not None:
            return place
        with self._growth:
            return self._make_room(slot_bytes)

    def slot_bytes(self, place: SlotRef) -> int:
        return self._segments[place.segment].shape.slot_bytes

    def commit(self, packed: Mapping[SlotRef, bytes], records: Sequence[Record], *, sync: bool) -> None:
        """Publish objects whose payloads are in their slots. `packed` contains their records for the tables.

        If a write or a flush fails, free the slots and raise OSError.
        """
        numbers = sorted({place.segment for place in packed})
        try:
            if sync:
                self.sync_slots(numbers)
            self.write_records(packed)
            if sync:
                self.sync_tables(numbers)
            else:
                self._unsynced.update(numbers)
        except BaseException:
            self.give_back(packed)
            raise
        self._wipe(self._publish(records))

    def _publish(self, records: Iterable[Record]) -> list[Entry]:
        """Add written objects to the index. Return the outdated objects, which the caller must `_wipe`."""
        with self._lock:
            replaced = [self._catalog.publish(record) for record in records]
            going = [entry for entry in replaced if entry is not None]
            self._going.update(entry.place for entry in going)
        return going

    def discard(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Remove objects from the index and return their slots. The caller must `wipe` the slots."""
        with self._lock:
            entries = [self._catalog.discard(key) for key in keys]
            self._discarded.update((entry.place, entry) for entry in entries if entry is not None)
        return [None if entry is None else entry.place for entry in entries]

    def wipe(self, places: Iterable[SlotRef]) -> None:
        """Blank the records of discarded objects and free their slots. If that fails, the slots are never reused."""
        with self._lock:
            entries = [self._discarded.pop(place) for place in places]
        self._wipe(entries)

    def _wipe(self, entries: Sequence[Entry]) -> None:
        self._free(entries, lambda: self._blank(entry.place for entry in entries))

    def _free(self, entries: Sequence[Entry], write: Callable[[], None]) -> None:
        is_done = False
        try:
            write()
            is_done = True
        finally:
            with self._lock:
                for entry in entries:
                    self._going.discard(entry.place)
                    self._catalog.release(entry, keep_slot=not is_done)
                self._wiped.notify_all()

    def quarantine(self, entry: Entry) -> None:
        """Remove a corrupt object from the index and mark its record as quarantined. The slot is reused last."""
        with self._lock:
            if self._catalog.find(entry.record.key) is not entry:
                return  # removed while it was read
            self._catalog.discard(entry.record.key)
            self.num_quarantined += 1
            entry.record = replace(entry.record, flags=entry.record.flags | Flags.QUARANTINED)
        self._free([entry], lambda: self.write_records({entry.place: pack_record(entry.record, self.keys)}))

    def forget(self, entry: Entry) -> None:
        """Remove an object whose encryption key was deleted."""
        with self._lock:
            if self._catalog.find(entry.record.key) is not entry:
                return  # removed while it was read
            self._catalog.discard(entry.record.key)
        self._wipe([entry])

    def give_back(self, places: Iterable[SlotRef]) -> None:
        """Blank the records of unpublished slots and free the slots.

        A slot to which a client is still writing is freed later. A slot whose record cannot be blanked is not reused.
        """
        for place in places:
            try:
                self._blank([place])
                is_late = self._segments[place.segment].is_locked(place.slot)
                done = self._late.add if is_late else self._catalog.give_back
            except OSError:
                done = self._catalog.retire
            with self._lock:
                done(place)

    def _give_back_late(self) -> None:
        """Free those slots in `_late` to which no client is writing."""
        for place in [*self._late]:
            if not self._segments[place.segment].is_locked(place.slot):
                with self._lock:
                    self._late.remove(place)
                    self._catalog.give_back(place)

    def _blank(self, places: Iterable[SlotRef]) -> None:
        blanks = dict.fromkeys(places, BLANK)
        try:
            self.write_records(blanks)
        finally:  # after the write, so that a concurrent sync does not miss the blanks
            with self._lock:
                self._blanked.update(place.segment for place in blanks)

    def sync_blanks(self) -> None:
        """Flush blanked records to the disk.

        First wait for threads that are blanking records of replaced objects. Otherwise a replaced object could reappear
        if its successor was removed and the power failed.
        """
        with self._wiped:
            before = frozenset(self._going)
            self._wiped.wait_for(lambda: before.isdisjoint(self._going))
        with self._growth:  # no other thread deletes segments or blanks evicted objects meanwhile
            with self._lock:
                numbers = self._blanked & self._segments.keys()
                self._blanked.clear()
            try:
                self.sync_tables(numbers)
            except OSError:
                with self._lock:
                    self._blanked |= numbers
                raise

    def is_direct(self, place: SlotRef | None = None) -> bool:
        """True if I/O on the slot `place` bypasses the page cache. None stands for all slots."""
        if place is not None:
            return self._segments[place.segment].is_direct
        with self._lock:
            return self._direct and all(segment.is_direct for segment in self._segments.values())

    def read_slot(self, place: SlotRef, buffer: memoryview) -> int:
        """Read a slot that the caller holds (see `Segment.read_slot`)."""
        return self._segments[place.segment].read_slot(place.slot, buffer)

    def write_slot(self, place: SlotRef, buffers: Sequence[memoryview]) -> None:
        """Write a slot that the caller has reserved (see `Segment.write_slot`)."""
        self._segments[place.segment].write_slot(place.slot, buffers)

    def check_owner(self) -> None:
        """Do nothing, because the owner cannot lose its slots. SlotClient has the same method with a check."""

    def write_records(self, records: Mapping[SlotRef, bytes]) -> None:
        """Write packed records or blanks into the tables, where they survive the end of the process.

        The records of adjacent slots are written together, because no other I/O of the batch overlaps with this step.
        """
        places = sorted(records)
        starts = [i for i, (number, slot) in enumerate(places) if not i or places[i - 1] != (number, slot - 1)]
        for first, last in pairwise((*starts, len(places))):
            data = b"".join([records[place] for place in places[first:last]])
            self._segments[places[first].segment].write_records(places[first].slot, data)

    def sync_slots(self, numbers: Iterable[int]) -> None:
        """Flush the slots of segments. The caller must prevent the deletion of the segments, for example by a hold."""
        for number in numbers:
            self._segments[number].sync_slots()

    def sync_tables(self, numbers: Iterable[int]) -> None:
        """Flush the tables of segments. The caller must prevent the deletion of the segments, for example by a hold."""
        for number in numbers:
            self._segments[number].sync_table()

    def sync_all(self) -> list[OSError]:
        """Flush as many segments as possible and save the write budget. Return the errors of the segments."""
        errors = []
        with self._growth:  # no other thread creates or deletes segments meanwhile
            for segment in self._segments.values():
                try:
                    segment.sync_slots()
                    segment.sync_table()
                except OSError as error:
                    errors.append(error)
        self._budget.save()
        return errors

    def close(self) -> None:
        """Close the files. No other call may be running."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    # --- statistics

    def figures(self) -> dict[str, int]:
        """Return the fields of StoreStats that describe the folder."""
        return {
            "num_objects": len(self._catalog),
            "used_bytes": self.used_bytes,
            "max_bytes": self._max_bytes,
            "num_evicted": self._catalog.num_evicted,
            "num_quarantined": self.num_quarantined,
            "written_bytes": self._budget.written_bytes,
            "day_bytes": self._budget.day_bytes,
            "max_day_bytes": self._budget.max_day_bytes,
        }

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, including those in quarantine."""
        return self._catalog.file_bytes + self._quarantine_bytes

    # --- making room

    def _make_room(self, slot_bytes: int) -> SlotRef | ObjectResult:
        self._give_back_late()
        while True:
            with self._lock:
                place = self._catalog.take(slot_bytes)
            if place is not None:
                return place
            if self._grow(slot_bytes):
                continue
            could_grow = self._could_grow(slot_bytes)
            with self._lock:
                victim = self._catalog.evict(slot_bytes, by_segment=could_grow)
            if victim is None:
                return ObjectResult(ObjectStatus.FAILED, reason=self._why_no_room(slot_bytes))
            if isinstance(victim, int):
                self._drop(victim)
            else:
                self._wipe([victim])

    def _could_grow(self, slot_bytes: int) -> bool:
        """True if a new segment would fit into the limits after all existing segments were deleted."""
        needed = self._shape(0, slot_bytes, self._segment_bytes).file_bytes
        free = self._files.free_bytes(self._folder) + self._catalog.file_bytes - needed
        return needed + self._quarantine_bytes <= self._max_bytes and free >= self._min_free_bytes

    def _grow(self, slot_bytes: int) -> bool:
        """Add a segment of at least an eighth of the normal size. Return False if there is no room for it."""
        room = self._max_bytes - self.used_bytes
        segment_bytes = room if self._segment_bytes // 8 <= room < self._segment_bytes else self._segment_bytes
        shape = self._shape(self._last_number + 1, slot_bytes, segment_bytes)
        if shape.file_bytes > room:
            return False
        if self._files.free_bytes(self._folder) - shape.file_bytes < self._min_free_bytes:
            return False
        try:
            segment = self._create(shape)
        except OSError as error:
            if error.errno in FULL:
                return False
            raise
        with self._lock:
            self._segments[segment.shape.number] = segment
            self._catalog.add_segment(segment.shape)
        return True

    def _shape(self, number: int, slot_bytes: int, segment_bytes: int) -> SegmentHeader:
        return SegmentHeader.fitting(number, slot_bytes, segment_bytes, is_sealed=self.keys is not None)

    def _find_folder(self) -> int | None:
        stamp = self._files.stamp(self._folder)
        return None if stamp is None else stamp[0]

    def _check_folder(self) -> None:
        """Raise OSError if the folder was deleted or replaced.

        A new folder with this name may belong to another store, whose segments have the same names.
        """
        if self._find_folder() != self._folder_id:
            raise OSError(errno.ESTALE, f"the folder {self._folder!r} was deleted or replaced; open the store again")

    def _create(self, shape: SegmentHeader) -> Segment:
        """Create a segment with the next number. Skip numbers whose file names exist, for example as folders."""
        self._check_folder()
        while True:
            self._last_number += 1
            try:
                numbered = replace(shape, number=self._last_number)
                return Segment.create(self._files, self._folder, numbered, direct=self._direct)
            except (FileExistsError, IsADirectoryError):
                if self._last_number - shape.number >= _MAX_NAMES:
                    raise

    def _drop(self, number: int) -> None:
        self._check_folder()
        with self._lock:
            if self._catalog.is_held(number):
                return  # held again after it was selected
            self._catalog.remove_segment(number)
            segment = self._segments.pop(number)
        segment.unlink()
        self._files.sync_folder(self._folder)  # otherwise the objects could reappear after a power failure

    def _why_no_room(self, slot_bytes: int) -> str:
        aside = f", {self._quarantine_bytes} of them in quarantine" if self._quarantine_bytes else ""
        free = self._files.free_bytes(self._folder)
        return (
            f"no room for a slot of {slot_bytes} bytes: {self.used_bytes} of {self._max_bytes} bytes used{aside}"
            f", {free} free in {self._folder!r} (minimum {self._min_free_bytes}), nothing to evict"
        )
