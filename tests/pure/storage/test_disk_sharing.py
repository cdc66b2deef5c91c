"""Several processes, or several stores of one process, share one folder.

The first store owns the folder. The other stores are its clients, and get slots from the owner through a socket.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvtier.errors import StoreError
from kvtier.storage import DiskStore, ObjectStatus, Read, Sync
from kvtier.storage.disk import client as client_module
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.space import SlotAllocator
from storage_sharing import Crowd, kill_crowd
from storage_support import LABEL, all_keys, check_disk, get, has, key_of, payload_of, put, write_of
from support import stop_process

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
NUM_KILLS = 30 if SOAK == 1 else 200
MAX_BYTES = 1 << 20
SMALL = {"segment_bytes": 128 << 10, "min_free_bytes": 0, "num_threads": 2}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def stores(folder):
    """Yield the owner of a folder and two clients."""
    opened = [DiskStore(folder, MAX_BYTES, **SMALL) for _ in range(3)]
    yield opened
    owner = next(store for store in opened if store._participant.owned is not None and not store._meter.is_closed)
    for store in opened:
        if store is not owner:
            store.close()
    check_disk(owner)
    owner.close()


@pytest.mark.parametrize("workload", ["roomy", "full", "encrypted"])
def test_killed_processes_lose_no_object_and_block_no_process(folder, workload):
    crowd = Crowd(folder, workload)
    try:
        kill_crowd(crowd, NUM_KILLS, random.Random(workload))
    finally:
        crowd.close()
    print(f"{workload}: {crowd.figures}")  # noqa: T201
    assert not crowd.wrong, crowd.wrong[:5]
    assert crowd.num_owners_killed > NUM_KILLS // 4
    damage = crowd.inspect()
    assert {**damage, "found": 0} == {"found": 0, "lost": 0, "corrupt": 0, "bytes": 0}
    assert damage["found"]


def test_object_of_one_store_is_found_by_all_stores(stores):
    for number, store in enumerate(stores):
        assert put(store, number).ok
        assert [has(each, *range(number + 1)) for each in stores] == [[True] * (number + 1)] * 3
        assert [get(each, number)[1] for each in stores] == [payload_of(number)] * 3
    assert stores[2].remove([key_of(0)])[0].status is ObjectStatus.REMOVED
    assert [has(each, 0) for each in stores] == [[False]] * 3
    assert [sorted(all_keys(each)) for each in stores] == [sorted([key_of(1), key_of(2)])] * 3
    assert stores[0].stats.num_objects == stores[1].stats.num_objects == 2


def test_replaced_object_is_read_by_all_stores(stores):
    for version, store in enumerate(stores):
        assert put(store, 1, version=version).ok
        assert [get(each, 1)[1] for each in stores] == [payload_of(1, version=version)] * 3


def test_closed_owner_is_replaced_at_next_call(stores):
    put(stores[1], 1)
    stores[0].close()
    assert get(stores[1], 1)[1] == payload_of(1)
    assert stores[1]._participant.owned is not None
    assert put(stores[2], 2).ok
    assert stores[2]._participant.owned is None
    assert has(stores[1], 1, 2) == [True, True]


def test_folder_uses_smallest_limit_of_all_stores(folder):
    larger = DiskStore(folder, 4 << 20, **SMALL)
    assert put(larger, *range(100), nbytes=20_000).ok
    small = DiskStore(folder, MAX_BYTES, **SMALL)
    assert larger.stats.used_bytes <= MAX_BYTES == small.stats.max_bytes
    assert all(put(larger, number, nbytes=20_000).ok for number in range(100, 200))
    assert larger.stats.used_bytes <= MAX_BYTES
    small.close()
    larger.close()


def test_corrupt_object_read_by_client_is_quarantined(stores, folder):
    put(stores[0], 1)
    place = stores[0]._participant.owned.find(key_of(1))
    with open(folder / f"segment-{place.segment:08}.kv", "r+b") as slots:
        slots.seek(place.slot * 8192)
        slots.write(b"damage")
    assert get(stores[1], 1)[0].status is ObjectStatus.CORRUPT
    assert [get(each, 1)[0].status for each in stores] == [ObjectStatus.MISSING] * 3
    assert stores[0].stats.num_quarantined == 1


def test_segment_deleted_by_hand_fails_reads_of_client(stores, folder):
    """The owner can still read the deleted file, because it has the file open. The client must fail without retries."""
    put(stores[0], 1)
    for path in folder.glob("segment-*.kv"):
        path.unlink()
    assert get(stores[0], 1)[0].ok
    result, _ = get(stores[1], 1)
    assert (result.status, "No such file" in result.reason) == (ObjectStatus.FAILED, True)


def test_client_fails_with_reason_after_deletion_of_socket(folder):
    """Without the socket, the client cannot connect to the owner, which still runs and keeps the folder locked.

    The write of the client must fail instead of retrying until its deadline.
    """
    owner = DiskStore(folder, MAX_BYTES, **SMALL)
    client = DiskStore(folder, MAX_BYTES, timeout_s=0.5, **SMALL)
    (folder / "SOCKET").unlink()
    assert "cannot connect" in client.write([write_of(1)], timeout_s=10.0)[0].reason
    assert put(owner, 2).ok
    owner.close()
    while not has(client, 2)[0]:  # the breaker is open for a second
        time.sleep(0.05)
    client.close()


def test_owner_of_deleted_folder_does_not_change_new_folder(folder):
    """The segments and the socket have the same names in the new folder as in the deleted folder."""
    old = DiskStore(folder, MAX_BYTES, **SMALL)
    client = DiskStore(folder, MAX_BYTES, **SMALL)
    put(old, 1)
    shutil.rmtree(folder)
    assert put(client, *range(10, 40)).ok
    assert client._participant.owned is not None
    assert get(old, 1)[1] == payload_of(1)
    failed = [result for number in range(100, 400) for result in put(old, number).outcomes if not result.ok]
    assert "was deleted or replaced" in failed[0].reason
    old.close()
    other = DiskStore(folder, MAX_BYTES, **SMALL)
    assert other._participant.owned is None
    other.close()
    client.close()
    reopened = DiskStore(folder, MAX_BYTES, **SMALL)
    assert [get(reopened, number)[1] for number in range(10, 40)] == [payload_of(n) for n in range(10, 40)]
    check_disk(reopened)
    reopened.close()


def test_owner_without_descriptors_accepts_later_clients(folder, monkeypatch):
    failures = [errno.EMFILE, errno.ENFILE]

    class ShortSocket(socket.socket):
        def accept(self):
            if failures:
                raise OSError(failures.pop(), "too many open files")
            return super().accept()

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", ShortSocket)
        owner = DiskStore(folder, MAX_BYTES, **SMALL)
    client = DiskStore(folder, MAX_BYTES, **SMALL)
    assert not failures
    assert put(client, 1).ok
    client.close()
    owner.close()


@pytest.mark.parametrize("failing", ["second connection", "first request"])
@pytest.mark.usefixtures("stores")
def test_client_that_fails_to_connect_closes_connections(folder, monkeypatch, failing):
    opened = []

    def fail(*_):
        raise OSError(errno.EMFILE, "too many open files")

    class Connection(client_module._Connection):
        def __init__(self, *arguments):
            if opened and failing == "second connection":
                fail()
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(client_module, "_Connection", Connection)
    if failing == "first request":
        monkeypatch.setattr(SlotAllocator, "limit", fail)
    with pytest.raises(OSError, match="too many open files"):
        client_module.SlotClient(str(folder), Files(), None, max_bytes=1 << 20, direct=False, timeout_s=10.0)
    assert opened
    assert [each._socket.fileno() for each in opened] == [-1] * len(opened)


def test_calls_wait_for_closing_owner_until_their_deadline(folder):
    owner = DiskStore(folder, MAX_BYTES, **SMALL)
    client = DiskStore(folder, MAX_BYTES, **SMALL)
    put(client, 1)
    owner._participant.leave(1.0)  # the owner no longer serves clients, but keeps the lock, as during `close`
    assert client.contains([key_of(1)], timeout_s=0.2)[0].status is ObjectStatus.FAILED
    owner.close()
    while not has(client, 1)[0]:  # the breaker is open for a second
        time.sleep(0.05)
    assert get(client, 1)[1] == payload_of(1)
    client.close()


@pytest.mark.usefixtures("stores")
def test_client_with_other_secret_setting_is_refused(folder):
    with pytest.raises(StoreError, match="without a secret"):
        DiskStore(folder, MAX_BYTES, secret=bytes(32), **SMALL)


def test_encrypted_folder_is_shared_with_keys_of_new_tenants(folder):
    first, second = (DiskStore(folder, MAX_BYTES, secret=bytes(32), **SMALL) for _ in range(2))
    assert put(second, 1).ok
    assert put(first, 2).ok
    assert [get(each, n)[1] for each in (first, second) for n in (1, 2)] == [payload_of(1), payload_of(2)] * 2
    first.close()
    assert [get(second, n)[1] for n in (1, 2)] == [payload_of(1), payload_of(2)]
    second.close()


_HOLD = """
import os, sys
from kvtier.storage import DiskStore
from storage_support import put
store = DiskStore(sys.argv[1], 1 << 20, min_free_bytes=0, num_threads=2, segment_bytes=128 << 10)
assert put(store, *range(100, 110)).ok
print("ready", flush=True)
sys.stdin.read()
"""


def start_process(folder) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_stopped_owner_fails_calls_at_their_deadline(folder):
    with start_process(folder) as owner:
        store = DiskStore(folder, MAX_BYTES, **SMALL)
        try:
            stop_process(owner.pid)
            begin = time.monotonic()
            results = store.read_into([Read(key_of(100), LABEL, bytearray(5000))], timeout_s=0.3)
            assert results[0].status is ObjectStatus.FAILED
            assert store.contains([key_of(100)], timeout_s=0.3)[0].status is ObjectStatus.FAILED
            assert time.monotonic() - begin < 5
        finally:
            owner.kill()  # at the end of the `with` statement, Popen would wait forever for a stopped process
        owner.wait()
        while not has(store, 100)[0]:  # the breaker is open for a second
            time.sleep(0.05)
        assert get(store, 100)[1] == payload_of(100)
        store.close()


def test_slots_held_by_killed_client_are_released(folder):
    store = DiskStore(folder, MAX_BYTES, **SMALL)
    with start_process(folder) as client:
        client.kill()
        client.wait()
    assert has(store, *range(100, 110)) == [True] * 10
    for number in range(200):
        assert put(store, number).ok
    store.close()
    reopened = DiskStore(folder, MAX_BYTES, **SMALL)
    check_disk(reopened)
    reopened.close()


class SlowFiles:
    """File operations whose writes block until `gate` is set."""

    def __init__(self) -> None:
        self._files, self.gate, self.is_waiting = Files(), threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._files, name)

    def write(self, descriptor, buffers, offset):
        self.is_waiting.set()
        self.gate.wait()
        self._files.write(descriptor, buffers, offset)


def test_slot_of_lost_client_is_not_reused_while_it_writes(folder):
    """A client loses its connection while it writes to a slot. Until the write ends, the slot must not be reused."""
    owner = DiskStore(folder, 256 << 10, **SMALL)
    files = SlowFiles()
    client = DiskStore(folder, 256 << 10, files=files, **SMALL)
    late = threading.Thread(target=lambda: client.write([write_of(1)], timeout_s=0.2))
    late.start()
    files.is_waiting.wait()
    client._participant.client.close()
    late.join()
    slots = owner._participant.owned
    numbers = range(2, 62)  # twice the number of slots
    assert all(put(owner, number).ok for number in numbers)
    assert len(slots._late) == 1
    before = {number: get(owner, number)[1] for number in numbers if has(owner, number)[0]}
    owner.close()
    taken_over = DiskStore(folder, 256 << 10, **SMALL)
    assert len(taken_over._participant.owned._late) == 1
    files.gate.set()
    client.close()
    for number, payload in before.items():
        assert get(taken_over, number)[1] == payload == payload_of(number)
    assert all(put(taken_over, number).ok for number in range(2000, 2060))
    check_disk(taken_over)
    taken_over.close()


def test_object_overwritten_by_late_client_is_missing(folder):
    """The only slot holds an object encrypted with another secret. A client of a killed owner overwrites the slot."""
    first = DiskStore(folder, 128 << 10, secret=bytes(32), **SMALL)
    assert put(first, 1, nbytes=70_000).ok
    first.close()
    settings = {"secret": b"1" * 32, **SMALL}
    owner, files = DiskStore(folder, 128 << 10, **settings), SlowFiles()
    client = DiskStore(folder, 128 << 10, files=files, **settings)
    owner._keys.key_for(b"")  # creates the key, so that the slot is the first thing that the client writes
    table = next(folder.glob("*.table"))
    content = table.read_bytes()
    late = threading.Thread(target=lambda: client.write([write_of(2, 70_000)], timeout_s=0.2))
    late.start()
    files.is_waiting.wait()
    client._participant.client.close()
    late.join()
    owner.close()
    table.write_bytes(content)  # restores the record, because a killed owner does not erase it
    taken_over = DiskStore(folder, 128 << 10, **settings)
    assert len(taken_over._participant.owned._late) == 1
    files.gate.set()
    client.close()
    check_disk(taken_over)
    taken_over.close()
    first = DiskStore(folder, 128 << 10, secret=bytes(32), **SMALL)
    assert get(first, 1, nbytes=70_000)[0].status is ObjectStatus.MISSING
    check_disk(first)
    first.close()


@pytest.mark.parametrize("secret", [None, bytes(32)])
@pytest.mark.parametrize("sync", [*Sync])
def test_client_sync_setting_applies_to_its_own_writes(folder, sync, secret):
    owner = DiskStore(folder, MAX_BYTES, sync=Sync.CLOSE, secret=secret, **SMALL)
    client = DiskStore(folder, MAX_BYTES, sync=sync, secret=secret, **SMALL)
    put(owner, 1)
    assert owner._participant.owned._unsynced
    assert put(client, 1).is_durable == (sync is Sync.WRITE)
    assert bool(owner._participant.owned._unsynced) == (sync is Sync.CLOSE)
    client.close()
    owner.close()
