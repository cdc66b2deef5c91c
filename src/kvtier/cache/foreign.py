"""ForeignDevice: loads and saves of device blocks that another engine owns, such as vLLM.

    device block of the engine  ──save──>  host slot (WRITING, then READY)  ──load──>  device block of the engine

The engine finds, allocates and frees its device blocks. The host is the first tier of the tree, and a device block is
only one end of a transfer. The engine must keep the device blocks of a transfer until CacheManager.apply returns it:

    engine:   reference ─────────────────────────────────────────────────────────── free
    manager:  save planned ── plan ── every rank copies and reports ── apply returns it

A save of computed blocks adds them to the tree as WRITING. Other requests can read them after the save was reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.cache.allocation import Allocation
from kvtier.cache.in_flight import TransferTracker, mask_runs
from kvtier.cache.prefetch import Prefetch, origins
from kvtier.cache.writeback import reserve_up_to
from kvtier.errors import RangeError
from kvtier.index import Chain, Lease, RadixTree, Retention, Slots, Tier
from kvtier.index.node import IS_ABSENT
from kvtier.index.transitions import begin_write, block_slots, block_states
from kvtier.messages import I32, Route

DEVICE = "device"
_KEEP = Retention()


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of ForeignDevice.save."""

    num_saved: int
    """Leading blocks of the chain that the host holds or that are in flight to it."""
    transfers: dict[int, I32] = field(default_factory=dict)
    """Transfer id -> device blocks that the transfer reads."""


class ForeignDevice:
    """Plans transfers between host slots and another engine's device blocks. At most `max_saving` blocks are saved
    at a time, because the engine cannot reuse their device blocks meanwhile."""

    def __init__(self, tree: RadixTree, host: Tier, transfers: TransferTracker, max_saving: int) -> None:
        self._tree, self._host, self._transfers, self._max_saving = tree, host, transfers, max_saving

    def load(self, allocation: Allocation, first: int, blocks: I32, prefetch: Prefetch | None = None) -> int:
        """Plan a copy of the matched blocks [first, first + len(blocks)) to device blocks; returns the transfer id.

        The transfer holds a lease of its own, so the allocation may end before the transfer.
        """
        lease, stop = allocation.lease, first + len(blocks)
        if not 0 <= first < stop <= lease.num_matched:
            raise RangeError(f"blocks [{first}, {stop}) of {lease.num_matched} matched blocks cannot be loaded")
        allocation.tokens_from = origins(prefetch, len(blocks), lease.chain.namespace.block_tokens)
        sources = Slots(self._host.name, block_slots(lease, self._host, first, stop))
        return self._transfers.start(
            Route.HOST_TO_DEVICE, self._tree.share(lease), first, sources, Slots(DEVICE, blocks.astype(np.int32))
        )

    def save(
        self, chain: Chain, table: I32, num_saved: int, stop: int, *, now: float = 0.0, retention: Retention = _KEEP
    ) -> SaveResult:
        """Plan copies of those blocks [0, stop) of a chain that the host lacks, from the device blocks in `table`.

        `num_saved` is the result of the request's previous call, or 0. If the host has evicted some of these blocks
        meanwhile, it is smaller than the running requests need, and nothing is saved: the copies would be evicted
        again. The first call therefore copies every missing block, and later calls only copy new blocks.
        """
        room = self._max_saving - self._transfers.num_blocks(Route.DEVICE_TO_HOST)
        if room <= 0:
            return SaveResult(num_saved)
        lease = self._tree.match(chain, now=now, max_blocks=stop, retention=retention)
        self._tree.follow(lease, stop)
        if lease.num_blocks < num_saved:
            result = SaveResult(lease.num_blocks)
        else:
            result = self._save(lease, table, stop, room, now)
        self._tree.release(lease, used=False)
        return result

    def _save(self, lease: Lease, table: I32, stop: int, room: int, now: float) -> SaveResult:
        """Copy blocks of the path that are absent on the host, then blocks after the path."""
        started: dict[int, I32] = {}
        absent = block_states(lease, self._host, 0, lease.num_blocks).translate(IS_ABSENT)
        for low, high in mask_runs(absent, 0):
            slots = reserve_up_to(self._tree, self._host, min(high - low, room), lease.chain.salt)
            if len(slots):
                begin_write(lease, self._host, low, slots)
                self._start(lease, low, table, slots, started)
            room -= len(slots)
            if len(slots) < high - low:
                return SaveResult(low + len(slots), started)
        first = lease.num_blocks
        if first < stop and room and lease.node.attached:
            slots = reserve_up_to(self._tree, self._host, min(stop - first, room), lease.chain.salt)
            if len(slots):
                self._tree.graft(lease, self._host, slots, now=now)
                self._start(lease, first, table, slots, started)
        return SaveResult(lease.num_blocks, started)

    def _start(self, lease: Lease, first: int, table: I32, slots: Slots, started: dict[int, I32]) -> None:
        blocks = table[first : first + len(slots)].astype(np.int32)
        number = self._transfers.start(
            Route.DEVICE_TO_HOST, self._tree.share(lease), first, Slots(DEVICE, blocks), slots
        )
        started[number] = blocks
