"""Opens the folder of a disk store: locks the folder, checks versions, and rebuilds the index.

    LOCK                  contains the process id of the owner, which locks this file and the folder
    segment-00000012.*    files of a segment (segment.py); incomplete segments are deleted
    quarantine/           segments with invalid headers; they are kept until the operator deletes them
    keys/                 keys of the tenants, if the store is encrypted (keys.py)
    other files           are ignored

The index is rebuilt from the tables of the segments, without reading payloads. If two records have the same key, the
later record is valid. The earlier record is overwritten with zeros, so that its object cannot reappear.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import FormatError, StoreError, StoreInUseError, VersionError
from kvtier.storage.disk.catalog import SlotRef
from kvtier.storage.disk.files import FILE_MODE, FOLDER_MODE, Files
from kvtier.storage.disk.keys import TenantKeys
from kvtier.storage.disk.segment import SUPERBLOCK_BYTES, Segment, SegmentHeader, segment_number, slots_name, table_name
from kvtier.storage.record import BLANK, RECORD_BYTES, Flags, Record

LOCK = "LOCK"
QUARANTINE = "quarantine"
_NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of filesystems, such as NFS, that can lock files but not folders."""


class FolderLock:
    """The lock of a store's folder, held until `release` or the end of the process.

    The folder itself is locked, so that deleting the file LOCK does not unlock the folder. The file LOCK is locked too,
    because earlier versions lock only this file.

    Both locks are flock(2) locks, which also exclude a second store in the same process. POSIX locks would not exclude
    such a store, and they would be dropped as soon as any descriptor of the file is closed.

    A forked child shares the locks of its parent and could keep the folder locked. A fork hook therefore closes the
    descriptors in the child, and `release` unlocks explicitly. The hook cannot be unregistered, so it has only a weak
    reference to this object.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptors: list[int] = []
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        try:
            os.makedirs(folder, FOLDER_MODE, exist_ok=True)
            mode = os.stat(folder).st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StoreError(
                    f"{folder!r} is writable by other users (mode {stat.S_IMODE(mode):o}), who could insert blocks; "
                    f"run chmod 700 on it, or use a folder of your own"
                )
            self._lock_folder()
            self._lock_file()
        except OSError as error:
            self.release()
            raise StoreError(f"cannot open a store in {folder!r}: {error}") from error
        except StoreError:
            self.release()
            raise

    def _lock_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise

    def _lock(self, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use() from error

    def _lock_file(self) -> None:
        path = os.path.join(self._folder, LOCK)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        self._lock(descriptor)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            raise StoreInUseError(f"{path!r} was replaced while it was being locked; open the store again")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _in_use(self) -> StoreInUseError:
        try:
            descriptor = os.open(os.path.join(self._folder, LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # deleted while in use
            owner = ""
        else:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
        return StoreInUseError(
            f"{self._folder!r} is in use by process {owner or 'unknown'}, to which this process cannot connect; close "
            f"the store there, or use another folder"
        )

    def release(self) -> None:
        while self._descriptors:
            descriptor = self._descriptors.pop()
            with contextlib.suppress(OSError):  # filesystems without folder locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """Close the descriptors without unlocking, because the parent process still owns the locks."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _forget(reference: weakref.ref[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.forget()


@dataclass(slots=True)
class Recovered:
    """The contents of an opened folder."""

    segments: dict[int, Segment] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    """Valid objects, in the order in which they were stored."""
    quarantined: list[Record] = field(default_factory=list)
    """Objects that an earlier process marked as corrupt."""
    foreign: list[SlotRef] = field(default_factory=list)
    """Slots whose objects this process cannot decrypt, because another secret protects their encryption keys."""
    num_bad: int = 0
    """Number of invalid records and segment headers."""
    quarantine_bytes: int = 0
    last_number: int = 0
    """Highest segment number, unreadable segments included."""


def recover(files: Files, folder: str, max_bytes: int, *, direct: bool, keys: TenantKeys | None = None) -> Recovered:
    """Open a folder's segments. Delete segments that are incomplete or exceed `max_bytes`. Quarantine unreadable ones.

    Raise VersionError if a newer kvtier has written a segment. Raise StoreError if a segment is encrypted but `keys` is
    None, or if a segment is not encrypted but `keys` is given. These errors leave the folder unchanged.
    """
    if keys is not None:
        keys.reload()  # otherwise, records with unknown encryption keys would be overwritten with zeros
    found = Recovered()
    quarantine = os.path.join(folder, QUARANTINE)
    if os.path.islink(quarantine):
        raise StoreError(f"{quarantine!r} is a symbolic link, which would move damaged segments elsewhere; remove it")
    if os.path.isdir(quarantine):
        found.quarantine_bytes = sum(files.list(quarantine).values())
    names = files.list(folder)
    numbers = {n for n in map(segment_number, names) if n is not None}
    found.last_number = max(numbers, default=0)
    shapes = {n: _read_shape(files, folder, n, names) for n in sorted(numbers) if table_name(n) in names}
    _check_sealing(folder, [shape for shape in shapes.values() if shape is not None], keys)
    try:
        for number, shape in shapes.items():
            if shape is None:
                found.quarantine_bytes += _set_aside(files, folder, number, names)
                found.num_bad += 1
                continue
            if slots_name(number) not in names:  # a power failure interrupted the deletion of the segment
                files.unlink(os.path.join(folder, table_name(number)))
                continue
            if shape.file_bytes > max_bytes:
                for path in (table_name(number), slots_name(number)):
                    files.unlink(os.path.join(folder, path))
                files.sync_folder(folder)  # otherwise the objects could reappear after a power failure
                continue
            segment = found.segments[number] = Segment(files, folder, shape, direct=direct)
            table = segment.read_table(names[slots_name(number)], keys)
            found.num_bad += table.num_bad
            found.foreign += [SlotRef(number, slot) for slot in table.foreign]
            for record in table.records:
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


def _check_sealing(folder: str, shapes: Sequence[SegmentHeader], keys: TenantKeys | None) -> None:
    if keys is None and any(shape.is_sealed for shape in shapes):
        raise StoreError(f"the store in {folder!r} is encrypted; open it with its secret, or use another folder")
    if keys is not None and not all(shape.is_sealed for shape in shapes):
        raise StoreError(
            f"the store in {folder!r} is not encrypted; delete its segment files, use another folder, or open it "
            f"without a secret"
        )


def _read_shape(files: Files, folder: str, number: int, names: dict[str, int]) -> SegmentHeader | None:
    """Return a segment's header, or None if it is invalid, has a wrong number, or has too many slots for both files."""
    data = bytearray(SUPERBLOCK_BYTES)
    descriptor = files.open(os.path.join(folder, table_name(number)))
    try:
        count = files.read(descriptor, memoryview(data), 0)
    finally:
        files.close(descriptor)
    try:
        shape = SegmentHeader.unpack(memoryview(data)[:count])
    except VersionError as error:
        raise VersionError(f"{folder!r}: {error}; upgrade kvtier, or use another folder") from error
    except FormatError:
        return None
    table_slots = (names[table_name(number)] - SUPERBLOCK_BYTES) // RECORD_BYTES
    is_possible = shape.num_slots <= max(table_slots, names.get(slots_name(number), 0) // shape.slot_bytes)
    return shape if shape.number == number and is_possible else None


def _set_aside(files: Files, folder: str, number: int, names: dict[str, int]) -> int:
    """Move an unreadable segment to the quarantine and return the size of its files."""
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
