"""Encryption at rest: AES-256-GCM, and names that tell nothing. Needs the extra `crypto`.

    stored    [nonce 12 | record, encrypted 256 | tag 16] [nonce 12 | payload, encrypted | tag 16]

The name of an object is a keyed digest of its block key, and is authenticated with both parts, so that an object under
another's name is noticed; the record's tag is authenticated with the payload, so that halves of two versions are, too.
Whoever reads the store sees sizes, times and that the same block came again. Nonces are random: with one key at most
2^32 objects may be written (NIST SP 800-38D), which at 1 MiB is 4 PiB.
"""

from __future__ import annotations

import hashlib
import os

from kvtier.errors import ArgumentError, ChecksumError, UnavailableError

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
        """What was sealed; a ChecksumError if these are other bytes, or were bound to something else."""
        if len(data) < SEAL_BYTES:
            raise ChecksumError(f"too short for a sealed part: {len(data)} bytes")
        try:
            return self._gcm.decrypt(bytes(data[:NONCE_BYTES]), data[NONCE_BYTES:], bound)
        except self._invalid as error:
            raise ChecksumError("cannot be decrypted: damaged, or sealed with another secret") from error


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(purpose, digest_size=32, key=secret, person=b"kvtier seal 1").digest()
