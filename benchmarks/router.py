"""Router: decisions per second, bytes of the index, lost events, and hits of a simulated fleet.

python -m benchmarks.router                       without the simulation
python -m benchmarks.router --trace FILE          Mooncake's conversation trace
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from benchmarks.report import Bar, Row, arguments, at_least, at_most, best, report
from kvtier.index import Chain, Namespace
from kvtier.replay import read_trace
from kvtier.replay.curves import Accesses, index_hits
from kvtier.replay.fleet import FleetConfig, FleetRouting, FleetSimulation, FleetTrace, replica_costs
from kvtier.replay.hardware import GpuSpec, ModelSpec, preset
from kvtier.router import (
    EventBatch,
    FeedState,
    PlacementIndex,
    ReplicaFeed,
    RouteDecision,
    Router,
    RouterConfig,
    hashes_of,
)

REPLICAS, BLOCK_TOKENS, PROMPT_TOKENS = 64, 16, 8192
NUM_PROMPTS, SYSTEM_BLOCKS = 400, 128
PER_ROUND, ROUNDS = 100, 40
IN_FLIGHT = 1024  # 16 requests per replica; half of them have no token yet
FLEET, FLEET_BLOCKS = 16, 4000


def main() -> None:
    parser = arguments("Decisions, memory and hits of the router.")
    parser.add_argument("--trace", help="Mooncake's conversation trace")
    options = parser.parse_args()
    rows, bars = decisions()
    lost_rows, lost_bars = lost_events()
    rows, bars = rows + lost_rows, bars + lost_bars
    if options.trace:
        fleet_rows, fleet_bars = fleet(options.trace)
        rows, bars = rows + fleet_rows, bars + fleet_bars
    report("router", rows, bars, options.results)


def decisions() -> tuple[list[Row], list[Bar]]:
    """Route prompts of 8k tokens that share a system prompt; three replicas hold a random prefix of each."""
    rng = np.random.default_rng(0)
    router = Router(RouterConfig(BLOCK_TOKENS, REPLICAS))
    for number in range(REPLICAS):
        router.add(str(number))
    namespace = Namespace("model", block_tokens=BLOCK_TOKENS)
    system = rng.integers(0, 50_000, SYSTEM_BLOCKS * BLOCK_TOKENS, np.int32)
    prompts = []
    for number in range(NUM_PROMPTS):
        rest = rng.integers(0, 50_000, PROMPT_TOKENS - len(system), np.int32)
        tokens = np.append(system, rest)
        hashes = hashes_of(Chain(namespace, tokens).keys())
        prompts.append((tokens, hashes))
        for copy in range(3):
            router.index.store((number + 7 * copy) % REPLICAS, number % 3, hashes[: int(rng.integers(100, 512))])
    at = 0
    waiting: deque[RouteDecision] = deque()
    generating: deque[RouteDecision] = deque()

    def route() -> None:
        nonlocal at
        for _ in range(PER_ROUND):
            decision = router.route(prompts[at % NUM_PROMPTS][1], PROMPT_TOKENS)
            assert decision is not None
            waiting.append(decision)
            if len(waiting) > IN_FLIGHT // 2:
                router.on_first_token(waiting[0])
                generating.append(waiting.popleft())
            if len(generating) > IN_FLIGHT // 2:
                router.on_finish(generating.popleft())
            at += 1

    for _ in range(2 * IN_FLIGHT // PER_ROUND):
        route()

    def hash_keys() -> None:
        for number in range(PER_ROUND):
            hashes_of(Chain(namespace, prompts[number % NUM_PROMPTS][0]).keys())

    seconds = {name: taken / PER_ROUND for name, taken in best({"route": route, "hash": hash_keys}, ROUNDS).items()}
    router.check()
    num_bytes = router.index.num_bytes / router.index.num_blocks
    row = {
        "replicas": REPLICAS,
        "prompt tokens": PROMPT_TOKENS,
        "requests in flight": len(waiting) + len(generating),
        "us per decision": seconds["route"] * 1e6,
        "us of key hashing": seconds["hash"] * 1e6,
        "bytes per block": num_bytes,
    }
    return [row], [
        at_least("decisions per second", 1 / seconds["route"], 5000),
        at_most("bytes per block on one replica", num_bytes, 100),
    ]


def lost_events() -> tuple[list[Row], list[Bar]]:
    """Lose 1 % of the batches of a replica, then resync once by replay. Compare the index with the replica."""
    rng = random.Random(0)
    held: set[int] = set()
    batches = []
    for number in range(20_000):
        removed = rng.sample(sorted(held), 4) if len(held) > 2000 else []
        stored = [rng.getrandbits(64) for _ in range(4)]
        held = (held - set(removed)) | set(stored)
        events = [{"type": kind, "block_hashes": some, "medium": "GPU"} for kind, some in
                  (("BlockRemoved", removed), ("BlockStored", stored))]  # fmt: skip
        batches.append(EventBatch(number, float(number), events))
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    num_lost = 0
    for batch in batches:
        if rng.random() < 0.01:
            num_lost += 1
        else:
            feed.apply(batch)
    before = _agreement(index, held)
    for batch in batches[feed.next_number :]:
        feed.apply(batch)
    after = _agreement(index, held)
    row = {"batches": len(batches), "lost": num_lost, "agreement before": before, "agreement after a resync": after}
    live = float(feed.state is FeedState.LIVE)
    return [row], [at_least("agreement with the replica after one resync", after * live, 1.0)]


def _agreement(index: PlacementIndex, held: set[int]) -> float:
    """Return the share of blocks on which index and replica agree."""
    known = np.array(sorted(held), np.uint64)
    both = int(index.holds(0, 0, known).sum())
    return both / (len(held) + index.num_blocks - both)


def fleet(path: str) -> tuple[list[Row], list[Bar]]:
    """Simulate 16 replicas of Llama-3-8B on H200s with 4,000 blocks of 512 tokens each."""
    requests = read_trace(path).requests
    block_tokens = requests[0].block_tokens
    costs = replica_costs(preset(ModelSpec, "llama-3-8b"), preset(GpuSpec, "h200"), block_tokens)
    accesses = Accesses(requests)
    one = index_hits(accesses, FLEET * FLEET_BLOCKS, "lru") / sum(len(paths) for paths in accesses)
    rows: list[Row] = [{"fleet": "one cache of all blocks", "hit rate": one}]
    rates = {}
    for routing in FleetRouting:
        config = FleetConfig(FLEET, FLEET_BLOCKS, costs, routing)
        summary = FleetSimulation(config, block_tokens).run(FleetTrace(requests))
        rates[routing] = summary.hit_rate
        rows.append({"fleet": routing.value, "hit rate": summary.hit_rate, "imbalance": summary.imbalance,
                     "TTFT p50": summary.ttft["p50"], "TTFT p99": summary.ttft["p99"]})  # fmt: skip
    return rows, [at_most("points below one cache", 100 * (one - rates[FleetRouting.CACHE]), 2)]


if __name__ == "__main__":
    main()
