"""Immutable messages between the CacheManager, which makes decisions, and the CacheController, which moves blocks.

    CacheManager --Plan--> CacheController (every rank)          drops, probes and transfers to start
    CacheManager <--Report-- CacheController                     results of transfers and probes

The transfers in a plan are independent of each other and of all transfers in flight. A transfer that needs the result
of an earlier transfer is planned after the earlier transfer was reported. To keep messages small, slots are sent as
bytes (little-endian int32), and keys are concatenated (32 bytes per key).
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
    """Source and target of a transfer. Inference requests wait only for "load" and "fetch"."""

    HOST_TO_DEVICE = "load"
    DEVICE_TO_HOST = "save"
    STORE_TO_HOST = "fetch"
    HOST_TO_STORE = "store"


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Request to copy blocks from one tier to another. The i-th source is copied to the i-th target.

    Device and host blocks are identified by slots, and blocks in a store by keys.
    """

    id: int
    route: Route
    source: str
    target: str
    source_slots: bytes = b""
    target_slots: bytes = b""
    keys: bytes = b""
    """Keys of the blocks if the source or the target is a store, else empty."""
    tenant: bytes = b""
    """Owner of the blocks, if the target is a store."""

    def __post_init__(self) -> None:
        sources, targets, keys = len(self.source_slots), len(self.target_slots), len(self.keys)
        size = sources or targets
        agree = sources in (0, size) and targets in (0, size) and keys in (0, size // 4 * KEY_BYTES)
        if not agree or not size or size % 4 or not (keys or (sources and targets)):
            raise ArgumentError(
                f"transfer {self.id} has {sources} bytes of source slots, {targets} of target slots, {keys} of keys; "
                "it needs 4 bytes per slot, 32 per key, and the same number of blocks in all of them"
            )

    @property
    def store(self) -> str:
        """Name of the store that is the source or the target. Empty if there is none."""
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
    """Request to look up keys in a store. If `keys` is empty, list all keys of the cache's namespace in the store."""

    id: int
    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Drop:
    """Request to remove keys from a store. If `keys` is empty, remove all keys of the cache's namespace."""

    store: str
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """Work for one step. Drops start first, then probes, then transfers. Each reset of the cache begins a new epoch."""

    id: int
    epoch: int
    transfers: tuple[TransferRequest, ...] = ()
    probes: tuple[Probe, ...] = ()
    drops: tuple[Drop, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.transfers or self.probes or self.drops)

    def only(self, transfer_ids: Collection[int]) -> Plan:
        transfers = tuple(each for each in self.transfers if each.id in transfer_ids)
        return replace(self, transfers=transfers, probes=(), drops=())

    def without(self, transfer_ids: Collection[int]) -> Plan:
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
    """One byte per block: 1 if the block arrived, otherwise 0. May be empty if `ok` is True or no block arrived."""


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """Keys that are present in a store and keys that are absent. Result of a probe or of a failed read."""

    store: str
    present: bytes = b""
    absent: bytes = b""
    probe_id: int = 0
    """Id of the probe that ends with this lookup, else 0. Every probe ends once on each rank, even if it fails."""


@dataclass(frozen=True, slots=True)
class Report:
    """Results from one rank since its previous report."""

    epoch: int
    rank: int
    results: tuple[TransferResult, ...] = ()
    lookups: tuple[StoreLookup, ...] = ()
    num_host_slots: int = 0
    """Number of usable host slots, which increases while host memory is being allocated. 0 means no change."""
    damaged: bytes = b""
    """Host slots whose contents are corrupt."""


def slot_bytes(slots: I32) -> bytes:
    """Encode slots for a message."""
    return slots.astype("<i4", copy=False).tobytes()


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
