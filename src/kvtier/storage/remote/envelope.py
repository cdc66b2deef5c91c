"""Format of a value on a server: record, payload, encryption.

Encryption at rest: AES-256-GCM, and names that tell nothing. Needs the extra `crypto`.

    stored    [nonce 12 | record, encrypted 256 | tag 16] [nonce 12 | payload, encrypted | tag 16]

The name of an object is a keyed digest of its block key, and is authenticated with both parts, so that an object under
another's name is noticed; the record's tag is authenticated with the payload, so that halves of two versions are, too.
Whoever reads the store sees sizes, times and that the same block came again. Nonces are random: with one key at most
2^32 objects may be written (NIST SP 800-38D), which at 1 MiB is 4 PiB.

From a block to the bytes a server keeps and back.

    plain     [record 256 | payload]
    sealed    [nonce | record | tag] [nonce | payload | tag]        crypto.py

Token ids never go to a server: its records carry their digest, which is keyed if the operator has given a secret.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import ArgumentError, FormatError, UnavailableError, VersionError
from kvtier.storage.checksum import checksums
from kvtier.storage.codec import Compression, decode, encode, mismatch
from kvtier.storage.record import RECORD_BYTES, Record
from kvtier.storage.remote.bucket import Parts
from kvtier.storage.store import Label, ObjectResult, ObjectStatus, Read, Write

SECRET_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""By how much a sealed part is longer."""


class Cipher:
    """Seals records and payloads with keys derived from one secret of 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise UnavailableError(f"encryption needs the extra: pip install 'kvtier[crypto]' ({error})") from error
        if len(secret) != SECRET_BYTES:
            raise ArgumentError(
                f"encryption needs a secret of {SECRET_BYTES} bytes, got {len(secret)}; "
                f"make one: head -c {SECRET_BYTES} /dev/urandom"
            )
        self._gcm = AESGCM(_derive(secret, b"data"))
        self._invalid = InvalidTag
        self._name_key = _derive(secret, b"names")

    def name(self, key: bytes) -> str:
        """The name of a block's object: the same for everyone with the secret, for nobody else."""
        return hashlib.blake2b(key, digest_size=32, key=self._name_key).hexdigest()

    def seal(self, data: memoryview | bytes, bound: bytes) -> bytes:
        """Encrypted, and bound to what `open` must be given, too."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._gcm.encrypt(nonce, data, bound)

    def open(self, data: memoryview | bytes, bound: bytes) -> bytes:
        """What was sealed; a FormatError if these are other bytes, or were bound to something else."""
        if len(data) < SEAL_BYTES:
            raise FormatError(f"too short for a sealed part: {len(data)} bytes")
        try:
            return self._gcm.decrypt(bytes(data[:NONCE_BYTES]), data[NONCE_BYTES:], bound)
        except self._invalid as error:
            raise FormatError("cannot be decrypted: damaged, or sealed with another secret") from error


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(purpose, digest_size=32, key=secret, person=b"kvtier seal 1").digest()


@dataclass(frozen=True, slots=True)
class Packed:
    """An object ready to be sent."""

    record: Record
    parts: Parts


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a value turned out to be. `payload` is what was asked for if the outcome is FOUND."""

    outcome: ObjectResult
    payload: memoryview | None = None
    is_useless: bool = False
    """Damaged or expired: nobody can want it any more."""


class Envelope:
    """Packs and opens values. `ttl_s` is for how long what is packed counts; None: for ever."""

    def __init__(
        self,
        cipher: Cipher | None = None,
        compression: Compression = Compression.NONE,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if ttl_s is not None and ttl_s < 1:
            raise ArgumentError(f"objects must live at least a second, got ttl_s={ttl_s}")
        self._cipher, self._compression, self._ttl_s, self._clock = cipher, compression, ttl_s, clock
        seal_bytes = SEAL_BYTES if cipher else 0
        self.head_bytes = RECORD_BYTES + seal_bytes
        """Of a value, what tells everything but the payload."""
        self.extra_bytes = RECORD_BYTES + 2 * seal_bytes
        """By how much a value is longer than its payload."""

    def name(self, key: bytes) -> str:
        """The name of a block's object."""
        return self._cipher.name(key) if self._cipher else key.hex()

    def pack_all(self, objects: Sequence[tuple[Write, memoryview]]) -> list[Packed]:
        """What to send of several: the same as one by one, in less time."""
        if self._compression is not Compression.NONE:
            return [self.pack(*each) for each in objects]
        known = checksums([payload for _, payload in objects])
        return [self.pack(*each, total) for each, total in zip(objects, known, strict=True)]

    def pack(self, write: Write, payload: memoryview, known: int | None = None) -> Packed:
        """What to send. `known`: the payload's checksum, unless it will be compressed."""
        label = Label(write.label.namespace, write.label.token_digest)
        record, stored = encode(write.key, label, payload, self._compression, known)
        if self._ttl_s is not None:
            record = replace(record, expires_s=int(self._clock() + self._ttl_s))
        if self._cipher is None:
            return Packed(record, (memoryview(record.pack()), stored))
        name = self.name(write.key).encode()
        head = self._cipher.seal(record.pack(), name)
        body = self._cipher.seal(stored, name + head[-TAG_BYTES:])
        return Packed(record, (memoryview(head), memoryview(body)))

    def read_head(self, name: str, head: bytes | memoryview) -> Record:
        """The record of a value; a FormatError says what is wrong with it, or that it belongs to another name."""
        if len(head) < self.head_bytes:
            raise FormatError(f"cut short: {len(head)} bytes where {self.head_bytes} tell what it is")
        head = head[: self.head_bytes]
        record = Record.unpack(self._cipher.open(head, name.encode()) if self._cipher else head)
        if self.name(record.key) != name:
            raise FormatError(f"it is the object {record.key.hex()[:12]} under another's name")
        return record

    def is_expired(self, record: Record) -> bool:
        """Whether its time is over."""
        return 0 < record.expires_s <= self._clock()

    def is_fresh(self, record: Record) -> bool:
        """Whether an equal object need not be sent again: more than half of its life is left."""
        if self._ttl_s is None or not record.expires_s:
            return not record.expires_s
        return record.expires_s - self._clock() > self._ttl_s / 2

    def judge(self, read: Read, wanted: int, value: memoryview | None) -> Verdict:
        """The object in a value, verified; or why it is not what the reader wants."""
        if value is None:
            return Verdict(ObjectResult(ObjectStatus.MISSING))
        name = self.name(read.key)
        try:
            record = self.read_head(name, value)
            missed = mismatch(record.label, record.nbytes, read, wanted)
            if missed is None and self.is_expired(record):
                return Verdict(ObjectResult(ObjectStatus.MISSING, reason="its time was over"), is_useless=True)
            if missed is not None:
                return Verdict(missed)
            body = value[self.head_bytes :]
            if self._cipher:
                tag = bytes(value[self.head_bytes - TAG_BYTES : self.head_bytes])
                body = memoryview(self._cipher.open(body, name.encode() + tag))
        except VersionError as error:  # somebody's newer build put it there
            return Verdict(ObjectResult(ObjectStatus.MISSING, reason=str(error)))
        except FormatError as error:
            return _damaged(str(error))
        payload, wrong = decode(record, body)
        return _damaged(wrong) if wrong else Verdict(ObjectResult(ObjectStatus.FOUND, record.nbytes), payload)


def _damaged(reason: str) -> Verdict:
    return Verdict(ObjectResult(ObjectStatus.CORRUPT, reason=reason), is_useless=True)
