"""Deployment: a model with hardware, tiers, replicas and routing. `simulate` returns a Summary for each deployment."""

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
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest, number_paths
from kvtier.scheduler import SchedulerConfig

GIB = 1 << 30
STORE = "disk"
PERCENTILES = (50, 90, 99)
_SLACK = 1.25  # a replica gets no requests while its load exceeds this multiple of the mean load
_HALF_LIFE_MS = 60_000.0  # half-life of the estimated load of a replica


class Routing(Enum):
    """Assignment of requests to replicas."""

    RANDOM = "random"
    PREFIX = "prefix"
    """Exclude overloaded replicas. Choose the replica that received the longest prefix; on a tie, the least loaded."""


def scale_time(requests: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """Divide all times of the requests by `factor`: arrival, end of the session, expected return."""
    if not 0 < factor < float("inf"):
        raise RangeError(f"the factor must be finite and above 0, got {factor}")

    def divided(value: float | None) -> float | None:
        return None if value is None else value / factor

    return tuple(
        replace(
            request,
            timestamp_ms=request.timestamp_ms / factor,
            closed_at_ms=divided(request.closed_at_ms),
            hints=replace(request.hints, expects_return_seconds=divided(request.hints.expects_return_seconds)),
        )
        for request in requests
    )


def route(
    requests: Sequence[TraceRequest], num_replicas: int, routing: Routing = Routing.PREFIX, *, seed: int = 0
) -> list[tuple[TraceRequest, ...]]:
    """Return the requests of each replica, in their given order."""
    if num_replicas < 1:
        raise RangeError(f"need at least one replica, got {num_replicas}")
    if num_replicas == 1:
        return [tuple(requests)]
    choices = (
        np.random.default_rng(seed).integers(0, num_replicas, len(requests)).tolist()
        if routing is Routing.RANDOM
        else _route_by_prefix(requests, num_replicas)
    )
    parts: list[list[TraceRequest]] = [[] for _ in range(num_replicas)]
    for request, choice in zip(requests, choices, strict=True):
        parts[choice].append(request)
    return [tuple(part) for part in parts]


def _route_by_prefix(requests: Sequence[TraceRequest], num_replicas: int) -> list[int]:
    """Choose, for each request, the least loaded of the replicas that received the longest prefix of its prompt.

    Replicas with more than `_SLACK` times the mean load are excluded. The load of a replica is the number of prompt
    tokens that it had to compute, assuming that it evicts nothing. The load decays over time.
    """
    numbers: dict[tuple[int, int], int] = {}
    sent: dict[int, int] = {}  # path number -> bit mask of the replicas that received the path
    load = np.zeros(num_replicas)
    choices, before = [], 0.0
    for request in requests:
        load *= 0.5 ** ((request.timestamp_ms - before) / _HALF_LIFE_MS)
        before = request.timestamp_ms
        paths = number_paths(request.prompt_ids, numbers)
        lengths = dict.fromkeys(np.flatnonzero(load <= _SLACK * load.mean() + 1).tolist(), 0)
        for count, path in enumerate(paths, 1):
            holding = [replica for replica in lengths if sent.get(path, 0) >> replica & 1]
            if not holding:
                break
            lengths.update(dict.fromkeys(holding, count))
        choice = max(lengths, key=lambda replica: (lengths[replica], -load[replica]))
        load[choice] += request.input_tokens - lengths[choice] * request.block_tokens
        for path in paths:
            sent[path] = sent.get(path, 0) | 1 << choice
        choices.append(choice)
    return choices


@dataclass(frozen=True, slots=True)
class Deployment:
    """A number of identical replicas. All sizes are per replica."""

    model: ModelSpec
    gpu: GpuSpec
    device_bytes: int = 0
    """Device memory for KV. 0 means 90% of the GPU's memory, minus the weights."""
    host_bytes: int = 0
    disk_bytes: int = 0
    disk: DiskSpec | None = None
    policy: str = "lru"
    inclusive: bool = False
    """If False, a full host first evicts blocks that are also in device memory (HostConfig.exclusive)."""
    replicas: int = 1
    routing: Routing = Routing.PREFIX
    max_rows: int = 256
    max_step_tokens: int = 8192
    phases: int = 2
    """Number of steps in flight, 1 or 2, as in EngineConfig. The default is that of an engine on a GPU."""
    quantum: float = 0.05
    """Steps are merged up to this total time in seconds (see StepCoalescer). 0 disables merging (10x slower)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.device_bytes, self.host_bytes, self.disk_bytes) < 0:
            raise RangeError(
                f"device_bytes, host_bytes and disk_bytes must be 0 or more, got {self.device_bytes}, "
                f"{self.host_bytes} and {self.disk_bytes}"
            )
        if self.disk_bytes and not (self.host_bytes and self.disk):
            raise ArgumentError("disk_bytes needs `disk` and host_bytes, because blocks pass through host memory")
        if not self.device_bytes and self.kv_bytes <= 0:
            raise RangeError(
                f"the weights take {self.model.params * self.model.weight_bytes / 1e9:.0f} of "
                f"{self.gpu.memory_bytes / 1e9:.0f} GB and leave no room for KV; use more GPUs or a smaller model"
            )

    @property
    def kv_bytes(self) -> int:
        return self.device_bytes or round(0.9 * self.gpu.memory_bytes - self.model.params * self.model.weight_bytes)

    def simulator(self, block_tokens: int) -> Simulator:
        block_bytes = self.model.token_bytes * block_tokens
        sizes = {"device": self.kv_bytes, "host": self.host_bytes, "disk": self.disk_bytes}
        device, host, disk = (int(size // block_bytes) for size in sizes.values())
        for (tier, size), count in zip(sizes.items(), (device, host, disk), strict=True):
            if size and not count:
                raise RangeError(
                    f"{size} bytes of {tier} cannot hold a block of {block_tokens} tokens, which takes {block_bytes} "
                    f"bytes; use a larger size, or 0"
                )
        stores = (StoreConfig(STORE),) if disk and host else ()
        cache = CacheConfig(
            device,
            policy=self.policy,
            host=HostConfig(host, policy=self.policy, exclusive=not self.inclusive) if host else None,
            stores=stores,
        )
        worker = SimulatedWorker(
            block_bytes,
            self.gpu.link_bandwidth,
            disk=self.disk,
            stores={STORE: SimulatedStore(disk)} if stores else {},
        )
        limits = SchedulerConfig(self.max_rows, self.max_step_tokens, starts_early=True)
        cost = Roofline(self.model, self.gpu)
        return Simulator(
            cache,
            limits,
            cost.seconds,
            worker,
            block_tokens=block_tokens,
            num_layers=self.model.layers,
            quantum=self.quantum,
            phases=self.phases,
            host_cost=cost.host_seconds,
        )


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """Traffic of a link, summed over all replicas. `busy` is the mean share of time that the link is in use."""

    name: str
    num_bytes: int
    bytes_per_second: float
    busy: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a simulation. Times are in seconds. Hit rates are shares of the prompt tokens."""

    num_requests: int
    num_refused: int
    num_preempted: int
    seconds: float
    """Time from the first arrival to the last token."""
    hit_rate: float
    """Refused requests are not counted."""
    hit_rates: dict[str, float]
    ttft: dict[str, float]
    """Percentiles over the requests that generated a token; 0 if there are none."""
    queue: dict[str, float]  # percentiles of the time from arrival to admission
    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    utilisation: float
    """Share of the time in which the GPUs compute. If steps do not overlap (`phases` 1), host time is included. Merged
    steps count with their host time or their device time, whichever is longer."""
    links: list[LinkSummary]
    evictions: dict[str, int]
    duplicates_evicted: int
    """Number of blocks that the host evicted because the device had them. Such blocks may have to be saved again."""
    dead_on_arrival: float
    """Share of computed blocks that were never hit before their eviction from all tiers or the end of the run."""


def simulate(
    trace: Sequence[TraceRequest],
    setups: Sequence[Deployment],
    *,
    num_simulated: int | None = None,
    jobs: int = 1,
    progress: Callable[[float], None] | None = None,
) -> list[Summary]:
    """Simulate a trace on each of the deployments in `setups`, in up to `jobs` processes.

    `num_simulated` limits the number of simulated replicas per deployment. The replicas with loads closest to the
    median are selected. Replicas without requests are not simulated.
    """
    block_tokens = trace[0].block_tokens if trace else TRACE_BLOCK_TOKENS
    parts = [(number, part) for number, setup in enumerate(setups) for part in _parts(trace, setup, num_simulated)]
    num_done = 0

    def run(task: tuple[int, tuple[TraceRequest, ...]]) -> tuple[int, Simulation]:
        def report(share: float) -> None:
            if progress is not None and jobs <= 1:  # child processes report only completed runs
                progress((num_done + share) / len(parts))

        return task[0], setups[task[0]].simulator(block_tokens).run(task[1], report)

    runs: dict[int, tuple[int, Simulation]] = {}
    for number, result in spread(run, parts, jobs_here(jobs)):
        runs[number] = result
        num_done = len(runs)
        if progress is not None:
            progress(num_done / len(parts))
    in_order = [runs[number] for number in sorted(runs)]
    return [summarise([run for which, run in in_order if which == number]) for number in range(len(setups))]


def _parts(
    trace: Sequence[TraceRequest], setup: Deployment, num_simulated: int | None
) -> list[tuple[TraceRequest, ...]]:
    parts = [part for part in route(trace, setup.replicas, setup.routing, seed=setup.seed) if part]
    if num_simulated is not None and num_simulated < len(parts):
        parts.sort(key=lambda part: sum(request.input_tokens for request in part))
        first = (len(parts) - num_simulated) // 2
        parts = parts[first : first + num_simulated]
    return parts


def summarise(runs: Sequence[Simulation]) -> Summary:
    requests = [request for run in runs for request in run.requests]
    served = [request for request in requests if not request.is_refused]
    prompts = sum(request.prompt_tokens for request in served)
    seconds = max((run.seconds for run in runs), default=0.0)
    whole = max((run.whole_seconds for run in runs), default=0.0)
    hits: dict[str, int] = {}
    for request in served:
        for tier, count in request.tokens_from.items():
            hits[tier] = hits.get(tier, 0) + count
    links = []
    for same in zip(*(run.links for run in runs), strict=True):
        num_bytes = sum(link.num_bytes for link in same)
        busy = sum(link.busy_seconds for link in same) / max(whole * len(runs), 1e-9)
        links.append(LinkSummary(same[0].name, num_bytes, num_bytes / max(whole, 1e-9), busy))
    num_computed = sum(run.num_computed_blocks for run in runs)
    num_reused = sum(run.num_reused_blocks for run in runs)
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
        links=links,
        evictions={tier: sum(run.evictions[tier] for run in runs) for tier in (runs[0].evictions if runs else ())},
        duplicates_evicted=sum(run.num_duplicates_evicted for run in runs),
        dead_on_arrival=1 - num_reused / num_computed if num_computed else 0.0,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) if values else 0.0 for share in PERCENTILES}
