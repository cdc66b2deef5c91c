"""The GPU half of benchmarks/transfer.py. Times are device times (CUDA events) unless a column says wall; medians.

A case is held behind a kernel that spins until everything is enqueued, as a save is behind the step that computes its
blocks; the host's own time is a bar of its own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import Bar, Row, at_least, at_most, print_table
from benchmarks.transfer import make_cache
from benchmarks.transfer_peers import AncestorSwap
from kvtier.layout import CacheGroup, KVLayout
from kvtier.memory import Buffer, Event, Placement, Stream, calibrate, cost_table, cuda
from kvtier.transfer import (
    CompiledTransfer,
    DeviceCache,
    HostMemory,
    LayerDoneCounter,
    Transfer,
    TransferConfig,
    TransferManager,
)
from kvtier.transfer.plane import Direction

GPU = Placement("cuda", 0)
SHAPES = {
    "Llama-3-8B, 16 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 16),
    "Llama-3-8B, 64 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 64),
    "DeepSeek-MLA, 16 tokens": CacheGroup.mla("main", 61, 576, "bf16", 16),
    "Qwen3-0.6B, 16 tokens": CacheGroup.attention("main", 28, 8, 128, "bf16", 16),
}
FORMS = ("block-first", "layer-first")
LARGE, SMALL, MARGIN = 1 << 30, 64 << 20, 32 << 20
ROUNDS = 5
BURST = 4  # transfers submitted in a row
MANY = 500  # copies, from which on the fixed cost of a transfer does not count: those of fewer are 8 MiB each
MLP = (4096, 4096, 14336)  # 4,096 tokens through the widest matrix of the 8B model: 0.6 ms
SPIN = 10_000_000  # cycles: about 5 ms, longer than enqueueing takes
NO_WAIT = Event()


@dataclass
class Case:
    """One shape of blocks in one form of cache, with scattered ids for 1 GiB and for 64 MiB."""

    shape: str
    form: str
    group: CacheGroup
    manager: TransferManager
    cache: DeviceCache
    host: HostMemory

    def ids(self, nbytes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Scattered device and host ids of so many bytes."""
        count = -(-nbytes // self.group.block_bytes)
        random = np.random.default_rng(seed)
        return random.permutation(self.cache.num_blocks)[:count], random.permutation(self.host.num_ready)[:count]


def make_case(shape: str, form: str, config: TransferConfig | None = None, host: HostMemory | None = None) -> Case:
    """Twice the blocks that move, on both sides."""
    group = SHAPES[shape]
    count = 2 * LARGE // group.block_bytes + 4
    cache = make_cache(group, count, form, GPU.torch)
    host = host or HostMemory(group, count, GPU)
    host.wait_ready()
    manager = TransferManager(KVLayout(16, (group,)), GPU, config)
    manager.register(cache, host)
    return Case(shape, form, group, manager, cache, host)


def measure_gpu() -> tuple[list[Row], list[Bar]]:
    """Everything, with the bars of issue 6."""
    seconds = calibrate(GPU).seconds
    link = Link()
    compute = {"GEMM": Products(), "GEMV": Vectors()}
    alone: list[Row] = []
    beside: list[Row] = []
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
                beside += [measure_beside(case, direction, link, name, each) for name, each in compute.items()]
            both.append(measure_both(case, link))
            if shape == "Llama-3-8B, 16 tokens":
                layers.append(measure_layers(case))
                overtaking += [measure_overtaking(case)] if form == "block-first" else []
            case.manager.close()
            del case
            torch.cuda.empty_cache()
        host.free()
    for part in (alone, beside, both, layers, overtaking):
        print_table(part)
    bars = [at_most("calibration, s", seconds, 3.0), *_bars(alone, beside, both, layers)]
    rows = [{**row, "of": name} for name, part in _named(alone, beside, both, layers, overtaking) for row in part]
    return [*rows, {"of": "calibration", "seconds": seconds, "links": dict(cost_table(GPU).links)}], bars


def _named(*parts: list[Row]) -> list[tuple[str, list[Row]]]:
    return list(zip(("alone", "beside", "both", "layers", "overtaking"), parts, strict=True))


def _bars(alone: list[Row], beside: list[Row], both: list[Row], layers: list[Row]) -> list[Bar]:
    bars = [
        at_least(f"alone, {size}: worst share of the link", worst(alone, "of limit", moved=size), 0.96)
        for size in ("64 MiB", "1 GiB")
    ]
    bars.append(at_least("both ways: worst share of two contiguous copies", worst(both, "of two copies"), 0.95))
    for form, limits in (("block-first", {"GEMM": 0.03, "GEMV": 0.08}), ("layer-first", {"GEMM": 0.06, "GEMV": 0.14})):
        for name, most in limits.items():
            here = {"form": form, "compute": name}
            bars.append(at_least(f"{form} beside {name}: worst share", worst(beside, "of limit", **here), 0.94))
            bars.append(at_most(f"{form} beside {name}: most lost", worst(beside, "lost", most=True, **here), most))
    many = [row for row in alone if row["moved"] == "1 GiB" and int(str(row["copies"])) >= MANY]
    bars.append(at_most(f"host us per copy, bursts of {BURST} x 1 GiB", worst(many, "host us", most=True), 1.2))
    bars += [at_most(f"layer-wise load, {row['form']}: total over allowed", _float(row["over"]), 1.0) for row in layers]
    return bars


def worst(rows: list[Row], column: str, *, most: bool = False, **where: str) -> float:
    """The lowest (or highest) figure of a column among the rows that fit."""
    found = [_float(row[column]) for row in rows if all(row[key] == value for key, value in where.items())]
    return max(found) if most else min(found)


def _float(value: object) -> float:
    assert isinstance(value, float)
    return value


# ---- alone ----


def measure_alone(case: Case, direction: Direction, link: Link) -> list[Row]:
    """Our transfer, the limit, the raw batch call and the ancestor's kernel, taken in turn."""
    rows = []
    for name, nbytes in (("64 MiB", SMALL), ("1 GiB", LARGE)):
        device_ids, host_ids = case.ids(nbytes)
        compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
        raw = case.manager.compile(direction, device_ids, host_ids, urgent=True, strategy="direct")
        ancestor = AncestorSwap(case.group, case.cache, device_ids, link.host, direction)
        moved = compiled.nbytes
        taken: dict[str, list[float]] = {}
        walls, raws = [], []
        for attempt in range(ROUNDS + 1):
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
            start = time.perf_counter()
            link.raw_batch(raw)
            raw_s = time.perf_counter() - start
            torch.cuda.synchronize()
            if attempt:
                raws.append(raw_s)
                walls.append(wall)
                for key, value in found.items():
                    taken.setdefault(key, []).append(value)
        s = {key: statistics.median(values) for key, values in taken.items()}
        host = host_time(case, direction, device_ids, host_ids)
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
                "copies": compiled.num_copies + compiled.num_inside,
                "host us": host.burst,
                "host us cold": host.cold,
                "raw host us": statistics.median(raws) / raw.num_copies * 1e6,
                "expected": (compiled.choice.expected_us or 0.0) / s["ours"] / 1e6,
            }
        )
    return rows


@dataclass
class HostTime:
    """Microseconds of the calling thread, compiling and submitting, per copy handed to the driver or to a kernel."""

    burst: float
    """Of a few transfers in a row, as a server's step submits them; the first is cold."""
    cold: float
    """Of one transfer after 20 ms of waiting for the one before."""


def host_time(case: Case, direction: Direction, device_ids: np.ndarray, host_ids: np.ndarray) -> HostTime:
    """Medians; the GPU is idle, or spins."""

    def submit(after: Event) -> tuple[Transfer, int]:
        compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
        return case.manager.submit(compiled, urgent=True, after=after), compiled.num_copies + compiled.num_inside

    taken: dict[int, list[float]] = {1: [], BURST: []}
    for _ in range(2 * ROUNDS):
        for count, values in taken.items():
            torch.cuda.synchronize()
            gate = NO_WAIT if count == 1 else spin()
            start = time.perf_counter()
            sent = [submit(gate) for _ in range(count)]
            values.append((time.perf_counter() - start) / sum(copies for _, copies in sent) * 1e6)
            torch.cuda.synchronize()  # spins: a thread that slept 20 ms takes twice as long for anything
            for transfer, _ in sent:
                transfer.wait()
    return HostTime(burst=statistics.median(taken[BURST]), cold=statistics.median(taken[1]))


def measure_overtaking(case: Case) -> Row:
    """An urgent load of 64 MiB alone, and while 1 GiB of bulk moves each way; wall milliseconds, median."""
    ids, bulk = case.ids(SMALL, 5), case.ids(LARGE, 6)
    taken: dict[str, list[float]] = {"alone ms": [], "beside bulk ms": []}
    for attempt in range(ROUNDS + 1):
        for name, values in taken.items():
            busy = [case.manager.save(*bulk), case.manager.load(*bulk, urgent=False)] if "bulk" in name else []
            if busy:
                time.sleep(0.004)  # well under way
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


def spin(stream: Stream | None = None, *, timing: bool = False) -> Event:
    """An event behind a kernel that spins for a while."""
    stream = stream or Stream.wrap(torch.cuda.current_stream())
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(SPIN)
    return stream.record(Event(timing=timing))


class Link:
    """Contiguous copies, and copies of peers, on a stream of their own."""

    def __init__(self) -> None:
        self.stream, self.other = Stream(GPU), Stream(GPU)
        self.device, self.host = Buffer(LARGE + MARGIN, "u8", GPU), Buffer(LARGE + MARGIN, "u8", "pinned")
        self.device2, self.host2 = Buffer(LARGE + MARGIN, "u8", GPU), Buffer(LARGE + MARGIN, "u8", "pinned")
        for buffer in (self.host, self.host2):
            buffer.fill(1)
        self.call = cuda.batch_call(GPU)
        torch.cuda.synchronize()

    def copy(self, direction: Direction, nbytes: int, stream: Stream, *, second: bool = False) -> None:
        """Enqueue one contiguous copy."""
        device, host = (self.device2, self.host2) if second else (self.device, self.host)
        src, dst = (device, host) if direction is Direction.D2H else (host, device)
        cuda.memcpy_async(dst.data(), src.data(), nbytes, stream)

    def seconds(self, direction: Direction, nbytes: int) -> float:
        """Of one contiguous copy."""
        return self.timed(lambda: self.copy(direction, nbytes, self.stream))

    def raw_batch(self, compiled: CompiledTransfer) -> None:
        """The driver's batch call on the pieces as they lie."""
        for part in compiled.slices:
            assert self.call.submit(part.copies, self.stream) is None

    def timed(self, task: Callable[[], object]) -> float:
        """Device seconds of what `task` enqueues, behind a spinning kernel."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait(spin())
        begin.record(self.stream.native)
        task()
        end.record(self.stream.native)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


# ---- both ways ----


def measure_both(case: Case, link: Link) -> Row:
    """A save and a load of 1 GiB each, of different blocks, against two contiguous copies: until the later is done."""
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


# ---- beside compute ----


class Products:
    """bf16 matrix products: bound by arithmetic."""

    def __init__(self, shape: tuple[int, int, int] = MLP, repeats: int = 90, steps: int = 1) -> None:
        self.stream = Stream(GPU)
        rows, depth, columns = shape
        self.a = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(depth, columns, dtype=torch.bfloat16, device="cuda")
        self.out = self.a @ self.b
        self.repeats, self.steps = repeats, steps

    def step(self) -> None:
        """Enqueue one."""
        torch.mm(self.a, self.b, out=self.out)

    def start(self) -> tuple[Event, list[Event]]:
        """Enqueue behind a spinning kernel. Returns the event after the first third, and those around each step."""
        spin(self.stream)
        marks = [Event(timing=True) for _ in range(self.repeats + 1)]
        gate = Event()
        with torch.cuda.stream(self.stream.native):
            self.stream.record(marks[0])
            for k in range(self.repeats):
                if k == self.repeats // 3:
                    self.stream.record(gate)
                for _ in range(self.steps):
                    self.step()
                self.stream.record(marks[k + 1])
        return gate, marks


class Vectors(Products):
    """bf16 matrix times vector: bound by device memory."""

    def __init__(self) -> None:
        super().__init__((2, 2, 2), 100, 5)
        self.a = torch.randn(16384, 16384, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(16384, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.b)

    def step(self) -> None:
        """Enqueue one."""
        torch.mv(self.a, self.b, out=self.out)


def measure_beside(case: Case, direction: Direction, link: Link, name: str, compute: Products) -> Row:
    """1 GiB while compute runs: the rate, and the share of the overlapped time that compute loses.

    Steps inside the transfer are compared with those before and after it in the same run: between runs the clock of a
    GPU at its power limit differs by more than what is measured (16-23 % "lost" to DMA in the first version of this).
    Inside a run it still falls, so those outside give a line of step time over time, and those inside are held to it.
    """
    device_ids, host_ids = case.ids(LARGE)
    compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
    rates, losses, alone, beside = [], [], [], []
    for attempt in range(ROUNDS + 1):
        gate, marks = compute.start()
        transfer = case.manager.submit(compiled, urgent=True, after=gate)
        seconds = transfer.wait().seconds
        torch.cuda.synchronize()
        assert transfer.begin is not None
        begin = marks[0].elapsed(transfer.begin)
        end = begin + seconds * 1e3
        times = [marks[0].elapsed(mark) for mark in marks]
        spans = list(itertools.pairwise(times))[2:]  # the first ones find other caches and clocks
        inside = [(a, b - a) for a, b in spans if a >= begin and b <= end]
        outside = [(a, b - a) for a, b in spans if b <= begin or a >= end]
        slope, level = np.polyfit(*zip(*outside, strict=True), 1)
        quiet = statistics.mean(level + slope * a for a, _ in inside)
        loud = statistics.mean(length for _, length in inside)
        if attempt:
            rates.append(link.seconds(direction, compiled.nbytes) / seconds)
            losses.append(1 - quiet / loud)
            alone.append(quiet)
            beside.append(loud)
    return {
        "shape": case.shape,
        "form": case.form,
        "way": str(direction),
        "compute": name,
        "of limit": statistics.median(rates),
        "lost": max(0.0, statistics.median(losses)),
        "step alone ms": statistics.median(alone),
        "step beside ms": statistics.median(beside),
        "overlapped": bool(end < times[-1]),
    }


# ---- layer-wise ----


def measure_layers(case: Case) -> Row:
    """4,096 tokens, layer by layer, under 32 layers of compute that take as long as the load; wall clock."""
    count, layers = 4096 // 16, case.group.num_layers
    device_ids, host_ids = (each[:count] for each in case.ids(LARGE))
    compute = Products((2048, 2048, 2048))
    stream = compute.stream

    def load() -> Transfer:
        return case.manager.load(device_ids, host_ids, layer_wise=True, after=NO_WAIT)

    def run(repeats: int, counter: LayerDoneCounter | None = None) -> None:
        with torch.cuda.stream(stream.native):
            for layer in range(layers):
                if counter is not None:
                    counter.wait(layer, stream)
                for _ in range(repeats):
                    compute.step()

    def clock(task: Callable[[], object]) -> float:
        taken = []
        for attempt in range(2 * ROUNDS + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            task()
            torch.cuda.synchronize()
            if attempt:
                taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    loading = clock(lambda: load().wait())
    repeats = max(1, round(loading / clock(lambda: run(20)) * 20))
    computing = clock(lambda: run(repeats))
    total = clock(lambda: run(repeats, load().layers))
    last = load()
    last.wait()
    first = last.layers.arrival_ms(0) / 1e3
    groups = last.layers.groups
    case.manager.wait_all()
    case.manager.poll()
    return {
        "form": case.form,
        "load ms": loading * 1e3,
        "compute ms": computing * 1e3,
        "total ms": total * 1e3,
        "first group ms": first * 1e3,
        "groups": len(groups),
        "first share": len(groups[0]) / layers,
        "over": total / (1.05 * max(loading, computing) + min(first, max(loading, computing) / 4)),
    }


# ---- tuning ----


RINGS = [(64, 3, 264), (48, 4, 264), (64, 4, 264), (64, 3, 132), (32, 6, 264)]


def tune() -> list[Row]:
    """The staging ring beside compute: chunk size, number of chunks, blocks of threads of the gather kernel."""
    cost_table(GPU)
    link, compute, rows, host = Link(), {"GEMM": Products(), "GEMV": Vectors()}, [], None
    for chunk, slots, blocks in RINGS:
        config = TransferConfig(chunk_bytes=chunk << 20, num_chunks=slots, gather_blocks=blocks)
        case = make_case("Llama-3-8B, 16 tokens", "layer-first", config, host)
        host = case.host
        for direction in Direction:
            for name, each in compute.items():
                row = measure_beside(case, direction, link, name, each)
                rows.append({"chunk MiB": chunk, "slots": slots, "blocks": blocks, **row})
        case.manager.close()
        del case
        torch.cuda.empty_cache()
    print_table(rows)
    return rows
