"""Hit rates over cache sizes: exact LRU and the optimum.

What a cache of blocks would have hit: a trace through the real index, one request at a time and without a clock.

One pass, many answers: the hit rate of many capacities and policies over one trace.

A cache here is one tier of blocks and takes one request at a time. Hits are full blocks of the unbroken leading run.

lru       exact for every capacity at once, from stack distances. Within a request the tail ages first, so what a
          cache of C blocks finds of a path is what lies above depth C in one stack, whatever C is.
optimum   exact, offline: who knows the future drops what is needed last, and keeps nothing that is not needed again.
          A request's own blocks must fit while it runs, as in any engine.
others    exact, by the real index, one run for each capacity; runs are spread over processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.index import BlockPool, Chain, GhostCache, Namespace, RadixTree, Shortage, Tier, make_policy
from kvtier.index.policies import POLICIES
from kvtier.replay.processes import jobs_here, spread
from kvtier.replay.trace import TraceRequest

Paths = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HitReport:
    """Hits are full blocks of the unbroken leading run. A request larger than the pool is counted and not cached."""

    num_requests: int
    num_blocks: int
    num_hits: int
    num_too_large: int

    @property
    def hit_rate(self) -> float:
        """Of full blocks."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def replay_hits(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int,
    num_slots: int,
    policy: str = "lru",
    ghost: GhostCache | None = None,
) -> HitReport:
    """Each request matches, gets its slots, is computed, published and done before the next one comes."""
    prompts = (request.tokens() for request in requests)
    return _replay(prompts, Namespace("replay", block_tokens=block_tokens), num_slots, policy, ghost)


def replay_paths(requests: Iterable[Paths], *, num_slots: int, policy: str = "lru") -> HitReport:
    """The same for requests given as a number for each block: one token stands for a block, so it takes no memory."""
    return _replay(requests, Namespace("replay", block_tokens=1), num_slots, policy, None)


def _replay(
    prompts: Iterable[np.ndarray[Any, Any]],
    namespace: Namespace,
    num_slots: int,
    policy: str,
    ghost: GhostCache | None,
) -> HitReport:
    tree = RadixTree(namespace, [Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))], ghost=ghost)
    num_requests = num_blocks = num_hits = num_too_large = 0
    for num_requests, prompt in enumerate(prompts, 1):  # noqa: B007 - the count is reported
        chain = Chain(namespace, prompt)
        lease = tree.match(chain)
        num_blocks += chain.num_blocks
        num_hits += lease.num_matched
        is_too_large = isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage)
        num_too_large += is_too_large
        if not is_too_large:
            tree.publish(lease, chain.num_tokens)
        tree.release(lease, used=not is_too_large)  # as a scheduler does that refuses it
    return HitReport(num_requests, num_blocks, num_hits, num_too_large)


OPTIMUM = "optimum"
I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HitPoint:
    """Of `num_blocks` full blocks a cache of `capacity` blocks with this policy would have found `num_hits`."""

    policy: str
    capacity: int
    num_blocks: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        """Of full blocks."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


class Accesses:
    """A trace as paths: every block with all before it is a number. Request r has paths[starts[r] : starts[r + 1]]."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        paths: list[int] = []
        starts = [0]
        for request in requests:
            above = -1
            for id in request.prompt_ids:
                above = numbers.setdefault((above, id), len(numbers))
                paths.append(above)
            starts.append(len(paths))
        self.paths: I64 = np.array(paths, np.int64)
        self.starts: I64 = np.array(starts, np.int64)
        self.num_paths = len(numbers)

    @property
    def max_blocks(self) -> int:
        """Of the longest request."""
        return int(np.diff(self.starts).max(initial=0))

    def __iter__(self) -> Iterator[I64]:
        """The paths of each request."""
        return iter(np.split(self.paths, self.starts[1:-1])) if len(self.starts) > 1 else iter(())

    def next_use(self) -> I64:
        """For each access the place of the next one to the same path, or -1."""
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
    """The hit rate of every policy at every capacity, in blocks. `progress` is told the share that is done."""
    unknown = set(policies) - {OPTIMUM, *POLICIES}
    if unknown:
        raise ArgumentError(
            f"no policy is called {', '.join(sorted(unknown))}; there are {OPTIMUM}, {', '.join(sorted(POLICIES))}"
        )
    if not capacities or min(capacities) < 1:
        raise RangeError(f"capacities are blocks, at least 1 of them, got {list(capacities)}")
    accesses = Accesses(requests)
    tasks = [(policy, capacity) for policy in policies for capacity in capacities]
    found: dict[tuple[str, int], int] = {}
    if "lru" in policies:
        # with less room than one request takes, some are not cached at all: those capacities are run one by one
        whole = [capacity for capacity in capacities if capacity >= accesses.max_blocks]
        found.update(zip((("lru", capacity) for capacity in whole), lru_hits(accesses, whole), strict=True))
    left = [task for task in tasks if task not in found]
    for done, (number, num_hits) in enumerate(spread(lambda task: _hits(accesses, *task), left, jobs_here(jobs)), 1):
        found[left[number]] = num_hits
        if progress is not None:
            progress(done / len(left))
    return [HitPoint(policy, capacity, len(accesses.paths), found[policy, capacity]) for policy, capacity in tasks]


def lru_hits(accesses: Accesses, capacities: Sequence[int]) -> list[int]:
    """Hits of LRU at each capacity that is not below the longest request."""
    distances = np.sort(stack_distances(accesses))
    return [int(np.searchsorted(distances, capacity)) for capacity in capacities]


def stack_distances(accesses: Accesses) -> I64:
    """For each block that was used before: how many others were used since, when its request came.

    places     ..  p ........ s ...          p: the use before, s: where the request of this use begins
                      ^ a block used here counts once: at its last use before s, the one whose next use is not before s

    So the distance is the places in (p, s) less those of them whose next use lies before s.
    """
    # within a request the last block is used first
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
    """For each query how many of values[:count] are above its limit, all queries at once, bit by bit from the top.

    Values are kept in order of the bits seen so far; [low, high) is where those lie that agree with the limit in them.
    """
    low, high = np.zeros(len(counts), np.int64), counts.astype(np.int64)
    found = np.zeros(len(counts), np.int64)
    highest = max(int(values.max(initial=0)), int(limits.max(initial=0)))
    for bit in reversed(range(highest.bit_length())):
        ones = values >> bit & 1
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(ones)))
        is_one = (limits >> bit & 1).astype(np.bool_)
        found += np.where(is_one, 0, before[high] - before[low])
        zeros = len(values) - int(before[-1])
        low = np.where(is_one, zeros + before[low], low - before[low])
        high = np.where(is_one, zeros + before[high], high - before[high])
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return found


def optimum_hits(accesses: Accesses, capacity: int) -> int:
    """Hits of whoever knows the future.

    A block that is kept takes a slot from one use to the next; a running request takes one for each of its blocks. When
    the slots do not suffice, what is needed last goes. Of one path that is the tail, which is used after the head.
    """
    following, starts = accesses.next_use().tolist(), accesses.starts.tolist()
    is_kept = bytearray(len(following) + 1)
    last_first: list[int] = []  # of what is kept, the next uses, negated
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
    if policy == OPTIMUM:
        return optimum_hits(accesses, capacity)
    return replay_paths(iter(accesses), num_slots=capacity, policy=policy).num_hits
