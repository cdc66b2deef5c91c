"""Format of a value on a server: record, payload, and optional encryption at rest (AES-256-GCM, extra `crypto`).

    plain     [record 256 | payload]        (numbers are sizes in bytes)
    sealed    [nonce 12 | record, encrypted 256 | tag 16] [nonce 12 | payload, encrypted | tag 16]

With encryption, the name of an object is a keyed digest of its block key. Both tags also authenticate the name, so that
an object under a wrong name is detected. The tag of the payload also authenticates the tag of the record, so that a mix
of two versions of an object is detected. Somebody who can read the server sees only names, sizes and times. Blocks with
equal keys have equal names.

Token ids are not sent to servers. A record contains only a digest of the token ids. This digest is keyed with
CacheConfig.secret, if this secret is set. The secret that encrypts values is a separate setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier.errors import ArgumentError, FormatError, VersionError
from kvtier.storage.checksum import checksums
from kvtier.storage.cipher import SEAL_BYTES, TAG_BYTES, Cipher
from kvtier.storage.codec import Compression, decode, encode, mismatch
from kvtier.storage.record import RECORD_BYTES, Record
from kvtier.storage.remote.bucket import Parts
from kvtier.storage.store import MISSING, Label, ObjectResult, ObjectStatus, Read, Write

EXPIRED = ObjectResult(ObjectStatus.MISSING, reason="expired")
Packed = tuple[Record, Parts]
"""The record of an object, and the parts of the value to send."""


class Envelope:
    """Packs and opens values. `ttl_s` is the lifetime of packed values in seconds, or None if they do not expire."""

    def __init__(
        self,
        cipher: Cipher | None = None,
        compression: Compression = Compression.NONE,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if ttl_s is not None and ttl_s < 1:
            raise ArgumentError(f"ttl_s must be at least 1 second, got {ttl_s}")
        self._cipher, self._compression, self._ttl_s, self._clock = cipher, compression, ttl_s, clock
        seal_bytes = SEAL_BYTES if cipher else 0
        self.head_bytes = RECORD_BYTES + seal_bytes
        """Size of the record in a value."""
        self.extra_bytes = RECORD_BYTES + 2 * seal_bytes
        """Size of a value without the payload."""

    def name(self, key: bytes) -> str:
        return self._cipher.name(key) if self._cipher else key.hex()

    def pack_all(self, objects: Sequence[tuple[Write, memoryview]]) -> list[Packed]:
        """Pack several objects. This is faster than separate calls to `pack`."""
        if self._compression is not Compression.NONE:
            return [self.pack(write, payload) for write, payload in objects]
        known = checksums([payload for _, payload in objects])
        return [self.pack(write, payload, total) for (write, payload), total in zip(objects, known, strict=True)]

    def pack(self, write: Write, payload: memoryview, known: int | None = None) -> Packed:
        """Pack an object. `known` is the payload's checksum, which must not be passed with compression."""
        label = Label(write.label.namespace, write.label.token_digest)
        record, stored = encode(write.key, label, payload, self._compression, known)
        if self._ttl_s is not None:
            record = replace(record, expires_s=int(self._clock() + self._ttl_s))
        if self._cipher is None:
            return record, (memoryview(record.pack()), stored)
        name = self.name(write.key).encode()
        head = self._cipher.seal(record.pack(), name)
        body = self._cipher.seal(stored, name + head[-TAG_BYTES:])
        return record, (memoryview(head), memoryview(body))

    def read_head(self, name: str, head: bytes | memoryview) -> Record:
        """Return the record of a value. Raise FormatError if the record is invalid or belongs to another name."""
        if len(head) < self.head_bytes:
            raise FormatError(f"truncated: {len(head)} bytes, but the record needs {self.head_bytes}")
        head = head[: self.head_bytes]
        record = Record.unpack(self._cipher.open(head, name.encode()) if self._cipher else head)
        if self.name(record.key) != name:
            raise FormatError(f"the value of object {record.key.hex()[:12]} is stored under another name")
        return record

    def is_expired(self, record: Record) -> bool:
        return 0 < record.expires_s <= self._clock()

    def is_fresh(self, record: Record) -> bool:
        """True if the stored `record` need not be sent again to extend its lifetime.

        A record that never expires is fresh. With `ttl_s`, a record is also fresh if more than half of `ttl_s` is left.
        """
        if self._ttl_s is None or not record.expires_s:
            return not record.expires_s
        return record.expires_s - self._clock() > self._ttl_s / 2

    def open(self, read: Read, wanted: int, value: memoryview | None) -> tuple[ObjectResult, memoryview | None]:
        """Verify a value. Return the result, and the payload if the value is the expected object."""
        if value is None:
            return MISSING, None
        name = self.name(read.key)
        try:
            record = self.read_head(name, value)
            missed = mismatch(record.label, record.nbytes, read, wanted) or (self.is_expired(record) and EXPIRED)
            if missed:
                return missed, None
            body = value[self.head_bytes :]
            if self._cipher:
                tag = bytes(value[self.head_bytes - TAG_BYTES : self.head_bytes])
                body = memoryview(self._cipher.open(body, name.encode() + tag))
        except VersionError as error:  # written by a newer version
            return ObjectResult(ObjectStatus.MISSING, reason=str(error)), None
        except FormatError as error:
            return ObjectResult(ObjectStatus.CORRUPT, reason=str(error)), None
        payload, wrong = decode(record, body)
        if wrong:
            return ObjectResult(ObjectStatus.CORRUPT, reason=wrong), None
        return ObjectResult(ObjectStatus.FOUND, record.nbytes), payload
