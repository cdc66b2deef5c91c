"""Simulate a fleet: the real router and one real index per replica, with a simple model of time.

A replica computes one prompt after the other, and generation does not delay prompts. This model is coarser than
`replay.simulate`, which runs the scheduler, but is fast enough for a thousand replicas. A run measures the hit rate,
the load balance and the times to first token of a routing policy, and the CPU time and memory of the router.

    arrival ──> Router.route ──> RadixTree of the replica: match, publish ──events──> PlacementIndex of the router
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from kvtier.errors import RangeError
from kvtier.index import BlockPool, BlocksRemoved, BlocksStored, Chain, Event, Namespace, RadixTree, Shortage, Tier
from kvtier.index.policies import make_policy
from kvtier.replay.cost import Roofline, Work
from kvtier.replay.hardware import GpuSpec, ModelSpec
from kvtier.replay.processes import jobs_here, spread
from kvtier.replay.trace import MAX_TOKEN, TraceRequest, number_paths
from kvtier.router import ReplicaCosts, RouteDecision, Router, RouterConfig, hashes_of
from kvtier.router.feed import DEVICE

_PROGRESS_EVERY = 1000  # requests between two calls of `progress`


class FleetRouting(Enum):
    """Assignment of requests to the replicas of a fleet."""

    CACHE = "cache"
    """Send a request to the replica with the shortest expected time to first token, based on KV events."""
    ROUND_ROBIN = "round robin"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Identical replicas with one tier each."""

    num_replicas: int
    num_blocks: int
    """Number of blocks in each replica's cache."""
    costs: ReplicaCosts
    routing: FleetRouting = FleetRouting.CACHE
    policy: str = "lru"

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_blocks < 1:
            raise RangeError(f"need at least one replica and one block, got {self.num_replicas} and {self.num_blocks}")


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Result of one fleet. `hit_rate` is the number of hits, divided by the number of full prompt blocks."""

    num_requests: int
    hit_rate: float
    imbalance: float
    """Computed tokens of the busiest replica, divided by the mean of all replicas."""
    ttft: dict[str, float]
    """Percentiles of the simulated time to the first token, in seconds."""
    decision_seconds: float
    """CPU time of the router per request, for `route`, `on_finish` and the updates of its index."""
    index_bytes: int
    num_index_blocks: int
    """Distinct blocks in the index of the router."""


@dataclass(slots=True)
class _Replica:
    tree: RadixTree
    free_at: float = 0.0  # time at which the computation of the last prompt ends
    computed_tokens: int = 0
    events: list[Event] = field(default_factory=list)


def replica_costs(model: ModelSpec, gpu: GpuSpec, block_tokens: int) -> ReplicaCosts:
    """Estimate the costs of a replica with a roofline model, for steps whose time is limited by arithmetic.

    Loads from a store are assumed to have a tenth of the bandwidth of loads from host memory.
    """
    cost, many = Roofline(model, gpu).seconds, 4096  # with this many tokens, arithmetic takes longer than memory access
    one, two = cost(Work(1, many, 0, 0)), cost(Work(1, 2 * many, 0, 0))
    token = (two - one) / many
    attended = (cost(Work(1, many, many * many, 0)) - one) / many**2
    block = model.token_bytes * block_tokens / gpu.link_bandwidth
    return ReplicaCosts(max(0.0, one - token * many), token, attended, block, 10 * block)


class FleetTrace:
    """Several copies of a trace, to simulate more users. Each copy has its own prompts and arrival times.

    Iterates over (arrival in seconds, path numbers, number of prompt tokens) in order of time. A path number identifies
    a full block and all blocks before it. The path numbers of a copy are computed only when they are needed, so that a
    hundred copies of a one-hour trace fit into memory.
    """

    def __init__(self, requests: Sequence[TraceRequest], copies: int = 1, *, seed: int = 0) -> None:
        if copies < 1:
            raise RangeError(f"need at least one copy of the trace, got {copies}")
        numbers: dict[tuple[int, int], int] = {}
        self._paths = [np.array(number_paths(request.prompt_ids, numbers), np.int64) for request in requests]
        self._tokens = [request.input_tokens for request in requests]
        self._num_paths = len(numbers)
        if copies * self._num_paths > MAX_TOKEN:
            raise RangeError(f"{copies} copies of {self._num_paths} blocks exceed {MAX_TOKEN} blocks; use fewer copies")
        times = np.array([request.timestamp_ms / 1000 for request in requests])
        mean_gap = (times[-1] - times[0]) / max(1, len(times) - 1) if len(times) else 0.0
        shifts = np.random.default_rng(seed).uniform(-mean_gap, mean_gap, (copies, len(times)))
        shifts[0] = 0.0  # the first copy has the arrival times of the trace
        arrivals = np.maximum(times + shifts, times[0] if len(times) else 0.0).reshape(-1)
        self._order = np.argsort(arrivals, kind="stable")
        self._arrivals = arrivals

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[float, np.ndarray[Any, np.dtype[np.int32]], int]]:
        for position in self._order.tolist():
            copy, number = divmod(position, len(self._paths))
            paths = (self._paths[number] + copy * self._num_paths).astype(np.int32)
            yield float(self._arrivals[position]), paths, self._tokens[number]


class FleetSimulation:
    """Runs one trace on one fleet. An instance can be run once."""

    def __init__(self, config: FleetConfig, block_tokens: int) -> None:
        self.config = config
        self.router = Router(RouterConfig(block_tokens, config.num_replicas))
        self._namespace = Namespace("fleet", block_tokens=1)  # one token represents a block, which saves memory
        self._block_tokens = block_tokens
        self._replicas = [self._new_replica(number) for number in range(config.num_replicas)]
        self._ends: list[tuple[float, int, RouteDecision]] = []  # heap of (expected end, position in the trace, ..)
        self._router_seconds = 0.0

    def run(self, trace: FleetTrace, progress: Callable[[float], None] | None = None) -> FleetSummary:
        num_blocks = num_hits = 0
        waits = np.zeros(len(trace))
        for request, (now, paths, num_tokens) in enumerate(trace):
            self._end_until(now)
            chain = Chain(self._namespace, paths)
            number = self._choose(request, chain, num_tokens, now)
            replica = self._replicas[number]
            num_matched = self._serve(number, chain)
            num_blocks += chain.num_blocks
            num_hits += num_matched
            num_computed = max(1, num_tokens - num_matched * self._block_tokens)
            replica.computed_tokens += num_computed
            replica.free_at = max(now, replica.free_at) + self._seconds(num_tokens, num_computed)
            waits[request] = replica.free_at - now
            if progress is not None and request % _PROGRESS_EVERY == 0:
                progress(request / len(trace))
        computed = [replica.computed_tokens for replica in self._replicas]
        mean = sum(computed) / len(computed)
        return FleetSummary(
            len(trace),
            num_hits / max(1, num_blocks),
            max(computed) / mean if mean else 1.0,
            {f"p{share}": float(np.percentile(waits, share)) if len(waits) else 0.0 for share in (50, 90, 99)},
            self._router_seconds / max(1, len(trace)),
            self.router.index.num_bytes,
            self.router.index.num_blocks,
        )

    def _new_replica(self, number: int) -> _Replica:
        config = self.config
        self.router.add(str(number), config.costs)
        tier = Tier(0, BlockPool("device", config.num_blocks), lambda: make_policy(config.policy))
        events: list[Event] = []
        return _Replica(RadixTree(self._namespace, [tier], listener=events.append), events=events)

    def _choose(self, request: int, chain: Chain, num_tokens: int, now: float) -> int:
        """Choose a replica. `request` is the position of the request in the trace."""
        if self.config.routing is FleetRouting.ROUND_ROBIN:
            return request % self.config.num_replicas
        hashes = hashes_of(chain.keys())
        began = time.process_time()
        decision = self.router.route(hashes, num_tokens)
        self._router_seconds += time.process_time() - began
        assert decision is not None
        begins = max(now, self._replicas[decision.number].free_at)
        heapq.heappush(self._ends, (begins + decision.start_seconds, request, decision))
        return decision.number

    def _serve(self, number: int, chain: Chain) -> int:
        """Match and publish a prompt in a replica. Return the number of hits. With CACHE routing, update the router."""
        replica = self._replicas[number]
        tree = replica.tree
        lease = tree.match(chain)
        num_matched = lease.num_matched
        fits = not isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage)
        if fits:
            tree.publish(lease, chain.num_tokens)
        tree.release(lease, used=fits)
        if self.config.routing is FleetRouting.CACHE:
            began = time.process_time()
            self._apply(number, replica.events)
            self._router_seconds += time.process_time() - began
        replica.events.clear()
        return num_matched

    def _apply(self, number: int, events: Sequence[Event]) -> None:
        index = self.router.index
        for event in events:
            if isinstance(event, BlocksStored):
                index.store(number, DEVICE, hashes_of(event.keys))
            elif isinstance(event, BlocksRemoved):
                index.remove(number, DEVICE, hashes_of(event.keys))

    def _end_until(self, now: float) -> None:
        """Call the router's `on_finish` for every prompt that is expected to end at `now` or earlier."""
        began = time.process_time()
        while self._ends and self._ends[0][0] <= now:
            self.router.on_finish(heapq.heappop(self._ends)[2])
        self._router_seconds += time.process_time() - began

    def _seconds(self, prompt_tokens: int, num_computed: int) -> float:
        costs = self.config.costs
        attended = num_computed * (prompt_tokens - num_computed / 2)
        return costs.step_seconds + costs.token_seconds * num_computed + costs.attended_seconds * attended


def simulate_fleets(
    configs: Sequence[FleetConfig],
    trace: FleetTrace,
    block_tokens: int,
    *,
    jobs: int = 1,
    progress: Callable[[float], None] | None = None,
) -> list[FleetSummary]:
    """Run a trace on several fleets, in up to `jobs` processes.

    `progress` is called with the completed share of the first fleet's run.
    """

    def run(number: int) -> FleetSummary:
        simulation = FleetSimulation(configs[number], block_tokens)
        return simulation.run(trace, progress if number == 0 else None)

    summaries = dict(spread(run, range(len(configs)), jobs_here(jobs)))
    return [summaries[number] for number in range(len(configs))]
