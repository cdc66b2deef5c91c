"""Transfer configuration, and the choice between direct, staged and kernel copies.

direct   the copy engines move each contiguous part (cuMemcpyBatchAsync); best for large parts
kernel   a kernel copies all parts over the link; fast for small parts, but takes multiprocessors from the model
staged   the copy engines move whole blocks between the host and staging memory on the device, and a kernel gathers or
         scatters the parts of these blocks inside the device; the kernel takes a fiftieth of the transfer time

The price of a strategy is the time of the transfer plus the time by which the transfer delays the model's computation.
Both times come from the calibration of the machine (CostTable).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kvtier.errors import ArgumentError
from kvtier.memory import CostTable, Placement, cost_table
from kvtier.memory.copy_paths import CopyContext, PathName, usable_paths, why_not
from kvtier.memory.costs import cost_key

Strategy = Literal["direct", "kernel", "staged"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of a TransferManager. The defaults were tuned on an H200 with PCIe 5.0 x16, 2026-11-15."""

    strategy: Strategy | None = None
    """Strategy to use where possible. None selects the cheapest strategy according to the calibration."""
    slice_bytes: int = 64 << 20
    """Approximate size of a slice of a bulk transfer. 64 MiB take 1.2 ms on the link."""
    max_in_flight_bytes: int = 192 << 20
    """Maximum bulk bytes in flight per direction. The default (three slices) keeps the link busy, and delays an urgent
    transfer by about 3.5 ms at most."""
    max_urgent_bytes: int = 8 << 30
    """Maximum urgent bytes in flight per direction. Further urgent transfers are queued ahead of bulk transfers."""
    group_piece_bytes: int = 512 << 10
    """Approximate bytes per block and layer group in a layer-wise load. 512 KiB reach 96 % of the link rate."""
    min_layer_groups: int = 4
    """Minimum number of layer groups in a layer-wise load. The model can start when the first group has arrived."""
    chunk_bytes: int = 64 << 20
    """Size of a slot of the staging ring. While the gather kernel of a slot waits for a busy GPU, the other slots are
    copied. These copies should take longer than the wait. Small slots cost more host time: each slot takes a
    kernel launch and a batch call (0.1 ms)."""
    num_chunks: int = 3
    """Number of slots of the staging ring."""
    gather_blocks: int = 264
    """Number of thread blocks of a gather or scatter kernel. Default: two for each of an H200's 132 multiprocessors."""

    def __post_init__(self) -> None:
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ArgumentError(f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}")
        for name in ("slice_bytes", "max_in_flight_bytes", "max_urgent_bytes", "chunk_bytes", "num_chunks"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be positive, got {getattr(self, name)}")


# A staged transfer is copied in chunks that fit into a slot of the staging ring. The link is idle while the first chunk
# of a save is gathered, or the last chunk of a load is scattered. This chunk is therefore small. FIRST_CHUNK_BYTES is
# its minimum size, so that the gather of the next chunk can end during the copy of this chunk, even on a busy GPU. On
# an idle GPU, staged transfers of 64 MiB reach 0.969 of the link rate with a minimum of 4 MiB, and 0.962 with 12 MiB
# (H200, 2026-11-15).
FIRST_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TransferShape:
    """The properties that determine the cost of a transfer."""

    src: Placement
    dst: Placement
    nbytes: int
    num_parts: int
    """Contiguous parts in the device cache."""
    num_spans: int
    """Contiguous parts in host memory: one per block and group of layers."""


Paths = Mapping[Strategy, PathName]
"""The copy path over the link for each usable strategy."""
Prices = dict[Strategy, float]


@functools.cache  # needed for every transfer; the result never changes
def _options(src: Placement, dst: Placement, in_one_piece: bool) -> tuple[Paths, Mapping[Strategy, str], str]:
    """Return the usable strategies, the reasons against other strategies, and these reasons as text."""
    link, device = CopyContext(src, dst, None), dst if dst.is_device else src
    engine = next(path for path in usable_paths(link)[0] if path != "gather")
    if not link.on_device:
        return {"direct": engine}, {}, ""
    paths: dict[Strategy, PathName] = {"direct": engine, "kernel": "gather", "staged": engine}
    refusals: dict[Strategy, str | None] = {
        "direct": None,
        "kernel": why_not("gather", link),
        "staged": "blocks are contiguous on both sides"
        if in_one_piece
        else why_not("gather", CopyContext(device, device, None)),
    }
    reasons = {name: refusal for name, refusal in refusals.items() if refusal is not None}
    usable = {name: path for name, path in paths.items() if name not in reasons}
    return usable, reasons, "".join(f"no {name}: {reason}; " for name, reason in reasons.items())


@dataclass(slots=True)  # created for every transfer, so it is not frozen and computes estimates on demand
class StrategyChoice:
    """The chosen strategy, and the reason for it."""

    strategy: Strategy
    path: PathName
    """The copy path over the link."""
    note: str = ""
    """The reason without the estimates."""
    estimate: Callable[[], tuple[Prices, Prices]] | None = None
    """Returns the result of `_prices`. None if the strategy was forced, only one is usable, or there are no blocks."""

    @property
    def why(self) -> str:
        """The reason, with two estimates per strategy: the time of the transfer and the model's lost time."""
        if self.estimate is None:
            return self.note.rstrip("; ")
        times, prices = self.estimate()
        return f"{self.note}estimated " + ", ".join(
            f"{name} {us:.0f} us + {prices[name] - us:.0f} us lost" for name, us in times.items()
        )

    @property
    def expected_us(self) -> float | None:
        """Expected microseconds of the chosen strategy on an idle GPU; None if `estimate` is None."""
        return None if self.estimate is None else self.estimate()[0].get(self.strategy)


def choose(shape: TransferShape, forced: Strategy | None = None, costs: CostTable | None = None) -> StrategyChoice:
    """Choose the cheapest strategy, or the forced strategy if it is usable."""
    # a forced "staged" is used even if blocks are contiguous and need no gathering
    paths, reasons, note = _options(shape.src, shape.dst, forced is None and shape.num_parts <= shape.num_spans)
    if forced is not None and forced in paths:
        return StrategyChoice(forced, paths[forced], "forced")
    if forced is not None:
        note = f"{forced} was forced, but {reasons.get(forced, 'there is no GPU')}; {note}"
    if len(paths) == 1:
        only = next(iter(paths))
        return StrategyChoice(only, paths[only], note or "the only strategy between host memories")
    table = costs or cost_table(shape.dst if shape.dst.is_device else shape.src)
    magnitudes = (shape.nbytes.bit_length(), shape.num_parts.bit_length(), shape.num_spans.bit_length())
    best = _cheapest(shape.src, shape.dst, table, *magnitudes)
    return StrategyChoice(best, paths[best], note, functools.partial(_prices, shape, paths, table))


@functools.lru_cache(maxsize=4096)  # 20 us to compute; transfers of the same order of magnitude share a result
def _cheapest(
    src: Placement, dst: Placement, table: CostTable, bytes_bits: int, parts_bits: int, spans_bits: int
) -> Strategy:
    """Return the cheapest strategy. Each size is given by its number of bits: n bits stand for 3/4 of 2^n."""
    shape = TransferShape(src, dst, *(3 << bits >> 2 for bits in (bytes_bits, parts_bits, spans_bits)))
    prices = _prices(shape, _options(src, dst, parts_bits == spans_bits)[0], table)[1]
    return min(prices, key=lambda name: prices[name])


def _prices(shape: TransferShape, paths: Paths, table: CostTable) -> tuple[Prices, Prices]:
    """Return the time and the price of each usable strategy. A price is the time plus the model's lost time (us)."""
    device = shape.dst if shape.dst.is_device else shape.src
    link, inside, engine = CopyContext(shape.src, shape.dst, None), CopyContext(device, device, None), paths["direct"]
    parts = table.estimate_us(link, shape.num_parts, shape.nbytes)
    spans = table.estimate_us(link, shape.num_spans, shape.nbytes)
    gather = table.estimate_us(inside, shape.num_parts, shape.nbytes).get("gather", math.inf)
    lost = table.lost.get(cost_key(link), {})
    engine_share = lost.get(engine, 0.0)
    # a staged transfer leaves the link idle only during the gather of its first (or the scatter of its last) chunk
    first = gather * min(1.0, FIRST_CHUNK_BYTES / shape.nbytes)
    times: Prices = {
        "direct": parts.get(engine, math.inf),
        "kernel": parts.get("gather", math.inf),
        "staged": spans.get(engine, math.inf) + first,
    }
    prices: Prices = {
        "direct": times["direct"] * (1 + engine_share),
        "kernel": times["kernel"] * (1 + lost.get("gather", 1.0)),
        "staged": times["staged"] * (1 + engine_share) + gather,
    }
    return {name: times[name] for name in paths}, {name: prices[name] for name in paths}
