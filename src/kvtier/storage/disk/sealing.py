"""Encryption of objects in a disk store. Records and payloads are encrypted with the key of their tenant (keys.py).

"Sealed" means encrypted and authenticated. A sealed record has 256 bytes like a plain one, but format version 2. All
records in a segment of version 2 are sealed.

     at  bytes  field
      0     32  as in a plain record: magic, version, flags, size of the token ids, sequence, segment, slot
     32     16  key id
     48     12  nonce of this record
     60    140  encrypted: bytes 32 to 143 of the plain record, then nonce (12) and tag (16) of the payload
    200     16  tag of this record, which also authenticates bytes 0 to 47
    216     36  zeros
    252      4  CRC-32 of the first 252 bytes

The slot contains payload and token ids, encrypted together. Encryption does not change their size, because the tag is
in the record. With a tag after the payload, an object that exactly fills a slot would need a larger slot.

The tag of the payload protects all its bytes. The checksum of an encrypted object covers only the first 4096 bytes of
the payload. It is used only to compare objects: if the checksums differ, the payloads need not be compared. A reader of
the disk without keys sees slot sizes, write times and bytes 0 to 47 of each record.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from enum import Enum

from kvtier.errors import FormatError
from kvtier.storage.cipher import NONCE_BYTES, SEAL_BYTES, TAG_BYTES
from kvtier.storage.codec import Scratch, round_up
from kvtier.storage.disk.keys import KEY_ID_BYTES, TenantKey, TenantKeys
from kvtier.storage.record import BLANK, MAGIC, RECORD_BYTES, Record, Seal

VERSION = 2
_CLEAR_BYTES = 32
_HEAD_BYTES = _CLEAR_BYTES + KEY_ID_BYTES
_PLAIN_STOP = 144
"""End of the fields of a plain record. Zeros and the CRC follow."""
_SEALED_STOP = _HEAD_BYTES + SEAL_BYTES + _PLAIN_STOP - _CLEAR_BYTES + SEAL_BYTES
_VERSION = struct.Struct("<H")
_CRC = struct.Struct("<I")


class Unreadable(Enum):
    """Reason why a record cannot be decrypted although it is intact."""

    DELETED = "the key was deleted"
    FOREIGN = "the key was encrypted with another secret"


def seal_payload(
    key: TenantKey, record: Record, stored: memoryview, token_ids: bytes, scratch: Scratch
) -> tuple[Record, list[memoryview]]:
    """Encrypt an object in scratch memory. Return the record with the seal, and the buffer to write to the slot."""
    total = record.total_bytes
    page = scratch.take(round_up(total + TAG_BYTES))
    data = b"".join((stored, token_ids)) if token_ids else stored
    nonce = key.cipher.seal_into(page[: total + TAG_BYTES], data, record.key)
    seal = Seal(key.id, nonce, bytes(page[total : total + TAG_BYTES]))
    written = round_up(total)
    page[total:written] = bytes(written - total)
    return replace(record, seal=seal), [page[:written]]


def open_payload(key: TenantKey, record: Record, room: memoryview, num_read: int) -> memoryview:
    """Decrypt the bytes of a slot. Return the decrypted bytes, which are a part of `room`.

    `room` must have `room_bytes(record)` bytes, and the first `num_read` of them are the bytes of the slot. Raise
    FormatError if these bytes are too few or were changed on the disk.
    """
    total, seal = record.total_bytes, record.seal
    assert seal is not None
    if num_read < total:
        raise FormatError(f"truncated: {num_read} of {total} bytes")
    room[total : total + TAG_BYTES] = seal.tag
    opened = room[-round_up(total + 1) :][:total]  # total + 1, because room[-0:] would be the whole room
    key.cipher.open_into(opened, seal.nonce, room[: total + TAG_BYTES], record.key)
    return opened


def room_bytes(record: Record) -> int:
    """Return the size of the memory that `open_payload` needs for the encrypted and the decrypted bytes."""
    return round_up(record.total_bytes + TAG_BYTES) + round_up(record.total_bytes + 1)


def pack_record(record: Record, keys: TenantKeys | None) -> bytes:
    """Return a record's bytes for the table of a segment: zeros if the record is sealed and its key was deleted."""
    if record.seal is None:
        return record.pack()
    key = None if keys is None else keys.find(record.seal.key_id)
    return BLANK if key is None else seal_record(record, key)


def seal_record(record: Record, key: TenantKey) -> bytes:
    plain, seal = record.pack(), record.seal
    assert seal is not None
    head = plain[:8] + _VERSION.pack(VERSION) + plain[10:_CLEAR_BYTES] + key.id
    inner = plain[_CLEAR_BYTES:_PLAIN_STOP] + seal.nonce + seal.tag
    fixed = (head + key.cipher.seal(inner, head)).ljust(RECORD_BYTES - _CRC.size, b"\0")
    return fixed + _CRC.pack(zlib.crc32(fixed))


def unpack_record(data: bytes, keys: TenantKeys | None) -> Record | Unreadable:
    """Decode the 256 bytes of a record. With `keys`, the record must be sealed. Raise FormatError for invalid data."""
    if keys is None:
        return Record.unpack(data)
    if len(data) != RECORD_BYTES or data[:8] != MAGIC or data[8:10] != _VERSION.pack(VERSION):
        raise FormatError("not a sealed record")
    if zlib.crc32(data[: -_CRC.size]) != _CRC.unpack(data[-_CRC.size :])[0]:
        raise FormatError("the sealed record is damaged: its CRC differs")
    head = data[:_HEAD_BYTES]
    key_id = head[_CLEAR_BYTES:]
    key = keys.find(key_id)
    if key is None:
        return Unreadable.FOREIGN if key_id in keys.foreign_ids else Unreadable.DELETED
    inner = key.cipher.open(data[_HEAD_BYTES:_SEALED_STOP], head)
    fields, seal = inner[:-SEAL_BYTES], inner[-SEAL_BYTES:]
    fixed = (head[:8] + _VERSION.pack(1) + head[10:_CLEAR_BYTES] + fields).ljust(RECORD_BYTES - _CRC.size, b"\0")
    record = Record.unpack(fixed + _CRC.pack(zlib.crc32(fixed)))
    return replace(record, seal=Seal(key_id, seal[:NONCE_BYTES], seal[NONCE_BYTES:]))
