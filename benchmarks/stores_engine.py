"""The value of a shared store to an engine, and the quality of its decisions: parts of benchmarks.stores.

ttft       SmolLM2 and a prompt whose blocks are in the store but not in memory. The time to first token is measured
           with loaded and with computed blocks, alternating.
decision   A model with random weights and prompts of several lengths. A proxy process delays every reply of Redis. At
           each latency, a new engine first serves twelve requests, half of them new to the store. Then it decides for
           each prompt length whether to load or to compute. The same prompt is also loaded and computed by force,
           alternating, each after a lookup. A decision is right if its median time is at most a tenth above the time of
           the alternative, because medians of equal work differ by as much on this machine.

The model computes on one core, so that the servers can use the other one.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import store_servers
from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, at_least
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.cache.cost_model import CostModel, LoadDecision
from kvtier.engine import SamplingParams
from kvtier.engine.checkpoint import load_model
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.scheduler import SchedulerConfig
from kvtier.storage.open import open_store
from store_proxy import Faults, proxy_process

BLOCK_TOKENS = 16
NOISE = 0.1
LENGTHS = (48, 96, 192, 384, 768, 1536)
LATENCIES_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.25)
SWEEP_MODEL = ModelConfig("llama", 6, 256, 688, 4, 2, 64, 4096, 4096, norm_eps=1e-5, rope=RopeConfig(10000.0))
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Forced:
    """A cost model with a fixed decision; it ignores measurements."""

    def __init__(self, *, load: bool) -> None:
        self._load = load

    def decide(self, num_blocks: object, first: int, num_tokens: int, *, again: bool = False) -> LoadDecision:  # noqa: ARG002
        return LoadDecision(self._load, num_tokens, None, None)

    def moved(self, *_: object) -> None:
        pass

    def computed(self, *_: object) -> None:
        pass


class Bench:
    """An engine with a shared store and a fixed or free decision."""

    def __init__(self, model: Model, url: str, num_tokens: int) -> None:
        torch.set_num_threads(1)
        num_blocks = num_tokens // BLOCK_TOKENS + 64
        shared = StoreConfig("shared", is_shared=True, wait_seconds=60)
        cache = CacheConfig(num_blocks, host=HostConfig(num_blocks), stores=(shared,))
        config = EngineConfig(BLOCK_TOKENS, cache, SchedulerConfig(max_rows=8, max_step_tokens=512))
        self._engine = Engine(model, config=config, stores={"shared": open_store(url)})

    def store(self, prompt: list[int]) -> None:
        """Compute a prompt and wait until it is stored."""
        self.first_token(prompt, Forced(load=False))
        self._engine.tiers.save(self._engine.chain(prompt))

    def first_token(self, prompt: list[int], speeds: CostModel | Forced) -> tuple[float, bool]:
        """Return the seconds to the first token with nothing in memory, and True if blocks came from the store."""
        engine = self._engine
        engine.tiers.reset()  # waits for transfers in flight
        engine.manager.cost_model = engine.manager._prefetcher._cost_model = speeds  # type: ignore[assignment, union-attr]
        begin = time.perf_counter()
        name = engine.add(prompt, FIRST_TOKEN)
        while not (outputs := engine.step()):
            pass
        seconds = time.perf_counter() - begin
        assert outputs[0].token_ids, outputs
        return seconds, engine.explain(name).tokens_from.get("shared", 0) > 0

    def close(self) -> None:
        """Close the engine, which closes the store."""
        self._engine.close()


def prompt_of(num_tokens: int, vocab: int, seed: str = "") -> list[int]:
    """Return random tokens that depend on length and seed only."""
    source = random.Random(f"{num_tokens}{seed}")
    return [source.randrange(vocab) for _ in range(num_tokens)]


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[str]:
    with store_servers.redis_server(folder) as port:
        yield f"redis://127.0.0.1:{port}?timeout=60s"


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    with store_servers.s3_server(folder) as port:
        user = f"{store_servers.S3_KEY}:{store_servers.S3_SECRET}"
        yield f"s3://{user}@test/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1&timeout=60s"


def ttft(folder: Path, rounds: int) -> tuple[list[Row], list[Bar]]:
    """Compare hits with computing."""
    rows: list[Row] = []
    model = load_model("smollm2", "f32", "cpu")
    for place in (redis, s3):
        try:
            with place(folder / place.__name__) as url, contextlib.closing(Bench(model, url, 1024)) as bench:
                rows += [_ttft_row(bench, place.__name__, num_tokens, rounds) for num_tokens in (128, 512, 1024)]
        except store_servers.NotInstalled as missing:
            print(f"skipped: {missing}")
    return rows, []


def _ttft_row(bench: Bench, store: str, num_tokens: int, rounds: int) -> Row:
    prompt = prompt_of(num_tokens, 40_000)
    bench.store(prompt)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for load, seconds in taken.items():
            took, was_loaded = bench.first_token(prompt, Forced(load=load))
            assert was_loaded is load
            seconds.append(took)
    hit, compute = (statistics.median(taken[load]) * 1e3 for load in (True, False))
    return {"store": store, "prompt": num_tokens, "hit ms": hit, "compute ms": compute, "times": compute / hit}


def decision(folder: Path, rounds: int) -> tuple[list[Row], list[Bar]]:
    rows: list[Row] = []
    model = Model(SWEEP_MODEL, random_weights(SWEEP_MODEL, torch.float32, torch.device("cpu"), seed=1))
    prompts = {length: prompt_of(length, SWEEP_MODEL.vocab_size) for length in LENGTHS}
    try:
        with contextlib.ExitStack() as stack:
            upstream = stack.enter_context(store_servers.redis_server(folder / "sweep"))
            port, change = stack.enter_context(proxy_process(upstream))
            bench = Bench(model, f"redis://127.0.0.1:{port}?timeout=60s", max(LENGTHS))
            stack.callback(bench.close)
            for prompt in prompts.values():
                bench.store(prompt)
            for latency_s in LATENCIES_S:
                change(Faults(latency_s=latency_s))
                rows += _decided(bench, prompts, latency_s, rounds)
    except store_servers.NotInstalled as missing:
        print(f"skipped: {missing}")
        return [], []
    share = sum(int(str(row["right"])) for row in rows) / sum(int(str(row["of"])) for row in rows)
    return rows, [at_least("load or recompute: right decisions", share, 0.95)]


def _decided(bench: Bench, prompts: dict[int, list[int]], latency_s: float, rounds: int) -> list[Row]:
    speeds = CostModel()
    new = [prompt_of(length, SWEEP_MODEL.vocab_size, seed=f"{latency_s}") for length in prompts]
    seen = [*prompts.values(), *new]
    random.Random(1).shuffle(seen)
    for prompt in seen:  # measurements before the decisions
        bench.first_token(prompt, speeds)
    rows: list[Row] = []
    for length, prompt in prompts.items():
        chosen, loaded, computed = [], [], []
        for _ in range(rounds):
            chosen.append(bench.first_token(prompt, speeds)[1])
            loaded.append(bench.first_token(prompt, Forced(load=True))[0])
            computed.append(bench.first_token(prompt, Forced(load=False))[0])
        load, compute = statistics.median(loaded), statistics.median(computed)
        fine = {True: load <= compute * (1 + NOISE), False: compute <= load * (1 + NOISE)}
        rows.append(
            {"prompt": length, "latency ms": latency_s * 1e3, "load ms": load * 1e3, "compute ms": compute * 1e3}
            | {"loads": sum(chosen), "of": len(chosen), "right": sum(fine[was_loaded] for was_loaded in chosen)}
        )
    return rows
