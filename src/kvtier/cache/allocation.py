"""Allocation (the KV blocks of one request) and CacheStats (the statistics of the cache manager)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.cache.cost_model import LoadDecision
from kvtier.index import Chain, Lease
from kvtier.index.node import NO_SLOT
from kvtier.messages import I32


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Instruction to copy a device block before a step. The step uses the first `num_tokens` tokens of the copy."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. For a store, `num_used` counts the recorded blocks (see StoreIndex.num_known)."""

    name: str
    num_blocks: int
    """Capacity; 0 for a store."""
    num_used: int
    num_evictable: int
    hit_tokens: int
    """Number of prompt tokens whose KV was found in this tier."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Statistics of the manager since its start. `num_allocations` counts only allocations that have not ended."""

    num_allocations: int
    queried_tokens: int
    hit_tokens: int
    tiers: tuple[TierStats, ...]
    num_duplicates_evicted: int = 0
    """Number of blocks that an exclusive host tier (HostConfig.exclusive) evicted because the device had them too.
    Each of these evictions causes at most one additional save."""
    num_saved_late: int = 0
    """Number of blocks that were saved to the host because the device was about to evict them."""


@dataclass(slots=True, eq=False, repr=False)
class Allocation:
    """KV blocks of one request: matched blocks and slots for new blocks. Other packages may set only `tokens_from`."""

    lease: Lease
    is_loading: bool = field(init=False, default=False)
    """True while the allocation waits for loads. `allocate` sets it, and CacheManager.is_ready clears it."""
    loads: tuple[int, ...] = field(init=False, default=())
    """Ids of the loads in flight that a step can wait for layer by layer. Empty if a load of another
    allocation transfers some of the missing blocks."""
    tokens_from: dict[str, int] = field(init=False, default_factory=dict)
    """Tier name -> number of cached tokens that were found in the tier."""
    num_cached_tokens: int = field(init=False)
    """Number of tokens that need not be computed, including the tokens that `copy` copies. CacheManager.allocate lowers
    the number if it cannot reserve a slot for the copy."""
    source: Lease | None = field(init=False, default=None)
    """Lease on the source block of `copy`. It ends when the first step has run, when the allocation ends, or when
    `allocate` finds no slot for the copy."""
    copy: BlockCopy | None = field(init=False, default=None)
    decision: LoadDecision | None = field(init=False, default=None)
    """Decision to load or to compute matched blocks that are not on the device. None if no decision was made."""

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
        """Number of leading blocks of `table` that have a device slot."""
        missing = self.lease.table == NO_SLOT
        return int(missing.argmax()) if missing.any() else len(missing)

    @property
    def num_blocks_needed(self) -> int:
        """Number of device slots that the tokens of the chain still need."""
        lease = self.lease
        num_blocks = -(-lease.chain.num_tokens // lease.chain.namespace.block_tokens)
        # Slots for blocks that are being loaded are already reserved. The table contains NO_SLOT for them until the
        # load ends.
        to_load = 0 if self.is_loading else int(np.count_nonzero(lease.table == NO_SLOT))
        return max(0, num_blocks - len(lease.table)) + to_load
