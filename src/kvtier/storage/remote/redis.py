"""RedisBucket: blocks on a Redis or Valkey server, or a cluster. Needs the extra `redis`.

Every request except SCAN is a pipeline of GETRANGE, SET, EXISTS or UNLINK commands, with one pipeline per cluster node.
Redis itself evicts objects (set `maxmemory` and `maxmemory-policy allkeys-lru`), so objects may vanish at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from kvtier.storage.codec import Scratch
from kvtier.storage.remote.bucket import BucketError, Parts, Put, RequestSize, join

_MOVED = (exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError)
_TRANSIENT = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.ReadOnlyError,
    exceptions.RedisClusterException,
    OSError,
)
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError)  # subclasses of ConnectionError
_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError, ValueError, TypeError, IndexError)
"""Errors that the client raises. ValueError, TypeError and IndexError mean that a reply violates the protocol."""
_SMALL_BYTES = 1 << 14  # pieces up to this size are joined, larger pieces are sent without a copy
_READ_BYTES = 1 << 18  # per recv; 576 MiB/s with 256 KiB, 493 MiB/s with 64 KiB (values of 1 MiB, loopback, 2026-11-15)


# A server runs one command at a time, and parallel puts cost CPU time. A batch for one server that is not above
# max_put_bytes is therefore split only on four or more cores. Write rate as a share of the raw client's rate (32
# objects of 1 MiB, 2 cores, one of them used by the server, 2026-11-15):
#
#                in one put      in eight puts
#   one server   0.87 to 0.97    0.78 to 0.87
#   cluster      0.76            0.86
_ONE_SERVER = RequestSize(
    max_names=4096, max_put_bytes=32 << 20, num_puts=max(1, min(4, len(os.sched_getaffinity(0)) // 2))
)


class RedisBucket:
    """Strings on a Redis server. Raises BucketError if the server does not respond.

    With `is_cluster`, `host` is one of the nodes. `is_encrypted` enables TLS and verifies the server's certificate and
    host name. `ca_file` adds trusted authorities to those of the system. `cert_file` and `key_file` identify the
    client. Names start with `prefix`; deployments that share a server need different prefixes.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 6379,
        *,
        num_connections: int,
        timeout_s: float,
        username: str = "",
        password: str = "",
        database: int = 0,
        is_cluster: bool = False,
        is_encrypted: bool = False,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        prefix: str = "kvtier:",
        ttl_s: float | None = None,
    ) -> None:
        self._prefix, self._is_cluster = prefix, is_cluster
        self.request_size = RequestSize(max_names=4096) if is_cluster else _ONE_SERVER
        self._expiry = ("PX", max(1, int(ttl_s * 1000))) if ttl_s is not None else ()
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "username": username or None,
            "password": password or None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_read_size": _READ_BYTES,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": num_connections,
        }
        if is_encrypted:
            files = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
            options |= {"ssl": True} | {name: file for name, file in files.items() if file}
        try:
            self._client = RedisCluster(**options) if is_cluster else redis.Redis(db=database, **options)
            self._client.ping()
        except _ERRORS as error:
            raise _explain(error) from error

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(reply) for reply in self._pipe([("EXISTS", self._prefix + name) for name in names])]

    def fetch(self, names: Sequence[str], limits: Sequence[int], scratch: Scratch) -> list[memoryview | None]:  # noqa: ARG002
        return [None if value is None else memoryview(value) for value in self._ranges(names, limits)]

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:  # noqa: ARG002
        return self._ranges(names, [nbytes] * len(names))

    def _ranges(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes | None]:
        """Return the first bytes of each value: b"" if it is not a string, None if it is missing or empty."""
        commands = [("GETRANGE", self._prefix + n, 0, size - 1) for n, size in zip(names, sizes, strict=True)]
        replies = self._pipe(commands, _is_wrong_type)
        return [b"" if isinstance(reply, Exception) else reply or None for reply in replies]

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:  # noqa: ARG002
        """Set all values, which also renews their time to live."""
        try:
            replies = self._send([self._prefix + name for name in names], values)
        except BucketError as error:
            if not self._is_cluster or not error.is_transient:
                raise
            replies = dict.fromkeys(range(len(names)), error)
        moved = [index for index, reply in replies.items() if isinstance(reply, (*_MOVED, BucketError))]
        if moved and self._is_cluster:  # the client's pipeline follows moved hash slots, but needs values in one piece
            replies |= self._send_joined(moved, names, values, scratch)
        _raise_errors(replies.values(), _is_out_of_memory)
        return [Put.STORED if not isinstance(replies[i], Exception) else Put.FULL for i in range(len(names))]

    def delete(self, names: Sequence[str]) -> list[bool]:
        return [bool(reply) for reply in self._pipe([("UNLINK", self._prefix + name) for name in names])]

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        """Return names from SCAN, one node of a cluster after another. A cursor is node:position."""
        node, _, at = (cursor or "0:0").partition(":")
        nodes = self._nodes()
        if not node.isdecimal() or not at.isdecimal() or int(node) >= len(nodes):
            raise BucketError(f"{cursor!r} is not a cursor of this store", is_transient=False)
        pattern = re.sub(r"([*?\[\]\\^-])", r"\\\1", self._prefix) + "?" * 64  # a block's name: 64 hex digits
        try:
            following, keys = nodes[int(node)].scan(int(at), match=pattern, count=limit)
        except _ERRORS as error:
            raise _explain(error) from error
        names = [key.decode("utf-8", "replace").removeprefix(self._prefix) for key in keys]
        if following:
            return names, f"{node}:{following}"
        return names, f"{int(node) + 1}:0" if int(node) + 1 < len(nodes) else ""

    def reset(self) -> None:
        for node in self._nodes():
            node.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Drop all connections, even the connections of hanging calls."""
        for node in self._nodes():
            node.connection_pool.disconnect()

    def _nodes(self) -> list[Any]:
        if isinstance(self._client, redis.Redis):
            return [self._client]
        primaries = sorted(self._client.get_primaries(), key=lambda node: str(node.name))  # type: ignore[no-untyped-call]
        return [self._client.get_redis_connection(node) for node in primaries]

    def _pipe(
        self, commands: Sequence[tuple[Any, ...]], is_expected: Callable[[Exception], bool] = lambda _: False
    ) -> list[Any]:
        """Send commands in one pipeline and return the replies. Raises errors other than the expected ones."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except _ERRORS as error:
            self.reset()
            raise _explain(error) from error
        _raise_errors(replies, is_expected)
        return replies

    def _send(self, names: Sequence[str], values: Sequence[Parts]) -> dict[int, Any]:
        """Send SET commands on one connection per node, then read all replies. Return replies and errors by index.

        The client's pipeline is not used, because it needs each value in one piece. Joining the pieces would take as
        long as computing the checksum of the value.
        """
        nodes: dict[Any, list[int]] = {}
        used: list[Any] = []
        replies: dict[int, Any] = {}
        try:
            for index, name in enumerate(names):
                nodes.setdefault(self._pool_of(name), []).append(index)
            for pool, chosen in nodes.items():
                used.append((pool, pool.get_connection()))
                used[-1][1].send_packed_command(self._packed(names, values, chosen), check_health=False)
            for (_, connection), chosen in zip(used, nodes.values(), strict=True):
                for index in chosen:
                    try:
                        replies[index] = connection.read_response()
                    except exceptions.ResponseError as error:
                        replies[index] = error
        except (*_ERRORS, BucketError) as error:
            for _, connection in used:
                connection.disconnect()  # another request must not get the pending replies of this connection
            raise error if isinstance(error, BucketError) else _explain(error) from error
        finally:
            for pool, connection in used:
                pool.release(connection)
        return replies

    def _send_joined(
        self, chosen: Sequence[int], names: Sequence[str], values: Sequence[Parts], scratch: Scratch
    ) -> dict[int, Any]:
        """Set values through the client's pipeline, which follows moved hash slots."""
        sizes = [sum(map(len, values[index])) for index in chosen]
        memory, commands = scratch.take(sum(sizes)), []
        for index, nbytes in zip(chosen, sizes, strict=True):
            commands.append(("SET", self._prefix + names[index], join(values[index], memory[:nbytes]), *self._expiry))
            memory = memory[nbytes:]
        return dict(zip(chosen, self._pipe(commands, _is_out_of_memory), strict=True))

    def _packed(
        self, names: Sequence[str], values: Sequence[Parts], chosen: Sequence[int]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of SET commands. Values that are computed on access are computed between two sends."""
        text = bytearray()
        for index in chosen:
            parts = values[index]
            key, nbytes = names[index].encode(), sum(map(len, parts))
            text += b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(self._expiry), len(key), key, nbytes)
            for part in parts:
                if len(part) <= _SMALL_BYTES:
                    text += part
                else:
                    yield bytes(text)
                    yield part
                    text.clear()
            text += b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(str(word)), str(word).encode()) for word in self._expiry)
        yield bytes(text)

    def _pool_of(self, name: str) -> Any:
        if isinstance(self._client, redis.Redis):
            return self._client.connection_pool
        return self._client.get_redis_connection(self._client.get_node_from_key(name)).connection_pool  # type: ignore[no-untyped-call]


def _raise_errors(replies: Iterable[Any], is_expected: Callable[[Exception], bool]) -> None:
    for reply in replies:
        if isinstance(reply, Exception) and not is_expected(reply):
            raise _explain(reply) from reply


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, exceptions.OutOfMemoryError)


def _is_wrong_type(error: Exception) -> bool:
    """True if the key holds a list, a set or another type that is not a string."""
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("WRONGTYPE")


def _explain(error: Exception) -> BucketError:
    if isinstance(error, _REFUSED):
        return BucketError(f"access denied: {error}", is_transient=False)
    if isinstance(error, exceptions.MovedError):  # a cluster client would follow the redirection
        return BucketError("the server is a node of a cluster; add cluster=yes to the URL", is_transient=False)
    if isinstance(error, _TRANSIENT):
        return BucketError(f"{type(error).__name__}: {error}")
    if isinstance(error, exceptions.ResponseError):
        return BucketError(str(error), is_transient=False)
    return BucketError(f"invalid reply: {type(error).__name__}: {error}")
