"""Decode steps on a GPU with one and two steps in flight: the time of a step compared with the time the GPU is busy.

python -m benchmarks.step_gpu            random weights of Llama-3-8B's shape: nothing to download

The step time is that of an unprofiled run. The busy time is the union of the kernels' intervals in a profiled run of
the same steps. Only the last steps of this run count, because the GPU has a higher clock after the pause in which the
profiler starts. An offline run computes 256 prompts of 1,140 tokens and 128 new tokens for each.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.engine_gpu import LLAMA3_8B
from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.batch import Timeline
from kvtier.cache.config import CacheConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.params import Penalties, SamplingParams
from kvtier.scheduler import SchedulerConfig

BLOCK_TOKENS, CONTEXT, MOST_TOKENS = 16, 1024, 900
SIZES = (1, 64, 256)
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True)
TOP_P = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95)
TOP_K = dataclasses.replace(GREEDY, temperature=0.8, top_k=50)
PENALIZED = dataclasses.replace(GREEDY, penalties=Penalties(1.1, 0.2, 0.2))
OFFLINE_PROMPT, OFFLINE_NEW = 1140, 128
MEASURED, PROFILED, COPY_STEPS, ROUNDS = 30, 12, 32, 3
FIRST_KERNEL = "_load_rows"  # of a captured step


class Kernel(NamedTuple):
    """Begin and end in nanoseconds, and the name."""

    begin: int
    end: int
    name: str


class Mask:
    """Allows even and odd tokens in turn, by a bit mask from the host like that of a grammar."""

    def __init__(self) -> None:
        self._next = 0

    def forbid(self, logits: torch.Tensor) -> None:
        """Copy a mask to the device and apply it."""
        bits = np.full(len(logits) // 8, 0xAA if self._next else 0x55, np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits)).pin_memory().to(logits.device, non_blocking=True)
        logits.masked_fill_(allowed == 0, -torch.inf)

    def accept(self, token_id: int) -> None:  # noqa: ARG002
        self._next = 1 - self._next


GRAMMAR = dataclasses.replace(GREEDY, ignore_eos=False, constraint=Mask)


def main() -> None:
    parser = arguments("Decode steps with one and two steps in flight.")
    parser.add_argument("--tiny", action="store_true", help="a small model on any device, to try the benchmark")
    parser.add_argument("--phases", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--offline-phases", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = dataclasses.replace(LLAMA3_8B, num_layers=1, hidden_dim=64, ffn_dim=96, num_heads=2, num_kv_heads=1)
    config = dataclasses.replace(config, head_dim=32, vocab_size=1024) if options.tiny else LLAMA3_8B
    dtype = torch.float32 if options.tiny else torch.bfloat16
    model = Model(config, random_weights(config, dtype, device))
    rows: list[Row] = []
    bars: list[Bar] = []
    for phases in options.phases:
        bench = Bench(model, phases)
        found = bench.cases()
        rows += [{"phases": phases, **row} for row in found.values()]
        bars += _bars(phases, found)
        print_table([{"phases": phases, **row} for row in found.values()])
        if phases in options.offline_phases:
            row = bench.offline(config)
            rows.append({"phases": phases, **row})
            print_table([rows[-1]])
            bars.append(at_least(f"offline, share of time the GPU is busy, {phases} phases", row["busy share"], 0.95))
        bench.engine.close()
    report("step_gpu", rows, bars, options.results)


def _bars(phases: int, found: dict[str, dict[str, float]]) -> list[Bar]:
    ratios = {f"{size} greedy": 1.08 if size == 1 else 1.05 for size in SIZES}
    bars = [
        at_most(f"{name}, step / busy, {phases} phases", found[name]["over busy"], bar) for name, bar in ratios.items()
    ]
    step = {name: row["step ms"] for name, row in found.items()}
    bars.append(at_most(f"64 top-p - greedy ms, {phases} phases", step["64 top-p"] - step["64 greedy"], 0.4))
    bars.append(at_most(f"grammar among 63, {phases} phases", step["63 greedy, 1 grammar"] / step["64 greedy"], 1.10))
    moved = max(row["bytes in, unchanged"] for name, row in found.items() if name.endswith("greedy"))
    return [*bars, at_most(f"bytes to the device per step without a new block, {phases} phases", moved, 0)]


class Bench:
    """An engine with a number of steps in flight, and the measurements."""

    def __init__(self, model: Model, phases: int) -> None:
        self.timeline = Timeline()
        random = np.random.default_rng(0)
        vocab = model.config.vocab_size
        self.prompts = [random.integers(1, vocab, CONTEXT).tolist() for _ in range(SIZES[-1])]
        blocks = SIZES[-1] * (CONTEXT + 512) // BLOCK_TOKENS
        config = EngineConfig(
            *(BLOCK_TOKENS, CacheConfig(blocks), SchedulerConfig(max_rows=SIZES[-1], max_step_tokens=8192), SIZES),
            phases=phases,
        )
        self.engine = Engine(model, config=config)
        self._is_cuda = model.weights.device.type == "cuda"
        gc.collect()
        gc.freeze()  # as the engine process of the server does

    def cases(self) -> dict[str, dict[str, float]]:
        """Measure the step of each kind of batch."""
        kinds = {f"{size} greedy": [GREEDY] * size for size in SIZES}
        kinds |= {"64 random": [dataclasses.replace(GREEDY, temperature=0.8)] * 64, "64 top-k": [TOP_K] * 64}
        kinds |= {"64 top-p": [TOP_P] * 64, "256 top-p": [TOP_P] * 256, "64 penalties": [PENALIZED] * 64}
        kinds["63 greedy, 1 grammar"] = [GREEDY] * 63 + [GRAMMAR]
        found: dict[str, dict[str, float]] = {}
        for name, params in kinds.items():
            found[name] = {"case": name, **self._case(params)}  # type: ignore[dict-item]
            print(found[name], flush=True)
        return found

    def _case(self, params: list[SamplingParams]) -> dict[str, float]:
        engine, taken, host = self.engine, [], []
        names = [engine.add(prompt, each) for prompt, each in zip(self.prompts, params, strict=False)]
        while engine.scheduler.waiting or any(not each.num_new_tokens for each in engine.scheduler.running):
            engine.step()
        for _ in range(4):
            engine.step()
        for _ in range(ROUNDS):
            begin, cpu = time.perf_counter(), time.thread_time()
            outputs = [output for _ in range(MEASURED) for output in engine.step()]
            count = sum(len(output.token_ids) for output in outputs if output.request_id == names[0])
            taken.append((time.perf_counter() - begin) / count)
            host.append((time.thread_time() - cpu) / count)
        seconds = statistics.median(taken)
        kernels, moved = self._profile(lambda: [engine.step() for _ in range(MEASURED + PROFILED)])
        busy = busy_seconds(kernels, PROFILED)
        for sequence in list(engine._live.values()):
            engine.abort(sequence.id)
        while engine.has_work():
            engine.step()
        return {
            "step ms": seconds * 1e3,
            "best ms": min(taken) * 1e3,
            "busy ms": busy * 1e3,
            "over busy": seconds / busy if busy else float("nan"),
            "thread CPU ms": statistics.median(host) * 1e3,
            "bytes in, unchanged": max(moved["unchanged"], default=math.nan),
            "mean bytes in": statistics.fmean(moved["in"] or [0]),
            "bytes out": statistics.median(moved["out"] or [0]),
        }

    def _profile(self, task: Callable[[], object]) -> tuple[list[Kernel], dict[str, list[int]]]:
        """Return the kernels of a task, and the bytes that each of the following steps sent and fetched."""
        pipeline, timeline = self.engine._pipeline, Timeline()
        assert self.engine.tiers.finish_steps is not None
        self.engine.tiers.finish_steps()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if self._is_cuda else activity.CPU]) as profiler:
            task()
            self.engine.tiers.finish_steps()
            if self._is_cuda:
                torch.cuda.synchronize()
        found = profiler.profiler.kineto_results.events()
        wanted = torch.autograd.DeviceType.CUDA if self._is_cuda else torch.autograd.DeviceType.CPU
        kernels = [
            Kernel(each.start_ns(), each.start_ns() + each.duration_ns(), each.name())
            for each in found
            if each.device_type() == wanted and not each.name().startswith(("Memcpy", "Memset"))
        ]
        pipeline._timeline = timeline
        num_blocks = [self._num_blocks()]
        for _ in range(COPY_STEPS):
            self.engine.step()
            num_blocks.append(self._num_blocks())
        self.engine.tiers.finish_steps()
        pipeline._timeline = None
        sent, fetched = {}, []
        for span in timeline.spans:
            if span.name in ("SETUP", "PREPARE"):
                sent[span.step] = sent.get(span.step, 0) + span.copied_bytes
            elif span.name == "FETCH":
                fetched.append(span.copied_bytes)
        is_unchanged = [old == new for old, new in itertools.pairwise(num_blocks)]
        found_bytes = [sent[step] for step in sorted(sent)]
        unchanged = [count for count, same in zip(found_bytes, is_unchanged, strict=False) if same]
        return kernels, {"in": found_bytes, "unchanged": unchanged, "out": fetched}

    def _num_blocks(self) -> int:
        """Return the number of blocks in the tables of all rows."""
        tables = [each.allocation.table for each in self.engine.scheduler.running if each.allocation is not None]
        return sum(map(len, tables))

    def offline(self, config: ModelConfig) -> dict[str, float]:
        """Run 256 requests with fresh prompts to their end, first unprofiled and then profiled."""
        random = np.random.default_rng(1)
        params = dataclasses.replace(GREEDY, max_tokens=OFFLINE_NEW)

        def run() -> float:
            begin = time.perf_counter()
            for _ in range(SIZES[-1]):
                self.engine.add(random.integers(1, config.vocab_size, OFFLINE_PROMPT).tolist(), params)
            while self.engine._live:
                self.engine.step()
            return time.perf_counter() - begin

        seconds = run()
        kernels, _ = self._profile(run)
        busy = union_seconds(kernels)
        tokens = SIZES[-1] * (OFFLINE_PROMPT + OFFLINE_NEW)
        return {
            "case": "offline",  # type: ignore[dict-item]
            "seconds": seconds,
            "busy seconds": busy,
            "busy share": busy / seconds,
            "tokens/s": tokens / seconds,
        }


def busy_seconds(kernels: Sequence[Kernel], num_steps: int) -> float:
    """Return the mean time per step in which a kernel ran, for the last `num_steps` steps. 0 if there are fewer."""
    starts = sorted(each.begin for each in kernels if each.name == FIRST_KERNEL)[-num_steps - 1 :]
    if len(starts) <= num_steps:
        return 0.0
    return union_seconds(each for each in kernels if starts[0] <= each.begin < starts[-1]) / num_steps


def union_seconds(kernels: Iterable[Kernel]) -> float:
    """Return the length of the union of the kernels' intervals."""
    total, reached = 0, 0
    for begin, end, _ in sorted(kernels):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e9


if __name__ == "__main__":
    main()
