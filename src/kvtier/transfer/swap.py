"""Swap operators: copy blocks of one layer, or of all layers, between a device cache and host memory.

Each call is independent. A server uses TransferManager, which has streams, priorities and reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.errors import ArgumentError
from kvtier.memory import BatchCopy, Buffer, CopyResult, Stream, context
from kvtier.memory.context import choose_stream
from kvtier.memory.copy_paths import PathName
from kvtier.transfer.block_view import BlockView, Direction, Ids, as_direction, check_moves

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
    """Copy blocks of one layer's tensor and wait for the copies. See swap_cache_per_layer_async."""
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
    """Copy between block device_ids[i] of `cache` and block host_ids[i] of `host`, in the order of `stream`.

    `cache` and `host` are Buffers, BlockViews (`HostMemory.block_view`), or tensors with one block per index of the
    first dimension. `stream` defaults to the current stream. Without a current stream, copies within host memory are
    done before the call returns. Blocks that are adjacent on both sides are copied together. With `direction` "d2h",
    `cache` is the source. With "h2d", `cache` is the target. Ids may be in any order.
    """
    return swap_cache_all_layers([cache], [host], device_ids, host_ids, direction, stream=stream, path=path, wait=False)


def swap_cache_all_layers(
    caches: Sequence[Blocks],
    hosts: Sequence[Blocks],
    device_ids: Ids,
    host_ids: Ids,
    direction: Direction | str,
    *,
    stream: Stream | None = None,
    path: PathName | None = None,
    wait: bool = True,
) -> CopyResult:
    """Copy the same blocks between caches[i] and hosts[i] for all i, as one batch. With `wait`, wait for the copies."""
    checked = as_direction(direction)
    if len(caches) != len(hosts):
        raise ArgumentError(f"caches and hosts must have the same length, got {len(caches)} and {len(hosts)}")
    batch = BatchCopy(path=path)
    for cache, host in zip(caches, hosts, strict=True):
        _add(batch, cache, host, device_ids, host_ids, checked)
    with context(stream=stream):
        result = batch.run()
    placements = {step.job.src for step in result.steps} | {step.job.dst for step in result.steps}
    used = choose_stream(stream, *placements) if wait else None
    if used is not None:
        used.record().synchronize()  # synchronizing the stream would clear errors of other work
    return result


def _add(batch: BatchCopy, cache: Blocks, host: Blocks, device_ids: Ids, host_ids: Ids, direction: Direction) -> None:
    if isinstance(cache, Buffer):  # a Buffer has no block size, so use the block size of `host`
        hosted = BlockView.of(host)
        device = BlockView.of(cache, hosted.block_bytes)
    else:
        device = BlockView.of(cache)
        hosted = BlockView.of(host, device.block_bytes)
    if device.block_bytes != hosted.block_bytes:
        raise ArgumentError(
            f"a block of the cache has {device.block_bytes} bytes, but a block of the host memory has "
            f"{hosted.block_bytes}; both must have the same size"
        )
    on_device, on_host = check_moves(device_ids, host_ids, direction, device.num_blocks, hosted.num_blocks)
    sides = [device, hosted] if direction is Direction.D2H else [hosted, device]
    ids = [on_device, on_host] if direction is Direction.D2H else [on_host, on_device]
    starts = [view.addresses(each) for view, each in zip(sides, ids, strict=True)]
    # no copy may span two separately pinned pieces, so each piece has a table, and copies merge only inside a table
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
