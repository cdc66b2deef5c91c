"""Metrics of the cache."""

from __future__ import annotations

from cache_support import NAMESPACE, prompt
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig
from kvtier.cache.manager import CacheManager
from kvtier.cache.metrics import CacheMetrics
from kvtier.messages import Report, Route, TransferResult
from kvtier.metrics import Registry
from tiers_machine import BLOCK, TiersMachine


def sampled(registry: Registry) -> dict[tuple[str, ...], object]:
    """Return the value of each series by name and label values."""
    return {(metric.name, *labels): value for metric in registry.collect() for labels, value in metric.series}


def test_cache_metrics_count_transferred_blocks_and_bytes():
    machine = TiersMachine()
    machine.begin(
        num_blocks=12,
        num_host=40,
        saving=WritebackConfig(),
        wait=WaitPolicy.WAIT,
        is_shared=False,
        always_load=True,
        free_share=0.0,
        store_bytes=1 << 20,
        seed=1,
        share=0.0,  # no faults
    )
    tokens = [1] * 33
    for turn in range(3):
        machine.add(tokens, 1, b"")
        for _ in range(6):
            machine.apply_reports()
            machine.step()
        if turn == 0:
            machine.tiers.demote(machine.manager_chain(tokens))  # so that turn 1 has hits on the host
        else:
            machine.tiers.reset()  # so that turn 2 has hits on the disk
    shown = sampled(machine.tiers.metrics)
    counts = machine.manager.transfers.counts
    blocks = 32 // BLOCK
    assert shown["kvtier_cache_moved_blocks_total", "load"] == 2 * blocks
    assert shown["kvtier_cache_moved_blocks_total", "fetch"] == blocks
    assert shown["kvtier_cache_hit_tokens_total", "host"] == 32
    assert shown["kvtier_cache_hit_tokens_total", "disk"] == 32
    assert shown["kvtier_cache_queried_tokens_total",] == 3 * 33
    for route, count in counts.items():
        assert shown["kvtier_cache_moved_bytes_total", route.value] == count.num_bytes
        assert shown["kvtier_cache_moving_blocks", route.value] == 0
    assert shown["kvtier_cache_move_seconds", "save"].count > 0
    assert shown["kvtier_store_objects_total", "disk", "write", "done"] >= blocks
    assert shown["kvtier_cache_blocks", "device"] == 12
    machine.teardown()


def test_cache_metrics_count_blocks_in_flight_to_a_store():
    config = CacheConfig(8, host=HostConfig(8), stores=(StoreConfig("disk"),))
    manager, registry = CacheManager(NAMESPACE, config), Registry()
    CacheMetrics(manager, {}, registry)
    allocation = manager.match(prompt(1, 3))
    assert manager.allocate(allocation, 3 * BLOCK) is None
    manager.publish(allocation, 3 * BLOCK)
    saves = [each for each in manager.plan().transfers if each.route is Route.DEVICE_TO_HOST]
    assert moving(registry) == {"load": 0, "save": 3, "fetch": 0, "store": 0}
    manager.apply(Report(0, 0, tuple(TransferResult(each.id, True, 1, 0.1) for each in saves)))
    assert moving(registry) == {"load": 0, "save": 0, "fetch": 0, "store": 3}


def moving(registry: Registry) -> dict[str, object]:
    shown = sampled(registry)
    return {route.value: shown["kvtier_cache_moving_blocks", route.value] for route in Route}
