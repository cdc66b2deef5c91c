"""From block ids to tables of copies: done once per transfer, all layers and blocks at a time, in numpy.

A transfer is cut into slices: all layers of some blocks, or a group of layers of some blocks. A slice is what is
submitted, waited for, and reported as done or failed.

    blocks, in the order of their destination   0 ........ 31 | 32 ........ 63 | ...        slice_bytes each
    layer-wise: layers 0-7 of all of them, then layers 8-15, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.layout import CacheGroup
from kvtier.memory import CostTable
from kvtier.memory.copy_plan import DST, I64, NBYTES, SRC, Entries, scan
from kvtier.memory.native import native
from kvtier.transfer.config import Strategy, TransferConfig
from kvtier.transfer.device_cache import DeviceCache, Segments
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.plane import Direction, Plane, check_moves
from kvtier.transfer.strategy import Choice, Shape, choose

_STAGE_ALIGNMENT = 256  # a gather kernel moves 16 bytes per load from aligned addresses only
# The link is idle during the first gather (or the last scatter), so that chunk is small, but no smaller than need be:
# beside a busy GPU each gather waits for its turn, and a chunk must outlast the wait of the next (8 MiB: 88 % of the
# link).
_FIRST_BYTES, _FIRST_SHARE = 8 << 20, 16


@dataclass(slots=True, eq=False)
class Slice:
    """What is submitted at once."""

    blocks: I64
    """Which of the transfer's moves."""
    layer_group: int
    nbytes: int
    copies: I64
    """Rows as in Entries: over the link. If staged, addresses of the staging side count from its start."""
    inside: I64 | None = None
    """If staged: the copies between cache and staging, likewise."""
    stage_bytes: int = 0


@dataclass(slots=True, eq=False)
class CompiledTransfer:
    """A transfer, ready to be submitted any number of times until the cache is released."""

    group: CacheGroup
    direction: Direction
    device_ids: I64
    host_ids: I64
    layer_groups: list[range]
    slices: list[Slice]
    choice: Choice
    cache: DeviceCache
    """Knows whether its tensors are still there; the addresses here are theirs."""
    host: HostMemory
    nbytes: int = 0
    """Of all slices together."""
    num_copies: int = 0
    """Copies over the link."""
    num_inside: int = 0
    """Copies between cache and staging."""

    def __post_init__(self) -> None:
        self.nbytes = sum(each.nbytes for each in self.slices)
        self.num_copies = sum(each.copies.shape[1] for each in self.slices)
        self.num_inside = sum(each.inside.shape[1] for each in self.slices if each.inside is not None)


def compile_transfer(
    cache: DeviceCache,
    host: HostMemory,
    direction: Direction,
    device_ids: Sequence[int] | I64,
    host_ids: Sequence[int] | I64,
    layer_groups: list[range],
    config: TransferConfig,
    *,
    slice_bytes: int,
    strategy: Strategy | None = None,
    costs: CostTable | None = None,
) -> CompiledTransfer:
    """Check the ids, choose a strategy, and write the tables."""
    group, plane = cache.group, host.plane()
    if host.group != group:
        raise ArgumentError(f"the host memory is for other blocks than those of cache group {group.name!r}")
    on_device, on_host = check_moves(device_ids, host_ids, direction, cache.num_blocks, plane.num_blocks)
    order = np.argsort(on_host if direction is Direction.D2H else on_device, kind="stable")
    parts = sum(len(cache.segments(layers)) for layers in layer_groups)
    sides = (cache.placement, plane.placement)
    shape = Shape(
        *(sides if direction is Direction.D2H else sides[::-1]),
        nbytes=sum(group.span(layers).nbytes for layers in layer_groups) * len(order),
        num_parts=parts * len(order),
        num_spans=len(layer_groups) * len(order),
    )
    choice = choose(shape, strategy or config.strategy, costs) if len(order) else Choice("direct", "loop", "no blocks")
    make = _staged_slice if choice.strategy == "staged" else _direct_slice
    slices = []
    for index, layers in enumerate(layer_groups):
        span, segments = group.span(layers), cache.segments(layers)
        if choice.strategy == "staged":
            at_end = index == (0 if direction is Direction.D2H else len(layer_groups) - 1)
            sizes = _staged_chunks(len(order), span.nbytes, config.chunk_bytes, ramp=at_end)
            limits = _limits(sizes if direction is Direction.D2H else sizes[::-1])
        else:
            step = max(1, slice_bytes // span.nbytes)
            limits = _limits([min(step, len(order) - start) for start in range(0, len(order), step)])
        for start, stop in limits:
            blocks = order[start:stop]
            ids = (on_device[blocks], on_host[blocks])
            slices.append(make(blocks, index, segments, plane, ids, direction, span.offset, span.nbytes))
    return CompiledTransfer(group, direction, on_device, on_host, layer_groups, slices, choice, cache, host)


def _limits(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of these lengths, one behind the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _staged_chunks(count: int, span_bytes: int, chunk_bytes: int, *, ramp: bool) -> list[int]:
    """Blocks of each chunk, none larger than a slot of the ring. With `ramp`, the first ones are small."""
    stride = _stage_stride(span_bytes)
    step = chunk_bytes // stride
    if step < 1:
        raise ArgumentError(f"a block of {span_bytes} bytes does not fit a staging chunk of {chunk_bytes}")
    sizes: list[int] = []
    first = max(_FIRST_BYTES // stride, count // _FIRST_SHARE, 1)
    for small in (first, 3 * first) if ramp else ():
        sizes.append(min(small, step, count - sum(sizes)))
    left = count - sum(sizes)
    # what is left, in equal chunks: a short one would not hide the kernel of the next
    num_full = -(-left // step)
    sizes += [left * (k + 1) // num_full - left * k // num_full for k in range(num_full)]
    return [size for size in sizes if size]


def _direct_slice(
    blocks: I64,
    layer_group: int,
    segments: Segments,
    host: Plane,
    ids: tuple[I64, I64],
    direction: Direction,
    _offset: int,
    span_bytes: int,
) -> Slice:
    on_device = segments.pointer + ids[0][:, None] * segments.stride  # [block, segment]
    on_host = host.addresses(ids[1])[:, None] + segments.offset
    table = _table(on_device, on_host, segments.nbytes, direction)
    if len(segments) == 1:
        table = _merge(table, ids[1] // host.run_blocks)
    return Slice(blocks, layer_group, len(blocks) * span_bytes, table)


def _staged_slice(
    blocks: I64,
    layer_group: int,
    segments: Segments,
    host: Plane,
    ids: tuple[I64, I64],
    direction: Direction,
    offset: int,
    span_bytes: int,
) -> Slice:
    stride = _stage_stride(span_bytes)
    in_stage = np.arange(len(blocks)) * stride
    on_device = segments.pointer + ids[0][:, None] * segments.stride
    inside = _table(on_device, in_stage[:, None] + (segments.offset - offset), segments.nbytes, direction)
    copies = _table(
        in_stage[:, None], host.addresses(ids[1])[:, None] + offset, np.array([span_bytes], np.int64), direction
    )
    copies = _merge(copies, ids[1] // host.run_blocks)
    return Slice(blocks, layer_group, len(blocks) * span_bytes, copies, inside, stride * len(blocks))


def _stage_stride(span_bytes: int) -> int:
    return -(-span_bytes // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT


def _table(device_side: I64, host_side: I64, nbytes: I64, direction: Direction) -> I64:
    """Copies from [block, part] addresses of both sides. "Host side" is the one nearer to the host."""
    count = device_side.size
    table = np.empty((3, count), np.int64)
    near, far = (SRC, DST) if direction is Direction.D2H else (DST, SRC)
    table[near] = device_side.reshape(-1)
    table[far] = host_side.reshape(-1)
    table[NBYTES].reshape(device_side.shape)[:] = nbytes
    return table


def _merge(table: I64, piece: I64) -> I64:
    """Blocks that follow each other on both sides as one copy, but not from one registered piece into the next."""
    code = native().code
    entries = Entries(table, np.ascontiguousarray(piece))
    starts = (scan(entries) if code is None else code.scan(entries)).starts
    if starts is None:
        return table
    merged = table.take(starts, axis=1)
    merged[NBYTES] = np.add.reduceat(table[NBYTES], starts)
    return merged
