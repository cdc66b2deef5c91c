"""The block index: CPU time of a request relative to a calibration loop, the cost of keys, memory and scaling.

python -m benchmarks.index --trace conversation_trace.jsonl       all block sizes, all bars
python -m benchmarks.index --trace T --block-tokens 16 --pool-tokens 5120000 --policy s3fifo --lists
"""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.hits import replay_hits
from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import BlockPool, Chain, GhostCache, Namespace, RadixTree, Slots, Tier, make_policy
from kvtier.replay import SyntheticTrace, TraceRequest, generate, read_trace
from kvtier.scheduler import Request, RowResult, Scheduler, SchedulerConfig

POOL_TOKENS = 5_120_000
BARS = {512: 0.04, 64: 0.065, 16: 0.14}
PEERS = {  # in units of `calibrate`, on the same trace
    512: "vLLM .247, SGLang Rust .202, FastDeploy .816",
    64: "vLLM .72, SGLang Rust .216, FastDeploy 4.9",
    16: "vLLM 2.11, SGLang Rust .217, FastDeploy 19.4",
}
HIT_RATES = {1_000: 0.0470, 5_000: 0.1237, 10_000: 0.2243, 30_000: 0.3448, 50_000: 0.3715, 100_000: 0.3795}
BARE = "bare hashlib chain"
PHASES = ("hash", "match", "allocate", "publish", "release")
BATCH = 64  # requests between two calibrations; their tokens are generated before the clock starts


@dataclass
class Cost:
    """CPU time of a run by phase, and the calibrations during it."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    ratios: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_new: int = 0

    @property
    def us(self) -> float:
        return sum(self.phases.values()) / self.num_requests * 1e6

    @property
    def cal(self) -> float:
        """Time per request relative to the calibration loop: the mean over batches, each with its own calibration."""
        return statistics.fmean(self.ratios)


def main() -> None:
    parser = arguments("CPU time of the block index.")
    parser.add_argument("--trace", help="a Mooncake trace; default: a synthetic one")
    parser.add_argument("--block-tokens", type=int, nargs="*", default=[512, 64, 16])
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS)
    parser.add_argument("--policy", default="lru")
    parser.add_argument(
        "--requests", type=int, default=2000, help="for blocks below 512 tokens; larger blocks replay the whole trace"
    )
    parser.add_argument("--runs", type=int, default=5, help="the median of this many rounds counts")
    options = parser.parse_args()
    trace = read_trace(options.trace).requests if options.trace else tuple(generate(SyntheticTrace(sessions=3000)))
    gc.collect()
    gc.freeze()  # exclude the trace, which is not part of the index, from garbage collection
    rows: list[Row] = []
    bars: list[Bar] = []
    for block_tokens in options.block_tokens:
        some = trace if block_tokens >= 512 else trace[: options.requests]
        more, more_bars = costs(some, block_tokens, options)
        rows += more
        bars += more_bars if options.trace and options.pool_tokens == POOL_TOKENS and options.policy == "lru" else []
    print_table(rows)
    print("peers, cal:", "; ".join(f"{size}: {PEERS[size]}" for size in options.block_tokens if size in PEERS), "\n")
    is_real = options.trace is not None
    for more, more_bars in (
        memory(trace),
        scaling(trace),
        ghost_cost(trace, options.runs),
        ghost_curve(trace, is_real),
    ):
        print_table(more)
        rows += more
        bars += more_bars
    report("index", rows, bars, options.results)


def costs(requests: Sequence[TraceRequest], block_tokens: int, options: object) -> tuple[list[Row], list[Bar]]:
    """Measure arrays and lists, without and with keys, and a plain chain of digests."""
    pool_tokens, policy, runs = options.pool_tokens, options.policy, options.runs  # type: ignore[attr-defined]
    num_slots = pool_tokens // block_tokens
    cases = {"arrays": (False, False), "lists": (True, False), "arrays, keys": (False, True)}
    whole: dict[str, list[tuple[float, float]]] = {name: [] for name in (*cases, BARE)}
    for _ in range(runs):  # alternating, so that noise affects all
        for name, (as_lists, with_keys) in cases.items():
            index = tree(block_tokens, num_slots, policy, with_keys)
            whole[name].append(time_whole(requests, functools.partial(run_one, index), as_lists))
        whole[BARE].append(time_whole(requests, lambda prompt: bare_chain(prompt.tobytes(), block_tokens * 4), False))
    middle = {name: sorted(found)[len(found) // 2] for name, found in whole.items()}
    rows: list[Row] = []
    for name, (as_lists, with_keys) in cases.items():
        split = drive(tree(block_tokens, num_slots, policy, with_keys), requests[:4000], as_lists=as_lists)
        phases = {phase: seconds / split.num_requests * 1e6 for phase, seconds in split.phases.items()}
        rows.append({"block": block_tokens, "case": name, **phases, "us": middle[name][1], "cal": middle[name][0]})
    none = dict.fromkeys(PHASES, 0.0)
    rows.append({"block": block_tokens, "case": BARE, **none, "us": middle[BARE][1], "cal": middle[BARE][0]})
    added = middle["arrays, keys"][0] - middle["arrays"][0]
    return rows, [
        at_most(f"{block_tokens}: us / calibration, local tiers", middle["arrays"][0], BARS.get(block_tokens, 1.0)),
        at_most(f"{block_tokens}: what keys add, over a bare hashlib chain", added / middle[BARE][0], 1.3),
    ]


def time_whole(requests: Sequence[TraceRequest], task: Callable[[Any], object], as_lists: bool) -> tuple[float, float]:
    """Return the CPU time of a request relative to the calibration loop, and in us. The clock is read every 64."""
    ratios, total = [], 0.0
    for start in range(0, len(requests), BATCH):
        batch = [request.tokens() for request in requests[start : start + BATCH]]
        prompts = [tokens.tolist() for tokens in batch] if as_lists else batch
        calibration = calibrate()
        begin = time.thread_time()
        for prompt in prompts:
            task(prompt)
        took = time.thread_time() - begin
        total += took
        ratios.append(took / len(prompts) / calibration)
    return statistics.fmean(ratios), total / len(requests) * 1e6


def tree(block_tokens: int, num_slots: int, policy: str = "lru", with_keys: bool = False) -> RadixTree:
    namespace = Namespace("benchmark", block_tokens=block_tokens)
    tier = Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))
    return RadixTree(namespace, [tier], with_keys=with_keys)


def drive(index: RadixTree, requests: Sequence[TraceRequest], *, as_lists: bool = False) -> Cost:
    """Match, allocate, publish and release each request in turn."""
    cost, clock = Cost(), time.thread_time
    for start in range(0, len(requests), BATCH):
        batch = [request.tokens() for request in requests[start : start + BATCH]]
        prompts = [tokens.tolist() for tokens in batch] if as_lists else batch
        calibration = calibrate()
        took = 0.0
        for prompt in prompts:
            t0 = clock()
            chain = Chain(index.namespace, prompt)
            t1 = clock()
            lease = index.match(chain)
            t2 = clock()
            slots = index.allocate(lease, chain.num_blocks - lease.num_blocks)
            t3 = clock()
            index.publish(lease, chain.num_tokens)
            t4 = clock()
            index.release(lease)
            t5 = clock()
            assert isinstance(slots, Slots), slots
            for phase, seconds in zip(PHASES, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4), strict=True):
                cost.phases[phase] += seconds
            took += t5 - t0
            cost.num_new += len(slots)
        cost.num_requests += len(prompts)
        cost.ratios.append(took / len(prompts) / calibration)
    return cost


def calibrate() -> float:
    """Return the CPU seconds of a fixed loop, the median of three. `PEERS` were measured with the same loop."""
    taken = []
    for _ in range(3):
        bits, found, x = b"0123456789abcdef", {}, 0
        start = time.thread_time()
        for i in range(8000):
            x = (x * 31 + i) & 0xFFFFFFFF
            found[x & 1023] = bits[x & 7 :]
        for i in range(1024):
            found.get(i)
        taken.append(time.thread_time() - start)
    return sorted(taken)[1]


def bare_chain(labels: bytes, width: int) -> None:
    """Compute SHA-256 of every full block, each with the digest before it."""
    sha256, key = hashlib.sha256, bytes(32)
    for at in range(0, len(labels) - width + 1, width):
        key = sha256(key + labels[at : at + width]).digest()


def memory(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """Measure the bytes per cached 16-token block, without its 64 bytes of tokens."""
    rows: list[Row] = []
    for with_keys in (False, True):
        index = tree(16, 100_000, with_keys=with_keys)
        tracemalloc.start()
        for request in trace[:1000]:
            run_one(index, request.tokens())
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        count = index.tiers[0].pool.num_slots - index.tiers[0].pool.num_free
        rows.append({"memory": "keys" if with_keys else "no keys", "blocks": count, "bytes/block": taken / count - 64})
    worst = max(float(str(row["bytes/block"])) for row in rows)
    return rows, [at_most("bytes per cached 16-token block beside its tokens", worst, 200)]


def scaling(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """Measure the CPU time per newly allocated 16-token block with a full pool of 10^4, 10^5 and 10^6 blocks.

    The bar is for requests without shared prefixes, which have equally many new blocks in every pool. The trace, whose
    requests have fewer new blocks in a larger pool, is measured too.
    """
    alone = [replace(r, hash_ids=tuple(range(i * 256, i * 256 + len(r.hash_ids)))) for i, r in enumerate(trace[:4000])]
    rows: list[Row] = []
    for num_slots in (10**4, 10**5, 10**6):
        row: dict[str, object] = {"pool": num_slots}
        for name, requests in (("alone", alone), ("trace", trace[:4000])):
            index = tree(16, num_slots)
            fits = [request for request in requests if request.input_tokens // 16 <= num_slots]
            for request in fits[:2500]:
                run_one(index, request.tokens())
            assert not index.tiers[0].pool.num_free, "the pool is not full yet"
            cost = drive(index, fits[2500:3500])
            row |= {
                f"{name}: us/new block": sum(cost.phases.values()) / cost.num_new * 1e6,
                f"{name}: cal/1000 new": cost.cal / cost.num_new * cost.num_requests * 1e3,
            }
        rows.append(row)
    per_block = [float(str(row["alone: cal/1000 new"])) for row in rows]
    most_over_least = max(per_block) / min(per_block)
    return rows, [at_most("cost of a new block at 10^4, 10^5, 10^6 slots, most over least", most_over_least, 1.5)]


def ghost_cost(trace: Sequence[TraceRequest], rounds: int) -> tuple[list[Row], list[Bar]]:
    """Measure the cost of GhostCache per request: every other batch of one index uses it, in the next round the others.

    Every batch runs with and without it in the same state; the best time of each counts. Work deferred to the end of
    a round is included. The CPU time of scheduler and manager per request is measured for comparison.
    """
    rows: list[Row] = []
    for block_tokens in (512, 64, 16):
        num_slots = POOL_TOKENS // block_tokens
        capacities = [capacity * 512 // block_tokens for capacity in HIT_RATES]
        starts = range(0, len(trace), BATCH)
        best = {has_ghost: [math.inf] * len(starts) for has_ghost in (False, True)}
        put_off = [math.inf, math.inf]
        for attempt in range(2 * rounds):
            index, shadows = tree(block_tokens, num_slots), GhostCache(block_tokens, num_slots, capacities=capacities)
            for number, start in enumerate(starts):
                has_ghost = (number + attempt) % 2 == 0
                index.ghost = shadows if has_ghost else None
                batch = [request.tokens() for request in trace[start : start + BATCH]]
                begin = time.thread_time()
                for tokens in batch:
                    run_one(index, tokens)
                best[has_ghost][number] = min(best[has_ghost][number], time.thread_time() - begin)
            begin = time.thread_time()
            shadows.curve()
            put_off[attempt % 2] = min(put_off[attempt % 2], time.thread_time() - begin)
        without, with_ghost = (sum(best[has_ghost]) / len(trace) * 1e6 for has_ghost in (False, True))
        with_ghost += sum(put_off) / len(trace) * 1e6
        request = deciding(trace[:192], block_tokens, num_slots)
        ghost = max(0.0, with_ghost - without)
        row: Row = {"block": block_tokens, "us": without, "with ghost": with_ghost, "of index": ghost / without}
        rows.append(row | {"request us": request, "of request": ghost / request})
    shares = [float(str(row["of index"])) for row in rows]
    names = [f"{row['block']}: GhostCache, share of a request's index time" for row in rows]
    return rows, [at_most(name, share, 0.05) for name, share in zip(names, shares, strict=True)]


def deciding(trace: Sequence[TraceRequest], block_tokens: int, num_slots: int) -> float:
    """Return the CPU microseconds of scheduler and manager per request: 64 at a time, one tier, no model."""
    manager = CacheManager(Namespace("model", block_tokens=block_tokens), CacheConfig(num_slots))
    scheduler = Scheduler(manager, SchedulerConfig(max_rows=64, max_step_tokens=8192))
    prompts = [request.tokens() for request in trace]
    begin = time.thread_time()
    for number, (request, prompt) in enumerate(zip(trace, prompts, strict=True)):
        chain = Chain(manager.namespace, prompt)
        scheduler.add(Request(str(number), chain, max(1, request.output_tokens)), 0.0)
    while scheduler.has_work():
        step = scheduler.schedule(0.0)
        scheduler.update(step, [RowResult((1,) if row.wants_token else (), False) for row in step.rows], 0.0)
    return (time.thread_time() - begin) / len(trace) * 1e6


def ghost_curve(trace: Sequence[TraceRequest], is_real: bool) -> tuple[list[Row], list[Bar]]:
    """Compare the curve of GhostCache with replays at every capacity."""
    capacity, policies = 10_000, ("lru", "fifo", "s3fifo")
    shadows = GhostCache(512, capacity, capacities=list(HIT_RATES), policies=policies)
    replay_hits(trace, block_tokens=512, num_slots=capacity, ghost=shadows)
    rows: list[Row] = []
    inside = 0
    for found in (found for policy in policies for found in shadows.curve(policy)):
        exact = replay_hits(trace, block_tokens=512, num_slots=found.capacity, policy=found.policy).hit_rate
        row = {"policy": found.policy, "capacity": found.capacity, "ghost": found.hit_rate, "error": found.error}
        rows.append(row | {"truth": exact})
        inside += abs(found.hit_rate - exact) <= found.error + 1e-9
    if not is_real:
        return rows, []
    return rows, [at_least("GhostCache: estimates whose truth is within the stated error", inside, len(rows) - 1)]


def run_one(index: RadixTree, prompt: Any) -> None:
    """Run one request from its tokens to its release."""
    chain = Chain(index.namespace, prompt)
    lease = index.match(chain)
    index.allocate(lease, chain.num_blocks - lease.num_blocks)
    index.publish(lease, chain.num_tokens)
    index.release(lease)


if __name__ == "__main__":
    main()
