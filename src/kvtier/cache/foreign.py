"""ForeignDevice: loads and saves the device blocks of another engine, such as vLLM.

    device block of the engine  ──save──>  host slot (WRITING, then READY)  ──load──>  device block of the engine

The engine matches, allocates and frees its device blocks. The host is the first tier of the tree, and device blocks are
only sources or targets of transfers. The engine must keep the device blocks of a transfer until CacheManager.apply
returns this transfer:

    engine:   reference ───────────────────────────────────────────────────────────────────── free
    manager:  save planned ── plan ── every rank copies and reports ── apply returns the transfer

A save adds blocks to the tree as WRITING. Other requests can read the blocks after all ranks have reported the save.
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
    """Number of leading blocks of the chain that are on the host or in flight to the host."""
    transfers: dict[int, I32] = field(default_factory=dict)
    """Transfer id -> device blocks that the transfer reads."""


class ForeignDevice:
    """Plans transfers between host slots and the device blocks of another engine. At most `max_saving` saves are in
    flight, because the engine cannot reuse the device blocks of a save before the save ends."""

    def __init__(self, tree: RadixTree, host: Tier, transfers: TransferTracker, max_saving: int) -> None:
        self._tree, self._host, self._transfers, self._max_saving = tree, host, transfers, max_saving

    def load(self, allocation: Allocation, first: int, blocks: I32, prefetch: Prefetch | None = None) -> int:
        """Plan a copy of the matched blocks [first, first + len(blocks)) to device blocks; returns the transfer id.

        The transfer holds another lease, so the allocation may end before the transfer.
        """
        lease, stop = allocation.lease, first + len(blocks)
        if not 0 <= first < stop <= lease.num_matched:
            raise RangeError(f"cannot load blocks [{first}, {stop}), because only {lease.num_matched} blocks matched")
        allocation.tokens_from = origins(prefetch, len(blocks), lease.chain.namespace.block_tokens)
        sources = Slots(self._host.name, block_slots(lease, self._host, first, stop))
        return self._transfers.start(
            Route.HOST_TO_DEVICE, self._tree.share(lease), first, sources, Slots(DEVICE, blocks.astype(np.int32))
        )

    def save(
        self, chain: Chain, table: I32, num_saved: int, stop: int, *, now: float = 0.0, retention: Retention = _KEEP
    ) -> SaveResult:
        """Plan copies of the chain's blocks [0, stop) that the host lacks, from the device blocks in `table`.

        `num_saved` is the result of the previous call for this request, or 0. The first call copies all missing blocks,
        and later calls copy only new blocks. If the host has evicted blocks since the previous call, nothing is saved.
        The host is then too small for the running requests, and would evict the copies again.
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
        """Start copies of blocks in the path that are absent on the host, and then of blocks after the path."""
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
