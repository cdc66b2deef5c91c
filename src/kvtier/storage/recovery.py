"""Opening a store's folder: one process at a time, nothing newer than we know, nothing deleted that is not ours.

    LOCK                  locked by the process that has the store open
    segment-00000012.*    segments (segment.py); one without a table was being made or deleted: its file is deleted
    quarantine/           segments whose tables cannot be read, as they were found: ours to keep, yours to delete
    anything else         is left alone

The index comes back from the segments' tables; no payload is read. Of two records with one key the later one counts,
and the other is blanked, so that it cannot come back.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass, field

from kvtier.errors import FormatError, StoreError, StoreInUseError, VersionError
from kvtier.storage.files import FILE_MODE, FOLDER_MODE, Files
from kvtier.storage.record import BLANK, Flags, Record
from kvtier.storage.segment import SUPERBLOCK_BYTES, Segment, Shape, segment_number, slots_name, table_name

LOCK = "LOCK"
QUARANTINE = "quarantine"


class FolderLock:
    """The lock of a store's folder, held until `release`, or the end of the process."""

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, FOLDER_MODE, exist_ok=True)
            mode = os.stat(folder).st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StoreError(
                    f"{folder!r} can be written by others (mode {stat.S_IMODE(mode):o}), who could plant blocks in it: "
                    f"chmod 700 it, or name a folder of your own"
                )
            self._descriptor = os.open(
                os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
            )
        except OSError as error:
            raise StoreError(f"cannot open a store in {folder!r}: {error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StoreInUseError(
                f"{folder!r} is in use by process {owner}: a store has one owner; "
                f"close it there, or give this one a folder of its own"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have the folder."""
        os.close(self._descriptor)


@dataclass(slots=True)
class Recovered:
    """What was found in a folder."""

    segments: dict[int, Segment] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    """Objects, from the first to the last stored."""
    quarantined: list[Record] = field(default_factory=list)
    """Objects that an earlier process found corrupt."""
    num_bad: int = 0
    """Records and files found unreadable."""
    quarantine_bytes: int = 0
    last_number: int = 0
    """The highest number any segment has, unreadable ones included."""


def recover(files: Files, folder: str, *, direct: bool) -> Recovered:
    """Open all segments of a folder. A VersionError, before anything is changed, if one is from a newer kvtier."""
    found = Recovered()
    quarantine = os.path.join(folder, QUARANTINE)
    if os.path.isdir(quarantine):
        found.quarantine_bytes = sum(files.list(quarantine).values())
    names = files.list(folder)
    numbers = {n for n in map(segment_number, names) if n is not None}
    found.last_number = max(numbers, default=0)
    shapes = {n: _read_shape(files, folder, n) for n in sorted(numbers) if table_name(n) in names}
    try:
        for number, shape in shapes.items():
            if shape is None:
                found.quarantine_bytes += _set_aside(files, folder, number, names)
                found.num_bad += 1
                continue
            if slots_name(number) not in names:  # being deleted, and the disk forgot the slots first
                files.unlink(os.path.join(folder, table_name(number)))
                continue
            segment = found.segments[number] = Segment(files, folder, shape, direct=direct)
            records, num_bad = segment.read_table(names[slots_name(number)])
            found.num_bad += num_bad
            for record in records:
                (found.quarantined if record.flags & Flags.QUARANTINED else found.records).append(record)
        for name in names:
            owner = segment_number(name)
            if owner is not None and (owner not in shapes or name.endswith(".new")):
                files.unlink(os.path.join(folder, name))
        _keep_latest(found)
    except BaseException:
        for segment in found.segments.values():
            segment.close()
        raise
    return found


def _read_shape(files: Files, folder: str, number: int) -> Shape | None:
    data = bytearray(SUPERBLOCK_BYTES)
    descriptor = files.open(os.path.join(folder, table_name(number)))
    try:
        count = files.read(descriptor, memoryview(data), 0)
    finally:
        files.close(descriptor)
    try:
        shape = Shape.unpack(memoryview(data)[:count])
    except VersionError as error:
        raise VersionError(f"{folder!r}: {error}; upgrade kvtier, or give it another folder") from error
    except FormatError:
        return None
    return shape if shape.number == number else None


def _set_aside(files: Files, folder: str, number: int, names: dict[str, int]) -> int:
    """Move a segment that cannot be read to the quarantine; returns its bytes."""
    aside = os.path.join(folder, QUARANTINE)
    os.makedirs(aside, FOLDER_MODE, exist_ok=True)
    taken = files.list(aside)
    count = 0
    for name in (table_name(number), slots_name(number)):
        if name in names:
            target = next(n for n in (name, *(f"{name}.{i}" for i in range(1, len(taken) + 2))) if n not in taken)
            files.rename(os.path.join(folder, name), os.path.join(aside, target))
            count += names[name]
    return count


def _keep_latest(found: Recovered) -> None:
    latest: dict[bytes, Record] = {}
    for record in sorted(found.records, key=lambda record: record.sequence):
        older = latest.pop(record.key, None)
        if older is not None:
            found.segments[older.segment].write_records(older.slot, BLANK)
        latest[record.key] = record
    found.records = list(latest.values())
