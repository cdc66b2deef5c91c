"""ForeignDevice: loads and saves the device blocks of another engine, such as vLLM.

    device block of the engine  ──save──>  host slot (WRITING, then READY)  ──load──>  device block of the engine

The engine matches, allocates and frees its device blocks. The host is the first tier of the tree, and device blocks are
only sources or targets of transfers. The engine must keep the device blocks of a transfer until CacheManager.apply
returns this transfer:

    engine:   reference ───────────────────────────────────────────────────────────────────── free
    manager:  save planned ── plan ── every rank copies and reports ── apply returns the transfer

A save adds blocks to the tree as WRITING. Other requests can read the blocks after all ranks have reported success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.cache.allocation import Allocation
from kvtier.cache.in_flight import TransferTracker, mask_runs
from kvtier.cache.prefetch import Prefetch, origins
from kvtier.cache.writeback import reserve_up_to
from kvtier.errors import RangeError
from kvtier.index import Chain, Lease, RadixTree, Retention, Slots, Tier
from kvtier.index.node import IS_ABSENT, Node
from kvtier.index.transitions import begin_write, block_states
from kvtier.messages import I32, Route

DEVICE = "device"
_KEEP = Retention()


@dataclass(slots=True)
class SavePoint:
    """Progress of a request's saves. With a new SavePoint, a save begins at the first block that the host lacks."""

    num_blocks: int = 0
    """Number of leading blocks that were on the host, or in flight to the host, after the latest save."""
    node: Node | None = None
    """Last node of the saved path at an earlier `save`. The request has no lease on the node, so the node may have
    changed, and the host may have evicted its blocks."""
    is_over: bool = False
    """True if nothing more is saved for the request. Possible reasons: the host has evicted blocks of the request, a
    save has failed, or the engine has dropped blocks before they were saved."""


class ForeignDevice:
    """Plans transfers between host slots and the device blocks of another engine. At most `max_saving` blocks
    are being saved at a time, because the engine cannot reuse a device block before its save ends."""

    def __init__(self, tree: RadixTree, host: Tier, transfers: TransferTracker, max_saving: int) -> None:
        self._tree, self._host, self._transfers, self._max_saving = tree, host, transfers, max_saving

    def load(self, allocation: Allocation, first: int, blocks: I32, prefetch: Prefetch | None = None) -> int:
        """Plan a copy of the matched blocks [first, first + len(blocks)) to device blocks. Return the transfer id.

        Update `allocation.tokens_from`. The transfer has its own lease, so the allocation may end before the transfer.
        """
        lease, stop = allocation.lease, first + len(blocks)
        if not 0 <= first < stop <= lease.num_matched:
            raise RangeError(f"cannot load blocks [{first}, {stop}), because only {lease.num_matched} blocks matched")
        allocation.tokens_from = origins(prefetch, len(blocks), lease.chain.namespace.block_tokens)
        return self._transfers.start(
            Route.HOST_TO_DEVICE, self._tree.share(lease), first, self._host, Slots(DEVICE, blocks.astype(np.int32))
        )

    def save(
        self,
        chain: Chain,
        table: Sequence[int],
        point: SavePoint,
        stop: int,
        *,
        num_dropped: int = 0,
        now: float = 0.0,
        retention: Retention = _KEEP,
    ) -> dict[int, I32]:
        """Plan saves of the blocks in [0, stop) that the host lacks, as many as `max_saving` and the host slots allow.

        `table` contains a device block number for each block of the chain. The engine has dropped the first
        `num_dropped` device blocks, because they are outside a sliding window. If the host lacks one of the dropped
        blocks, nothing more is saved for this request.

        Update `point`. Return a dict from transfer id to the device blocks that the transfer reads. A later call with
        the same point continues after the first `point.num_blocks` blocks. If the host has lost some of them since
        the previous call, nothing more is saved for this request, because the host would probably evict new copies too.
        """
        room = self._max_saving - self._transfers.num_blocks(Route.DEVICE_TO_HOST)
        if room <= 0 or point.is_over:
            return {}
        node = point.node
        if node is not None and node.attached and node.stop == point.num_blocks and not node.children:
            point.is_over = point.num_blocks < num_dropped
            if point.is_over:
                return {}
            return self._append(self._tree.lease_at(chain, node, retention), table, stop, room, now, point)
        lease = self._tree.match(chain, now=now, max_blocks=stop, retention=retention)
        self._tree.follow(lease, stop)
        if lease.num_blocks < max(point.num_blocks, num_dropped) or self._lacks(lease, num_dropped):
            point.is_over = True
            self._tree.release(lease, used=False)
            return {}
        started, num_repaired = self._repair(lease, table, room)
        if num_repaired < lease.num_blocks:
            point.num_blocks = num_repaired
            self._tree.release(lease, used=False)
            return started
        room -= sum(map(len, started.values()))
        return started | self._append(lease, table, stop, room, now, point)

    def _lacks(self, lease: Lease, num_blocks: int) -> bool:
        """Return True if one of the first `num_blocks` blocks is absent on the host."""
        return 1 in block_states(lease, self._host, 0, num_blocks).translate(IS_ABSENT)

    def _repair(self, lease: Lease, table: Sequence[int], room: int) -> tuple[dict[int, I32], int]:
        """Start to copy the leased blocks that the host lacks. Stop after `room` blocks, or when host slots run out.

        Return the transfers, and the number of leading blocks that are now on the host or in flight to the host.
        """
        started: dict[int, I32] = {}
        absent = block_states(lease, self._host, 0, lease.num_blocks).translate(IS_ABSENT)
        for low, high in mask_runs(absent, 0):
            slots = reserve_up_to(self._tree, self._host, min(high - low, room), lease.chain.salt)
            if len(slots):
                begin_write(lease, self._host, low, slots)
                started |= self._start(self._tree.share(lease), low, table, slots)
            room -= len(slots)
            if len(slots) < high - low:
                return started, low + len(slots)
        return started, lease.num_blocks

    def _append(
        self, lease: Lease, table: Sequence[int], stop: int, room: int, now: float, point: SavePoint
    ) -> dict[int, I32]:
        """Save the blocks from the end of the leased path to `stop`: at most `room`, or fewer if host slots run out.

        Update `point`. If no copy starts, release the lease.
        """
        first, started = lease.num_blocks, {}
        slots = None
        if first < stop and room > 0 and lease.node.attached:
            slots = reserve_up_to(self._tree, self._host, min(stop - first, room), lease.chain.salt)
        if slots is not None and len(slots):
            self._tree.graft(lease, self._host, slots, now=now, grow=True)
            started = self._start(lease, first, table, slots)
        else:
            self._tree.release(lease, used=False)
        point.num_blocks = lease.num_blocks
        point.node = lease.node if lease.node.parent is not None else None
        return started

    def _start(self, lease: Lease, first: int, table: Sequence[int], slots: Slots) -> dict[int, I32]:
        blocks = np.array(table[first : first + len(slots)], np.int32)
        return {self._transfers.start(Route.DEVICE_TO_HOST, lease, first, Slots(DEVICE, blocks), slots): blocks}
