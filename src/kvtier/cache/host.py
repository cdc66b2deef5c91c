"""HostCopies: which blocks have a copy in host memory, which get one, and which are loaded back.

Eviction from the device never waits: what has a host copy by then is found there again, what has none is a miss. A copy
is kept after a load, so that a second eviction is free, and goes under the host's own pressure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kvtier.cache.moves import Moves
from kvtier.cache.plan import Purpose
from kvtier.errors import RangeError
from kvtier.index import BlockState, Chain, Lease, RadixTree, Slots, Tier
from kvtier.index.transfers import block_slots, block_states


class WritePolicy(Enum):
    """When a block is copied to the host."""

    THROUGH = "write_through"
    """As soon as it is computed."""
    SELECTIVE = "write_through_selective"
    """Once it was used again `min_uses` times."""
    BACK = "write_back"
    """When the device runs low, the ones finished longest ago first."""


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host tier."""

    num_blocks: int
    write: WritePolicy = WritePolicy.THROUGH
    min_uses: int = 1
    policy: str = "lru"
    max_saving_blocks: int = 256
    """Blocks on their way to the host at a time: saves must not crowd out loads."""
    low_share: float = 0.25
    """For write_back: save when less than this share of the device is free."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.max_saving_blocks < 1:
            raise RangeError(f"a host tier needs blocks, got {self.num_blocks} and {self.max_saving_blocks} to save")
        if not 0 <= self.low_share <= 1 or self.min_uses < 1:
            raise RangeError(f"low_share in [0, 1] and min_uses >= 1, got {self.low_share} and {self.min_uses}")


@dataclass(frozen=True, slots=True)
class _Job:
    """Blocks [first, stop) of a chain might want a copy."""

    chain: Chain
    first: int
    stop: int


class HostCopies:
    """Decides saves and loads between two tiers of a tree, and plans them as moves."""

    def __init__(self, tree: RadixTree, device: Tier, host: Tier, config: HostConfig, moves: Moves) -> None:
        self.host = host
        self._config = config
        self._tree, self._device, self._moves = tree, device, moves
        # Bounded, the oldest forgotten: with write_back nothing is taken out while the device has room, and more jobs
        # than the device has slots cannot all have blocks there.
        self._jobs: deque[_Job] = deque(maxlen=max(1024, device.pool.num_slots))

    # ---- saving ----------------------------------------------------------------------------------------------------

    def published(self, chain: Chain, first: int, stop: int) -> None:
        """Blocks were computed."""
        if self._config.write is WritePolicy.THROUGH and stop > first:
            self._jobs.append(_Job(chain, first, stop))

    def used_again(self, lease: Lease) -> None:
        """A request was given cached blocks."""
        if self._config.write is WritePolicy.SELECTIVE and lease.num_matched:
            self._jobs.append(_Job(lease.chain, 0, lease.num_matched))

    def finished(self, lease: Lease) -> None:
        """A request is over; its blocks are the next to get cold."""
        if self._config.write is WritePolicy.BACK and lease.num_blocks:
            self._jobs.append(_Job(lease.chain, 0, lease.num_blocks))

    @property
    def wants_to_save(self) -> bool:
        """Whether there is something to save, and with write_back a reason to."""
        pool = self._device.pool
        is_low = pool.num_free < self._config.low_share * pool.num_slots
        return bool(self._jobs) and (is_low or self._config.write is not WritePolicy.BACK)

    def plan_saves(self, now: float) -> None:
        """Start as many saves as may be under way."""
        if not self.wants_to_save:
            return
        room = self._config.max_saving_blocks - self._moves.num_blocks(Purpose.SAVE)
        while self._jobs and room > 0:
            job = self._jobs.popleft()
            room -= self._save(job, room, now)

    def forget(self) -> None:
        """After a reset: nothing of what was to be saved is there."""
        self._jobs.clear()

    def _save(self, job: _Job, room: int, now: float) -> int:
        """Start saving what of a job is on the device and not on the host; returns the blocks started.

        What does not fit into `room` goes back to the front of the queue.
        """
        lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
        on_device, on_host = (_states(lease, tier)[job.first : job.stop] for tier in (self._device, self.host))
        started = 0
        wanted = (on_device >= BlockState.READY) & (on_host == BlockState.ABSENT)
        if self._config.write is WritePolicy.SELECTIVE and lease.node.usage.uses < self._config.min_uses:
            wanted = wanted[:0]
        for first, last in _runs(wanted, job.first):
            count = min(last - first, room - started)
            slots = self._tree.reserve(self.host, count, job.chain.salt) if count else None
            if not isinstance(slots, Slots):  # the host is full of leased blocks, or enough is under way
                if slots is None:
                    self._jobs.appendleft(_Job(job.chain, first, job.stop))
                break
            sources = block_slots(lease, self._device)[first : first + count]
            shared = self._tree.share(lease)
            self._moves.start(Purpose.SAVE, shared, self._device, sources, self.host, slots, first)
            started += count
        self._tree.release(lease, used=False)
        return started

    # ---- loading ---------------------------------------------------------------------------------------------------

    def num_to_load(self, lease: Lease) -> int:
        """Blocks of a path that are not on the device, nor on their way there."""
        return block_states(lease, self._device)[: lease.num_matched].count(BlockState.ABSENT)

    def load(self, lease: Lease, slots: Slots) -> None:
        """Start loading what of a path is not on the device, into slots reserved there."""
        absent = _states(lease, self._device)[: lease.num_matched] == BlockState.ABSENT
        at = 0
        for first, last in _runs(absent, 0):
            sources = block_slots(lease, self.host)[first:last]
            targets = Slots(slots.tier, slots.ids[at : at + last - first])
            at += last - first
            self._moves.start(Purpose.LOAD, self._tree.share(lease), self.host, sources, self._device, targets, first)

    def is_loaded(self, lease: Lease) -> bool:
        """Whether the whole path can be read on the device."""
        states = block_states(lease, self._device)[: lease.num_matched]
        return min(states, default=int(BlockState.READY)) >= BlockState.READY

    def has_failed(self, lease: Lease) -> bool:
        """Whether some of it is neither there nor on its way."""
        return self.num_to_load(lease) > 0


def _states(lease: Lease, tier: Tier) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(block_states(lease, tier), np.uint8)


def _runs(wanted: np.ndarray[Any, np.dtype[np.bool_]], start: int) -> Iterator[tuple[int, int]]:
    """The stretches [first, last) of what is wanted, numbered from `start`."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)) + start
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
