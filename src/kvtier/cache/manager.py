"""CacheManager: what a scheduler asks about cached KV. It decides with block numbers and moves nothing.

No torch, no I/O, no threads, no clock: `now` comes with the call. One request's life:

    match -> Hold --allocate, is_ready, publish, extend ..--> finish | abort | preempt

With a host tier, `plan` says what to move and `apply` takes what became of it: nothing is readable before its copy is
reported done, nothing is reused before its reader is, and a copy that failed is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.cache.host import HostConfig, HostCopies
from kvtier.cache.moves import Moves
from kvtier.cache.plan import Plan, Report
from kvtier.errors import ArgumentError, LoadError, RangeError, StateError
from kvtier.index import (
    BlockPool,
    Chain,
    GhostCache,
    Lease,
    Listener,
    Miss,
    Namespace,
    RadixTree,
    Retention,
    Shortage,
    Slots,
    Tier,
    make_policy,
)
from kvtier.index.node import NO_SLOT
from kvtier.index.pool import I32
from kvtier.index.tokens import TokenIds
from kvtier.index.transfers import block_slots

_KEEP = Retention()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the manager is made from; it is never changed."""

    num_blocks: int
    """Of the device tier."""
    prefix_caching: bool = True
    policy: str = "lru"
    host: HostConfig | None = None
    """A second tier in host memory."""
    partial_scan: int = 8
    """How many cached blocks are looked at for one that begins as the first block that was not found does."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a cache needs at least one block, got num_blocks={self.num_blocks}")
        if self.partial_scan < 0:
            raise RangeError(f"partial_scan counts blocks, got {self.partial_scan}")


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block on the device before the step computes: its first `num_tokens` tokens are wanted in the target."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The manager in numbers, since it was made."""

    num_blocks: int
    num_free: int
    num_evictable: int
    num_holds: int
    queried_tokens: int
    hit_tokens: int


class Hold:
    """A request's cached KV: a lease on what was found, and slots of its own. The manager changes it; callers read.

    `num_cached_tokens` tokens need not be computed, once `copy` (if there is one) is made.
    """

    __slots__ = ("copy", "is_loading", "lease", "num_cached_tokens", "num_loaded_tokens", "source")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_loading = False
        """Whether blocks of it are on their way to the device; see CacheManager.is_ready."""
        self.num_loaded_tokens = 0
        """Of the cached ones, those that come from a lower tier."""
        self.num_cached_tokens = lease.num_matched_tokens
        self.source: Lease | None = None
        """Holds the block that the beginning of the next one is copied from, until that is computed."""
        self.copy: BlockCopy | None = None

    @property
    def chain(self) -> Chain:
        """The request's tokens."""
        return self.lease.chain

    @property
    def table(self) -> I32:
        """The device slot of each block, in order."""
        return self.lease.table


class CacheManager:
    """Finds, allocates, publishes and lets go of the device's blocks. For one thread."""

    def __init__(
        self,
        namespace: Namespace,
        config: CacheConfig,
        *,
        num_ranks: int = 1,
        listener: Listener | None = None,
        ghost: GhostCache | None = None,
    ) -> None:
        self.namespace = namespace
        self.config = config
        self._device = Tier(0, BlockPool("device", config.num_blocks), lambda: make_policy(config.policy))
        tiers = [self._device]
        host = config.host if config.prefix_caching else None
        if host is not None:
            tiers.append(Tier(1, BlockPool("host", host.num_blocks), lambda: make_policy(host.policy)))
        self.tree = RadixTree(namespace, tiers, enabled=config.prefix_caching, listener=listener, ghost=ghost)
        self.moves = Moves(self.tree, num_ranks)
        self._host = HostCopies(self.tree, self._device, tiers[1], host, self.moves) if host is not None else None
        self._holds: set[Hold] = set()
        self._pins: set[Lease] = set()
        self._queried_tokens = self._hit_tokens = 0

    def match(self, chain: Chain, *, now: float = 0.0, retention: Retention = _KEEP, may_load: bool = True) -> Hold:
        """Hold the longest cached prefix, at least one token short of all: the last must be computed for its logits.

        Without `may_load` only what is on the device counts.
        """
        if not chain.num_tokens:
            raise ArgumentError("a request needs at least one token")
        bare = (chain.num_tokens - 1) // self.namespace.block_tokens
        hold = Hold(self.tree.match(chain, now=now, max_blocks=bare, retention=retention))
        if self._host is not None and (missing := self._host.num_to_load(hold.lease)):
            hold.num_loaded_tokens = missing * self.namespace.block_tokens
            if not may_load:
                self.tree.release(hold.lease, used=False)
                on_device = _leading(hold.lease.table)
                hold = Hold(self.tree.match(chain, now=now, max_blocks=on_device, retention=retention))
        self._holds.add(hold)
        if self.config.prefix_caching:
            self._match_partly(hold, now)
        return hold

    def allocate(self, hold: Hold, num_tokens: int) -> Shortage | None:
        """Slots for the first `num_tokens` tokens, evicting what is cold; or nothing, and why.

        Where the block to copy from is in the way, it is given up: then `num_cached_tokens` is less than it was.
        """
        self._must_hold(hold)
        shortage = self._reserve(hold, num_tokens)
        if shortage is not None and hold.source is not None and hold.copy is None:
            self._let_source_go(hold)
            hold.num_cached_tokens = hold.lease.num_matched_tokens
            shortage = self._reserve(hold, num_tokens)
        if shortage is not None:
            return shortage
        if hold.source is not None and hold.copy is None and len(hold.table) > hold.lease.num_matched:
            block = hold.lease.num_matched
            num_reused = hold.num_cached_tokens - hold.lease.num_matched_tokens
            hold.copy = BlockCopy(int(hold.source.table[block]), int(hold.table[block]), num_reused)
        return None

    def is_ready(self, hold: Hold) -> bool:
        """Whether everything the hold found is on the device. A load that failed raises LoadError: abort the hold."""
        self._must_hold(hold)
        if not hold.is_loading or self._host is None:
            return True
        if not self._host.is_loaded(hold.lease):
            if self._host.has_failed(hold.lease):
                raise LoadError("blocks that were to be loaded are not there: compute them instead")
            return False
        hold.is_loading = False
        lease = hold.lease
        found = block_slots(lease, self._device)[: lease.num_matched]
        lease.table = np.concatenate((found, lease.table[lease.num_matched :]))
        return True

    def plan(self, *, now: float = 0.0) -> Plan:
        """What the workers are to move now: the loads that were asked for, and some saves."""
        if self._host is not None:
            self._host.plan_saves(now)
        return self.moves.plan()

    @property
    def wants_to_save(self) -> bool:
        """Whether another plan would save something."""
        return self._host is not None and self._host.wants_to_save

    def apply(self, report: Report) -> None:
        """What became of it, from one rank."""
        self.moves.apply(report)

    def scheduled(self, hold: Hold, *, now: float = 0.0) -> None:
        """The request is in a step: what it was given counts as used, once."""
        self._must_hold(hold)
        if not hold.lease.committed:
            self._queried_tokens += hold.chain.num_tokens
            self._hit_tokens += hold.num_cached_tokens
            if self._host is not None:
                self._host.used_again(hold.lease)
        self.tree.commit(hold.lease, now=now)

    def publish(self, hold: Hold, computed_tokens: int, *, now: float = 0.0) -> None:
        """So many tokens are computed: their full blocks can be matched by others."""
        self._must_hold(hold)
        first = hold.lease.num_blocks
        self.tree.publish(hold.lease, computed_tokens, now=now)
        if self._host is not None:
            self._host.published(hold.chain, first, hold.lease.num_blocks)
        if hold.source is not None and computed_tokens > hold.num_cached_tokens:
            self._let_source_go(hold)

    def extend(self, hold: Hold, tokens: TokenIds) -> None:
        """Tokens were generated. Their KV is computed when they are fed back."""
        self._must_hold(hold)
        hold.chain.append(tokens)

    def finish(self, hold: Hold, *, now: float = 0.0) -> None:
        """The request has all it wanted; what it published stays."""
        self._end(hold, used=True, now=now)

    def preempt(self, hold: Hold, *, now: float = 0.0) -> None:
        """Its slots are needed. What it published stays until evicted, so to resume is to match again."""
        self._end(hold, used=True, now=now)

    def abort(self, hold: Hold, *, now: float = 0.0) -> None:
        """It was cancelled, or could not be scheduled: as if it had not been, unless a step ran."""
        self._end(hold, used=hold.lease.committed, now=now)

    def pin(self, chain: Chain, *, now: float = 0.0) -> Lease:
        """Keep what is cached of a prompt until it is unpinned."""
        pin = self.tree.pin(chain, now=now)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Lease) -> None:
        """It may be evicted again."""
        self._pins.remove(pin)
        self.tree.unpin(pin)

    def explain(self, hold: Hold) -> Miss:
        """Why the match ended where it did."""
        return self.tree.explain(hold.lease)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Forget everything that is cached. Running requests keep what they hold."""
        self.tree.reset(namespace)
        self.namespace = self.tree.namespace
        self.moves.reset()
        if self._host is not None:
            self._host.forget()

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be."""
        return self._device.pool.num_free + self._device.num_evictable

    @property
    def stats(self) -> CacheStats:
        """The numbers of now."""
        pool = self._device.pool
        return CacheStats(
            pool.num_slots,
            pool.num_free,
            self._device.num_evictable,
            len(self._holds),
            self._queried_tokens,
            self._hit_tokens,
        )

    def check(self) -> None:
        """Raise unless every invariant of the index holds for exactly these holds."""
        sources = [hold.source for hold in self._holds if hold.source is not None]
        self.tree.check([*(hold.lease for hold in self._holds), *sources, *self._pins, *self.moves.leases])

    def _match_partly(self, hold: Hold, now: float) -> None:
        """Find a cached block that begins as the first one that was not found does: as much of it is copied.

        prompt   |b0|b1|t t t t v v|..      the last token of the prompt must be computed in any case
        cached   |b0|b1|t t t t u u|        4 tokens are copied
        """
        wanted = hold.chain.num_tokens - hold.num_cached_tokens - 1
        if wanted < 1:
            return
        found = self.tree.match_within(hold.lease, wanted, max_children=self.config.partial_scan, now=now)
        if found is not None:
            hold.source = found.lease
            hold.num_cached_tokens += found.num_tokens

    def _reserve(self, hold: Hold, num_tokens: int) -> Shortage | None:
        """Slots for tokens that have none, and for blocks that come from the host, which then are on their way."""
        lease = hold.lease
        num_new = lease.num_missing(num_tokens)
        num_to_load = self._host.num_to_load(lease) if self._host is not None and not lease.committed else 0
        if not num_new + num_to_load:
            return None
        slots = self.tree.reserve(self._device, num_new + num_to_load, lease.chain.salt)
        if isinstance(slots, Shortage):
            return slots
        if num_to_load and self._host is not None:
            self._host.load(lease, Slots(slots.tier, slots.ids[:num_to_load]))
        hold.is_loading = hold.is_loading or (self._host is not None and not self._host.is_loaded(lease))
        lease.table = np.concatenate((lease.table, slots.ids[num_to_load:]))
        return None

    def _let_source_go(self, hold: Hold) -> None:
        if hold.source is not None:
            self.tree.release(hold.source, used=False)
            hold.source = None

    def _end(self, hold: Hold, *, used: bool, now: float) -> None:
        self._must_hold(hold)
        self._holds.remove(hold)
        self._let_source_go(hold)
        if used and self._host is not None:
            self._host.finished(hold.lease)
        self.tree.release(hold.lease, used=used, now=now)

    def _must_hold(self, hold: Hold) -> None:
        if hold not in self._holds:
            raise StateError("this hold has ended: a request finishes, aborts or is preempted once per match")


def _leading(table: I32) -> int:
    """How many slots there are before the first that is missing."""
    missing = np.flatnonzero(table == NO_SLOT)
    return int(missing[0]) if len(missing) else len(table)
