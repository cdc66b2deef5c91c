"""TenantKeys: the folder with the keys of an encrypted disk store, one file per tenant.

    secret of the operator (32 bytes, not in this folder)
        |-- determines the name of each file: a keyed digest of the tenant's name
        '-- encrypts --> key of the tenant (32 random bytes) -- encrypts --> records and payloads (sealing.py)

    at  bytes  field of a key file
     0      8  magic
     8      2  format version
    10      6  zeros
    16     16  random key id; each sealed record contains the id of its key
    32     12  nonce
    44 32 + n  encrypted: key of the tenant (32 bytes) and name of the tenant (n bytes)
     -     16  tag, which also authenticates the first 32 bytes

Deleting a file makes all data of the tenant unreadable at once, even for a running store. The next write of the tenant
creates a new key with a new id. A file is complete when it gets its name, and it never changes. Several processes can
therefore use one folder.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.errors import FormatError, StoreError
from kvtier.storage.cipher import SECRET_BYTES, Cipher, check_secret, derive
from kvtier.storage.disk.files import FOLDER_MODE, Files

MAGIC = b"\x89KVKEY\r\n"
VERSION = 1
KEY_ID_BYTES = 16
SUFFIX = ".key"
_HEAD = struct.Struct("<8sH6x16s")
_MAX_FILE_BYTES = 1 << 16  # more than any key file has; the rest of a longer file is not read


@dataclass(frozen=True, slots=True)
class TenantKey:
    """The key of one tenant, from one file."""

    id: bytes
    tenant: bytes
    cipher: Cipher
    path: str
    stamp: tuple[int, int] | None
    """Identifies the version of the file, so that a deleted or replaced file is detected."""


class TenantKeys:
    """Keys by tenant and by id. Creates keys on demand. Thread-safe."""

    def __init__(self, folder: str, secret: bytes, files: Files | None = None) -> None:
        self._folder, self._files = folder, files or Files()
        check_secret(secret)
        self._wrapping = Cipher(derive(secret, b"tenant keys"))
        self._lock = threading.Lock()
        self._by_id: dict[bytes, TenantKey] = {}
        self._by_tenant: dict[bytes, TenantKey] = {}
        self._stamp: tuple[int, int] | None = None
        """Stamp of the folder when the keys were last read."""
        self.foreign_ids: frozenset[bytes] = frozenset()
        """Ids of the keys in the folder that this secret cannot decrypt."""
        try:
            if os.path.exists(folder) and (mode := os.stat(folder).st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
                raise StoreError(
                    f"the folder of keys {folder!r} is open to other users (mode {stat.S_IMODE(mode):o}); "
                    f"run chmod 700 on it"
                )
            self._load()
        except OSError as error:
            raise StoreError(f"cannot read the keys in {folder!r}: {error}") from error

    @property
    def tenants(self) -> list[bytes]:
        """Names of the tenants whose keys this secret can decrypt."""
        with self._lock:
            return sorted(self._by_tenant)

    def key_for(self, tenant: bytes) -> TenantKey:
        """Return the key for new objects of a tenant. If there is none, create a key and flush it to the disk."""
        with self._lock:
            key = self._by_tenant.get(tenant)
            if key is None or not self._is_current(key):
                key = self._find_or_create(tenant)
            return key

    def find(self, key_id: bytes) -> TenantKey | None:
        """Return the key with this id, or None if its file was deleted or was encrypted with another secret."""
        with self._lock:
            if key_id not in self._by_id and self._files.stamp(self._folder) != self._stamp:
                self._load()
            key = self._by_id.get(key_id)
            return key if key is not None and self._is_current(key) else None

    def reload(self) -> None:
        """Read keys that other processes have created."""
        with self._lock:
            self._load()

    def delete(self, tenant: bytes) -> bool:
        """Delete a tenant's key, so that the tenant's data become unreadable. Return False if the tenant has no key."""
        with self._lock:
            path = self._path(tenant)
            if self._files.stamp(path) is None:
                return False
            self._files.unlink(path)
            self._files.sync_folder(self._folder)
            self._forget(self._by_tenant.get(tenant))
            return True

    # --- called with the lock held

    def _load(self) -> None:
        foreign: set[bytes] = set()
        self._stamp = self._files.stamp(self._folder)
        for name in self._names():
            if name.endswith(SUFFIX):
                path = os.path.join(self._folder, name)
                try:
                    self._remember(self._read(path))
                except (FormatError, FileNotFoundError):
                    foreign.update(self._id_of(path))
        self.foreign_ids = frozenset(foreign)

    def _names(self) -> list[str]:
        try:
            return [*self._files.list(self._folder)]
        except FileNotFoundError:
            return []  # the folder is created with the first key

    def _is_current(self, key: TenantKey) -> bool:
        """True if the file of a key was not deleted or replaced. Otherwise the key is removed from memory."""
        if self._files.stamp(key.path) == key.stamp:
            return True
        self._forget(key)
        return False

    def _remember(self, key: TenantKey) -> TenantKey:
        self._by_id[key.id] = self._by_tenant[key.tenant] = key
        return key

    def _forget(self, key: TenantKey | None) -> None:
        if key is not None:
            self._by_id.pop(key.id, None)
            if self._by_tenant.get(key.tenant) is key:
                del self._by_tenant[key.tenant]

    def _path(self, tenant: bytes) -> str:
        return os.path.join(self._folder, self._wrapping.name(tenant) + SUFFIX)

    def _find_or_create(self, tenant: bytes) -> TenantKey:
        path = self._path(tenant)
        for _ in range(2):
            try:
                if self._files.stamp(path) is not None:
                    return self._remember(self._read(path))
            except FileNotFoundError:  # deleted by another process since `stamp`
                pass
            except FormatError:  # the file is damaged; the file of another secret would have another name
                self._files.unlink(path)
            self._create(path, tenant)
        return self._remember(self._read(path))

    def _create(self, path: str, tenant: bytes) -> None:
        head = _HEAD.pack(MAGIC, VERSION, secrets.token_bytes(KEY_ID_BYTES))
        data = head + self._wrapping.seal(secrets.token_bytes(SECRET_BYTES) + tenant, head)
        os.makedirs(self._folder, FOLDER_MODE, exist_ok=True)
        temporary = os.path.join(self._folder, f"{secrets.token_hex(8)}.new")
        descriptor = self._files.open(temporary, create=True)
        try:
            self._files.write(descriptor, [data], 0)
            self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)
        try:
            self._files.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            self._files.unlink(temporary)
        self._files.sync_folder(self._folder)  # if a power failure lost the key, its objects would be lost too

    def _read(self, path: str) -> TenantKey:
        """Read a key file. Raise FormatError if it is damaged or was encrypted with another secret."""
        stamp, data = self._files.stamp(path), self._content(path)
        _, key_id = _parse(data)
        opened = self._wrapping.open(data[_HEAD.size :], data[: _HEAD.size])
        secret, tenant = opened[:SECRET_BYTES], opened[SECRET_BYTES:]
        return TenantKey(key_id, tenant, Cipher(secret), path, stamp)

    def _id_of(self, path: str) -> Iterator[bytes]:
        try:
            yield _parse(self._content(path))[1]
        except (FormatError, FileNotFoundError):  # FileNotFoundError: another process has deleted the file
            return

    def _content(self, path: str) -> bytes:
        room = bytearray(_MAX_FILE_BYTES)
        descriptor = self._files.open(path)
        try:
            return bytes(room[: self._files.read(descriptor, memoryview(room), 0)])
        finally:
            self._files.close(descriptor)


def _parse(data: bytes) -> tuple[int, bytes]:
    """Return version and key id of a key file."""
    if len(data) < _HEAD.size:
        raise FormatError(f"a key file has at least {_HEAD.size} bytes, got {len(data)}")
    magic, version, key_id = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise FormatError(f"not a key file of version {VERSION}")
    return version, key_id
