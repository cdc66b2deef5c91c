"""The planner: hit rates compared with a reference, the duration of a sweep, and the accuracy of the simulation.

python -m benchmarks.replay --trace conversation_trace.jsonl   everything
python -m benchmarks.replay --only honest --seconds 120        only the recorded runs

Accuracy ("honest"): SmolLM2-135M on this CPU, with device, host and disk tiers, serves conversations in real time. Two
such runs are recorded for each number of phases. No simulation can predict the difference between them.

The replay follows each log step by step, where the hits by tier must be equal. It also simulates the same arrivals
without following the log. The simulation gets arrivals, lengths and block names from the run. The times of steps,
copies and disk are fitted to short runs of other conversations, one before each of the two runs
(benchmarks/recorded.py).
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.follow import follow
from benchmarks.recorded import BLOCK, DISK_BLOCKS, Load, Machine, Run, calibration, machine_of, record
from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from kvtier.engine import load_model
from kvtier.replay import OPTIMUM, SyntheticTrace, TraceRequest, generate, read_trace, sweep
from kvtier.replay.planner import capacities
from kvtier.replay.sim_worker import SimulatedStore, SimulatedWorker
from kvtier.replay.simulator import Simulation, Simulator

REFERENCE = {  # of the Mooncake conversation trace, by an independent simulator
    "lru": {1_000: 0.0470, 5_000: 0.1237, 10_000: 0.2243, 30_000: 0.3448, 50_000: 0.3715, 100_000: 0.3795},
    "fifo": {1_000: 0.0470, 5_000: 0.1209, 10_000: 0.2189, 30_000: 0.3426, 50_000: 0.3704, 100_000: 0.3794},
    OPTIMUM: {1_000: 0.1870, 5_000: 0.3541, 10_000: 0.3819, 30_000: 0.3819, 50_000: 0.3819, 100_000: 0.3819},
}
TIERS = ("device", "host", "disk")


def main() -> None:
    parser = arguments("The planner: accuracy and speed.")
    parser.add_argument("--trace", help="the conversation trace")
    parser.add_argument("--only", choices=("hits", "speed", "honest"))
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of each recorded run")
    parser.add_argument("--phases", type=int, nargs="+", default=[1, 2], choices=(1, 2), help="of the recorded runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recorded logs in this new folder")
    options = parser.parse_args()
    parts = [options.only] if options.only else ["hits", "speed", "honest"]
    trace = read_trace(options.trace).requests if options.trace else ()
    rows: list[Row] = []
    bars: list[Bar] = []
    for part in parts:
        if part == "honest":
            more, more_bars = honest(options.seconds, options.phases, options.keep)
        elif part == "speed":
            more, more_bars = speed(trace)
        else:
            more, more_bars = hits(trace) if trace else ([], [])
        print_table(more)
        rows += more
        bars += more_bars
    report("replay", rows, bars, options.results)


def hits(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """Compare hit rates with the reference."""
    rows: list[Row] = []
    found = {
        (point.policy, point.capacity): point.hit_rate
        for point in sweep(trace, list(REFERENCE["lru"]), list(REFERENCE), jobs=2)
    }
    for policy, rates in REFERENCE.items():
        for capacity, rate in rates.items():
            rows.append({"policy": policy, "blocks": capacity, "hit rate": found[policy, capacity], "reference": rate})
    worst = max(abs(float(str(row["hit rate"])) - float(str(row["reference"]))) for row in rows) * 100
    return rows, [at_most("hit rates: farthest from the reference, points", worst, 0.3)]


def speed(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """Measure a sweep of 20 capacities by 3 policies, and one over ten times the requests, in this process only: it
    has torch and cannot be forked. The command line uses all cores."""
    rows: list[Row] = []
    bars: list[Bar] = []
    if trace:
        seconds = _sweep_seconds(trace, ("lru", "arc", "s3fifo"))
        rows.append({"trace": "conversation", "requests": len(trace), "seconds": seconds, "MiB": _most_mib()})
        bars.append(at_most("sweep of 20 capacities by 3 policies, s", seconds, 60))
        bars.append(at_most("its memory, MiB", _most_mib(), 1024))
    taken = {}
    for times in (1, 10):
        requests = tuple(generate(SyntheticTrace(sessions=1500 * times)))
        taken[times] = _sweep_seconds(requests, ("lru", "arc", OPTIMUM))
        rows.append({"trace": "generated", "requests": len(requests), "seconds": taken[times], "MiB": _most_mib()})
    return rows, [*bars, at_most("ten times the requests, times as long", taken[10] / taken[1], 12)]


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _sweep_seconds(trace: Sequence[TraceRequest], policies: Sequence[str]) -> float:
    distinct = len({id for request in trace for id in request.prompt_ids})
    begin = time.perf_counter()
    points = sweep(trace, capacities(distinct), policies, jobs=1)
    assert len(points) == 20 * len(policies)
    return time.perf_counter() - begin


# ---- honest --------------------------------------------------------------------------------------------------------


def honest(seconds: float, phases: Sequence[int], keep: Path | None = None) -> tuple[list[Row], list[Bar]]:
    """Warm up, calibrate and record twice, follow, simulate and compare, for each number of phases."""
    model = load_model()
    torch.set_num_threads(1)
    rows: list[Row] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record(model, folder / "warm up", Load(5, seconds / 12, 2.0))
        for count in phases:
            runs, short = [], []
            for name in ("run", "again"):  # a shared machine changes from minute to minute
                before = folder / f"before {name}, {count} phases"
                short.append(calibration(model, before, 10 + len(short), seconds / 5, count))
                runs.append(record(model, folder / f"{name}, {count} phases", Load(2, seconds, 1.1), phases=count))
            more, more_bars = _judge(runs, machine_of(short))
            what = f", {count} phases" if count > 1 else ""
            rows += [{**row, "figure": f"{row['figure']}{what}"} for row in more]
            bars += [replace(bar, name=bar.name + what) for bar in more_bars]
    return rows, bars


def _judge(runs: Sequence[Run], machine: Machine) -> tuple[list[Row], list[Bar]]:
    followed = [follow(run.log, run.cache, run.scheduler) for run in runs]
    num_wrong = sum(
        found.tokens_from[name] != logged.tokens_from
        for run, found in zip(runs, followed, strict=True)
        for name, logged in run.log.requests.items()
    )
    rows, bars = compare(runs, [free(run, machine) for run in runs])
    cost = machine.cost
    steps = [(sum(s for _, s in found.steps), sum(cost.seconds(w) for w, _ in found.steps)) for found in followed]
    rows.append(_row("seconds of all steps", *steps[0], *steps[1]))
    rows.append(_row("share of time that is steps", runs[0].busy_share, None, runs[1].busy_share, None))
    rows.append(_row("cores that others used", runs[0].others, None, runs[1].others, None))
    rows.append(_row("requests", len(runs[0].ttfts), None, len(runs[1].ttfts), None))
    return rows, [at_most("followed: requests whose hits by tier differ", num_wrong, 0), *bars]


def free(run: Run, machine: Machine) -> Simulation:
    """Simulate the same arrivals on hardware of the measured speed."""
    worker = SimulatedWorker(
        run.block_bytes,
        machine.link_bandwidth,
        latency_seconds=machine.link_latency,
        disk=machine.disk,
        stores={"disk": SimulatedStore(DISK_BLOCKS)},
    )
    cost, sizes = machine.cost.seconds, {"block_tokens": BLOCK, "num_layers": 30}
    simulator = Simulator(run.cache, run.scheduler, cost, worker, **sizes, phases=run.phases)
    return simulator.run(run.log.trace)


def compare(runs: Sequence[Run], simulated: Sequence[Simulation]) -> tuple[list[Row], list[Bar]]:
    """Compare each run with its simulation, and the runs with each other. The worse of the two counts."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for tier in TIERS:
        real = [run.hit_rate(tier) * 100 for run in runs]
        ours = [_hit_rate(each, tier) * 100 for each in simulated]
        rows.append(_row(f"hits, {tier}, %", real[0], ours[0], real[1], ours[1]))
        off = max(abs(a - b) for a, b in zip(real, ours, strict=True))
        bars.append(at_most(f"free: hits of {tier}, points off", off, 2))
    for share in (50, 90, 99):
        real = [float(np.percentile(run.ttfts, share)) for run in runs]
        ours = [float(np.percentile([one.ttft or 0.0 for one in each.requests], share)) for each in simulated]
        rows.append(_row(f"TTFT p{share}, s", real[0], ours[0], real[1], ours[1]))
        off = max(abs(b / a - 1) * 100 for a, b in zip(real, ours, strict=True))
        if share != 90:
            bars.append(at_most(f"free: TTFT p{share}, % off", off, 10))
    return rows, bars


def _row(figure: str, run: float, simulated: float | None, again: float | None, simulated_again: float | None) -> Row:
    values = {"run": run, "simulated": simulated, "run again": again, "simulated again": simulated_again}
    return {"figure": figure, **{name: "" if value is None else value for name, value in values.items()}}


def _hit_rate(simulated: Simulation, tier: str) -> float:
    found = sum(each.tokens_from.get(tier, 0) for each in simulated.requests)
    return found / sum(each.prompt_tokens for each in simulated.requests)


if __name__ == "__main__":
    main()
