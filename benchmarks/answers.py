"""Check that the cache never changes an answer: run the same conversations with every cache and compare each token.

PYTHONPATH=.:tests python -m benchmarks.answers                     SmolLM2-135M; 200 requests with each of seven caches
PYTHONPATH=.:tests python -m benchmarks.answers --conversations 4   a short run: 20 requests

Conversations of five turns over shared system prompts arrive at random. Half of the requests are greedy, and the others
are sampled with their own seed. In batch-invariant mode, the logits of a token depend only on its own sequence. The
answers must therefore equal those of an engine without a cache, after any copy, eviction, and damaged or lost object.

In fast mode, the order of summation depends on the other rows of the batch, and so do the last bits of the logits. Each
engine with a cache is then forced to follow the tokens of the engine without a cache. Each logit of each step must be
equal within TOLERANCE.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams, load_model
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore, MemoryStore, Store
from storage_support import Fault, FaultyStore

TURNS, TOKENS_OUT, BLOCK_TOKENS = 5, 6, 16
MOST_BLOCKS = 16  # per request
TOLERANCE = 2e-3  # of a logit, absolute; SmolLM2's are between -20 and 40
WAIT = StoreConfig("disk", wait=WaitPolicy.WAIT)

Name = tuple[int, int]
"""A request: conversation and turn."""


class Script:
    """The messages of the users, and the sampling parameters of each answer."""

    def __init__(self, conversations: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        systems = [[rng.randrange(100, 40_000) for _ in range(length)] for length in (40, 64)]
        self.messages = [
            [systems[i % 2] * (turn == 0) + self._message(rng) for turn in range(TURNS)] for i in range(conversations)
        ]

    @staticmethod
    def _message(rng: random.Random) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(rng.randint(6, 20))]

    @property
    def num_requests(self) -> int:
        return TURNS * len(self.messages)

    def params(self, name: Name) -> SamplingParams:
        """Return the parameters of one request; they are the same in every run."""
        chosen = {"ignore_eos": True, "max_tokens": TOKENS_OUT, "seed": name[0] * TURNS + name[1]}
        return SamplingParams(temperature=0.0 if sum(name) % 2 else 0.8, top_p=0.95, **chosen)


Answers = dict[Name, tuple[int, ...]]


def play(engine: Engine, script: Script, params: Callable[[Name], SamplingParams], seed: int) -> Answers:
    """Run all conversations, up to sixteen at once, in an order that depends on the seed."""
    rng, answers, history = random.Random(seed), Answers(), [[] for _ in script.messages]
    ready = dict.fromkeys(range(len(script.messages)), 0)
    running: dict[str, tuple[Name, list[int]]] = {}
    while ready or running:
        if ready and len(running) < 16 and rng.random() < 0.5:
            i = rng.choice([*ready])
            name = (i, ready.pop(i))
            history[i] += script.messages[i][name[1]]
            running[engine.add(history[i], params(name))] = (name, [])
            continue
        for output in engine.step():
            assert not output.error, output
            name, tokens = running[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                del running[output.request_id]
                answers[name] = tuple(tokens)
                history[name[0]] += tokens
                ready |= {name[0]: name[1] + 1} if name[1] + 1 < TURNS else {}
    return answers


@dataclass(frozen=True)
class Case:
    """A cache configuration to compare."""

    name: str
    cache: CacheConfig
    store: Callable[[Path], Store] | None = None
    failing_copies: float = 0.0
    """Share of copies between device and host that fail."""

    def engine(self, model: Model, folder: Path) -> Engine:
        config = EngineConfig(BLOCK_TOKENS, self.cache, SchedulerConfig(16, 64))
        stores = {"disk": self.store(folder / "disk")} if self.store is not None else {}
        engine = Engine(model, config=config, stores=stores)
        if self.failing_copies:
            break_copies(engine, self.failing_copies)
        return engine


def cases() -> list[Case]:
    """Return the cases. All other cases are compared with the first one."""
    few, many = 3 * MOST_BLOCKS, 45 * MOST_BLOCKS
    below: dict[str, Any] = {"always_load": True}  # loading is under test here

    def disk(folder: Path) -> Store:
        return DiskStore(folder, 4 << 30, min_free_bytes=0)

    on_disk = CacheConfig(few, host=HostConfig(few), stores=(WAIT,), **below)
    tiny = CacheConfig(MOST_BLOCKS + 2, host=HostConfig(6), stores=(StoreConfig("disk"),), **below)
    return [
        Case("cache off", CacheConfig(many, prefix_caching=False)),
        Case("device", CacheConfig(many)),
        Case("+ host", CacheConfig(few, host=HostConfig(many), **below)),
        Case("+ disk", on_disk, disk),
        Case("+ disk, restarted", on_disk, disk),
        Case("tiny pools", tiny, lambda folder: DiskStore(folder / "tiny", 40 << 20, min_free_bytes=0)),
        Case("faults", on_disk, lambda _: FaultyStore(MemoryStore(4 << 30), faults(5)), 0.1),
    ]


def faults(seed: int) -> Iterator[Fault]:
    """Make a third of the calls of a store fail with errors, timeouts, flipped bits or truncated objects."""
    rng = random.Random(seed)
    while True:
        kinds = (Fault(error="made up"), Fault(hangs=True), Fault(flip_bit=rng.randrange(10**7)), Fault(cut_to=100))
        yield rng.choice(kinds) if rng.random() < 0.33 else Fault()


def break_copies(engine: Engine, share: float) -> None:
    """Make some copies between device and host fail, at the lowest level."""
    rng = random.Random(7)
    for lane in engine.tiers._controller._transfers._lanes.values():  # type: ignore[union-attr]
        mover = lane._mover

        def sometimes(*arguments: Any, mover: Any = mover) -> Any:
            if rng.random() < share:
                raise RuntimeError("the link is down")
            return mover(*arguments)

        lane._mover = sometimes


def main() -> None:
    parser = arguments("The same answers with every cache.")
    parser.add_argument("--conversations", type=int, default=40, help=f"of {TURNS} turns each")
    parser.add_argument("--compared", type=int, default=10, help="conversations whose logits are compared in fast mode")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, bars = same_tokens(load_model(ops=InvariantOps()), Script(options.conversations))
    print_table(rows)
    more, more_bars = same_logits(load_model(), Script(min(options.compared, options.conversations)))
    print_table(more)
    report("answers", rows + more, bars + more_bars, options.results)


def same_tokens(model: Model, script: Script) -> tuple[list[Row], list[Bar]]:
    """Compare every token in batch-invariant mode."""
    rows: list[Row] = []
    expected: Answers = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-answers-") as folder:
        for seed, case in enumerate(cases()):
            begin, engine = time.perf_counter(), case.engine(model, Path(folder))
            answers = play(engine, script, script.params, seed)
            expected = expected or answers
            same = sum(answers[name] == tokens for name, tokens in expected.items())
            rows.append(row_of("invariant", case, engine, begin) | {"requests": len(answers), "identical": same})
            print(case.name, f"{same} of {len(answers)}", f"{rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
            engine.close()
    bars = [
        at_least(f"identical answers, {row['cache']}", int(str(row["identical"])), script.num_requests) for row in rows
    ]
    by_cache = {str(row["cache"]): row for row in rows}
    for name, tier in (("+ host", "host"), ("+ disk", "disk"), ("+ disk, restarted", "disk")):
        bars.append(at_least(f"tokens that came from {tier}, {name}", int(str(by_cache[name][tier])), 1000))
    return rows, [*bars, at_least("blocks that did not arrive, faults", int(str(by_cache["faults"]["failed"])), 10)]


class Follow:
    """Keeps the logits of each step of one answer. Forces the given tokens, or without tokens the most likely ones."""

    def __init__(self, tokens: tuple[int, ...], keep: list[torch.Tensor], ends: tuple[int, ...]) -> None:
        self._tokens, self._keep, self._ends = iter(tokens), keep, ends

    def forbid(self, logits: torch.Tensor) -> None:
        """See Constraint."""
        self._keep.append(logits.clone())
        token = next(self._tokens, None)
        if token is None:
            logits[list(self._ends)] = -torch.inf  # an answer that ends early compares fewer steps
        else:
            best = logits[token].clone()
            logits.fill_(-torch.inf)
            logits[token] = best

    def accept(self, token_id: int) -> None:
        """See Constraint."""


Kept = dict[Name, list[torch.Tensor]]
"""The logits of every step of every request."""


def same_logits(model: Model, script: Script) -> tuple[list[Row], list[Bar]]:
    """Compare every logit of every step in fast mode, along the tokens of the first case."""
    rows: list[Row] = []
    expected: Answers = {}
    logits: dict[str, Kept] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-answers-") as folder:
        for seed, case in enumerate(cases()[:-1]):
            kept = logits[case.name] = {}

            def follow(name: Name, kept: Kept = kept, forced: Answers = expected) -> SamplingParams:
                constraint = Follow(forced.get(name, ()), kept.setdefault(name, []), model.config.eos_token_ids)
                return SamplingParams(temperature=0.0, max_tokens=TOKENS_OUT, constraint=lambda: constraint)

            begin, engine = time.perf_counter(), case.engine(model, Path(folder))
            answers = play(engine, script, follow, seed)
            expected = expected or answers
            assert answers == expected, "it did not follow"
            rows.append(row_of("fast", case, engine, begin) | compared(logits["cache off"], kept))
            engine.close()
    worst = max(float(str(row["largest difference"])) for row in rows)
    return rows, [at_most("largest difference of a logit, fast float32", worst, TOLERANCE)]


def compared(expected: Kept, actual: Kept) -> dict[str, object]:
    pairs = [pair for name in expected for pair in zip(expected[name], actual[name], strict=True)]
    return {
        "steps": len(pairs),
        "largest difference": max(float((a - b).abs().max()) for a, b in pairs),
        "same best token": sum(bool(a.argmax() == b.argmax()) for a, b in pairs),
        "largest logit": max(float(a.abs().max()) for a, _ in pairs),
    }


def row_of(mode: str, case: Case, engine: Engine, begin: float) -> dict[str, object]:
    """Return the counters of the tiers."""
    stats = {tier.name: tier.hit_tokens for tier in engine.manager.stats.tiers}
    counts = engine.manager.transfers.counts
    return {
        "mode": mode,
        "cache": case.name,
        "seconds": time.perf_counter() - begin,
        **{tier: stats.get(tier, 0) for tier in ("device", "host", "disk")},
        "loaded": counts[Route.HOST_TO_DEVICE].num_blocks,
        "failed": sum(route.num_failed for route in counts.values()),
    }


if __name__ == "__main__":
    main()
