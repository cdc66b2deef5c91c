"""What the deciding side and the moving side tell each other: plans one way, reports the other. Values, nothing else.

    CacheManager --Plan--> CacheController (every rank)          what to forget, to look up and to move, in this order
    CacheManager <--Report-- CacheController                     what became of it, and what is there

The transfers of a plan do not depend on each other, nor on those of earlier plans that are still under way: what needs
another to be done is planned when that was reported. Slots and keys travel as bytes (little-endian int32, 32 bytes
each), so that a message costs by its blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError

I32 = np.ndarray[Any, np.dtype[np.int32]]
KEY_BYTES = 32


class Route(StrEnum):
    """Why blocks are moved. A load and a fetch are waited for, the others are not."""

    HOST_TO_DEVICE = "load"
    """Host to device."""
    DEVICE_TO_HOST = "save"
    """Device to host."""
    STORE_TO_HOST = "fetch"
    """A store to the host."""
    HOST_TO_STORE = "store"
    """Host to a store."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Blocks from one tier to another, the i-th source to the i-th target. A store's side has keys instead of slots."""

    id: int
    route: Route
    source: str
    target: str
    source_slots: bytes = b""
    target_slots: bytes = b""
    keys: bytes = b""
    """Of the blocks, where a store is on one side."""

    def __post_init__(self) -> None:
        sources, targets, keys = len(self.source_slots), len(self.target_slots), len(self.keys)
        size = sources or targets
        agree = sources in (0, size) and targets in (0, size) and keys in (0, size // 4 * KEY_BYTES)
        if not agree or not size or size % 4 or not (keys or (sources and targets)):
            raise ArgumentError(
                f"transfer {self.id} has {sources} bytes of source slots, {targets} of target slots and {keys} of keys"
            )

    @property
    def store(self) -> str:
        """The store on one side, if there is one."""
        if self.route is Route.STORE_TO_HOST:
            return self.source
        return self.target if self.route is Route.HOST_TO_STORE else ""

    @property
    def num_blocks(self) -> int:
        """How many blocks it moves."""
        return len(self.source_slots or self.target_slots) // 4

    @property
    def sources(self) -> I32:
        """The source slots."""
        return np.frombuffer(self.source_slots, "<i4")

    @property
    def targets(self) -> I32:
        """The target slots."""
        return np.frombuffer(self.target_slots, "<i4")


@dataclass(frozen=True, slots=True)
class Probe:
    """Which of these keys does a store have? Without keys: all that it has."""

    id: int
    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Drop:
    """A store is to forget these keys; without keys, all of this cache."""

    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for one step: drops, then probes, then transfers. Ids rise; the epoch changes with every reset."""

    id: int
    epoch: int
    transfers: tuple[TransferRequest, ...] = ()
    probes: tuple[Probe, ...] = ()
    drops: tuple[Drop, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.transfers or self.probes or self.drops)

    def only(self, transfer_ids: Collection[int]) -> Plan:
        """These transfers of it, and nothing else."""
        return replace(self, transfers=self._where(transfer_ids, True), probes=(), drops=())

    def without(self, transfer_ids: Collection[int]) -> Plan:
        """All but these transfers."""
        return replace(self, transfers=self._where(transfer_ids, False)) if transfer_ids else self

    def _where(self, transfer_ids: Collection[int], wanted: bool) -> tuple[TransferRequest, ...]:
        return tuple(each for each in self.transfers if (each.id in transfer_ids) is wanted)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of one transfer."""

    transfer_id: int
    ok: bool
    """Whether every block arrived."""
    num_bytes: int
    seconds: float
    reason: str = ""
    arrived: bytes = b""
    """Where only some blocks did: one byte for each, 1 for those. Empty: all or none, as `ok` says."""


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """These keys are in a store, those are not: the answer to a probe, or what a read that found nothing has shown."""

    store: str
    present: bytes = b""
    absent: bytes = b""
    probe_id: int = 0
    """Every probe is answered once, with or without success; 0: nobody asked."""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """So many slots of a tier can be used: host memory comes piece by piece."""

    tier: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has done of its plans since its last report."""

    epoch: int
    rank: int
    results: tuple[TransferResult, ...] = ()
    lookups: tuple[StoreLookup, ...] = ()
    capacities: tuple[TierCapacity, ...] = ()
    damaged: bytes = b""
    """Host slots whose block is no longer what was put there."""


def slot_bytes(slots: I32) -> bytes:
    """Slots as messages carry them."""
    return slots.astype("<i4", copy=False).tobytes()


def split_keys(keys: bytes) -> list[bytes]:
    """The single keys of a message."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
