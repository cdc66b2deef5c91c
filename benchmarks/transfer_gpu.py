"""The GPU part of benchmarks/transfer.py: all measurements of issue 6, with its bars. Medians of device times.

"host us" is the host time to compile and submit a transfer, divided by its number of copies. Copies are passed to the
driver in a batch call, or to the gather kernel in its parameters. The time is measured as the median of bursts of
several transfers, and as the median of single transfers after 20 ms of waiting.

The cores of this machine are hyperthreads. If the sibling of a core is busy, everything on the core takes twice as long
for seconds, the driver's call as well as a Python loop. The bar therefore applies to bursts on a core whose sibling is
idle at that moment, which a fixed loop detects. "anywhere" is measured without pinning the thread. "raw host us" is the
time of the driver's call alone, in both places.

"wall" is the device time of the limit divided by the wall time of a transfer that starts at once, from the ids to the
report.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import Bar, Row, at_least, at_most, print_table
from benchmarks.transfer_cases import (
    FORMS,
    GPU,
    LARGE,
    NO_WAIT,
    ROUNDS,
    SHAPES,
    SMALL,
    Case,
    Link,
    make_case,
    num_copies,
    spin,
)
from benchmarks.transfer_overlap import Products, Vectors, measure_layers, measure_overlap
from benchmarks.transfer_peers import AncestorSwap
from kvtier.memory import Event, calibrate, cost_table
from kvtier.transfer import CompiledTransfer, TransferHandle
from kvtier.transfer.block_view import Direction

BURST = 4  # transfers per burst
MANY = 512  # copies; below this the fixed cost of a transfer dominates, because each copy has at least 8 MiB


def measure_gpu() -> tuple[list[Row], list[Bar]]:
    """Run all measurements; the bars are those of issue 6."""
    seconds = calibrate(GPU).seconds
    link = Link()
    compute = {"GEMM": Products(), "GEMV": Vectors()}
    alone: list[Row] = []
    overlapped: list[Row] = []
    both: list[Row] = []
    layers: list[Row] = []
    overtaking: list[Row] = []
    for shape in SHAPES:
        host = None
        for form in FORMS:
            case = make_case(shape, form, host=host)
            host = case.host
            for direction in Direction:
                alone += measure_alone(case, direction, link)
                overlapped += [measure_overlap(case, direction, link, name, each) for name, each in compute.items()]
            both.append(measure_both(case, link))
            if shape == "Llama-3-8B, 16 tokens":
                layers.append(measure_layers(case))
                overtaking += [measure_overtaking(case)] if form == "block-first" else []
            case.manager.close()
            del case
            torch.cuda.empty_cache()
        host.free()
    for part in (alone, overlapped, both, layers, overtaking):
        print_table(part)
    bars = [at_most("calibration, s", seconds, 3.0), *_bars(alone, overlapped, both, layers)]
    rows = [{**row, "of": name} for name, part in _named(alone, overlapped, both, layers, overtaking) for row in part]
    return [*rows, {"of": "calibration", "seconds": seconds, "links": dict(cost_table(GPU).links)}], bars


def _named(*parts: list[Row]) -> list[tuple[str, list[Row]]]:
    return list(zip(("alone", "beside", "both", "layers", "overtaking"), parts, strict=True))


def _bars(alone: list[Row], overlapped: list[Row], both: list[Row], layers: list[Row]) -> list[Bar]:
    bars = [
        at_least(f"alone, {size}: worst share of the link", worst(alone, "of limit", moved=size), 0.96)
        for size in ("64 MiB", "1 GiB")
    ]
    bars.append(at_least("both ways: worst share of two contiguous copies", worst(both, "of two copies"), 0.95))
    for form, limits in (("block-first", {"GEMM": 0.03, "GEMV": 0.08}), ("layer-first", {"GEMM": 0.06, "GEMV": 0.14})):
        for name, most in limits.items():
            here = {"form": form, "compute": name}
            bars.append(at_least(f"{form} beside {name}: worst share", worst(overlapped, "of limit", **here), 0.94))
            bars.append(at_most(f"{form} beside {name}: most lost", worst(overlapped, "lost", most=True, **here), most))
    many = [row for row in alone if row["moved"] == "1 GiB" and int(str(row["copies"])) >= MANY]
    bars.append(at_most(f"host us per copy, bursts of {BURST} x 1 GiB", worst(many, "host us", most=True), 1.5))
    bars += [at_most(f"layer-wise load, {row['form']}: total over allowed", _float(row["over"]), 1.0) for row in layers]
    return bars


def worst(rows: list[Row], column: str, *, most: bool = False, **where: str) -> float:
    """Return the lowest (or highest) value of a column among the matching rows."""
    found = [_float(row[column]) for row in rows if all(row[key] == value for key, value in where.items())]
    return max(found) if most else min(found)


def _float(value: object) -> float:
    assert isinstance(value, float)
    return value


# ---- alone ----


def measure_alone(case: Case, direction: Direction, link: Link) -> list[Row]:
    """Measure our transfer, the limit, the raw batch call and the ancestor's kernel, alternating."""
    rows = []
    for name, nbytes in (("64 MiB", SMALL), ("1 GiB", LARGE)):
        device_ids, host_ids = case.ids(nbytes)
        compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
        raw = case.manager.compile(direction, device_ids, host_ids, urgent=True, strategy="direct")
        ancestor = AncestorSwap(case.group, case.cache, device_ids, link.host, direction)
        moved = compiled.nbytes
        taken: dict[str, list[float]] = {}
        walls = []
        for attempt in range((3 if nbytes == SMALL else 1) * ROUNDS + 1):
            transfer = case.manager.submit(compiled, urgent=True, after=spin())
            found = {"ours": transfer.wait().seconds, "bulk": _bulk(case, direction, device_ids, host_ids)}
            found["limit"] = link.seconds(direction, moved)
            found["raw batch"] = link.timed(lambda raw=raw: link.raw_batch(raw))
            found["ancestor"] = link.timed(lambda ancestor=ancestor: ancestor.run(link.stream))
            torch.cuda.synchronize()
            start = time.perf_counter()
            again = case.manager.compile(direction, device_ids, host_ids, urgent=True)
            transfer = case.manager.submit(again, urgent=True, after=NO_WAIT)
            transfer.wait()
            wall = time.perf_counter() - start
            if attempt:
                walls.append(wall)
                for key, value in found.items():
                    taken.setdefault(key, []).append(value)
        s = {key: statistics.median(values) for key, values in taken.items()}
        host, anywhere = (
            host_time(case, direction, device_ids, host_ids, raw, link, quiet=quiet) for quiet in (True, False)
        )
        rows.append(
            {
                "shape": case.shape,
                "form": case.form,
                "way": str(direction),
                "moved": name,
                "strategy": compiled.choice.strategy,
                "GB/s": moved / s["ours"] / 1e9,
                "limit": moved / s["limit"] / 1e9,
                "of limit": s["limit"] / s["ours"],
                "bulk": s["limit"] / s["bulk"],
                "wall": s["limit"] / statistics.median(walls),
                "raw batch": s["limit"] / s["raw batch"],
                "ancestor": s["limit"] / s["ancestor"],
                "copies": num_copies(compiled),
                "host us": host.burst,
                "host us cold": host.cold,
                "raw host us": host.raw,
                "host us anywhere": anywhere.burst,
                "raw host us anywhere": anywhere.raw,
                "expected": (compiled.choice.expected_us or 0.0) / s["ours"] / 1e6,
            }
        )
    return rows


@dataclass
class HostTime:
    """Microseconds of the calling thread to compile and submit, per copy given to the driver or to a kernel."""

    burst: float
    """Median of bursts of transfers, as in a step of a server; the first of a burst is cold."""
    cold: float
    """Median of single transfers, 20 ms after the one before."""
    raw: float
    """Median of the driver's batch call alone."""


def host_time(
    case: Case,
    direction: Direction,
    device_ids: np.ndarray,
    host_ids: np.ndarray,
    raw: CompiledTransfer,
    link: Link,
    *,
    quiet: bool,
) -> HostTime:
    """Measure while the GPU is idle or spins, each round on a quiet core or without pinning."""

    def submit(after: Event) -> tuple[TransferHandle, CompiledTransfer]:
        compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
        return case.manager.submit(compiled, urgent=True, after=after), compiled

    taken: dict[int, list[float]] = {1: [], BURST: []}
    raws = []
    for _ in range(4 * ROUNDS):
        with quiet_core() if quiet else contextlib.nullcontext():
            for count, values in taken.items():
                torch.cuda.synchronize()
                gate = NO_WAIT if count == 1 else spin()
                start = time.perf_counter()
                sent = [submit(gate) for _ in range(count)]
                seconds = time.perf_counter() - start
                values.append(seconds / sum(num_copies(each) for _, each in sent) * 1e6)
                torch.cuda.synchronize()  # spin: a thread is half as fast after sleeping for 20 ms
                for transfer, _ in sent:
                    transfer.wait()
            start = time.perf_counter()
            link.raw_batch(raw)
            raws.append((time.perf_counter() - start) / raw.num_copies * 1e6)
    return HostTime(*(statistics.median(values) for values in (taken[BURST], taken[1], raws)))


@contextlib.contextmanager
def quiet_core() -> Iterator[None]:
    """Pin this thread to the core that is fastest in a fixed loop now."""
    cores = os.sched_getaffinity(0)

    def loop_seconds(core: int) -> float:
        os.sched_setaffinity(0, {core})
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            sum(range(10_000))
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    try:
        os.sched_setaffinity(0, {min(cores, key=loop_seconds)})
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure_overtaking(case: Case) -> Row:
    """Measure an urgent load of 64 MiB alone and during 1 GiB in each direction; median wall milliseconds."""
    ids, bulk = case.ids(SMALL, 5), case.ids(LARGE, 6)
    taken: dict[str, list[float]] = {"alone ms": [], "beside bulk ms": []}
    for attempt in range(ROUNDS + 1):
        for name, values in taken.items():
            busy = [case.manager.save(*bulk), case.manager.load(*bulk, urgent=False)] if "bulk" in name else []
            if busy:
                time.sleep(0.004)  # in progress
            start = time.perf_counter()
            case.manager.load(*ids, after=NO_WAIT).wait()
            if attempt:
                values.append((time.perf_counter() - start) * 1e3)
            for each in busy:
                each.wait()
    return {"shape": case.shape, **{name: statistics.median(values) for name, values in taken.items()}}


def _bulk(case: Case, direction: Direction, device_ids: np.ndarray, host_ids: np.ndarray) -> float:
    gate = spin()
    move = case.manager.save if direction is Direction.D2H else case.manager.load
    return move(device_ids, host_ids, urgent=False, after=gate).wait().seconds


# ---- both ways ----


def measure_both(case: Case, link: Link) -> Row:
    """Compare a save and a load of 1 GiB each, of different blocks, with two contiguous copies."""
    (out, into), (back, away) = case.ids(LARGE, 1), case.ids(LARGE, 2)
    free_blocks = np.setdiff1d(np.arange(case.cache.num_blocks), out)[: len(back)]
    free_slots = np.setdiff1d(np.arange(case.host.num_ready), into)[: len(away)]
    random = np.random.default_rng(3)
    count = min(len(out), len(free_blocks), len(free_slots))
    save = case.manager.compile("d2h", out[:count], into[:count], urgent=True)
    load = case.manager.compile(
        "h2d", random.permutation(free_blocks)[:count], random.permutation(free_slots)[:count], urgent=True
    )

    def ours(gate: Event) -> float:
        pair = [case.manager.submit(each, urgent=True, after=gate) for each in (save, load)]
        seconds = [each.wait().seconds for each in pair]
        begins = [gate.elapsed(each.begin) for each in pair if each.begin is not None]
        return max(begin / 1e3 + length for begin, length in zip(begins, seconds, strict=True))

    def contiguous(gate: Event) -> float:
        ends = []
        for direction, stream in ((Direction.D2H, link.stream), (Direction.H2D, link.other)):
            stream.wait(gate)
            link.copy(direction, save.nbytes, stream, second=direction is Direction.H2D)
            ends.append(stream.record(Event(timing=True)))
        return max(gate.elapsed(end) for end in ends) / 1e3

    taken: dict[str, list[float]] = {"ours": [], "contiguous": []}
    for attempt in range(2 * ROUNDS + 1):
        for name, task in (("contiguous", contiguous), ("ours", ours)):
            seconds = task(spin(timing=True))
            torch.cuda.synchronize()
            if attempt:
                taken[name].append(seconds)
    s = {name: statistics.median(values) for name, values in taken.items()}
    total = save.nbytes + load.nbytes
    return {
        "shape": case.shape,
        "form": case.form,
        "GB/s": total / s["ours"] / 1e9,
        "two copies": total / s["contiguous"] / 1e9,
        "of two copies": s["contiguous"] / s["ours"],
    }
