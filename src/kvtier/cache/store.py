"""StoreCopies: which blocks a store is known to have, and which of the host's it gets.

A store keeps blocks by key, outside the tree, and evicts by itself: what is known of it may be out of date, and a read
that finds nothing is a miss like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress, islice

import numpy as np

from kvtier.cache.host import states_of
from kvtier.cache.moves import End, Mask, Move, Moves, runs
from kvtier.cache.plan import KEY_BYTES, Drop, Presence, Purpose, split_keys
from kvtier.cache.saving import SaveJob, SaveQueue, Saving, WritePolicy
from kvtier.errors import RangeError
from kvtier.index import BlockState, Chain, RadixTree, Tier
from kvtier.index.transfers import block_slots
from kvtier.storage import digest_tokens


class Patience(Enum):
    """How long a request waits for its blocks from a store before it is scheduled."""

    BEST_EFFORT = "best_effort"
    """Not at all: what has arrived when its turn comes is used."""
    DEADLINE = "deadline"
    """At most `wait_seconds`."""
    WAIT = "wait"
    """Until they have arrived, or failed to."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store below the host tier."""

    name: str = "disk"
    saving: Saving = field(default_factory=Saving)
    patience: Patience = Patience.DEADLINE
    wait_seconds: float = 5.0
    is_shared: bool = False
    """Whether others write to it too: then it is asked what it has, request by request. If not, its inventory is taken
    once, and what is stored is remembered."""
    max_fetching_blocks: int = 1024
    """On their way from it at a time."""
    max_known: int = 1 << 22
    """Keys that are remembered of it, at about 150 bytes each: it evicts by itself, and tells nobody."""
    secret: bytes = field(default=b"", repr=False)
    """Keys the token digests in the store, so that nobody who reads it can guess prompts."""

    def __post_init__(self) -> None:
        if not self.name or self.name in ("device", "host"):
            raise RangeError(f"a store needs a name that is not a memory's, got {self.name!r}")
        if self.wait_seconds < 0 or self.max_fetching_blocks < 1 or self.max_known < 1:
            raise RangeError(
                f"wait_seconds must be 0 or more, max_fetching_blocks and max_known 1 or more, got "
                f"{self.wait_seconds}, {self.max_fetching_blocks} and {self.max_known}"
            )


class StoreCopies:
    """What is known of one store, and what is written to it."""

    def __init__(self, tree: RadixTree, host: Tier, config: StoreConfig, moves: Moves, max_jobs: int) -> None:
        self.config = config
        self.queue = SaveQueue(config.saving, max_jobs)
        self._tree, self._host, self._moves = tree, host, moves
        self._known: dict[bytes, int] = {}  # key -> bits of the ranks that have it; those learned of last at the end
        self._all_ranks = (1 << moves.num_ranks) - 1
        self._storing: set[bytes] = set()
        self.inventory_probe = 0 if config.is_shared else moves.probe(config.name)
        """The probe for all that it has, until it is answered; then 0."""

    # ---- what it has -----------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        """Blocks it is known to have, for some rank."""
        return len(self._known)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of these, from the first on, it is known to have."""
        known, everyone = self._known, self._all_ranks
        return next((i for i, key in enumerate(keys) if known.get(key) != everyone), len(keys))

    def learn(self, rank: int, presence: Presence) -> None:
        """It was found to have some, and not to have others."""
        known, mine = self._known, 1 << rank
        self._know({key: known.get(key, 0) | mine for key in split_keys(presence.present)})
        for key in split_keys(presence.absent):
            left = known.pop(key, 0) & ~mine
            if left:
                known[key] = left

    def answered(self, probe_id: int) -> None:
        """A probe was answered by every rank."""
        if probe_id == self.inventory_probe:
            self.inventory_probe = 0

    def drop(self, keys: bytes) -> None:
        """Have it forget these blocks."""
        gone = split_keys(keys)
        for key in gone:
            self._known.pop(key, None)
        self._storing.difference_update(gone)  # what is on its way there is forgotten behind it
        if keys:
            self._moves.drop(Drop(self.config.name, keys))

    def clear(self) -> None:
        """Have it forget all of this cache."""
        self._known.clear()
        self._storing.clear()
        self._moves.drop(Drop(self.config.name))

    def _know(self, ranks: dict[bytes, int]) -> None:
        """Remember who has these keys; beyond the limit, those learned of first are forgotten."""
        self._known.update(ranks)
        for key in list(islice(self._known, max(0, len(self._known) - self.config.max_known))):
            del self._known[key]

    # ---- what it gets ----------------------------------------------------------------------------------------------

    @property
    def wants_to_save(self) -> bool:
        """Whether there is something to store, and with write_back a reason to."""
        return bool(self.queue) and (self.queue.saving.write is not WritePolicy.BACK or self._is_low())

    def _is_low(self) -> bool:
        pool = self._host.pool
        return pool.num_free < self.queue.saving.low_share * pool.num_slots

    def plan_saves(self, now: float, *, all_of_them: bool = False) -> None:
        """Start as many writes as may be under way."""
        if not self.wants_to_save and not (all_of_them and self.queue):
            return
        room = self.queue.room(self._moves.num_blocks(Purpose.STORE, self.config.name), now)
        while self.queue and room > 0:
            started = self._save(self.queue.pop(), room, now)
            self.queue.spend(started)
            room -= started

    def ended(self, move: Move, there: Mask) -> None:
        """A write to this store is over."""
        keys = split_keys(move.transfer.keys)
        stored = self._storing.intersection(compress(keys, there.tolist()))
        self._know(dict.fromkeys(stored, self._all_ranks))
        self._storing.difference_update(keys)

    def _save(self, job: SaveJob, room: int, now: float) -> int:
        """Start storing what of a job is on the host and not in the store; returns the blocks started."""
        lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
        stop = min(job.stop, lease.num_blocks)
        started = 0
        if stop > job.first and self.queue.is_worth(job, lease):
            keys = split_keys(job.chain.keys(stop)[job.first * KEY_BYTES :])
            known, everyone, storing = self._known, self._all_ranks, self._storing
            new = np.array([known.get(key) != everyone and key not in storing for key in keys], np.bool_)
            wanted = new & (states_of(lease, self._host)[job.first : stop] >= BlockState.READY)
            for first, last in runs(wanted, job.first):
                count = min(last - first, room - started)
                if count < last - first:
                    self.queue.put_back(job.after(first + count))
                if not count:
                    break
                mine = keys[first - job.first : first - job.first + count]
                self._storing.update(mine)
                sources = End.of(self._host, block_slots(lease, self._host)[first : first + count])
                target, digests = End(self.config.name), self.digests(job.chain, first, first + count)
                shared = self._tree.share(lease)
                self._moves.start(Purpose.STORE, shared, first, sources, target, b"".join(mine), digests)
                started += count
        self._tree.release(lease, used=False)
        return started

    def digests(self, chain: Chain, first: int, stop: int) -> bytes:
        """Of the tokens of blocks [first, stop)."""
        secret, labels, width = self.config.secret, chain.label(first, stop), chain.label_bytes
        return b"".join([digest_tokens(labels[at : at + width], secret) for at in range(0, len(labels), width)])
