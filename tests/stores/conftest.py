"""Start each server once per session on a free port. If a server is not installed, skip the tests that need it."""

from __future__ import annotations

import contextlib

import pytest

import store_servers
from gcs_stub import gcs_stub
from kvtier.storage.remote.store import RemoteStore
from store_faults import Setup


def start_server(make, tmp_path_factory, name):
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(make(tmp_path_factory.mktemp(name)))
        except store_servers.NotInstalled as missing:
            pytest.skip(str(missing))


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory):
    yield from start_server(store_servers.redis_server, tmp_path_factory, "redis")


@pytest.fixture(scope="session")
def cluster_ports(tmp_path_factory):
    yield from start_server(store_servers.redis_cluster, tmp_path_factory, "cluster")


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory):
    yield from start_server(store_servers.s3_server, tmp_path_factory, "s3")


@pytest.fixture(scope="session")
def azure_port(tmp_path_factory):
    yield from start_server(store_servers.azure_server, tmp_path_factory, "azure")


@pytest.fixture(scope="session")
def gcs():
    with gcs_stub() as server:
        yield server


@pytest.fixture(params=["redis", "s3"])
def setup(request):
    """Yield a server behind a proxy that injects faults."""
    with contextlib.closing(Setup(request.param, request.getfixturevalue(f"{request.param}_port"))) as made:
        yield made


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory):
    yield from start_server(store_servers.mooncake_master, tmp_path_factory, "mooncake")


@pytest.fixture(scope="session")
def mooncake_client(mooncake):
    """Yield a function that creates a store with a prefix.

    All stores share one client, because closing a client is slow.
    """
    from kvtier.storage.remote.mooncake import MooncakeBucket

    class SharedClientBucket(MooncakeBucket):
        def __init__(self, prefix):
            self.__dict__.update(client.__dict__, _prefix=prefix)

        def close(self):
            pass

    client = MooncakeBucket(f"127.0.0.1:{mooncake.port}", admin_port=mooncake.admin_port, timeout_s=10)
    yield lambda prefix: RemoteStore(SharedClientBucket(prefix), "mooncake")
    client.close()
