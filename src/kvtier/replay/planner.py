"""The planner: which sizes to look at, what each brings, which one to buy, and what more would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import RangeError
from kvtier.replay.curves import OPTIMUM, Accesses, HitPoint, sweep
from kvtier.replay.deployment import GIB, Deployment, Summary, simulate
from kvtier.replay.hardware import PriceSpec
from kvtier.replay.trace import TraceRequest

STEP = 100 * GIB


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One setup and what it came to."""

    host_bytes: int
    disk_bytes: int
    price: float
    """Of host memory and disk, one replica, in dollars."""
    summary: Summary

    def holds(self, ttft_p99: float) -> bool:
        """Whether it serves every request, and in time: what is refused has no time to first token."""
        return not self.summary.num_refused and self.summary.ttft["p99"] <= ttft_p99


@dataclass(frozen=True, slots=True)
class Advice:
    """What to buy. `chosen` is None if no setup that was looked at reaches the target."""

    target_ttft_p99: float
    chosen: PlanPoint | None
    nearest: PlanPoint
    """Of those that refuse fewest requests, the one with the lowest TTFT p99."""
    more_host: PlanPoint | None
    """With 100 GiB more host memory than the chosen one, or the nearest."""
    more_disk: PlanPoint | None
    """With 100 GiB more disk."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Hit rates over capacity, setups over their sizes, and the advice."""

    footprint_bytes: int
    """Of all different blocks of the trace, for one replica's share of it."""
    curve: tuple[HitPoint, ...]
    """Capacities are of all replicas together, as if they shared one cache."""
    points: tuple[PlanPoint, ...]
    advice: Advice
    prices: PriceSpec


def plan(
    trace: Sequence[TraceRequest],
    setup: Deployment,
    target_ttft_p99: float,
    prices: PriceSpec,
    *,
    policies: Sequence[str] = ("lru", OPTIMUM),
    num_simulated: int | None = 1,
    jobs: int = 1,
    progress: Callable[[str, float], None] | None = None,
) -> PlanResult:
    """Look at setups from no host memory to more than the trace can use, with and without a disk.

    `num_simulated` replicas stand for all; None simulates every one.
    """

    def tell(what: str) -> Callable[[float], None]:
        return lambda share: progress(what, share) if progress is not None else None

    block_bytes = setup.model.token_bytes * trace[0].block_tokens
    footprint = Accesses(trace).num_paths * block_bytes
    curve = sweep(trace, capacities(footprint // block_bytes), policies, jobs=jobs, progress=tell("hit rates"))
    share = footprint // setup.replicas

    def run(sizes: Sequence[tuple[int, int]], what: str) -> list[PlanPoint]:
        changed = [replace(setup, host_bytes=host, disk_bytes=disk) for host, disk in sizes]
        found = simulate(trace, changed, num_simulated=num_simulated, jobs=jobs, progress=tell(what))
        costs = [(host * prices.host_gib + disk * prices.disk_gib) / GIB for host, disk in sizes]
        return [
            PlanPoint(host, disk, price, summary)
            for (host, disk), price, summary in zip(sizes, costs, found, strict=True)
        ]

    points = run(setups(setup, share), "setups")
    fitting = [point for point in points if point.holds(target_ttft_p99)]
    chosen = min(fitting, key=lambda point: (point.price, point.summary.ttft["p99"]), default=None)
    nearest = min(points, key=lambda point: (point.summary.num_refused, point.summary.ttft["p99"], point.price))
    base = chosen or nearest
    more = [(base.host_bytes + STEP, base.disk_bytes)]
    if setup.disk is not None and base.host_bytes:
        more.append((base.host_bytes, base.disk_bytes + STEP))
    beyond = run(more, "100 GiB more")
    advice = Advice(target_ttft_p99, chosen, nearest, beyond[0], beyond[1] if len(beyond) > 1 else None)
    return PlanResult(share, tuple(curve), tuple(points), advice, prices)


def capacities(num_blocks: int, count: int = 20) -> list[int]:
    """Capacities to look at for a trace of so many different blocks: a geometric row from a thousandth of it to all."""
    if count < 2:
        raise RangeError(f"a curve has at least two points, got {count} capacities")
    most = max(1, num_blocks)
    least = max(1, most // 1000)
    return sorted({round(least * (most / least) ** (i / (count - 1))) for i in range(count)})


def setups(setup: Deployment, footprint: int) -> list[tuple[int, int]]:
    """Sizes of host memory and disk that are worth a look: powers of two, up to the first that holds everything."""
    hosts = [0, *_powers(32 * GIB, footprint)]
    sizes = [(host, 0) for host in hosts]
    if setup.disk is not None:
        disks = _powers(512 * GIB, footprint)
        some = hosts[1:4:2] or hosts[1:2]
        sizes += [(host, disk) for host in some for disk in disks]
    return sizes


def _powers(least: int, most: int) -> list[int]:
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
