"""Transfer configuration, and the choice between direct, staged and kernel copies.

What can be set about transfers.

How a transfer crosses the link.

direct   the copy engines move each contiguous part (cuMemcpyBatchAsync); best if the parts are large
kernel   a kernel reads and writes all parts over the link; any size, but the model loses multiprocessors to it
staged   a kernel gathers parts on the device, where that takes a fiftieth of the time, and the copy engines move
         whole blocks between there and the host

The cost of each is the time it takes plus the time the model loses meanwhile, both from the calibration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvtier.errors import ArgumentError
from kvtier.memory import CostTable, Placement, cost_table
from kvtier.memory.copy_paths import CopyContext, PathName, why_not
from kvtier.memory.costs import cost_key

Strategy = Literal["direct", "kernel", "staged"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How a TransferManager moves blocks. The constants were tuned on an H200 behind PCIe 5.0 x16, 2026-11-15."""

    strategy: Strategy | None = None
    """Force one (see strategy.py); None: the cheapest by the machine's calibration."""
    slice_bytes: int = 64 << 20
    """Bulk transfers are submitted in slices of about this size: 1.2 ms of the link."""
    max_in_flight_bytes: int = 192 << 20
    """Bulk bytes given to the device and not done, per direction: enough for the link never to run dry, and what an
    urgent transfer waits for at most (3.5 ms)."""
    max_urgent_bytes: int = 8 << 30
    """Urgent bytes, likewise. Beyond it they are queued, ahead of bulk."""
    group_piece_bytes: int = 512 << 10
    """Layers of a layer-wise load travel in groups of at least so many bytes per block: DMA at 96 % of the link."""
    min_layer_groups: int = 4
    """The model waits for one such share of the load before it can start."""
    chunk_bytes: int = 64 << 20
    """One slot of the staging ring: two of them outlast a gather kernel's wait for a busy GPU, and each costs the host
    a launch and a batch call (0.1 ms)."""
    num_chunks: int = 3
    gather_blocks: int = 264
    """Blocks of threads of the kernel that gathers into staging: two per multiprocessor."""
    checksum_threads: int = 4

    def __post_init__(self) -> None:
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ArgumentError(f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}")
        for name in ("slice_bytes", "max_in_flight_bytes", "max_urgent_bytes", "chunk_bytes", "num_chunks"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be positive, got {getattr(self, name)}")


# The link is idle during the first gather (or the last scatter), so that chunk is small; but a chunk should outlast the
# gather of the next, which waits for its turn beside a busy GPU. 64 MiB alone, worst shape: .969 of the link with
# 4 MiB, .963 with 8, .962 with 12; beside matrix products no difference (H200, 2026-11-15).
FIRST_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TransferShape:
    """What a transfer consists of, as far as its cost goes."""

    src: Placement
    dst: Placement
    nbytes: int
    num_parts: int
    """Contiguous parts in the device cache."""
    num_spans: int
    """Contiguous parts in host memory: fewer, if a block is one piece there."""


@dataclass(frozen=True, slots=True)
class _PathOptions:
    """What can be done between two placements."""

    paths: Mapping[Strategy, PathName]
    """The able strategies, with the path that crosses the link."""
    refusals: Mapping[Strategy, str]
    link: CopyContext
    inside: CopyContext
    told: str = field(init=False)

    def __post_init__(self) -> None:
        told = "".join(f"no {name}: {refusal}; " for name, refusal in self.refusals.items())
        object.__setattr__(self, "told", told)


@functools.cache  # asked for every transfer, and the answer never changes
def _options(src: Placement, dst: Placement, in_one_piece: bool) -> _PathOptions:
    link = CopyContext(src, dst, None)
    device = dst if dst.is_device else src
    inside = CopyContext(device, device, None)
    if not link.on_device:
        refusal = why_not("host", link)
        return _PathOptions({"direct": "loop" if refusal else "host"}, {}, link, inside)
    engine: PathName = "driver" if why_not("driver", link) is None else "loop"
    paths: dict[Strategy, PathName] = {"direct": engine, "kernel": "gather", "staged": engine}
    reasons: dict[Strategy, str | None] = {
        "direct": None,
        "kernel": why_not("gather", link),
        "staged": "blocks are one piece on both sides" if in_one_piece else why_not("gather", inside),
    }
    able = {name: path for name, path in paths.items() if reasons[name] is None}
    return _PathOptions(able, {name: reason for name, reason in reasons.items() if reason is not None}, link, inside)


@dataclass(slots=True)
class _CostEstimate:
    shape: TransferShape
    options: _PathOptions
    table: CostTable

    def reckon(self) -> tuple[dict[Strategy, float], dict[Strategy, float]]:
        """Microseconds of each able strategy, and the same with what the model loses."""
        return _prices(self.shape, self.options, self.table)


@dataclass(slots=True)  # not frozen, and reckoned only when asked: made for every transfer
class StrategyChoice:
    """The way to go, and why."""

    strategy: Strategy
    path: PathName
    """Which copy path crosses the link."""
    told: str = ""
    """Why, but for the estimates."""
    by: _CostEstimate | None = None
    """What the estimates rest on; None: there was nothing to choose."""

    @property
    def estimates_us(self) -> Mapping[Strategy, float]:
        """Expected microseconds of each able strategy by itself."""
        return self.by.reckon()[0] if self.by is not None else {}

    @property
    def why(self) -> str:
        """The reason, with the estimates it rests on: time, and what the model loses meanwhile; the least sum wins."""
        if self.by is None:
            return self.told.rstrip("; ")
        times, prices = self.by.reckon()
        return f"{self.told}estimated " + ", ".join(
            f"{name} {us:.0f} us + {prices[name] - us:.0f} us lost" for name, us in times.items()
        )

    @property
    def expected_us(self) -> float | None:
        """Expected microseconds of the chosen one, if there are costs to tell by."""
        return self.estimates_us.get(self.strategy)


def choose(shape: TransferShape, forced: Strategy | None = None, costs: CostTable | None = None) -> StrategyChoice:
    """The cheapest strategy, or the forced one where it can do the job."""
    # who forces staging gets it, though there may be nothing to gather
    options = _options(shape.src, shape.dst, forced is None and shape.num_parts <= shape.num_spans)
    paths = options.paths
    if forced is not None and forced in paths:
        return StrategyChoice(forced, paths[forced], "forced")
    told = options.told
    if forced is not None:
        told = f"{forced} was forced, but {options.refusals.get(forced, 'there is no GPU')}; {told}"
    if len(paths) == 1:
        only = next(iter(paths))
        return StrategyChoice(only, paths[only], told or "the only way between host memories")
    table = costs or cost_table(shape.dst if shape.dst.is_device else shape.src)
    magnitudes = (shape.nbytes.bit_length(), shape.num_parts.bit_length(), shape.num_spans.bit_length())
    best = _cheapest(shape.src, shape.dst, table, *magnitudes)
    return StrategyChoice(best, paths[best], told, _CostEstimate(shape, options, table))


@functools.lru_cache(maxsize=4096)  # reckoning costs 20 us hot; transfers of one order of magnitude go one way
def _cheapest(
    src: Placement, dst: Placement, table: CostTable, bytes_bits: int, parts_bits: int, spans_bits: int
) -> Strategy:
    """The strategy of the least price for a transfer of this order of magnitude."""
    shape = TransferShape(src, dst, *(3 << bits >> 2 for bits in (bytes_bits, parts_bits, spans_bits)))
    in_one_piece = parts_bits == spans_bits
    prices = _prices(shape, _options(src, dst, in_one_piece), table)[1]
    return min(prices, key=lambda name: prices[name])


def _prices(
    shape: TransferShape, options: _PathOptions, table: CostTable
) -> tuple[dict[Strategy, float], dict[Strategy, float]]:
    """Microseconds of each able strategy, and the same with what the model loses."""
    link, inside, engine = options.link, options.inside, options.paths["direct"]
    parts = table.estimate_us(link, shape.num_parts, shape.nbytes)
    spans = table.estimate_us(link, shape.num_spans, shape.nbytes)
    gather = table.estimate_us(inside, shape.num_parts, shape.nbytes).get("gather", math.inf)
    lost = table.lost.get(cost_key(link), {})
    engine_share = lost.get(engine, 0.0)
    # the link is busy all the time but for the first gather (or the last scatter)
    first = gather * min(1.0, FIRST_CHUNK_BYTES / shape.nbytes)
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
    return {name: times[name] for name in options.paths}, {name: prices[name] for name in options.paths}
