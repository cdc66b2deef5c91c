"""HostCopies: which blocks have a copy in host memory, which get one, and which are loaded back.

Eviction from the device never waits: what has a host copy by then is found there again, what has none is a miss. A copy
is kept after a load, so that a second eviction is free, and goes under the host's own pressure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.cache.moves import Moves, both, runs
from kvtier.cache.saving import SaveJob, SaveQueue, Saving
from kvtier.errors import RangeError
from kvtier.index import Lease, RadixTree, Shortage, Slots, Tier
from kvtier.index.node import IS_ABSENT, READABLE
from kvtier.index.pool import I32
from kvtier.index.transitions import begin_write, block_slots, block_states
from kvtier.messages import Purpose


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host tier."""

    num_blocks: int
    policy: str = "lru"
    saving: Saving = field(default_factory=Saving)
    free_share: float = 0.0
    """Evict ahead of demand, so that this share of the tier is free."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a host tier needs blocks, got {self.num_blocks}")
        if not 0 <= self.free_share < 1:
            raise RangeError(f"free_share is in [0, 1), got {self.free_share}")


class HostCopies:
    """Decides saves and loads between the two memories of a tree, and plans them as moves."""

    def __init__(
        self, tree: RadixTree, device: Tier, host: Tier, config: HostConfig, moves: Moves, max_jobs: int
    ) -> None:
        self.host = host
        self.queue = SaveQueue(tree, config.saving, device, self._save, self._num_saving, max_jobs)
        self._tree, self._device, self._moves = tree, device, moves
        self._sizes = [0] * moves.num_ranks
        self.num_damaged = 0
        """Blocks that were found to have changed."""

    def grew(self, rank: int, num_slots: int) -> None:
        """A rank has so many slots by now: what all of them have can be used."""
        self._sizes[rank] = num_slots
        if min(self._sizes) > self.host.pool.num_slots:
            self.host.pool.resize(min(self._sizes))

    def damaged(self, slots: I32) -> None:
        """The blocks in these slots changed by themselves: they are no copies any more, but for those being read."""
        self.num_damaged += self._tree.lose(self.host, slots)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def _num_saving(self) -> int:
        return self._moves.num_blocks(Purpose.SAVE)

    def _save(self, job: SaveJob, lease: Lease, room: int) -> int:
        """Start saving what of a job is on the device and not on the host, as far as the host has room."""
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0
        on_device, on_host = (block_states(lease, tier, first, stop) for tier in (self._device, self.host))
        wanted = both(on_device.translate(READABLE), on_host.translate(IS_ABSENT))
        for low, high in runs(wanted, first):
            slots = reserve_up_to(self._tree, self.host, min(high - low, room - started), job.chain.salt)
            count = len(slots)
            if count:
                sources = Slots(self._device.name, block_slots(lease, self._device, low, low + count))
                shared = self._tree.share(lease)
                begin_write(shared, self.host, low, slots)
                self._moves.start(Purpose.SAVE, shared, low, sources, slots)
                started += count
            if low + count < high:
                if started == room:  # else the host is full of leased blocks
                    self.queue.put_back(job.after(low + count))
                break
        return started

    # ---- loading ---------------------------------------------------------------------------------------------------

    def device_states(self, lease: Lease) -> bytes:
        """How each block that was found stands on the device."""
        return block_states(lease, self._device, 0, lease.num_matched) if lease.num_matched else b""

    def load(self, lease: Lease, slots: Slots) -> list[int]:
        """Start loading what of a path is not on the device, into slots reserved there. Returns the moves' ids."""
        absent = self.device_states(lease).translate(IS_ABSENT)
        at, ids = 0, []
        for first, stop in runs(absent, 0):
            sources = Slots(self.host.name, block_slots(lease, self.host, first, stop))
            targets = Slots(slots.tier, slots.ids[at : at + stop - first])
            at += stop - first
            shared = self._tree.share(lease)
            begin_write(shared, self._device, first, targets)
            ids.append(self._moves.start(Purpose.LOAD, shared, first, sources, targets))
        return ids


def reserve_up_to(tree: RadixTree, tier: Tier, num_blocks: int, salt: bytes) -> Slots:
    """As many slots of a tier as a tenant can have, at most so many."""
    slots = tree.reserve(tier, num_blocks, salt)
    if isinstance(slots, Shortage):
        slots = tree.reserve(tier, min(num_blocks, slots.free + slots.evictable), salt)
    return slots if isinstance(slots, Slots) else Slots(tier.name, np.empty(0, np.int32))
