"""Transfers in flight on several ranks. The functions for block masks agree with a reference."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_support import BLOCK, NAMESPACE, prompt
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.cache.in_flight import mask_runs
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, StateError
from kvtier.index.node import mask_and
from kvtier.messages import Drop, Report, Route, StoreLookup, TransferRequest, TransferResult

MASKS = st.lists(st.integers(0, 1), max_size=12).map(bytes)


@given(MASKS, st.integers(0, 5), st.integers(0, 1))
def test_runs_in_mask_equal_reference(mask, start, value):
    expected, at = [], start
    for each, group in itertools.groupby(mask):
        count = len(list(group))
        expected += [(at, at + count)] if each == value else []
        at += count
    assert list(mask_runs(mask, start, value=value)) == expected


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=12))
def test_intersection_of_masks_equals_reference(pairs):
    one, other = (bytes(column) for column in zip(*pairs, strict=True))
    assert mask_and(one, other) == bytes(a & b for a, b in pairs)


def two_ranks() -> tuple[CacheManager, TransferRequest]:
    """Return a manager for two ranks, and a planned save of three blocks."""
    config = CacheConfig(8, host=HostConfig(8), stores=(StoreConfig("disk"),), always_load=True)
    manager = CacheManager(NAMESPACE, config, num_ranks=2)
    allocation = manager.match(prompt(1, 3))
    assert manager.allocate(allocation, 3 * BLOCK) is None
    manager.publish(allocation, 3 * BLOCK)
    manager.finish(allocation)
    saves = [each for each in manager.plan().transfers if each.route is Route.DEVICE_TO_HOST]
    assert [save.num_blocks for save in saves] == [3]
    return manager, saves[0]


def test_has_plan_is_true_after_probe_or_drop():
    manager, _ = two_ranks()
    transfers = manager.transfers
    assert not transfers.has_plan
    transfers.probe("disk", bytes(32))
    assert transfers.has_plan
    assert len(transfers.plan().probes) == 1
    assert not transfers.has_plan
    transfers.drop(Drop("disk"))
    assert transfers.has_plan
    assert transfers.plan().drops == (Drop("disk"),)
    assert not transfers.has_plan


def test_transfer_completes_when_all_ranks_have_reported():
    manager, save = two_ranks()
    transfers = manager.transfers
    assert (transfers.num_blocks(Route.DEVICE_TO_HOST), transfers.num_blocks(Route.STORE_TO_HOST, "disk")) == (3, 0)
    manager.apply(Report(0, 0, (TransferResult(save.id, True, 300, 0.25),)))
    assert (save.id in transfers.in_flight, bool(transfers.in_flight), transfers.num_blocks(Route.DEVICE_TO_HOST)) == (
        True,
        True,
        3,
    )
    manager.apply(Report(0, 1, (TransferResult(save.id, False, 100, 0.125, "lost", b"\1\0\1"),)))
    assert (save.id in transfers.in_flight, transfers.num_blocks(Route.DEVICE_TO_HOST)) == (False, 0)
    counts = transfers.counts
    assert counts[Route.DEVICE_TO_HOST].num_blocks == 2
    assert counts[Route.DEVICE_TO_HOST].num_failed == 1
    assert counts[Route.DEVICE_TO_HOST].num_bytes == 400
    assert counts[Route.DEVICE_TO_HOST].seconds == 0.25  # the time of the slower rank
    with pytest.raises(StateError, match="not in flight on this rank"):
        manager.apply(Report(0, 1, (TransferResult(save.id, True, 100, 0.1),)))
    manager.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_block_is_saved_only_if_all_ranks_saved_it(order):
    manager, save = two_ranks()
    outcomes = (
        TransferResult(save.id, False, 0, 0.1, "", b"\1\1\0"),
        TransferResult(save.id, False, 0, 0.1, "", b"\0\1\1"),
    )
    for rank in order:
        manager.apply(Report(0, rank, (outcomes[rank],)))
    counts = manager.transfers.counts
    assert (counts[Route.DEVICE_TO_HOST].num_blocks, counts[Route.DEVICE_TO_HOST].num_failed) == (1, 2)
    assert manager.tree.tiers[1].pool.num_used == 1
    manager.check()


def test_report_with_wrong_mask_size_or_wrong_rank_raises():
    manager, save = two_ranks()
    for arrived in (b"\1", b"\1" * 4):
        with pytest.raises(ArgumentError, match="has 3 blocks"):
            manager.apply(Report(0, 0, (TransferResult(save.id, False, 0, 0.1, "", arrived),)))
    for rank in (-1, 2):
        with pytest.raises(ArgumentError, match=f"rank {rank}"):
            manager.apply(Report(0, rank))
    with pytest.raises(StateError, match="reported transfer 99"):
        manager.apply(Report(0, 0, (TransferResult(99, True, 0, 0.1),)))
    assert save.id in manager.transfers.in_flight


def test_probe_completes_when_all_ranks_have_answered():
    transfers = two_ranks()[0].transfers
    first, second = transfers.probe("disk", bytes(32)), transfers.probe("disk", bytes(32))
    assert first != second
    assert not transfers.on_probe_result(0, first)
    assert not transfers.on_probe_result(0, first)
    assert not transfers.on_probe_result(1, second)
    assert transfers.on_probe_result(1, first)
    assert not transfers.on_probe_result(1, first)  # this probe has completed
    assert not transfers.on_probe_result(0, 12345)
    assert transfers.on_probe_result(0, second)


def test_report_for_save_planned_before_reset_only_frees_slots():
    manager, save = two_ranks()
    manager.reset()
    assert manager.plan().epoch == manager.transfers.epoch
    for rank in range(2):
        manager.apply(Report(0, rank, (TransferResult(save.id, True, 300, 0.1),), (StoreLookup("disk"),)))
    assert manager.tree.tiers[1].pool.num_used == 0
    assert manager.tree.num_leases == 0
    manager.check()
