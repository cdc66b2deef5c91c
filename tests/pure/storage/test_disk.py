"""DiskStore: restarts, limits, damage, deadlines and folder locks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import stat
import subprocess
import sys
import threading

import pytest

from kvtier.errors import ArgumentError, StoreError, StoreInUseError, VersionError
from kvtier.storage import Breaker, Compression, DiskStore, Label, ObjectStatus, Read, Sync, Write
from kvtier.storage.disk.segment import SUPERBLOCK_BYTES, SegmentHeader
from kvtier.storage.record import RECORD_BYTES
from storage_support import (
    LABEL,
    NAMESPACE,
    Clock,
    SimulatedDisk,
    all_keys,
    check_disk,
    get,
    has,
    key_of,
    payload_of,
    put,
    resealed,
    write_of,
)

MAX_BYTES = 1 << 20
SMALL = {"segment_bytes": 128 << 10, "min_free_bytes": 0, "num_threads": 2}
SLOT_BYTES = 8192  # slot size for objects of 5000 bytes, which `put` writes by default
# Places of the first two records in the table of a segment.
FIRST, SECOND = (slice(at, at + RECORD_BYTES) for at in (SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + RECORD_BYTES))


@pytest.fixture
def open_store(tmp_path):
    """Return a function that closes the previous store and opens a new store in the same folder."""
    stores = []

    def open_again(max_bytes: int = MAX_BYTES, **settings) -> DiskStore:
        for store in stores:
            store.close()
        stores.append(DiskStore(tmp_path / "store", max_bytes, **{**SMALL, **settings}))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


def damage(path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


# --- restarts


@pytest.mark.parametrize("settings", [{}, {"direct": False}, {"compression": Compression.ZLIB}, {"sync": Sync.WRITE}])
def test_objects_survive_restart(open_store, settings):
    store = open_store(**settings)
    put(store, *range(20))
    put(store, 3, version=1)
    store.remove([key_of(4)])
    label = Label.of(NAMESPACE, b"tokens", keep_ids=True)
    store.write([write_of(50, 77, label=label)])
    store = open_store()
    assert has(store, *range(20)) == [n != 4 for n in range(20)]
    assert all(get(store, n)[1] == payload_of(n, version=int(n == 3)) for n in range(20) if n != 4)
    assert get(store, 50, 77, label)[1] == payload_of(50, 77)
    assert store.stats.num_objects == 20
    check_disk(store)


def test_stale_record_after_crash_is_not_served(open_store, tmp_path):
    store = open_store()
    put(store, 1)
    store.close()
    table = tmp_path / "store" / "segment-00000001.table"
    record = table.read_bytes()[FIRST]
    put(open_store(), 1, version=1)
    open_store().close()
    data = bytearray(table.read_bytes())
    assert data[FIRST] == bytes(RECORD_BYTES)
    data[FIRST] = record  # restore the erased record
    table.write_bytes(data)
    store = open_store()
    assert get(store, 1)[1] == payload_of(1, version=1)
    store.remove([key_of(1)])
    assert has(open_store(), 1) == [False]


def test_record_in_wrong_slot_is_quarantined(open_store, tmp_path):
    put(open_store(), 1)
    open_store().close()
    table = tmp_path / "store" / "segment-00000001.table"
    data = bytearray(table.read_bytes())
    data[SECOND], data[FIRST] = data[FIRST], bytes(RECORD_BYTES)
    table.write_bytes(data)
    store = open_store()
    assert get(store, 1)[0].status is ObjectStatus.MISSING
    assert store.stats.num_quarantined == 1


def test_restart_does_not_read_payloads(open_store):
    disk = SimulatedDisk()
    store = open_store(files=disk)
    put(store, *range(10), nbytes=10_000)
    store.close()
    read = []
    plain = disk.read
    disk.read = lambda descriptor, buffer, offset: (read.append(len(buffer)), plain(descriptor, buffer, offset))[1]
    store = open_store(files=disk)
    assert len(all_keys(store)) == 10
    assert sum(read) < 10 * 10_000


def test_records_of_one_batch_are_written_together(open_store):
    """A batch of 12 new objects needs 12 writes for payloads and one write for all records.

    If the batch replaces objects, one more write erases the old records.
    """
    disk = SimulatedDisk()
    store = open_store(files=disk)
    put(store, 100, nbytes=4096)  # creates the segment
    writes = []
    disk.before = lambda operation, _: writes.append(operation) if operation == "write" else None
    assert put(store, *range(12), nbytes=4096).ok
    assert len(writes) == 12 + 1
    assert put(store, *range(12), nbytes=4096, version=1).ok
    assert len(writes) == 12 + 1 + 12 + 2
    assert [get(store, number, 4096)[1] for number in range(12)] == [payload_of(n, 4096, 1) for n in range(12)]


def test_eviction_order_survives_restart(open_store):
    store = open_store(256 << 10)
    for number in range(10):
        put(store, number)
    store = open_store(256 << 10)
    for number in range(100, 140):
        put(store, number)
    kept = has(store, *range(10), *range(100, 140))
    assert kept == sorted(kept), "a newer object was evicted before an older one"
    assert kept[-1]


def test_restart_with_smaller_limit_evicts_objects(open_store):
    store = open_store()
    put(store, *range(100))
    store = open_store(300 << 10)
    assert store.stats.used_bytes <= 300 << 10
    assert 0 < store.stats.num_objects < 100
    assert has(store, 99) == [True]


# --- limits


def test_new_objects_evict_older_objects_of_other_sizes(open_store):
    store = open_store()
    put(store, *range(200), nbytes=4096)
    assert store.stats.num_evicted == 0
    for number in range(1000, 1100):
        assert put(store, number, nbytes=40_000).ok
    assert has(store, 1099, 0) == [True, False]
    assert store.stats.used_bytes <= MAX_BYTES
    large = sum(has(store, *range(1000, 1100)))
    for number in range(2000, 2300):
        assert put(store, number, nbytes=4096).ok
    assert sum(has(store, *range(1000, 1100))) < large
    check_disk(store)


def test_store_evicts_to_keep_min_free_bytes(open_store):
    disk = SimulatedDisk(capacity=2 * MAX_BYTES)
    store = open_store(4 * MAX_BYTES, files=disk, min_free_bytes=MAX_BYTES)
    for number in range(600):
        assert put(store, number).ok
    assert disk.free_bytes("") >= MAX_BYTES
    assert store.stats.num_evicted > 0
    check_disk(store)


def test_write_that_would_violate_min_free_bytes_fails(open_store):
    store = open_store(min_free_bytes=1 << 60)
    outcome = put(store, 1)[0]
    assert outcome.status is ObjectStatus.FAILED
    assert "minimum" in outcome.reason
    assert not store.contains([key_of(1)])[0].ok


def test_store_works_after_write_to_full_disk(open_store):
    disk = SimulatedDisk(capacity=200 << 10)
    store = open_store(files=disk)
    for number in range(100):
        put(store, number, nbytes=4096)
    outcome = put(store, 500, nbytes=150_000)[0]
    assert outcome.ok or outcome.status is ObjectStatus.FAILED
    assert [n for n in disk.names if n.endswith(".new")] == []
    assert put(store, 1, nbytes=4096).ok
    assert get(store, 1, 4096)[0].ok
    check_disk(store)


def test_write_beyond_file_size_limit_fails_like_full_disk(tmp_path):
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
from kvtier.storage import DiskStore
from storage_support import put, get
store = DiskStore({str(tmp_path / "store")!r}, 1 << 20, segment_bytes=128 << 10, min_free_bytes=0)
outcome = put(store, 1)[0]
assert outcome.status.value == "failed", outcome
store.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "store")) == ["LOCK"]


@pytest.mark.parametrize(
    "settings",
    [{"max_bytes": 0}, {"segment_bytes": 0}, {"num_threads": 0}, {"timeout_s": 0}, {"min_free_bytes": -1}],
)
def test_invalid_disk_store_settings_raise(tmp_path, settings):
    with pytest.raises(ArgumentError):
        DiskStore(tmp_path / "store", **{"max_bytes": MAX_BYTES, **settings})


# --- damage


def test_object_with_flipped_bit_is_quarantined_and_missing(open_store, tmp_path):
    for offset in (0, 2500, 4999):
        store = open_store()
        put(store, 1, 2)
        place = store._participant.owned.find(key_of(1))
        damage(tmp_path / "store" / "segment-00000001.kv", place.slot * SLOT_BYTES + offset)
        outcome, buffer = get(store, 1)
        assert (outcome.status, buffer) == (ObjectStatus.CORRUPT, b"\xee" * 5000)
        assert get(store, 1)[0].status is ObjectStatus.MISSING
        assert get(store, 2)[0].ok
        assert store.stats.num_quarantined == 1
        store = open_store()  # the object stays removed
        assert has(store, 1, 2) == [False, True]
        assert put(store, 1).ok
        assert get(store, 1)[1] == payload_of(1)
        check_disk(store)
        store.remove([key_of(1), key_of(2)])


def test_quarantined_slot_is_reused_last(open_store, tmp_path):
    store = open_store(128 << 10)
    put(store, 0)
    bad = store._participant.owned.find(key_of(0))
    damage(tmp_path / "store" / "segment-00000001.kv", bad.slot * SLOT_BYTES)
    assert get(store, 0)[0].status is ObjectStatus.CORRUPT
    num_slots = SegmentHeader.fitting(1, SLOT_BYTES, 128 << 10).num_slots
    put(store, *range(1, num_slots))
    assert bad.slot not in {store._participant.owned.find(key_of(n)).slot for n in range(1, num_slots)}
    assert store.stats.num_evicted == 0
    put(store, num_slots)
    assert store._participant.owned.find(key_of(num_slots)).slot == bad.slot
    check_disk(store)


@pytest.mark.parametrize("name", ["segment-00000001.kv", "segment-00000001.table"])
def test_store_with_flipped_bit_never_serves_wrong_bytes(open_store, tmp_path, name):
    rng = random.Random(name)
    store = open_store(128 << 10)
    put(store, *range(8))
    store.close()
    path = tmp_path / "store" / name
    undamaged = {each: (tmp_path / "store" / each).read_bytes() for each in sorted(os.listdir(tmp_path / "store"))}
    used = 8 * SLOT_BYTES if name.endswith("kv") else SUPERBLOCK_BYTES + 8 * RECORD_BYTES
    for _ in range(40):
        for each, data in undamaged.items():
            (tmp_path / "store" / each).write_bytes(data)
        damage(path, rng.randrange(used), rng.randrange(8))
        store = open_store(128 << 10)
        outcomes = [get(store, number) for number in range(8)]
        for number, (outcome, buffer) in enumerate(outcomes):
            assert buffer == (payload_of(number) if outcome.ok else b"\xee" * 5000)
        # A flipped bit in a slot or a record damages one object. A flipped bit in the superblock damages the whole
        # segment.
        assert sum(outcome.ok for outcome, _ in outcomes) >= 7 or name.endswith("table")
        store.close()


@pytest.mark.parametrize("name", ["segment-00000001.kv", "segment-00000001.table"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 20_000])
def test_store_with_truncated_file_keeps_remaining_objects(open_store, tmp_path, name, nbytes):
    store = open_store()
    put(store, *range(8))
    store.close()
    os.truncate(tmp_path / "store" / name, nbytes)
    store = open_store()
    for number in range(8):
        outcome, buffer = get(store, number)
        assert buffer == (payload_of(number) if outcome.ok else b"\xee" * 5000)
    assert put(store, *range(8, 30)).ok
    assert all(get(store, number)[1] == payload_of(number) for number in range(8, 30))


def test_store_quarantines_only_unreadable_segment(open_store, tmp_path):
    store = open_store()
    put(store, *range(40))
    store.close()
    folder = tmp_path / "store"
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-00000001.table").write_bytes(b"garbage" * 1000)
    before = (folder / "segment-00000001.kv").read_bytes()
    store = open_store()
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "quarantine" / "segment-00000001.kv").read_bytes() == before
    assert (folder / "quarantine" / "segment-00000001.table").read_bytes() == b"garbage" * 1000
    assert 0 < store.stats.num_objects < 40
    assert store.stats.num_quarantined == 1
    put(store, *range(200))
    assert store.stats.used_bytes <= MAX_BYTES
    assert sum(f.stat().st_size for f in folder.rglob("segment*")) == store.stats.used_bytes


def test_unfinished_segment_is_deleted(open_store, tmp_path):
    store = open_store()
    put(store, 1)
    store.close()
    for name in ("segment-00000007.kv", "segment-00000007.table.new"):
        (tmp_path / "store" / name).write_bytes(b"half")
    store = open_store()
    assert not [name for name in os.listdir(tmp_path / "store") if "00000007" in name]
    assert get(store, 1)[0].ok


def test_segment_with_missing_table_or_slots_is_deleted(open_store, tmp_path):
    """A power failure can leave only the table or only the slots of a segment."""
    store = open_store()
    put(store, *range(40))
    store.close()
    (tmp_path / "store" / "segment-00000001.kv").unlink()
    (tmp_path / "store" / "segment-00000002.table").unlink()
    store = open_store()
    assert not [name for name in os.listdir(tmp_path / "store") if "00000001" in name or "00000002" in name]
    assert not (tmp_path / "store" / "quarantine").exists()
    assert store.stats.num_quarantined == 0
    assert put(store, *range(40)).ok


def test_folder_with_newer_format_is_refused_and_unchanged(open_store, tmp_path):
    store = open_store()
    put(store, *range(40))
    store.close()
    folder = tmp_path / "store"
    table = folder / "segment-00000002.table"
    data = table.read_bytes()
    superblock = resealed(data[:SUPERBLOCK_BYTES], 8, b"\3\0")  # format version 3
    table.write_bytes(superblock + data[SUPERBLOCK_BYTES:])
    (folder / "segment-00000001.table").write_bytes(b"garbage")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(VersionError, match="upgrade kvtier"):
        open_store()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    table.write_bytes(data)
    assert open_store().stats.num_objects > 0  # the failed open has unlocked the folder


# --- folder permissions and locks


def test_store_files_are_accessible_to_owner_only(open_store, tmp_path):
    put(open_store(), 1)
    folder = tmp_path / "store"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_world_writable_folder_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        DiskStore(folder, MAX_BYTES)


def test_store_path_that_is_a_file_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open a store"):
        DiskStore(tmp_path / "file", MAX_BYTES)


_FORK = """
import os, sys, warnings
from kvtier.storage import DiskStore
warnings.simplefilter("ignore")
store = DiskStore(sys.argv[1], 1 << 20, min_free_bytes=0)
ready, signal = os.pipe()
if not os.fork():
    if sys.argv[2] == "child-closes":
        store.close()
    os.write(signal, b"1")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
if sys.argv[2] == "parent-closes":
    store.close()
if sys.argv[2] != "parent-ends":
    print("ready", flush=True)
    sys.stdin.read()
    store.close()
else:
    print("ready", flush=True)
    os._exit(0)
"""


def start_forking_process(folder, how: str) -> subprocess.Popen[str]:
    """Start a process that opens a store and then forks. The forked child stays alive."""
    command = [sys.executable, "-c", _FORK, str(folder), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["parent-closes", "parent-ends"])
def test_folder_lock_is_released_although_forked_child_lives(tmp_path, how):
    with start_forking_process(tmp_path / "store", how) as process:
        if how == "parent-ends":
            process.wait()
        DiskStore(tmp_path / "store", MAX_BYTES, **SMALL).close()
        process.stdin.close()


@pytest.mark.parametrize("how", ["nobody-closes", "child-closes"])
def test_folder_lock_is_held_while_parent_process_lives(tmp_path, how):
    with start_forking_process(tmp_path / "store", how) as process:
        store = DiskStore(tmp_path / "store", MAX_BYTES, **SMALL)
        assert store._participant.client.owner == process.pid
        assert put(store, 1).ok
        store.close()
        process.stdin.close()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["deleted", "replaced"])
def test_folder_lock_holds_if_lock_file_is_deleted_or_replaced(open_store, tmp_path, is_replaced):
    store = open_store()
    put(store, 1)
    lock = tmp_path / "store" / "LOCK"
    lock.unlink()
    if is_replaced:
        lock.write_text("")
    second = DiskStore(tmp_path / "store", MAX_BYTES, **SMALL)
    assert second._participant.owned is None
    assert put(second, *range(2, 10)).ok
    second.close()
    assert put(store, *range(10, 20)).ok
    assert all(get(store, number)[1] == payload_of(number) for number in range(1, 20))
    store = open_store()
    assert has(store, *range(1, 20)) == [True] * 19
    assert lock.read_text() == f"{os.getpid()}\n"


def test_folder_locked_by_earlier_version_is_refused(open_store, tmp_path):
    """Earlier versions lock only the file LOCK, not the folder."""
    open_store().close()
    with open(tmp_path / "store" / "LOCK", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreInUseError, match=f"process {os.getpid()}"):
            DiskStore(tmp_path / "store", MAX_BYTES)


def test_folder_lock_uses_file_if_folders_cannot_be_locked(tmp_path, monkeypatch):
    """On NFS, a lock needs a file that is open for writing, but a folder can be opened only for reading."""
    flock = fcntl.flock

    def refuse_folders(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse_folders)
    store = DiskStore(tmp_path / "store", MAX_BYTES, **SMALL)
    second = DiskStore(tmp_path / "store", MAX_BYTES, **SMALL)
    assert second._participant.owned is None
    second.close()
    store.close()
    DiskStore(tmp_path / "store", MAX_BYTES, **SMALL).close()


# --- links and folders in place of segment files


@pytest.mark.parametrize("name", ["segment-00000001.kv", "segment-00000001.table", "segment-00000001.table.new"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_segment_number_taken_by_link_or_folder_is_skipped(open_store, tmp_path, name, kind):
    folder, victim = tmp_path / "store", tmp_path / "victim"
    open_store().close()
    victim.write_text("precious")
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(victim if kind == "link" else tmp_path / "nothing")
    store = open_store()
    assert put(store, *range(30)).ok
    assert all(get(store, number)[1] == payload_of(number) for number in range(30))
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    store = open_store()
    assert has(store, *range(30)) == [True] * 30


def test_reads_succeed_if_all_segment_names_are_taken(open_store, tmp_path):
    store = open_store()
    put(store, 1)
    for number in range(2, 200):
        (tmp_path / "store" / f"segment-{number:08}.kv").symlink_to(tmp_path / "nothing")
    assert not put(store, *range(2, 60)).ok
    assert get(store, 1)[1] == payload_of(1)


def test_quarantine_folder_that_is_a_link_is_refused(open_store, tmp_path):
    open_store().close()
    (tmp_path / "outside").mkdir()
    (tmp_path / "store" / "quarantine").symlink_to(tmp_path / "outside")
    (tmp_path / "store" / "segment-00000003.table").write_bytes(b"junk")
    with pytest.raises(StoreError, match="symbolic link"):
        open_store()
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize(
    ("num_slots", "table_bytes", "slots_bytes"),
    [(2**31, 4096, 0), (2**31, 2**31 * 256 + 4096, 2**43), (2**24, 4096, 2**23), (2**24, 8192, 4096)],
    ids=["empty slots", "sparse files", "half of the slots", "short table and slots"],
)
def test_superblock_with_impossible_slot_count_is_quarantined(
    open_store, tmp_path, num_slots, table_bytes, slots_bytes
):
    store = open_store()
    put(store, 1)
    store.close()
    table, slots = (tmp_path / "store" / f"segment-00000009.{kind}" for kind in ("table", "kv"))
    table.write_bytes(SegmentHeader(9, 4096, num_slots).pack())
    slots.touch()
    os.truncate(table, table_bytes)
    os.truncate(slots, slots_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = open_store(2**60)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert get(store, 1)[1] == payload_of(1)
    assert store.stats.num_quarantined == 1
    assert (tmp_path / "store" / "quarantine" / table.name).stat().st_size == table_bytes


def test_segment_larger_than_store_is_deleted(open_store, tmp_path):
    store = open_store()
    put(store, 1)
    store.close()
    table, slots = (tmp_path / "store" / f"segment-00000009.{kind}" for kind in ("table", "kv"))
    shape = SegmentHeader(9, 4096, 2**20)
    table.write_bytes(shape.pack())
    slots.touch()
    os.truncate(table, shape.table_bytes)
    os.truncate(slots, shape.slots_bytes)
    store = open_store()
    assert get(store, 1)[1] == payload_of(1)
    assert not table.exists()
    assert not slots.exists()


# --- direct I/O


def test_store_uses_page_cache_if_open_refuses_direct_io(open_store):
    class NoDirect(SimulatedDisk):
        def open(self, path, *, create=False, direct=False):
            if direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().open(path, create=create)

    store = open_store(files=NoDirect())
    put(store, 1)
    assert get(store, 1)[0].ok
    assert not store.is_direct


def test_store_uses_page_cache_if_read_or_write_is_refused(open_store):
    class RefusesLater(SimulatedDisk):
        def _refuse(self, descriptor):
            if descriptor in self._direct:
                raise OSError(errno.EINVAL, "Invalid argument")

        def read(self, descriptor, buffer, offset):
            self._refuse(descriptor)
            return super().read(descriptor, buffer, offset)

        def write(self, descriptor, buffers, offset):
            self._refuse(descriptor)
            super().write(descriptor, buffers, offset)

    store = open_store(files=RefusesLater())
    assert put(store, 1).ok
    assert get(store, 1)[1] == payload_of(1)
    assert not store.is_direct


@pytest.mark.parametrize("nbytes", [4000, 4096, 8192])
def test_payload_in_pieces_with_token_ids_is_read_back(open_store, nbytes):
    store = open_store(files=SimulatedDisk())
    label = Label.of(NAMESPACE, b"token ids", keep_ids=True)
    content = memoryview(payload_of(1, nbytes))
    assert store.write([Write(key_of(1), label, [content[:1000], content[1000:]])]).ok
    result, payload = get(store, 1, nbytes, label)
    assert (result.status, payload) == (ObjectStatus.FOUND, content)


# --- errors, deadlines, breaker


@pytest.mark.parametrize("operation", ["write", "allocate", "rename", "sync", "sync_folder"])
def test_failed_write_frees_its_space_and_store_works(open_store, operation):
    disk = SimulatedDisk()
    store = open_store(files=disk, sync=Sync.WRITE, breaker=Breaker(max_failures=1000))
    put(store, 1)

    def fail(name, _):
        if name == operation:
            raise OSError(errno.EIO, "Input/output error")

    disk.before = fail
    assert not put(store, 2, nbytes=20_000).ok
    disk.before = lambda *_: None
    assert has(store, 1, 2) == [True, False]
    assert put(store, 2, nbytes=20_000).ok
    assert (get(store, 1)[1], get(store, 2, 20_000)[1]) == (payload_of(1), payload_of(2, 20_000))
    # If writes fail, the record of object 2 cannot be blanked, and its slot stays unused until a restart.
    if operation != "write":
        check_disk(store)
    store = open_store(files=disk)
    check_disk(store)
    assert has(store, 1, 2) == [True, True]


@pytest.mark.parametrize("at", range(20, 140, 3))
def test_failing_disk_operation_never_causes_wrong_bytes(open_store, at):
    disk = SimulatedDisk()
    store = open_store(128 << 10, files=disk, breaker=Breaker(max_failures=1000))

    def fail(_, number):
        if number == at:
            raise OSError(errno.EIO, "Input/output error")

    disk.before = fail
    for version in range(20):
        number = version % 8
        stored = put(store, number, version=version).ok
        outcome, buffer = get(store, number)
        # a successful read returns the new or the previous version of the object
        assert not outcome.ok or buffer in {payload_of(number, version=v) for v in (version, version - 8)}
        assert not (stored and outcome.ok) or buffer == payload_of(number, version=version)
    disk.before = lambda *_: None
    store = open_store(128 << 10, files=disk)
    for number in range(8):
        outcome, buffer = get(store, number)
        assert not outcome.ok or buffer in {payload_of(number, version=v) for v in range(number, 20, 8)}
    check_disk(store)


def test_hanging_disk_opens_breaker_until_disk_recovers(open_store):
    disk, gate, clock = SimulatedDisk(), threading.Event(), Clock()
    store = open_store(files=disk, breaker=Breaker(retry_s=1, clock=clock))
    put(store, 1, 2)
    disk.before = lambda name, _: gate.wait() if name == "read" else None
    buffer = bytearray(b"\xee" * 5000)
    late = store.read_into([Read(key_of(1), LABEL, buffer)], timeout_s=0.1)[0]
    assert (late.status, late.reason) == (ObjectStatus.FAILED, "not done within 0.1 s")
    for call in (lambda: get(store, 2)[0], lambda: put(store, 3)[0], lambda: store.contains([key_of(2)])[0]):
        before = disk.num_operations
        outcome = call()
        assert outcome.status is ObjectStatus.FAILED
        assert "breaker open" in outcome.reason
        assert disk.num_operations == before, "the call reached the disk"
    assert "breaker open" in store.scan().reason
    gate.set()
    while store._breaker._overdue and store._breaker._overdue[0].is_running:
        pass
    assert buffer == b"\xee" * 5000, "a late read changed the caller's buffer"
    clock.now = 1.0
    assert get(store, 1)[1] == payload_of(1)
    assert put(store, 3).ok
    assert store.stats.num_refused == 2  # `contains` and `scan` are not counted, because they need no disk
    check_disk(store)


def test_write_that_ends_after_deadline_is_not_published(open_store):
    """After the deadline, the caller may change its buffer while the store still writes the buffer to the disk."""
    disk, gate, clock = SimulatedDisk(), threading.Event(), Clock()
    store = open_store(files=disk, breaker=Breaker(retry_s=1, clock=clock))
    put(store, 1)
    disk.before = lambda name, _: gate.wait() if name == "write" else None
    memory = [bytearray(payload_of(2)), bytearray(payload_of(1, version=1))]
    writes = [Write(key_of(n), LABEL, each) for n, each in zip((2, 1), memory, strict=True)]
    # the workers wait at the gate when the deadline passes
    assert not any(outcome.ok for outcome in store.write(writes, timeout_s=0.1))
    for each in memory:
        each[:] = b"\xdd" * len(each)
    batch = store._breaker._overdue[0]
    gate.set()
    while batch.is_running:
        pass
    clock.now = 1.0
    for _ in range(2):
        assert has(store, 1, 2) == [True, False]
        assert get(store, 1)[1] == payload_of(1)
        check_disk(store)
        store = open_store(files=disk)


def test_disk_error_at_open_or_close_raises_and_unlocks_folder(open_store):
    disk = SimulatedDisk()
    store = open_store(files=disk)
    put(store, 1)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    disk.before = fail
    with pytest.raises(StoreError, match="at close"):
        store.close()
    with pytest.raises(StoreError, match="cannot open"):
        open_store(files=disk)
    disk.before = lambda *_: None
    assert get(open_store(files=disk), 1)[0].ok


def test_sync_error_that_is_reported_once_fails_close(open_store):
    """The kernel reports a lost write to one fsync only. The store syncs twice at close; the second sync succeeds."""
    disk, failed = SimulatedDisk(), []
    store = open_store(files=disk)
    put(store, 1)

    def fail_once(name, _):
        if name == "sync" and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error")

    disk.before = fail_once
    with pytest.raises(StoreError, match="Input/output error"):
        store.close()
    assert get(open_store(files=disk), 1)[0].ok  # the folder is unlocked


def test_consecutive_errors_open_breaker(open_store):
    disk, clock = SimulatedDisk(), Clock()
    store = open_store(files=disk, breaker=Breaker(retry_s=1, max_failures=2, clock=clock))
    put(store, 1)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    disk.before = fail
    assert ["breaker" in get(store, 1)[0].reason for _ in range(4)] == [False, False, True, True]
    disk.before = lambda *_: None
    clock.now = 1.0
    assert get(store, 1)[0].ok


def test_slot_is_not_overwritten_while_it_is_read(open_store):
    """While an object is read, it is replaced and removed, and other objects fill the store.

    The slot of the object must not be reused before the read ends.
    """
    disk, reading, resume = SimulatedDisk(), threading.Event(), threading.Event()
    store = open_store(200 << 10, files=disk, num_threads=4)
    put(store, 1)

    def hold(name, _):
        if name == "read" and not reading.is_set():
            reading.set()
            resume.wait()

    disk.before = hold
    found = []
    reader = threading.Thread(target=lambda: found.append(get(store, 1)))
    reader.start()
    reading.wait()
    put(store, 1, version=1)
    store.remove([key_of(1)])
    for number in range(2, 60):
        put(store, number)
    resume.set()
    reader.join()
    outcome, buffer = found[0]
    assert outcome.ok
    assert buffer == payload_of(1)
    check_disk(store)


def test_each_concurrent_removal_is_synced_before_its_report(open_store):
    """The removal of object 2 syncs the table before the record of object 1 is erased.

    Therefore the removal of object 1 must sync the table again.
    """
    disk, erasing, resume = SimulatedDisk(), threading.Event(), threading.Event()
    store = open_store(files=disk, sync=Sync.WRITE)
    put(store, 1, 2)

    def hold(name, _):
        if name == "write" and not erasing.is_set():
            erasing.set()
            resume.wait()

    disk.before = hold
    first = threading.Thread(target=store.remove, args=([key_of(1)],))
    first.start()
    erasing.wait()
    assert store.remove([key_of(2)])[0].status is ObjectStatus.REMOVED
    resume.set()
    first.join()
    disk_after_crash = disk.after_crash(lambda: False)  # keeps only synced data
    assert has(open_store(files=disk_after_crash), 1, 2) == [False, False]


@pytest.mark.parametrize("how", ["replaced", "evicted"])
def test_removal_waits_until_older_record_is_erased(open_store, how):
    """A removal must not be reported before the older record of the object is erased.

    Otherwise the object could reappear after a power failure.
    """
    disk, erasing, resume = SimulatedDisk(), threading.Event(), threading.Event()
    store = open_store(128 << 10, files=disk, sync=Sync.WRITE, num_threads=4)
    put(store, 1)
    if how == "evicted":
        put(store, *range(2, 15))  # fill the store
    assert has(store, 1) == [True]
    num_writes = 0

    def hold(name, _):
        nonlocal num_writes
        num_writes += name == "write"
        # A replacement writes the payload and the new record, and erases the old record with the third write. An
        # eviction erases the old record with the first write.
        if name == "write" and num_writes == (3 if how == "replaced" else 1):
            erasing.set()
            resume.wait()

    disk.before = hold
    change = (lambda: put(store, 1, version=1)) if how == "replaced" else (lambda: put(store, 100, 101, 102))
    writer, reported = threading.Thread(target=change), threading.Event()
    writer.start()
    erasing.wait()
    assert has(store, 1) == [how == "replaced"]

    def remove():
        store.remove([key_of(1)])
        reported.set()

    remover = threading.Thread(target=remove)
    remover.start()
    # If the removal is reported too early, simulate a power failure that keeps only synced data.
    disk_after_crash = disk.after_crash(lambda: False) if reported.wait(0.5) else None
    resume.set()
    writer.join()
    remover.join()
    if disk_after_crash is None:
        disk_after_crash = disk.after_crash(lambda: False)
    assert has(open_store(files=disk_after_crash), 1) == [False]


def test_removal_with_failed_sync_is_synced_by_next_call(open_store):
    disk = SimulatedDisk()
    store = open_store(files=disk, sync=Sync.WRITE)
    put(store, 1)

    def fail(name, _):
        if name == "sync":
            raise OSError(errno.EIO, "Input/output error")

    disk.before = fail
    assert store.remove([key_of(1)])[0].status is ObjectStatus.FAILED
    disk.before = lambda *_: None
    again = store.remove([key_of(1)])
    assert (again[0].status, again.is_durable) == (ObjectStatus.MISSING, True)
    disk_after_crash = disk.after_crash(lambda: False)
    assert has(open_store(files=disk_after_crash), 1) == [False]


def test_close_ends_all_threads(open_store):
    before = set(threading.enumerate())
    store = open_store()
    put(store, 1)
    # one more thread accepts connections of other processes
    assert len(set(threading.enumerate()) - before) == SMALL["num_threads"] + 1
    store.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("operation", ["read", "sync"])
def test_close_with_hanging_disk_keeps_folder_locked(tmp_path, operation):
    disk, gate = SimulatedDisk(), threading.Event()
    store = DiskStore(tmp_path / "store", MAX_BYTES, files=disk, timeout_s=0.001, **SMALL)
    store.write([write_of(1)], timeout_s=10)
    disk.before = lambda name, _: gate.wait() if name == operation else None
    store.read_into([Read(key_of(1), LABEL, bytearray(5000))], timeout_s=0.1)
    store.close()
    with pytest.raises(StoreInUseError):
        DiskStore(tmp_path / "store", MAX_BYTES)
    gate.set()
