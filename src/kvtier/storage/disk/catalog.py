"""Catalog: the metadata of a disk store (objects, slots, holds, eviction order). It does no I/O and has no lock.

A held object keeps its slot, so the bytes of the object do not change. A slot is in one of these states:

    free --take()--> held by a writer --publish()--> published --discard(), evict() or replaced--> gone
     ^                    |                                                                          |
     +---- give_back() ---+                              the caller blanks the record, then the last release()
     +-----------------------------------------------------------------------------------------------+

"Gone" means that the object is no longer in the index, but its slot cannot be reused yet. To blank a record means to
overwrite it with zeros in the table of its segment. The record of a corrupt object is marked as quarantined instead. If
the write to the table fails, the slot is never reused.

Eviction removes the least recently used object of the needed slot size. It may instead remove the least recently used
segment of the other slot sizes, if this segment was used less recently or if there is no object to remove. In this way,
the slot sizes that are used most get the space. Held objects, and segments with held objects, are not removed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.storage.disk.segment import SegmentHeader
from kvtier.storage.record import Flags, Record


class SlotRef(NamedTuple):
    segment: int
    slot: int


@dataclass(slots=True, eq=False)
class Entry:
    record: Record
    slot_bytes: int
    used_at: int = 0
    num_holds: int = 0
    is_gone: bool = False
    """True if the object was removed from the index. Its slot becomes free when the last hold is released."""

    @property
    def place(self) -> SlotRef:
        return SlotRef(self.record.segment, self.record.slot)


@dataclass(slots=True, eq=False)
class _SegmentEntries:
    shape: SegmentHeader
    slots: list[Entry | None]
    num_holds: int = 0
    used_at: int = 0


@dataclass(slots=True, eq=False)
class _Size:
    """All slots of one size."""

    free: deque[SlotRef] = field(default_factory=deque)
    """Free slots in the order in which they are reused. Slots that a writer gives back are inserted at the front. The
    slots of a new segment are in order, so that the objects of one write are normally adjacent."""
    quarantined: deque[SlotRef] = field(default_factory=deque)
    """Free slots of objects that are corrupt or cannot be decrypted. They are reused last, so that their bytes can be
    examined."""
    entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    """Objects by key, sorted from the least to the most recently used."""


class Catalog:
    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._sizes: dict[int, _Size] = {}
        self._segments: dict[int, _SegmentEntries] = {}
        self._now = 0
        self.file_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def is_held(self, number: int) -> bool:
        return self._segments[number].num_holds > 0

    def add_segment(
        self, shape: SegmentHeader, occupied: Collection[int] = (), quarantined: Collection[int] = ()
    ) -> None:
        """Add a segment. Its `occupied` slots are held until the caller publishes them or gives them back."""
        self._segments[shape.number] = _SegmentEntries(shape, [None] * shape.num_slots, len(occupied))
        self.file_bytes += shape.file_bytes
        size = self._sizes.setdefault(shape.slot_bytes, _Size())
        others = {*occupied, *quarantined}
        size.free.extend(SlotRef(shape.number, slot) for slot in range(shape.num_slots) if slot not in others)
        size.quarantined.extend(SlotRef(shape.number, slot) for slot in quarantined)

    def remove_segment(self, number: int) -> None:
        segment = self._segments.pop(number)
        self.file_bytes -= segment.shape.file_bytes
        size = self._sizes[segment.shape.slot_bytes]
        size.free = deque(place for place in size.free if place.segment != number)
        size.quarantined = deque(place for place in size.quarantined if place.segment != number)
        for entry in segment.slots:
            if entry is not None and not entry.is_gone:
                self._unlist(entry)
                self.num_evicted += 1

    def find(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def hold(self, entry: Entry) -> None:
        """Keep the bytes of an object until `release`. A hold counts as a use."""
        self._use(entry)
        entry.num_holds += 1
        self._segments[entry.record.segment].num_holds += 1

    def release(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """Release a hold. With `keep_slot`, never reuse the slot, because its record could not be blanked."""
        segment = self._segments[entry.record.segment]
        segment.num_holds -= 1
        entry.num_holds -= 1
        if keep_slot:
            entry.num_holds = -1  # later releases cannot make it 0, which would free the slot
        if entry.is_gone and entry.num_holds == 0:
            segment.slots[entry.record.slot] = None
            size = self._sizes[entry.slot_bytes]
            (size.quarantined if entry.record.flags & Flags.QUARANTINED else size.free).append(entry.place)

    def take(self, slot_bytes: int) -> SlotRef | None:
        """Return a free slot, if any, and hold it for a writer until `publish`, `give_back` or `retire`."""
        size = self._sizes.get(slot_bytes)
        free = size and (size.free or size.quarantined)
        if not free:
            return None
        place = free.popleft()
        self._segments[place.segment].num_holds += 1
        return place

    def give_back(self, place: SlotRef) -> None:
        """Free a writer's slot that was not published. The slot's record must be blank."""
        segment = self._segments[place.segment]
        segment.num_holds -= 1
        self._sizes[segment.shape.slot_bytes].free.appendleft(place)

    def retire(self, place: SlotRef) -> None:
        """Give up a writer's slot whose record could not be blanked. The slot is not reused."""
        self._segments[place.segment].num_holds -= 1

    def publish(self, record: Record) -> Entry | None:
        """Add the object in a writer's slot. Return the outdated object of the same key, or None.

        The outdated object is normally the previous one. If the previous object has a higher sequence, the outdated
        object is the one in the writer's slot. The caller blanks the outdated object's record and releases the object.
        """
        segment = self._segments[record.segment]
        entry = Entry(record, segment.shape.slot_bytes)
        segment.num_holds -= 1
        segment.slots[record.slot] = entry
        previous = self._entries.get(record.key)
        if previous is not None and previous.record.sequence > record.sequence:
            entry.is_gone = True
            self._hold_gone(entry)
            return entry
        if previous is not None:
            self._go(previous)
        self._entries[record.key] = entry
        self._sizes[entry.slot_bytes].entries[record.key] = entry
        self._use(entry)
        return previous

    def discard(self, key: bytes) -> Entry | None:
        """Remove an object from the index. The caller blanks the record and releases the object."""
        entry = self._entries.get(key)
        if entry is not None:
            self._go(entry)
        return entry

    def evict(self, slot_bytes: int, *, by_segment: bool) -> Entry | int | None:
        """Choose what to evict for a slot of this size. Return None if nothing can be evicted.

        The result is normally an object that this call has removed from the index. The caller blanks its record and
        releases the object. With `by_segment`, the result can be the number of a segment, which the caller removes.
        """
        size = self._sizes.get(slot_bytes)
        own = next((entry for entry in size.entries.values() if not entry.num_holds), None) if size else None
        other = self.coldest_segment(slot_bytes) if by_segment and self._sizes.keys() - {slot_bytes} else None
        if other is not None and (own is None or self._segments[other].used_at < own.used_at):
            return other
        if own is not None:
            self._go(own)
            self.num_evicted += 1
        return own

    def coldest_segment(self, except_slot_bytes: int = 0) -> int | None:
        """Return the number of the least recently used segment without holds. Skip one slot size."""
        candidates = (s for s in self._segments.values() if not s.num_holds and s.shape.slot_bytes != except_slot_bytes)
        coldest = min(candidates, key=lambda segment: segment.used_at, default=None)
        return coldest.shape.number if coldest else None

    def after(self, segment: int, slot: int) -> Iterator[Record]:
        """Yield the records of all objects in the order of their slots, starting with this slot."""
        for number in sorted(n for n in self._segments if n >= segment):
            entries = self._segments[number].slots
            for entry in entries[slot if number == segment else 0 :]:
                if entry is not None and not entry.is_gone:
                    yield entry.record

    def _use(self, entry: Entry) -> None:
        self._now += 1
        segment = self._segments[entry.record.segment]
        entry.used_at = segment.used_at = self._now
        if not entry.is_gone:
            self._sizes[entry.slot_bytes].entries.move_to_end(entry.record.key)

    def _go(self, entry: Entry) -> None:
        self._unlist(entry)
        entry.is_gone = True
        self._hold_gone(entry)

    def _hold_gone(self, entry: Entry) -> None:
        entry.num_holds += 1
        self._segments[entry.record.segment].num_holds += 1

    def _unlist(self, entry: Entry) -> None:
        del self._entries[entry.record.key]
        del self._sizes[entry.slot_bytes].entries[entry.record.key]
