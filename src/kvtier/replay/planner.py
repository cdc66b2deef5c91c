"""Planner: simulates deployments of different sizes and chooses the cheapest deployment that meets a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import RangeError
from kvtier.replay.curves import OPTIMUM, Accesses, HitPoint, sweep
from kvtier.replay.deployment import GIB, Deployment, Summary, simulate
from kvtier.replay.hardware import PriceSpec
from kvtier.replay.trace import TraceRequest

STEP = 100 * GIB  # bytes that `PlanResult.more_host` and `PlanResult.more_disk` add


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A simulated setup: its sizes per replica, its price and its result."""

    host_bytes: int
    disk_bytes: int
    price: float
    """Price of one replica's host memory and disk, in dollars."""
    summary: Summary

    def meets(self, ttft_p99: float) -> bool:
        """True if TTFT p99 is within the target and no request is refused. TTFT p99 ignores refused requests."""
        return not self.summary.num_refused and self.summary.ttft["p99"] <= ttft_p99


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Hit rates by capacity, simulated setups by size, and the recommended setup."""

    footprint_bytes: int
    """Bytes of all distinct blocks in the trace, divided by the number of replicas."""
    curve: tuple[HitPoint, ...]
    """Hit rates of a single cache that serves the whole trace, by policy and capacity."""
    points: tuple[PlanPoint, ...]
    prices: PriceSpec
    target_ttft_p99: float
    chosen: PlanPoint | None
    """The cheapest setup that meets the target; None if no setup meets the target."""
    nearest: PlanPoint
    """Of the setups that refuse the fewest requests, the one with the lowest TTFT p99."""
    more_host: PlanPoint
    """The setup `chosen` (`nearest` if `chosen` is None) with another 100 GiB of host memory."""
    more_disk: PlanPoint | None
    """The setup `chosen` (`nearest` if `chosen` is None) with another 100 GiB of disk. None if Deployment.disk is
    None, or if this setup has no host memory."""


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
    """Simulate setups without a disk and, if `setup.disk` is set, setups with a disk. See `setups` for their sizes.

    Only `num_simulated` replicas of each setup are simulated, as a sample. None means all replicas.
    """

    def report(what: str) -> Callable[[float], None]:
        return lambda share: progress(what, share) if progress is not None else None

    block_bytes = setup.model.token_bytes * trace[0].block_tokens
    footprint = Accesses(trace).num_paths * block_bytes
    curve = sweep(trace, capacities(footprint // block_bytes), policies, jobs=jobs, progress=report("hit rates"))
    share = footprint // setup.replicas

    def run(sizes: Sequence[tuple[int, int]], what: str) -> list[PlanPoint]:
        changed = [replace(setup, host_bytes=host, disk_bytes=disk) for host, disk in sizes]
        summaries = simulate(trace, changed, num_simulated=num_simulated, jobs=jobs, progress=report(what))
        return [
            PlanPoint(host, disk, (host * prices.host_gib + disk * prices.disk_gib) / GIB, summary)
            for (host, disk), summary in zip(sizes, summaries, strict=True)
        ]

    points = run(setups(setup, share), "setups")
    fitting = [point for point in points if point.meets(target_ttft_p99)]
    chosen = min(fitting, key=lambda point: (point.price, point.summary.ttft["p99"]), default=None)
    nearest = min(points, key=lambda point: (point.summary.num_refused, point.summary.ttft["p99"], point.price))
    base = chosen or nearest
    more = [(base.host_bytes + STEP, base.disk_bytes)]
    if setup.disk is not None and base.host_bytes:
        more.append((base.host_bytes, base.disk_bytes + STEP))
    beyond = run(more, "100 GiB more")
    more_host, more_disk = beyond[0], beyond[1] if len(beyond) > 1 else None
    return PlanResult(
        share, tuple(curve), tuple(points), prices, target_ttft_p99, chosen, nearest, more_host, more_disk
    )


def capacities(num_blocks: int, count: int = 20) -> list[int]:
    """Return a geometric series of at most `count` different capacities, from num_blocks / 1000 to num_blocks."""
    if count < 2:
        raise RangeError(f"a curve needs at least two points, got {count} capacities")
    most = max(1, num_blocks)
    least = max(1, most // 1000)
    return sorted({round(least * (most / least) ** (i / (count - 1))) for i in range(count)})


def setups(setup: Deployment, footprint: int) -> list[tuple[int, int]]:
    """Return the (host, disk) sizes to simulate, in bytes. Sizes double until `footprint` bytes fit."""
    hosts = [0, *_powers(32 * GIB, footprint)]
    sizes = [(host, 0) for host in hosts]
    if setup.disk is not None:
        disks = _powers(512 * GIB, footprint)
        some = hosts[1:4:2] or hosts[1:2]  # 32 GiB and, if the footprint exceeds 64 GiB, 128 GiB
        sizes += [(host, disk) for host in some for disk in disks]
    return sizes


def _powers(least: int, most: int) -> list[int]:
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
