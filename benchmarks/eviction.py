"""The learned eviction policy against LRU: hit rates on a recorded and on generated traces, hints, time and memory.

python -m benchmarks.eviction --trace conversation_trace.jsonl --more synthetic_trace.jsonl
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.index import BlockPool, Chain, GhostCache, Hints, Namespace, Outcome, RadixTree, Tier, make_policy
from kvtier.replay import SyntheticTrace, TraceRequest, generate, read_trace, sweep
from kvtier.replay.curves import Accesses, index_hits

CAPACITIES = (1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000)
WANTED = dict(zip(CAPACITIES, (0.073, 0.134, 0.178, 0.246, 0.318, 0.346, 0.371), strict=True))
MAX_LOSS = 0.005
BATCH = 64  # requests that the ghost records between two readings of the clock, which takes 0.5 us
PHASES_LOSS = {capacity: 0.04 if capacity <= 20_000 else 0.065 for capacity in CAPACITIES}
WITH_HINTS = {5_000: 0.225, 10_000: 0.315}
Requests = Sequence[TraceRequest]


def main() -> None:
    parser = arguments("Hit rates, time and memory of the learned eviction policy.")
    parser.add_argument("--trace", help="Mooncake's conversation trace; default: only generated traces")
    parser.add_argument("--more", nargs="*", default=[], help="other traces, for which only LRU is the bar")
    parser.add_argument("--runs", type=int, default=3, help="the median of this many rounds counts")
    options = parser.parse_args()
    rows: list[Row] = []
    bars: list[Bar] = []
    traces = generated()
    if options.trace:
        real = read_trace(options.trace).requests
        traces = {"conversation": real, **traces, "two in sequence": in_sequence(real, traces["agents"])}
    traces.update((Path(path).stem, read_trace(path).requests) for path in options.more)
    for name, requests in traces.items():
        more, more_bars = hit_rates(name, requests)
        print_table(more)
        rows += more
        bars += more_bars
    some = traces.get("conversation", traces["chat"])
    parts = [index_time(some, options.runs), memory(some), ghost(some, options.runs)]
    parts += [hints(some)] if options.trace else []
    for more, more_bars in parts:
        print_table(more)
        rows += more
        bars += more_bars
    report("eviction", rows, bars, options.results)


def hit_rates(name: str, requests: Requests) -> tuple[list[Row], list[Bar]]:
    """Compare both policies at all capacities."""
    points = {
        (point.policy, point.capacity): point.hit_rate for point in sweep(requests, CAPACITIES, ["lru", "learned"])
    }
    rows: list[Row] = []
    bars: list[Bar] = []
    for capacity in CAPACITIES:
        lru, learned = points["lru", capacity], points["learned", capacity]
        rows.append(
            {"trace": name, "blocks": capacity, "lru": lru, "learned": learned, "points": (learned - lru) * 100}
        )
        limit = PHASES_LOSS[capacity] if name == "phases" else MAX_LOSS
        bars.append(at_most(f"{name}, {capacity}: points below LRU", (lru - learned) * 100, limit * 100))
        if name == "conversation":
            bars.append(at_least(f"{name}, {capacity}: hit rate", learned, WANTED[capacity]))
    return rows, bars


# ---- traces --------------------------------------------------------------------------------------------------------


def generated() -> dict[str, Requests]:
    """Return traces that are easy or hard for LRU. Block ids of different traces may be equal."""
    rng = np.random.default_rng(0)
    chat = SyntheticTrace(sessions=3000, agent_share=0.0, document_share=0.0)
    popular = zipf(rng, 12_000)
    return {
        "chat": tuple(generate(chat)),
        "agents": tuple(generate(replace(chat, agent_share=1.0, turns=8.0, think_seconds=10.0, seed=1))),
        "documents": tuple(generate(replace(chat, document_share=1.0, seed=2))),
        "loop": prompts([range(n % 1200 * 10, n % 1200 * 10 + 10) for n in range(8000)]),
        "scan": prompts([[0, *range(1 + n * 20, 21 + n * 20)] for n in range(8000)]),
        "zipf": prompts(popular),
        "zipf, one-time prompts": prompts(
            [blocks if n % 2 else range(10**6 + n * 20, 10**6 + n * 20 + 20) for n, blocks in enumerate(popular)]
        ),
        "phases": phases(tuple(generate(replace(chat, seed=3)))),
    }


def zipf(rng: np.random.Generator, count: int) -> list[range]:
    """Return prompts of 10 blocks. The popularity of 20,000 prompts is proportional to rank ** -0.8."""
    weights = np.arange(1, 20_001) ** -0.8
    return [range(n * 10, n * 10 + 10) for n in rng.choice(20_000, count, p=weights / weights.sum()).tolist()]


def prompts(blocks: Sequence[Sequence[int]], start: float = 0.0) -> Requests:
    """Return one request per list of blocks, 0.3 s apart."""
    return tuple(TraceRequest(start + 300.0 * n, 512 * len(ids), 100, tuple(ids)) for n, ids in enumerate(blocks))


def phases(chat: Requests) -> Requests:
    """Return chat and a loop of 9,000 blocks by turns, each for 3,000 requests."""
    loop = prompts([range(10**7 + n % 900 * 10, 10**7 + n % 900 * 10 + 10) for n in range(6000)])
    parts = [chat[:3000], loop[:3000], chat[3000:6000], loop[3000:]]
    return in_sequence(*parts, shift_ids=False)


def in_sequence(*traces: Requests, shift_ids: bool = True) -> Requests:
    """Return the requests of one trace after the other. Different traces share no blocks."""
    whole: list[TraceRequest] = []
    end, first_id = 0.0, 0
    for trace in traces:
        begin = trace[0].timestamp_ms
        for request in trace:
            ids = tuple(id + first_id for id in request.hash_ids) if shift_ids else request.hash_ids
            whole.append(replace(request, timestamp_ms=request.timestamp_ms - begin + end, hash_ids=ids))
        end = whole[-1].timestamp_ms + 1000.0
        first_id += (max(id for request in trace for id in request.hash_ids) + 1) if shift_ids else 0
    return tuple(whole)


# ---- hints, time and memory ----------------------------------------------------------------------------------------


def hints(requests: Requests) -> tuple[list[Row], list[Bar]]:
    """Set "over" for 75 % of the requests whose last block is never used again. This uses the future of the trace."""
    accesses = Accesses(requests)
    following, starts = accesses.next_use(), accesses.starts
    rng = np.random.default_rng(0)
    told, closed = [], []
    for number, request in enumerate(requests):
        stop = int(starts[number + 1])
        is_last = stop > starts[number] and following[stop - 1] < 0
        is_told = bool(is_last and rng.random() < 0.75)
        told.append(replace(request, hints=Hints(session_over=is_told)))
        late = replace(request, hints=Hints(str(number)), closed_at_ms=request.timestamp_ms + 60_000)
        closed.append(late if is_last else request)
    rows: list[Row] = []
    bars: list[Bar] = []
    for capacity, wanted in WITH_HINTS.items():
        plain, rate, late_rate = (
            index_hits(Accesses(variant), capacity, "learned") / len(accesses.paths)
            for variant in (requests, told, closed)
        )
        row: Row = {"blocks": capacity, "without hints": plain, "over, 75 % of endings": rate}
        rows.append(row | {"closed after 60 s, all": late_rate})
        bars.append(at_least(f"conversation, {capacity}: hit rate with hints for 75 % of endings", rate, wanted))
        bars.append(at_least(f"conversation, {capacity}: points gained by closing after 60 s", late_rate - plain, 0))
    return rows, bars


def ghost(requests: Requests, runs: int) -> tuple[list[Row], list[Bar]]:
    """Compare estimates of a cache of 10,000 blocks with replays at other sizes. Measure the time of the estimates."""
    rows: list[Row] = []
    bars: list[Bar] = []
    own, sizes = 10_000, (3_000, 5_000, 20_000)
    truths = {point.capacity: point.hit_rate for point in sweep(requests, (own, *sizes), ["learned"])}
    for policy in ("learned", "lru"):
        spent, taken = [], []
        for _ in range(runs):
            shadows = GhostCache(512, own, policy, capacities=sizes, policies=["learned"])
            seconds, index = replay_seconds(requests, policy, 512, own)
            taken.append(seconds)
            spent.append(ghost_seconds(requests, shadows, index))
        share = statistics.median(spent) / statistics.median(taken)
        shadows = GhostCache(512, own, policy, capacities=sizes, policies=["learned"])
        replay_seconds(requests, policy, 512, own, shadows)
        for found in shadows.curve("learned"):
            difference = (found.hit_rate - truths[found.capacity]) * 100
            row: Row = {"real cache": policy, "blocks": found.capacity, "ghost": found.hit_rate}
            rows.append(
                row
                | {"truth": truths[found.capacity], "points": difference, "stated": found.error * 100, "time": share}
            )
            bars.append(at_most(f"{policy}, {found.capacity}: points between ghost and truth", abs(difference), 2))
        bars.append(at_most(f"{policy}: time of the ghost, share of the index", share, 0.05))
    return rows, bars


def ghost_seconds(requests: Requests, shadows: GhostCache, index: RadixTree) -> float:
    """Return the CPU seconds for recording and playing all requests."""
    seconds = 0.0
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        chains = [Chain(index.namespace, request.tokens()) for request in batch]
        begin = time.thread_time()
        for chain, request in zip(chains, batch, strict=True):
            shadows.record(chain, 0, request.timestamp_ms / 1000)
        seconds += time.thread_time() - begin
    begin = time.thread_time()
    shadows.curve()
    return seconds + time.thread_time() - begin


def index_time(requests: Requests, runs: int) -> tuple[list[Row], list[Bar]]:
    """Measure the CPU time of the index per request with real tokens. Each run has a process of its own, as a server.

    Policies that alternate in one process change each other's times: their ratio was 0.9 to 1.7, depending on what ran
    before (EPYC, 2026-11-19).
    """
    taken: dict[str, list[float]] = {"lru": [], "learned": []}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(runs):
        for policy, times in taken.items():
            with spawn.Pool(1) as process:
                times.append(process.apply(_index_us, (requests, policy)))
    lru, learned = (statistics.median(times) for times in taken.values())
    row: Row = {"blocks": 10_000, "lru us": lru, "learned us": learned, "ratio": learned / lru}
    return [row], [at_most("index time per request, learned / lru", learned / lru, 1.3)]


def _index_us(requests: Requests, policy: str) -> float:
    """Return the mean time of two replays. The second one is slower with both policies."""
    return sum(replay_seconds(requests, policy, 512, 10_000)[0] for _ in range(2)) / 2 / len(requests) * 1e6


def memory(requests: Requests) -> tuple[list[Row], list[Bar]]:
    """Measure the bytes per cached 16-token block that the learned policy adds, with 100,000 blocks."""
    taken = {}
    for policy in ("lru", "learned"):
        gc.collect()
        tracemalloc.start()
        index = replay_seconds(requests[:1000], policy, 16, 100_000)[1]
        gc.collect()
        taken[policy] = tracemalloc.get_traced_memory()[0] / index.tiers[0].pool.num_used
        tracemalloc.stop()
    added = taken["learned"] - taken["lru"]
    return [{"memory": "16-token blocks", **taken, "added": added}], [
        at_most("bytes per cached 16-token block, learned minus lru", added, 24)
    ]


def replay_seconds(
    requests: Requests, policy: str, block_tokens: int, num_slots: int, ghost: GhostCache | None = None
) -> tuple[float, RadixTree]:
    """Run all requests. Return the CPU seconds of the index without the making of tokens, and the index."""
    namespace = Namespace("benchmark", block_tokens=block_tokens)
    tier = Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))
    index = RadixTree(namespace, [tier], ghost=ghost)
    seconds = 0.0
    for request in requests:
        tokens, now = request.tokens(), request.timestamp_ms / 1000
        begin = time.thread_time()
        chain = Chain(namespace, tokens)
        lease = index.match(chain, now=now)
        index.allocate(lease, chain.num_blocks - lease.num_blocks)
        index.publish(lease, chain.num_tokens, now=now)
        index.release(lease, now=now, outcome=Outcome(request.output_tokens))
        seconds += time.thread_time() - begin
    return seconds, index


if __name__ == "__main__":
    main()
