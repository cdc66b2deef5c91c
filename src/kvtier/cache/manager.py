"""CacheManager: finds, allocates and publishes cached KV for a scheduler. It handles block numbers, never KV data.

The manager uses no torch, I/O, threads or clock; the caller passes the time as `now`. Life of a request:

    prefetch -> Prefetch ─┐
                  match -> Allocation --allocate, is_ready, publish, extend ..--> finish | abort

If there are lower tiers, `plan` returns transfers to execute, and `apply` processes the results. A copied block is
readable in the target tier after all ranks have reported success. If its copy failed, the target tier lacks the block.

Inside another engine (`owns_device=False`), the host is the first tier. `match` leases host blocks, and `foreign` loads
and saves device blocks. Do not call `allocate` or `publish`, because the other engine manages its device blocks.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from kvtier.cache.allocation import Allocation, BlockCopy, CacheStats, TierStats
from kvtier.cache.config import CacheConfig, WritePolicy
from kvtier.cache.cost_model import CostModel
from kvtier.cache.foreign import ForeignDevice
from kvtier.cache.in_flight import PendingTransfer, TransferTracker, mask_runs
from kvtier.cache.prefetch import Prefetch, Prefetcher, origins
from kvtier.cache.writeback import HostWriter, StoreIndex, WritebackQueue
from kvtier.errors import ArgumentError, LoadError, StateError
from kvtier.index import (
    BlockPool,
    Chain,
    GhostCache,
    Lease,
    Listener,
    Miss,
    Namespace,
    Outcome,
    RadixTree,
    Retention,
    Shortage,
    Slots,
    Tier,
    make_policy,
)
from kvtier.index.chain import TokenIds
from kvtier.index.check import check_tree
from kvtier.index.node import ABSENT, IS_ABSENT, WRITING
from kvtier.index.transitions import begin_write, block_slots, block_states
from kvtier.messages import Plan, Report, Route

_KEEP = Retention()
_UNKNOWN = Outcome()


class CacheManager:
    """Manages the KV blocks in all tiers. Not thread-safe."""

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
        """`num_host_ready` is the number of host slots that are usable now (default: all). Reports add more slots."""
        self.config = config
        tiers: list[Tier] = []
        free_shares: list[tuple[Tier, float]] = []
        if config.owns_device:
            tiers.append(Tier(0, BlockPool("device", config.num_blocks), partial(make_policy, config.policy)))
            free_shares.append((tiers[0], config.free_share))
        host = config.host if config.prefix_caching else None
        if host is not None:
            num_ready = host.num_blocks if num_host_ready is None else num_host_ready
            tiers.append(Tier(len(tiers), BlockPool("host", num_ready), partial(make_policy, host.policy)))
            free_shares.insert(0, (tiers[-1], host.free_share))
        self._device = tiers[0]  # the host, if another engine owns the device blocks
        stores = config.stores if host is not None else ()
        self.tree = RadixTree(
            namespace,
            tiers,
            enabled=config.prefix_caching,
            with_keys=bool(stores),
            listener=listener,
            ghost=ghost,
            exclusive=host is not None and host.exclusive and len(tiers) == 2,
        )
        self.transfers = TransferTracker(self.tree, num_ranks)
        self.cost_model = CostModel()
        """Predicts times for the decision to load or to recompute. The scheduler records the times of steps here."""
        self.decisions = {"load": 0, "recompute": 0}
        """Number of requests by decision: to load blocks from lower tiers, or to recompute these blocks."""
        self.num_damaged = 0
        """Number of host blocks that were removed because a background check found them corrupt."""
        self.stores = {each.name: StoreIndex(self.tree, tiers[-1], each, self.transfers, listener) for each in stores}
        self.foreign: ForeignDevice | None = None
        """Loads and saves device blocks if another engine owns these blocks."""
        if not config.owns_device and host is not None:
            self.foreign = ForeignDevice(self.tree, tiers[0], self.transfers, host.saving.max_blocks)
        self._host_queues, self._store_queues = self._make_queues(tiers)
        self.queues = (*self._host_queues, *self._store_queues)
        """The queue for copies to the host, if there is one, followed by one queue per store."""
        cost_model = self.cost_model if not config.always_load else None
        self._prefetcher = Prefetcher(self.tree, tiers[-1], list(self.stores.values()), self.transfers, cost_model)
        self._free_shares = [(tier, share) for tier, share in free_shares if share]
        self._host_slots = [0] * num_ranks
        self._allocations: set[Allocation] = set()
        self._pins: set[Lease] = set()
        self._queried_tokens = 0
        self._hit_tokens = dict.fromkeys((*(tier.name for tier in tiers), *self.stores), 0)

    def _make_queues(self, tiers: list[Tier]) -> tuple[list[WritebackQueue], list[WritebackQueue]]:
        """Return two lists: at most one queue for copies to the host, and one queue per store."""
        host, stores, to_host = self.config.host, self.stores.values(), []
        if host is None:
            return [], []
        max_jobs = max(1024, self.config.num_blocks + host.num_blocks)  # at least one job per slot in memory
        if len(tiers) == 2:
            ahead_share = host.ahead_share if host.exclusive else 0.0
            writer = HostWriter(
                self.tree,
                tiers[0],
                tiers[1],
                self.transfers,
                ahead_share=ahead_share,
                has_stores=bool(self.stores),
                is_early=host.saving.write is WritePolicy.THROUGH and bool(self.stores),
            )
            to_host.append(WritebackQueue(self.tree, host.saving, tiers[0].pool, writer, max_jobs))
        return to_host, [
            WritebackQueue(self.tree, each.config.saving, tiers[-1].pool, each, max_jobs) for each in stores
        ]

    # ---- life of a request -----------------------------------------------------------------------------------------

    def prefetch(
        self, chain: Chain, *, now: float = 0.0, retention: Retention = _KEEP, max_tokens: int | None = None
    ) -> Prefetch | None:
        """Begin to fetch a prompt's blocks from stores to the host. Return None if there is no store or no token.

        The caller waits until `is_prefetched` is True, passes the prefetch to `match`, and then calls `end_prefetch`.
        """
        if not self.stores or not chain.num_tokens:
            return None
        return self._prefetcher.start(chain, self._most_blocks(chain, max_tokens), retention, now)

    def is_prefetched(self, prefetch: Prefetch, *, now: float = 0.0) -> bool:
        """True if the request need not wait: the prefetch is over, or the maximum wait has passed."""
        return self._prefetcher.is_over(prefetch, now)

    def retry_prefetch(self, prefetch: Prefetch, allocation: Allocation, *, now: float = 0.0) -> bool:
        """Fetch blocks that did not fit at first or were evicted since. Return True if the request must wait."""
        return self._prefetcher.retry(prefetch, allocation.lease.num_matched, now, allocation.lease.retention)

    def end_prefetch(self, prefetch: Prefetch) -> None:
        """Release the lease of a prefetch. Transfers in flight continue."""
        self._prefetcher.end(prefetch)

    def match(
        self,
        chain: Chain,
        *,
        now: float = 0.0,
        retention: Retention = _KEEP,
        may_load: bool = True,
        prefetch: Prefetch | None = None,
        max_tokens: int | None = None,
    ) -> Allocation:
        """Lease the longest cached prefix. The last token never matches, because its logits must be computed.

        If `may_load` is False, or if the cost model decides to compute blocks, only leading device blocks match. With
        CacheConfig.always_load, the cost model is not used. The caller must end `prefetch` after this call. At most
        `max_tokens` tokens match.
        """
        if not chain.num_tokens:
            raise ArgumentError("a request needs at least one token")
        lease = self.tree.match(chain, now=now, max_blocks=self._most_blocks(chain, max_tokens), retention=retention)
        allocation = Allocation(lease)
        if missing := self._device_states(lease).count(ABSENT):
            allocation = self._match_below(allocation, missing, may_load, prefetch, now)
        self._allocations.add(allocation)
        if self.config.prefix_caching and self.foreign is None:
            self._match_partly(allocation, max_tokens, now)
            allocation.tokens_from["device"] = allocation.num_cached_tokens - sum(allocation.tokens_from.values())
        return allocation

    def allocate(self, allocation: Allocation, num_tokens: int) -> Shortage | None:
        """Reserve device slots for the first `num_tokens` tokens, evicting blocks if necessary, or return a Shortage.

        Start to load the matched blocks that the device lacks. If there are too few slots, and the copy of a partly
        matched block is not planned yet, do without this copy: lower `num_cached_tokens`, and try once more.
        """
        self._must_be_open(allocation)
        if allocation.lease.committed and not allocation.lease.num_missing(num_tokens):
            return None
        self._must_own_device()
        shortage = self._reserve(allocation, num_tokens)
        if shortage is not None and allocation.source is not None and allocation.copy is None:
            self._release_source(allocation)
            allocation.num_cached_tokens = allocation.lease.num_matched_tokens
            shortage = self._reserve(allocation, num_tokens)
        if shortage is not None:
            return shortage
        block = allocation.lease.num_matched
        if allocation.source is not None and allocation.copy is None and len(allocation.table) > block:
            num_reused = allocation.num_cached_tokens - allocation.lease.num_matched_tokens
            source, target = int(allocation.source.table[block]), int(allocation.table[block])
            allocation.copy = BlockCopy(source, target, num_reused)
        return None

    def is_ready(self, allocation: Allocation) -> bool:
        """True if all matched blocks are on the device. Raise LoadError if a load failed. Call it after `allocate`."""
        self._must_be_open(allocation)
        if not allocation.is_loading:
            return True
        states = self._device_states(allocation.lease)
        if ABSENT in states:
            raise LoadError("loading cached blocks failed; compute the blocks instead")
        if WRITING in states:
            return False
        allocation.is_loading, allocation.loads = False, ()
        self._fill_table(allocation.lease)
        return True

    def overlap(self, allocation: Allocation) -> tuple[int, ...]:
        """Return the ids of an allocation's loads in flight, so that a step can start early and wait layer by layer.

        Return an empty tuple if no load is in flight, or if loads for other requests transfer some of the blocks.
        Otherwise, also write the slots of the blocks in flight into the lease's table. The results of the step are
        valid only if `is_ready` returns True after the step.
        """
        self._must_be_open(allocation)
        if not allocation.loads or WRITING not in self._device_states(allocation.lease):
            return ()
        self._fill_table(allocation.lease)
        return allocation.loads

    def on_scheduled(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """Count the cached blocks of a scheduled request as used. Repeated calls have no effect."""
        self._must_be_open(allocation)
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
        """Make the full blocks of the computed tokens matchable for other requests."""
        self._must_be_open(allocation)
        lease = allocation.lease
        first = lease.num_blocks
        if computed_tokens >= (first + 1) * self.namespace.block_tokens:  # most steps complete no block
            self._must_own_device()
            self.tree.publish(lease, computed_tokens, now=now)
            for queue in self._host_queues:
                queue.on_blocks_ready(lease, first, lease.num_blocks)
        if allocation.source is not None and computed_tokens > allocation.num_cached_tokens:
            self._release_source(allocation)

    def extend(self, allocation: Allocation, tokens: TokenIds) -> None:
        """Append generated tokens to the chain. The next step computes the KV of these tokens."""
        self._must_be_open(allocation)
        allocation.chain.append(tokens)

    def finish(self, allocation: Allocation, *, now: float = 0.0, outcome: Outcome = _UNKNOWN) -> None:
        """End a request. Its published blocks stay in the cache until they are evicted."""
        self._end(allocation, used=True, now=now, outcome=outcome)

    def abort(self, allocation: Allocation, *, now: float = 0.0) -> None:
        """End a cancelled, preempted or never scheduled request. If it was scheduled, its blocks count as used."""
        self._end(allocation, used=allocation.lease.committed, now=now)

    def close_session(self, session_id: str, salt: bytes, *, now: float = 0.0) -> int:
        """Record that a session has ended, for the learned eviction policy. Without this policy, return 0.

        Return the number of blocks whose last use was the last request of the session.
        """
        return self.tree.close(salt, session_id, now=now)

    def explain(self, allocation: Allocation) -> Miss:
        """Return the first block that did not match, and the reason for the miss."""
        return self.tree.explain(allocation.lease)

    def pin(self, chain: Chain, *, now: float = 0.0) -> Lease:
        """Protect the cached blocks of a prompt from eviction in all memory tiers until `unpin`."""
        pin = self.tree.match(chain, now=now)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Lease) -> None:
        self._pins.remove(pin)
        self.tree.release(pin, used=False)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Drop all blocks in memory, not in stores. Running requests keep their slots. Set `namespace`, if given."""
        self.tree.reset(namespace)
        self.transfers.epoch += 1
        self._prefetcher.reset()
        for store in self.stores.values():
            store.on_reset()
        for queue in self.queues:
            queue.jobs.clear()

    # ---- plans and reports -----------------------------------------------------------------------------------------

    def plan(self, *, now: float = 0.0) -> Plan:
        """Return the transfers, probes and drops to execute now. Evict blocks from tiers with a `free_share`."""
        self._prefetcher.advance(now)
        for queue in self.queues:
            queue.plan(now)
        for queue in self._host_queues:
            queue.save_next_victims(math.ceil(self.config.free_share * self._device.pool.num_slots))
        for tier, free_share in self._free_shares:
            wanted = math.ceil(free_share * tier.pool.num_slots) - tier.pool.num_free
            self.tree.evict(tier, max(0, min(wanted, tier.num_evictable)))
        return self.transfers.plan()

    @property
    def has_plans(self) -> bool:
        """True if copies to lower tiers are due, if the next plan has content, or if transfers are in flight."""
        is_due = any(queue.is_due for queue in self.queues)
        return is_due or bool(self.transfers.in_flight) or self.transfers.has_plan

    def apply(self, report: Report) -> list[PendingTransfer]:
        """Apply a rank's report. Return the transfers that are now complete on all ranks."""
        if not 0 <= report.rank < self.transfers.num_ranks:
            raise ArgumentError(f"invalid rank {report.rank} in a report; there are {self.transfers.num_ranks} ranks")
        completed = []
        for result in report.results:
            done = self.transfers.apply(report.rank, result)
            if done is not None:
                self._on_transfer_done(done)
                self.tree.release(done.lease, used=False)
                completed.append(done)
        for lookup in report.lookups:
            self.stores[lookup.store].on_lookup(report.rank, lookup)
            if self.transfers.on_probe_result(report.rank, lookup.probe_id):
                self._prefetcher.on_probe_result(lookup.probe_id)
        host = self.tree.tiers[-1]
        if report.damaged:
            self.num_damaged += self.tree.invalidate(host, np.frombuffer(report.damaged, "<i4"))
        if report.num_host_slots:
            self._host_slots[report.rank] = report.num_host_slots
            if min(self._host_slots) > host.pool.num_slots:
                host.pool.resize(min(self._host_slots))
        return completed

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        return self.tree.namespace

    @property
    def num_blocks(self) -> int:
        """Capacity of the first tier in blocks: the device, or the host if another engine owns the device blocks."""
        return self._device.pool.num_slots

    @property
    def num_available(self) -> int:
        """Number of slots of the first tier that are free or contain an evictable block."""
        return self._device.pool.num_free + self._device.num_evictable

    def shortage_for(self, num_blocks: int) -> Shortage | None:
        """Return a Shortage if `num_blocks` exceeds `num_available`, otherwise None."""
        if num_blocks <= self.num_available:
            return None
        return Shortage(self._device.name, num_blocks, self._device.pool.num_free, self._device.num_evictable)

    @property
    def stats(self) -> CacheStats:
        hits = self._hit_tokens
        tiers = [
            TierStats(tier.name, tier.pool.num_slots, tier.pool.num_used, tier.num_evictable, hits[tier.name])
            for tier in self.tree.tiers
        ]
        tiers += [TierStats(name, 0, store.num_known, 0, hits[name]) for name, store in self.stores.items()]
        return CacheStats(
            len(self._allocations),
            self._queried_tokens,
            sum(hits.values()),
            tuple(tiers),
            sum(tier.num_duplicates_evicted for tier in self.tree.tiers),
            sum(queue.num_saved_late for queue in self._host_queues),
        )

    @property
    def leases(self) -> list[Lease]:
        own = [allocation.lease for allocation in self._allocations]
        sources = [allocation.source for allocation in self._allocations if allocation.source is not None]
        return [*own, *sources, *self._pins, *self.transfers.leases, *self._prefetcher.leases]

    def check(self) -> None:
        """Raise StateError if an invariant of the index is violated or if `leases` lacks an open lease."""
        check_tree(self.tree, self.leases)

    # ---- match and load --------------------------------------------------------------------------------------------

    def _most_blocks(self, chain: Chain, max_tokens: int | None) -> int:
        return _most_tokens(chain, max_tokens) // self.namespace.block_tokens

    def _device_states(self, lease: Lease) -> bytes:
        """Return the device state of each matched block. With one tier, return b"", because all blocks are readable."""
        if len(self.tree.tiers) == 1 or not lease.num_matched:
            return b""
        return block_states(lease, self._device, 0, lease.num_matched)

    def _match_below(
        self, allocation: Allocation, missing: int, may_load: bool, prefetch: Prefetch | None, now: float
    ) -> Allocation:
        """Decide whether to load the matched blocks that the device lacks. Without a load, match only device blocks."""
        block_tokens, on_device = self.namespace.block_tokens, allocation.num_on_device
        decision = None
        if may_load and not self.config.always_load:
            queued = {(Route.HOST_TO_DEVICE, ""): missing + self.transfers.num_blocks(Route.HOST_TO_DEVICE)}
            first, stop = on_device * block_tokens, allocation.lease.num_matched_tokens
            decision = self.cost_model.decide(queued, first, stop - first)
        if may_load and (decision is None or decision.load):
            allocation.tokens_from = origins(prefetch, missing, block_tokens)
        else:
            retention = allocation.lease.retention
            self.tree.release(allocation.lease, used=False)
            lease = self.tree.match(allocation.chain, now=now, max_blocks=on_device, retention=retention)
            allocation = Allocation(lease)
        allocation.decision = decision or (prefetch.decision if prefetch is not None else None)
        return allocation

    def _match_partly(self, allocation: Allocation, max_tokens: int | None, now: float) -> None:
        """Lease a cached block that begins with the same tokens as the first unmatched block, to copy these tokens.

        prompt   |b0|b1|t t t t v v|..
        cached   |b0|b1|t t t t u u|        the 4 tokens t are copied
        """
        wanted = _most_tokens(allocation.chain, max_tokens) - allocation.num_cached_tokens
        if wanted < 1:
            return
        partial_hit = self.tree.match_within(allocation.lease, wanted, max_children=self.config.partial_scan, now=now)
        if partial_hit is not None:
            allocation.source, num_tokens = partial_hit
            allocation.num_cached_tokens += num_tokens

    def _reserve(self, allocation: Allocation, num_tokens: int) -> Shortage | None:
        """Reserve device slots for new blocks and for blocks to load, and start the loads."""
        lease = allocation.lease
        num_new, states = lease.num_missing(num_tokens), b""
        if not allocation.is_loading and not lease.committed:
            states = self._device_states(lease)
        num_to_load, is_waiting = states.count(ABSENT), WRITING in states
        if num_new or num_to_load:
            slots = self.tree.reserve(self._device, num_new + num_to_load, lease.chain.salt)
            if isinstance(slots, Shortage):
                return slots
            if num_to_load:
                ids = self._load(lease, states, Slots(slots.tier, slots.ids[:num_to_load]))
                allocation.loads = () if is_waiting else ids
            own = slots.ids[num_to_load:]
            lease.table = np.concatenate((lease.table, own)) if len(lease.table) else own
        allocation.is_loading = allocation.is_loading or is_waiting or num_to_load > 0
        return None

    def _load(self, lease: Lease, states: bytes, slots: Slots) -> tuple[int, ...]:
        """Start to load the blocks that are ABSENT on the device into reserved slots. Return the transfer ids."""
        host, at, ids = self.tree.tiers[-1], 0, []
        for first, stop in mask_runs(states.translate(IS_ABSENT), 0):
            targets = Slots(slots.tier, slots.ids[at : at + stop - first])
            at += stop - first
            shared = self.tree.share(lease)
            begin_write(shared, self._device, first, targets)
            ids.append(self.transfers.start(Route.HOST_TO_DEVICE, shared, first, host, targets))
        return tuple(ids)

    def _fill_table(self, lease: Lease) -> None:
        """Write the device slots of all matched blocks, including blocks in flight, into the lease's table."""
        slots = block_slots(lease, self._device, 0, lease.num_matched)
        lease.table = np.concatenate((slots, lease.table[lease.num_matched :]))

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _on_transfer_done(self, done: PendingTransfer) -> None:
        """Handle a completed transfer. Offer saved blocks to the stores, and record the times of loads and fetches."""
        route, transfer = done.transfer.route, done.transfer
        if route is Route.DEVICE_TO_HOST:  # a chain without tokens is not offered, see HostWriter._chain_of
            for queue in self._store_queues if 1 in done.arrived and done.lease.chain.num_tokens else ():
                queue.on_blocks_ready(done.lease, done.first, done.stop, queue=True)
        elif route is Route.HOST_TO_STORE:
            self.stores[transfer.target].on_transfer_done(done)
        elif 0 not in done.arrived:  # a load or a fetch without failed blocks
            self.cost_model.observe_transfer((route, transfer.store), done.count, done.seconds)
        if route is Route.STORE_TO_HOST:
            self._prefetcher.on_transfer_done(done)

    def _release_source(self, allocation: Allocation) -> None:
        if allocation.source is not None:
            self.tree.release(allocation.source, used=False)
            allocation.source = None

    def _end(self, allocation: Allocation, *, used: bool, now: float, outcome: Outcome = _UNKNOWN) -> None:
        self._must_be_open(allocation)
        self._allocations.remove(allocation)
        self._release_source(allocation)
        for queue in self.queues if used else ():
            queue.on_finish(allocation.lease)
        self.tree.release(allocation.lease, used=used, now=now, outcome=outcome)

    def _must_own_device(self) -> None:
        if self.foreign is not None:
            raise StateError("another engine owns the device blocks; load and save them with `CacheManager.foreign`")

    def _must_be_open(self, allocation: Allocation) -> None:
        if allocation not in self._allocations:
            raise StateError("this allocation has already ended; match the chain again")


def _most_tokens(chain: Chain, max_tokens: int | None) -> int:
    """Return the maximum number of tokens to match, given that the last token is always computed."""
    most = chain.num_tokens - 1
    return most if max_tokens is None else min(most, max_tokens)
