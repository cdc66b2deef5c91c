"""The worker side of the vLLM connector without vLLM, over tensors in vLLM's layouts.

python -m benchmarks.vllm_worker                 all parts on the GPU
python -m benchmarks.vllm_worker --device cpu    without the parts that need a GPU

    step without transfers    cost of the worker's calls
    recorded steps            rates of the transfers of real steps, 1 to 14 blocks each, one step after the other
    1 GiB of blocks           share of the link, for scattered blocks (GPU)
    matrix products           loss of compute while 1 GiB moves (GPU)
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.index import Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.layouts import device_cache_of
from kvtier.integrations.vllm.worker_side import Load, StepPlan, WorkerSide
from kvtier.messages import Plan, Route, TransferRequest, TransferResult, slot_bytes
from kvtier.transfer import DeviceCache
from kvtier.worker.sharding import Sharding

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from vllm_views import NUM_DEVICE_BLOCKS, NUM_HOST_SLOTS, cache_views, recorded_steps

# Llama-3-8B and DeepSeek's latent in bf16, blocks of 16 tokens, 2 GiB of device blocks.
LLAMA = {"L": 32, "B": 1024, "H": 8, "N": 16, "C": 256}
MLA = {"L": 61, "B": 1024, "H": 1, "N": 16, "C": 576}
CASES: dict[str, tuple[str, Mapping[str, int]]] = {
    "LBNHC": ("LBNHC", LLAMA),
    "LBHNC": ("LBHNC", LLAMA),
    "BLHNC": ("BLHNC", LLAMA),
    "MLA": ("LBNHC", MLA),
}
MOVED_BYTES = 1 << 30
ROUNDS = 5


def main() -> None:
    parser = arguments("The worker side of the vLLM connector.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    rows, bars = measure_idle(options.device)
    rows += measure_recorded(options.device)
    if options.device == "cuda":
        more_rows, more_bars = measure_gpu()
        rows, bars = [*rows, *more_rows], [*bars, *more_bars]
    report(f"vllm_worker_{options.device}", rows, bars, options.results)


def make_worker(
    case: str, device: str, num_blocks: int | None = None, num_slots: int | None = None
) -> tuple[WorkerSide, DeviceCache]:
    layout, sizes = CASES[case]
    sizes = {**sizes, "B": num_blocks or sizes["B"]}
    views = cache_views(layout, sizes, torch.bfloat16, device)
    cache, _ = device_cache_of(views, list(views), sizes["B"], has_heads=case != "MLA")
    config = ConnectorConfig(host_bytes=cache.group.slot_bytes * (num_slots or sizes["B"]))
    worker = WorkerSide(config, Namespace("model", block_tokens=16), cache, Sharding())
    worker.controller._hosts[0].wait_ready()
    return worker, cache


def measure_idle(device: str) -> tuple[list[Row], list[Bar]]:
    """Measure the calls of a step without transfers."""
    worker, _ = make_worker("BLHNC", device, num_blocks=16)
    step, taken = StepPlan(Plan(1, 0)), []
    for _ in range(5000):
        start = time.perf_counter()
        worker.begin_step(step)
        worker.start_early(step)
        worker.start_loads(step)
        worker.start_others(step)
        worker.poll(is_idle=False)
        taken.append(time.perf_counter() - start)
    worker.close()
    microseconds = statistics.median(taken) * 1e6
    rows: list[Row] = [{"case": "step without transfers", "us": microseconds, "p99 us": np.quantile(taken, 0.99) * 1e6}]
    print_table(rows)
    return rows, [at_most("step without transfers, us", microseconds, 30)]


def measure_recorded(device: str) -> list[Row]:
    """Measure the transfers of recorded steps. Each step begins after the transfers of the step before."""
    rows: list[Row] = []
    for name in CASES:
        worker, _ = make_worker(name, device, NUM_DEVICE_BLOCKS, NUM_HOST_SLOTS)
        rates: dict[Route, list[float]] = {Route.DEVICE_TO_HOST: [], Route.HOST_TO_DEVICE: []}
        for attempt in range(2):  # the first one warms up
            for step in recorded_steps():
                routes = {transfer.id: transfer.route for transfer in step.plan.transfers}
                for result in run_step(worker, step):
                    if attempt:
                        rates[routes[result.transfer_id]].append(result.num_bytes / result.seconds / 1e9)
        worker.close()
        rows += [
            {
                "layout": name,
                "route": f"{route.value}, recorded steps",
                "transfers": len(each),
                "GB/s p50": statistics.median(each),
                "GB/s p10": float(np.quantile(each, 0.1)),
            }
            for route, each in rates.items()
        ]
    print_table(rows)
    return rows


def run_step(worker: WorkerSide, step: StepPlan) -> list[TransferResult]:
    """Run a step and return the results of its transfers, which must succeed."""
    worker.begin_step(step)
    worker.start_early(step)
    worker.start_loads(step)
    worker.start_others(step)
    results: list[TransferResult] = []
    while len(results) < len(step.plan.transfers):
        results += [result for report in worker.poll(is_idle=True).reports for result in report.results]
    assert all(result.ok for result in results), results
    return results


def measure_gpu() -> tuple[list[Row], list[Bar]]:
    from benchmarks.transfer_cases import Case, Link
    from benchmarks.transfer_overlap import Products, measure_overlap
    from kvtier.transfer.block_view import Direction

    link, rows, overlaps, bars = Link(), [], [], []
    for name in CASES:
        worker, cache = make_worker(name, "cuda")
        limits = {way: min(link.seconds(way, MOVED_BYTES) for _ in range(3)) for way in Direction}
        for route, way in ((Route.DEVICE_TO_HOST, Direction.D2H), (Route.HOST_TO_DEVICE, Direction.H2D)):
            shares = []
            for attempt in range(ROUNDS + 1):
                result, wall = move(worker, cache, route, attempt)
                expected = limits[way] * result.num_bytes / MOVED_BYTES
                if attempt:
                    shares.append((expected / result.seconds, expected / wall))
            of_link, of_link_wall = (statistics.median(each) for each in zip(*shares, strict=True))
            rows.append({"layout": name, "route": route.value, "of link": of_link, "of link, wall": of_link_wall})
            limit = 0.95 if name == "BLHNC" else 0.93
            bars.append(at_least(f"{name} {route.value}: share of the link", of_link, limit))
        case = Case(name, name, cache.group, worker.controller._transfers, cache, worker.controller._hosts[0])
        for way in Direction:
            row = measure_overlap(case, way, link, "matrix products", Products())
            overlaps.append(row)
            bars.append(at_most(f"{name} {way}: compute lost", float(str(row["lost"])), 0.03))
        worker.close()
        del worker, cache, case
        torch.cuda.empty_cache()
    print_table(rows)
    print_table(overlaps)
    return [*rows, *overlaps], bars


def move(worker: WorkerSide, cache: DeviceCache, route: Route, seed: int) -> tuple[TransferResult, float]:
    """Move 1 GiB of scattered blocks in one step. Return the result, and the seconds from the submission to it."""
    choose = np.random.default_rng(seed)
    count = MOVED_BYTES // cache.group.block_bytes
    device, host = (choose.permutation(cache.num_blocks)[:count].astype(np.int32) for _ in range(2))
    is_load = route is Route.HOST_TO_DEVICE
    sources, targets = (host, device) if is_load else (device, host)
    ends = ("host", "device") if is_load else ("device", "host")
    transfer = TransferRequest(seed + 1, route, *ends, slot_bytes(sources), slot_bytes(targets))
    loads = {transfer.id: Load("request", tuple(device.tolist()))} if is_load else {}
    step = StepPlan(Plan(1, 0, (transfer,)), loads, is_idle=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    (result,) = run_step(worker, step)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
