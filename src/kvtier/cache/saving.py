"""When blocks get a copy in a lower tier: the policies, and the queue of what to look at."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from kvtier.errors import RangeError
from kvtier.index import Chain, Lease, RadixTree, Tier


class WritePolicy(Enum):
    """When a block is copied to a lower tier."""

    THROUGH = "write_through"
    """As soon as it is in the tier above."""
    SELECTIVE = "write_through_selective"
    """Once it was used again `min_uses` times."""
    BACK = "write_back"
    """When the tier above runs low, the ones finished longest ago first; and all of them when the cache is flushed."""


@dataclass(frozen=True, slots=True)
class Saving:
    """How blocks come to a lower tier."""

    write: WritePolicy = WritePolicy.THROUGH
    min_uses: int = 1
    max_blocks: int = 256
    """On their way at a time: saves must not crowd out loads."""
    low_share: float = 0.25
    """For write_back: save when less than this share of the tier above is free."""
    blocks_per_second: float = math.inf
    """The bandwidth that saves may take, over a second."""

    def __post_init__(self) -> None:
        if self.max_blocks < 1 or self.min_uses < 1 or self.blocks_per_second <= 0:
            raise RangeError(
                f"saving needs max_blocks and min_uses of 1 or more and blocks_per_second above 0, got "
                f"{self.max_blocks}, {self.min_uses} and {self.blocks_per_second}"
            )
        if not 0 <= self.low_share <= 1:
            raise RangeError(f"low_share is in [0, 1], got {self.low_share}")


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks [first, stop) of a chain might want a copy."""

    chain: Chain
    first: int
    stop: int
    always: bool = False
    """Whatever the policy says: somebody asked for it."""

    def after(self, block: int) -> SaveJob:
        """What is left of it from a block on."""
        return replace(self, first=block)


Save = Callable[[SaveJob, Lease, int], int]
"""Start saving what of a job lacks a copy, at most so many blocks, of a path that is held; returns the blocks started.
Where there are more than may start, the rest of the job is put back."""


class SaveQueue:
    """Jobs in the order they came, by policy, and how many blocks of them may go now."""

    def __init__(
        self, tree: RadixTree, saving: Saving, above: Tier, save: Save, num_moving: Callable[[], int], max_jobs: int
    ) -> None:
        """For what is in tier `above`. `num_moving` tells how many blocks are on their way.

        Beyond `max_jobs` the oldest are forgotten: more than a tier has slots cannot all have blocks there.
        """
        self.saving = saving
        self._tree, self._pool, self._save, self._num_moving = tree, above.pool, save, num_moving
        self._jobs: deque[SaveJob] = deque(maxlen=max_jobs)
        self._allowance = saving.blocks_per_second  # a second's worth may go at once
        self._counted_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._jobs)

    # ---- what might want a copy ------------------------------------------------------------------------------------

    def came(self, lease: Lease, first: int, stop: int) -> None:
        """Blocks of a path are in the tier above since now: with write_through they go at once, if nobody waits.

        While the path is held they need not be looked for.
        """
        if self.saving.write is not WritePolicy.THROUGH or stop <= first or not lease.node.attached:
            return
        job, room = SaveJob(lease.chain, first, stop), 0 if self._jobs else self._room()
        if room:
            self._allowance -= self._save(job, lease, room)
        else:
            self._jobs.append(job)

    def used_again(self, lease: Lease) -> None:
        """A request was given cached blocks."""
        if self.saving.write is WritePolicy.SELECTIVE and lease.num_matched and lease.node.attached:
            self._jobs.append(SaveJob(lease.chain, 0, lease.num_matched))

    def finished(self, lease: Lease) -> None:
        """A request is over; its blocks are the next to get cold."""
        if self.saving.write is WritePolicy.BACK and lease.num_blocks and lease.node.attached:
            self._jobs.append(SaveJob(lease.chain, 0, lease.num_blocks))

    def put(self, job: SaveJob) -> None:
        """Another job."""
        self._jobs.append(job)

    def put_back(self, job: SaveJob) -> None:
        """It is next again."""
        self._jobs.appendleft(job)

    def clear(self) -> None:
        """Nothing of it is there any more."""
        self._jobs.clear()

    # ---- what goes now ---------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there is something to save, and with write_back a reason to: the tier above runs low."""
        if self.saving.write is not WritePolicy.BACK:
            return bool(self._jobs)
        return bool(self._jobs) and self._pool.num_free < self.saving.low_share * self._pool.num_slots

    def plan(self, now: float, *, all_of_them: bool = False) -> None:
        """Start as many saves as may be under way."""
        if self.saving.blocks_per_second < math.inf:
            limit = max(1.0, self.saving.blocks_per_second)
            gone = 0.0 if self._counted_at is None else max(0.0, now - self._counted_at)
            self._allowance = min(limit, self._allowance + gone * self.saving.blocks_per_second)
            self._counted_at = now
        if not (self.is_due or (all_of_them and self._jobs)):
            return
        room = self._room()
        while self._jobs and room > 0:
            job = self._jobs.popleft()
            lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
            started = self._save(job, lease, room) if self._is_worth(job, lease) else 0
            self._tree.release(lease, used=False)
            self._allowance -= started
            room -= started

    def _is_worth(self, job: SaveJob, lease: Lease) -> bool:
        """Whether blocks of this path were used often enough, or somebody wants them saved."""
        is_selective = self.saving.write is WritePolicy.SELECTIVE and not job.always
        return not is_selective or lease.node.usage.uses >= self.saving.min_uses

    def _room(self) -> int:
        """Blocks that may start now."""
        return max(0, min(self.saving.max_blocks - self._num_moving(), int(min(self._allowance, 1 << 30))))
