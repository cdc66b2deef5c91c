"""The header of a stored object: 256 bytes, little-endian, with its own CRC.

     at  bytes  field
      0      8  magic
      8      2  format version
     10      2  flags: 1 = the payload is compressed with zlib, 2 = the object is corrupt (quarantined)
     12      4  size of the token ids, which follow the payload
     16      8  sequence number; of two records with the same key, the one with the higher number is valid
     24      4  number of the segment that contains this record
     28      4  slot in the segment
     32     32  key
     64     32  namespace fingerprint
     96     16  token digest
    112      8  size of the uncompressed object
    120      8  size of the stored payload, which may be compressed
    128      8  checksum of the stored payload and the token ids (exception: encrypted disk stores, see sealing.py)
    136      8  expiry in seconds since 1970, or 0 for no expiry
    144    108  zeros
    252      4  CRC-32 of the first 252 bytes

The record of an empty slot is 256 zeros. A disk store keeps records in the tables of its segments (disk/segment.py). A
remote store puts the record before the payload, and sets segment and slot to 0.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import NamedTuple

from kvtier.errors import FormatError, VersionError
from kvtier.storage.store import Label, StoredObject

MAGIC = b"\x89KVOBJ\r\n"  # a non-text byte, and a line end that a text-mode transfer would change
VERSION = 1
RECORD_BYTES = 256
BLANK = bytes(RECORD_BYTES)
_FIELDS = struct.Struct("<8sHHIQII32s32s16sQQQQ108x")
_CRC = struct.Struct("<I")


class Flags(IntFlag):
    NONE = 0
    ZLIB = 1
    QUARANTINED = 2


class Seal(NamedTuple):
    """Encryption of a payload on disk (disk/sealing.py). `nonce` and `tag` are empty until the payload is encrypted."""

    key_id: bytes
    nonce: bytes = b""
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class Record:
    """Metadata of a stored object."""

    key: bytes
    namespace: bytes
    token_digest: bytes
    nbytes: int
    stored_bytes: int
    checksum: int
    token_bytes: int = 0
    flags: Flags = Flags.NONE
    sequence: int = 0
    segment: int = 0
    slot: int = 0
    expires_s: int = 0
    seal: Seal | None = None
    """None if the payload is not encrypted on disk. `pack` omits the seal."""

    @property
    def label(self) -> Label:
        return Label(self.namespace, self.token_digest)

    @property
    def stored_object(self) -> StoredObject:
        return StoredObject(self.key, self.label, self.nbytes)

    @property
    def total_bytes(self) -> int:
        return self.stored_bytes + self.token_bytes

    def at(self, segment: int, slot: int, sequence: int) -> Record:
        """Return the record for the same object in another slot."""
        sizes = (self.nbytes, self.stored_bytes, self.checksum, self.token_bytes, self.flags)
        place = (sequence, segment, slot, self.expires_s, self.seal)
        return Record(self.key, self.namespace, self.token_digest, *sizes, *place)

    def is_same_object(self, other: Record) -> bool:
        """True if key, label, sizes, checksum, flags and encryption key agree. Slot, sequence and expiry may differ."""
        if self.checksum != other.checksum or (self.seal and self.seal.key_id) != (other.seal and other.seal.key_id):
            return False
        mine, theirs = (replace(record.at(0, 0, 0), expires_s=0, seal=None) for record in (self, other))
        return mine == theirs

    def pack(self) -> bytes:
        fixed = _FIELDS.pack(
            *(MAGIC, VERSION, self.flags, self.token_bytes, self.sequence, self.segment, self.slot),
            *(self.key, self.namespace, self.token_digest, self.nbytes, self.stored_bytes, self.checksum),
            self.expires_s,
        )
        return fixed + _CRC.pack(zlib.crc32(fixed))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Record:
        """Decode the 256 bytes of a record. Raise FormatError if the bytes are invalid."""
        if len(data) != RECORD_BYTES:
            raise FormatError(f"a record has {RECORD_BYTES} bytes, got {len(data)}")
        magic, version, flags, token_bytes, sequence, segment, slot, *rest = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"not a record: starts with {magic!r} instead of {MAGIC!r}")
        if zlib.crc32(data[:-4]) != _CRC.unpack_from(data, RECORD_BYTES - 4)[0]:
            raise FormatError("the record is damaged: its CRC differs")
        if version != VERSION:
            raise VersionError(f"the record has format version {version}, but this kvtier reads {VERSION}")
        key, namespace, digest, nbytes, stored_bytes, checksum, expires_s = rest
        place = (sequence, segment, slot, expires_s)
        return cls(key, namespace, digest, nbytes, stored_bytes, checksum, token_bytes, Flags(flags), *place)
