"""Deployment: model, hardware, tiers, replicas and routing to simulate. Running a trace on it gives a Summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.errors import ArgumentError, RangeError
from kvtier.replay.cost import Roofline
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec
from kvtier.replay.processes import jobs_here, spread
from kvtier.replay.sim_worker import SimulatedStore, SimulatedWorker
from kvtier.replay.simulator import Simulation, Simulator
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest
from kvtier.scheduler import SchedulerConfig


class Routing(Enum):
    """How requests are spread over replicas."""

    RANDOM = "random"
    PREFIX = "prefix"
    """To the replica that was sent the longest part of the prompt before, unless it has much more work than others."""


def scale_time(requests: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """The same requests, coming `factor` times as fast."""
    if not 0 < factor < float("inf"):
        raise RangeError(f"time can be scaled by a factor above 0, got {factor}")
    return tuple(replace(request, timestamp_ms=request.timestamp_ms / factor) for request in requests)


def route(
    requests: Sequence[TraceRequest], num_replicas: int, routing: Routing = Routing.PREFIX, *, seed: int = 0
) -> list[tuple[TraceRequest, ...]]:
    """The requests of each replica, in order of time."""
    if num_replicas < 1:
        raise RangeError(f"at least one replica serves, got {num_replicas}")
    if num_replicas == 1:
        return [tuple(requests)]
    choices = (
        np.random.default_rng(seed).integers(0, num_replicas, len(requests)).tolist()
        if routing is Routing.RANDOM
        else _PrefixRouter(num_replicas).choose(requests)
    )
    parts: list[list[TraceRequest]] = [[] for _ in range(num_replicas)]
    for request, choice in zip(requests, choices, strict=True):
        parts[choice].append(request)
    return [tuple(part) for part in parts]


class _PrefixRouter:
    """Knows what it sent where, as a router does that hears nothing back, and forgets nothing.

    Work is the tokens that had to be computed, fading with a half-life, so that a replica which is `slack` times as
    busy as the mean is passed over.
    """

    def __init__(self, num_replicas: int, *, slack: float = 1.25, half_life_ms: float = 60_000.0) -> None:
        self._sent: dict[tuple[int, int], int] = {}  # (number of the path above, hash id) -> number of the path
        self._where: list[int] = []  # replicas that were sent a path, as bits
        self._work = np.zeros(num_replicas)
        self._slack, self._half_life_ms = slack, half_life_ms

    def choose(self, requests: Sequence[TraceRequest]) -> list[int]:
        """The replica of each request."""
        choices, before = [], 0.0
        for request in requests:
            self._work *= 0.5 ** ((request.timestamp_ms - before) / self._half_life_ms)
            before = request.timestamp_ms
            paths = self._paths(request)
            choice, num_known = self._best(paths)
            self._work[choice] += request.input_tokens - num_known * request.block_tokens
            for path in paths:
                self._where[path] |= 1 << choice
            choices.append(choice)
        return choices

    def _paths(self, request: TraceRequest) -> list[int]:
        paths, above = [], -1
        for id in request.prompt_ids:
            above = self._sent.setdefault((above, id), len(self._sent))
            if above == len(self._where):
                self._where.append(0)
            paths.append(above)
        return paths

    def _best(self, paths: list[int]) -> tuple[int, int]:
        """The replica with the longest run of the paths, of those not overloaded; among equals the least busy."""
        limit = self._slack * self._work.mean() + 1
        able = [replica for replica in range(len(self._work)) if self._work[replica] <= limit]
        lengths = dict.fromkeys(able, 0)
        for number, path in enumerate(paths, 1):
            holding = [replica for replica in able if self._where[path] >> replica & 1]
            if not holding:
                break
            lengths.update(dict.fromkeys(holding, number))
        best = max(able, key=lambda replica: (lengths[replica], -self._work[replica]))
        return best, lengths[best]


GIB = 1 << 30
STORE = "disk"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One kind of replica, and how many there are. Sizes are a replica's."""

    model: ModelSpec
    gpu: GpuSpec
    device_bytes: int = 0
    """For KV; 0: what the weights leave of nine tenths of the memory."""
    host_bytes: int = 0
    disk_bytes: int = 0
    disk: DiskSpec | None = None
    policy: str = "lru"
    replicas: int = 1
    routing: Routing = Routing.PREFIX
    max_rows: int = 256
    max_step_tokens: int = 8192
    quantum: float = 0.05
    """Seconds that are simulated at once; 0 simulates every step by itself and takes ten times as long."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.device_bytes, self.host_bytes, self.disk_bytes) < 0:
            raise RangeError(f"sizes are 0 or more, got {self.device_bytes}, {self.host_bytes}, {self.disk_bytes}")
        if self.disk_bytes and not (self.host_bytes and self.disk):
            raise ArgumentError("blocks come from disk through host memory: a disk tier needs host memory and a disk")
        if not self.device_bytes and self.kv_bytes <= 0:
            raise RangeError(
                f"the weights take {self.model.params * self.model.weight_bytes / 1e9:.0f} of "
                f"{self.gpu.memory_bytes / 1e9:.0f} GB and leave no room for KV: use more GPUs, or a smaller model"
            )

    @property
    def kv_bytes(self) -> int:
        """Device memory for KV."""
        left = round(0.9 * self.gpu.memory_bytes - self.model.params * self.model.weight_bytes)
        return self.device_bytes or left

    def num_blocks(self, size: int, block_tokens: int) -> int:
        """Blocks that fit in so many bytes."""
        return int(size // (self.model.token_bytes * block_tokens))

    def simulator(self, block_tokens: int) -> Simulator:
        """One replica."""
        sizes = {"device": self.kv_bytes, "host": self.host_bytes, "disk": self.disk_bytes}
        device, host, disk = (self.num_blocks(size, block_tokens) for size in sizes.values())
        for (tier, size), count in zip(sizes.items(), (device, host, disk), strict=True):
            if size and not count:
                raise RangeError(
                    f"{size} bytes of {tier} hold no block of {block_tokens} tokens, which takes "
                    f"{self.model.token_bytes * block_tokens}: give it more, or none"
                )
        stores = (StoreConfig(STORE),) if disk and host else ()
        cache = CacheConfig(
            device,
            policy=self.policy,
            host=HostConfig(host, policy=self.policy) if host else None,
            stores=stores,
        )
        worker = SimulatedWorker(
            self.model.token_bytes * block_tokens,
            self.gpu.link_bandwidth,
            disk=self.disk,
            stores={STORE: SimulatedStore(disk)} if stores else {},
        )
        limits = SchedulerConfig(self.max_rows, self.max_step_tokens, starts_early=True)
        cost = Roofline(self.model, self.gpu)
        return Simulator(
            cache,
            limits,
            cost,
            worker,
            block_tokens=block_tokens,
            num_layers=self.model.layers,
            quantum=self.quantum,
        )


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """What a link carried, all replicas together; busy is the mean share of the time.

    That is the whole time: blocks are still saved after the last token.
    """

    name: str
    num_bytes: int
    bytes_per_second: float
    busy: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in numbers. Times are seconds; rates are of prompt tokens, hits by the tier they were found in."""

    num_requests: int
    num_refused: int
    num_preempted: int
    seconds: float
    """To the last token."""
    hit_rate: float
    """Of the requests that were not refused."""
    hit_rates: dict[str, float]
    ttft: dict[str, float]
    """Of the requests that got a token; 0 if none did."""
    queue: dict[str, float]
    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    utilisation: float
    """Share of the time that the GPUs computed."""
    links: tuple[LinkSummary, ...]
    evictions: dict[str, int]
    dead_on_arrival: float
    """Share of computed blocks that were not found again before they were gone, or before the end."""


def simulate(
    trace: Sequence[TraceRequest],
    setups: Sequence[Deployment],
    *,
    num_simulated: int | None = None,
    jobs: int = 1,
    progress: Callable[[float], None] | None = None,
) -> list[Summary]:
    """Serve a trace on each setup. With `num_simulated` only so many replicas of middling load are, to stand for all.

    Replicas and setups are spread over `jobs` processes.
    """
    block_tokens = trace[0].block_tokens if trace else TRACE_BLOCK_TOKENS
    parts = [(number, part) for number, setup in enumerate(setups) for part in _parts(trace, setup, num_simulated)]
    num_done = 0

    def run(task: tuple[int, tuple[TraceRequest, ...]]) -> tuple[int, Simulation]:
        def tell(share: float) -> None:
            if progress is not None and jobs <= 1:  # from other processes only whole runs are heard of
                progress((num_done + share) / len(parts))

        return task[0], setups[task[0]].simulator(block_tokens).run(task[1], tell)

    runs: dict[int, tuple[int, Simulation]] = {}
    for number, found in spread(run, parts, jobs_here(jobs)):
        runs[number] = found
        num_done = len(runs)
        if progress is not None:
            progress(num_done / len(parts))
    in_order = [runs[number] for number in sorted(runs)]
    return [summarise([run for which, run in in_order if which == number]) for number in range(len(setups))]


def _parts(
    trace: Sequence[TraceRequest], setup: Deployment, num_simulated: int | None
) -> list[tuple[TraceRequest, ...]]:
    """What each replica that is simulated serves."""
    parts = [part for part in route(trace, setup.replicas, setup.routing, seed=setup.seed) if part]
    if num_simulated is not None and num_simulated < len(parts):
        parts.sort(key=lambda part: sum(request.input_tokens for request in part))
        first = (len(parts) - num_simulated) // 2
        parts = parts[first : first + num_simulated]
    return parts


def summarise(runs: Sequence[Simulation]) -> Summary:
    """Replicas together."""
    requests = [request for run in runs for request in run.requests]
    served = [request for request in requests if not request.is_refused]
    prompts = sum(request.prompt_tokens for request in served)
    seconds = max((run.seconds for run in runs), default=0.0)
    whole = max((run.whole_seconds for run in runs), default=0.0)
    hits: dict[str, int] = {}
    for request in served:
        for tier, count in request.tokens_from.items():
            hits[tier] = hits.get(tier, 0) + count
    names = [use.name for use in runs[0].links] if runs else []
    links = []
    for name in names:
        uses = [use for run in runs for use in run.links if use.name == name]
        num_bytes = sum(use.num_bytes for use in uses)
        busy = sum(use.busy_seconds for use in uses) / max(whole * len(runs), 1e-9)
        links.append(LinkSummary(name, num_bytes, num_bytes / max(whole, 1e-9), busy))
    came = sum(run.blocks.num_computed for run in runs)
    return Summary(
        num_requests=len(requests),
        num_refused=len(requests) - len(served),
        num_preempted=sum(request.num_preempted for request in requests),
        seconds=seconds,
        hit_rate=sum(hits.values()) / max(1, prompts),
        hit_rates={tier: count / max(1, prompts) for tier, count in hits.items()},
        ttft=_percentiles([request.ttft for request in requests if request.ttft is not None]),
        queue=_percentiles([request.queue_seconds for request in requests if request.queue_seconds is not None]),
        prompt_tokens_per_second=prompts / max(seconds, 1e-9),
        answer_tokens_per_second=sum(request.answer_tokens for request in requests) / max(seconds, 1e-9),
        utilisation=sum(run.compute_seconds for run in runs) / max(seconds * len(runs), 1e-9),
        links=tuple(links),
        evictions={tier: sum(run.evictions[tier] for run in runs) for tier in (runs[0].evictions if runs else ())},
        dead_on_arrival=1 - sum(run.blocks.num_reused for run in runs) / came if came else 0.0,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {f"p{share}": 0.0 for share in PERCENTILES}
    found = np.percentile(np.array(values), PERCENTILES)
    return {f"p{share}": float(value) for share, value in zip(PERCENTILES, found, strict=True)}
