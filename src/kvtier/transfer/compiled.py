"""Compile block ids into tables of copies, one table per slice of the transfer.

A slice contains some blocks, with all layers or with one group of layers. It is submitted as a unit, and arrives or
fails as a unit. With the strategy "staged", a slice fits into one slot of the staging ring, a buffer in device memory
(staging.py). With other strategies, a slice has about `slice_bytes` bytes; an urgent transfer has one slice per group
of layers.

    slices of a transfer      blocks 0-31 | blocks 32-63 | ...         (blocks are sorted by destination)
    layer-wise transfer       the slices of layers 0-7, then the slices of layers 8-15, ...
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.memory.copy_plan import DST, I64, NBYTES, SRC, scan
from kvtier.memory.native import Strided, native
from kvtier.transfer.block_view import Direction, Ids, check_moves
from kvtier.transfer.device_cache import DeviceCache, LayerRange
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.strategy import FIRST_CHUNK_BYTES, Strategy, StrategyChoice, TransferConfig, TransferShape, choose


@dataclass(slots=True, eq=False)
class SortedBlockIds:
    """Ids of the blocks to move, both in the caller's order and (`sorted_*`) sorted by destination."""

    device_ids: I64
    host_ids: I64
    order: I64
    """Positions in `device_ids` and `host_ids`, sorted by destination."""
    sorted_device: I64
    sorted_host: I64

    def __len__(self) -> int:
        return len(self.order)


def sort_moves(device_ids: Ids, host_ids: Ids, direction: Direction, num_device: int, num_host: int) -> SortedBlockIds:
    """Check the ids (see check_moves) and sort them by destination."""
    # copied, because the ids outlive this call and the caller may change its arrays
    on_device, on_host = np.array(device_ids, order="C"), np.array(host_ids, order="C")
    code, usual = native().code, on_device.dtype == on_host.dtype == np.int64 and on_device.ndim == 1
    if code is not None and usual and on_device.shape == on_host.shape != (0,):
        to_host = direction is Direction.D2H
        rows = code.sort_moves(on_device, on_host, num_device, num_host, to_host=to_host)
        if rows is not None:  # if it is None, the checks below raise the error
            return SortedBlockIds(on_device, on_host, *rows)
    on_device, on_host = check_moves(device_ids, host_ids, direction, num_device, num_host)
    order = np.argsort(on_host if direction is Direction.D2H else on_device, kind="stable")
    return SortedBlockIds(on_device, on_host, order, on_device[order], on_host[order])


def block_copies(
    device_ids: I64, host_ids: I64, device: Strided, host: Strided, nbytes: int, run_blocks: int, direction: Direction
) -> I64:
    """Return the copies (rows SRC, DST, NBYTES) for blocks of `nbytes` contiguous bytes.

    Blocks that are adjacent both on the device and on the host become one copy. The host memory consists of pieces of
    `run_blocks` blocks (0: a single piece), and no copy spans two pieces.
    """
    code = native().code
    if code is not None and len(device_ids):
        to_host = direction is Direction.D2H
        return code.block_copies(device_ids, host_ids, device, host, nbytes, run_blocks, to_host=to_host)
    device_side, host_side = device[0] + device_ids * device[1], host[0] + host_ids * host[1]
    table = copy_table(device_side, host_side, np.array([nbytes]), direction)
    starts = scan(table, host_ids // run_blocks if run_blocks else None).starts
    if starts is None:
        return table
    merged = table.take(starts, axis=1)
    merged[NBYTES] = np.add.reduceat(table[NBYTES], starts)
    return merged


def copy_table(device_side: I64, host_side: I64, nbytes: I64, direction: Direction) -> I64:
    """Return the copies (rows SRC, DST, NBYTES) between two arrays of addresses. `host_side` may be staging memory."""
    table = np.empty((3, device_side.size), np.int64)
    device_row, host_row = (SRC, DST) if direction is Direction.D2H else (DST, SRC)
    table[device_row] = device_side.reshape(-1)
    table[host_row] = host_side.reshape(-1)
    table[NBYTES].reshape(device_side.shape)[:] = nbytes
    return table


_STAGE_ALIGNMENT = 256  # a gather kernel can load 16 bytes at once only from aligned addresses
# The small chunk (see _staged_chunks) has 1/16 of the blocks, at least FIRST_CHUNK_BYTES and at most a whole slot.
_FIRST_SHARE = 16


Tables = tuple[I64, I64 | None]
"""Two tables of copies with the rows SRC, DST and NBYTES. The first has the copies over the link between device and
host. The second has the copies between the cache and staging memory; it is None unless the strategy is "staged".
Addresses in staging memory are relative to the start of the slot of the slice."""


@dataclass(slots=True, eq=False)
class Slice:
    """Blocks submitted together. The tables are built on first use, usually while an earlier slice is copied."""

    blocks: I64
    """Positions of the blocks in the ids of the transfer."""
    layer_group: int
    nbytes: int
    make: Callable[[], Tables]
    made: Tables | None = None

    @property
    def tables(self) -> Tables:
        if self.made is None:
            self.made = self.make()
        return self.made


@dataclass(slots=True, eq=False)
class CompiledTransfer:
    """A transfer that can be submitted any number of times until the cache is released."""

    direction: Direction
    device_ids: I64
    """Device block ids in the caller's order, paired with `host_ids`."""
    host_ids: I64
    layer_groups: list[range]
    slices: list[Slice]
    choice: StrategyChoice
    cache: DeviceCache
    host: HostMemory
    nbytes: int

    @property
    def num_copies(self) -> int:
        """Number of copies over the link in the submitted slices."""
        return sum(each.made[0].shape[1] for each in self.slices if each.made is not None)


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
) -> CompiledTransfer:
    """Check the ids, choose a strategy, and split the transfer into slices."""
    group, num_slots = cache.group, host.num_ready
    host.keep()  # raises if the memory was freed
    if host.group != group:
        raise ArgumentError(f"the host memory belongs to another cache group than {group.name!r}")
    moves = sort_moves(device_ids, host_ids, direction, cache.num_blocks, num_slots)
    count = len(moves)
    parts = [cache.part(layers) for layers in layer_groups]
    sides = (cache.placement, host.placement)
    shape = TransferShape(
        *(sides if direction is Direction.D2H else sides[::-1]),
        nbytes=sum([part.span.nbytes for part in parts]) * count,
        num_parts=sum([len(part) for part in parts]) * count,
        num_spans=len(layer_groups) * count,
    )
    choice = choose(shape, strategy or config.strategy) if count else StrategyChoice("direct", "loop", "no blocks")
    slices = []
    for index, part in enumerate(parts):
        num_bytes = part.span.nbytes
        if choice.strategy == "staged":
            has_ramp = index == (0 if direction is Direction.D2H else len(layer_groups) - 1)
            sizes = _staged_chunks(count, num_bytes, config.chunk_bytes, ramp=has_ramp)
            tables, limits = _staged_tables, _limits(sizes if direction is Direction.D2H else sizes[::-1])
        else:
            step = max(1, slice_bytes // num_bytes)
            tables, limits = _direct_tables, _limits([min(step, count - start) for start in range(0, count, step)])
        for start, end in limits:
            make = functools.partial(tables, moves, slice(start, end), part, host, direction)
            slices.append(Slice(moves.order[start:end], index, (end - start) * num_bytes, make))
    return CompiledTransfer(
        direction, moves.device_ids, moves.host_ids, layer_groups, slices, choice, cache, host, shape.nbytes
    )


def _limits(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _staged_chunks(count: int, span_bytes: int, chunk_bytes: int, *, ramp: bool) -> list[int]:
    """Return the number of blocks in each chunk. A chunk is copied through one slot of the staging ring.

    With `ramp`, the first chunk is small, because the link is idle while this chunk is gathered into the slot. For H2D,
    the caller reverses the list: the link is idle while the last chunk is scattered, so this chunk is small.
    """
    stride = _stage_stride(span_bytes)
    step = chunk_bytes // stride
    if step < 1:
        raise ArgumentError(f"a block of {span_bytes} bytes does not fit into a staging chunk of {chunk_bytes}")
    first = min(count, step, max(FIRST_CHUNK_BYTES // stride, count // _FIRST_SHARE, 1)) if ramp else 0
    # the remaining chunks are equal, because the copy of a short chunk would end before the gather of the next chunk
    left = count - first
    num_full = -(-left // step)
    sizes = [first, *(left * (k + 1) // num_full - left * k // num_full for k in range(num_full))]
    return [size for size in sizes if size]


def _direct_tables(
    moves: SortedBlockIds, chosen: slice, part: LayerRange, host: HostMemory, direction: Direction
) -> Tables:
    on_device, on_host = moves.sorted_device[chosen], moves.sorted_host[chosen]
    if len(part) == 1:
        device = (int(part.pointer[0]), int(part.stride[0]))
        slots = (host.pointer + int(part.offset[0]), host.slot_bytes)
        return block_copies(on_device, on_host, device, slots, part.span.nbytes, host.piece_slots, direction), None
    device_side = part.pointer + on_device[:, None] * part.stride  # [block, segment]
    host_side = (host.pointer + on_host * host.slot_bytes)[:, None] + part.offset
    return copy_table(device_side, host_side, part.nbytes, direction), None


def _staged_tables(
    moves: SortedBlockIds, chosen: slice, part: LayerRange, host: HostMemory, direction: Direction
) -> Tables:
    span = part.span
    on_device, on_host = moves.sorted_device[chosen], moves.sorted_host[chosen]
    stride, places = _stage_stride(span.nbytes), np.arange(len(on_host))
    device_side = part.pointer + on_device[:, None] * part.stride
    stage_side = (places * stride)[:, None] + (part.offset - span.offset)
    inside = copy_table(device_side, stage_side, part.nbytes, direction)
    slots = (host.pointer + span.offset, host.slot_bytes)
    return block_copies(places, on_host, (0, stride), slots, span.nbytes, host.piece_slots, direction), inside


def _stage_stride(span_bytes: int) -> int:
    return -(-span_bytes // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT
