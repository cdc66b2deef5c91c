"""Opening a store's folder: one process at a time, nothing newer than we know, nothing deleted that is not ours.

    LOCK                  locked by the process that has the store open
    segment-00000012.kv   segments (segment.py)
    segment-*.kv.new      a segment that was being made when the process ended: deleted
    quarantine/           files named like segments that are none, as they were found; ours to keep, yours to delete
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
from kvtier.storage.segment import SUPERBLOCK_BYTES, Segment, Shape, segment_number

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
    shapes = {name: _read_shape(files, folder, name) for name in sorted(names) if segment_number(name) is not None}
    try:
        for name, shape in shapes.items():
            found.last_number = max(found.last_number, segment_number(name) or 0)
            if shape is None:
                _set_aside(files, folder, name)
                found.num_bad += 1
                found.quarantine_bytes += names[name]
            else:
                segment = found.segments[shape.number] = Segment(files, folder, shape, direct=direct)
                records, num_bad = segment.read_table(names[name])
                found.num_bad += num_bad
                for record in records:
                    (found.quarantined if record.flags & Flags.QUARANTINED else found.records).append(record)
        for name in names:
            if name.endswith(".new") and segment_number(name.removesuffix(".new")) is not None:
                files.unlink(os.path.join(folder, name))
        _keep_latest(found)
    except BaseException:
        for segment in found.segments.values():
            segment.close()
        raise
    return found


def _read_shape(files: Files, folder: str, name: str) -> Shape | None:
    data = bytearray(SUPERBLOCK_BYTES)
    descriptor = files.open(os.path.join(folder, name))
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
    return shape if shape.number == segment_number(name) else None


def _set_aside(files: Files, folder: str, name: str) -> None:
    aside = os.path.join(folder, QUARANTINE)
    os.makedirs(aside, FOLDER_MODE, exist_ok=True)
    taken = files.list(aside)
    target = next(n for n in (name, *(f"{name}.{i}" for i in range(1, len(taken) + 2))) if n not in taken)
    files.rename(os.path.join(folder, name), os.path.join(aside, target))


def _keep_latest(found: Recovered) -> None:
    latest: dict[bytes, Record] = {}
    for record in sorted(found.records, key=lambda record: record.sequence):
        older = latest.pop(record.key, None)
        if older is not None:
            found.segments[older.segment].write_record(older.slot, BLANK)
        latest[record.key] = record
    found.records = list(latest.values())
