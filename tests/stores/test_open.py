"""Check the stores that open_store creates from URLs, and the errors for invalid URLs."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from kvtier.errors import ArgumentError, StoreError, UnavailableError
from kvtier.storage import DiskStore, MemoryStore, ObjectStatus
from kvtier.storage.cascade import Cascade
from kvtier.storage.open import open_store
from storage_support import get, payload_of, put
from store_proxy import Faults, Proxy
from store_servers import free_ports


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is not a store"),
        ("/mnt/kv", "must be one of disk, memory, redis, rediss, s3, gs, az, mooncake"),
        ("ftp://host", "is not a store"),
        ("disk:/kv", "needs a folder and a size: disk:/mnt/nvme/kv?bytes=200GiB"),
        ("disk:?bytes=1GiB", "needs a folder"),
        ("disk://kv?bytes=1GiB", "needs a folder"),
        ("disk:/kv?bytes=lots", "bytes=lots is not bytes such as 200GiB"),
        (
            "disk:/kv?bytes=1GiB&syncc=write",
            "unknown option syncc; options are bytes, bytes_per_day, compression, direct",
        ),
        ("disk:/kv?bytes=1GiB&sync=often", "sync=often is not"),
        ("disk:/kv?bytes=1GiB&direct=1", "direct=1 is not yes or no"),
        ("disk:/kv?bytes=1GiB&bytes=2GiB", "duplicate option"),
        ("memory:/kv", "has no host or path"),
        ("memory:?bytes=-1", "bytes=-1"),
        ("redis:///0", "needs a host"),
        ("redis://host/zero", "database number"),
        ("redis://host:port", "invalid store URL"),
        ("redis://host/1?cluster=yes", "only database 0"),
        ("redis://host?ca=/ca.crt", "use rediss://"),
        ("redis://host?ttl=soon", "a time such as 30s, 12h or 7d"),
        ("redis://host?ttl=0.5s", "at least 1 second"),
        ("redis://host?secret=/nonexistent/file", "cannot read the secret"),
        ("redis://user:hunter2@host?color=red", "unknown option color"),
        ("s3:///prefix", "needs a bucket: s3://bucket/prefix"),
        ("gs:///prefix", "needs a bucket: gs://bucket/prefix"),
        ("gs://bucket?region=x", "unknown option region; options are compression, credentials, endpoint"),
        ("az:///prefix", "needs a container: az://container/prefix"),
        ("az://account:hunter2@container?color=red", "unknown option color"),
        ("mooncake://", "needs the master"),
        ("memory:?bytes", "invalid store URL"),
    ],
)
def test_open_store_with_invalid_url_raises_error_with_reason(url, message):
    with pytest.raises(ArgumentError) as refused:
        open_store(url)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_open_store_without_url_or_with_short_secret_raises():
    with pytest.raises(ArgumentError, match="at least one URL"):
        open_store([])
    with pytest.raises(ArgumentError, match="secret of 32 bytes, got 5"):
        open_store("redis://host", secret=b"short")


def test_disk_and_memory_urls_set_store_options(tmp_path):
    folder = tmp_path / "a folder"
    url = f"disk:{str(folder).replace(' ', '%20')}?bytes=1MiB&segment=128KiB&free=0&sync=write&direct=no&threads=2"
    with contextlib.closing(open_store(url)) as store:
        assert isinstance(store, DiskStore)
        assert put(store, 1).is_durable
        assert (store.stats.max_bytes, store.is_direct) == (1 << 20, False)
    with contextlib.closing(open_store("memory:?bytes=1.5kB")) as store:
        assert isinstance(store, MemoryStore)
        assert store.stats.max_bytes == 1500


def test_open_store_with_several_urls_returns_cascade(tmp_path):
    first, second = (f"disk:{tmp_path / name}?bytes=1MiB&free=0" for name in ("first", "second"))
    with contextlib.closing(open_store([first, second])) as store:
        assert isinstance(store, Cascade)
        put(store, 1)
    with contextlib.closing(open_store(["memory:", second + "&write=no"])) as store:
        assert get(store, 1)[1] == payload_of(1)
        put(store, 2)
        assert get(store, 2)[0].ok
    with contextlib.closing(open_store(second)) as store:
        assert [get(store, n)[0].ok for n in (1, 2)] == [True, False]
    with contextlib.closing(open_store(second + "&write=no")) as store:
        assert put(store, 3)[0].reason == "no store is writable"


def test_open_store_closes_earlier_stores_if_one_fails(tmp_path):
    url = f"disk:{tmp_path}?bytes=1MiB&free=0"
    with pytest.raises(ArgumentError):
        open_store([url, "ftp://host"])
    open_store(url).close()


@pytest.mark.parametrize("scheme", ["redis", "s3", "mooncake"])
def test_open_store_on_unreachable_server_raises_with_advice(scheme):
    pytest.importorskip({"redis": "redis", "s3": "obstore", "mooncake": "mooncake.store"}[scheme], exc_type=ImportError)
    (port,) = free_ports(1)
    place = f"redis://user:hunter2@127.0.0.1:{port}?"
    if scheme == "s3":
        place = f"s3://key:hunter2@bucket?endpoint=http://127.0.0.1:{port}&region=r&"
    if scheme == "mooncake":
        place = f"mooncake://127.0.0.1:{port}?"
    with pytest.raises(StoreError) as refused:
        open_store(f"{place}timeout=2s")
    message = str(refused.value)
    assert "cannot open" in message
    assert "check that the server runs" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_open_store_on_hanging_server_raises_after_deadline(scheme, request):
    upstream = Proxy(request.getfixturevalue(f"{scheme}_port"))
    upstream.set(Faults(hangs=True))
    place = f"redis://127.0.0.1:{upstream.port}?"
    if scheme == "s3":
        place = f"s3://key:secret@bucket?endpoint=http://127.0.0.1:{upstream.port}&region=r&"
    with contextlib.closing(upstream), pytest.raises(StoreError, match="cannot open"):
        open_store(f"{place}timeout=500ms")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("redis://host", "redis", "redis"),
        ("s3://b", "obstore", "s3"),
        ("gs://b", "obstore", "gcs"),
        ("az://c", "obstore", "azure"),
        ("mooncake://m", "mooncake", "mooncake"),
    ],
)
def test_missing_extra_raises_error_with_name_of_extra(url, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for name in (
        f"{module}.store",
        f"{module}.backoff",
        f"kvtier.storage.remote.{extra}",
        "kvtier.storage.remote.objects",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UnavailableError, match=rf"pip install 'kvtier\[{extra}\]'"):
        open_store(url)


def test_missing_crypto_extra_raises_error_with_its_name(monkeypatch):
    pytest.importorskip("redis")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UnavailableError, match=r"pip install 'kvtier\[crypto\]'"):
        open_store("redis://host", secret=bytes(32))


def test_importing_storage_imports_no_extra():
    code = (
        "import sys, kvtier.storage, kvtier.storage.open\n"
        "clients = {'redis', 'obstore', 'mooncake', 'cryptography', 'zmq', 'msgspec', 'torch'}\n"
        "assert not clients & set(sys.modules), clients & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_secret_file_is_equivalent_to_secret_argument(redis_port, tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(32)))
    url = f"redis://127.0.0.1:{redis_port}?prefix={tmp_path.name}"
    with (
        contextlib.closing(open_store(f"{url}&secret={file}")) as one,
        contextlib.closing(open_store(url, secret=bytes(range(32)))) as other,
        contextlib.closing(open_store(url)) as plain,
    ):
        put(one, 1)
        assert get(other, 1)[1] == payload_of(1)
        assert get(plain, 1)[0].status is ObjectStatus.MISSING
