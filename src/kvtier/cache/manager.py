"""CacheManager: what a scheduler asks about cached KV. It decides with block numbers and moves nothing.

No torch, no I/O, no threads, no clock: `now` comes with the call. One request's life:

    match -> Hold --allocate, publish, extend ..--> finish | abort | preempt

Device tier only, for now.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ArgumentError, RangeError, StateError
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
    Tier,
    make_policy,
)
from kvtier.index.pool import I32
from kvtier.index.tokens import TokenIds

_KEEP = Retention()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the manager is made from; it is never changed."""

    num_blocks: int
    """Of the device tier."""
    prefix_caching: bool = True
    policy: str = "lru"
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

    __slots__ = ("copy", "lease", "num_cached_tokens", "source")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
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
        listener: Listener | None = None,
        ghost: GhostCache | None = None,
    ) -> None:
        self.namespace = namespace
        self.config = config
        self._device = Tier(0, BlockPool("device", config.num_blocks), lambda: make_policy(config.policy))
        self.tree = RadixTree(namespace, [self._device], enabled=config.prefix_caching, listener=listener, ghost=ghost)
        self._holds: set[Hold] = set()
        self._queried_tokens = self._hit_tokens = 0

    def match(self, chain: Chain, *, now: float = 0.0, retention: Retention = _KEEP) -> Hold:
        """Hold the longest cached prefix, at least one token short of all: the last must be computed for its logits."""
        if not chain.num_tokens:
            raise ArgumentError("a request needs at least one token")
        bare = (chain.num_tokens - 1) // self.namespace.block_tokens
        hold = Hold(self.tree.match(chain, now=now, max_blocks=bare, retention=retention))
        self._holds.add(hold)
        if self.config.prefix_caching:
            self._match_partly(hold, now)
        return hold

    def allocate(self, hold: Hold, num_tokens: int) -> Shortage | None:
        """Slots for the first `num_tokens` tokens, evicting what is cold; or nothing, and why.

        Where the block to copy from is in the way, it is given up: then `num_cached_tokens` is less than it was.
        """
        self._must_hold(hold)
        missing = hold.lease.num_missing(num_tokens)
        if not missing:
            return None
        slots = self.tree.allocate(hold.lease, missing)
        if isinstance(slots, Shortage) and hold.source is not None and hold.copy is None:
            self._let_source_go(hold)
            hold.num_cached_tokens = hold.lease.num_matched_tokens
            slots = self.tree.allocate(hold.lease, missing)
        if isinstance(slots, Shortage):
            return slots
        if hold.source is not None and hold.copy is None:
            block = hold.lease.num_matched
            num_reused = hold.num_cached_tokens - hold.lease.num_matched_tokens
            hold.copy = BlockCopy(int(hold.source.table[block]), int(hold.table[block]), num_reused)
        return None

    def scheduled(self, hold: Hold, *, now: float = 0.0) -> None:
        """The request is in a step: what it was given counts as used, once."""
        self._must_hold(hold)
        if not hold.lease.committed:
            self._queried_tokens += hold.chain.num_tokens
            self._hit_tokens += hold.num_cached_tokens
        self.tree.commit(hold.lease, now=now)

    def publish(self, hold: Hold, computed_tokens: int, *, now: float = 0.0) -> None:
        """So many tokens are computed: their full blocks can be matched by others."""
        self._must_hold(hold)
        self.tree.publish(hold.lease, computed_tokens, now=now)
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

    def explain(self, hold: Hold) -> Miss:
        """Why the match ended where it did."""
        return self.tree.explain(hold.lease)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Forget everything that is cached. Running requests keep what they hold."""
        self.tree.reset(namespace)
        self.namespace = self.tree.namespace

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
        self.tree.check([*(hold.lease for hold in self._holds), *sources])

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

    def _let_source_go(self, hold: Hold) -> None:
        if hold.source is not None:
            self.tree.release(hold.source, used=hold.lease.committed)
            hold.source = None

    def _end(self, hold: Hold, *, used: bool, now: float) -> None:
        self._must_hold(hold)
        self._holds.remove(hold)
        self._let_source_go(hold)
        self.tree.release(hold.lease, used=used, now=now)

    def _must_hold(self, hold: Hold) -> None:
        if hold not in self._holds:
            raise StateError("this hold has ended: a request finishes, aborts or is preempted once per match")
