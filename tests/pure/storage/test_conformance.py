"""Memory and disk stores fulfil the store contract and stay within their size limits."""

from __future__ import annotations

import hashlib
import os

import pytest

from kvtier.storage import Compression, DiskStore, MemoryStore, ObjectStatus, Store, Sync, Write
from storage_support import LABEL, FaultyStore, SimulatedDisk, check_disk, get, has, key_of, put

pytest.register_assert_rewrite("store_contract")
from store_contract import *  # noqa: E402, F403

MAX_BYTES = 1 << 20
SMALL = {"segment_bytes": 128 << 10, "min_free_bytes": 0, "num_threads": 3}


def client_of(owner: DiskStore, folder) -> DiskStore:
    """Return a second store in the folder of `owner`. The second store is a client, and `owner` assigns its slots."""
    client = DiskStore(folder, MAX_BYTES, **SMALL)
    client.owner = owner
    return client


STORES = {
    "memory": lambda _: MemoryStore(MAX_BYTES),
    "faulty store without faults": lambda _: FaultyStore(MemoryStore(MAX_BYTES)),
    "disk, direct": lambda folder: DiskStore(folder, MAX_BYTES, direct=True, **SMALL),
    "disk, page cache": lambda folder: DiskStore(folder, MAX_BYTES, direct=False, **SMALL),
    "disk, synced": lambda folder: DiskStore(folder, MAX_BYTES, sync=Sync.WRITE, **SMALL),
    "disk, compressed": lambda folder: DiskStore(folder, MAX_BYTES, compression=Compression.ZLIB, **SMALL),
    "disk, encrypted": lambda folder: DiskStore(folder, MAX_BYTES, secret=bytes(32), **SMALL),
    "disk, encrypted, page cache": lambda folder: DiskStore(
        folder, MAX_BYTES, secret=bytes(32), direct=False, compression=Compression.ZLIB, **SMALL
    ),
    "disk, client": lambda folder: client_of(DiskStore(folder, MAX_BYTES, **SMALL), folder),
    "disk, simulated": lambda folder: DiskStore(folder, MAX_BYTES, files=SimulatedDisk(), **SMALL),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    created: Store = STORES[request.param](tmp_path / "store")
    yield created
    if hasattr(created, "owner"):
        created.close()
        created = created.owner
    if isinstance(created, DiskStore) and not created._meter.is_closed:
        check_disk(created)
    created.close()


def test_store_keeps_one_copy_of_rewritten_object(store):
    put(store, 1)
    before = store.stats.used_bytes
    assert put(store, 1).ok
    assert (store.stats.used_bytes, store.stats.num_objects) == (before, 1)


def test_full_store_evicts_least_recently_used_objects(store):
    count = MAX_BYTES // 8192
    for number in range(2 * count):
        assert put(store, number, nbytes=8192).ok
        assert get(store, 0, 8192)[0].ok, "the most recently used object was evicted"
    stats = store.stats
    assert stats.used_bytes <= MAX_BYTES == stats.max_bytes
    assert stats.num_evicted == 2 * count - stats.num_objects > 0
    kept = has(store, *range(1, 2 * count))
    assert kept == sorted(kept), "a newer object was evicted before an older one"


def test_write_larger_than_store_fails_and_evicts_nothing(store):
    put(store, 1)
    outcome = store.write([Write(key_of(2), LABEL, os.urandom(2 * MAX_BYTES))])[0]
    assert outcome.status is ObjectStatus.FAILED
    assert outcome.reason
    assert has(store, 1, 2) == [True, False]


def test_store_and_index_have_keys_of_equal_size():
    from kvtier.index.chain import Namespace
    from kvtier.messages import KEY_BYTES
    from kvtier.storage import store as interface

    assert (KEY_BYTES, len(Namespace("m").fingerprint)) == (interface.KEY_BYTES, interface.NAMESPACE_BYTES)
    assert hashlib.sha256().digest_size == KEY_BYTES
