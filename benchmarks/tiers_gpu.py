"""Time to first token of a long prompt by the tier of its prefix: none, device, host or disk.

python -m benchmarks.tiers_gpu            random weights of Llama-3-8B's shape: nothing to download

The rate of the link is measured in the same run with one contiguous copy. The time of the remaining computation is the
time of a hit on the device. A load is split into groups of layers, and the model starts after the first group. A hit on
the host should therefore take the longer of both times, plus the time to load the first group.

The second part measures how much longer a decode step takes while the engine loads and saves other blocks, 256 MiB per
direction at a time.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.engine_gpu import LLAMA3_8B
from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from kvtier.cache.admin import CacheAdmin
from kvtier.cache.allocation import Allocation
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.sampling import SamplingParams
from kvtier.index import Chain
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore

BLOCK_TOKENS, PREFIX, SUFFIX = 16, 32768, 256
BATCH, CONTEXT, MAX_TOKENS = 64, 1024, 900
MOVED_BLOCKS = 128  # 256 MiB at a time per direction
ROUNDS = 5


def main() -> None:
    options = arguments("Tiers below the GPU of this machine.").parse_args()
    model_config = dataclasses.replace(LLAMA3_8B, max_positions=65536)
    model = Model(model_config, random_weights(model_config, torch.bfloat16, torch.device("cuda")))
    num_prefix = PREFIX // BLOCK_TOKENS
    cache = CacheConfig(
        2 * num_prefix + BATCH * CONTEXT // BLOCK_TOKENS + 4096,
        host=HostConfig(3 * num_prefix),
        stores=(StoreConfig("disk", WritebackConfig(WritePolicy.BACK, low_share=0.0), WaitPolicy.WAIT),),
        always_load=True,
    )
    config = EngineConfig(BLOCK_TOKENS, cache, SchedulerConfig(max_rows=BATCH, max_step_tokens=8192), (1, BATCH))
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder, 16 << 30)
        engine = Engine(model, config=config, stores={"disk": store})
        all_pinned(engine)
        rows, bars = first_tokens(engine)
        engine.close()
    # the blocks of the batch are saved too, and stay while it runs
    host = HostConfig(BATCH * (CONTEXT + MAX_TOKENS) // BLOCK_TOKENS + 16 * MOVED_BLOCKS)
    engine = Engine(model, config=dataclasses.replace(config, cache=dataclasses.replace(cache, host=host, stores=())))
    all_pinned(engine)
    more_rows, more_bars = decoding(engine)
    engine.close()
    report("tiers_gpu", rows + more_rows, bars + more_bars, options.results)


def all_pinned(engine: Engine) -> None:
    """Wait until all host memory is pinned in the background."""
    assert engine.config.cache.host is not None
    while engine.manager.stats.tiers[1].num_blocks < engine.config.cache.host.num_blocks:
        engine.step()


def first_tokens(engine: Engine) -> tuple[list[Row], list[Bar]]:
    """Measure the median time to first token of a prefix of 32k tokens and 256 new ones."""
    random = np.random.default_rng(0)
    prefix = random.integers(1, 100_000, PREFIX)
    chain = engine.chain(prefix.tolist())

    def prompt() -> list[int]:
        return [*prefix.tolist(), *random.integers(1, 100_000, SUFFIX).tolist()]

    def demote() -> None:
        engine.tiers.demote(chain)

    def forget() -> None:
        engine.tiers.save(chain)
        engine.tiers.reset()

    def elsewhere() -> list[int]:
        return random.integers(1, 100_000, PREFIX + SUFFIX).tolist()

    ttft(engine, prompt())  # compiles kernels, fills the cache
    cases: dict[str, tuple[Callable[[], object], Callable[[], list[int]], int]] = {
        "recompute": (lambda: None, elsewhere, 2),
        "device hit": (lambda: None, prompt, ROUNDS),
        "host hit": (demote, prompt, ROUNDS),
        "disk hit": (forget, prompt, 2),
    }
    seconds, rows = {}, []
    link = link_bytes_per_second()
    load = PREFIX // BLOCK_TOKENS * sum(group.block_bytes for group in engine.groups) / link
    for name, (before, make, rounds) in cases.items():
        taken, found = [], {}
        for _ in range(rounds + 1):
            before()
            one, found = ttft(engine, make())
            taken.append(one)
        seconds[name] = statistics.median(taken[1:])
        rows.append(
            {"case": name, "TTFT ms": seconds[name] * 1e3, "best ms": min(taken) * 1e3, "tokens from": str(found)}
        )
    groups = 4
    allowed = 1.1 * max(load, seconds["device hit"]) + load / groups
    print_table(rows)
    print(
        f"link {link / 1e9:.1f} GB/s: the prefix takes {load * 1e3:.1f} ms; allowed for a host hit {allowed * 1e3:.1f}"
    )
    bars = [
        at_most("host hit over 1.1 x max(link, compute left) + first group", seconds["host hit"] / allowed, 1.0),
        at_most("host hit over recompute", seconds["host hit"] / seconds["recompute"], 1.0),
    ]
    return rows, bars


class BackgroundBlocks:
    """Blocks that move during a batch like those of requests, but are not computed.

    One prompt is always being loaded from the host; another, as if just computed, is being saved.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._random = engine, np.random.default_rng(2)
        self._control = CacheAdmin(engine.manager)
        self._known = [self._new() for _ in range(3)]
        drain(engine)
        for chain in self._known:
            self._control.demote(chain)
        self._loading: Allocation | None = None

    def advance(self) -> None:
        """Before a step: release blocks that have arrived, and start the next transfers."""
        manager = self._engine.manager
        if self._loading is not None and manager.is_ready(self._loading):
            manager.finish(self._loading)
            self._control.demote(self._known[-1])
            self._loading = None
        if self._loading is None:
            self._known.append(self._known.pop(0))
            self._loading = manager.match(self._known[-1])
            assert manager.allocate(self._loading, self._known[-1].num_tokens) is None
            manager.on_scheduled(self._loading)
            assert self._loading.is_loading
        if not manager.transfers.num_blocks(Route.DEVICE_TO_HOST):
            self._new()

    def _new(self) -> Chain:
        """Publish a new prompt: it is saved to the host, and later evicted from both tiers."""
        manager, count = self._engine.manager, MOVED_BLOCKS * BLOCK_TOKENS
        chain = self._engine.chain(self._random.integers(1, 100_000, count + 1).tolist())
        hold = manager.match(chain)
        assert manager.allocate(hold, count) is None
        manager.on_scheduled(hold)
        manager.publish(hold, count)
        manager.finish(hold)
        return chain


def decoding(engine: Engine) -> tuple[list[Row], list[Bar]]:
    """Measure decode steps of 64 sequences, alone and during transfers in both directions, alternating."""
    random = np.random.default_rng(1)
    for _ in range(BATCH):
        engine.add(
            random.integers(1, 100_000, CONTEXT).tolist(),
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
    while any(not request.num_new_tokens for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    drain(engine)
    background = BackgroundBlocks(engine)
    steps: dict[str, list[float]] = {"alone": [], "loads and saves": []}
    moved = 0
    for turn in range(16):
        name = "loads and saves" if turn % 2 else "alone"
        before = moved_bytes(engine)
        for _ in range(22):
            if turn % 2:
                background.advance()
            start = time.perf_counter()
            engine.step()
            steps[name].append(time.perf_counter() - start)
        moved += (moved_bytes(engine) - before) * (turn % 2)
        drain(engine)
    medians = {name: statistics.median(taken) for name, taken in steps.items()}
    rows: list[Row] = [
        {"case": f"decode 64, {name}", "step ms": value * 1e3, "best ms": min(steps[name]) * 1e3}
        for name, value in medians.items()
    ]
    print_table(rows)
    lost = 1 - medians["alone"] / medians["loads and saves"]
    rate = moved / sum(steps["loads and saves"]) / 1e9
    print(f"transfers during decoding: {rate:.1f} GB/s, sum of both directions")
    rows.append({"case": "moved beside decode", "GB/s": rate})
    return rows, [at_most("share of decode lost to loads and saves", lost, 0.05)]


def moved_bytes(engine: Engine) -> int:
    """Return the bytes moved between device and host so far."""
    return sum(each.num_bytes for each in engine.tiers.traffic())


def ttft(engine: Engine, prompt: list[int]) -> tuple[float, dict[str, int]]:
    """Return the seconds to the first token of a single request, and the tiers of its tokens."""
    drain(engine)
    torch.cuda.synchronize()
    start = time.perf_counter()
    name = engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
    while not any(output.token_ids for output in engine.step()):
        pass
    taken = time.perf_counter() - start
    drain(engine)
    return taken, engine.explain(name).tokens_from


def drain(engine: Engine) -> None:
    """Run steps until all saves are done."""
    while engine.manager.has_plans:
        engine.step()


def link_bytes_per_second() -> float:
    """Measure one contiguous copy of pinned memory to the device."""
    host, device = (
        torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    )
    taken = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return (1 << 30) / statistics.median(taken)


if __name__ == "__main__":
    main()
