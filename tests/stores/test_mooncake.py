"""Check the features of Mooncake stores: registered memory, memory in other processes, and the master."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import uuid

import pytest

from kvtier.errors import ClosedError, StoreError
from kvtier.storage import Breaker, ObjectStatus, Read, UsesMemory, Write
from kvtier.storage.checksum import address_of
from kvtier.storage.codec import Scratch
from kvtier.storage.open import open_store
from kvtier.storage.remote.store import RemoteStore
from storage_support import LABEL, Clock, get, has, key_of, payload_of, put
from store_servers import NotInstalled, mooncake_master
from support import stop_process


def test_mooncake_scan_without_admin_port_fails(mooncake):
    with contextlib.closing(open_store(f"mooncake://127.0.0.1:{mooncake.port}?prefix={uuid.uuid4().hex}")) as store:
        assert put(store, 1).ok
        assert get(store, 1)[1] == payload_of(1)
        assert "admin=" in store.scan().reason


@pytest.fixture
def bucket(mooncake):
    from kvtier.storage.remote.mooncake import MooncakeBucket

    return MooncakeBucket(f"127.0.0.1:{mooncake.port}", prefix=uuid.uuid4().hex, timeout_s=20)


def simulate_rdma(bucket):
    """Make the bucket register and copy memory as for RDMA. The client still sends over TCP."""
    bucket._is_tcp = False


@pytest.mark.parametrize("is_rdma", [False, True], ids=["tcp", "simulated rdma"])
def test_mooncake_write_from_registered_memory_is_read_back(bucket, is_rdma):
    if is_rdma:
        simulate_rdma(bucket)
    host = memoryview(mmap.mmap(-1, 16 << 20))
    with contextlib.closing(RemoteStore(bucket, "mooncake", timeout_s=20)) as store:
        assert isinstance(store, UsesMemory)
        slots = [host[at : at + (1 << 20)] for at in range(0, len(host), 1 << 20)]
        for version, change in enumerate((store.register, store.unregister, store.register)):
            change(host)
            change(host)  # the second call changes nothing
            assert bucket._is_registered(slots[3]) is (is_rdma and version != 1)
            for number, slot in enumerate(slots):
                slot[:] = payload_of(number, 1 << 20, version)
            assert store.write([Write(key_of(n), LABEL, slot) for n, slot in enumerate(slots)]).ok
            for slot in slots:
                slot[:] = bytes(1 << 20)
            assert store.read_into([Read(key_of(n), LABEL, slot) for n, slot in enumerate(slots)]).ok
            assert all(slot == payload_of(n, 1 << 20, version) for n, slot in enumerate(slots))
    store.unregister(host)
    with pytest.raises(ClosedError):
        store.register(host)


def test_mooncake_rdma_copies_only_unregistered_memory(bucket):
    host, other, scratch = memoryview(mmap.mmap(-1, 1 << 20)), memoryview(payload_of(1)), Scratch()
    values = [[other, host[:5000]], [host[5000:9000], memoryview(b""), host[-1:]]]

    def places() -> list[list[str]]:
        """Return the memory that holds each piece: "host", "original" for `other`, "start of scratch" or "scratch"."""
        pieces = bucket._pieces(values, scratch)
        assert [b"".join(each) for each in pieces] == [b"".join(parts) for parts in values]
        names = {address_of(scratch.take(1)): "start of scratch", address_of(other): "original"}
        where = [[address_of(part) for part in parts] for parts in pieces]
        return [
            ["host" if 0 <= at - address_of(host) < len(host) else names.get(at, "scratch") for at in each]
            for each in where
        ]

    with contextlib.closing(bucket):
        bucket.register(host)
        assert places() == [["original", "host"], ["host", "host"]], "TCP needs no copies"
        simulate_rdma(bucket)
        assert places() == [["start of scratch", "scratch"], ["scratch", "scratch"]]
        bucket.register(host)
        assert places() == [["start of scratch", "host"], ["host", "host"]]
        bucket.unregister(host)
        assert places() == [["start of scratch", "scratch"], ["scratch", "scratch"]]


def test_mooncake_write_works_after_failed_registration(bucket):
    simulate_rdma(bucket)
    host = memoryview(mmap.mmap(-1, 4 << 20))
    with contextlib.closing(RemoteStore(bucket, "mooncake", timeout_s=20)) as store:
        store.register(host[1 << 20 : 2 << 20])
        with pytest.raises(StoreError, match="registering 4194304 bytes failed"):
            store.register(host)  # `host` overlaps the memory that is already registered
        store.unregister(host)
        bucket._client.unregister_buffer(address_of(host[1 << 20 :]))
        with pytest.raises(StoreError, match="unregistering 1048576 bytes failed"):
            store.unregister(host[1 << 20 :])
        host[:5000] = payload_of(1)
        assert store.write([Write(key_of(1), LABEL, host[:5000])]).ok
        assert get(store, 1)[1] == payload_of(1)


def test_mooncake_full_pool_never_returns_wrong_bytes(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(mooncake_master(tmp_path, segment_bytes=16 << 20))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        store = stack.enter_context(contextlib.closing(open_store(f"mooncake://127.0.0.1:{place.port}?timeout=20s")))
        outcomes = [put(store, number, nbytes=3 << 20)[0] for number in range(12)]
        assert {outcome.status for outcome in outcomes} <= {ObjectStatus.STORED, ObjectStatus.FAILED}
        for number, outcome in enumerate(outcomes):
            assert outcome.ok or "is full" in outcome.reason
            found, target = get(store, number, 3 << 20)
            assert target == (payload_of(number, 3 << 20) if found.ok else b"\xee" * (3 << 20))


def test_mooncake_call_to_hanging_master_ends_at_deadline(tmp_path):
    from kvtier.storage.remote.mooncake import MooncakeBucket

    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(mooncake_master(tmp_path))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        bucket = MooncakeBucket(f"127.0.0.1:{place.port}", timeout_s=2)
        clock = Clock()
        store = RemoteStore(bucket, "mooncake", timeout_s=2, num_retries=0, breaker=Breaker(clock=clock))
        stack.callback(store.close)
        assert put(store, 1).ok
        stop_process(place.pid)
        outcome, target = get(store, 1)
        assert (outcome.status, target) == (ObjectStatus.FAILED, b"\xee" * 5000)
        assert "breaker open" in store.contains([key_of(1)])[0].reason
        os.kill(place.pid, signal.SIGKILL)
        clock.now = 1000.0
        assert not any(has(store, 1, 2))
        outcome, target = get(store, 1)
        assert (outcome.ok, target) == (False, b"\xee" * 5000)
