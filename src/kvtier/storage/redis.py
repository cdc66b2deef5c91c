"""Blocks on a Redis or Valkey server, or a cluster of them. Needs the extra `redis`.

Every request is one pipeline of GET, SET, EXISTS, UNLINK or GETRANGE; on a cluster one per node. Redis evicts by itself
(set `maxmemory` and `maxmemory-policy allkeys-lru`), so objects vanish without notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry

from kvtier.storage.bucket import BucketError, Listing, Parts, Put, join
from kvtier.storage.workers import Scratch

Answer = TypeVar("Answer")

_TRANSIENT = (ConnectionError, TimeoutError, ClusterDownError, TryAgainError, ReadOnlyError, RedisClusterException)
_PERMANENT = (AuthenticationError, AuthorizationError)  # subclasses of ConnectionError
_READ_BYTES = 1 << 18  # per recv: 576 MiB/s for values of 1 MiB instead of 493 with 64 KiB (2026-11-15, loopback)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where a Redis is, and how to be let in."""

    host: str = "127.0.0.1"
    port: int = 6379
    username: str = ""
    password: str = ""
    database: int = 0
    is_cluster: bool = False
    """`host` is one of its nodes."""
    is_encrypted: bool = False
    """TLS; the server's certificate is verified, host name included."""
    ca_file: str = ""
    """Certificates to trust instead of the system's."""
    cert_file: str = ""
    key_file: str = ""
    """What we show to a server that wants to know clients."""
    prefix: str = "kvtier:"
    """Names begin with it; two deployments on one server have two."""
    ttl_s: float | None = None


class RedisBucket:
    """Named strings on a Redis. Connecting to a server that is not there is a BucketError."""

    max_names = 4096

    def __init__(self, config: RedisConfig, num_connections: int, timeout_s: float) -> None:
        self._prefix, self._is_cluster = config.prefix, config.is_cluster
        self._expiry = ("PX", max(1, int(config.ttl_s * 1000))) if config.ttl_s is not None else ()
        options: dict[str, Any] = {
            "host": config.host,
            "port": config.port,
            "username": config.username or None,
            "password": config.password or None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_read_size": _READ_BYTES,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": num_connections,
        }
        if config.is_encrypted:
            files = {"ssl_ca_certs": config.ca_file, "ssl_certfile": config.cert_file, "ssl_keyfile": config.key_file}
            options |= {"ssl": True} | {name: file for name, file in files.items() if file}
        self._client: redis.Redis | RedisCluster = self._connect(options, config)

    def _connect(self, options: dict[str, Any], config: RedisConfig) -> redis.Redis | RedisCluster:
        def connect() -> redis.Redis | RedisCluster:
            if config.is_cluster:
                return RedisCluster(**options)
            client = redis.Redis(db=config.database, **options)
            client.ping()
            return client

        return _translate(connect)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there."""
        return [bool(reply) for reply in self._pipe([("EXISTS", self._prefix + name) for name in names])]

    def fetch(self, names: Sequence[str], rooms: Sequence[int], scratch: Scratch) -> list[memoryview | None]:  # noqa: ARG002
        """Their values."""
        replies = self._pipe([("GET", self._prefix + name) for name in names])
        return [None if reply is None else memoryview(reply) for reply in replies]

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:  # noqa: ARG002
        """The first bytes of their values; an empty value counts as none."""
        return [reply or None for reply in self._pipe([("GETRANGE", self._prefix + n, 0, nbytes - 1) for n in names])]

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:  # noqa: ARG002
        """Set them all, which also renews their time to live."""
        sizes = [sum(map(len, parts)) for parts in values]
        room, commands = scratch.take(sum(sizes)), []
        for name, parts, nbytes in zip(names, values, sizes, strict=True):
            commands.append(("SET", self._prefix + name, join(parts, room[:nbytes]), *self._expiry))
            room = room[nbytes:]
        replies = self._pipe(commands, (OutOfMemoryError,))
        return [Put.FULL if isinstance(reply, OutOfMemoryError) else Put.STORED for reply in replies]

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Forget them."""
        return [bool(reply) for reply in self._pipe([("UNLINK", self._prefix + name) for name in names])]

    def list_names(self, cursor: str, limit: int) -> Listing:
        """SCAN; on a cluster node by node, the node's number before the colon."""
        node, _, at = (cursor or "0:0").partition(":")
        nodes = self._nodes()
        if not node.isdecimal() or not at.isdecimal() or int(node) >= len(nodes):
            raise BucketError(f"{cursor!r} is no cursor of this store", is_transient=False)
        pattern = _escaped(self._prefix) + "?" * 64
        following, found = _translate(lambda: nodes[int(node)].scan(int(at), match=pattern, count=limit))
        names = tuple(name.decode("utf-8", "replace").removeprefix(self._prefix) for name in found)
        if following:
            return Listing(names, f"{node}:{following}")
        return Listing(names, f"{int(node) + 1}:0" if int(node) + 1 < len(nodes) else "")

    def reset(self) -> None:
        """Drop the connections nobody uses now."""
        for node in self._nodes():
            node.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Drop all connections, also under whoever hangs."""
        for node in self._nodes():
            node.connection_pool.disconnect()

    def _nodes(self) -> list[Any]:
        if isinstance(self._client, redis.Redis):
            return [self._client]
        primaries = sorted(self._client.get_primaries(), key=lambda node: str(node.name))  # type: ignore[no-untyped-call]
        return [self._client.get_redis_connection(node) for node in primaries]

    def _pipe(self, commands: Sequence[tuple[Any, ...]], expected: tuple[type[Exception], ...] = ()) -> list[Any]:
        """The replies to commands sent at once; errors among them other than the expected are raised."""

        def run() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not isinstance(reply, expected):
                    raise reply
            return replies

        try:
            return _translate(run)
        except BucketError:
            self.reset()
            raise


def _translate(call: Callable[[], Answer]) -> Answer:
    """What it returns; what it raises as a BucketError."""
    try:
        return call()
    except _PERMANENT as error:
        raise BucketError(f"refused us: {error}", is_transient=False) from error
    except (*_TRANSIENT, OSError) as error:
        raise BucketError(f"{type(error).__name__}: {error}") from error
    except MovedError as error:  # a RedisCluster follows them
        raise BucketError("it is a node of a cluster: add cluster=yes", is_transient=False) from error
    except ResponseError as error:
        raise BucketError(str(error), is_transient=False) from error
    except (RedisError, ValueError, TypeError, IndexError) as error:
        raise BucketError(f"not the protocol of Redis: {type(error).__name__}: {error}") from error


def _escaped(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix)
