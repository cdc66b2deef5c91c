"""The manager with three tiers beside the bare index: CPU time of a request's decisions, no bytes moved.

python -m benchmarks.manager --trace conversation_trace.jsonl

Every request is prefetched, matched, allocated, published and finished; plans are answered at once by a worker that
moves nothing and is not timed, what the manager makes of its reports is. The bare index does the same on one tier, with
the keys that a store needs; both in turn, batch by batch, so that a slow moment hits both.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.index import BATCH, run_one, tree
from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import Chain, Namespace, RadixTree
from kvtier.messages import Plan, Report, StoreLookup, TransferResult
from kvtier.replay import SyntheticTrace, TraceRequest, generate, read_trace

TOKENS = {"device": 1_000_000, "host": 5_000_000}
BLOCK_BYTES = 1 << 20
TOKEN_SECONDS = 1e-4
"""What computing a token takes, and a move: loading is always worth it."""


def main() -> None:
    """Measure, print, keep."""
    parser = arguments("CPU time of the cache manager with device, host and disk.")
    parser.add_argument("--trace", help="Mooncake JSONL; a generated one without it")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trace = read_trace(options.trace).requests if options.trace else tuple(generate(SyntheticTrace(sessions=800)))
    rows, bars = [], []
    for block_tokens in (512, 64, 16):
        row, bar = compare(trace[: options.requests], block_tokens, options.rounds)
        rows.append(row)
        bars.append(bar)
    print_table(rows)
    report("manager", rows, bars, options.results)


def compare(trace: Sequence[TraceRequest], block_tokens: int, rounds: int) -> tuple[Row, Bar]:
    """One block size. Every round runs the same requests from the same start; the best time of a batch counts."""
    prompts = [request.tokens() for request in trace]
    prompts = [prompt for prompt in prompts if len(prompt) < TOKENS["device"] // 4]
    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    best = {name: [math.inf] * len(batches) for name in ("manager", "index with keys", "index")}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        num_slots = TOKENS["device"] // block_tokens
        keyed, bare = tree(block_tokens, num_slots, with_keys=True), tree(block_tokens, num_slots)
        manager = three_tiers(block_tokens, num_slots)
        for number, batch in enumerate(batches):
            taken = {
                "index with keys": timed_index(keyed, batch),
                "index": timed_index(bare, batch),
                "manager": sum(decide(manager, prompt, float(number)) for prompt in batch),
            }
            for name, seconds in taken.items():
                best[name][number] = min(best[name][number], seconds)
            gc.collect()
        manager.check()
    gc.enable()
    us = {name: sum(taken) / len(prompts) * 1e6 for name, taken in best.items()}
    ratio, counts = us["manager"] / us["index with keys"], manager.transfers.counts
    row: Row = {
        "block tokens": block_tokens,
        "requests": len(prompts),
        **{f"{name} us": value for name, value in us.items()},
        "over index with keys": ratio,
        "over index": us["manager"] / us["index"],
        "hit tokens": " ".join(f"{tier.name} {tier.hit_tokens}" for tier in manager.stats.tiers),
        "blocks moved": " ".join(f"{purpose.value} {count.num_blocks}" for purpose, count in counts.items()),
    }
    return row, at_most(f"manager over the bare index with keys, {block_tokens} tokens a block", ratio, 3.0)


def three_tiers(block_tokens: int, num_slots: int) -> CacheManager:
    """A manager that saves and stores everything, and knows that its disk is empty at first."""
    host = HostConfig(TOKENS["host"] // block_tokens)
    config = CacheConfig(num_slots, host=host, stores=(StoreConfig("disk"),))
    manager = CacheManager(Namespace("model", block_tokens=block_tokens), config)
    answer(manager, manager.plan())
    return manager


def timed_index(index: RadixTree, prompts: Sequence[Any]) -> float:
    """CPU seconds of the bare index."""
    start = time.process_time()
    for prompt in prompts:
        run_one(index, prompt)
    return time.process_time() - start


def decide(manager: CacheManager, prompt: Any, now: float) -> float:
    """CPU seconds of all decisions for one request; the worker's answers are made outside of them."""
    clock = time.process_time
    start = clock()
    chain = Chain(manager.namespace, prompt)
    fetch = manager.prefetch(chain, now=now)
    plan = manager.plan(now=now)
    taken = clock() - start + answer(manager, plan)
    start = clock()
    hold = manager.match(chain, now=now, prefetch=fetch)
    if fetch is not None:
        manager.end_prefetch(fetch)
    assert manager.allocate(hold, chain.num_tokens) is None
    plan = manager.plan(now=now)
    taken += clock() - start + answer(manager, plan)
    start = clock()
    assert manager.is_ready(hold)
    manager.on_scheduled(hold, now=now)
    num_computed = chain.num_tokens - hold.num_cached_tokens
    manager.on_computed(num_computed, num_computed * chain.num_tokens / 2, num_computed * TOKEN_SECONDS)
    manager.publish(hold, chain.num_tokens, now=now)
    manager.finish(hold, now=now)
    return taken + clock() - start


def answer(manager: CacheManager, plan: Plan) -> float:
    """Say that all of it is done; returns the CPU seconds the manager takes to hear it."""
    if not plan:
        return 0.0
    outcomes = tuple(
        TransferResult(each.id, True, each.num_blocks * BLOCK_BYTES, TOKEN_SECONDS) for each in plan.transfers
    )
    presences = tuple(StoreLookup(probe.store, probe_id=probe.id) for probe in plan.probes)
    start = time.process_time()
    manager.apply(Report(plan.epoch, 0, outcomes, presences))
    return time.process_time() - start


if __name__ == "__main__":
    main()
