"""The time of a decode step outside of the model: 64 rows, alone and during loads and saves. On the CPU, a tiny model.

python -m benchmarks.step

The Python code of a step is the same on a GPU, which waits for it. The time of the model is subtracted from every step.
With transfers, requests whose prompt is on the host arrive, and all generated blocks are saved.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.random_weights import random_weights
from benchmarks.report import Row, arguments, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import MemoryStore

TINY = ModelConfig("llama", 2, 32, 64, 2, 1, 16, 512, 4096, norm_eps=1e-5, rope=RopeConfig(10000.0))
ROWS, BLOCK, PROMPT = 64, 16, 256
LOADED = 1024
"""Tokens of a loaded prompt."""
EVERY = 4
"""Steps between two loaded prompts."""


@dataclass
class Timer:
    """Wall-clock and thread CPU time of a function."""

    wall: float = 0.0
    cpu: float = 0.0

    def around(self, function: Any) -> Any:
        """Return the function with timing."""

        def timed(*arguments: Any, **more: Any) -> Any:
            with self:
                return function(*arguments, **more)

        return timed

    def __enter__(self) -> None:
        self.wall -= time.perf_counter()
        self.cpu -= time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += time.thread_time()


def main() -> None:
    parser = arguments("Time of a decode step outside of the model.")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.steps) for name in ("device", "device, host, store", "loads and saves")]
    print_table(rows)
    report("step", rows, [], options.results)


def measure(name: str, num_steps: int) -> Row:
    """Measure one case: the median and the mean step."""
    engine, forward, whole = new_engine(has_tiers=name != "device"), Timer(), Timer()
    engine.groups[0].logits = forward.around(engine.groups[0].logits)  # type: ignore[method-assign]
    loaded_prompts = [[3 + i] * LOADED for i in range(16)] if name == "loads and saves" else []
    for prompt in loaded_prompts:
        run(engine, prompt)
    for i in range(ROWS):
        engine.add([100 + i] * PROMPT, SamplingParams(max_tokens=4000 - PROMPT, ignore_eos=True))
    for _ in range(ROWS * PROMPT // 1024 + 16):
        engine.step()
    wall, cpu = [], []
    before = engine.manager.transfers.counts
    for number in range(num_steps):
        if loaded_prompts and number % EVERY == 0:
            prompt = loaded_prompts[number // EVERY % len(loaded_prompts)]
            engine.tiers.demote(engine.chain(prompt))
            engine.add([*prompt, number % 500 + 1], SamplingParams(max_tokens=1))
        wall_before, cpu_before = whole.wall - forward.wall, whole.cpu - forward.cpu
        with whole:
            engine.step()
        wall.append(whole.wall - forward.wall - wall_before)
        cpu.append(whole.cpu - forward.cpu - cpu_before)
    after = engine.manager.transfers.counts
    moved = {route.value: after[route].num_blocks - before[route].num_blocks for route in Route}
    engine.close()
    return {
        "case": name,
        "rows": ROWS,
        "CPU us a step, middle": statistics.median(cpu) * 1e6,
        "CPU us a step, mean": statistics.fmean(cpu) * 1e6,
        "us a step by the clock, middle": statistics.median(wall) * 1e6,
        "CPU us a row, middle": statistics.median(cpu) / ROWS * 1e6,
        "blocks moved": " ".join(f"{each} {count}" for each, count in moved.items() if count) or "none",
    }


def new_engine(has_tiers: bool) -> Engine:
    """Return an engine with memory for all rows; with tiers, for a few more."""
    model = Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=1))
    num_blocks = ROWS * (PROMPT + 900) // BLOCK + 2 * LOADED // BLOCK
    host = HostConfig(20_000) if has_tiers else None
    stores = (StoreConfig("memory"),) if has_tiers else ()
    cache = CacheConfig(num_blocks, host=host, stores=stores, always_load=True)
    scheduler = SchedulerConfig(max_rows=ROWS + 2, max_step_tokens=1024 + ROWS)
    config = EngineConfig(BLOCK, cache, scheduler)
    return Engine(model, config=config, stores={"memory": MemoryStore(1 << 30)} if has_tiers else None)


def run(engine: Engine, prompt: list[int]) -> None:
    """Run one request to its end."""
    engine.add(prompt, SamplingParams(max_tokens=1))
    while engine.has_work():
        engine.step()


if __name__ == "__main__":
    main()
