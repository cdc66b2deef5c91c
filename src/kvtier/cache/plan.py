"""What the deciding side and the moving side tell each other: plans one way, reports the other. Values, nothing else.

    CacheManager --Plan--> CacheController (every rank)          what to move, in this order where `after` says so
    CacheManager <--Report-- CacheController                     what became of it

Slots and keys travel as bytes (little-endian int32, 32 bytes each), so that a message costs by its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError

I32 = np.ndarray[Any, np.dtype[np.int32]]


class Purpose(Enum):
    """Why blocks are moved; a load is waited for, a save is not."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks from one tier to another, the i-th source slot to the i-th target slot."""

    id: int
    purpose: Purpose
    source: str
    target: str
    source_slots: bytes
    target_slots: bytes
    keys: bytes = b""
    """Of the blocks, where a store is on one side."""
    after: tuple[int, ...] = ()
    """Transfers of this or earlier plans that must be done before this one begins: they read what it overwrites."""

    def __post_init__(self) -> None:
        if len(self.source_slots) != len(self.target_slots) or len(self.source_slots) % 4:
            raise ArgumentError(
                f"transfer {self.id} has {len(self.source_slots)} bytes of source slots "
                f"and {len(self.target_slots)} of target slots"
            )

    @property
    def num_blocks(self) -> int:
        """How many blocks it moves."""
        return len(self.source_slots) // 4

    @property
    def sources(self) -> I32:
        """The source slots."""
        return np.frombuffer(self.source_slots, "<i4")

    @property
    def targets(self) -> I32:
        """The target slots."""
        return np.frombuffer(self.target_slots, "<i4")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for one step. Ids rise; the epoch changes with every reset."""

    id: int
    epoch: int
    transfers: tuple[Transfer, ...]

    def __bool__(self) -> bool:
        return bool(self.transfers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one transfer. A failed one failed for all its blocks."""

    transfer_id: int
    ok: bool
    num_bytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has done of its plans since its last report."""

    epoch: int
    rank: int
    outcomes: tuple[Outcome, ...]


def slot_bytes(slots: I32) -> bytes:
    """Slots as messages carry them."""
    return slots.astype("<i4").tobytes()
