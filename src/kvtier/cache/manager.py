"""CacheManager: what a scheduler asks about cached KV. It decides with block numbers and moves nothing.

No torch, no I/O, no threads, no clock: `now` comes with the call. One request's life:

    prefetch -> Fetch ─┐
               match -> Hold --allocate, is_ready, publish, extend ..--> finish | abort | preempt

With lower tiers, `plan` says what to move and `apply` takes what became of it: nothing is readable before its copy is
reported done, nothing is reused before its reader is, and a copy that failed is a miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvtier.cache.allocation import BlockCopy, CacheStats, Hold, TierStats
from kvtier.cache.config import CacheConfig
from kvtier.cache.cost_model import Speeds
from kvtier.cache.in_flight import Mask, Move, Moves
from kvtier.cache.prefetch import Fetch, Fetches, origins
from kvtier.cache.writeback import HostCopies, StoreCopies
from kvtier.errors import ArgumentError, LoadError, StateError
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
from kvtier.index.chain import TokenIds
from kvtier.index.node import ABSENT, WRITING
from kvtier.index.transitions import block_slots
from kvtier.messages import Plan, Purpose, Report

_KEEP = Retention()


class CacheManager:
    """Finds, allocates, publishes and lets go of the device's blocks. For one thread."""

    def __init__(
        self,
        namespace: Namespace,
        config: CacheConfig,
        *,
        num_ranks: int = 1,
        num_host_ready: int | None = None,
        listener: Listener | None = None,
        ghost: GhostCache | None = None,
    ) -> None:
        """`num_host_ready` host slots can be used at once, the others when reports say so; None: all."""
        self.config = config
        self._device = Tier(0, BlockPool("device", config.num_blocks), lambda: make_policy(config.policy))
        tiers, host = [self._device], config.host if config.prefix_caching else None
        if host is not None:
            num_ready = host.num_blocks if num_host_ready is None else num_host_ready
            tiers.append(Tier(1, BlockPool("host", num_ready), lambda: make_policy(host.policy)))
        keyed = host is not None and bool(config.stores)
        self.tree = RadixTree(
            namespace, tiers, enabled=config.prefix_caching, with_keys=keyed, listener=listener, ghost=ghost
        )
        self.moves = Moves(self.tree, num_ranks, self._ended)
        self.speeds = Speeds()
        self.decisions = {"load": 0, "recompute": 0}
        """How often blocks below the device were loaded, and computed again instead."""
        self.observer: Callable[[Move], None] | None = None
        """Told of every move that is over."""
        self.host: HostCopies | None = None
        self.stores: dict[str, StoreCopies] = {}
        if host is not None:
            most = max(1024, config.num_blocks + host.num_blocks)  # jobs: prompts that can be in memory
            self.host = HostCopies(self.tree, self._device, tiers[1], host, self.moves, most)
            self.stores = {
                each.name: StoreCopies(self.tree, tiers[1], each, self.moves, most) for each in config.stores
            }
        self.queues = tuple(copies.queue for copies in (self.host, *self.stores.values()) if copies is not None)
        """What is to be saved, to the host and to each store."""
        stores = list(self.stores.values())
        speeds = self.speeds if config.recompute else None
        self._fetches = Fetches(self.tree, tiers[-1], stores, self.moves, speeds) if stores else None
        self._holds: set[Hold] = set()
        self._pins: set[Lease] = set()
        self._queried_tokens = 0
        self._hit_tokens = dict.fromkeys((*(tier.name for tier in tiers), *self.stores), 0)

    # ---- a request's life ------------------------------------------------------------------------------------------

    def prefetch(self, chain: Chain, *, now: float = 0.0, retention: Retention = _KEEP) -> Fetch | None:
        """Begin to bring what stores have of a prompt to the host; None if there is no store.

        A request waits until `is_fetched`, then gives the fetch to `match`; or it goes, and `end_fetch` is called.
        """
        if self._fetches is None or not chain.num_tokens:
            return None
        return self._fetches.start(chain, self._most_blocks(chain), retention, now)

    def is_fetched(self, fetch: Fetch, *, now: float = 0.0) -> bool:
        """Whether its request need not wait for it any more: it has arrived, or patience is over."""
        assert self._fetches is not None
        return self._fetches.is_over(fetch, now)

    def fetch_again(self, fetch: Fetch, hold: Hold, *, now: float = 0.0) -> bool:
        """Whether its request, whose turn has come, should wait once more: what was in memory is gone to a store."""
        assert self._fetches is not None
        return self._fetches.again(fetch, hold.lease.num_matched, now, hold.lease.retention)

    def end_fetch(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        assert self._fetches is not None
        self._fetches.end(fetch)

    def match(
        self,
        chain: Chain,
        *,
        now: float = 0.0,
        retention: Retention = _KEEP,
        may_load: bool = True,
        fetch: Fetch | None = None,
    ) -> Hold:
        """Hold the longest cached prefix, at least one token short of all: the last must be computed for its logits.

        Without `may_load` only what is on the device counts. `fetch` is what was brought for it, which stays open.
        """
        if not chain.num_tokens:
            raise ArgumentError("a request needs at least one token")
        hold = Hold(self.tree.match(chain, now=now, max_blocks=self._most_blocks(chain), retention=retention))
        if self.host is not None and (missing := self.host.device_states(hold.lease).count(ABSENT)):
            hold = self._match_below(hold, missing, may_load, fetch, now)
        self._holds.add(hold)
        if self.config.prefix_caching:
            self._match_partly(hold, now)
            hold.tokens_from["device"] = hold.num_cached_tokens - sum(hold.tokens_from.values())
        return hold

    def allocate(self, hold: Hold, num_tokens: int) -> Shortage | None:
        """Slots for the first `num_tokens` tokens, evicting what is cold; or nothing, and why.

        Where the block to copy from is in the way, it is given up: then `num_cached_tokens` is less than it was.
        """
        self._must_hold(hold)
        if hold.lease.committed and not hold.lease.num_missing(num_tokens):
            return None
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
        if not hold.is_loading or self.host is None:
            return True
        states = self.host.device_states(hold.lease)
        if ABSENT in states:
            raise LoadError("blocks that were to be loaded are not there: compute them instead")
        if WRITING in states:
            return False
        hold.is_loading, hold.loads = False, ()
        self._fill_table(hold.lease)
        return True

    def overlap(self, hold: Hold) -> tuple[int, ...]:
        """The loads that a step of this hold must wait for layer by layer, if it may start before they are done.

        Empty where others bring some of the blocks, or where nothing is on its way. The step's results count only if
        `is_ready` says so afterwards.
        """
        self._must_hold(hold)
        if self.host is None or not hold.loads or WRITING not in self.host.device_states(hold.lease):
            return ()
        self._fill_table(hold.lease)
        return hold.loads

    def scheduled(self, hold: Hold, *, now: float = 0.0) -> None:
        """The request is in a step: what it was given counts as used, once."""
        self._must_hold(hold)
        if hold.lease.committed:
            return
        self._queried_tokens += hold.chain.num_tokens
        for tier, num_tokens in hold.tokens_from.items():
            self._hit_tokens[tier] += num_tokens
        if hold.decision is not None:
            self.decisions["load" if hold.decision.load else "recompute"] += 1
        for queue in self.queues:
            queue.used_again(hold.lease)
        self.tree.commit(hold.lease, now=now)

    def publish(self, hold: Hold, computed_tokens: int, *, now: float = 0.0) -> None:
        """So many tokens are computed: their full blocks can be matched by others."""
        self._must_hold(hold)
        first = hold.lease.num_blocks
        if computed_tokens >= (first + 1) * self.namespace.block_tokens:  # most tokens fill no block
            self.tree.publish(hold.lease, computed_tokens, now=now)
            if self.host is not None:
                self.host.queue.came(hold.lease, first, hold.lease.num_blocks)
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

    def pin(self, chain: Chain, *, now: float = 0.0) -> Lease:
        """Keep what is cached of a prompt until it is unpinned."""
        pin = self.tree.pin(chain, now=now)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Lease) -> None:
        """It may be evicted again."""
        self._pins.remove(pin)
        self.tree.unpin(pin)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Forget everything that is in memory. Running requests keep what they hold; stores keep what they have."""
        self.tree.reset(namespace)
        self.moves.reset()
        if self._fetches is not None:
            self._fetches.reset()
        for queue in self.queues:
            queue.clear()

    # ---- plans and reports -----------------------------------------------------------------------------------------

    def plan(self, *, now: float = 0.0) -> Plan:
        """What the workers are to do now: what was asked for, and some saves. Evicts ahead where that is wanted."""
        if self._fetches is not None:
            self._fetches.advance(now)
        for queue in self.queues:
            queue.plan(now)
        if self.host is not None and self.config.host is not None:
            self._evict_ahead(self.host.host, self.config.host.free_share)
        self._evict_ahead(self._device, self.config.free_share)
        return self.moves.plan()

    @property
    def has_plans(self) -> bool:
        """Whether a plan now would have something to do, or reports are still to come."""
        return self.moves.in_flight or self.moves.has_plan or any(queue.is_due for queue in self.queues)

    def apply(self, report: Report) -> None:
        """What became of it, from one rank."""
        self.moves.apply(report)
        for presence in report.presences:
            self.stores[presence.store].learn(report.rank, presence)
            if self.moves.answered(report.rank, presence.probe_id) and self._fetches is not None:
                self._fetches.answered(presence)
        if report.damaged and self.host is not None:
            self.host.damaged(np.frombuffer(report.damaged, "<i4"))
        for size in report.sizes:
            if self.host is not None and size.tier == "host":
                self.host.grew(report.rank, size.num_slots)

    def computed(self, num_tokens: int, attended_tokens: float, seconds: float) -> None:
        """A step of so many tokens took so long: what computing costs, for loading or recomputing."""
        self.speeds.computed(num_tokens, attended_tokens, seconds)

    # ---- looking ---------------------------------------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        """Whose KV it is."""
        return self.tree.namespace

    @property
    def num_blocks(self) -> int:
        """Of the device: at first those of the configuration."""
        return self._device.pool.num_slots

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be."""
        return self._device.pool.num_free + self._device.num_evictable

    def lacks(self, num_blocks: int, salt: bytes | None = None) -> Shortage | None:
        """Why so many more blocks could not be had, with `salt` within its tenant's quota; None if they could."""
        if salt is not None:
            return self._device.quota_shortage(salt, num_blocks)
        if num_blocks <= self.num_available:
            return None
        return Shortage(self._device.name, num_blocks, self._device.pool.num_free, self._device.num_evictable)

    @property
    def stats(self) -> CacheStats:
        """The numbers of now."""
        pool, hits = self._device.pool, self._hit_tokens
        tiers = [
            TierStats(tier.name, tier.pool.num_slots, tier.pool.num_used, tier.num_evictable, hits[tier.name])
            for tier in self.tree.tiers
        ]
        tiers += [TierStats(name, 0, store.num_known, 0, hits[name]) for name, store in self.stores.items()]
        return CacheStats(
            pool.num_slots,
            pool.num_free,
            self._device.num_evictable,
            len(self._holds),
            self._queried_tokens,
            sum(hits.values()),
            tuple(tiers),
        )

    @property
    def leases(self) -> list[Lease]:
        """All that are open."""
        sources = [hold.source for hold in self._holds if hold.source is not None]
        fetched = self._fetches.leases if self._fetches is not None else []
        return [*(hold.lease for hold in self._holds), *sources, *self._pins, *self.moves.leases, *fetched]

    def check(self) -> None:
        """Raise unless every invariant of the index holds for exactly these holds."""
        self.tree.check(self.leases)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _most_blocks(self, chain: Chain) -> int:
        """Full blocks that may be cached of a prompt: its last token is computed in any case."""
        return (chain.num_tokens - 1) // self.namespace.block_tokens

    def _match_below(self, hold: Hold, missing: int, may_load: bool, fetch: Fetch | None, now: float) -> Hold:
        """Some of what was found is not on the device: load it, or go without it."""
        assert self.host is not None
        block_tokens, on_device = self.namespace.block_tokens, hold.num_on_device
        decision = None
        if may_load and self.config.recompute:
            ways = {(Purpose.LOAD, ""): missing + self.moves.num_blocks(Purpose.LOAD)}
            first, stop = on_device * block_tokens, hold.lease.num_matched_tokens
            decision = self.speeds.decide(ways, first, stop - first)
        if may_load and (decision is None or decision.load):
            hold.tokens_from = origins(fetch, missing, block_tokens)
        else:
            self.tree.release(hold.lease, used=False)
            lease = self.tree.match(hold.chain, now=now, max_blocks=on_device, retention=hold.lease.retention)
            hold = Hold(lease)
        hold.decision = decision or (fetch.decision if fetch is not None else None)
        return hold

    def _fill_table(self, lease: Lease) -> None:
        """The device slots of what was found, there or on its way."""
        found = block_slots(lease, self._device, 0, lease.num_matched)
        lease.table = np.concatenate((found, lease.table[lease.num_matched :]))

    def _evict_ahead(self, tier: Tier, free_share: float) -> None:
        wanted = math.ceil(free_share * tier.pool.num_slots) - tier.pool.num_free if free_share else 0
        if wanted > 0:
            self.tree.evict(tier, min(wanted, tier.num_evictable))

    def _ended(self, move: Move, there: Mask) -> None:
        """A move is over: learn its speed, and go on with its blocks."""
        purpose, transfer = move.transfer.purpose, move.transfer
        if self.observer is not None:
            self.observer(move)
        if purpose is Purpose.SAVE:
            for store in self.stores.values() if 1 in there else ():
                store.came(move.lease, move.first, move.stop)
            return
        if purpose is Purpose.STORE:
            self.stores[transfer.target].ended(move, there)
            return
        if 0 not in there:  # what a request waits for: how long that takes is asked again
            self.speeds.moved((purpose, transfer.store), len(there), move.seconds)
        if purpose is Purpose.FETCH and self._fetches is not None:
            self._fetches.ended(move, there)

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
        num_new, states = lease.num_missing(num_tokens), b""
        if self.host is not None and not hold.is_loading and not lease.committed:
            states = self.host.device_states(lease)
        num_to_load, is_waiting = states.count(ABSENT), WRITING in states
        if num_new or num_to_load:
            slots = self.tree.reserve(self._device, num_new + num_to_load, lease.chain.salt)
            if isinstance(slots, Shortage):
                return slots
            if num_to_load and self.host is not None:
                ids = self.host.load(lease, Slots(slots.tier, slots.ids[:num_to_load]))
                hold.loads = () if is_waiting else tuple(ids)
            own = slots.ids[num_to_load:]
            lease.table = np.concatenate((lease.table, own)) if len(lease.table) else own
        hold.is_loading = hold.is_loading or is_waiting or num_to_load > 0
        return None

    def _let_source_go(self, hold: Hold) -> None:
        if hold.source is not None:
            self.tree.release(hold.source, used=False)
            hold.source = None

    def _end(self, hold: Hold, *, used: bool, now: float) -> None:
        self._must_hold(hold)
        self._holds.remove(hold)
        self._let_source_go(hold)
        for queue in self.queues if used else ():
            queue.finished(hold.lease)
        self.tree.release(hold.lease, used=used, now=now)

    def _must_hold(self, hold: Hold) -> None:
        if hold not in self._holds:
            raise StateError("this hold has ended: a request finishes, aborts or is preempted once per match")
