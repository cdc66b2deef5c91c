"""The encrypted disk store: contents of its files, wrong and deleted keys, damage, and the folder of keys."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.errors import ArgumentError, StoreError
from kvtier.storage import DiskStore, Label, ObjectStatus, Write
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKeys
from kvtier.storage.disk.segment import SegmentHeader
from kvtier.storage.open import open_shards, open_store
from storage_support import LABEL, NAMESPACE, all_keys, check_disk, get, has, key_of, payload_of, put, write_of

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
SMALL = {"segment_bytes": 128 << 10, "min_free_bytes": 0, "num_threads": 2}
SHOP, BANK = b"shop", b"bank"


def tenant_write(number: int, tenant: bytes, version: int = 0) -> Write:
    return replace(write_of(number, version=version), tenant=tenant)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def reopen(folder):
    """Return a function that closes the previous store and opens the folder again."""
    stores: list[DiskStore] = []

    def again(secret: bytes | None = SECRET, **settings) -> DiskStore:
        for store in stores:
            store.close()
        stores.append(DiskStore(folder, 1 << 20, secret=secret, **{**SMALL, **settings}))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


def key_files(folder: Path) -> list[Path]:
    return sorted((folder / "keys").iterdir())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_encrypted_files_reveal_no_key_no_tenant_no_payload(reopen, folder):
    label = Label.of(NAMESPACE, b"these are the tokens", keep_ids=True)
    store = reopen()
    store.write([Write(key_of(1), label, payload_of(1), SHOP), Write(key_of(2), LABEL, bytes(9000), SHOP)])
    store.close()
    files = [path for path in folder.rglob("*") if path.is_file()]
    everything = b"".join(path.read_bytes() + path.name.encode() for path in files)
    for hidden in (key_of(1), NAMESPACE, label.token_digest, label.token_ids, payload_of(1)[:32], SHOP, SECRET):
        assert hidden not in everything
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
    assert (folder / "keys").stat().st_mode & 0o077 == 0


def test_encrypted_objects_survive_restart(reopen):
    label = Label.of(NAMESPACE, b"tokens", keep_ids=True)
    store = reopen()
    put(store, *range(20))
    put(store, 3, version=1)
    store.write([write_of(50, 77, label=label)])
    store.remove([key_of(4)])
    store = reopen()
    assert has(store, *range(20)) == [n != 4 for n in range(20)]
    assert all(get(store, n)[1] == payload_of(n, version=int(n == 3)) for n in range(20) if n != 4)
    assert get(store, 50, 77, label)[1] == payload_of(50, 77)
    assert put(store, 5)[0].reason == "already stored"
    check_disk(store)


def test_equal_encrypted_object_is_not_written_again(reopen):
    label = Label.of(NAMESPACE, b"tokens", keep_ids=True)
    store = reopen()
    for _ in range(2):
        store.write([tenant_write(1, SHOP), write_of(2, 0), write_of(3, label=label)])
    assert store.stats.writes.nbytes == 10_000  # objects 1 and 3, once each; object 2 is empty
    before = store.stats.written_bytes
    assert store.write([tenant_write(1, SHOP, version=1)])[0].reason == ""
    assert store.write([write_of(3, label=Label(NAMESPACE, label.token_digest, b"others"))])[0].reason == ""
    assert store.stats.written_bytes > before
    assert get(store, 1)[1] == payload_of(1, version=1)
    changed = payload_of(1, version=1)[:-1] + b"!"  # only the last byte differs
    assert store.write([Write(key_of(1), LABEL, changed, SHOP)])[0].reason == ""
    assert get(store, 1)[1] == changed


def test_rewrite_replaces_damaged_encrypted_object(reopen, folder):
    put(reopen(), 1)
    reopen().close()
    flip(next(folder.glob("*.kv")), 100)
    store = reopen()
    assert put(store, 1)[0].reason == ""
    assert get(store, 1)[1] == payload_of(1)


def test_encrypted_slot_is_not_larger_than_plain_slot(reopen, folder, tmp_path):
    put(reopen(), 1, nbytes=64 << 10)
    with_secret = next(folder.glob("*.kv"))
    plain = DiskStore(tmp_path / "plain", 1 << 20, **SMALL)
    put(plain, 1, nbytes=64 << 10)
    plain.close()
    assert with_secret.stat().st_size == next((tmp_path / "plain").glob("*.kv")).stat().st_size


def test_objects_are_missing_only_with_wrong_secret(reopen, folder):
    put(reopen(), 1, 2)
    store = reopen(OTHER_SECRET)
    assert [get(store, n)[0].status for n in (1, 2)] == [ObjectStatus.MISSING] * 2
    assert put(store, 3).ok
    assert (store.stats.num_quarantined, all_keys(store)) == (0, [key_of(3)])
    check_disk(store)
    store = reopen()
    assert sorted(all_keys(store)) == sorted([key_of(1), key_of(2)])
    assert get(store, 1)[1] == payload_of(1)
    assert len(key_files(folder)) == 2


def test_slots_of_another_secret_are_reused_when_space_is_short(reopen):
    put(reopen(), *range(200))
    store = reopen(OTHER_SECRET)
    assert put(store, *range(500, 600)).ok
    assert all(get(store, n)[1] == payload_of(n) for n in range(500, 600))
    check_disk(store)
    store = reopen()  # some slots now contain objects of the other secret
    for number in range(200):
        result, target = get(store, number)
        assert result.status is ObjectStatus.MISSING or target == payload_of(number)
    assert store.stats.num_quarantined == 0


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "closed"])
def test_deleted_key_makes_objects_of_that_tenant_missing(reopen, folder, is_running):
    store = reopen()
    store.write([tenant_write(1, SHOP), tenant_write(2, BANK), tenant_write(3, SHOP)])
    keys = TenantKeys(str(folder / "keys"), SECRET)
    assert keys.tenants == [BANK, SHOP]
    assert keys.delete(SHOP)
    assert not keys.delete(SHOP)
    store = store if is_running else reopen()
    for number in (1, 3):
        result, target = get(store, number)
        assert result.status is ObjectStatus.MISSING
        assert target == b"\xee" * 5000
    assert get(store, 2)[1] == payload_of(2)
    assert all_keys(store) == [key_of(2)]
    assert store.stats.num_quarantined == 0
    check_disk(store)


def test_tenant_with_deleted_key_can_store_again(reopen, folder):
    store = reopen()
    store.write([tenant_write(1, SHOP)])
    old = key_files(folder)[0].read_bytes()
    key_files(folder)[0].unlink()
    again = store.write([tenant_write(1, SHOP)])
    assert (again.ok, again[0].reason) == (True, "")  # equal bytes, but not "already stored"
    assert key_files(folder)[0].read_bytes() != old
    assert get(store, 1)[1] == payload_of(1)
    assert get(reopen(), 1)[1] == payload_of(1)


def test_restored_key_finds_no_objects_of_deleted_key(reopen, folder):
    """Opening the store after a key file was deleted erases the records of the key.

    Restoring the key file later does not bring back the objects.
    """
    store = reopen()
    store.write([tenant_write(1, SHOP)])
    kept = key_files(folder)[0]
    data = kept.read_bytes()
    store.close()
    kept.unlink()
    reopen().close()
    kept.write_bytes(data)
    assert get(reopen(), 1)[0].status is ObjectStatus.MISSING


def test_damaged_key_file_causes_miss_and_is_replaced(reopen, folder):
    put(reopen(), 1)
    flip(key_files(folder)[0], 60)
    store = reopen()
    assert get(store, 1)[0].status is ObjectStatus.MISSING
    assert put(store, 2).ok
    assert get(store, 2)[1] == payload_of(2)
    assert get(reopen(), 2)[1] == payload_of(2)


@pytest.mark.parametrize("content", [b"", b"short", b"\x89KVKEY\r\n" + bytes(200)])
def test_foreign_file_in_key_folder_is_ignored(reopen, folder, content):
    put(reopen(), 1)
    (folder / "keys" / "other.key").write_bytes(content)
    (folder / "keys" / "note.txt").write_bytes(content)
    assert get(reopen(), 1)[1] == payload_of(1)


def test_flipped_bit_in_encrypted_payload_is_corrupt(reopen, folder):
    put(reopen(), 1, 2)
    reopen().close()
    flip(next(folder.glob("*.kv")), 100)
    store = reopen()
    results = [get(store, n) for n in (1, 2)]
    assert sorted(result.status.value for result, _ in results) == ["corrupt", "found"]
    assert [target == b"\xee" * 5000 for result, target in results if not result.ok] == [True]
    assert store.stats.num_quarantined == 1
    store = reopen()
    assert len(all_keys(store)) == 1
    check_disk(store)


@pytest.mark.parametrize("part", ["slots", "records"])
def test_exchanged_slots_or_records_are_never_served(reopen, folder, part):
    """Simulate an attacker who exchanges the slots or the records of two objects of one tenant on the disk."""
    put(reopen(), 1, 2)
    reopen().close()
    path = next(folder.glob("*.kv" if part == "slots" else "*.table"))
    start, size = (0, 8192) if part == "slots" else (4096, 256)
    data = bytearray(path.read_bytes())
    first, second = data[start : start + size], data[start + size : start + 2 * size]
    data[start : start + 2 * size] = second + first
    path.write_bytes(data)
    store = reopen()
    assert not any(get(store, n)[0].ok for n in (1, 2))


@pytest.mark.parametrize(
    ("first", "then", "message"), [(SECRET, None, "is encrypted"), (None, SECRET, "not encrypted")]
)
def test_folder_with_other_encryption_is_refused_and_unchanged(reopen, folder, first, then, message):
    put(reopen(first), 1)
    reopen(first).close()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=message):
        reopen(then)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert get(reopen(first), 1)[1] == payload_of(1)


def test_plain_segment_has_version_1_and_encrypted_has_2():
    plain, sealed = SegmentHeader(3, 8192, 5), SegmentHeader(3, 8192, 5, True)
    assert (plain.pack()[8:10], sealed.pack()[8:10]) == (b"\1\0", b"\2\0")
    assert [SegmentHeader.unpack(each.pack()) for each in (plain, sealed)] == [plain, sealed]


def test_secret_of_wrong_length_raises(folder):
    with pytest.raises(ArgumentError, match="secret of 32 bytes, got 5"):
        DiskStore(folder, 1 << 20, secret=b"short")
    assert not folder.exists()


def test_key_folder_open_to_others_is_refused(reopen, folder):
    put(reopen(), 1)
    reopen().close()
    os.chmod(folder / "keys", 0o750)
    with pytest.raises(StoreError, match="open to other users"):
        reopen()


def test_write_fails_with_reason_if_key_cannot_be_created(folder):
    class NoLinks(Files):
        def link(self, old: str, new: str) -> None:  # noqa: ARG002
            raise PermissionError(1, "Operation not permitted", new)

    store = DiskStore(folder, 1 << 20, secret=SECRET, files=NoLinks(), **SMALL)
    result = put(store, 1)[0]
    assert result.status is ObjectStatus.FAILED
    assert "not permitted" in result.reason
    store.close()
    assert not list((folder / "keys").iterdir())


class DeletingFiles(Files):
    """Deletes all key files after each call of `operation`, as another process could do while the keys are loaded."""

    def __init__(self, operation: str) -> None:
        self._operation, self.folder = operation, ""

    def _delete(self, operation: str) -> None:
        if self.folder and operation == self._operation:
            for path in Path(self.folder).glob("*.key"):
                path.unlink()

    def list(self, folder: str) -> dict[str, int]:
        names = super().list(folder)
        self._delete("list")
        return names

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._delete("close")


@pytest.mark.parametrize("method", ["constructor", "reload", "find"])
@pytest.mark.parametrize("operation", ["list", "close"])
@pytest.mark.parametrize("secret", [SECRET, OTHER_SECRET], ids=["own", "foreign"])
def test_key_file_deleted_during_load_is_absent(tmp_path, method, operation, secret):
    folder, files = str(tmp_path / "keys"), DeletingFiles(operation)
    if method != "constructor":
        keys = TenantKeys(folder, SECRET, files)
    created = TenantKeys(folder, secret)
    ids = [created.key_for(tenant).id for tenant in (SHOP, BANK)]
    files.folder = folder
    if method == "constructor":
        keys = TenantKeys(folder, SECRET, files)
    elif method == "reload":
        keys.reload()
    assert [keys.find(each) for each in ids] == [None, None]
    assert not keys.foreign_ids


def test_concurrent_openers_create_one_key_per_tenant(tmp_path):
    openers = [TenantKeys(str(tmp_path / "keys"), SECRET) for _ in range(4)]
    found: list[bytes] = []
    barrier = threading.Barrier(4)

    def create(keys: TenantKeys) -> None:
        barrier.wait()
        found.extend(keys.key_for(b"tenant %d" % n).id for n in range(20))

    threads = [threading.Thread(target=create, args=(each,)) for each in openers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert len(set(found)) == len(list((tmp_path / "keys").iterdir())) == 20


def test_shards_of_encrypted_disk_url_share_keys(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    url = f"disk:{tmp_path}/kv?bytes=8MiB&free=0&segment=128KiB&secret={tmp_path}/secret"
    shards = open_shards([url], range(2), 2)
    for store in shards.stores:
        store.write([tenant_write(1, SHOP)])
    shards.close()
    assert len(list((tmp_path / "kv" / "keys").iterdir())) == 1
    with pytest.raises(StoreError, match="is encrypted"):
        DiskStore(tmp_path / "kv" / "shard-0-of-2", 1 << 20, **SMALL)
    moved = f"disk:{tmp_path}/other?bytes=8MiB&free=0&segment=128KiB&keys={tmp_path}/elsewhere"
    store = open_store(moved, secret=SECRET)
    put(store, 1)
    store.close()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    assert not (tmp_path / "other" / "keys").exists()


def test_keys_command_lists_and_deletes_tenants(reopen, folder, tmp_path, capsys):
    store = reopen()
    store.write([tenant_write(1, SHOP), tenant_write(2, BANK)])
    (tmp_path / "secret").write_bytes(SECRET)
    command = ["keys", str(folder / "keys"), "--secret", str(tmp_path / "secret")]
    assert main(command) == 0
    assert capsys.readouterr().out.split() == ["bank", "shop"]
    assert main([*command, "--delete", "shop"]) == 0
    assert get(store, 1)[0].status is ObjectStatus.MISSING
    assert get(store, 2)[0].ok
    assert main([*command, "--delete", "shop"]) == 1
    assert main(["keys", str(tmp_path / "none"), "--secret", str(tmp_path / "secret")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_inspect_and_verify_read_encrypted_folder_with_secret(reopen, folder, tmp_path, capsys):
    put(reopen(), 1, 2)
    reopen().close()
    (tmp_path / "secret").write_bytes(SECRET)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert main(["verify", str(copy), "--secret", str(tmp_path / "secret")]) == 0
    assert "2 objects checked, 10,000 bytes" in capsys.readouterr().out
    assert main(["inspect", str(copy), "--secret", str(tmp_path / "secret")]) == 0
    assert "2 objects (10,000 bytes" in capsys.readouterr().out
    assert main(["inspect", str(copy)]) == 1
    assert "is encrypted" in capsys.readouterr().err
