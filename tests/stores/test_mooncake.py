"""What only Mooncake has: memory of others, which goes with them; a master, without which there is nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import uuid

import pytest

from kvtier.storage import Breaker, Read, Status, Write
from kvtier.storage.open import open_store
from kvtier.storage.remote import RemoteStore, Retry
from storage_support import LABEL, Clock, get, has, key_of, payload_of, put
from store_servers import NotInstalled, mooncake_master


def test_a_url_opens_it_and_without_the_masters_port_there_is_no_inventory(mooncake):
    with contextlib.closing(open_store(f"mooncake://127.0.0.1:{mooncake.port}?prefix={uuid.uuid4().hex}")) as store:
        assert put(store, 1).ok
        assert get(store, 1)[1] == payload_of(1)
        assert "admin=" in store.scan().reason


def test_a_batch_from_and_to_registered_memory(mooncake):
    from kvtier.storage.mooncake import MooncakeBucket, MooncakeConfig

    bucket = MooncakeBucket(MooncakeConfig(f"127.0.0.1:{mooncake.port}", prefix=uuid.uuid4().hex), timeout_s=20)
    host = memoryview(mmap.mmap(-1, 16 << 20))
    bucket.register(host)
    bucket.register(host)
    with contextlib.closing(RemoteStore(bucket, "mooncake", timeout_s=20)) as store:
        slots = [host[at : at + (1 << 20)] for at in range(0, len(host), 1 << 20)]
        for number, slot in enumerate(slots):
            slot[:] = payload_of(number, 1 << 20)
        assert store.write([Write(key_of(n), LABEL, slot) for n, slot in enumerate(slots)]).ok
        for slot in slots:
            slot[:] = bytes(1 << 20)
        assert store.read_into([Read(key_of(n), LABEL, slot) for n, slot in enumerate(slots)]).ok
        assert all(slot == payload_of(n, 1 << 20) for n, slot in enumerate(slots))


def test_a_full_pool_is_an_outcome(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(mooncake_master(tmp_path, segment_bytes=16 << 20))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        store = stack.enter_context(contextlib.closing(open_store(f"mooncake://127.0.0.1:{place.port}?timeout=20s")))
        outcomes = [put(store, number, nbytes=3 << 20)[0] for number in range(12)]
        assert {outcome.status for outcome in outcomes} <= {Status.STORED, Status.FAILED}
        for number, outcome in enumerate(outcomes):
            assert outcome.ok or "no room" in outcome.reason
            found, room = get(store, number, 3 << 20)
            assert room == (payload_of(number, 3 << 20) if found.ok else b"\xee" * (3 << 20))


def test_a_master_that_hangs_costs_one_deadline_and_its_death_nothing_but_objects(tmp_path):
    from kvtier.storage.mooncake import MooncakeBucket, MooncakeConfig

    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(mooncake_master(tmp_path))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        bucket = MooncakeBucket(MooncakeConfig(f"127.0.0.1:{place.port}"), timeout_s=2)
        clock = Clock()
        store = RemoteStore(bucket, "mooncake", timeout_s=2, retry=Retry(0), breaker=Breaker(clock=clock))
        stack.callback(store.close)
        assert put(
            store,
            1,
        ).ok
        os.kill(place.pid, signal.SIGSTOP)
        outcome, room = get(store, 1)
        assert (outcome.status, room) == (Status.FAILED, b"\xee" * 5000)
        assert "breaker open" in store.contains([key_of(1)])[0].reason
        os.kill(place.pid, signal.SIGKILL)
        clock.now = 1000.0
        assert not any(has(store, 1, 2))
        outcome, room = get(store, 1)
        assert (outcome.ok, room) == (False, b"\xee" * 5000)
