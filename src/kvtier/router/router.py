"""Router: estimates the time to first token of a prompt on each replica, and chooses the fastest replica.

    time = queue         computing earlier prompts that still wait for their first token on this replica
         + prefix        loading or computing the cached prefix of the prompt, whichever is faster
         + rest          computing the rest of the prompt
         + duplicates    extra cost of tokens that other replicas have, see RouterConfig.duplicate_cost

Without KV events, only the blocks of unfinished requests count as cached. Most requests then go to the shortest queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.cache.cost_model import CostModel
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.messages import Route
from kvtier.router.feed import DEVICE, EXPECTED, HOST, STORE, TIERS, ReplicaFeed
from kvtier.router.placement import U64, Counts, Found, PlacementIndex

F64 = np.ndarray[Any, np.dtype[np.float64]]

# Guessed costs, used where measurements are missing. A share is the time to load a block, from host memory or from a
# store, divided by the time to compute the block.
_TOKEN_SECONDS = 1e-4
_TOKEN = 1  # row of token_seconds in Router._costs
_HOST_SHARE, _STORE_SHARE = 0.05, 0.4


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Estimated costs of one replica. Cached blocks on the device cost nothing."""

    step_seconds: float
    """Fixed time of a step."""
    token_seconds: float
    attended_seconds: float
    """Seconds for each pair of a computed token and a token of its context."""
    host_seconds: float
    """Seconds to load a block from host memory."""
    store_seconds: float
    """Seconds to load a block from a store into device memory."""

    def __post_init__(self) -> None:
        values = (
            self.step_seconds,
            self.token_seconds,
            self.attended_seconds,
            self.host_seconds,
            self.store_seconds,
        )
        if not all(0 <= value < float("inf") for value in values):
            raise RangeError(f"costs must be finite and 0 or more, got {self}")

    @classmethod
    def guess(cls, block_tokens: int) -> ReplicaCosts:
        """Return the costs to use for a replica without measurements."""
        block = _TOKEN_SECONDS * block_tokens
        return cls(0.0, _TOKEN_SECONDS, 0.0, _HOST_SHARE * block, _STORE_SHARE * block)

    @classmethod
    def of(cls, model: CostModel, block_tokens: int) -> ReplicaCosts:
        """Return the measured costs, or `guess` if there are none."""
        return cls.measured(model, block_tokens) or cls.guess(block_tokens)

    @classmethod
    def measured(cls, model: CostModel, block_tokens: int) -> ReplicaCosts | None:
        """Return the costs, or None until steps of several lengths are measured. Load times may be guesses."""
        step = model.compute_seconds(0, 0)
        if step is None:
            return None
        # compute_seconds(first, n) is linear in n and n * (first + n / 2)
        one = (model.compute_seconds(0, 1) or step) - step
        far = (model.compute_seconds(1000, 1) or step) - step
        attended = max(0.0, (far - one) / 1000)
        token = one - attended / 2
        if token <= 0:  # with steps of one length, only their mean is known
            return None
        block = token * block_tokens
        host = _block_seconds(model, (Route.HOST_TO_DEVICE, ""))
        host = _HOST_SHARE * block if host is None else host
        return cls(step, token, attended, host, host + _STORE_SHARE * block)


def median_costs(costs: Sequence[ReplicaCosts]) -> ReplicaCosts:
    """Return the median of each cost. If all replicas use the medians, one wrong fit has little effect."""
    return ReplicaCosts(*(statistics.median(getattr(each, name) for each in costs) for name in ReplicaCosts.__slots__))


def _block_seconds(model: CostModel, link: tuple[Route, str]) -> float | None:
    fixed, many = model.transfer_seconds(link, 0), model.transfer_seconds(link, 64)
    return None if fixed is None or many is None else max(0.0, many - fixed) / 64


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a Router. All replicas have the same block size. `max_replicas` sets the size of the index."""

    block_tokens: int = 16
    max_replicas: int = 64
    duplicate_cost: float = 1.0
    """Extra cost of computing a token that another replica has cached or will compute, as a share of the compute time.
    A duplicate block takes the slot of another block, which lowers the hit rate. With the conversation trace and 16
    replicas of 4,000 blocks, a cost of 1.0 instead of 0.0 raised the hit rate from 0.352 to 0.356, but also the median
    TTFT from 92 to 94 ms (2026-11-18).
    """

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.max_replicas < 1 or not 0 <= self.duplicate_cost < float("inf"):
            raise RangeError(
                f"block_tokens and max_replicas must be at least 1, and duplicate_cost finite and 0 or more, got {self}"
            )


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Chosen replica and estimated times. Pass the decision to `Router.on_first_token` and `Router.on_finish`."""

    id: int
    """Number of the decision, unique within the router."""
    replica: str
    number: int
    """Number of the replica in the index."""
    queue_seconds: float
    start_seconds: float
    """Seconds to load and compute the prompt once the queue is empty."""
    num_blocks: dict[str, int]
    """Tier -> number of the prompt's matched blocks in this tier. Blocks in "expected" are not cached yet."""
    expected: Found
    """Blocks of the prompt that the replica has not cached yet, but computes for this or an earlier request."""


class Router:
    """Replicas, their blocks and their queues. Not thread-safe.

    The uncached blocks of a prompt count as `expected` on the chosen replica until the request ends. The replica is
    therefore preferred for prompts with the same prefix even before KV events report these blocks.
    """

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        size = self.config.max_replicas
        self.index = PlacementIndex(len(TIERS), size)
        self._names: list[str | None] = [None] * size
        self._feeds: dict[str, ReplicaFeed] = {}
        self._queue: F64 = np.full(size, np.inf)  # in seconds; inf for numbers without a replica
        self._costs: F64 = np.zeros((5, size))
        self._num_new: F64 = np.zeros(size)  # uncached blocks that were sent to each replica, plus one per prompt
        self._num_decisions = 0
        self._open: dict[int, RouteDecision] = {}  # decisions without a first token, by id
        # Total time of each queue in whole nanoseconds: float sums would accumulate rounding errors.
        self._waiting_ns = [0] * size

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._feeds)

    def add(self, name: str, costs: ReplicaCosts | None = None) -> None:
        """Add a replica. Without `costs`, its costs are guessed."""
        if name in self._feeds:
            raise ArgumentError(f"replica {name!r} exists already")
        if None not in self._names:
            raise RangeError(f"all {len(self._names)} places for replicas are taken; raise max_replicas")
        number = self._names.index(None)
        self._names[number] = name
        self._feeds[name] = ReplicaFeed(self.index, number)
        others = self._num_new[[each is not None and each != name for each in self._names]]
        self._num_new[number] = others.min(initial=np.inf) if len(others) else 0.0
        self._queue[number] = 0.0
        self.set_costs(name, costs or ReplicaCosts.guess(self.config.block_tokens))

    def remove(self, name: str) -> None:
        """Remove a replica and forget its blocks. Its decisions may still be passed to `on_finish`."""
        number = self._number(name)
        del self._feeds[name]
        self._names[number] = None
        self._queue[number] = np.inf
        self._waiting_ns[number] = 0
        self.index.clear(number)
        self._open = {key: each for key, each in self._open.items() if each.replica != name}

    def feed(self, name: str) -> ReplicaFeed:
        """Return the feed that applies the events of a replica."""
        self._number(name)
        return self._feeds[name]

    def set_costs(self, name: str, costs: ReplicaCosts) -> None:
        self._costs[:, self._number(name)] = (
            costs.step_seconds,
            costs.token_seconds,
            costs.attended_seconds,
            costs.host_seconds,
            costs.store_seconds,
        )

    def route(self, hashes: U64, num_tokens: int, *, without: frozenset[str] = frozenset()) -> RouteDecision | None:
        """Choose a replica that is not in `without`. `hashes` are the hashes of the prompt's full blocks.

        Return None if no replica is left.
        """
        queue = self._queue
        if without:
            queue = queue.copy()
            queue[[number for number, name in enumerate(self._names) if name in without]] = np.inf
        found = self.index.find(hashes)
        counts = self.index.match(found)
        start = self._start_seconds(counts, num_tokens)
        total = queue + start + self.config.duplicate_cost * self._costs[_TOKEN] * self._num_duplicates(counts)
        best = float(total.min())
        if best == np.inf:
            return None
        # Equal estimates are common at low load. Take the replica that has received the fewest new blocks, so that
        # blocks stay cached equally long on all replicas.
        equal = np.flatnonzero(total <= best * (1 + 1e-6))
        number = int(equal[self._num_new[equal].argmin()])
        name = self._names[number]
        assert name is not None
        num_blocks: list[int] = counts[:, number].tolist()
        expected = self.index.store(number, EXPECTED, found.after(sum(num_blocks[:EXPECTED])))
        self._num_new[number] += 1 + len(expected)
        blocks = dict(zip(TIERS, num_blocks, strict=True))
        self._num_decisions += 1
        queued, starts = float(queue[number]), float(start[number])
        decision = RouteDecision(self._num_decisions, name, number, queued, starts, blocks, expected)
        self._open[decision.id] = decision
        self._add_waiting(number, _nanoseconds(decision))
        return decision

    def on_first_token(self, decision: RouteDecision) -> None:
        """Remove a prompt from the queue of its replica. Idempotent."""
        if self._open.pop(decision.id, None) is not None:
            self._add_waiting(decision.number, -_nanoseconds(decision))

    def on_finish(self, decision: RouteDecision) -> None:
        """End a request. Its blocks no longer count as expected, because events report the cached blocks."""
        self.on_first_token(decision)
        if len(decision.expected) and self._names[decision.number] == decision.replica:
            self.index.remove(decision.number, EXPECTED, decision.expected)

    def check(self) -> None:
        """Raise StateError if the state is inconsistent."""
        self.index.check()
        names = {name for name in self._names if name is not None}
        if names != set(self._feeds):
            raise StateError(f"the names {names} differ from the feeds {set(self._feeds)}")
        for number, name in enumerate(self._names):
            waiting_ns = sum(_nanoseconds(each) for each in self._open.values() if each.number == number)
            if (name is None) != (self._queue[number] == np.inf):
                raise StateError(f"place {number} has the name {name} and the queue {self._queue[number]}")
            if self._waiting_ns[number] != waiting_ns:
                raise StateError(
                    f"the queue of place {number} is {self._waiting_ns[number]} ns, but the prompts in it take "
                    f"{waiting_ns} ns"
                )
            if name is not None and self._queue[number] != waiting_ns / 1e9:
                raise StateError(f"the queue of {name} is {self._queue[number]} s, but should be {waiting_ns} ns")

    def _add_waiting(self, number: int, nanoseconds: int) -> None:
        self._waiting_ns[number] += nanoseconds
        self._queue[number] = self._waiting_ns[number] / 1e9

    def _start_seconds(self, counts: Counts, num_tokens: int) -> F64:
        """Return, for each replica, the time to first token if its queue is empty.

        Blocks in host memory and stores are all loaded or all computed, whichever is faster. The rest is computed.
        """
        step, token, attended, host, store = self._costs
        size = self.config.block_tokens
        free = counts[DEVICE] + counts[EXPECTED]
        loads = counts[HOST] * host + counts[STORE] * store

        def computing(num_cached: Counts) -> F64:
            rest = np.maximum(1, num_tokens - num_cached * size)
            seconds: F64 = token * rest + attended * rest * (num_tokens - rest / 2)
            return seconds

        start: F64 = step + np.minimum(loads + computing(free + counts[HOST] + counts[STORE]), computing(free))
        return start

    def _num_duplicates(self, counts: Counts) -> F64:
        """Return, for each replica, how many more tokens of the prompt another replica has cached or will compute."""
        held = counts.sum(axis=0)
        lacking: F64 = (held.max() - held) * float(self.config.block_tokens)
        return lacking

    def _number(self, name: str) -> int:
        if name not in self._feeds:
            raise ArgumentError(f"there is no replica {name!r}; the replicas are {', '.join(self._feeds) or 'none'}")
        return self._names.index(name)


def _nanoseconds(decision: RouteDecision) -> int:
    return round(decision.start_seconds * 1e9)
