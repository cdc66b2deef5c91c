"""Transfers during a model's compute: rates, and the loss of compute. A part of benchmarks/transfer_gpu.py."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Row, print_table
from benchmarks.transfer_cases import GPU, LARGE, NO_WAIT, ROUNDS, Case, Link, make_case, spin
from kvtier.memory import Event, Stream, cost_table
from kvtier.transfer import LayerDoneCounter, TransferConfig, TransferHandle
from kvtier.transfer.block_view import Direction

MLP = (4096, 4096, 14336)  # 4,096 tokens through the widest matrix of the 8B model: 0.6 ms


class Products:
    """bf16 matrix products, limited by arithmetic."""

    def __init__(self, shape: tuple[int, int, int] = MLP, repeats: int = 90, steps: int = 1) -> None:
        self.stream = Stream(GPU)
        rows, depth, columns = shape
        self.a = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(depth, columns, dtype=torch.bfloat16, device="cuda")
        self.out = self.a @ self.b
        self.repeats, self.steps = repeats, steps

    def step(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def start(self) -> tuple[Event, list[Event]]:
        """Enqueue steps behind a spinning kernel. Return the event after the first third, and those of each step."""
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
    """bf16 matrix times vector, limited by device memory."""

    def __init__(self) -> None:
        super().__init__((2, 2, 2), 100, 5)
        self.a = torch.randn(16384, 16384, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(16384, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.b)

    def step(self) -> None:
        torch.mv(self.a, self.b, out=self.out)


def measure_overlap(case: Case, direction: Direction, link: Link, name: str, compute: Products) -> Row:
    """Measure 1 GiB during compute: the rate, and the share of the overlapped time that compute loses.

    Steps during the transfer are compared with those before and after it in the same run: between runs the clock of a
    GPU at its power limit differs by more than the effect (16-23 % "lost" to DMA in the first version). The clock also
    falls within a run, so a line through the step times outside of the transfer is the baseline.
    """
    device_ids, host_ids = case.ids(LARGE)
    compiled = case.manager.compile(direction, device_ids, host_ids, urgent=True)
    rates, losses, alone, during = [], [], [], []
    for attempt in range(ROUNDS + 1):
        gate, marks = compute.start()
        transfer = case.manager.submit(compiled, urgent=True, after=gate)
        seconds = transfer.wait().seconds
        torch.cuda.synchronize()
        assert transfer.begin is not None
        begin = marks[0].elapsed(transfer.begin)
        end = begin + seconds * 1e3
        times = [marks[0].elapsed(mark) for mark in marks]
        spans = list(itertools.pairwise(times))[2:]  # the first ones have other caches and clocks
        inside = [(a, b - a) for a, b in spans if a >= begin and b <= end]
        outside = [(a, b - a) for a, b in spans if b <= begin or a >= end]
        slope, level = np.polyfit(*zip(*outside, strict=True), 1)
        quiet = statistics.mean(level + slope * a for a, _ in inside)
        loud = statistics.mean(length for _, length in inside)
        if attempt:
            rates.append(link.seconds(direction, compiled.nbytes) / seconds)
            losses.append(1 - quiet / loud)
            alone.append(quiet)
            during.append(loud)
    return {
        "shape": case.shape,
        "form": case.form,
        "way": str(direction),
        "compute": name,
        "of limit": statistics.median(rates),
        "lost": statistics.median(
            losses
        ),  # below 0: steps during the transfer were faster than the line, which is its error
        "step alone ms": statistics.median(alone),
        "step beside ms": statistics.median(during),
        "overlapped": bool(end < times[-1]),
    }


def measure_layers(case: Case) -> Row:
    """Measure 4,096 tokens, layer by layer, under 32 layers of compute that take the time of the load; wall clock."""
    count, layers = 4096 // 16, case.group.num_layers
    device_ids, host_ids = (each[:count] for each in case.ids(LARGE))
    compute = Products((2048, 2048, 2048))
    stream = compute.stream

    def load() -> TransferHandle:
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
    begin, arrived = last.begin, last.layers._events[0]
    assert begin is not None
    assert arrived is not None
    first = begin.elapsed(arrived) / 1e3
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


RINGS = [(64, 3, 264), (48, 4, 264), (64, 4, 264), (64, 3, 132), (32, 6, 264)]


def tune() -> list[Row]:
    """Tune the staging ring during compute: chunk size, number of chunks, thread blocks of the gather kernel."""
    cost_table(GPU)
    link, compute, rows, host = Link(), {"GEMM": Products(), "GEMV": Vectors()}, [], None
    for chunk, slots, blocks in RINGS:
        config = TransferConfig(chunk_bytes=chunk << 20, num_chunks=slots, gather_blocks=blocks)
        case = make_case("Llama-3-8B, 16 tokens", "layer-first", config, host)
        host = case.host
        for direction in Direction:
            for name, each in compute.items():
                row = measure_overlap(case, direction, link, name, each)
                rows.append({"chunk MiB": chunk, "slots": slots, "blocks": blocks, **row})
        case.manager.close()
        del case
        torch.cuda.empty_cache()
    print_table(rows)
    return rows
