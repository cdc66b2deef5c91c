"""How a transfer crosses the link.

direct   the copy engines move each contiguous part (cuMemcpyBatchAsync); best if the parts are large
kernel   a kernel reads and writes all parts over the link; any size, but the model loses multiprocessors to it
staged   a kernel gathers parts on the device, where that takes a fiftieth of the time, and the copy engines move
         whole blocks between there and the host

The cost of each is the time it takes plus the time the model loses meanwhile, both from the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.memory import CostTable, Placement, cost_table
from kvtier.memory.copy_paths import Job, PathName, why_not
from kvtier.memory.costs import cost_key
from kvtier.transfer.config import Strategy

_FIRST_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What a transfer consists of, as far as its cost goes."""

    src: Placement
    dst: Placement
    nbytes: int
    num_parts: int
    """Contiguous parts in the device cache."""
    num_spans: int
    """Contiguous parts in host memory: fewer, if a block is one piece there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to go, and why."""

    strategy: Strategy
    path: PathName
    """Which copy path crosses the link."""
    why: str
    estimates_us: Mapping[Strategy, float] = field(default_factory=dict)
    """Expected microseconds of each strategy by itself."""

    @property
    def expected_us(self) -> float | None:
        """Expected microseconds of the chosen one, if there are costs to tell by."""
        return self.estimates_us.get(self.strategy)


def choose(shape: Shape, forced: Strategy | None = None, costs: CostTable | None = None) -> Choice:
    """The cheapest strategy, or the forced one where it can do the job."""
    job = Job(shape.src, shape.dst, None)
    if not job.on_device:
        able = why_not("host", job) is None
        told = "compiled copier" if able else f"no compiled copier: {why_not('host', job)}"
        return Choice("direct", "host" if able else "loop", told)
    device = shape.dst if shape.dst.is_device else shape.src
    engine: PathName = "driver" if why_not("driver", job) is None else "loop"
    refusals: dict[Strategy, str | None] = {
        "direct": None,
        "kernel": why_not("gather", job),
        "staged": why_not("gather", Job(device, device, None))
        or ("blocks are one piece on both sides" if shape.num_parts <= shape.num_spans and forced is None else None),
    }
    why = "".join(f"no {name}: {refusal}; " for name, refusal in refusals.items() if refusal is not None)
    paths: dict[Strategy, PathName] = {"direct": engine, "kernel": "gather", "staged": engine}
    if forced is not None and refusals[forced] is None:
        return Choice(forced, paths[forced], "forced")
    if forced is not None:
        why = f"{forced} was forced, but {refusals[forced]}; {why}"
    able_ones = [name for name, refusal in refusals.items() if refusal is None]
    if len(able_ones) == 1:
        return Choice(able_ones[0], paths[able_ones[0]], why.rstrip("; "))
    table = costs or cost_table(device)
    times, prices = _prices(shape, job, Job(device, device, None), engine, table)
    best = min(able_ones, key=lambda name: prices[name])
    told = ", ".join(f"{name} {times[name]:.0f} us + {prices[name] - times[name]:.0f} us lost" for name in able_ones)
    return Choice(best, paths[best], f"{why}estimated {told}", times)


def _prices(
    shape: Shape, link: Job, inside: Job, engine: PathName, table: CostTable
) -> tuple[dict[Strategy, float], dict[Strategy, float]]:
    """Microseconds of each strategy, and the same with what the model loses."""
    parts = table.estimate_us(link, shape.num_parts, shape.nbytes)
    spans = table.estimate_us(link, shape.num_spans, shape.nbytes)
    gather = table.estimate_us(inside, shape.num_parts, shape.nbytes).get("gather", math.inf)
    lost = table.lost.get(cost_key(link), {})
    engine_share = lost.get(engine, 0.0)
    # the link is busy all the time but for the first gather (or the last scatter)
    first = gather * min(1.0, _FIRST_CHUNK_BYTES / shape.nbytes)
    times: dict[Strategy, float] = {
        "direct": parts.get(engine, math.inf),
        "kernel": parts.get("gather", math.inf),
        "staged": spans.get(engine, math.inf) + first,
    }
    prices: dict[Strategy, float] = {
        "direct": times["direct"] * (1 + engine_share),
        "kernel": times["kernel"] * (1 + lost.get("gather", 1.0)),
        "staged": times["staged"] * (1 + engine_share) + gather,
    }
    return times, prices
