"""Time to first token of a long prompt by the tier of its prefix: none, device, host or disk.

python -m benchmarks.tiers_gpu            random weights of Llama-3-8B's shape: nothing to download
python -m benchmarks.tiers_gpu --decode   only the second part

The rate of the link is measured in the same run with one contiguous copy. The time of the remaining computation is the
time of a hit on the device. A load is split into groups of layers, and the model starts after the first group. A hit on
the host should therefore take the longer of both times, plus the time to load the first group.

The second part measures how much longer a decode step takes while the engine loads and saves other blocks, 256 MiB per
direction at a time, with an inclusive and with an exclusive host tier. The exclusive tier saves some blocks twice.
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
    parser = arguments("Tiers below the GPU of this machine.")
    parser.add_argument("--decode", action="store_true", help="measure only decode steps during transfers")
    options = parser.parse_args()
    model_config = dataclasses.replace(LLAMA3_8B, max_positions=65536)
    model = Model(model_config, random_weights(model_config, torch.bfloat16, torch.device("cuda")))
    num_prefix = PREFIX // BLOCK_TOKENS
    cache = CacheConfig(
        2 * num_prefix + BATCH * CONTEXT // BLOCK_TOKENS + 4096,
        host=HostConfig(3 * num_prefix),
        stores=(StoreConfig("disk", WritebackConfig(WritePolicy.BACK, low_share=0.0), WaitPolicy.WAIT),),
        always_load=True,
    )
    config = EngineConfig(
        BLOCK_TOKENS, cache, SchedulerConfig(max_rows=BATCH, max_step_tokens=8192), (1, BATCH), phases=2
    )
    rows: list[Row] = []
    bars: list[Bar] = []
    if not options.decode:
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(model, config=config, stores={"disk": DiskStore(folder, 16 << 30)})
            all_pinned(engine)
            rows, bars = first_tokens(engine)
            engine.close()
    for is_exclusive in (False, True):
        # The blocks of the batch are saved too, and stay while it runs. Both tiers have space for 16 other prompts.
        num_blocks = BATCH * (CONTEXT + MAX_TOKENS) // BLOCK_TOKENS + 16 * MOVED_BLOCKS
        small = CacheConfig(num_blocks, host=HostConfig(num_blocks, exclusive=is_exclusive), always_load=True)
        engine = Engine(model, config=dataclasses.replace(config, cache=small))
        all_pinned(engine)
        more_rows, more_bars = decoding(engine, is_exclusive=is_exclusive)
        engine.close()
        rows += more_rows
        bars += more_bars
    report("tiers_gpu", rows, bars, options.results)


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

    One prompt is always being loaded from the host. With an inclusive host tier, it then leaves the device, and another
    prompt, as if just computed, is being saved. With an exclusive host tier, the prompts fit only into both tiers
    together: a prompt that is loaded leaves the host, and is saved again before the device evicts it.
    """

    def __init__(self, engine: Engine, *, is_exclusive: bool) -> None:
        self._engine, self._random = engine, np.random.default_rng(2)
        self._control, self._is_exclusive = CacheAdmin(engine.manager), is_exclusive
        self._known: list[Chain] = []
        for _ in range(24 if is_exclusive else 3):
            self._known.append(self._new())
            drain(engine)
        self._loading: Allocation | None = None
        self.num_loads = self.num_lost = 0

    def advance(self) -> None:
        """Before a step: release blocks that have arrived, and start the next transfers."""
        manager = self._engine.manager
        if self._loading is not None and manager.is_ready(self._loading):
            manager.finish(self._loading)
            self._loading = None
        if self._loading is None:
            chain = self._known.pop(0)
            if not self._is_exclusive:
                self._control.demote(chain)
            loading = manager.match(chain)
            assert manager.allocate(loading, chain.num_tokens) is None
            manager.on_scheduled(loading)
            if loading.is_loading:
                self._loading, self.num_loads = loading, self.num_loads + 1
            else:
                manager.finish(loading)
                self.num_lost += 1
                chain = self._new()
            self._known.append(chain)
        if not self._is_exclusive and not manager.transfers.num_blocks(Route.DEVICE_TO_HOST):
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


def decoding(engine: Engine, *, is_exclusive: bool) -> tuple[list[Row], list[Bar]]:
    """Measure decode steps of 64 sequences, alone and during transfers in both directions, alternating."""
    rule, random = "exclusive" if is_exclusive else "inclusive", np.random.default_rng(1)
    for _ in range(BATCH):
        engine.add(
            random.integers(1, 100_000, CONTEXT).tolist(),
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
    while any(not request.num_new_tokens for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    drain(engine)
    background = BackgroundBlocks(engine, is_exclusive=is_exclusive)
    steps: dict[str, list[float]] = {"alone": [], "loads and saves": []}
    moved, duplicates = 0, engine.manager.stats.num_duplicates_evicted
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
        {"case": f"decode 64, {rule}, {name}", "step ms": value * 1e3, "best ms": min(steps[name]) * 1e3}
        for name, value in medians.items()
    ]
    print_table(rows)
    lost = 1 - medians["alone"] / medians["loads and saves"]
    rate = moved / sum(steps["loads and saves"]) / 1e9
    duplicates = engine.manager.stats.num_duplicates_evicted - duplicates
    print(
        f"{rule}: {rate:.1f} GB/s during decoding, sum of both directions; {background.num_loads} prompts loaded, "
        f"{background.num_lost} not in the host; at most {duplicates} blocks saved again"
    )
    rows.append({"case": f"moved beside decode, {rule}", "GB/s": rate, "saved again at most": duplicates})
    return rows, [at_most(f"share of decode lost to loads and saves, {rule}", lost, 0.05)]


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
