"""Allocation: a request's cached KV. Statistics of the manager."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.cache.cost_model import LoadDecision
from kvtier.index import Chain, Lease
from kvtier.index.node import NO_SLOT
from kvtier.messages import I32


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of one device block to another, before the step computes."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. For a store, `num_used` counts the blocks that it is known to have."""

    name: str
    num_blocks: int
    """Capacity; 0 for a store."""
    num_used: int
    num_evictable: int
    hit_tokens: int
    """Tokens of requests that were found in this tier."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Statistics of the manager since its start."""

    num_allocations: int
    queried_tokens: int
    hit_tokens: int
    tiers: tuple[TierStats, ...]


@dataclass(slots=True, eq=False, repr=False)
class Allocation:
    """A request's cached KV: a lease on the matched blocks, and slots of its own. Only the manager changes it."""

    lease: Lease
    is_loading: bool = field(init=False, default=False)
    """True while blocks are in flight to the device; see CacheManager.is_ready."""
    loads: tuple[int, ...] = field(init=False, default=())
    """Ids of the transfers in flight, if all of them were started for this allocation."""
    tokens_from: dict[str, int] = field(init=False, default_factory=dict)
    """Cached tokens by tier."""
    num_cached_tokens: int = field(init=False)
    """Tokens that need not be computed, including the tokens of `copy`."""
    source: Lease | None = field(init=False, default=None)
    """Lease on the block to copy from, held until the first step is published."""
    copy: BlockCopy | None = field(init=False, default=None)
    decision: LoadDecision | None = field(init=False, default=None)
    """Decision to load or to compute the cached blocks that were only in lower tiers, if there were any."""

    def __post_init__(self) -> None:
        self.num_cached_tokens = self.lease.num_matched_tokens

    @property
    def chain(self) -> Chain:
        return self.lease.chain

    @property
    def table(self) -> I32:
        return self.lease.table

    @property
    def num_on_device(self) -> int:
        """Number of blocks before the first one to load."""
        missing = self.lease.table == NO_SLOT
        return int(missing.argmax()) if missing.any() else len(missing)

    @property
    def num_blocks_needed(self) -> int:
        """Device slots still needed for all tokens of the chain."""
        lease = self.lease
        num_blocks = -(-lease.chain.num_tokens // lease.chain.namespace.block_tokens)
        to_load = 0 if self.is_loading else int(np.count_nonzero(lease.table == NO_SLOT))  # loads have slots
        return max(0, num_blocks - len(lease.table)) + to_load
