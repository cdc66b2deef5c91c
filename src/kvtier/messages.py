"""Immutable messages between the CacheManager, which decides, and the CacheController, which moves bytes.

    CacheManager --Plan--> CacheController (every rank)          drops, probes and transfers to do, in this order
    CacheManager <--Report-- CacheController                     results of transfers and probes

The transfers of a plan do not depend on each other or on transfers in flight: a transfer that needs the result of
another is planned after the report of the other. To keep messages small, slots are sent as bytes (little-endian int32)
and so are keys (32 bytes each).
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
    """Source and target of a transfer. Requests wait for loads and fetches, not for saves and stores."""

    HOST_TO_DEVICE = "load"
    DEVICE_TO_HOST = "save"
    STORE_TO_HOST = "fetch"
    HOST_TO_STORE = "store"


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Copy blocks from one tier to another, the i-th source to the i-th target. A store has keys instead of slots."""

    id: int
    route: Route
    source: str
    target: str
    source_slots: bytes = b""
    target_slots: bytes = b""
    keys: bytes = b""
    """Keys of the blocks if source or target is a store."""

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
        """Name of the store that is source or target, or empty."""
        if self.route is Route.STORE_TO_HOST:
            return self.source
        return self.target if self.route is Route.HOST_TO_STORE else ""

    @property
    def num_blocks(self) -> int:
        return len(self.source_slots or self.target_slots) // 4

    @property
    def sources(self) -> I32:
        return np.frombuffer(self.source_slots, "<i4")

    @property
    def targets(self) -> I32:
        return np.frombuffer(self.target_slots, "<i4")


@dataclass(frozen=True, slots=True)
class Probe:
    """Look up keys in a store, or list all keys of the store if `keys` is empty."""

    id: int
    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove keys from a store, or all keys of this cache if `keys` is empty."""

    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """Work for one step: drops, then probes, then transfers. Ids rise; the epoch changes with every reset."""

    id: int
    epoch: int
    transfers: tuple[TransferRequest, ...] = ()
    probes: tuple[Probe, ...] = ()
    drops: tuple[Drop, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.transfers or self.probes or self.drops)

    def only(self, transfer_ids: Collection[int]) -> Plan:
        """Return a plan with only these transfers."""
        transfers = tuple(each for each in self.transfers if each.id in transfer_ids)
        return replace(self, transfers=transfers, probes=(), drops=())

    def without(self, transfer_ids: Collection[int]) -> Plan:
        """Return the plan without these transfers."""
        if not transfer_ids:
            return self
        return replace(self, transfers=tuple(each for each in self.transfers if each.id not in transfer_ids))


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of one transfer on one rank."""

    transfer_id: int
    ok: bool
    """True if every block arrived."""
    num_bytes: int
    seconds: float
    reason: str = ""
    arrived: bytes = b""
    """One byte per block, 1 if the block arrived. Empty if all blocks arrived (`ok`) or none (not `ok`)."""


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """Keys present in a store and keys absent from it: the result of a probe, or of a read that missed keys."""

    store: str
    present: bytes = b""
    absent: bytes = b""
    probe_id: int = 0
    """Id of the probe, or 0 for a read. Each rank answers a probe exactly once, even if the lookup failed."""


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one rank since its last report."""

    epoch: int
    rank: int
    results: tuple[TransferResult, ...] = ()
    lookups: tuple[StoreLookup, ...] = ()
    num_host_slots: int = 0
    """Number of usable host slots, which grows while host memory is being allocated; 0 means no change."""
    damaged: bytes = b""
    """Host slots whose content changed unexpectedly."""


def slot_bytes(slots: I32) -> bytes:
    """Return slots as the bytes that messages contain."""
    return slots.astype("<i4", copy=False).tobytes()


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
