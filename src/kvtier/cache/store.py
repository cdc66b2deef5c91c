"""StoreCopies: which blocks a store is known to have, and which of the host's it gets.

A store keeps blocks by key, outside the tree, and evicts by itself: what is known of it may be out of date, and a read
that finds nothing is a miss like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kvtier.cache.moves import Mask, Move, Moves, both, runs
from kvtier.cache.saving import SaveJob, SaveQueue, Saving, WritePolicy
from kvtier.errors import RangeError
from kvtier.index import Lease, RadixTree, Slots, Tier
from kvtier.index.node import READABLE
from kvtier.index.transitions import block_slots, block_states
from kvtier.messages import Drop, Presence, Purpose, split_keys


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

    def __post_init__(self) -> None:
        if not self.name or self.name in ("device", "host"):
            raise RangeError(f"a store needs a name that is not a memory's, got {self.name!r}")
        if self.wait_seconds < 0 or self.max_fetching_blocks < 1 or self.max_known < 1:
            raise RangeError(
                f"wait_seconds must be 0 or more, max_fetching_blocks and max_known 1 or more, got "
                f"{self.wait_seconds}, {self.max_fetching_blocks} and {self.max_known}"
            )


@dataclass(slots=True, eq=False)
class _Copies:
    """Which ranks' part of a block a store has, as bits. Blocks that go there together share one: when they have
    arrived, it is told once for all of them."""

    ranks: int = 0
    """None: on their way."""


class StoreCopies:
    """What is known of one store, and what is written to it."""

    def __init__(self, tree: RadixTree, host: Tier, config: StoreConfig, moves: Moves, max_jobs: int) -> None:
        self.config = config
        self.queue = SaveQueue(tree, config.saving, host, self._save, self._num_storing, max_jobs)
        self._tree, self._host, self._moves = tree, host, moves
        self._known: dict[bytes, _Copies] = {}  # those it has, and those on their way; learned of last at the end
        self._found: dict[int, _Copies] = {}  # ranks -> for what was not stored by us
        self._all_ranks = (1 << moves.num_ranks) - 1
        self._writes: dict[int, tuple[list[bytes], _Copies]] = {}  # transfer -> its keys
        self.inventory_probe = 0 if config.is_shared else moves.probe(config.name)
        """The probe for all that it has, until it is answered; then 0."""

    # ---- what it has -----------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        """Blocks it is known to have, for some rank."""
        known, writes = self._known, self._writes.values()
        return len(known) - sum(known.get(key) is copies for keys, copies in writes for key in keys)

    def num_leading(self, keys: Sequence[bytes], first: int = 0) -> int:
        """How many of these, from `first` on, it is known to have."""
        known, everyone = self._known, self._all_ranks
        for at in range(first, len(keys)):
            found = known.get(keys[at])
            if found is None or found.ranks != everyone:
                return at - first
        return len(keys) - first

    def learn(self, rank: int, presence: Presence) -> None:
        """It was found to have some, and not to have others. What is on its way there is none of them."""
        known, mine = self._known, 1 << rank
        present = ((key, known.get(key)) for key in split_keys(presence.present))
        self._know(
            {
                key: self._of_ranks((copies.ranks if copies is not None else 0) | mine)
                for key, copies in present
                if copies is None or copies.ranks
            }
        )
        for key in split_keys(presence.absent):
            copies = known.get(key)
            if copies is not None and copies.ranks & mine:
                del known[key]
                if copies.ranks != mine:
                    known[key] = self._of_ranks(copies.ranks & ~mine)

    def _of_ranks(self, ranks: int) -> _Copies:
        return self._found.setdefault(ranks, _Copies(ranks))

    def answered(self, probe_id: int) -> None:
        """A probe was answered by every rank."""
        if probe_id == self.inventory_probe:
            self.inventory_probe = 0

    def drop(self, keys: bytes) -> None:
        """Have it forget these blocks."""
        for key in split_keys(keys):
            self._known.pop(key, None)  # what is on its way there is forgotten behind it
        if keys:
            self._moves.drop(Drop(self.config.name, keys))

    def clear(self) -> None:
        """Have it forget all of this cache."""
        self._known.clear()
        self._moves.drop(Drop(self.config.name))

    def _know(self, copies: dict[bytes, _Copies]) -> None:
        """Remember who has these keys; beyond the limit, those learned of first are forgotten."""
        self._known.update(copies)
        for key in list(islice(self._known, max(0, len(self._known) - self.config.max_known))):
            del self._known[key]

    # ---- what it gets ----------------------------------------------------------------------------------------------

    def came(self, lease: Lease, first: int, stop: int) -> None:
        """Blocks of a path are on the host since now. Whether they are stored is the policy's to say."""
        if self.config.saving.write is WritePolicy.THROUGH:
            self.queue.came(lease, first, stop)
        elif lease.node.attached:
            self.queue.put(SaveJob(lease.chain, first, stop))

    def ended(self, move: Move, there: Mask) -> None:
        """A write to this store is over."""
        keys, copies = self._writes.pop(move.transfer.id)
        for key, ok in zip(keys, there, strict=True) if 0 in there else ():
            if not ok and self._known.get(key) is copies:
                del self._known[key]
        copies.ranks = self._all_ranks

    def _save(self, job: SaveJob, lease: Lease, room: int) -> int:
        """Start storing what of a job is on the host and not in the store."""
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0
        keys = job.chain.key_list(first, stop)
        wanted = both(block_states(lease, self._host, first, stop).translate(READABLE), self._are_new(keys))
        for low, high in runs(wanted, first):
            count = min(high - low, room - started)
            if count < high - low:
                self.queue.put_back(job.after(low + count))
            if not count:
                break
            mine = keys[low - first : low - first + count]
            sources = Slots(self._host.name, block_slots(lease, self._host, low, low + count))
            shared, name = self._tree.share(lease), self.config.name
            number = self._moves.start(Purpose.STORE, shared, low, sources, name, b"".join(mine))
            copies = _Copies()
            self._writes[number] = mine, copies
            self._know(dict.fromkeys(mine, copies))  # they were looked up just now: the table's places are in the cache
            started += count
        return started

    def _num_storing(self) -> int:
        return self._moves.num_blocks(Purpose.STORE, self.config.name)

    def _are_new(self, keys: list[bytes]) -> Mask:
        """Which of these it is not known to have, nor about to get."""
        known = self._known
        if known.keys().isdisjoint(keys):
            return b"\1" * len(keys)
        enough = (0, self._all_ranks)
        return bytes([key not in known or known[key].ranks not in enough for key in keys])
