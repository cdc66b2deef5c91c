"""Metrics of the cache, parsed with the Prometheus client library."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvtier.cache.config import WaitPolicy, WritebackConfig
from tiers_machine import BLOCK, TiersMachine


def sampled(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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
    shown = sampled(machine.tiers.metrics.render())
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
    assert shown["kvtier_cache_move_seconds_count", "save"] > 0
    assert shown["kvtier_store_objects_total", "disk", "write", "done"] >= blocks
    assert shown["kvtier_cache_blocks", "device"] == 12
    machine.teardown()
