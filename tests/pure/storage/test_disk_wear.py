"""The number of bytes that a disk store has written, and the limit of written bytes per day."""

from __future__ import annotations

import json

import pytest

from kvtier.errors import ArgumentError
from kvtier.storage import Cascade, DiskStore, ObjectStatus
from kvtier.storage.open import open_store
from storage_support import Clock, get, payload_of, put

HOUR = 3600.0
OBJECT = 8192 + 256  # an object of 5000 bytes has two pages and a record
SMALL = {"segment_bytes": 128 << 10, "min_free_bytes": 0, "num_threads": 2}


def limited(folder, clock: Clock, num_objects: int) -> DiskStore:
    return DiskStore(folder, 1 << 20, bytes_per_day=num_objects * OBJECT, clock=clock, **SMALL)


def test_written_bytes_count_pages_and_records(tmp_path):
    store = DiskStore(tmp_path / "store", 1 << 20, **SMALL)
    put(store, 1, 2)
    put(store, 2)  # already stored
    store.remove([])
    stats = Cascade([store], [True]).stats
    assert (stats.written_bytes, stats.day_bytes, stats.max_day_bytes) == (2 * OBJECT, 2 * OBJECT, 0)
    store.close()
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "LOCK",
        "segment-00000001.kv",
        "segment-00000001.table",
    ]


def test_writes_beyond_bytes_per_day_fail_and_evict_nothing(tmp_path):
    clock = Clock()
    store = limited(tmp_path / "store", clock, 3)
    assert put(store, 1, 2, 3).ok
    for _ in range(5):
        result = put(store, 4)[0]
        assert result.status is ObjectStatus.FAILED
        assert f"{3 * OBJECT} of {3 * OBJECT} bytes written in 24 hours" in result.reason
    assert put(store, 2)[0].reason == "already stored"
    assert [get(store, n)[1] == payload_of(n) for n in (1, 2, 3)] == [True] * 3
    assert store.stats.num_refused == 0  # the breaker is closed
    clock.now += 24 * HOUR  # the limit applies to the current hour and the 24 hours before it
    assert not put(store, 4).ok
    clock.now += HOUR
    assert put(store, 4).ok
    assert (store.stats.day_bytes, store.stats.written_bytes) == (OBJECT, 4 * OBJECT)
    store.close()


def test_limit_per_day_holds_in_every_window_of_24_hours(tmp_path):
    clock, written = Clock(), []
    store = limited(tmp_path / "store", clock, 5)
    for number in range(400):
        clock.now += 0.37 * HOUR
        if put(store, number).ok:
            written.append(clock.now)
    store.close()
    assert len(written) > 20
    assert all(sum(start <= at < start + 24 * HOUR for at in written) <= 5 for start in written)


def test_limit_per_day_survives_restart_and_kill(tmp_path):
    clock = Clock()
    store = limited(tmp_path / "store", clock, 4)
    assert put(store, 1, 2).ok
    store.close()
    store = limited(tmp_path / "store", clock, 4)
    assert store.stats.day_bytes == 2 * OBJECT
    assert put(store, 3, 4).ok
    saved = json.loads((tmp_path / "store" / "WRITTEN").read_text())  # `close` has not run yet, as after a kill
    assert sum(saved["hours"].values()) >= 4 * OBJECT * 99 // 100  # at most 1 % of the limit is not saved yet
    store.close()
    store = limited(tmp_path / "store", clock, 4)
    assert not put(store, 5).ok
    store.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"hours": 5}', b'{"hours": {"x": 1}}', b"\xff", b"{"])
def test_unreadable_count_of_written_bytes_is_read_as_zero(tmp_path, content):
    (tmp_path / "WRITTEN").write_bytes(content)
    tmp_path.chmod(0o700)
    store = limited(tmp_path, Clock(), 4)
    assert store.stats.day_bytes == 0
    assert put(store, 1).ok
    store.close()


def test_bytes_per_day_of_url_is_divided_among_shards(tmp_path):
    url = f"disk:{tmp_path}/kv?bytes=8MiB&free=0&segment=128KiB&bytes_per_day={4 * OBJECT}"
    store = open_store(url, shard=1, num_shards=2)
    assert store.stats.max_day_bytes == 2 * OBJECT
    assert put(store, 1, 2).ok
    assert not put(store, 3).ok
    store.close()
    with pytest.raises(ArgumentError, match="bytes_per_day=-1"):
        DiskStore(tmp_path / "store", 1 << 20, bytes_per_day=-1)
