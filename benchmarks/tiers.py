"""Tiers: the disk store compared with plain pread and pwrite, and with fio if installed; the encrypted disk store
compared with the plain one; and the CPU time of a manager with three tiers compared with the plain index.

python -m benchmarks.tiers --folder /mnt/nvme/tmp          a folder on the disk to measure; made and removed
python -m benchmarks.tiers --only encryption
python -m benchmarks.tiers --only deciding --trace conversation_trace.jsonl

Objects of 1 MiB in batches of 32; plain calls and fio use the number of threads of the store and files allocated in the
same way. The plain calls and the store alternate batch by batch, and fio runs once per round, so that noise affects
all. A share compares the rates of one round, and the median of the shares counts, because the speed of this disk drifts
by a factor of two within a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.index import POOL_TOKENS, run_one, tree
from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import Chain, Namespace
from kvtier.messages import Report, StoreLookup, TransferResult
from kvtier.replay import SyntheticTrace, TraceRequest, generate, read_trace
from kvtier.storage import DiskStore, Label, Read, Results, Sync, Write
from kvtier.storage.checksum import checksum, checksum_in_python, native
from kvtier.storage.disk.store import default_threads

OBJECT_BYTES = 1 << 20
BATCH = 32
LABEL = Label(bytes(32))
_PLACEMENTS = 6
"""Number of times that the files of the encrypted and the plain store are made again. Parts of a virtual disk differ in
speed by a factor of two, so one pair of files would measure the place and not the store."""


def main() -> None:
    parser = arguments("Disk tier compared with plain I/O.")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure"
    )
    parser.add_argument("--bytes", type=int, default=256 << 20, help="per round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--trace", help="a Mooncake trace for the manager; default: a synthetic one")
    parser.add_argument("--only", choices=("disk", "encryption", "deciding"), help="run only this part")
    options = parser.parse_args()
    rows: list[Row] = []
    bars: list[Bar] = []
    if options.only in (None, "disk"):
        rows, bars = on_disk(options)
    if options.only in (None, "encryption"):
        more, more_bars = encryption(options)
        print_table(more)
        rows, bars = [*rows, *more], [*bars, *more_bars]
    if options.only in (None, "deciding"):
        more, more_bars = deciding(read_trace(options.trace).requests if options.trace else generate(SyntheticTrace()))
        print_table(more)
        rows, bars = [*rows, *more], [*bars, *more_bars]
    report("tiers", rows, bars, options.results)


def on_disk(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Run all measurements of the disk store."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-tiers-", dir=options.folder))
    rows: list[Row] = []
    bars: list[Bar] = []
    try:
        for direct in (True, False):
            for sync in Sync:
                more, more_bars = disk(folder, direct, sync, options.bytes, options.rounds, options.threads)
                rows += more
                bars += more_bars if direct else []
        print_table(rows)
        for others, more_bars in (checksums(), opening(folder)):
            print_table(others)
            rows += others
            bars += more_bars
    finally:
        shutil.rmtree(folder)
    return rows, bars


class RawDisk:
    """A preallocated file, read and written by threads with plain preadv and pwritev."""

    def __init__(self, path: Path, nbytes: int, num_threads: int, *, direct: bool) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._done.put(None)

    def batch(self, call: Callable[..., int], views: Sequence[memoryview], first: int, *, sync: bool) -> float:
        """Run one call per piece of memory, each at its offset. Return the seconds."""
        begin = time.perf_counter()
        for number, view in enumerate(views, first):
            offset = number * OBJECT_BYTES
            self._jobs.put(lambda view=view, offset=offset: call(self._descriptor, [view], offset))  # type: ignore[misc]
        for _ in views:
            self._done.get()
        if sync:
            os.fdatasync(self._descriptor)
        return time.perf_counter() - begin

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._descriptor)


def disk(
    folder: Path, direct: bool, sync: Sync, nbytes: int, rounds: int, num_threads: int
) -> tuple[list[Row], list[Bar]]:
    """Measure the store and plain calls, alternating."""
    batches = range(0, nbytes // OBJECT_BYTES, BATCH)
    memory = mmap.mmap(-1, BATCH * OBJECT_BYTES)
    memory[:] = os.urandom(len(memory))
    views = [memoryview(memory)[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] for i in range(BATCH)]
    rates: dict[str, list[float]] = {name: [] for name in ("write", "raw write", "read", "raw read")}
    with_fio = direct and shutil.which("fio") is not None
    raw = RawDisk(folder / "raw", 2 * nbytes, num_threads, direct=direct)
    store = DiskStore(folder / "store", 2 * nbytes, direct=direct, sync=sync, num_threads=num_threads)
    try:
        for number in range(rounds + 2):  # the first two rounds, on new slots, are not counted
            taken = dict.fromkeys(("write", "raw write", "read", "raw read"), 0.0)
            half = (
                number % 2 * len(batches) * BATCH
            )  # as in the store, a new object has another slot than the one it replaces
            for first in batches:
                keys = [(first + i).to_bytes(32, "little") for i in range(BATCH)]
                for i, view in enumerate(views):
                    view[:8] = (number << 32 | (first + i)).to_bytes(8, "little")  # a different object each time
                writes = [Write(key, LABEL, view) for key, view in zip(keys, views, strict=True)]
                taken["write"] += store.write(writes).seconds
                taken["raw write"] += raw.batch(os.pwritev, views, half + first, sync=sync is Sync.WRITE)
            for first in batches:
                reads = [Read((first + i).to_bytes(32, "little"), LABEL, view) for i, view in enumerate(views)]
                taken["read"] += store.read_into(reads).seconds
                taken["raw read"] += raw.batch(os.preadv, views, half + first, sync=False)
            if number > 1:
                for name, seconds in taken.items():
                    rates[name].append(nbytes / seconds / 1e9)
            for what in ("write", "read") if with_fio and number > 1 else ():
                rates.setdefault(f"fio {what}", []).append(fio(folder, what, nbytes, num_threads, sync))
        assert store.is_direct == direct, "the filesystem refuses O_DIRECT"
        calls = (rounds + 2) * len(batches) * BATCH
        assert store.stats.writes.num_done == store.stats.reads.num_done == calls, store.stats
    finally:
        store.close()
        raw.close()
        shutil.rmtree(folder / "store")
        (folder / "raw").unlink()
    return compare(rates, f"{'O_DIRECT' if direct else 'page cache'}, sync at {sync.value}")


def compare(rates: dict[str, list[float]], setting: str) -> tuple[list[Row], list[Bar]]:
    """Return the rates, and the shares by round."""
    rows: list[Row] = []
    bars = []
    for other in ("raw", "fio"):
        for what in ("write", "read") if f"{other} read" in rates else ():
            ours, theirs = rates[what], rates[f"{other} {what}"]
            share = statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True))
            rows.append(
                {"setting": setting, "call": what, "median GB/s": statistics.median(ours), "best": max(ours)}
                | {"beside": other, "its median": statistics.median(theirs), "its best": max(theirs), "share": share}
            )
            bars.append(at_least(f"disk {what} over {other}, 1 MiB, {setting}", share, 0.8))
    return rows, bars


def fio(folder: Path, what: str, nbytes: int, num_threads: int, sync: Sync) -> float:
    """Return GB/s of fio with O_DIRECT, 1 MiB and the same number of threads, in an existing file; if writes are
    synced, with an fdatasync per batch."""
    command = [
        *("fio", "--name=kvtier", f"--filename={folder / 'fio'}", f"--rw={what}", "--bs=1M", "--direct=1"),
        *("--ioengine=psync", "--thread", f"--numjobs={num_threads}", f"--size={nbytes // num_threads}"),
        *(f"--offset_increment={nbytes // num_threads}", "--overwrite=1", "--group_reporting", "--output-format=json"),
        *((f"--fdatasync={BATCH}",) if sync is Sync.WRITE and what == "write" else ()),
    ]
    output = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return float(output["jobs"][0][what]["bw_bytes"]) / 1e9


def encryption(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Measure the encrypted and the plain store, alternating batch by batch."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-tiers-", dir=options.folder))
    rows: list[Row] = []
    bars: list[Bar] = []
    try:
        for direct in (True, False):
            rates: dict[tuple[str, str], list[float]] = {}
            for placement in range(_PLACEMENTS):
                rounds = max(1, options.rounds // _PLACEMENTS)
                some = encrypted_rates(folder, direct, options.bytes, rounds, options.threads, placement % 2 == 0)
                for each, values in some.items():
                    rates.setdefault(each, []).extend(values)
            setting = f"encrypted, {'O_DIRECT' if direct else 'page cache'}"
            for call in ("write", "read"):
                ours, plain = rates["encrypted", call], rates["plain", call]
                share = statistics.median(mine / its for mine, its in zip(ours, plain, strict=True))
                rows.append(
                    {"setting": setting, "call": call, "median GB/s": statistics.median(ours), "best": max(ours)}
                    | {"beside": "plain", "its median": statistics.median(plain), "its best": max(plain)}
                    | {"share": share, "load": os.getloadavg()[0]}
                )
                bars.append(at_least(f"disk {call} over plain, 1 MiB, {setting}", share, 0.7))
    finally:
        shutil.rmtree(folder)
    return rows, bars


def encrypted_rates(
    folder: Path, direct: bool, nbytes: int, rounds: int, num_threads: int, is_first: bool
) -> dict[tuple[str, str], list[float]]:
    """Return GB/s by store and call, one per round. `is_first`: the files of the encrypted store are made first."""
    memory = mmap.mmap(-1, BATCH * OBJECT_BYTES)
    memory[:] = os.urandom(len(memory))
    views = [memoryview(memory)[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] for i in range(BATCH)]
    stores = {
        name: DiskStore(folder / name, 2 * nbytes, direct=direct, num_threads=num_threads, secret=secret)
        for name, secret in (("encrypted", os.urandom(32)), ("plain", None))[:: 1 if is_first else -1]
    }
    rates: dict[tuple[str, str], list[float]] = {(name, call): [] for name in stores for call in ("write", "read")}
    for number in range(rounds + 2):  # the first two rounds, on new slots, are not counted
        taken = dict.fromkeys(rates, 0.0)
        order = list(stores)[:: 1 if number % 2 else -1]
        for first in range(0, nbytes // OBJECT_BYTES, BATCH):
            keys = [(first + i).to_bytes(32, "little") for i in range(BATCH)]
            for i, view in enumerate(views):
                view[:8] = (number << 32 | (first + i)).to_bytes(8, "little")  # a different object each time
            for name in order:
                writes = [Write(key, LABEL, view) for key, view in zip(keys, views, strict=True)]
                taken[name, "write"] += check(stores[name].write(writes)).seconds
        for first in range(0, nbytes // OBJECT_BYTES, BATCH):
            for name in order:
                reads = [Read((first + i).to_bytes(32, "little"), LABEL, view) for i, view in enumerate(views)]
                taken[name, "read"] += check(stores[name].read_into(reads)).seconds
        if number > 1:
            for each, seconds in taken.items():
                rates[each].append(nbytes / seconds / 1e9)
    for name, store in stores.items():
        assert store.is_direct == direct, "the filesystem refuses O_DIRECT"
        store.close()
        shutil.rmtree(folder / name)
    return rates


def checksums() -> tuple[list[Row], list[Bar]]:
    """Measure checksums on one core, of 1 MiB in its cache."""
    data = memoryview(os.urandom(OBJECT_BYTES))
    tasks = {"in C": checksum, "twin (zlib, numpy)": checksum_in_python}
    best = {name: min(timed(lambda task=task: task(data)) for _ in range(100)) for name, task in tasks.items()}  # type: ignore[misc]
    rows: list[Row] = [{"checksum": name, "GB/s": OBJECT_BYTES / seconds / 1e9} for name, seconds in best.items()]
    print(native().reason)
    return rows, [at_least("checksum GB/s on one core", OBJECT_BYTES / best["in C"] / 1e9, 5)]


def opening(folder: Path) -> tuple[list[Row], list[Bar]]:
    """Measure the seconds to open a store of 50,000 objects; payloads are not read."""
    count = 50_000
    settings = {"max_bytes": 1 << 30, "direct": False}
    store = DiskStore(folder / "many", **settings)  # type: ignore[arg-type]
    payload = bytes(4096)
    for first in range(0, count, 1000):
        check(store.write([Write(i.to_bytes(32, "little"), LABEL, payload) for i in range(first, first + 1000)]))
    store.close()
    begin = time.perf_counter()
    store = DiskStore(folder / "many", **settings)  # type: ignore[arg-type]
    seconds = time.perf_counter() - begin
    assert store.stats.num_objects == count
    store.close()
    return [{"objects": count, "open s": seconds, "us each": seconds / count * 1e6}], [
        at_most("seconds to open a store of 50,000 objects", seconds, 5)
    ]


def deciding(trace: Iterable[TraceRequest], rounds: int = 5) -> tuple[list[Row], list[Bar]]:
    """Compare the CPU time of a request in a manager with device, host and disk, whose transfers are reported at once,
    with match, allocate, publish and release of the plain index with the same device.

    Both alternate batch by batch; the best time of each batch counts. The device has 5 M tokens, the host 10 M.
    """
    requests = list(trace)
    rows: list[Row] = []
    for block_tokens, some in ((512, requests), (64, requests[:2000])):
        num_blocks = POOL_TOKENS // block_tokens
        starts = range(0, len(some), BATCH)
        names = ("index", "three tiers")
        best = {name: [math.inf] * len(starts) for name in names}
        for _ in range(rounds):
            index, manager = tree(block_tokens, num_blocks), three_tiers(block_tokens, num_blocks)
            tasks = dict(
                zip(names, (functools.partial(run_one, index), functools.partial(decide, manager)), strict=True)
            )
            for number, start in enumerate(starts):
                prompts = [request.tokens() for request in some[start : start + BATCH]]
                for name, task in tasks.items():
                    begin = time.thread_time()
                    for prompt in prompts:
                        task(prompt)
                    best[name][number] = min(best[name][number], time.thread_time() - begin)
        bare, whole = (sum(best[name]) / len(some) * 1e6 for name in names)
        hits = {tier.name: tier.hit_tokens / manager.stats.queried_tokens for tier in manager.stats.tiers}
        rows.append({"block": block_tokens, "index us": bare, "three tiers us": whole, "times": whole / bare, **hits})
    return rows, [
        at_most(
            f"{row['block']}: a request in the manager of three tiers, times the bare index",
            float(str(row["times"])),
            2,
        )
        for row in rows
    ]


def three_tiers(block_tokens: int, num_blocks: int) -> CacheManager:
    """Return a manager with a device, twice the host memory, and a disk."""
    config = CacheConfig(num_blocks, host=HostConfig(2 * num_blocks), stores=(StoreConfig("disk"),))
    return CacheManager(Namespace("benchmark", block_tokens=block_tokens), config)


def decide(manager: CacheManager, prompt: Any) -> None:
    """Run a request from its tokens to its end, with its plans."""
    chain = Chain(manager.namespace, prompt)
    fetch = manager.prefetch(chain)
    obey(manager)
    hold = manager.match(chain, prefetch=fetch)
    assert fetch is not None
    manager.end_prefetch(fetch)
    shortage = manager.allocate(hold, chain.num_tokens)
    assert shortage is None, shortage
    obey(manager)
    assert manager.is_ready(hold)
    manager.on_scheduled(hold)
    manager.publish(hold, chain.num_tokens)
    manager.finish(hold)


def obey(manager: CacheManager) -> None:
    """Report every planned transfer as done. The disk is empty at first."""
    plan = manager.plan()
    if plan:
        results = tuple(TransferResult(each.id, True, each.num_blocks << 20, 1e-3) for each in plan.transfers)
        lookups = tuple(StoreLookup(probe.store, probe_id=probe.id) for probe in plan.probes)
        manager.apply(Report(plan.epoch, 0, results, lookups))


def timed(task: Callable[[], object]) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def check(results: Results) -> Results:
    """Return the results. Raise if an object failed."""
    assert results.ok, results
    return results


if __name__ == "__main__":
    main()
