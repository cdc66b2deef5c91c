"""ReplicaFeed: applies the KV events of one replica to a PlacementIndex.

    LATE --all batches from number 0 on------------------------> LIVE        LATE is the initial state
    LIVE --batch with the next number--------------------------> LIVE
    LIVE --batch with a higher number: batches are missing-----> GAP
    GAP  --replay of the missing batches-----------------------> LIVE
    any  --`restart` after at least one batch------------------> LIVE
    any  --newest batch, if its first event clears the index---> LIVE
    any  --lower number with a newer time: replica restarted---> index cleared; LIVE if the number is 0, else LATE

Batches are applied as they arrive, even if earlier batches are missing. The index is then approximate. A wrong entry
can cost a cache hit, but it never changes an answer, because the replica looks up the prompt itself. A replay contains
all batches from the first missing one to the newest. After the replay, the index therefore has the newest state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.router.placement import U64, PlacementIndex, as_hashes

# Numbers of the tiers in the index, fastest first. EXPECTED: blocks that the replica will compute (see Router).
DEVICE, HOST, STORE, EXPECTED = range(4)
TIERS = ("device", "host", "store", "expected")
_MEDIA = {"GPU": DEVICE, "CPU": HOST}  # every other medium is a store
_MASK = (1 << 64) - 1


class FeedState(Enum):
    """State of a feed. A feed that is not LIVE needs a replay from its `next_number`."""

    LIVE = "live"
    LATE = "late"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message from the publisher of a replica's KV events."""

    number: int
    time: float
    events: Sequence[Mapping[str, Any]]


class ReplicaFeed:
    """Applies the events of one replica to the index."""

    def __init__(self, index: PlacementIndex, replica: int) -> None:
        self._index, self._replica = index, replica
        self.next_number = 0
        """Number of the first batch that has not arrived. Request a replay from this number unless the feed is LIVE."""
        self.num_malformed = 0
        """Number of skipped events: malformed or of an unknown type."""
        self._newest = 0  # number of the newest applied batch, plus 1
        self._time = -np.inf  # time of the newest batch

    @property
    def state(self) -> FeedState:
        if self.next_number == self._newest and self._time > -np.inf:
            return FeedState.LIVE
        return FeedState.GAP if self.next_number else FeedState.LATE

    def apply(self, batch: EventBatch) -> FeedState:
        """Apply a batch, new or from a replay. Ignore a batch before `next_number`, unless the replica restarted."""
        if batch.number < self.next_number:
            if batch.time <= self._time:
                return self.state
            self._index.clear(self._replica)  # the replica restarted
            self.next_number = self._newest = 0
        for event in batch.events:
            self._apply_event(event)
        if batch.number == self.next_number or _begins_anew(batch):  # a cleared index needs no earlier batch
            self.next_number = batch.number + 1
        self._newest = max(self._newest, batch.number + 1)
        self._time = max(self._time, batch.time)
        return self.state

    def restart(self) -> FeedState:
        """Forget the replica's blocks and continue with the next batch. Call this if the missing batches are lost.

        The index then lacks the replica's blocks until later events report them again.
        """
        self._index.clear(self._replica)
        self.next_number = self._newest
        return self.state

    def _apply_event(self, event: Mapping[str, Any]) -> None:
        try:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self._index.clear(self._replica)
                return
            hashes = event_hashes(event["block_hashes"])
            tier = _MEDIA.get(event.get("medium") or "GPU", STORE)
        except (KeyError, TypeError, ArgumentError):
            self.num_malformed += 1
            return
        is_shared = tier == STORE and event.get("locality") == "REMOTE"
        if is_shared and kind == "BlockStored":
            self._index.share(STORE, hashes)
        elif is_shared and kind == "BlockRemoved":
            self._index.unshare(STORE, hashes)
        elif kind == "BlockStored":
            self._index.store(self._replica, tier, hashes)
        elif kind == "BlockRemoved":
            self._index.remove(self._replica, tier, hashes)
        else:
            self.num_malformed += 1


def _begins_anew(batch: EventBatch) -> bool:
    """True if the first event clears the index. A publisher that lost its earlier batches sends such a batch."""
    return bool(batch.events) and batch.events[0].get("type") == "AllBlocksCleared"


def event_hashes(values: Sequence[int | bytes]) -> U64:
    """Return the block hashes of an event. Longer hashes are shortened to their last 64 bits."""
    found = []
    for value in values:
        if isinstance(value, bytes) and len(value) >= 8:
            found.append(int.from_bytes(value[-8:], "big"))
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(value & _MASK)
        else:
            raise ArgumentError(f"a block hash must be an int or at least 8 bytes, got {value!r}")
    return as_hashes(found)
