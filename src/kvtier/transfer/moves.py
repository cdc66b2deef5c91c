"""Which blocks move where: ids of both sides, checked, in the order of their destination, and as copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.memory.copy_plan import DST, I64, NBYTES, SRC, Entries, scan
from kvtier.memory.native import native
from kvtier.transfer.plane import Direction

Ids = Sequence[int] | I64


@dataclass(slots=True, eq=False)
class Moves:
    """Blocks to move, as they were asked for and in the order of their destination."""

    device_ids: I64
    host_ids: I64
    order: I64
    """Which of these comes first, second, ... by destination."""
    sorted_device: I64
    sorted_host: I64

    def __len__(self) -> int:
        return len(self.order)


def sort_moves(device_ids: Ids, host_ids: Ids, direction: Direction, num_device: int, num_host: int) -> Moves:
    """Check the ids (see check_moves) and put them in the order of their destination."""
    # copies: they outlive this call, and the arrays given are their owner's to change
    on_device, on_host = np.array(device_ids, order="C"), np.array(host_ids, order="C")
    code, usual = native().code, on_device.dtype == on_host.dtype == np.int64 and on_device.ndim == 1
    if code is not None and usual and on_device.shape == on_host.shape != (0,):
        to_host = direction is Direction.D2H
        rows = code.sort_moves(on_device, on_host, num_device, num_host, to_host=to_host)
        if rows is not None:  # else the checks below say what is wrong
            return Moves(on_device, on_host, *rows)
    on_device, on_host = check_moves(device_ids, host_ids, direction, num_device, num_host)
    order = np.argsort(on_host if direction is Direction.D2H else on_device, kind="stable")
    return Moves(on_device, on_host, order, on_device[order], on_host[order])


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
