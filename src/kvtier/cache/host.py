"""HostCopies: which blocks have a copy in host memory, which get one, and which are loaded back.

Eviction from the device never waits: what has a host copy by then is found there again, what has none is a miss. A copy
is kept after a load, so that a second eviction is free, and goes under the host's own pressure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.cache.moves import End, Moves, runs
from kvtier.cache.plan import Purpose
from kvtier.cache.saving import SaveJob, SaveQueue, Saving, WritePolicy
from kvtier.errors import RangeError
from kvtier.index import BlockState, Lease, RadixTree, Shortage, Slots, Tier
from kvtier.index.transfers import begin_write, block_slots, block_states


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
        self.queue = SaveQueue(config.saving, max_jobs)
        self._tree, self._device, self._moves = tree, device, moves
        self._sizes = [0] * moves.num_ranks

    def grew(self, rank: int, num_slots: int) -> None:
        """A rank has so many slots by now: what all of them have can be used."""
        self._sizes[rank] = num_slots
        if min(self._sizes) > self.host.pool.num_slots:
            self.host.pool.resize(min(self._sizes))

    # ---- saving ----------------------------------------------------------------------------------------------------

    @property
    def wants_to_save(self) -> bool:
        """Whether there is something to save, and with write_back a reason to."""
        return bool(self.queue) and (self.queue.saving.write is not WritePolicy.BACK or self._is_low())

    def _is_low(self) -> bool:
        pool = self._device.pool
        return pool.num_free < self.queue.saving.low_share * pool.num_slots

    def plan_saves(self, now: float, *, all_of_them: bool = False) -> None:
        """Start as many saves as may be under way."""
        if not self.wants_to_save and not (all_of_them and self.queue):
            return
        room = self.queue.room(self._moves.num_blocks(Purpose.SAVE), now)
        while self.queue and room > 0:
            started = self._save(self.queue.pop(), room, now)
            self.queue.spend(started)
            room -= started

    def _save(self, job: SaveJob, room: int, now: float) -> int:
        """Start saving what of a job is on the device and not on the host; returns the blocks started.

        What does not fit into `room` goes back to the front of the queue.
        """
        lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
        on_device, on_host = (states_of(lease, tier)[job.first : job.stop] for tier in (self._device, self.host))
        started = 0
        wanted = (on_device >= BlockState.READY) & (on_host == BlockState.ABSENT)
        if not self.queue.is_worth(job, lease):
            wanted = wanted[:0]
        for first, last in runs(wanted, job.first):
            slots = reserve_up_to(self._tree, self.host, min(last - first, room - started), job.chain.salt)
            count = len(slots)
            if count:
                sources = block_slots(lease, self._device)[first : first + count]
                shared = self._tree.share(lease)
                begin_write(shared, self.host, first, slots)
                device, host = End.of(self._device, sources), End.of(self.host, slots.ids)
                self._moves.start(Purpose.SAVE, shared, first, device, host)
                started += count
            if first + count < last:
                if started == room:  # else the host is full of leased blocks
                    self.queue.put_back(job.after(first + count))
                break
        self._tree.release(lease, used=False)
        return started

    # ---- loading ---------------------------------------------------------------------------------------------------

    def num_to_load(self, lease: Lease) -> int:
        """Blocks of a path that are not on the device, nor on their way there."""
        return block_states(lease, self._device)[: lease.num_matched].count(BlockState.ABSENT)

    def load(self, lease: Lease, slots: Slots) -> list[int]:
        """Start loading what of a path is not on the device, into slots reserved there. Returns the moves' ids."""
        absent = states_of(lease, self._device)[: lease.num_matched] == BlockState.ABSENT
        at, ids = 0, []
        for first, last in runs(absent, 0):
            sources = block_slots(lease, self.host)[first:last]
            targets = Slots(slots.tier, slots.ids[at : at + last - first])
            at += last - first
            shared = self._tree.share(lease)
            begin_write(shared, self._device, first, targets)
            host, device = End.of(self.host, sources), End.of(self._device, targets.ids)
            ids.append(self._moves.start(Purpose.LOAD, shared, first, host, device))
        return ids

    def num_loading(self, lease: Lease) -> int:
        """Blocks of a path on their way to the device."""
        return block_states(lease, self._device)[: lease.num_matched].count(BlockState.WRITING)

    def is_loaded(self, lease: Lease) -> bool:
        """Whether the whole path can be read on the device."""
        states = block_states(lease, self._device)[: lease.num_matched]
        return min(states, default=int(BlockState.READY)) >= BlockState.READY

    def has_failed(self, lease: Lease) -> bool:
        """Whether some of it is neither there nor on its way."""
        return self.num_to_load(lease) > 0


def reserve_up_to(tree: RadixTree, tier: Tier, num_blocks: int, salt: bytes) -> Slots:
    """As many slots of a tier as a tenant can have, at most so many."""
    slots = tree.reserve(tier, num_blocks, salt)
    if isinstance(slots, Shortage):
        slots = tree.reserve(tier, min(num_blocks, slots.free + slots.evictable), salt)
    return slots if isinstance(slots, Slots) else Slots(tier.name, np.empty(0, np.int32))


def states_of(lease: Lease, tier: Tier) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The state of each block of a path in a tier, as an array."""
    return np.frombuffer(block_states(lease, tier), np.uint8)
