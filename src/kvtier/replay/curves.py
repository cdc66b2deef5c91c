"""Compute exact hit rates for different cache sizes and policies.

The cache has one tier and serves one request at a time. The full blocks of a request before its first miss are hits.

lru       Stack distances yield the hits of all capacities that hold the longest request, because a cache of C blocks
          holds the C most recently used blocks. Within a request, the last block counts as the least recently used.
optimum   The offline optimum evicts the block with the latest next use and does not keep a block without a next use.
          A running request takes slots for all its blocks, as in any engine. A request that exceeds the capacity takes
          only the slots of its hits, and adds no block.
others    kvtier's index (RadixTree) is run once per policy and capacity. It is also used for lru if the capacity is
          smaller than the longest request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.index import BlockPool, Chain, Namespace, Outcome, RadixTree, Shortage, Tier, make_policy
from kvtier.index.policies import POLICIES
from kvtier.replay.processes import jobs_here, spread
from kvtier.replay.trace import TraceRequest, number_paths

OPTIMUM = "optimum"
I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HitPoint:
    """Number of hits of a cache with `capacity` blocks. The requests have `num_blocks` full blocks in total."""

    policy: str
    capacity: int
    num_blocks: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


class Accesses:
    """A trace as path numbers (see `number_paths`). Request r uses paths[starts[r] : starts[r + 1]]."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        paths: list[int] = []
        starts = [0]
        for request in requests:
            paths += number_paths(request.prompt_ids, numbers)
            starts.append(len(paths))
        self.paths: I64 = np.array(paths, np.int64)
        self.starts: I64 = np.array(starts, np.int64)
        self.num_paths = len(numbers)
        self.requests = requests
        self.block_tokens = requests[0].block_tokens if requests else 1

    @property
    def max_blocks(self) -> int:
        return int(np.diff(self.starts).max(initial=0))

    def __iter__(self) -> Iterator[I64]:
        return iter(np.split(self.paths, self.starts[1:-1])) if len(self.starts) > 1 else iter(())

    def next_use(self) -> I64:
        """Return, for each index in `paths`, the index of the next access to the same path, or -1 if there is none."""
        order = np.argsort(self.paths, kind="stable")
        again = self.paths[order[1:]] == self.paths[order[:-1]]
        following = np.full(len(self.paths), -1, np.int64)
        following[order[:-1][again]] = order[1:][again]
        return following


def sweep(
    requests: Sequence[TraceRequest],
    capacities: Sequence[int],
    policies: Sequence[str] = ("lru", "s3fifo", OPTIMUM),
    *,
    jobs: int = 1,
    progress: Callable[[float], None] | None = None,
) -> list[HitPoint]:
    """Return the hits of every policy at every capacity (in blocks). `progress` is called with the completed share."""
    unknown = set(policies) - {OPTIMUM, *POLICIES}
    if unknown:
        known = ", ".join((OPTIMUM, *sorted(POLICIES)))
        raise ArgumentError(f"unknown policy {', '.join(sorted(unknown))}; use one of {known}")
    if not capacities or min(capacities) < 1:
        raise RangeError(f"capacities must be 1 block or more, got {list(capacities)}")
    accesses = Accesses(requests)
    tasks = [(policy, capacity) for policy in policies for capacity in capacities]
    hits: dict[tuple[str, int], int] = {}
    if "lru" in policies:
        # Capacities below the longest request need the index, which does not cache a request above the capacity.
        whole = [capacity for capacity in capacities if capacity >= accesses.max_blocks]
        hits.update(zip((("lru", capacity) for capacity in whole), lru_hits(accesses, whole), strict=True))
    left = [task for task in tasks if task not in hits]
    for done, (number, num_hits) in enumerate(spread(lambda task: _hits(accesses, *task), left, jobs_here(jobs)), 1):
        hits[left[number]] = num_hits
        if progress is not None:
            progress(done / len(left))
    return [HitPoint(policy, capacity, len(accesses.paths), hits[policy, capacity]) for policy, capacity in tasks]


def lru_hits(accesses: Accesses, capacities: Sequence[int]) -> list[int]:
    """Return the hits of LRU at each capacity. The longest request must fit into every capacity."""
    distances = np.sort(stack_distances(accesses))
    return [int(np.searchsorted(distances, capacity)) for capacity in capacities]


def stack_distances(accesses: Accesses) -> I64:
    """Return the stack distance of each repeated use of a block.

    The distance counts the distinct other blocks that are used between the previous use of the block and the start of
    the request that uses the block again.

    positions  ..  p ........ s ...          p: the previous use, s: start of the request that uses the block again
                      ^ a block that is used several times in (p, s) counts once, at its last use before s

    The distance is the number of positions in (p, s), minus those whose block is used again before s.
    """
    # Within a request, the last block counts as the least recently used.
    lengths = np.diff(accesses.starts)
    begin = np.repeat(accesses.starts[:-1], lengths)
    place = begin + np.repeat(accesses.starts[1:], lengths) - 1 - np.arange(len(accesses.paths))
    following = accesses.next_use()
    is_used_again = following >= 0
    before, after = place[is_used_again], place[following[is_used_again]]
    start = begin[following[is_used_again]]
    order = np.argsort(after)
    num_over = np.searchsorted(after[order], start)
    return start - before - 1 - count_above(before[order], num_over, before)


def count_above(values: I64, counts: I64, limits: I64) -> I64:
    """Return, for each query (count, limit), the number of values in values[:count] that exceed the limit.

    All queries are computed together, from the highest bit to the lowest. Values with equal higher bits are adjacent.
    For each query, values[low:high] are those of the first `count` values that equal the limit in the higher bits.
    """
    low, high = np.zeros(len(counts), np.int64), counts.astype(np.int64)
    num_above = np.zeros(len(counts), np.int64)
    highest = max(int(values.max(initial=0)), int(limits.max(initial=0)))
    for bit in reversed(range(highest.bit_length())):
        ones = values >> bit & 1
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(ones)))
        is_one = (limits >> bit & 1).astype(np.bool_)
        num_above += np.where(is_one, 0, before[high] - before[low])
        zeros = len(values) - int(before[-1])
        low = np.where(is_one, zeros + before[low], low - before[low])
        high = np.where(is_one, zeros + before[high], high - before[high])
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return num_above


def optimum_hits(accesses: Accesses, capacity: int) -> int:
    """Return the hits of the offline optimum.

    A kept block occupies a slot from one use to the next. A running request occupies one slot per block, or only the
    slots of its hits if it exceeds the capacity. If there are too few slots, the kept block with the latest next use is
    evicted. The next use of a block is its position in the next request that uses it. Within a prefix, the last block
    therefore has the latest next use and is evicted first. The kept blocks of a request are always its leading blocks.
    """
    following, starts = accesses.next_use().tolist(), accesses.starts.tolist()
    is_kept = bytearray(len(following) + 1)  # by position of the next use
    last_first: list[int] = []  # heap of the negated next uses of the kept blocks
    num_kept = num_hits = 0
    for start, stop in itertools.pairwise(starts):
        hits = is_kept.count(1, start, stop)
        num_hits += hits
        num_kept -= hits
        too_large = stop - start > capacity
        room = capacity - (hits if too_large else stop - start)
        while num_kept > room:
            use = -heapq.heappop(last_first)
            num_kept -= is_kept[use]
            is_kept[use] = 0
        for place in range(start, stop):
            use = following[place]
            if use >= 0 and (is_kept[place] or not too_large):
                heapq.heappush(last_first, -use)
                is_kept[use] = 1
                num_kept += 1
    return num_hits


def _hits(accesses: Accesses, policy: str, capacity: int) -> int:
    return optimum_hits(accesses, capacity) if policy == OPTIMUM else index_hits(accesses, capacity, policy)


def index_hits(accesses: Accesses, capacity: int, policy: str, outcomes: Sequence[Outcome] | None = None) -> int:
    """Return the hits of kvtier's index. Requests larger than the capacity are not cached.

    `outcomes` describe how the requests ended. By default, they come from the trace.
    """
    namespace = Namespace("replay", block_tokens=1)  # one token represents a block, which saves memory
    tree = RadixTree(namespace, [Tier(0, BlockPool("device", capacity), lambda: make_policy(policy))])
    if tree.tracker is not None:
        tree.tracker.block_tokens = accesses.block_tokens
    if outcomes is None:
        outcomes = [request.outcome for request in accesses.requests]
    closes = sorted(
        (request.closed_at_ms / 1000, request.hints.session_id)
        for request in accesses.requests
        if request.closed_at_ms is not None
    )
    num_hits = num_closed = 0
    for request, paths, outcome in zip(accesses.requests, accesses, outcomes, strict=True):
        chain, now = Chain(namespace, paths), request.timestamp_ms / 1000
        while num_closed < len(closes) and closes[num_closed][0] <= now:
            tree.close(b"", closes[num_closed][1], now=closes[num_closed][0])
            num_closed += 1
        lease = tree.match(chain, now=now)
        num_hits += lease.num_matched
        fits = not isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage)
        if fits:
            tree.publish(lease, chain.num_tokens, now=now)
        tree.release(lease, used=fits, now=now, outcome=outcome)
    return num_hits
