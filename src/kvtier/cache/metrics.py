"""CacheMetrics: the Prometheus metrics of a cache. All but the durations are updated when the registry is collected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvtier.cache.in_flight import PendingTransfer
from kvtier.cache.manager import CacheManager
from kvtier.metrics import Registry
from kvtier.storage import StoreStats


class Counted(Protocol):
    """Interface for a store or a group of stores that provides statistics."""

    @property
    def stats(self) -> StoreStats: ...


class CacheMetrics:
    """Declares and updates the metrics of a cache in a registry. Create one instance per manager."""

    def __init__(self, manager: CacheManager, stores: Mapping[str, Counted], registry: Registry) -> None:
        self._manager = manager
        self._stores = stores
        new = registry
        self._seconds = new.histogram("kvtier_cache_move_seconds", "Duration of transfers.", ("purpose",))
        self._moved = new.counter("kvtier_cache_moved_blocks_total", "Blocks that arrived.", ("purpose",))
        self._bytes = new.counter("kvtier_cache_moved_bytes_total", "Bytes that arrived.", ("purpose",))
        self._failed = new.counter("kvtier_cache_failed_blocks_total", "Blocks that did not arrive.", ("purpose",))
        self._queue = new.gauge("kvtier_cache_moving_blocks", "Blocks in flight.", ("purpose",))
        self._used = new.gauge("kvtier_cache_used_blocks", "Blocks in use in a tier.", ("tier",))
        self._room = new.gauge("kvtier_cache_blocks", "Capacity of a memory tier.", ("tier",))
        self._evicted = new.counter("kvtier_cache_evicted_blocks_total", "Blocks evicted to make room.", ("tier",))
        self._duplicates = new.counter(
            "kvtier_cache_duplicates_evicted_total", "Blocks that the host evicted because the device held them too."
        ).of()
        self._late = new.counter(
            "kvtier_cache_saved_late_blocks_total", "Blocks saved because the device was about to evict them."
        ).of()
        self._hits = new.counter("kvtier_cache_hit_tokens_total", "Prompt tokens found in a tier.", ("tier",))
        self._asked = new.counter("kvtier_cache_queried_tokens_total", "Prompt tokens looked up.").of()
        self._decided = new.counter("kvtier_cache_decisions_total", "Decisions to load or to recompute.", ("decision",))
        self._calls = new.counter(
            "kvtier_store_objects_total", "Objects by call and result.", ("store", "call", "result")
        )
        self._bad = new.counter("kvtier_store_quarantined_total", "Objects found corrupt.", ("store",))
        self._refused = new.counter("kvtier_store_refused_total", "Calls rejected by an open breaker.", ("store",))
        self._held = new.gauge("kvtier_store_used_bytes", "Bytes used by a store.", ("store",))
        self._written = new.counter("kvtier_store_written_bytes_total", "Bytes written to a disk.", ("store",))
        self._day = new.gauge("kvtier_store_day_bytes", "Bytes written to a disk in 24 hours.", ("store",))
        self._max_day = new.gauge(
            "kvtier_store_day_limit_bytes", "Limit of written bytes in 24 hours; 0 if none.", ("store",)
        )
        registry.before_collect(self.update)

    def observe(self, completed: Iterable[PendingTransfer]) -> None:
        for done in completed:
            self._seconds.of(done.transfer.route.value).observe(done.seconds)

    def update(self) -> None:
        manager, counts, stats = self._manager, self._manager.transfers.counts, self._manager.stats
        for route, total in counts.items():
            name = route.value
            self._moved.of(name).raise_to(total.num_blocks)
            self._bytes.of(name).raise_to(total.num_bytes)
            self._failed.of(name).raise_to(total.num_failed)
            self._queue.of(name).set(total.num_in_flight)
        if len(manager.tree.tiers) > 1:
            self._failed.of("scrub").raise_to(manager.num_damaged)
        for tier in stats.tiers:
            self._used.of(tier.name).set(tier.num_used)
            self._hits.of(tier.name).raise_to(tier.hit_tokens)
        for memory in manager.tree.tiers:
            self._room.of(memory.name).set(memory.pool.num_slots)
            self._evicted.of(memory.name).raise_to(memory.num_evicted)
        self._asked.raise_to(stats.queried_tokens)
        self._duplicates.raise_to(stats.num_duplicates_evicted)
        self._late.raise_to(stats.num_saved_late)
        for decision, count in manager.decisions.items():
            self._decided.of(decision).raise_to(count)
        for name, store in self._stores.items():
            self._update_store(name, store)

    def _update_store(self, name: str, store: Counted) -> None:
        stats = store.stats
        for call, traffic in (("lookup", stats.lookups), ("read", stats.reads), ("write", stats.writes)):
            results = (traffic.num_done, traffic.num_missing, traffic.num_corrupt, traffic.num_failed)
            for result, count in zip(("done", "missing", "corrupt", "failed"), results, strict=True):
                self._calls.of(name, call, result).raise_to(count)
        self._bad.of(name).raise_to(stats.num_quarantined)
        self._refused.of(name).raise_to(stats.num_refused)
        self._held.of(name).set(stats.used_bytes)
        self._written.of(name).raise_to(stats.written_bytes)
        self._day.of(name).set(stats.day_bytes)
        self._max_day.of(name).set(stats.max_day_bytes)
