"""Open stores by URL: one store for all shards, or one store per shard.

A shard is the part of a block with some of the KV heads. A remote store keeps all shards together. A disk store with S
shards consists of S folders. Each rank opens the folders of its own shards, so that ranks do not wait for each other.
Several kvtier servers can open the same folders.

    disk:/kv, 4 shards        /kv/shard-0-of-4   /kv/shard-1-of-4   /kv/shard-2-of-4   /kv/shard-3-of-4
    opened by 2 ranks         |------------ rank 0 ------------|   |------------ rank 1 ------------|
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvtier.errors import ArgumentError, StoreError, UnavailableError
from kvtier.storage.cascade import Cascade, for_each
from kvtier.storage.cipher import Cipher
from kvtier.storage.codec import Compression
from kvtier.storage.disk.store import KEYS, DiskStore, Sync
from kvtier.storage.memory import MemoryStore
from kvtier.storage.remote.bucket import Bucket, BucketError
from kvtier.storage.remote.envelope import Envelope
from kvtier.storage.remote.store import DEFAULT_RETRIES, RemoteStore
from kvtier.storage.store import DEFAULT_TIMEOUT_S, CallStats, Store, StoreStats, UsesMemory

Value = TypeVar("Value")

EXAMPLES = (
    "disk:/mnt/nvme/kv?bytes=200GiB, memory:?bytes=1GiB, redis://host:6379/0?ttl=7d, rediss://user:password@host, "
    "redis://host?cluster=yes, s3://bucket/prefix?endpoint=https://s3.example, gs://bucket/prefix, "
    "az://container/prefix?account=name, mooncake://master:50051"
)
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0, "d": 86400.0}
_S3_THREADS = 16  # each request has one object and mostly waits for the network


def open_store(
    where: str | Sequence[str], *, secret: bytes | None = None, shard: int = 0, num_shards: int = 1
) -> Store:
    """Open the store at a URL. Several URLs make a Cascade, which reads from the stores in the order of the URLs.

        store = open_store(["disk:/mnt/nvme/kv?bytes=200GiB", "redis://cache.example?ttl=7d"])

    `secret` encrypts objects on servers and disks with AES-GCM; `?secret=FILE` sets the secret for one URL. On a disk,
    each tenant has its own key. A disk store with `num_shards` > 1 has one subfolder per shard. This call opens the
    subfolder of `shard`, which gets an equal share of the bytes. docs/stores.md lists the URL options; for example,
    `write=no` makes a store read-only.

    Raises ArgumentError (invalid URL), UnavailableError (missing extra) or StoreError (the store cannot be opened).
    """
    urls = [where] if isinstance(where, str) else list(where)
    if not urls:
        raise ArgumentError(f"open_store needs at least one URL; examples: {EXAMPLES}")
    options = [_UrlOptions.of(url, shard, num_shards) for url in urls]
    writable = [each.flag("write", True) for each in options]
    stores = _open_all([functools.partial(_open, each, secret) for each in options])
    return stores[0] if len(stores) == 1 and all(writable) else Cascade(stores, writable)


def _open_all(openers: Sequence[Callable[[], Store]]) -> list[Store]:
    """Open all stores. If one fails to open, close those that are already open."""
    stores: list[Store] = []
    with contextlib.ExitStack() as opened:
        for opener in openers:
            stores.append(opener())
            opened.callback(stores[-1].close)
        opened.pop_all()
    return stores


@dataclass(frozen=True, slots=True)
class _UrlOptions:
    """Options of a URL. Reading an option removes it from `left`, so that only unknown options remain there."""

    url: SplitResult
    shown: str
    """The URL without user, password and options, for messages."""
    left: dict[str, str]
    known: list[str]
    shard: int = 0
    num_shards: int = 1

    @classmethod
    def of(cls, url: str, shard: int = 0, num_shards: int = 1) -> _UrlOptions:
        try:
            parts = urlsplit(url)
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            _ = parts.port
        except ValueError as error:
            raise ArgumentError(f"invalid store URL ({error}); examples: {EXAMPLES}") from error
        if len(dict(pairs)) < len(pairs):
            raise ArgumentError(f"{shown}: duplicate option in {sorted(name for name, _ in pairs)}")
        return cls(parts, shown, dict(pairs), [], shard, num_shards)

    def text(self, name: str, default: str = "") -> str:
        self.known.append(name)
        return self.left.pop(name, default)

    def number(self, name: str, default: int) -> int:
        return self.parsed(name, default, "a whole number", int)

    def nbytes(self, name: str, default: int) -> int:
        return self.parsed(name, default, "bytes such as 200GiB", parse_bytes)

    def seconds(self, name: str, default: float) -> float:
        return self.parsed(name, default, "a time such as 30s, 12h or 7d", lambda text: _amount(text, _TIMES))

    def flag(self, name: str, default: bool) -> bool:
        return self.parsed(name, default, "yes or no", lambda text: {"yes": True, "no": False}[text])

    def finish(self) -> None:
        if self.left:
            known = ", ".join(sorted(self.known))
            raise ArgumentError(f"{self.shown}: unknown option {', '.join(sorted(self.left))}; options are {known}")

    def parsed(self, name: str, default: Value, what: str, parse: Callable[[str], Value]) -> Value:
        text = self.text(name)
        try:
            return parse(text) if text else default
        except (ValueError, KeyError) as error:
            raise ArgumentError(f"{self.shown}: {name}={text} is not {what}") from error


def parse_bytes(text: str) -> int:
    """Read a size such as 200GiB or 1.5TB. Raise ValueError for any other text."""
    return int(_amount(text, _UNITS))


def _amount(text: str, units: dict[str, float] | dict[str, int]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    if match is None or match[2] not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def _open(options: _UrlOptions, secret: bytes | None) -> Store:
    openers = {
        "disk": _open_disk,
        "memory": _open_memory,
        "redis": _open_redis,
        "rediss": _open_redis,
        "s3": _open_s3,
        "gs": _open_gcs,
        "az": _open_azure,
        "mooncake": _open_mooncake,
    }
    opener = openers.get(options.url.scheme)
    if opener is None:
        raise ArgumentError(
            f"{options.shown!r} is not a store: the scheme must be one of {', '.join(openers)}; examples: {EXAMPLES}"
        )
    return opener(options, secret)


def _open_disk(options: _UrlOptions, secret: bytes | None) -> Store:
    max_bytes, day_bytes = options.nbytes("bytes", 0), options.nbytes("bytes_per_day", 0)
    path = unquote(options.url.path)
    settings = {
        "segment_bytes": options.nbytes("segment", 256 << 20),
        "min_free_bytes": options.nbytes("free", 1 << 30),
        "num_threads": options.number("threads", 0) or None,
        "timeout_s": options.seconds("timeout", DEFAULT_TIMEOUT_S),
        "sync": options.parsed("sync", Sync.CLOSE, "close or write", Sync),
        "compression": _compression(options),
        "direct": options.flag("direct", True),
        "secret": _secret(options, secret),
        "key_folder": options.text("keys") or f"{path}/{KEYS}",  # shared by all shards
    }
    options.finish()
    if options.url.netloc or not path or max_bytes < 1:
        raise ArgumentError(f"{options.shown}: a disk store needs a folder and a size: disk:/mnt/nvme/kv?bytes=200GiB")
    if options.num_shards > 1:
        path = f"{path}/shard-{options.shard}-of-{options.num_shards}"
        max_bytes, day_bytes = max_bytes // options.num_shards, -(-day_bytes // options.num_shards)
    return DiskStore(path, max_bytes, bytes_per_day=day_bytes, **settings)  # type: ignore[arg-type]


def _open_memory(options: _UrlOptions, _: bytes | None) -> Store:
    max_bytes = options.nbytes("bytes", 1 << 30)
    options.finish()
    if options.url.netloc or options.url.path:
        raise ArgumentError(f"{options.shown}: a memory store has no host or path: memory:?bytes=1GiB")
    return MemoryStore(max_bytes)


def _open_redis(options: _UrlOptions, secret: bytes | None) -> Store:
    with_tls, url = options.url.scheme == "rediss", options.url
    database = url.path.strip("/")
    if not url.hostname or not (database or "0").isdecimal():
        raise ArgumentError(f"{options.shown}: a Redis store needs a host and a database number: redis://host:6379/0")
    with _extra("redis", options):
        from kvtier.storage.remote.redis import RedisBucket
    is_cluster, ca_file, cert_file = options.flag("cluster", False), options.text("ca"), options.text("cert")
    if is_cluster and int(database or 0):
        raise ArgumentError(f"{options.shown}: a cluster has only database 0")
    if not with_tls and (ca_file or cert_file):
        raise ArgumentError(f"{options.shown}: certificates need TLS; use rediss:// instead of redis://")
    connect = functools.partial(
        RedisBucket,
        host=url.hostname,
        port=url.port or 6379,
        username=unquote(url.username or ""),
        password=unquote(url.password or ""),
        database=int(database or 0),
        is_cluster=is_cluster,
        is_encrypted=with_tls,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=options.text("cert_key"),
        prefix=options.text("prefix", "kvtier:"),
    )
    return _open_remote(
        options, secret, lambda count, wait_s, ttl_s: connect(num_connections=count, timeout_s=wait_s, ttl_s=ttl_s), 4
    )


def _open_s3(options: _UrlOptions, secret: bytes | None) -> Store:
    if not options.url.hostname:
        raise ArgumentError(f"{options.shown}: an S3 store needs a bucket: s3://bucket/prefix")
    with _extra("s3", options):
        from kvtier.storage.remote.objects import s3_store
    connect = functools.partial(
        s3_store,
        bucket=options.url.hostname,
        endpoint=options.text("endpoint"),
        region=options.text("region"),
        access_key_id=unquote(options.url.username or ""),
        secret_access_key=unquote(options.url.password or ""),
    )
    return _open_objects(options, secret, connect)


def _open_gcs(options: _UrlOptions, secret: bytes | None) -> Store:
    if not options.url.hostname:
        raise ArgumentError(f"{options.shown}: a GCS store needs a bucket: gs://bucket/prefix")
    with _extra("gcs", options):
        from kvtier.storage.remote.objects import gcs_store
    endpoint, credentials = options.text("endpoint"), options.text("credentials")
    connect = functools.partial(gcs_store, options.url.hostname, endpoint, credentials)
    return _open_objects(options, secret, connect)


def _open_azure(options: _UrlOptions, secret: bytes | None) -> Store:
    if not options.url.hostname:
        raise ArgumentError(f"{options.shown}: an Azure store needs a container: az://container/prefix?account=name")
    with _extra("azure", options):
        from kvtier.storage.remote.objects import azure_store
    connect = functools.partial(
        azure_store,
        container=options.url.hostname,
        endpoint=options.text("endpoint"),
        account=options.text("account") or unquote(options.url.username or ""),
        account_key=unquote(options.url.password or ""),
    )
    return _open_objects(options, secret, connect)


def _open_objects(options: _UrlOptions, secret: bytes | None, connect: Callable[..., Any]) -> Store:
    """Open a store with one request per object: S3, GCS or Azure."""
    from kvtier.storage.remote.objects import ObjectBucket

    def open_bucket(_: int, wait_s: float, __: float | None) -> Bucket:
        return ObjectBucket(functools.partial(connect, timeout_s=wait_s), unquote(options.url.path))

    return _open_remote(options, secret, open_bucket, _S3_THREADS)


def _open_mooncake(options: _UrlOptions, secret: bytes | None) -> Store:
    if not options.url.hostname:
        raise ArgumentError(f"{options.shown}: a Mooncake store needs the master: mooncake://host:50051")
    with _extra("mooncake", options):
        from kvtier.storage.remote.mooncake import MooncakeBucket
    connect = functools.partial(
        MooncakeBucket,
        master=f"{options.url.hostname}:{options.url.port or 50051}",
        local_host=options.text("local", "127.0.0.1"),
        metadata=options.text("metadata", "P2PHANDSHAKE"),
        protocol=options.text("protocol", "tcp"),
        device=options.text("device"),
        segment_bytes=options.nbytes("segment", 0),
        buffer_bytes=options.nbytes("buffer", 64 << 20),
        admin_port=options.number("admin", 0),
        prefix=options.text("prefix", "kvtier-"),
    )
    return _open_remote(options, secret, lambda _, wait_s, __: connect(timeout_s=wait_s), 1)


def _open_remote(
    options: _UrlOptions, secret: bytes | None, connect: Callable[[int, float, float | None], Bucket], num_threads: int
) -> Store:
    """Read the options that all remote stores have, connect to the server, and return the store."""
    secret, ttl_s = _secret(options, secret), options.seconds("ttl", 0.0) or None
    envelope = Envelope(None if secret is None else Cipher(secret), _compression(options), ttl_s)
    timeout_s = options.seconds("timeout", DEFAULT_TIMEOUT_S)
    num_retries = options.number("retries", DEFAULT_RETRIES)
    num_threads = options.number("threads", num_threads)
    options.finish()
    try:
        bucket = connect(num_threads, timeout_s, ttl_s)
    except BucketError as error:
        raise StoreError(
            f"cannot open {options.shown}: {error}; check that the server runs, that host, port and credentials are "
            f"correct, and that this machine can reach the server"
        ) from error
    return RemoteStore(
        bucket, options.shown, envelope=envelope, num_threads=num_threads, timeout_s=timeout_s, num_retries=num_retries
    )


def _secret(options: _UrlOptions, default: bytes | None) -> bytes | None:
    """Return the secret in the file that the option `secret` names, or else the default."""
    file = options.text("secret")
    try:
        return Path(file).read_bytes() if file else default
    except OSError as error:
        raise ArgumentError(f"{options.shown}: cannot read the secret: {error}") from error


def _compression(options: _UrlOptions) -> Compression:
    return options.parsed("compression", Compression.NONE, "none or zlib", Compression)


@contextlib.contextmanager
def _extra(extra: str, options: _UrlOptions) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        libraries = "; it also needs: apt-get install libibverbs1 librdmacm1 libnuma1" if extra == "mooncake" else ""
        raise UnavailableError(
            f"{options.shown} needs the extra `{extra}`: pip install 'kvtier[{extra}]' ({error}){libraries}"
        ) from error


@dataclass(frozen=True, slots=True)
class ShardStores:
    """Stores for one rank: one store for all shards, or one store per shard. `first` is the rank's first shard."""

    stores: tuple[Store, ...]
    first: int = 0
    replicated: Store | None = None
    """Store of the data that all ranks hold. Only rank 0 writes this data. None if `stores[0]` keeps this data too."""

    @property
    def all(self) -> tuple[Store, ...]:
        return self.stores if self.replicated is None else (*self.stores, self.replicated)

    def of(self, shard: int | None) -> Store:
        """Return the store of a shard, or of replicated data (None)."""
        if shard is None:
            return self.stores[0] if self.replicated is None else self.replicated
        return self.stores[0 if len(self.stores) == 1 else shard - self.first]

    @property
    def stats(self) -> StoreStats:
        """Sum of the stats of `stores`. `replicated` is omitted, because rank 0 has opened the same folder."""
        return sum_stats([store.stats for store in self.stores])

    def register(self, memory: memoryview) -> None:
        for_each([store.register for store in self.all if isinstance(store, UsesMemory)], memory)

    def unregister(self, memory: memoryview) -> None:
        for_each([store.unregister for store in self.all if isinstance(store, UsesMemory)], memory)

    def close(self) -> None:
        for_each([store.close for store in self.all])


def open_shards(
    urls: Sequence[str], shards: range, num_shards: int, *, replicated: bool = False, secret: bytes | None = None
) -> ShardStores:
    """Open the stores at these URLs for `shards`, the shards of one rank. A block has `num_shards` shards in total.

    With `replicated`, blocks also contain tensors that all ranks hold. Rank 0 writes them to the store of shard 0, so
    the other ranks open this store too.
    """
    if num_shards == 1 or not any(urlsplit(url).scheme == "disk" for url in urls):
        return ShardStores((open_store(urls, secret=secret),), shards.start)
    wanted = [*shards, 0] if replicated and shards.start else [*shards]
    opener = functools.partial(open_store, urls, secret=secret, num_shards=num_shards)
    stores = tuple(_open_all([functools.partial(opener, shard=shard) for shard in wanted]))
    return ShardStores(stores[: len(shards)], shards.start, stores[-1] if len(stores) > len(shards) else None)


def sum_stats(stats: Sequence[StoreStats]) -> StoreStats:
    """Sum the stats of stores that hold parts of the same blocks."""
    totals: dict[str, Any] = {}
    for field in fields(StoreStats):
        values = [getattr(one, field.name) for one in stats]
        is_calls = isinstance(values[0], CallStats)
        totals[field.name] = CallStats(*map(sum, zip(*values, strict=True))) if is_calls else sum(values)
    return StoreStats(**totals)
