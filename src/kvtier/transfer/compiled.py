"""Compile block ids into tables of copies, in numpy. Ids are checked and sorted once per transfer, tables per slice.

A transfer is cut into slices: all layers of some blocks, or a group of layers of some blocks. A slice is the unit that
is submitted, waited for, and reported as done or failed.

    blocks, in the order of their destination   0 ........ 31 | 32 ........ 63 | ...        slice_bytes each
    layer-wise: layers 0-7 of all of them, then layers 8-15, ...
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.layout import CacheGroup
from kvtier.memory import CostTable
from kvtier.memory.copy_plan import DST, I64, NBYTES, SRC, Entries, scan
from kvtier.memory.native import native
from kvtier.transfer.device_cache import DeviceCache, LayerRange
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.plane import Direction, SlotAddresses
from kvtier.transfer.strategy import FIRST_CHUNK_BYTES, Strategy, StrategyChoice, TransferConfig, TransferShape, choose

Ids = Sequence[int] | I64


@dataclass(slots=True, eq=False)
class SortedBlockIds:
    """Blocks to move, as they were asked for and in the order of their destination."""

    device_ids: I64
    host_ids: I64
    order: I64
    """Which of these comes first, second, ... by destination."""
    sorted_device: I64
    sorted_host: I64

    def __len__(self) -> int:
        return len(self.order)


def sort_moves(device_ids: Ids, host_ids: Ids, direction: Direction, num_device: int, num_host: int) -> SortedBlockIds:
    """Check the ids (see check_moves) and put them in the order of their destination."""
    # copies: they outlive this call, and the arrays given are their owner's to change
    on_device, on_host = np.array(device_ids, order="C"), np.array(host_ids, order="C")
    code, usual = native().code, on_device.dtype == on_host.dtype == np.int64 and on_device.ndim == 1
    if code is not None and usual and on_device.shape == on_host.shape != (0,):
        to_host = direction is Direction.D2H
        rows = code.sort_moves(on_device, on_host, num_device, num_host, to_host=to_host)
        if rows is not None:  # else the checks below say what is wrong
            return SortedBlockIds(on_device, on_host, *rows)
    on_device, on_host = check_moves(device_ids, host_ids, direction, num_device, num_host)
    order = np.argsort(on_host if direction is Direction.D2H else on_device, kind="stable")
    return SortedBlockIds(on_device, on_host, order, on_device[order], on_host[order])


def block_copies(
    device_ids: I64,
    host_ids: I64,
    device: tuple[int, int],
    host: tuple[int, int],
    nbytes: int,
    run_blocks: int,
    direction: Direction,
) -> I64:
    """The copies (rows as in Entries) of blocks of `nbytes` that are one piece on both sides, each an address and a
    stride. Blocks that follow each other on both sides are one copy, but not across a multiple of `run_blocks` of the
    host (0: no such bounds)."""
    code = native().code
    if code is not None and len(device_ids):
        to_host = direction is Direction.D2H
        return code.block_copies(device_ids, host_ids, device, host, nbytes, run_blocks, to_host=to_host)
    near, far = device[0] + device_ids * device[1], host[0] + host_ids * host[1]
    table = copy_table(near, far, np.array([nbytes]), direction)
    starts = scan(Entries(table, host_ids // run_blocks if run_blocks else None)).starts
    if starts is None:
        return table
    merged = table.take(starts, axis=1)
    merged[NBYTES] = np.add.reduceat(table[NBYTES], starts)
    return merged


def copy_table(device_side: I64, host_side: I64, nbytes: I64, direction: Direction) -> I64:
    """Copies (rows as in Entries) from addresses of both sides. "Host side" is the one nearer to the host."""
    table = np.empty((3, device_side.size), np.int64)
    near, far = (SRC, DST) if direction is Direction.D2H else (DST, SRC)
    table[near] = device_side.reshape(-1)
    table[far] = host_side.reshape(-1)
    table[NBYTES].reshape(device_side.shape)[:] = nbytes
    return table


def check_ids(name: str, ids: Any, num_blocks: int) -> I64:
    """Block ids as an array; an error names the first that is out of range."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{name} must be a list of whole numbers, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64)
    if len(array) and (np.minimum.reduce(array) < 0 or np.maximum.reduce(array) >= num_blocks):
        bad = int(np.argmax((array < 0) | (array >= num_blocks)))
        raise RangeError(f"{name}[{bad}] is {int(array[bad])}, outside 0..{num_blocks - 1}")
    return array


def check_moves(
    device_ids: Ids, host_ids: Ids, direction: Direction, num_device: int, num_host: int
) -> tuple[I64, I64]:
    """The ids of both sides as arrays: in range of so many blocks, equally many, no destination twice."""
    on_device = check_ids("device_ids", device_ids, num_device)
    on_host = check_ids("host_ids", host_ids, num_host)
    if len(on_device) != len(on_host):
        raise ArgumentError(f"as many device as host blocks are needed, got {len(on_device)} and {len(on_host)}")
    name, targets = ("host_ids", on_host) if direction is Direction.D2H else ("device_ids", on_device)
    in_order = np.sort(targets)
    if np.count_nonzero(in_order[1:] == in_order[:-1]):
        again = in_order[1:][in_order[1:] == in_order[:-1]]
        raise ArgumentError(f"block {int(again[0])} is twice in {name}, the destination: only one copy could stay")
    return on_device, on_host


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
    choice: StrategyChoice
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
    shape = TransferShape(
        *(sides if direction is Direction.D2H else sides[::-1]),
        nbytes=sum([part.span.nbytes for part in parts]) * count,
        num_parts=sum([len(part.segments) for part in parts]) * count,
        num_spans=len(layer_groups) * count,
    )
    choice = (
        choose(shape, strategy or config.strategy, costs) if count else StrategyChoice("direct", "loop", "no blocks")
    )
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


def _direct_tables(
    moves: SortedBlockIds, chosen: slice, part: LayerRange, host: SlotAddresses, direction: Direction
) -> Tables:
    segments, on_device, on_host = part.segments, moves.sorted_device[chosen], moves.sorted_host[chosen]
    if len(segments) == 1:
        device = (int(segments.pointer[0]), int(segments.stride[0]))
        near = (host.pointer + int(segments.offset[0]), host.stride)
        return Tables(block_copies(on_device, on_host, device, near, part.span.nbytes, host.run_blocks, direction))
    device_side = segments.pointer + on_device[:, None] * segments.stride  # [block, segment]
    host_side = (host.pointer + on_host * host.stride)[:, None] + segments.offset
    return Tables(copy_table(device_side, host_side, segments.nbytes, direction))


def _staged_tables(
    moves: SortedBlockIds, chosen: slice, part: LayerRange, host: SlotAddresses, direction: Direction
) -> Tables:
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
