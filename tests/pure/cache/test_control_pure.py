"""Operator commands for prompts (drop, demote, save, pin) and for tiers and stores (quota, vacate, resize, reset)."""

from __future__ import annotations

import pytest

from cache_support import BLOCK, Lab, chain_of, disk, prompt
from kvtier.cache.config import HostConfig, WritebackConfig, WritePolicy
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, MediaItem
from kvtier.messages import Route

SYSTEM = [7] * 8  # two blocks


def with_system(number: int, num_blocks: int = 3) -> Chain:
    """Return a prompt that begins with the blocks of SYSTEM."""
    return chain_of(*SYSTEM, *([number] * (num_blocks * BLOCK)), 1)


def lab_with_two_prompts() -> Lab:
    """Return a lab with two prompts of five blocks in all three tiers. The prompts share their first two blocks."""
    lab = Lab(40, host=HostConfig(40), stores=[disk()])
    lab.serve(with_system(1))
    lab.serve(with_system(2))
    assert len(lab.worker.stores["disk"]) == 8
    return lab


def in_tiers(lab: Lab, chain: Chain) -> list[int]:
    """Return how many blocks of a prompt the device, the host and the disk hold."""
    return [lab.num_in(tier, chain) for tier in ("device", "host", "disk")]


def settle(lab: Lab) -> None:
    lab.settle()
    lab.manager.check()


# ---- drop ----------------------------------------------------------------------------------------------------------


def test_drop_removes_prompt_and_keeps_shared_blocks():
    lab = lab_with_two_prompts()
    assert lab.control.drop(with_system(1)) == 3
    settle(lab)
    assert in_tiers(lab, with_system(1)) == [2, 2, 2]
    assert in_tiers(lab, with_system(2)) == [5, 5, 5]


def test_drop_removes_longer_prompts_with_same_prefix():
    lab = lab_with_two_prompts()
    longer = Chain(lab.manager.namespace, [*with_system(1).tokens[:-1].tolist(), *[5] * 9])
    lab.serve(longer)
    assert in_tiers(lab, longer) == [7, 7, 7]
    assert lab.control.drop(with_system(1)) == 5
    settle(lab)
    assert in_tiers(lab, longer) == [2, 2, 2]


def test_drop_of_shared_prefix_removes_both_prompts():
    lab = lab_with_two_prompts()
    assert lab.control.drop(chain_of(*SYSTEM)) == 8
    settle(lab)
    assert lab.worker.stores["disk"] == {}


@pytest.mark.parametrize(
    "chain",
    [chain_of(1, 2), chain_of(*[8] * 20), with_system(3), chain_of(*SYSTEM, 9, 9, 9, 9, 9), prompt(1, 2, salt=b"x")],
)
def test_drop_of_absent_prompt_keeps_other_prompts(chain):
    lab = lab_with_two_prompts()
    assert lab.control.drop(chain) == 0
    settle(lab)
    assert in_tiers(lab, with_system(1)) == [5, 5, 5]
    assert in_tiers(lab, with_system(2)) == [5, 5, 5]


def test_drop_of_prompt_found_only_in_store_keeps_shared_blocks():
    lab = lab_with_two_prompts()
    lab.evict("device")
    lab.evict("host")
    lab.serve(with_system(2))
    lab.control.drop(with_system(1))
    settle(lab)
    assert in_tiers(lab, with_system(1)) == [2, 2, 2]
    assert in_tiers(lab, with_system(2)) == [5, 5, 5]


def test_drop_after_reset_removes_only_the_given_prompt():
    lab = lab_with_two_prompts()
    lab.serve(prompt(5, 3))
    lab.manager.reset()
    lab.control.drop(prompt(5, 3))
    lab.control.drop(chain_of(1, 2, 3))  # a prompt without a full block
    settle(lab)
    assert lab.num_in("disk", prompt(5, 3)) == 0
    assert len(lab.worker.stores["disk"]) == 8


def test_drop_of_partly_evicted_prompt_removes_remaining_blocks():
    lab = Lab(40, host=HostConfig(20, exclusive=False), stores=[disk()])
    lab.serve(prompt(1, 6))
    tree = lab.manager.tree
    for tier in tree.tiers:
        tree.evict(tier, 2)
    assert lab.control.drop(prompt(1, 6)) == 4
    settle(lab)
    assert in_tiers(lab, prompt(1, 6)) == [0, 0, 0]


def test_drop_of_prompt_in_use_keeps_blocks_until_request_ends():
    lab = lab_with_two_prompts()
    allocation = lab.start(with_system(1))
    lab.control.drop(with_system(1))
    lab.verify(allocation)
    lab.compute(allocation)
    lab.manager.finish(allocation)
    settle(lab)
    assert in_tiers(lab, with_system(1)) == [2, 2, 2]
    assert lab.control.tier("device").pool.num_used == 5


def test_clear_stores_keeps_blocks_in_memory():
    lab = lab_with_two_prompts()
    lab.control.clear_stores()
    settle(lab)
    assert lab.worker.stores["disk"] == {}
    assert lab.manager.stores["disk"].num_known == 0
    assert in_tiers(lab, with_system(1)) == [5, 5, 0]


# ---- demote, save, pin ---------------------------------------------------------------------------------------------


def test_demote_frees_device_blocks_and_keeps_shared_blocks():
    lab = lab_with_two_prompts()
    assert lab.control.demote(with_system(1)) == 3
    assert in_tiers(lab, with_system(1)) == [2, 5, 5]
    assert in_tiers(lab, with_system(2)) == [5, 5, 5]
    assert lab.start(with_system(1)).tokens_from == {"host": 3 * BLOCK, "device": 2 * BLOCK}


@pytest.mark.parametrize("chain", [chain_of(*[8] * 20), with_system(3), chain_of(1, 2)])
def test_demote_of_absent_prompt_keeps_other_prompts(chain):
    lab = lab_with_two_prompts()
    lab.control.demote(chain)
    assert in_tiers(lab, with_system(1)) == [5, 5, 5]
    assert in_tiers(lab, with_system(2)) == [5, 5, 5]


def test_demote_without_host_copy_frees_nothing():
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(WritePolicy.BACK, low_share=0.0)))
    lab.serve(prompt(1, 4))
    assert lab.control.demote(prompt(1, 4)) == 0
    assert lab.num_in("device", prompt(1, 4)) == 4


@pytest.mark.parametrize("policy", [WritePolicy.SELECTIVE, WritePolicy.BACK])
def test_save_of_prompt_ignores_write_policy(policy):
    never = WritebackConfig(policy, min_uses=9, low_share=0.0)
    lab = Lab(20, host=HostConfig(20, saving=never), stores=[disk(saving=never)])
    lab.serve(prompt(1, 4))
    allocation = lab.start(prompt(2, 4))
    lab.compute(allocation)
    for _ in range(2):  # the first pass saves to the host, the second to the store
        lab.control.save(prompt(1, 4))
        while lab.control.plan_saves(0.0) or lab.manager.transfers.in_flight:
            lab.plan()
            lab.run_workers()
    assert in_tiers(lab, prompt(1, 4)) == [4, 4, 4]
    assert in_tiers(lab, prompt(2, 4)) == [4, 0, 0]


def test_save_of_prompt_includes_continuation_in_same_node():
    never = WritebackConfig(WritePolicy.SELECTIVE, min_uses=9)
    lab = Lab(20, host=HostConfig(20, saving=never), stores=[disk(saving=never)])
    lab.serve(prompt(1, 8))
    for _ in range(2):  # the first pass saves to the host, the second to the store
        lab.control.save(prompt(1, 4))
        while lab.control.plan_saves(0.0) or lab.manager.transfers.in_flight:
            lab.plan()
            lab.run_workers()
    assert in_tiers(lab, prompt(1, 8)) == [8, 8, 8]
    assert lab.control.demote(prompt(1, 4)) == 8


def test_save_all_stores_blocks_under_their_keys():
    never = WritebackConfig(WritePolicy.BACK, low_share=0.0)
    lab = Lab(40, host=HostConfig(40, saving=never), stores=[disk(saving=never)])
    chains = [
        with_system(1),
        with_system(2),
        prompt(1, 3, salt=b"tenant"),
        prompt(1, 3, adapter=b"lora"),
        prompt(1, 3, media=[MediaItem(5, 2, b"a cat")]),
        prompt(1, 3, media=[MediaItem(5, 2, b"a dog")]),
    ]
    for chain in chains:
        lab.serve(chain)
    for _ in range(2):  # the first pass saves to the host, the second to the store
        lab.control.save_all()
        while lab.control.plan_saves(0.0) or lab.manager.transfers.in_flight:
            lab.plan()
            lab.run_workers()
    for chain in chains:
        assert lab.num_in("disk", chain) == chain.num_blocks
    reopened = Lab(40, stores=[disk()], workers=lab.workers)
    reopened.settle()
    for chain in chains:
        allocation = reopened.start(chain, reopened.fetched(chain))
        assert allocation.num_cached_tokens == chain.num_blocks * BLOCK


def test_pinned_prompt_is_not_evicted_until_unpin():
    lab = Lab(8, host=HostConfig(6))
    lab.serve(prompt(1, 3))
    pin = lab.manager.pin(prompt(1, 3))
    for number in range(2, 9):
        lab.serve(prompt(number, 4))
    assert [lab.num_in(tier, prompt(1, 3)) for tier in ("device", "host")] == [3, 3]
    lab.manager.unpin(pin)
    for number in range(2, 9):
        lab.serve(prompt(number, 4))
    assert [lab.num_in(tier, prompt(1, 3)) for tier in ("device", "host")] == [0, 0]


def test_pin_keeps_slots_during_reset_until_unpin():
    lab = lab_with_two_prompts()
    pin = lab.manager.pin(with_system(1))
    lab.manager.reset()
    lab.manager.check()
    assert lab.control.tier("device").pool.num_used == 5
    lab.manager.unpin(pin)
    assert lab.control.tier("device").pool.num_used == 0
    with pytest.raises(KeyError):
        lab.manager.unpin(pin)


# ---- tiers ---------------------------------------------------------------------------------------------------------


def test_quota_limits_blocks_of_one_tenant_in_each_tier():
    lab = Lab(20, host=HostConfig(20))
    lab.control.set_quota("device", b"small", 5)
    lab.control.set_quota("host", b"small", 4)
    for number in range(4):
        lab.serve(prompt(number, 4, salt=b"small"))
        lab.serve(prompt(number, 2, salt=b"other"))
    for name, quota in (("device", 5), ("host", 4)):
        used = lab.control.tier(name).used_by
        assert used[b"small"] <= quota
        assert used[b"other"] == 8
    lab.control.set_quota("host", b"small", None)
    lab.serve(prompt(8, 4, salt=b"small"))
    assert lab.control.tier("host").used_by[b"small"] == 8


def test_vacate_empties_device_and_keeps_host_blocks():
    lab = lab_with_two_prompts()
    lab.control.vacate("device")
    lab.manager.check()
    assert lab.control.tier("device").pool.num_used == 0
    assert lab.start(with_system(1)).tokens_from == {"host": 5 * BLOCK, "device": 0}


@pytest.mark.parametrize(("tier", "size"), [("device", 6), ("device", 60), ("host", 3), ("host", 50)])
def test_resize_keeps_blocks_that_fit(tier, size):
    lab = lab_with_two_prompts()
    lab.control.resize(tier, size)
    lab.manager.check()
    pool = lab.control.tier(tier).pool
    assert pool.num_slots == size
    assert pool.num_used == min(8, size)
    lab.serve(with_system(1))
    assert (pool.free_slots() < size).all()


def test_resize_or_vacate_of_tier_in_use_raises():
    lab = Lab(20)
    allocation = lab.start(prompt(1, 4))
    with pytest.raises(StateError, match="1 requests hold"):
        lab.control.resize("device", 30)
    lab.compute(allocation)
    lab.manager.finish(allocation)
    assert lab.plan().transfers[0].route is Route.DEVICE_TO_HOST
    with pytest.raises(StateError, match="in flight"):
        lab.control.vacate("host")
    lab.run_workers()
    lab.control.vacate("host")
    with pytest.raises(RangeError, match="got 0"):
        lab.control.resize("device", 0)
    with pytest.raises(ArgumentError, match="device, host"):
        lab.control.tier("disk")


def test_reset_keeps_blocks_in_stores():
    lab = lab_with_two_prompts()
    lab.manager.reset()
    assert lab.manager.stats.tiers[0].num_used == 0
    assert lab.serve(with_system(1)).tokens_from == {"disk": 5 * BLOCK, "host": 0, "device": 0}


@pytest.mark.parametrize("how", ["drop", "reset"])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("holder", ["pin", "prefetch"])
def test_resize_succeeds_while_lease_holds_removed_blocks(how, tier, holder):
    lab = lab_with_two_prompts()
    lease = lab.manager.pin(with_system(2)) if holder == "pin" else lab.fetched(with_system(2))
    if how == "drop":
        lab.control.drop(with_system(2))
    else:
        lab.manager.reset()
    lab.settle()
    lab.control.resize(tier, 2)
    lab.manager.check()
    assert lab.control.tier(tier).pool.num_slots == 2
    end = lab.manager.unpin if holder == "pin" else lab.manager.end_prefetch
    end(lease)
    lab.manager.check()
    lab.evict("device")
    lab.evict("host")
    assert [lab.control.tier(name).pool.num_used for name in ("device", "host")] == [0, 0]
