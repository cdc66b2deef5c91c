"""Allocation: a request's cached KV, and the manager's numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.cache.cost_model import LoadDecision
from kvtier.index import Chain, Lease
from kvtier.index.node import NO_SLOT
from kvtier.index.pool import I32


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block on the device before the step computes: its first `num_tokens` tokens are wanted in the target."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier in numbers. Of a store only what is known to be there is known."""

    name: str
    num_blocks: int
    """It has room for; 0 for a store."""
    num_used: int
    num_evictable: int
    hit_tokens: int
    """Tokens that requests were given from it."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The manager in numbers, since it was made."""

    num_blocks: int
    num_free: int
    num_evictable: int
    num_allocations: int
    queried_tokens: int
    hit_tokens: int
    tiers: tuple[TierStats, ...]


class Allocation:
    """A request's cached KV: a lease on what was found, and slots of its own. The manager changes it; callers read.

    `num_cached_tokens` tokens need not be computed, once `copy` (if there is one) is made.
    """

    __slots__ = ("copy", "decision", "is_loading", "lease", "loads", "num_cached_tokens", "source", "tokens_from")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_loading = False
        """Whether blocks of it are on their way to the device; see CacheManager.is_ready."""
        self.loads: tuple[int, ...] = ()
        """The transfers that bring them, as far as they were started for this hold."""
        self.tokens_from: dict[str, int] = {}
        """Cached tokens by the tier they were found in."""
        self.num_cached_tokens = lease.num_matched_tokens
        self.source: Lease | None = None
        """Holds the block that the beginning of the next one is copied from, until that is computed."""
        self.copy: BlockCopy | None = None
        self.decision: LoadDecision | None = None
        """Whether blocks below the device were to be loaded, if there were any."""

    @property
    def chain(self) -> Chain:
        """The request's tokens."""
        return self.lease.chain

    @property
    def table(self) -> I32:
        """The device slot of each block, in order."""
        return self.lease.table

    @property
    def num_on_device(self) -> int:
        """Blocks before the first that is to be loaded."""
        missing = self.lease.table == NO_SLOT
        return int(missing.argmax()) if missing.any() else len(missing)

    @property
    def num_blocks_needed(self) -> int:
        """Device slots it needs for all tokens it knows, and has not got."""
        lease = self.lease
        num_blocks = -(-lease.chain.num_tokens // lease.chain.namespace.block_tokens)
        to_load = 0 if self.is_loading else int(np.count_nonzero(lease.table == NO_SLOT))  # else they are reserved
        return max(0, num_blocks - len(lease.table)) + to_load
