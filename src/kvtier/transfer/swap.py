"""The swap operators: blocks of one layer, or of all layers, between a device cache and host memory.

Each call stands alone; TransferManager is for a server, with its streams, priorities and reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.errors import ArgumentError
from kvtier.memory import BatchCopy, Buffer, CopyResult, Stream, context
from kvtier.memory.context import choose_stream
from kvtier.memory.copy_paths import PathName
from kvtier.transfer.compiled import Ids, check_moves
from kvtier.transfer.plane import BlockView, Direction, as_direction

Blocks = torch.Tensor | Buffer | BlockView


def swap_cache_per_layer(
    cache: Blocks,
    host: Blocks,
    device_ids: Ids,
    host_ids: Ids,
    direction: Direction | str,
    *,
    stream: Stream | None = None,
    path: PathName | None = None,
) -> CopyResult:
    """Swap blocks of one layer's tensor, and wait until it is done. See swap_cache_per_layer_async."""
    return swap_cache_all_layers([cache], [host], device_ids, host_ids, direction, stream=stream, path=path)


def swap_cache_per_layer_async(
    cache: Blocks,
    host: Blocks,
    device_ids: Ids,
    host_ids: Ids,
    direction: Direction | str,
    *,
    stream: Stream | None = None,
    path: PathName | None = None,
) -> CopyResult:
    """Swap block device_ids[i] of `cache` with block host_ids[i] of `host`, in the order of `stream`.

    Both are tensors whose first dimension is blocks, Buffers, or Planes (`HostMemory.plane` is one layer of it); the
    direction says which side is read. Without `stream` the current one is used; host memory without one is copied at
    once. Ids may come in any order; neighbours on both sides travel together.
    """
    return swap_cache_all_layers_async([cache], [host], device_ids, host_ids, direction, stream=stream, path=path)


def swap_cache_all_layers(
    caches: Sequence[Blocks],
    hosts: Sequence[Blocks],
    device_ids: Ids,
    host_ids: Ids,
    direction: Direction | str,
    *,
    stream: Stream | None = None,
    path: PathName | None = None,
) -> CopyResult:
    """Swap the same blocks of every layer, and wait until it is done. Layer i is caches[i] and hosts[i]."""
    result = swap_cache_all_layers_async(caches, hosts, device_ids, host_ids, direction, stream=stream, path=path)
    placements = {step.job.src for step in result.steps} | {step.job.dst for step in result.steps}
    used = choose_stream(stream, *placements)
    if used is not None:
        used.record().synchronize()  # not the whole stream: an error of other work on it is not ours to clear
    return result


def swap_cache_all_layers_async(
    caches: Sequence[Blocks],
    hosts: Sequence[Blocks],
    device_ids: Ids,
    host_ids: Ids,
    direction: Direction | str,
    *,
    stream: Stream | None = None,
    path: PathName | None = None,
) -> CopyResult:
    """Swap the same blocks of every layer, in the order of `stream`; all layers are one batch of copies."""
    way = as_direction(direction)
    if len(caches) != len(hosts):
        raise ArgumentError(f"as many device caches as host memories are needed, got {len(caches)} and {len(hosts)}")
    batch = BatchCopy(path=path)
    for cache, host in zip(caches, hosts, strict=True):
        _add(batch, cache, host, device_ids, host_ids, way)
    with context(stream=stream):
        return batch.run()


def _add(batch: BatchCopy, cache: Blocks, host: Blocks, device_ids: Ids, host_ids: Ids, way: Direction) -> None:
    if isinstance(cache, Buffer):  # which has no blocks of its own: they are as large as the host's
        hosted = BlockView.of(host)
        device = BlockView.of(cache, hosted.block_bytes)
    else:
        device = BlockView.of(cache)
        hosted = BlockView.of(host, device.block_bytes)
    if device.block_bytes != hosted.block_bytes:
        raise ArgumentError(f"blocks of {device.block_bytes} and of {hosted.block_bytes} bytes cannot be swapped")
    on_device, on_host = check_moves(device_ids, host_ids, way, device.num_blocks, hosted.num_blocks)
    sides = [device, hosted] if way is Direction.D2H else [hosted, device]
    ids = [on_device, on_host] if way is Direction.D2H else [on_host, on_device]
    starts = [plane.addresses(each) for plane, each in zip(sides, ids, strict=True)]
    # runs do not span pieces of memory registered by themselves: each piece is a chunk of its own, which merges inside
    pieces = on_host // hosted.run_blocks if hosted.run_blocks else np.zeros_like(on_host)
    for piece in np.unique(pieces):
        here = pieces == piece
        table = np.stack([starts[0][here], starts[1][here], np.full(np.count_nonzero(here), device.block_bytes)])
        batch.table(
            table,
            src_placement=sides[0].placement,
            dst_placement=sides[1].placement,
            keep=[device.holding, hosted.holding],
        )
