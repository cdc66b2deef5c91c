"""Statistics of the connector: collected in EngineCore, sent to vLLM's front end, shown as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.cache.manager import CacheManager
from kvtier.messages import Route

Samples = dict[str, dict[str, float]]
"""Metric -> label value -> number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric with one label."""

    name: str
    help: str
    label: str
    is_counter: bool = True


METRICS = {
    "hit_tokens": Metric("vllm:kvtier_hit_tokens", "Prompt tokens loaded, by tier.", "tier"),
    "moved_blocks": Metric("vllm:kvtier_moved_blocks", "Blocks moved.", "purpose"),
    "moved_bytes": Metric("vllm:kvtier_moved_bytes", "Bytes moved.", "purpose"),
    "failed_blocks": Metric("vllm:kvtier_failed_blocks", "Blocks that did not arrive or were damaged.", "purpose"),
    "skipped_blocks": Metric("vllm:kvtier_skipped_blocks", "Full blocks not saved for lack of room.", "purpose"),
    "evicted_blocks": Metric("vllm:kvtier_evicted_blocks", "Blocks evicted to make room.", "tier"),
    "moving_blocks": Metric("vllm:kvtier_moving_blocks", "Blocks in flight.", "purpose", is_counter=False),
    "used_blocks": Metric("vllm:kvtier_used_blocks", "Blocks in use.", "tier", is_counter=False),
    "total_blocks": Metric("vllm:kvtier_blocks", "Capacity of a memory tier in blocks.", "tier", is_counter=False),
    "held_blocks": Metric("vllm:kvtier_held_device_blocks", "Device blocks held by saves.", "state", is_counter=False),
}


def totals_of(manager: CacheManager, num_held: int, num_skipped: int) -> Samples:
    """Return the current value of every metric."""
    counts, stats = manager.transfers.counts, manager.stats
    failed = {route.value: float(total.num_failed) for route, total in counts.items()}
    return {
        "hit_tokens": {tier.name: float(tier.hit_tokens) for tier in stats.tiers},
        "moved_blocks": {route.value: float(total.num_blocks) for route, total in counts.items()},
        "moved_bytes": {route.value: float(total.num_bytes) for route, total in counts.items()},
        "failed_blocks": {**failed, "scrub": float(manager.num_damaged)},
        "skipped_blocks": {Route.DEVICE_TO_HOST.value: float(num_skipped)},
        "evicted_blocks": {tier.name: float(tier.num_evicted) for tier in manager.tree.tiers},
        "moving_blocks": {route.value: float(total.num_in_flight) for route, total in counts.items()},
        "used_blocks": {tier.name: float(tier.num_used) for tier in stats.tiers},
        "total_blocks": {tier.name: float(tier.pool.num_slots) for tier in manager.tree.tiers},
        "held_blocks": {"saving": float(num_held)},
    }


def added(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Samples:
    """Combine the samples of two intervals. Counters are added, and gauges take the newer value."""
    combined: Samples = {name: dict(values) for name, values in older.items()}
    for name, values in newer.items():
        known = combined.setdefault(name, {})
        for label, value in values.items():
            known[label] = known.get(label, 0.0) + value if METRICS[name].is_counter else value
    return combined


class Collector:
    """Returns the increases of the counters since the last call, and the values of the gauges."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._last: Samples = {}

    def collect(self, num_held: int, num_skipped: int) -> Samples:
        totals = totals_of(self._manager, num_held, num_skipped)
        changes = {name: dict(values) for name, values in totals.items()}
        for name, values in self._last.items():
            if METRICS[name].is_counter:
                for label, value in values.items():
                    changes[name][label] -= value
        self._last = totals
        return changes
