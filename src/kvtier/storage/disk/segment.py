"""Segment: slots of equal size in one preallocated file, and a table with their records in another file.

    segment-00000012.kv      each slot: payload | token ids | unused bytes
    segment-00000012.table   superblock of 4096 bytes | one record of 256 bytes per slot (record.py)

The files are separate, because a small write through the page cache locks its file against concurrent direct writes.

Superblock, little-endian:

     at  bytes  field
      0      8  magic
      8      2  format version: 1, or 2 if the records and slots are encrypted (sealing.py)
     10      2  size of a record: 256
     12      4  number of the segment
     16      8  size of a slot, a multiple of 4096
     24      8  number of slots
     32   4060  zeros
   4092      4  CRC-32 of the first 4092 bytes

The payload is written before the record, so a process that dies while it writes a payload leaves no record. Before a
slot is reused, its record is normally blanked (overwritten with zeros). The record of a corrupt payload is marked as
quarantined instead. If the disk reordered these writes before a power failure, the checksum in the record does not
match the payload.

A table gets its final name when both files are complete on disk. If only one of the two files exists, the creation or
deletion of the segment was interrupted.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvtier.errors import FormatError, VersionError
from kvtier.storage.codec import ALIGNMENT, round_up
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKeys
from kvtier.storage.disk.sealing import Unreadable, unpack_record
from kvtier.storage.record import BLANK, RECORD_BYTES, Record

MAGIC = b"\x89KVSEG\r\n"
VERSION = 2
SUPERBLOCK_BYTES = 4096
MAX_SLOTS = 1 << 24
"""Maximum number of slots in a segment: 64 GiB of the smallest slots. A damaged superblock that claims more slots is
rejected before memory is allocated for them."""
_FIELDS = struct.Struct("<8sHHIQQ4060x")
_CRC = struct.Struct("<I")
_Memory = TypeVar("_Memory")
_Result = TypeVar("_Result")
_NAME = re.compile(r"segment-(\d{8})\.(?:kv|table)(?:\.new)?")


def slots_name(number: int) -> str:
    return f"segment-{number:08}.kv"


def table_name(number: int) -> str:
    return f"segment-{number:08}.table"


def segment_number(name: str) -> int | None:
    """Return the segment number in the name of a file. Return None if the file does not belong to a segment."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The contents of a superblock."""

    number: int
    slot_bytes: int
    num_slots: int
    is_sealed: bool = False
    """True if the records and the slots are encrypted."""

    @property
    def table_bytes(self) -> int:
        return SUPERBLOCK_BYTES + round_up(self.num_slots * RECORD_BYTES)

    @property
    def slots_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        """Total bytes of the slots file and the table file."""
        return self.table_bytes + self.slots_bytes

    @classmethod
    def fitting(cls, number: int, slot_bytes: int, segment_bytes: int, *, is_sealed: bool = False) -> SegmentHeader:
        """Return the header with as many slots as fit into `segment_bytes`: at least one and at most MAX_SLOTS."""
        room = segment_bytes - SUPERBLOCK_BYTES - ALIGNMENT
        return cls(number, slot_bytes, min(MAX_SLOTS, max(1, room // (slot_bytes + RECORD_BYTES))), is_sealed)

    def pack(self) -> bytes:
        version = 2 if self.is_sealed else 1
        fixed = _FIELDS.pack(MAGIC, version, RECORD_BYTES, self.number, self.slot_bytes, self.num_slots)
        return fixed + _CRC.pack(zlib.crc32(fixed))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> SegmentHeader:
        """Decode a superblock. Raise FormatError if it is invalid, or VersionError if its version is too new."""
        if len(data) < SUPERBLOCK_BYTES:
            raise FormatError(f"a superblock has {SUPERBLOCK_BYTES} bytes, but the file has {len(data)}")
        magic, version, record_bytes, number, slot_bytes, num_slots = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"not a segment: starts with {magic!r} instead of {MAGIC!r}")
        if zlib.crc32(data[: SUPERBLOCK_BYTES - 4]) != _CRC.unpack_from(data, SUPERBLOCK_BYTES - 4)[0]:
            raise FormatError("the superblock is damaged: its CRC differs")
        if version > VERSION:
            raise VersionError(f"segment {number} has format version {version}, but this kvtier reads up to {VERSION}")
        is_sized = 0 < num_slots <= MAX_SLOTS and slot_bytes and not slot_bytes % ALIGNMENT
        if version < 1 or record_bytes != RECORD_BYTES or not is_sized:
            raise FormatError(f"segment {number} is inconsistent: {num_slots} slots of {slot_bytes} bytes")
        return cls(number, slot_bytes, num_slots, version == 2)


class TableContents(NamedTuple):
    """The records of a table."""

    records: list[Record]
    num_bad: int
    """Number of invalid records. `read_table` has blanked them."""
    foreign: list[int]
    """Slots whose records cannot be decrypted, because another secret protects their encryption keys."""


class Segment:
    """The open files of a segment. There is no lock, because each slot is accessed only by threads that hold it."""

    def __init__(self, files: Files, folder: str, shape: SegmentHeader, *, direct: bool) -> None:
        self._files, self._folder = files, folder
        self.shape = shape
        slots = os.path.join(folder, slots_name(shape.number))
        self._open: list[int] = []
        try:
            self._table = self._opened(os.path.join(folder, table_name(shape.number)))
            self._slots = self._opened(slots)
            self._direct = self._opened_direct(slots) if direct else None
        except OSError:
            self.close()
            raise

    def _opened(self, path: str, *, direct: bool = False) -> int:
        descriptor = self._files.open(path, direct=direct)
        self._open.append(descriptor)
        return descriptor

    def _opened_direct(self, path: str) -> int | None:
        try:
            return self._opened(path, direct=True)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return None  # the filesystem has no direct I/O

    @classmethod
    def create(cls, files: Files, folder: str, shape: SegmentHeader, *, direct: bool) -> Segment:
        """Create the files of a segment, then give the table its final name. If either step fails, delete the files."""
        slots, table = (os.path.join(folder, name(shape.number)) for name in (slots_name, table_name))
        made = []
        try:
            for path, nbytes, content in (
                (slots, shape.slots_bytes, b""),
                # The whole table is written now, so that later syncs of the table need not allocate extents.
                (table + ".new", shape.table_bytes, shape.pack().ljust(shape.table_bytes, b"\0")),
            ):
                descriptor = files.open(path, create=True)
                made.append(path)
                try:
                    files.allocate(descriptor, nbytes)
                    files.write(descriptor, [content], 0)
                    files.sync(descriptor)
                finally:
                    files.close(descriptor)
            files.sync_folder(folder)
            files.rename(table + ".new", table)
        except OSError:
            for path in made:
                files.unlink(path)
            raise
        files.sync_folder(folder)
        return cls(files, folder, shape, direct=direct)

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def close(self) -> None:
        while self._open:
            self._files.close(self._open.pop())

    def unlink(self) -> None:
        self.close()
        for name in (table_name, slots_name):  # table first, because recovery deletes slots without a table
            self._files.unlink(os.path.join(self._folder, name(self.shape.number)))

    def is_locked(self, slot: int, count: int = 1) -> bool:
        """True if a client is writing to one of these slots, and has therefore locked it."""
        size = self.shape.slot_bytes
        return self._files.is_locked(self._slots, slot * size, count * size)

    def sync_slots(self) -> None:
        self._files.sync(self._slots)

    def sync_table(self) -> None:
        self._files.sync(self._table)

    def read_table(self, slots_bytes: int, keys: TenantKeys | None = None) -> TableContents:
        """Read all records. Blank invalid records, and records whose encryption keys were deleted.

        `slots_bytes` is the length of the slots file. If the file was truncated, it is extended to its full length.
        """
        shape = self.shape
        table = bytearray(shape.num_slots * RECORD_BYTES)
        self._files.read(self._table, memoryview(table), SUPERBLOCK_BYTES)
        records: list[Record] = []
        num_bad, foreign = 0, []
        for slot in range(shape.num_slots):
            data = bytes(table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
            if data == BLANK:
                continue
            record = self._checked(data, slot, keys)
            if isinstance(record, Record) and slot * shape.slot_bytes + record.total_bytes <= slots_bytes:
                records.append(record)
            elif record is Unreadable.FOREIGN:
                foreign.append(slot)
            else:
                num_bad += record is not Unreadable.DELETED
                self.write_records(slot, BLANK)
        if slots_bytes < shape.slots_bytes:
            self._files.allocate(self._slots, shape.slots_bytes)
        return TableContents(records, num_bad, foreign)

    def _checked(self, data: bytes, slot: int, keys: TenantKeys | None) -> Record | Unreadable | None:
        try:
            record = unpack_record(data, keys)
        except FormatError:
            return None
        if isinstance(record, Unreadable):
            return record
        here = (record.segment, record.slot) == (self.shape.number, slot)
        return record if here and record.total_bytes <= self.shape.slot_bytes else None

    def write_records(self, slot: int, data: bytes) -> None:
        """Write the records or blanks of this slot and the following slots into the table.

        No record crosses a page. If the process is killed, each record is therefore written completely or not at all.
        """
        self._files.write(self._table, [data], SUPERBLOCK_BYTES + slot * RECORD_BYTES)

    def write_slot(self, slot: int, buffers: Sequence[memoryview]) -> None:
        """Write a slot. For direct I/O, addresses and lengths must be multiples of ALIGNMENT."""
        self._transfer(self._files.write, slot, buffers)

    def read_slot(self, slot: int, buffer: memoryview) -> int:
        """Read a slot into a buffer, aligned as for `write_slot`. Return the number of bytes (see `Files.read`)."""
        return self._transfer(self._files.read, slot, buffer)

    def _transfer(self, operation: Callable[[int, _Memory, int], _Result], slot: int, memory: _Memory) -> _Result:
        offset = slot * self.shape.slot_bytes
        if self._direct is not None:
            try:
                return operation(self._direct, memory, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None  # some filesystems open files with O_DIRECT but then refuse direct I/O
        return operation(self._slots, memory, offset)
