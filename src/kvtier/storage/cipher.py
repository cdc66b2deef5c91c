"""Authenticated encryption of stored objects: AES-256-GCM, which needs the extra `crypto`.

Nonces are random, so one key is safe for 2^32 encryptions (NIST SP 800-38D). Each record or payload is one encryption.
"""

from __future__ import annotations

import hashlib
import os

from kvtier.errors import ArgumentError, FormatError, UnavailableError

SECRET_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""Bytes that `Cipher.seal` adds to its input: a nonce and a tag."""


class Cipher:
    """Seals records and payloads with a key derived from a secret of 32 bytes. Derives names with a second key."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise UnavailableError(f"encryption needs the extra: pip install 'kvtier[crypto]' ({error})") from error
        check_secret(secret)
        self._gcm = AESGCM(derive(secret, b"data"))
        self._invalid = InvalidTag
        self._name_key = derive(secret, b"names")

    def name(self, key: bytes) -> str:
        """Return a name derived from `key`: a digest that depends on the secret."""
        return hashlib.blake2b(key, digest_size=32, key=self._name_key).hexdigest()

    def seal(self, data: memoryview | bytes, bound: bytes) -> bytes:
        """Encrypt `data` and authenticate it together with `bound`. Pass the same `bound` to `open`."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._gcm.encrypt(nonce, data, bound)

    def open(self, data: memoryview | bytes, bound: bytes) -> bytes:
        """Decrypt `data`. Raise FormatError if it was changed, or was sealed with another `bound` or another secret."""
        if len(data) < SEAL_BYTES:
            raise FormatError(f"too short for a sealed part: {len(data)} bytes")
        try:
            return self._gcm.decrypt(bytes(data[:NONCE_BYTES]), data[NONCE_BYTES:], bound)
        except self._invalid as error:
            raise FormatError("cannot be decrypted: damaged, or sealed with another secret") from error

    def seal_into(self, target: memoryview, data: memoryview | bytes, bound: bytes) -> bytes:
        """Encrypt `data` into `target`, followed by the tag (TAG_BYTES bytes). Return the nonce."""
        nonce = os.urandom(NONCE_BYTES)
        self._gcm.encrypt_into(nonce, data, bound, target)
        return nonce

    def open_into(self, target: memoryview, nonce: bytes, data: memoryview, bound: bytes) -> None:
        """Decrypt `data` into `target`. `data` ends with the tag, so `target` has TAG_BYTES fewer bytes than `data`.

        Raise FormatError as in `open`. The target may then contain unverified bytes.
        """
        try:
            self._gcm.decrypt_into(nonce, data, bound, target)
        except self._invalid as error:
            raise FormatError("cannot be decrypted: damaged, or sealed with another secret") from error


def check_secret(secret: bytes) -> None:
    if len(secret) != SECRET_BYTES:
        raise ArgumentError(
            f"encryption needs a secret of {SECRET_BYTES} bytes, got {len(secret)}; "
            f"create one: head -c {SECRET_BYTES} /dev/urandom"
        )


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose."""
    return hashlib.blake2b(purpose, digest_size=32, key=secret, person=b"kvtier seal 1").digest()
