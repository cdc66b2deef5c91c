"""Stores that reach a real server through a proxy, for tests with faults of the network and the server."""

from __future__ import annotations

import contextlib
import uuid

from kvtier.storage import Breaker
from kvtier.storage.remote.envelope import Envelope
from kvtier.storage.remote.store import RemoteStore
from store_proxy import Proxy
from store_servers import S3_KEY, S3_SECRET, raw_s3

FAST = {"num_retries": 1, "first_wait_s": 0.01}


class RawRedis:
    """Direct access to the objects of a Redis server."""

    def __init__(self, port: int, prefix: str) -> None:
        import redis

        self._client, self._prefix = redis.Redis(port=port), prefix

    def get(self, name: str) -> bytes | None:
        return self._client.get(self._prefix + name)

    def set(self, name: str, value: bytes) -> None:
        self._client.set(self._prefix + name, value)

    def wipe(self) -> None:
        for name in self._client.scan_iter(self._prefix + "*"):
            self._client.delete(name)


class RawS3:
    """Direct access to the objects of an S3 server."""

    def __init__(self, port: int, prefix: str) -> None:
        self._store, self._prefix = raw_s3(port), prefix

    def get(self, name: str) -> bytes | None:
        import obstore

        with contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, f"{self._prefix}/{name}").bytes())
        return None

    def set(self, name: str, value: bytes) -> None:
        import obstore

        obstore.put(self._store, f"{self._prefix}/{name}", value)

    def wipe(self) -> None:
        import obstore

        for page in obstore.list(self._store, self._prefix):
            obstore.delete(self._store, [entry["path"] for entry in page])


class Setup:
    """A server, a proxy in front of the server, and the stores that connect to the proxy."""

    def __init__(self, kind: str, port: int) -> None:
        self.kind, self.port, self.prefix = kind, port, uuid.uuid4().hex
        self.proxy = Proxy(port)
        self.raw = (RawRedis if kind == "redis" else RawS3)(port, self.prefix)
        self._stores: list[RemoteStore] = []

    def store(self, *, breaker: Breaker | None = None, envelope: Envelope | None = None, timeout_s: float = 30.0):
        if self.kind == "redis":
            from kvtier.storage.remote.redis import RedisBucket

            bucket = RedisBucket(port=self.proxy.port, prefix=self.prefix, num_connections=4, timeout_s=timeout_s)
        else:
            from kvtier.storage.remote.objects import ObjectBucket, s3_store

            endpoint = f"http://127.0.0.1:{self.proxy.port}"
            bucket = ObjectBucket(
                lambda: s3_store("test", endpoint, "us-east-1", S3_KEY, S3_SECRET, timeout_s=timeout_s), self.prefix
            )
        options = {"timeout_s": timeout_s, **FAST, "breaker": breaker or Breaker(retry_s=0), "num_threads": 4}
        made = RemoteStore(bucket, self.kind, envelope=envelope, **options)
        self._stores.append(made)
        return made

    def close(self) -> None:
        self.proxy.close()
        for store in self._stores:
            store.close()
