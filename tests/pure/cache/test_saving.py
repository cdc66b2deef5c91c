"""Saves to lower tiers: write policies, budgets, size limits, and saves after a reset."""

from __future__ import annotations

import pytest

from cache_support import BLOCK, Lab, chain_of, disk, prompt
from kvtier.cache.config import HostConfig, WritebackConfig, WritePolicy
from kvtier.errors import RangeError
from kvtier.index import Namespace
from kvtier.messages import Route


def test_saves_beyond_in_flight_limit_are_delayed():
    lab = Lab(
        20,
        host=HostConfig(20, saving=WritebackConfig(max_blocks=3)),
        stores=[disk(saving=WritebackConfig(max_blocks=2))],
    )
    long = prompt(1, 10)
    lab.serve(long)
    assert lab.num_in("host", long) == 10
    assert lab.num_in("disk", long) == 10
    sizes = [transfer.num_blocks for transfer in lab.worker.done]
    assert max(sizes) <= 3
    assert sum(sizes) == 20


def test_save_into_small_host_tier_keeps_leading_blocks():
    lab = Lab(20, host=HostConfig(4), stores=[disk()])
    long = prompt(1, 10)
    lab.serve(long)
    assert lab.num_in("host", long) == 4
    lab.evict("device")
    allocation = lab.start(long)
    assert allocation.tokens_from == {"host": 4 * BLOCK, "device": 0}


def test_save_under_host_quota_keeps_leading_blocks():
    lab = Lab(20)
    lab.control.set_quota("host", b"tenant", 3)
    lab.serve(prompt(1, 8, salt=b"tenant"))
    lab.serve(prompt(2, 5))
    assert lab.num_in("host", prompt(1, 8, salt=b"tenant")) == 3
    assert lab.num_in("host", prompt(2, 5)) == 5
    assert lab.control.tier("host").used_by == {b"tenant": 3, b"": 5}


def test_stored_blocks_carry_the_tenant_of_their_salt():
    lab = Lab(20, host=HostConfig(20), stores=[disk()])
    lab.serve(prompt(1, 2, salt=b"shop\0user"))
    lab.serve(prompt(2, 3))
    stored = [transfer for transfer in lab.worker.done if transfer.route is Route.HOST_TO_STORE]
    assert {(transfer.tenant, transfer.num_blocks) for transfer in stored} == {(b"shop", 2), (b"", 3)}
    others = [transfer for transfer in lab.worker.done if transfer.route is not Route.HOST_TO_STORE]
    assert {transfer.tenant for transfer in others} == {b""}


@pytest.mark.parametrize("above", WritePolicy)
@pytest.mark.parametrize("below", WritePolicy)
def test_reused_blocks_reach_store_under_all_write_policies(above, below):
    """With low_share=1, the write-back policy saves blocks as soon as a request finishes."""
    host = HostConfig(20, saving=WritebackConfig(above, low_share=1.0))
    lab = Lab(20, host=host, stores=[disk(saving=WritebackConfig(below, low_share=1.0))])
    lab.serve(prompt(2, 1))
    lab.serve(prompt(1, 4))
    if WritePolicy.SELECTIVE in (above, below):
        lab.serve(prompt(1, 4))
    assert lab.num_in("host", prompt(1, 4)) == 4
    assert lab.num_in("disk", prompt(1, 4)) == 4


def test_selective_policy_saves_after_min_uses():
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(WritePolicy.SELECTIVE, min_uses=2)))
    saved = []
    for _ in range(4):
        lab.serve(prompt(1, 4))
        saved.append(lab.num_in("host", prompt(1, 4)))
    assert saved == [0, 0, 4, 4]  # the second and third requests reuse the blocks
    assert sum(transfer.num_blocks for transfer in lab.worker.done) == 4


def test_write_back_saves_oldest_blocks_when_device_runs_low():
    lab = Lab(10, host=HostConfig(20, saving=WritebackConfig(WritePolicy.BACK, low_share=0.5)))
    lab.serve(prompt(1, 2))
    lab.serve(prompt(2, 2))
    assert not lab.worker.done  # 6 of the 10 device blocks are free
    lab.serve(prompt(3, 2))
    assert [transfer.num_blocks for transfer in lab.worker.done] == [2, 2, 2]
    assert lab.worker.host[0][-1] == (1,) * BLOCK  # the first host slot has the first block of the oldest prompt


def test_write_through_saves_each_block_once():
    lab = Lab(20, stores=[disk()])
    for _ in range(3):
        lab.serve(prompt(1, 4))
    assert [transfer.route for transfer in lab.worker.done] == [Route.DEVICE_TO_HOST, Route.HOST_TO_STORE]


def test_saving_budget_limits_blocks_per_second():
    lab = Lab(40, host=HostConfig(40, saving=WritebackConfig(blocks_per_second=4.0)))
    allocation = lab.start(prompt(1, 20))
    lab.compute(allocation)
    started = []
    for seconds in (0.0, 0.5, 0.5, 1.0, 3.0, 0.0):
        started.append(sum(transfer.num_blocks for transfer in lab.plan(seconds).transfers))
    assert started == [4, 2, 2, 4, 4, 0]  # unused budget accumulates for at most one second


def test_budget_below_one_block_per_second_allows_saves():
    lab = Lab(40, host=HostConfig(40, saving=WritebackConfig(blocks_per_second=0.5)))
    lab.compute(lab.start(prompt(1, 4)))
    started = [sum(transfer.num_blocks for transfer in lab.plan(1.0).transfers) for _ in range(6)]
    assert sum(started) == 3
    assert max(started) == 1


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_free_share_keeps_part_of_each_tier_free(share):
    lab = Lab(20, host=HostConfig(16, free_share=share, exclusive=False), free_share=share)
    for number in range(6):
        lab.serve(prompt(number, 4))
    for name in ("device", "host"):
        pool = lab.control.tier(name).pool
        assert pool.num_free >= share * pool.num_slots
    assert lab.num_in("host", prompt(5, 4)) == 4


def test_save_all_saves_thousands_of_prompts():
    """`save_all` runs after every 500 prompts. Each call must save the prompts that are only on the device."""
    never = WritebackConfig(WritePolicy.BACK, low_share=0.0)
    lab = Lab(600, host=HostConfig(2000, saving=never), stores=[disk(saving=never)])
    for number in range(2000):
        allocation = lab.start(chain_of(number, number, number, number, 1))
        lab.compute(allocation)
        lab.manager.finish(allocation)
        if number % 500 == 499 and number < 1500:
            save_all(lab)
    assert not lab.manager.plan(now=0.0).transfers
    save_all(lab)
    assert lab.control.tier("host").pool.num_used == 2000
    save_all(lab)
    assert len(lab.worker.stores["disk"]) == 2000


def save_all(lab: Lab) -> None:
    lab.control.save_all()
    while lab.control.plan_saves(0.0) or lab.manager.transfers.in_flight:
        lab.plan()
        lab.run_workers()


def test_finish_after_namespace_change_saves_nothing():
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(WritePolicy.BACK, low_share=1.0)))
    allocation, other = lab.start(prompt(1, 4)), lab.start(prompt(2, 4))
    lab.compute(allocation)
    lab.manager.reset(Namespace("other weights", block_tokens=BLOCK))
    lab.manager.finish(allocation)
    assert not lab.plan()
    lab.manager.abort(other)
    assert lab.control.tier("device").pool.num_used == 0


def test_compute_after_namespace_change_saves_nothing():
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(WritePolicy.SELECTIVE)))
    lab.serve(prompt(1, 4))
    allocation = lab.start(prompt(1, 4))
    lab.manager.reset(Namespace("other weights", block_tokens=BLOCK))
    lab.compute(allocation)
    assert not lab.plan()
    lab.manager.finish(allocation)


def test_writeback_config_out_of_range_raises():
    for bad in ({"max_blocks": 0}, {"min_uses": 0}, {"blocks_per_second": 0.0}, {"low_share": 1.5}):
        with pytest.raises(RangeError, match=r"\d"):
            WritebackConfig(**bad)
