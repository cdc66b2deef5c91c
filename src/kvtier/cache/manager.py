"""CacheManager: what a scheduler asks about cached KV. It decides with block numbers and moves nothing.

No torch, no I/O, no threads, no clock: `now` comes with the call. One request's life:

    prefetch -> Prefetch ─┐
                  match -> Allocation --allocate, is_ready, publish, extend ..--> finish | abort | preempt

With lower tiers, `plan` says what to move and `apply` takes what became of it: nothing is readable before its copy is
reported done, nothing is reused before its reader is, and a copy that failed is a miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvtier.cache.allocation import Allocation, BlockCopy, CacheStats, TierStats
from kvtier.cache.config import CacheConfig
from kvtier.cache.cost_model import CostModel
from kvtier.cache.in_flight import Mask, PendingTransfer, TransferTracker
from kvtier.cache.prefetch import Prefetch, Prefetcher, origins
from kvtier.cache.writeback import HostWriteback, StoreWriteback
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
from kvtier.index.check import check_tree
from kvtier.index.node import ABSENT, WRITING
from kvtier.index.transitions import block_slots
from kvtier.messages import Plan, Report, Route

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
        self.transfers = TransferTracker(self.tree, num_ranks, self._ended)
        self.cost_model = CostModel()
        self.decisions = {"load": 0, "recompute": 0}
        """How often blocks below the device were loaded, and computed again instead."""
        self.observer: Callable[[PendingTransfer], None] | None = None
        """Told of every move that is over."""
        self.host: HostWriteback | None = None
        self.stores: dict[str, StoreWriteback] = {}
        if host is not None:
            most = max(1024, config.num_blocks + host.num_blocks)  # jobs: prompts that can be in memory
            self.host = HostWriteback(self.tree, self._device, tiers[1], host, self.transfers, most)
            self.stores = {
                each.name: StoreWriteback(self.tree, tiers[1], each, self.transfers, most) for each in config.stores
            }
        self.queues = tuple(copies.queue for copies in (self.host, *self.stores.values()) if copies is not None)
        """What is to be saved, to the host and to each store."""
        stores = list(self.stores.values())
        speeds = self.cost_model if config.recompute else None
        self._prefetcher = Prefetcher(self.tree, tiers[-1], stores, self.transfers, speeds) if stores else None
        self._allocations: set[Allocation] = set()
        self._pins: set[Lease] = set()
        self._queried_tokens = 0
        self._hit_tokens = dict.fromkeys((*(tier.name for tier in tiers), *self.stores), 0)

    # ---- a request's life ------------------------------------------------------------------------------------------

    def prefetch(self, chain: Chain, *, now: float = 0.0, retention: Retention = _KEEP) -> Prefetch | None:
        """Begin to bring what stores have of a prompt to the host; None if there is no store.

        A request waits until `is_prefetched`, then gives the fetch to `match`; or it goes, and `end_prefetch` is
        called.
        """
        if self._prefetcher is None or not chain.num_tokens:
            return None
        return self._prefetcher.start(chain, self._most_blocks(chain), retention, now)

    def is_prefetched(self, prefetch: Prefetch, *, now: float = 0.0) -> bool:
        """Whether its request need not wait for it any more: it has arrived, or patience is over."""
        assert self._prefetcher is not None
        return self._prefetcher.is_over(prefetch, now)

    def retry_prefetch(self, prefetch: Prefetch, allocation: Allocation, *, now: float = 0.0) -> bool:
        """Whether its request, whose turn has come, should wait once more: what was in memory is gone to a store."""
        assert self._prefetcher is not None
        return self._prefetcher.retry(prefetch, allocation.lease.num_matched, now, allocation.lease.retention)

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Nobody waits for it any more."""
        assert self._prefetcher is not None
        self._prefetcher.end(prefetch)

    def match(
        self,
        chain: Chain,
        *,
        now: float = 0.0,
        retention: Retention = _KEEP,
        may_load: bool = True,
        prefetch: Prefetch | None = None,
    ) -> Allocation:
        """Hold the longest cached prefix, at least one token short of all: the last must be computed for its logits.

        Without `may_load` only what is on the device counts. `fetch` is what was brought for it, which stays open.
        """
        if not chain.num_tokens:
            raise ArgumentError("a request needs at least one token")
        allocation = Allocation(
            self.tree.match(chain, now=now, max_blocks=self._most_blocks(chain), retention=retention)
        )
        if self.host is not None and (missing := self.host.device_states(allocation.lease).count(ABSENT)):
            allocation = self._match_below(allocation, missing, may_load, prefetch, now)
        self._allocations.add(allocation)
        if self.config.prefix_caching:
            self._match_partly(allocation, now)
            allocation.tokens_from["device"] = allocation.num_cached_tokens - sum(allocation.tokens_from.values())
        return allocation

    def allocate(self, allocation: Allocation, num_tokens: int) -> Shortage | None:
        """Slots for the first `num_tokens` tokens, evicting what is cold; or nothing, and why.

        Where the block to copy from is in the way, it is given up: then `num_cached_tokens` is less than it was.
        """
        self._must_hold(allocation)
        if allocation.lease.committed and not allocation.lease.num_missing(num_tokens):
            return None
        shortage = self._reserve(allocation, num_tokens)
        if shortage is not None and allocation.source is not None and allocation.copy is None:
            self._let_source_go(allocation)
            allocation.num_cached_tokens = allocation.lease.num_matched_tokens
            shortage = self._reserve(allocation, num_tokens)
        if shortage is not None:
            return shortage
        if (
            allocation.source is not None
            and allocation.copy is None
            and len(allocation.table) > allocation.lease.num_matched
        ):
            block = allocation.lease.num_matched
            num_reused = allocation.num_cached_tokens - allocation.lease.num_matched_tokens
            allocation.copy = BlockCopy(int(allocation.source.table[block]), int(allocation.table[block]), num_reused)
        return None

    def is_ready(self, allocation: Allocation) -> bool:
        """Whether everything the hold found is on the device. A load that failed raises LoadError: abort the hold."""
        self._must_hold(allocation)
        if not allocation.is_loading or self.host is None:
            return True
        states = self.host.device_states(allocation.lease)
        if ABSENT in states:
            raise LoadError("blocks that were to be loaded are not there: compute them instead")
        if WRITING in states:
            return False
        allocation.is_loading, allocation.loads = False, ()
        self._fill_table(allocation.lease)
        return True

    def overlap(self, allocation: Allocation) -> tuple[int, ...]:
        """The loads that a step of this hold must wait for layer by layer, if it may start before they are done.

        Empty where others bring some of the blocks, or where nothing is on its way. The step's results count only if
        `is_ready` says so afterwards.
        """
        self._must_hold(allocation)
        if self.host is None or not allocation.loads or WRITING not in self.host.device_states(allocation.lease):
            return ()
        self._fill_table(allocation.lease)
        return allocation.loads

    def on_scheduled(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """The request is in a step: what it was given counts as used, once."""
        self._must_hold(allocation)
        if allocation.lease.committed:
            return
        self._queried_tokens += allocation.chain.num_tokens
        for tier, num_tokens in allocation.tokens_from.items():
            self._hit_tokens[tier] += num_tokens
        if allocation.decision is not None:
            self.decisions["load" if allocation.decision.load else "recompute"] += 1
        for queue in self.queues:
            queue.on_reuse(allocation.lease)
        self.tree.commit(allocation.lease, now=now)

    def publish(self, allocation: Allocation, computed_tokens: int, *, now: float = 0.0) -> None:
        """So many tokens are computed: their full blocks can be matched by others."""
        self._must_hold(allocation)
        first = allocation.lease.num_blocks
        if computed_tokens >= (first + 1) * self.namespace.block_tokens:  # most tokens fill no block
            self.tree.publish(allocation.lease, computed_tokens, now=now)
            if self.host is not None:
                self.host.queue.on_blocks_ready(allocation.lease, first, allocation.lease.num_blocks)
        if allocation.source is not None and computed_tokens > allocation.num_cached_tokens:
            self._let_source_go(allocation)

    def extend(self, allocation: Allocation, tokens: TokenIds) -> None:
        """Tokens were generated. Their KV is computed when they are fed back."""
        self._must_hold(allocation)
        allocation.chain.append(tokens)

    def finish(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """The request has all it wanted; what it published stays."""
        self._end(allocation, used=True, now=now)

    def preempt(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """Its slots are needed. What it published stays until evicted, so to resume is to match again."""
        self._end(allocation, used=True, now=now)

    def abort(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """It was cancelled, or could not be scheduled: as if it had not been, unless a step ran."""
        self._end(allocation, used=allocation.lease.committed, now=now)

    def explain(self, allocation: Allocation) -> Miss:
        """Why the match ended where it did."""
        return self.tree.explain(allocation.lease)

    def pin(self, chain: Chain, *, now: float = 0.0) -> Lease:
        """Keep what is cached of a prompt until it is unpinned."""
        pin = self.tree.match(chain, now=now)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Lease) -> None:
        """It may be evicted again."""
        self._pins.remove(pin)
        self.tree.release(pin, used=False)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Forget everything that is in memory. Running requests keep what they hold; stores keep what they have."""
        self.tree.reset(namespace)
        self.transfers.reset()
        if self._prefetcher is not None:
            self._prefetcher.reset()
        for queue in self.queues:
            queue.clear()

    # ---- plans and reports -----------------------------------------------------------------------------------------

    def plan(self, *, now: float = 0.0) -> Plan:
        """What the workers are to do now: what was asked for, and some saves. Evicts ahead where that is wanted."""
        if self._prefetcher is not None:
            self._prefetcher.advance(now)
        for queue in self.queues:
            queue.plan(now)
        if self.host is not None and self.config.host is not None:
            self._evict_ahead(self.host.host, self.config.host.free_share)
        self._evict_ahead(self._device, self.config.free_share)
        return self.transfers.plan()

    @property
    def has_plans(self) -> bool:
        """Whether a plan now would have something to do, or reports are still to come."""
        return self.transfers.in_flight or self.transfers.has_plan or any(queue.is_due for queue in self.queues)

    def apply(self, report: Report) -> None:
        """What became of it, from one rank."""
        self.transfers.apply(report)
        for presence in report.lookups:
            self.stores[presence.store].on_lookup(report.rank, presence)
            if self.transfers.on_probe_result(report.rank, presence.probe_id) and self._prefetcher is not None:
                self._prefetcher.on_lookup(presence)
        if report.damaged and self.host is not None:
            self.host.invalidate(np.frombuffer(report.damaged, "<i4"))
        for size in report.capacities:
            if self.host is not None and size.tier == "host":
                self.host.set_capacity(report.rank, size.num_slots)

    def on_computed(self, num_tokens: int, attended_tokens: float, seconds: float) -> None:
        """A step of so many tokens took so long: what computing costs, for loading or recomputing."""
        self.cost_model.observe_compute(num_tokens, attended_tokens, seconds)

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

    def shortage_for(self, num_blocks: int, salt: bytes | None = None) -> Shortage | None:
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
            len(self._allocations),
            self._queried_tokens,
            sum(hits.values()),
            tuple(tiers),
        )

    @property
    def leases(self) -> list[Lease]:
        """All that are open."""
        sources = [allocation.source for allocation in self._allocations if allocation.source is not None]
        fetched = self._prefetcher.leases if self._prefetcher is not None else []
        return [
            *(allocation.lease for allocation in self._allocations),
            *sources,
            *self._pins,
            *self.transfers.leases,
            *fetched,
        ]

    def check(self) -> None:
        """Raise unless every invariant of the index holds for exactly these holds."""
        check_tree(self.tree, self.leases)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _most_blocks(self, chain: Chain) -> int:
        """Full blocks that may be cached of a prompt: its last token is computed in any case."""
        return (chain.num_tokens - 1) // self.namespace.block_tokens

    def _match_below(
        self, allocation: Allocation, missing: int, may_load: bool, prefetch: Prefetch | None, now: float
    ) -> Allocation:
        """Some of what was found is not on the device: load it, or go without it."""
        assert self.host is not None
        block_tokens, on_device = self.namespace.block_tokens, allocation.num_on_device
        decision = None
        if may_load and self.config.recompute:
            ways = {(Route.HOST_TO_DEVICE, ""): missing + self.transfers.num_blocks(Route.HOST_TO_DEVICE)}
            first, stop = on_device * block_tokens, allocation.lease.num_matched_tokens
            decision = self.cost_model.decide(ways, first, stop - first)
        if may_load and (decision is None or decision.load):
            allocation.tokens_from = origins(prefetch, missing, block_tokens)
        else:
            self.tree.release(allocation.lease, used=False)
            lease = self.tree.match(
                allocation.chain, now=now, max_blocks=on_device, retention=allocation.lease.retention
            )
            allocation = Allocation(lease)
        allocation.decision = decision or (prefetch.decision if prefetch is not None else None)
        return allocation

    def _fill_table(self, lease: Lease) -> None:
        """The device slots of what was found, there or on its way."""
        found = block_slots(lease, self._device, 0, lease.num_matched)
        lease.table = np.concatenate((found, lease.table[lease.num_matched :]))

    def _evict_ahead(self, tier: Tier, free_share: float) -> None:
        wanted = math.ceil(free_share * tier.pool.num_slots) - tier.pool.num_free if free_share else 0
        if wanted > 0:
            self.tree.evict(tier, min(wanted, tier.num_evictable))

    def _ended(self, move: PendingTransfer, there: Mask) -> None:
        """A move is over: learn its speed, and go on with its blocks."""
        purpose, transfer = move.transfer.route, move.transfer
        if self.observer is not None:
            self.observer(move)
        if purpose is Route.DEVICE_TO_HOST:
            for store in self.stores.values() if 1 in there else ():
                store.on_blocks_ready(move.lease, move.first, move.stop)
            return
        if purpose is Route.HOST_TO_STORE:
            self.stores[transfer.target].on_transfer_done(move, there)
            return
        if 0 not in there:  # what a request waits for: how long that takes is asked again
            self.cost_model.observe_transfer((purpose, transfer.store), len(there), move.seconds)
        if purpose is Route.STORE_TO_HOST and self._prefetcher is not None:
            self._prefetcher.on_transfer_done(move, there)

    def _match_partly(self, allocation: Allocation, now: float) -> None:
        """Find a cached block that begins as the first one that was not found does: as much of it is copied.

        prompt   |b0|b1|t t t t v v|..      the last token of the prompt must be computed in any case
        cached   |b0|b1|t t t t u u|        4 tokens are copied
        """
        wanted = allocation.chain.num_tokens - allocation.num_cached_tokens - 1
        if wanted < 1:
            return
        found = self.tree.match_within(allocation.lease, wanted, max_children=self.config.partial_scan, now=now)
        if found is not None:
            allocation.source, num_tokens = found
            allocation.num_cached_tokens += num_tokens

    def _reserve(self, allocation: Allocation, num_tokens: int) -> Shortage | None:
        """Slots for tokens that have none, and for blocks that come from the host, which then are on their way."""
        lease = allocation.lease
        num_new, states = lease.num_missing(num_tokens), b""
        if self.host is not None and not allocation.is_loading and not lease.committed:
            states = self.host.device_states(lease)
        num_to_load, is_waiting = states.count(ABSENT), WRITING in states
        if num_new or num_to_load:
            slots = self.tree.reserve(self._device, num_new + num_to_load, lease.chain.salt)
            if isinstance(slots, Shortage):
                return slots
            if num_to_load and self.host is not None:
                ids = self.host.load(lease, Slots(slots.tier, slots.ids[:num_to_load]))
                allocation.loads = () if is_waiting else tuple(ids)
            own = slots.ids[num_to_load:]
            lease.table = np.concatenate((lease.table, own)) if len(lease.table) else own
        allocation.is_loading = allocation.is_loading or is_waiting or num_to_load > 0
        return None

    def _let_source_go(self, allocation: Allocation) -> None:
        if allocation.source is not None:
            self.tree.release(allocation.source, used=False)
            allocation.source = None

    def _end(self, allocation: Allocation, *, used: bool, now: float) -> None:
        self._must_hold(allocation)
        self._allocations.remove(allocation)
        self._let_source_go(allocation)
        for queue in self.queues if used else ():
            queue.on_finish(allocation.lease)
        self.tree.release(allocation.lease, used=used, now=now)

    def _must_hold(self, allocation: Allocation) -> None:
        if allocation not in self._allocations:
            raise StateError("this hold has ended: a request finishes, aborts or is preempted once per match")
