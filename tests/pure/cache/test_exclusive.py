"""The exclusive host tier: eviction order, saves of blocks that the device evicts next, and loss of unsaved blocks."""

from __future__ import annotations

import pytest

from cache_support import BLOCK, Lab, chain_of, disk, prompt
from kvtier.cache.config import CacheConfig, HostConfig, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.errors import RangeError
from kvtier.index import Namespace
from kvtier.messages import Route


def full_lab(**options) -> Lab:
    """Return a lab that has served 14 prompts of four blocks.

    The device holds the last four prompts and three older blocks, so one of its 20 slots is free. The host is full,
    unless `options` prevent early saves.
    """
    lab = Lab(20, host=HostConfig(32, ahead_share=0.5, **options))
    for number in range(14):
        lab.serve(prompt(number, 4))
    return lab


def num_saved(lab: Lab) -> int:
    return lab.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks


def test_exclusive_tiers_hold_more_blocks_than_inclusive_tiers():
    num_held = {}
    for exclusive in (True, False):
        lab = Lab(16, host=HostConfig(16, exclusive=exclusive, ahead_share=0.25))
        for number in range(12):
            lab.serve(prompt(number, 4))
        chains = [prompt(number, 4) for number in range(12)]
        num_held[exclusive] = sum(max(lab.num_in(tier, chain) for tier in ("device", "host")) for chain in chains)
    assert num_held[False] == 16
    # The tiers have 32 slots together. The 4 blocks that the device evicts next are in both tiers.
    assert num_held[True] >= 28


def test_blocks_are_saved_early_while_host_has_free_slots():
    lab = Lab(16, host=HostConfig(16))
    lab.serve(prompt(1, 4))
    assert lab.num_in("host", prompt(1, 4)) == 4


def test_full_host_evicts_duplicates_of_device_blocks_first():
    lab = full_lab()
    host = lab.manager.tree.tiers[1]
    # The third-oldest prompt on the host. While it is served, the host evicts the two oldest prompts.
    loaded = 2 + next(number for number in range(14) if lab.num_in("host", prompt(number, 4)))
    lab.serve(prompt(loaded, 4))
    others = [n for n in range(14) if n != loaded and lab.num_in("host", prompt(n, 4))]
    assert [lab.num_in(tier, prompt(loaded, 4)) for tier in ("device", "host")] == [4, 4]
    before = host.num_duplicates_evicted
    assert lab.manager.tree.evict(host, 2) is None
    assert host.num_duplicates_evicted == before + 2
    assert [lab.num_in(tier, prompt(loaded, 4)) for tier in ("device", "host")] == [4, 2]
    assert [n for n in others if lab.num_in("host", prompt(n, 4))] == others


def test_block_is_saved_again_before_device_evicts_it():
    lab = full_lab()
    victim = lab.manager.tree.tiers[0].victim()
    lab.settle()
    assert victim.held[1] is not None
    assert victim.held[1].num_held == victim.num_blocks
    assert lab.manager.queues[0].num_saved_late > 0


def test_loaded_block_returns_to_host_before_eviction():
    lab = full_lab()
    old = next(n for n in range(14) if not lab.num_in("device", prompt(n, 4)) and lab.num_in("host", prompt(n, 4)))
    lab.serve(prompt(old, 4))
    for number in range(30, 36):
        lab.serve(prompt(number, 4))
    assert lab.num_in("device", prompt(old, 4)) == 0
    assert lab.num_in("host", prompt(old, 4)) == 4


def test_device_evicts_unsaved_block_without_waiting():
    """No plan runs between the allocations, so no block is saved again before the device evicts it."""
    lab = full_lab()
    allocations = [lab.manager.match(prompt(40 + number, 4)) for number in range(3)]
    for allocation in allocations:
        assert lab.manager.allocate(allocation, 4 * BLOCK) is None
    held = [max(lab.num_in(tier, prompt(n, 4)) for tier in ("device", "host")) for n in range(10, 14)]
    assert 0 in held
    lab.manager.check()


def test_eviction_of_parent_on_device_frees_child_on_host():
    lab = Lab(16, host=HostConfig(16))
    lab.serve(chain_of(*[1] * BLOCK, *[2] * BLOCK, 9))
    tree = lab.manager.tree
    device, host = tree.tiers
    assert tree.evict(device, 1) is None  # now the second block is only on the host
    assert tree.evict(host, 1) is None  # now the first block is only on the device
    assert host.num_duplicates_evicted == 1
    assert lab.num_in("device", chain_of(*[1] * BLOCK, *[2] * BLOCK, 9)) == 1
    assert lab.num_in("host", chain_of(*[1] * BLOCK, *[2] * BLOCK, 9)) == 1
    assert tree.evict(device, 1) is None
    assert (device.pool.num_used, host.pool.num_used) == (0, 0)
    lab.manager.check()


def test_failed_save_of_next_victim_leads_to_miss():
    lab = Lab(8, host=HostConfig(8, ahead_share=0.5))
    for number in range(8):
        lab.serve(prompt(number, 4), lose=lambda move, _: [move.route is Route.DEVICE_TO_HOST] * move.num_blocks)
    assert lab.num_in("host", prompt(0, 4)) == 0
    assert lab.serve(prompt(0, 4)).num_cached_tokens == 0


def test_selective_policy_saves_only_reused_next_victims():
    saving = WritebackConfig(WritePolicy.SELECTIVE)
    lab = full_lab(saving=saving)
    assert num_saved(lab) == 0
    for _ in range(3):
        for number in range(10, 13):
            lab.serve(prompt(number, 4))
    for number in range(30, 34):
        lab.serve(prompt(number, 4))
    assert num_saved(lab) == 12  # three prompts of four blocks


def test_limit_on_saves_in_flight_applies_to_next_victims():
    lab = Lab(16, host=HostConfig(16, ahead_share=1.0, saving=WritebackConfig(max_blocks=1)))
    for number in range(4):
        lab.serve(prompt(number, 4))
    for number in range(4, 12):
        allocation = lab.start(prompt(number, 4))
        lab.compute(allocation)
        lab.manager.finish(allocation)
        lab.plan()
        assert lab.manager.transfers.num_blocks(Route.DEVICE_TO_HOST) <= 1
        lab.run_workers()
    lab.settle()


@pytest.mark.parametrize("is_shared", [False, True])
def test_store_receives_blocks_early_although_host_is_full(is_shared):
    lab = Lab(16, host=HostConfig(4), stores=[disk(is_shared=is_shared)])
    for number in range(4):
        lab.serve(prompt(number, 4))
    assert [lab.num_in("disk", prompt(number, 4)) for number in range(4)] == [4, 4, 4, 4]


def test_next_victims_are_saved_to_the_store():
    saving = WritebackConfig(WritePolicy.BACK, low_share=0.0)
    lab = Lab(20, host=HostConfig(64, saving=saving, ahead_share=0.5), stores=[disk()])
    for number in range(8):
        lab.serve(prompt(number, 4))
    assert lab.num_in("disk", prompt(0, 4)) == 4


def test_inclusive_option_keeps_recent_blocks_on_host():
    lab = full_lab(exclusive=False)
    assert [lab.num_in("host", prompt(number, 4)) for number in range(10, 14)] == [4, 4, 4, 4]
    assert lab.manager.tree.tiers[1].num_duplicates_evicted == 0


def test_host_tier_below_device_of_other_engine_is_inclusive():
    config = CacheConfig(0, host=HostConfig(8, exclusive=True), owns_device=False)
    manager = CacheManager(Namespace("model", block_tokens=BLOCK), config)
    assert [tier.faster for tier in manager.tree.tiers] == [None]  # only the host, which has no faster tier


def test_tenant_at_device_quota_saves_its_own_blocks_first():
    """A tenant at its quota evicts its own blocks. Therefore its own oldest blocks must be saved first."""
    lab = Lab(64, host=HostConfig(64, ahead_share=0.25, saving=WritebackConfig(WritePolicy.BACK, low_share=0.0)))
    lab.control.set_quota("device", b"t", 32)
    for number in range(9):
        lab.serve(prompt(number, 4, salt=b"t"))
    assert lab.num_in("device", prompt(0, 4, salt=b"t")) == 0
    assert lab.num_in("host", prompt(0, 4, salt=b"t")) == 4


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_invalid_ahead_share_is_rejected(share):
    with pytest.raises(RangeError, match="ahead_share"):
        HostConfig(4, ahead_share=share)
