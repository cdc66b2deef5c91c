"""Stores on servers compared with the raw clients of those servers: the same values of 1 MiB in batches of 32.

PYTHONPATH=.:tests python -m benchmarks.stores          starts the servers; prints which are not installed

The raw clients are used as their documentation recommends for batches:

    redis-py    one pipeline of SET and one MGET, on one connection
    obstore     put and get, on the same number of threads as the store
    Mooncake    batch_put_from and batch_get_into on registered memory; another process provides the memory

Raw reads are not verified and, except for Mooncake, return new memory. The store verifies the bytes and fills the
caller's memory. Both alternate batch by batch, in changing order, so that noise affects both. A share is the ratio of
the rates in one round, and the median of the shares counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import store_servers
from benchmarks import stores_engine
from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.storage import Label, Read, Store, Write
from kvtier.storage.checksum import address_of
from kvtier.storage.open import open_store

OBJECT_BYTES = 1 << 20
BATCH = 32
LABEL = Label(bytes(32))
SECRET = bytes(range(32))


class Raw(Protocol):
    """A raw client."""

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        pass

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        pass


class RawRedis:
    """redis-py; on a cluster a pipeline of GET, because MGET works on one node only."""

    def __init__(self, client: object) -> None:
        import redis

        self._client, self._is_cluster = client, not isinstance(client, redis.Redis)

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)  # type: ignore[attr-defined]
        for name, view in zip(names, views, strict=True):
            pipeline.set(name, view)
        pipeline.execute()

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:  # noqa: ARG002
        if self._is_cluster:
            pipeline = self._client.pipeline(transaction=False)  # type: ignore[attr-defined]
            for name in names:
                pipeline.get(name)
            found = pipeline.execute()
        else:
            found = self._client.mget(names)  # type: ignore[attr-defined]
        assert all(len(each) == OBJECT_BYTES for each in found)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._client.delete(name)  # type: ignore[attr-defined]


class RawS3:
    def __init__(self, port: int, num_threads: int) -> None:
        self._store, self._threads = store_servers.raw_s3(port), ThreadPoolExecutor(num_threads)

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        import obstore

        list(self._threads.map(lambda n, v: obstore.put(self._store, n, v, use_multipart=False), names, views))

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:  # noqa: ARG002
        import obstore

        found = self._threads.map(lambda name: obstore.get(self._store, name).bytes(), names)
        assert all(len(each) == OBJECT_BYTES for each in found)

    def remove(self, names: Sequence[str]) -> None:
        import obstore

        obstore.delete(self._store, list(names))


class RawMooncake:
    """Mooncake's client on registered memory."""

    def __init__(self, port: int, memory: memoryview) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{port}")
        assert code == 0
        assert self._client.register_buffer(address_of(memory), len(memory)) == 0

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        codes = self._client.batch_put_from(list(names), list(map(address_of, views)), [OBJECT_BYTES] * len(names))
        assert not any(codes), codes

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        counts = self._client.batch_get_into(list(names), list(map(address_of, views)), [OBJECT_BYTES] * len(names))
        assert set(counts) == {OBJECT_BYTES}, counts

    def remove(self, names: Sequence[str]) -> None:
        self._client.batch_remove(list(names), True)


@contextlib.contextmanager
def redis_single(folder: Path, memory: memoryview) -> Iterator[tuple[dict[str, Store], Raw]]:  # noqa: ARG001
    """Yield one Redis server, without and with encryption."""
    import redis

    with store_servers.redis_server(folder) as port:
        url = f"redis://127.0.0.1:{port}"
        stores = {"redis": open_store(url), "redis, AES-GCM": open_store(f"{url}?prefix=sealed:", secret=SECRET)}
        yield stores, RawRedis(redis.Redis(port=port))


@contextlib.contextmanager
def redis_cluster(folder: Path, memory: memoryview) -> Iterator[tuple[dict[str, Store], Raw]]:  # noqa: ARG001
    """Yield a cluster of three Redis servers."""
    from redis.cluster import RedisCluster

    with store_servers.redis_cluster(folder) as ports:
        store = open_store(f"redis://127.0.0.1:{ports[0]}?cluster=yes")
        yield {"redis cluster of 3": store}, RawRedis(RedisCluster(host="127.0.0.1", port=ports[0]))


@contextlib.contextmanager
def s3(folder: Path, memory: memoryview) -> Iterator[tuple[dict[str, Store], Raw]]:  # noqa: ARG001
    with store_servers.s3_server(folder) as port:
        user = f"{store_servers.S3_KEY}:{store_servers.S3_SECRET}"
        url = f"s3://{user}@test/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1&threads=16&timeout=60s"
        yield {"s3": open_store(url)}, RawS3(port, 16)


@contextlib.contextmanager
def mooncake(folder: Path, memory: memoryview) -> Iterator[tuple[dict[str, Store], Raw]]:
    """Yield a Mooncake master, and another process that provides the memory."""
    with store_servers.mooncake_master(folder, segment_bytes=1 << 30) as place:
        store = open_store(f"mooncake://127.0.0.1:{place.port}")
        yield {"mooncake": store}, RawMooncake(place.port, memory)


def compare(
    store: Store, raw: Raw, views: Sequence[memoryview], num_batches: int, rounds: int
) -> dict[str, list[float]]:
    """Return MB/s of both for every round."""
    rates: dict[str, list[float]] = {name: [] for name in ("write", "raw write", "read", "raw read")}
    for number in range(rounds + 1):  # the first round is not counted
        taken = dict.fromkeys(rates, 0.0)
        sets = [[f"{number:08x}{batch:08x}{i:048x}" for i in range(BATCH)] for batch in range(num_batches)]
        for phase in ("write", "read"):
            for batch, names in enumerate(sets):
                for i, view in enumerate(views):
                    view[:8] = (number << 32 | batch << 16 | i).to_bytes(8, "little")
                keys = [bytes.fromhex(name) for name in names]
                writes = [Write(key, LABEL, view) for key, view in zip(keys, views, strict=True)]
                reads = [Read(key, LABEL, view) for key, view in zip(keys, views, strict=True)]
                ours = (lambda w=writes: store.write(w)) if phase == "write" else lambda r=reads: store.read_into(r)  # type: ignore[misc]
                theirs = raw.write if phase == "write" else raw.read
                tasks: dict[str, Callable[[], object]] = {
                    phase: lambda do=ours: check(do()),  # type: ignore[misc]
                    f"raw {phase}": lambda do=theirs, n=names: do([f"raw-{name}" for name in n], views),  # type: ignore[misc]
                }
                turn = list(tasks.items())
                for name, task in turn if (number + batch) % 2 else reversed(turn):
                    begin = time.perf_counter()
                    task()
                    taken[name] += time.perf_counter() - begin
        for names in sets:
            store.remove([bytes.fromhex(name) for name in names])
            raw.remove([f"raw-{name}" for name in names])
        if number:
            for name, seconds in taken.items():
                rates[name].append(num_batches * BATCH * OBJECT_BYTES / seconds / 1e6)
    return rates


def check(results: object) -> None:
    """Raise if a call failed."""
    assert results.ok, [each for each in results if not each.ok][:3]  # type: ignore[attr-defined]


def compare_with_raw(
    place: Callable[[Path, memoryview], contextlib.AbstractContextManager[tuple[dict[str, Store], Raw]]],
    memory: memoryview,
    num_batches: int,
    rounds: int,
) -> tuple[list[Row], list[Bar]]:
    """Compare the stores of one server with its raw client."""
    views = [memory[at : at + OBJECT_BYTES] for at in range(0, len(memory), OBJECT_BYTES)]
    rows: list[Row] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-stores-") as folder, contextlib.ExitStack() as stack:
        try:
            stores, raw = stack.enter_context(place(Path(folder), memory))
        except store_servers.NotInstalled as missing:
            print(f"skipped: {missing}")
            return rows, bars
        for name, store in stores.items():
            stack.callback(store.close)
            rates = compare(store, raw, views, num_batches, rounds)
            for what in ("write", "read"):
                mine, theirs = rates[what], rates[f"raw {what}"]
                share = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
                rows.append(
                    {"store": name, "call": what, "MB/s": statistics.median(mine), "best": max(mine)}
                    | {"raw": statistics.median(theirs), "its best": max(theirs), "share": share}
                    | {"load of the machine": round(os.getloadavg()[0], 1)}
                )
                if "AES" not in name:  # the bar is for work that the raw client does, too
                    bars.append(at_least(f"{name} {what} over its raw client, 1 MiB x {BATCH}", share, 0.8))
    return rows, bars


def main() -> None:
    parser = arguments("Shared stores compared with their raw clients.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=4, help="batches of 32 MiB per round")
    parser.add_argument("--only", default="", help="one of redis_single, redis_cluster, s3, mooncake, ttft, decision")
    options = parser.parse_args()
    memory = memoryview(mmap.mmap(-1, BATCH * OBJECT_BYTES))
    memory[:] = os.urandom(len(memory))
    rows: list[Row] = []
    bars: list[Bar] = []
    for part in (redis_single, redis_cluster, s3, mooncake):
        if options.only in ("", part.__name__):
            more, more_bars = compare_with_raw(part, memory, options.batches, options.rounds)
            rows, bars = [*rows, *more], [*bars, *more_bars]
    print_table(rows)
    for engine_part in (stores_engine.ttft, stores_engine.decision):
        if options.only in ("", engine_part.__name__):
            with tempfile.TemporaryDirectory(prefix="kvtier-stores-") as folder:
                more, more_bars = engine_part(Path(folder), options.rounds)
            print_table(more)
            rows, bars = [*rows, *more], [*bars, *more_bars]
    report("stores", rows, bars, options.results)


if __name__ == "__main__":
    main()
