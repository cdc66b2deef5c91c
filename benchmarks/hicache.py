"""The SGLang backend: rate of 1 GiB of pages on disk, and the longest call to a store that fails.

PYTHONPATH=.:tests python -m benchmarks.hicache

rate      Pages of 2 MiB in two pieces (page_first) and in 64 pieces (layer_first), in calls of 128 pages as SGLang
          makes them, against `open_store` with one contiguous buffer. Every round has new folders and another order of
          the cases.
deadline  A Redis server behind a proxy that refuses, hangs, delays or damages answers: seconds of the longest call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.report import Row, arguments, at_least, at_most, print_table, report
from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.page_store import PageStore
from kvtier.storage import Label, Read, Store, Write, open_store

PAGE_BYTES, CALL = 2 << 20, 128
PIECES = {"page_first": 2, "layer_first": 64}
TIMEOUT = 1.0


class Pool:
    """Host memory with the attributes that the backend reads: `pieces` parts, each with all pages."""

    page_size, layer_num, dtype = 64, 32, torch.bfloat16

    def __init__(self, layout: str, num_pages: int) -> None:
        self.layout, pieces = layout, PIECES[layout]
        self.kv_buffer = torch.randint(0, 256, (pieces, num_pages, PAGE_BYTES // pieces), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, (pieces, num_pages, nbytes) = self.kv_buffer.data_ptr(), self.kv_buffer.shape
        pages = [index // self.page_size for index in indices[:: self.page_size].tolist()]
        starts = [base + (part * num_pages + page) * nbytes for page in pages for part in range(pieces)]
        return starts, [nbytes] * len(starts)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--folder", help="folder on the disk to measure; default: a temporary folder")
    options = parser.parse_args()
    rows: list[Row] = []
    pools = {layout: Pool(layout, options.pages) for layout in PIECES}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(-1, options.rounds):  # the first round warms up
            cases = ["contiguous", *PIECES]
            for case in cases[number % 3 :] + cases[: number % 3]:
                cpu = time.process_time()
                measure, pool = (_backend, pools[case]) if case in PIECES else (_contiguous, pools["page_first"])
                row = {"round": number, "case": case, **measure(Path(folder), pool)}
                row |= {"cpu s": round(time.process_time() - cpu, 2), "load": round(os.getloadavg()[0], 1)}
                rows += [row] if number >= 0 else []
    print_table(rows)
    rates = {
        (case, kind): statistics.median(float(str(row[f"{kind} MB/s"])) for row in rows if row["case"] == case)
        for case in ("contiguous", *PIECES)
        for kind in ("write", "read")
    }
    bars = [
        at_least(f"{kind} of {case} pages over one contiguous buffer", rate / rates["contiguous", kind], 0.8)
        for (case, kind), rate in rates.items()
        if case != "contiguous"
    ]
    longest = list(_deadlines())
    print_table(longest)
    bars.append(
        at_most(
            "longest call to a failing store over its deadline", max(float(str(row["share"])) for row in longest), 1.0
        )
    )
    report("hicache", [*rows, *longest], bars, options.results)


def _url(folder: Path) -> str:
    return f"disk:{folder / uuid.uuid4().hex}?bytes=4GiB&free=0"


def _figures(write_seconds: float, read_seconds: float, nbytes: int) -> dict[str, float]:
    return {"write MB/s": round(nbytes / write_seconds / 1e6, 1), "read MB/s": round(nbytes / read_seconds / 1e6, 1)}


def _contiguous(folder: Path, pool: Pool) -> dict[str, float]:
    """Write and read pages that are contiguous in memory, with the store's own calls."""
    num_pages = pool.kv_buffer.shape[1]
    memory = [memoryview(page) for page in pool.kv_buffer.view(num_pages, PAGE_BYTES).numpy()]
    label = Label(bytes(32))
    store: Store = open_store(_url(folder))
    keys = [number.to_bytes(32, "little") for number in range(num_pages)]
    calls = [range(first, min(first + CALL, num_pages)) for first in range(0, num_pages, CALL)]
    begin = time.perf_counter()
    for call in calls:
        assert store.write([Write(keys[page], label, memory[page]) for page in call], timeout_s=60.0).ok
    middle = time.perf_counter()
    for call in calls:
        assert store.read_into([Read(keys[page], label, memory[page]) for page in call], timeout_s=60.0).ok
    end = time.perf_counter()
    store.close()
    _remove(folder)
    return _figures(middle - begin, end - middle, num_pages * PAGE_BYTES)


def _backend(folder: Path, pool: Pool) -> dict[str, float]:
    num_pages = pool.kv_buffer.shape[1]
    settings = HiCacheSettings((_url(folder),), revision="1", timeout_s=60.0)
    pages = PageStore(settings, RankIdentity("model"))
    pages.add_pool(pool)
    hashes = [f"{number:064x}" for number in range(num_pages)]
    indices = torch.arange(num_pages * pool.page_size)
    calls = [slice(first, min(first + CALL, num_pages)) for first in range(0, num_pages, CALL)]
    begin = time.perf_counter()
    for call in calls:
        assert all(pages.set(hashes[call], indices[call.start * pool.page_size : call.stop * pool.page_size]))
    middle = time.perf_counter()
    for call in calls:
        assert all(pages.get(hashes[call], indices[call.start * pool.page_size : call.stop * pool.page_size]))
    end = time.perf_counter()
    pages.close()
    _remove(folder)
    return _figures(middle - begin, end - middle, num_pages * PAGE_BYTES)


def _remove(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each)


def _deadlines() -> Iterator[Row]:
    from store_proxy import Faults, Proxy
    from store_servers import redis_server

    faults = {
        "dead": Faults(refuses=1 << 20),
        "hanging": Faults(hangs=True),
        "slow": Faults(delay_s=2.0),
        "corrupt": Faults(flips=tuple(range(4000, 400_000, 900))),
    }
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as port:
        for name, fault in faults.items():
            with contextlib.closing(Proxy(port)) as proxy:
                yield {"fault": name, **_longest(proxy, fault)}


def _longest(proxy: object, fault: object) -> dict[str, object]:
    """Call a store behind a faulty proxy for 10 seconds. `share` is the longest call over its deadline."""
    proxied: object = proxy
    url = f"redis://127.0.0.1:{proxied.port}?prefix={uuid.uuid4().hex}:&timeout=5s"  # type: ignore[attr-defined]
    settings = HiCacheSettings((url,), revision="1", timeout_s=TIMEOUT)
    pages, pool = PageStore(settings, RankIdentity("model")), Pool("page_first", 8)
    pages.add_pool(pool)
    hashes, indices = [f"{number:064x}" for number in range(8)], torch.arange(8 * pool.page_size)
    pages.set(hashes, indices)
    proxied.set(fault)  # type: ignore[attr-defined]
    deadline, shares, num_ok = settings.deadline(8 * PAGE_BYTES), [], 0
    give_up = time.monotonic() + 10.0
    while time.monotonic() < give_up:
        for limit, call in (
            (TIMEOUT, lambda: pages.exists(hashes)),
            (deadline, lambda: pages.get(hashes, indices)),
            (deadline, lambda: pages.set(hashes, indices)),
        ):
            begin = time.perf_counter()
            num_ok += sum(call())
            shares.append((time.perf_counter() - begin) / limit)
    pages.close()
    return {"calls": len(shares), "ok": num_ok, "errors": sum(pages.errors.values()), "share": round(max(shares), 3)}


if __name__ == "__main__":
    main()
