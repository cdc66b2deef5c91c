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
from kvtier.storage.disk.recovery import FolderLock, recover
from kvtier.storage.disk.sealing import pack_record
from kvtier.storage.disk.segment import Segment, SegmentHeader
from kvtier.storage.record import BLANK, Flags, Record
from kvtier.storage.store import StoreStats

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of a disk that is healthy but full."""
_MAX_NAMES = 100
"""Maximum number of segment numbers that one write tries. The next write continues with the following number."""


def slot_bytes_for(nbytes: int) -> int:
    """Return the slot size for an object. Sizes are rounded up by at most a sixteenth, so that few sizes occur."""
    return round_up(max(nbytes, 1), max(4096, 1 << max(0, nbytes.bit_length() - 5)))


class SlotAllocator:
    """Slots for objects. The lock protects metadata and is never held during I/O, so that a hanging disk blocks only
    the threads that access the disk. Only one thread at a time makes room."""

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
        keys: TenantKeys | None = None,
    ) -> None:
        self._folder, self._files, self._direct, self._keys = folder, files, direct, keys
        self._max_bytes, self._segment_bytes, self._min_free_bytes = max_bytes, segment_bytes, min_free_bytes
        self._lock = threading.Lock()
        self._growth = threading.Lock()
        self._catalog = Catalog()
        self._segments: dict[int, Segment] = {}
        self._blanked: set[int] = set()
        """Segments whose blanked records are possibly not on disk yet."""
        self._going: set[SlotRef] = set()
        """Slots of replaced objects whose records are being blanked."""
        self._wiped = threading.Condition(self._lock)
        self._folder_lock = FolderLock(folder)
        try:
            self._recover(sync)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot open the store in {folder!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _recover(self, sync: bool) -> None:
        found = recover(self._files, self._folder, self._max_bytes, direct=self._direct, keys=self._keys)
        self._segments = found.segments
        self._quarantine_bytes, self.num_quarantined = found.quarantine_bytes, found.num_bad
        self._last_number = found.last_number
        self._sequence = max((r.sequence for r in (*found.records, *found.quarantined)), default=0)
        for number, segment in self._segments.items():
            occupied, bad = ([r.slot for r in rs if r.segment == number] for rs in (found.records, found.quarantined))
            foreign = [place.slot for place in found.foreign if place.segment == number]
            self._catalog.add_segment(segment.shape, occupied, [*bad, *foreign])
        for record in found.records:
            self._catalog.publish(record)
        if sync:  # writes of an earlier process can still be in the page cache, and must become durable
            self.sync_slots(self._segments)
            self.sync_tables(self._segments)
        while self._catalog.file_bytes + self._quarantine_bytes > self._max_bytes and self._segments:
            coldest = self._catalog.coldest_segment()
            assert coldest is not None, "no segment is held yet"
            self._drop(coldest)

    # --- lookups

    def find(self, key: bytes) -> Record | None:
        with self._lock:
            entry = self._catalog.find(key)
            return entry.record if entry else None

    def hold(self, key: bytes) -> Entry | None:
        """Return the object of this key. The object's bytes do not change until `release`."""
        with self._lock:
            entry = self._catalog.find(key)
            if entry is not None:
                self._catalog.hold(entry)
            return entry

    def hold_same(self, record: Record) -> bool:
        """True if an equal object is stored. The check counts as a use."""
        with self._lock:
            entry = self._catalog.find(record.key)
            if entry is None or not record.is_same_object(entry.record):
                return False
            self._catalog.hold(entry)
            self._catalog.release(entry)
            return True

    def release(self, entry: Entry) -> None:
        with self._lock:
            self._catalog.release(entry)

    def list_after(self, segment: int, slot: int, limit: int) -> list[Record]:
        with self._lock:
            return list(islice(self._catalog.after(segment, slot), limit))

    # --- changes

    def next_sequences(self, count: int) -> range:
        with self._lock:
            self._sequence += count
            return range(self._sequence - count + 1, self._sequence + 1)

    def reserve(self, nbytes: int) -> SlotRef | str:
        """Return a slot with a blank record, or the reason why there is no slot. Evicts objects if space is short."""
        slot_bytes = slot_bytes_for(nbytes)
        with self._lock:
            place = self._catalog.take(slot_bytes)
        if place is not None:
            return place
        with self._growth:
            return self._make_room(slot_bytes)

    def publish(self, records: Iterable[Record]) -> list[Entry]:
        """Add written objects to the index. Return the objects that they replace, which the caller must `wipe`."""
        with self._lock:
            replaced = [self._catalog.publish(record) for record in records]
            going = [entry for entry in replaced if entry is not None]
            self._going.update(entry.place for entry in going)
        return going

    def discard(self, key: bytes) -> Entry | None:
        """Remove an object from the index. The caller must `wipe` it."""
        with self._lock:
            return self._catalog.discard(key)

    def wipe(self, entries: Sequence[Entry]) -> None:
        """Blank the records of removed objects and free their slots. After an OSError the slots are not reused."""
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
        """Remove a corrupt object from the index and mark its record. The slot is reused last."""
        with self._lock:
            if self._catalog.find(entry.record.key) is not entry:
                return  # removed while it was read
            self._catalog.discard(entry.record.key)
            self.num_quarantined += 1
            entry.record = replace(entry.record, flags=entry.record.flags | Flags.QUARANTINED)
        self._free([entry], lambda: self.write_records({entry.place: pack_record(entry.record, self._keys)}))

    def forget(self, entry: Entry) -> None:
        """Remove an object whose key was deleted."""
        with self._lock:
            if self._catalog.find(entry.record.key) is not entry:
                return  # removed while it was read
            self._catalog.discard(entry.record.key)
        self.wipe([entry])

    def give_back(self, places: Iterable[SlotRef]) -> None:
        """Free reserved slots that were not published. A slot whose record cannot be blanked is not reused."""
        for place in places:
            try:
                self._blank([place])
                done = self._catalog.give_back
            except OSError:
                done = self._catalog.retire
            with self._lock:
                done(place)

    def _blank(self, places: Iterable[SlotRef]) -> None:
        blanks = dict.fromkeys(places, BLANK)
        try:
            self.write_records(blanks)
        finally:  # after the write: otherwise a concurrent sync could mark blanks as synced before they are written
            with self._lock:
                self._blanked.update(place.segment for place in blanks)

    def sync_blanks(self) -> None:
        """Flush blanked records to the disk, after waiting for threads that blank records of replaced objects.
        A replaced object would otherwise reappear if the power failed after its successor was removed."""
        with self._wiped:
            before = frozenset(self._going)
            self._wiped.wait_for(lambda: before.isdisjoint(self._going))
        with self._growth:  # excludes deletion of segments and blanking of evicted objects
            with self._lock:
                numbers = self._blanked & self._segments.keys()
                self._blanked.clear()
            try:
                self.sync_tables(numbers)
            except OSError:
                with self._lock:
                    self._blanked |= numbers
                raise

    def segment(self, place: SlotRef) -> Segment:
        """Return the segment of a slot that the caller holds."""
        return self._segments[place.segment]

    def write_records(self, records: Mapping[SlotRef, bytes]) -> None:
        """Write packed records, or blanks, into their tables, where they survive the end of the process.

        Adjacent slots share one write, because this phase of a batch does not overlap with other I/O.
        """
        places = sorted(records)
        starts = [i for i, (number, slot) in enumerate(places) if not i or places[i - 1] != (number, slot - 1)]
        for first, last in pairwise((*starts, len(places))):
            data = b"".join([records[place] for place in places[first:last]])
            self.segment(places[first]).write_records(places[first].slot, data)

    def sync_slots(self, numbers: Iterable[int]) -> None:
        """Flush the payloads of these segments. The caller must prevent their deletion, for example by a hold."""
        for number in numbers:
            self._segments[number].sync_slots()

    def sync_tables(self, numbers: Iterable[int]) -> None:
        """Flush the records of these segments. The caller must prevent their deletion, for example by a hold."""
        for number in numbers:
            self._segments[number].sync_table()

    def sync_all(self) -> list[OSError]:
        """Flush as many segments as possible and return the errors. No call may be running."""
        errors = []
        for segment in self._segments.values():
            try:
                segment.sync_slots()
                segment.sync_table()
            except OSError as error:
                errors.append(error)
        return errors

    def close(self) -> None:
        """Close the files and unlock the folder. No call may be running."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._folder_lock.release()

    # --- statistics

    def fill_in(self, calls: StoreStats) -> StoreStats:
        return replace(
            calls,
            num_objects=len(self._catalog),
            used_bytes=self.used_bytes,
            max_bytes=self._max_bytes,
            num_evicted=self._catalog.num_evicted,
            num_quarantined=self.num_quarantined,
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, including files in quarantine."""
        return self._catalog.file_bytes + self._quarantine_bytes

    @property
    def is_direct(self) -> bool:
        with self._lock:
            return self._direct and all(segment.is_direct for segment in self._segments.values())

    # --- making room

    def _make_room(self, slot_bytes: int) -> SlotRef | str:
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
                return self._why_no_room(slot_bytes)
            if isinstance(victim, int):
                self._drop(victim)
            else:
                self.wipe([victim])

    def _could_grow(self, slot_bytes: int) -> bool:
        """True if a new segment would fit after the deletion of all other segments."""
        needed = self._shape(0, slot_bytes, self._segment_bytes).file_bytes
        free = self._files.free_bytes(self._folder) + self._catalog.file_bytes - needed
        return needed + self._quarantine_bytes <= self._max_bytes and free >= self._min_free_bytes

    def _grow(self, slot_bytes: int) -> bool:
        """Add a segment if there is room. The last segment may be smaller, down to an eighth of the normal size."""
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
        return SegmentHeader.fitting(number, slot_bytes, segment_bytes, is_sealed=self._keys is not None)

    def _create(self, shape: SegmentHeader) -> Segment:
        """Create a segment with the next number whose file names are free. Names can be in use by links or folders."""
        while True:
            self._last_number += 1
            try:
                numbered = replace(shape, number=self._last_number)
                return Segment.create(self._files, self._folder, numbered, direct=self._direct)
            except (FileExistsError, IsADirectoryError):
                if self._last_number - shape.number >= _MAX_NAMES:
                    raise

    def _drop(self, number: int) -> None:
        with self._lock:
            if self._catalog.is_held(number):
                return  # held again since it was selected
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
