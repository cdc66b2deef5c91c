"""From block ids to tables of copies, in numpy: ids are checked and sorted once per transfer, tables made per slice.

A transfer is cut into slices: all layers of some blocks, or a group of layers of some blocks. A slice is what is
submitted, waited for, and reported as done or failed.

    blocks, in the order of their destination   0 ........ 31 | 32 ........ 63 | ...        slice_bytes each
    layer-wise: layers 0-7 of all of them, then layers 8-15, ...
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.layout import CacheGroup
from kvtier.memory import CostTable
from kvtier.memory.copy_plan import I64
from kvtier.transfer.config import Strategy, TransferConfig
from kvtier.transfer.device_cache import DeviceCache, Part
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.moves import Ids, Moves, block_copies, copy_table, sort_moves
from kvtier.transfer.plane import Direction, SlotAddresses
from kvtier.transfer.strategy import FIRST_CHUNK_BYTES, Choice, Shape, choose

_STAGE_ALIGNMENT = 256  # a gather kernel moves 16 bytes per load from aligned addresses only
_FIRST_SHARE = 16  # of a large transfer, in the first chunk


@dataclass(slots=True, eq=False)
class Tables:
    """The copies of a slice, rows as in Entries."""

    copies: I64
    """Over the link. If staged, addresses of the staging side count from its start."""
    inside: I64 | None = None
    """If staged: those between cache and staging, likewise."""


class Slice:
    """What is submitted at once. Its tables are made when they are first asked for: while the slice before moves."""

    def __init__(self, blocks: I64, layer_group: int, nbytes: int, make: Callable[[], Tables]) -> None:
        self.blocks = blocks
        """Which of the transfer's moves."""
        self.layer_group = layer_group
        self.nbytes = nbytes
        self._make = make
        self._tables: Tables | None = None

    @property
    def tables(self) -> Tables:
        """What to copy."""
        if self._tables is None:
            self._tables = self._make()
        return self._tables

    @property
    def made(self) -> Tables | None:
        """The same, unless nobody has asked for it yet."""
        return self._tables


@dataclass(slots=True, eq=False)
class CompiledTransfer:
    """A transfer, ready to be submitted any number of times until the cache is released."""

    group: CacheGroup
    direction: Direction
    device_ids: I64
    """As they were asked for."""
    host_ids: I64
    layer_groups: list[range]
    slices: list[Slice]
    choice: Choice
    cache: DeviceCache
    """Knows whether its tensors are still there; the addresses here are theirs."""
    host: HostMemory
    nbytes: int
    """Of all slices together."""

    @property
    def num_copies(self) -> int:
        """Copies over the link, of the slices that were submitted."""
        return sum(each.made.copies.shape[1] for each in self.slices if each.made is not None)

    @property
    def num_inside(self) -> int:
        """Copies between cache and staging, likewise."""
        made = [each.made.inside for each in self.slices if each.made is not None]
        return sum(table.shape[1] for table in made if table is not None)


def compile_transfer(
    cache: DeviceCache,
    host: HostMemory,
    direction: Direction,
    device_ids: Ids,
    host_ids: Ids,
    layer_groups: list[range],
    config: TransferConfig,
    *,
    slice_bytes: int,
    strategy: Strategy | None = None,
    costs: CostTable | None = None,
) -> CompiledTransfer:
    """Check the ids, choose a strategy, and write the tables."""
    group, num_slots = cache.group, host.num_ready
    host.keep()  # an error once it is freed
    if host.group != group:
        raise ArgumentError(f"the host memory is for other blocks than those of cache group {group.name!r}")
    moves = sort_moves(device_ids, host_ids, direction, cache.num_blocks, num_slots)
    count = len(moves)
    parts = [cache.part(layers) for layers in layer_groups]
    sides = (cache.placement, host.placement)
    shape = Shape(
        *(sides if direction is Direction.D2H else sides[::-1]),
        nbytes=sum([part.span.nbytes for part in parts]) * count,
        num_parts=sum([len(part.segments) for part in parts]) * count,
        num_spans=len(layer_groups) * count,
    )
    choice = choose(shape, strategy or config.strategy, costs) if count else Choice("direct", "loop", "no blocks")
    slices = []
    for index, part in enumerate(parts):
        num_bytes = part.span.nbytes
        if choice.strategy == "staged":
            at_end = index == (0 if direction is Direction.D2H else len(layer_groups) - 1)
            sizes = _staged_chunks(count, num_bytes, config.chunk_bytes, ramp=at_end)
            tables, limits = _staged_tables, _limits(sizes if direction is Direction.D2H else sizes[::-1])
        else:
            step = max(1, slice_bytes // num_bytes)
            tables, limits = _direct_tables, _limits([min(step, count - start) for start in range(0, count, step)])
        for start, end in limits:
            make = functools.partial(tables, moves, slice(start, end), part, host.addresses, direction)
            slices.append(Slice(moves.order[start:end], index, (end - start) * num_bytes, make))
    return CompiledTransfer(
        group, direction, moves.device_ids, moves.host_ids, layer_groups, slices, choice, cache, host, shape.nbytes
    )


def _limits(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of these lengths, one behind the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _staged_chunks(count: int, span_bytes: int, chunk_bytes: int, *, ramp: bool) -> list[int]:
    """Blocks of each chunk, none larger than a slot of the ring. With `ramp`, the first one is small."""
    stride = _stage_stride(span_bytes)
    step = chunk_bytes // stride
    if step < 1:
        raise ArgumentError(f"a block of {span_bytes} bytes does not fit a staging chunk of {chunk_bytes}")
    first = min(count, step, max(FIRST_CHUNK_BYTES // stride, count // _FIRST_SHARE, 1)) if ramp else 0
    # what is left, in equal chunks: a short one would not hide the kernel of the next
    left = count - first
    num_full = -(-left // step)
    sizes = [first, *(left * (k + 1) // num_full - left * k // num_full for k in range(num_full))]
    return [size for size in sizes if size]


def _direct_tables(moves: Moves, chosen: slice, part: Part, host: SlotAddresses, direction: Direction) -> Tables:
    segments, on_device, on_host = part.segments, moves.sorted_device[chosen], moves.sorted_host[chosen]
    if len(segments) == 1:
        device = (int(segments.pointer[0]), int(segments.stride[0]))
        near = (host.pointer + int(segments.offset[0]), host.stride)
        return Tables(block_copies(on_device, on_host, device, near, part.span.nbytes, host.run_blocks, direction))
    device_side = segments.pointer + on_device[:, None] * segments.stride  # [block, segment]
    host_side = (host.pointer + on_host * host.stride)[:, None] + segments.offset
    return Tables(copy_table(device_side, host_side, segments.nbytes, direction))


def _staged_tables(moves: Moves, chosen: slice, part: Part, host: SlotAddresses, direction: Direction) -> Tables:
    span, segments = part.span, part.segments
    on_device, on_host = moves.sorted_device[chosen], moves.sorted_host[chosen]
    stride, places = _stage_stride(span.nbytes), np.arange(len(on_host))
    device_side = segments.pointer + on_device[:, None] * segments.stride
    stage_side = (places * stride)[:, None] + (segments.offset - span.offset)
    inside = copy_table(device_side, stage_side, segments.nbytes, direction)
    near = (host.pointer + span.offset, host.stride)
    copies = block_copies(places, on_host, (0, stride), near, span.nbytes, host.run_blocks, direction)
    return Tables(copies, inside)


def _stage_stride(span_bytes: int) -> int:
    return -(-span_bytes // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT
