"""The manager with three tiers compared with the plain index: CPU time of the decisions for a request.

python -m benchmarks.manager --trace conversation_trace.jsonl

Every request is prefetched, matched, allocated, published and finished. A simulated worker, which copies nothing,
reports every plan as done at once. Its time is excluded, but the manager's time for the reports is included. The plain
index serves the same requests on one tier, and computes the keys that a store needs. Both alternate batch by batch, so
that noise affects both.
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
"""Seconds to compute a token and to move a block: loading is always faster."""


def main() -> None:
    parser = arguments("CPU time of the cache manager with device, host and disk.")
    parser.add_argument("--trace", help="Mooncake JSONL; default: a generated trace")
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
    """Measure one block size. All rounds run the same requests from the same state. The best time of a batch counts."""
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
        "blocks moved": " ".join(f"{route.value} {count.num_blocks}" for route, count in counts.items()),
    }
    return row, at_most(f"manager over the bare index with keys, {block_tokens} tokens a block", ratio, 3.0)


def three_tiers(block_tokens: int, num_slots: int) -> CacheManager:
    """Return a manager that saves and stores everything and starts with an empty disk."""
    host = HostConfig(TOKENS["host"] // block_tokens)
    config = CacheConfig(num_slots, host=host, stores=(StoreConfig("disk"),))
    manager = CacheManager(Namespace("model", block_tokens=block_tokens), config)
    answer(manager, manager.plan())
    return manager


def timed_index(index: RadixTree, prompts: Sequence[Any]) -> float:
    """Return the CPU seconds of the plain index."""
    start = time.process_time()
    for prompt in prompts:
        run_one(index, prompt)
    return time.process_time() - start


def decide(manager: CacheManager, prompt: Any, now: float) -> float:
    """Return the CPU seconds of all decisions for one request, without the worker."""
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
    manager.cost_model.observe_compute(num_computed, num_computed * chain.num_tokens / 2, num_computed * TOKEN_SECONDS)
    manager.publish(hold, chain.num_tokens, now=now)
    manager.finish(hold, now=now)
    return taken + clock() - start


def answer(manager: CacheManager, plan: Plan) -> float:
    """Report every transfer as done; return the CPU seconds of the manager for the reports."""
    if not plan:
        return 0.0
    results = tuple(
        TransferResult(each.id, True, each.num_blocks * BLOCK_BYTES, TOKEN_SECONDS) for each in plan.transfers
    )
    lookups = tuple(StoreLookup(probe.store, probe_id=probe.id) for probe in plan.probes)
    start = time.process_time()
    manager.apply(Report(plan.epoch, 0, results, lookups))
    return time.process_time() - start


if __name__ == "__main__":
    main()
