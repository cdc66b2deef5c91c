"""Check the inventory and the verification of stores."""

from __future__ import annotations

import contextlib
import json
import uuid

import pytest

from kvtier.storage import DiskStore, Label, MemoryStore, ObjectStatus
from kvtier.storage.audit import take_inventory, verify
from kvtier.storage.open import open_store
from kvtier.storage.record import Flags, Record
from storage_support import NAMESPACE, OTHER_NAMESPACE, Fault, FaultyStore, key_of, put, write_of


@pytest.fixture(params=["memory", "disk", "redis"])
def store(request, tmp_path):
    if request.param == "memory":
        made = MemoryStore(8 << 20)
    elif request.param == "disk":
        made = DiskStore(tmp_path, 8 << 20, segment_bytes=1 << 20, min_free_bytes=0)
    else:
        made = open_store(f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}?prefix={uuid.uuid4().hex}")
    yield made
    made.close()


def test_inventory_counts_objects_and_bytes_by_namespace(store):
    assert take_inventory(store).usages == {}
    put(store, *range(5), nbytes=1000)
    store.write([write_of(n, 3000, label=Label(OTHER_NAMESPACE)) for n in range(10, 14)])
    found = take_inventory(store)
    assert [(namespace, *usage) for namespace, usage in found.usages.items()] == [
        (OTHER_NAMESPACE, 4, 12000),
        (NAMESPACE, 5, 5000),
    ]
    assert (found.num_objects, found.nbytes, found.num_unreadable, found.reason) == (9, 17000, 0, "")


def test_verify_of_undamaged_store_reads_all_objects(store):
    put(store, *range(1200), nbytes=900)
    found = verify(store)
    assert (found.ok, found.num_sound, found.nbytes, found.defects) == (True, 1200, 1200 * 900, [])


def test_verify_reports_and_quarantines_damaged_object():
    store = MemoryStore(1 << 20)
    put(store, 1, 2, 3)
    store.objects[key_of(2)].payload[0] ^= 1
    found = verify(store)
    assert not found.ok
    assert [(key, defect.status) for key, defect in found.defects] == [(key_of(2), ObjectStatus.CORRUPT)]
    assert found.num_sound == 2
    assert verify(store).ok


def test_inventory_and_verify_report_the_error_of_the_store():
    store = FaultyStore(MemoryStore(1 << 20), [Fault(error="no route")] * 2)
    assert take_inventory(store).reason == "no route"
    found = verify(store)
    assert (found.ok, found.reason) == (False, "no route")


def test_inventory_and_verify_count_unreadable_objects(redis_port):
    import redis

    prefix = uuid.uuid4().hex
    with contextlib.closing(open_store(f"redis://127.0.0.1:{redis_port}?prefix={prefix}")) as store:
        put(store, 1)
        redis.Redis(port=redis_port).set(prefix + "0" * 64, b"garbage")
        assert (take_inventory(store).num_objects, take_inventory(store).num_unreadable) == (1, 1)
        found = verify(store)
        assert (found.ok, found.num_sound, found.num_unreadable) == (False, 1, 1)


@pytest.mark.parametrize("claimed", [1 << 40, (1 << 63) - 1])
def test_verify_reports_record_with_oversized_length(redis_port, claimed):
    """Any client of the server can write a record with an oversized length and a valid CRC."""
    import redis

    prefix = uuid.uuid4().hex
    with contextlib.closing(open_store(f"redis://127.0.0.1:{redis_port}?prefix={prefix}")) as store:
        put(store, 1)
        planted = Record(key_of(2), NAMESPACE, bytes(16), claimed, claimed, 0, 0, Flags.NONE)
        redis.Redis(port=redis_port).set(prefix + key_of(2).hex(), planted.pack() + b"short")
        found = verify(store)
        assert (found.ok, found.num_sound) == (False, 1)
        assert [(key, defect.status) for key, defect in found.defects] == [(key_of(2), ObjectStatus.CORRUPT)]
        assert str(claimed) in found.defects[0][1].reason


def test_inspect_and_verify_commands_accept_store_url(redis_port, capsys):
    import redis

    from kvtier.cli import main

    prefix = uuid.uuid4().hex
    url = f"redis://:hunter2@127.0.0.1:{redis_port}?prefix={prefix}"
    redis.Redis(port=redis_port).config_set("requirepass", "hunter2")
    raw = redis.Redis(port=redis_port, password="hunter2")
    try:
        with contextlib.closing(open_store(url)) as store:
            put(store, *range(30), nbytes=2000)
        assert main(["inspect", url, "--json"]) == 0
        inventory = json.loads(capsys.readouterr().out)
        assert (inventory["objects"], inventory["bytes"], inventory["unreadable"]) == (30, 60_000, 0)
        assert main(["inspect", url, "--objects"]) == 0
        shown = capsys.readouterr().out
        assert shown.count("2,000 bytes") == 30
        assert "hunter2" not in shown
        assert main(["verify", url]) == 0
        assert "30 objects checked, 60,000 bytes" in capsys.readouterr().out
        name = prefix + key_of(3).hex()
        raw.setrange(name, 1000, b"\x00damage")
        assert main(["verify", url, "--json"]) == 1
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert (rows[0]["key"], rows[0]["status"], rows[-1]["damaged"]) == (key_of(3).hex(), "corrupt", 1)
        assert main(["verify", url]) == 0
        assert main(["inspect", "redis://127.0.0.1:1"]) == 1
        assert "cannot open" in capsys.readouterr().err
    finally:
        raw.config_set("requirepass", "")
