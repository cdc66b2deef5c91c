"""Metrics of the cache."""

from __future__ import annotations

from kvtier.cache.config import WaitPolicy, WritebackConfig
from kvtier.metrics import Registry
from tiers_machine import BLOCK, TiersMachine


def sampled(registry: Registry) -> dict[tuple[str, ...], object]:
    """Return the value of each series by name and label values."""
    return {(metric.name, *labels): value for metric in registry.collect() for labels, value in metric.series}


def test_cache_metrics_count_transferred_blocks_and_bytes():
    machine = TiersMachine()
    machine.begin(12, 40, WritebackConfig(), WaitPolicy.WAIT, False, True, 0.0, 1 << 20, 1, 0.0)
    prompt = [1] * 33
    for turn in range(3):
        machine.add(prompt, 1, b"")
        for _ in range(6):
            machine.apply_reports()
            machine.step()
        if turn == 0:
            machine.tiers.demote(machine.manager_chain(prompt))
        else:
            machine.tiers.reset()
    shown = sampled(machine.tiers.metrics)
    counts = machine.manager.transfers.counts
    blocks = 32 // BLOCK
    assert shown["kvtier_cache_moved_blocks_total", "load"] == 2 * blocks
    assert shown["kvtier_cache_moved_blocks_total", "fetch"] == blocks
    assert shown["kvtier_cache_hit_tokens_total", "host"] == 32
    assert shown["kvtier_cache_hit_tokens_total", "disk"] == 32
    assert shown["kvtier_cache_queried_tokens_total",] == 3 * 33
    for purpose, total in ((route, count.num_bytes) for route, count in counts.items()):
        assert shown["kvtier_cache_moved_bytes_total", purpose.value] == total
        assert shown["kvtier_cache_moving_blocks", purpose.value] == 0
    assert shown["kvtier_cache_move_seconds", "save"].count > 0
    assert shown["kvtier_store_objects_total", "disk", "write", "done"] >= blocks
    assert shown["kvtier_cache_blocks", "device"] == 12
    machine.teardown()
