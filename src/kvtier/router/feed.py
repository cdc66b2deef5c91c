"""ReplicaFeed: applies the KV events of one replica to a PlacementIndex.

    LATE ---replay from 0---> LIVE ---next number, or a batch that clears the index first---> LIVE
                               |  ---number missing-> GAP ---replay fills it---> LIVE
                               |                       |  ---replay cannot-----> LIVE after `restart`
                               |  ---older number, newer time: the replica restarted---> LIVE, index cleared

While numbers are missing, newer batches wait, because an old event must not undo a newer one. The index keeps what it
had: a wrong entry costs a hit, never an answer, since the replica looks up the prompt itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.router.placement import U64, PlacementIndex, as_hashes

# Numbers of the tiers in the index, from the fastest to the slowest.
DEVICE, HOST, STORE, EXPECTED = range(4)
TIERS = ("device", "host", "store", "expected")
_MEDIA = {"GPU": DEVICE, "CPU": HOST}  # every other medium is a store
_MAX_WAITING = 10_000
_MASK = (1 << 64) - 1


class FeedState(Enum):
    """State of a feed. A feed that is not LIVE needs a replay from its `next_number`."""

    LIVE = "live"
    LATE = "late"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a publisher."""

    number: int
    time: float
    events: Sequence[Mapping[str, Any]]


class ReplicaFeed:
    """Events of one replica, in the order of their numbers. All methods mutate the index."""

    def __init__(self, index: PlacementIndex, replica: int) -> None:
        self._index, self._replica = index, replica
        self.state = FeedState.LATE
        self.next_number = 0
        """Number of the first batch that is missing. Request a replay from this number unless the feed is LIVE."""
        self.num_malformed = 0
        """Events that were skipped, because this version cannot read them."""
        self._time = -np.inf
        self._waiting: dict[int, EventBatch] = {}

    def apply(self, batch: EventBatch) -> FeedState:
        """Apply a batch, or keep it until the batches before it have arrived."""
        if batch.number < self.next_number:
            if batch.time <= self._time:
                return self.state  # a repeated batch
            self.restart(0)
        if batch.number > self.next_number and _begins_anew(batch):  # nothing before it matters any more
            self.next_number = batch.number
            self._waiting = {at: each for at, each in self._waiting.items() if at > batch.number}
        if batch.number != self.next_number:
            if len(self._waiting) >= _MAX_WAITING:
                self.restart(min(self._waiting))
            self._waiting[batch.number] = batch
            self.state = FeedState.GAP if self.next_number else FeedState.LATE
            return self.state
        self._waiting[batch.number] = batch
        return self._apply_waiting()

    def restart(self, number: int | None = None) -> FeedState:
        """Forget the replica and continue with batch `number`. By default, continue with the first batch that waits.

        Call it if a replay does not contain the missing batches. The replica then has to publish its blocks again, or
        the index learns them as they are stored.
        """
        self._index.clear(self._replica)
        self.next_number = min(self._waiting, default=self.next_number) if number is None else number
        self._waiting = {at: batch for at, batch in self._waiting.items() if at >= self.next_number}
        self._time = -np.inf
        return self._apply_waiting()

    def _apply_waiting(self) -> FeedState:
        while (batch := self._waiting.pop(self.next_number, None)) is not None:
            for event in batch.events:
                self._apply_event(event)
            self.next_number += 1
            self._time = batch.time
        self.state = FeedState.GAP if self._waiting else FeedState.LIVE
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
        if kind == "BlockStored":
            self._index.store(self._replica, tier, hashes)
        elif kind == "BlockRemoved":
            self._index.remove(self._replica, tier, hashes)
        else:
            self.num_malformed += 1


def _begins_anew(batch: EventBatch) -> bool:
    """True if the first event clears the index. A publisher sends such a batch in place of batches that it lacks."""
    return bool(batch.events) and batch.events[0].get("type") == "AllBlocksCleared"


def event_hashes(values: Sequence[int | bytes]) -> U64:
    """Return the 64-bit hashes of an event. Hashes in bytes are shortened to their last 64 bits."""
    found = []
    for value in values:
        if isinstance(value, bytes) and len(value) >= 8:
            found.append(int.from_bytes(value[-8:], "big"))
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(value & _MASK)
        else:
            raise ArgumentError(f"a block hash must be an int or at least 8 bytes, got {value!r}")
    return as_hashes(found)
