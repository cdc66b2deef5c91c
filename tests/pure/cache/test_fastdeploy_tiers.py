"""Regression tests for defects of FastDeploy's Cache Manager V1 that span several tiers.

tests/ancestors.toml lists all defects. tests/pure/index/test_fastdeploy_defects.py covers the defects of the index.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import logging
import pickle
import sys
import textwrap

import numpy as np
import pytest

import kvtier.scheduler.scheduler
from cache_support import BLOCK, Lab, chain_of, content, disk, prompt
from kvtier.cache.admin import CacheAdmin
from kvtier.cache.allocation import Allocation
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.errors import StateError
from kvtier.index import MediaItem, Shortage
from kvtier.messages import Route, split_keys
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, SchedulerConfig
from scheduler_support import check_scheduler


def scheduler_of(lab: Lab, **limits) -> Scheduler:
    return Scheduler(lab.manager, SchedulerConfig(**{"max_rows": 4, "max_step_tokens": 64, **limits}))


def run(lab: Lab, scheduler: Scheduler, steps: int = 100) -> list:
    """Run steps until the scheduler has no work, and return the steps."""
    done = []
    for _ in range(steps):
        lab.now += 0.1
        step = scheduler.schedule(lab.now)
        done.append(step)
        for worker in lab.workers:
            worker.submit(step.plan)
            for row in step.rows:
                for block in range(row.first // BLOCK, -(-row.stop // BLOCK)):
                    worker.device[int(row.request.allocation.table[block])] = content(row.request.chain, block)
        scheduler.update(step, [RowResult((5,) if row.wants_token else ()) for row in step.rows], lab.now)
        lab.run_workers()
        check_scheduler(scheduler)
        if not scheduler.has_work():
            return done
    raise AssertionError(f"the scheduler still has work after {steps} steps")


def test_loaded_blocks_become_evictable_after_request_ends():
    lab = Lab(4, host=HostConfig(20))
    for _ in range(3):
        for number in (1, 2):
            lab.serve(prompt(number, 3))
            device = lab.control.tier("device")
            assert device.num_evictable == device.pool.num_used  # no request is running
    assert lab.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks >= 9


def test_manager_defines_every_method_that_callers_use():
    for where, name in ((kvtier.scheduler.scheduler.Scheduler, "self.manager"), (CacheAdmin, "manager")):
        called = {
            node.attr
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(where))))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name
        }
        assert called
        manager = CacheManager(Lab().manager.namespace, CacheConfig(4))
        assert [method for method in sorted(called) if not hasattr(manager, method)] == []


def test_prompt_with_other_image_misses_in_all_tiers():
    lab = Lab(20, stores=[disk()])
    cat, dog = (prompt(1, 4, media=[MediaItem(5, 2, name)]) for name in (b"cat", b"dog"))
    lab.serve(cat)
    lab.manager.reset()
    assert lab.serve(dog).num_cached_tokens == BLOCK  # the block before the image
    assert lab.serve(cat).num_cached_tokens == 4 * BLOCK


def test_each_config_field_is_defined_in_only_one_class():
    """Only size, policy, saving and free share may occur in the configs of several tiers."""
    per_tier = {"num_blocks", "policy", "saving", "free_share"}
    places: dict[str, list[str]] = {}
    for config in (CacheConfig, HostConfig, StoreConfig, WritebackConfig, SchedulerConfig):
        for field in dataclasses.fields(config):
            places.setdefault(field.name, []).append(config.__name__)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in per_tier} == {}


def test_cache_manager_does_not_change_its_config():
    config = CacheConfig(8, host=HostConfig(8, saving=WritebackConfig(WritePolicy.BACK)), stores=(disk(),))
    before = copy.deepcopy(config)
    lab = Lab(8)
    manager = CacheManager(lab.manager.namespace, config)
    manager.match(prompt(1, 2))
    manager.plan()
    assert config == before
    with pytest.raises(AttributeError):
        config.num_blocks = 9


def test_step_that_preempts_a_request_also_plans_saves():
    lab = Lab(6, host=HostConfig(20, saving=WritebackConfig(WritePolicy.BACK, low_share=1.0)))
    scheduler = scheduler_of(lab, max_rows=2, max_step_tokens=16)
    requests = [Request("first", prompt(1, 2), 12), Request("second", prompt(2, 2), 12)]
    for request in requests:
        scheduler.add(request, lab.now)
    steps = run(lab, scheduler)
    preempted = [step for step in steps if step.preempted]
    assert preempted
    assert all(request.num_preempted == 0 or request in preempted[0].preempted for request in requests)
    assert any(transfer.route is Route.DEVICE_TO_HOST for transfer in preempted[0].plan.transfers)
    assert all(request.state is RequestState.FINISHED for request in requests)


def test_pickled_request_does_not_contain_tree():
    """The request holds ten thousand blocks. Its allocation and prefetch must not be pickled."""
    lab = Lab(11_000)
    chain = chain_of(*(number % 50_000 for number in range(10_000 * BLOCK)), 1)
    allocation = lab.manager.match(chain)
    lab.manager.allocate(allocation, chain.num_tokens)
    lab.manager.on_scheduled(allocation)
    lab.manager.publish(allocation, chain.num_tokens)
    request = Request("r", chain_of(*chain.tokens.tolist()), 5, priority=3)
    request.allocation, request.state = allocation, RequestState.RUNNING
    limit = sys.getrecursionlimit()
    data = pickle.dumps(request)
    assert sys.getrecursionlimit() == limit
    assert len(data) < 4 * chain.num_tokens + 1000
    copied = pickle.loads(data)
    assert (copied.allocation, copied.prefetch) == (None, None)
    assert (copied.id, copied.priority, copied.max_new_tokens, copied.num_prompt_tokens) == (
        "r",
        3,
        5,
        chain.num_tokens,
    )
    assert np.array_equal(copied.chain.tokens, chain.tokens)
    assert request.allocation is allocation
    lab.manager.finish(allocation)


def test_reset_discards_queued_saves_and_saves_in_flight():
    """After a reset, queued saves do not start. When a save in flight is reported, only its host slots are freed."""
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(max_blocks=2)), stores=[disk()])
    allocation = lab.start(prompt(1, 8))
    lab.compute(allocation)
    lab.plan()
    lab.manager.finish(allocation)
    lab.manager.reset()
    other = lab.start(prompt(2, 8))
    lab.compute(other)
    lab.settle()
    assert lab.control.tier("device").pool.num_used == 9
    assert lab.control.tier("host").pool.num_used == 8
    assert len(lab.worker.stores["disk"]) == 8
    lab.verify(other)


@pytest.mark.parametrize("stores", [0, 1, 2])
def test_num_leases_does_not_depend_on_number_of_stores(stores):
    lab = Lab(20, stores=[disk(f"store{i}") for i in range(stores)])
    lab.serve(prompt(1, 4))
    allocation = lab.start(prompt(1, 4))
    assert lab.manager.tree.num_leases == 1 + (allocation.source is not None)
    lab.manager.abort(allocation)
    assert lab.manager.tree.num_leases == 0


def test_serving_requests_logs_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        lab = Lab(8, host=HostConfig(8), stores=[disk()])
        for number in range(6):
            lab.serve(prompt(number % 3, 4))
    assert caplog.records == []


def test_block_table_is_in_order_for_blocks_from_three_tiers():
    """The prompt has blocks in host memory, device memory and the store. Lab verifies the block at each position."""
    lab = Lab(40, host=HostConfig(40, saving=WritebackConfig(WritePolicy.BACK, low_share=0.0)), stores=[disk()])
    chain = prompt(1, 8)
    for block, key in enumerate(split_keys(chain.keys())):
        lab.worker.stores["disk"][key] = content(chain, block)
    lab.settle()
    allocation = lab.start(prompt(1, 6), lab.fetched(prompt(1, 6)))
    lab.compute(allocation)
    lab.manager.finish(allocation)
    tree, device = lab.manager.tree, lab.control.tier("device")
    for block in (0, 4):  # leave these blocks only in host memory
        lease = tree.match(chain, max_blocks=block + 1)
        tree.release(lease, used=False)
        tree.remove(device, lease.node, lease.node.num_blocks - 1, lease.node.num_blocks)
    fetch = lab.fetched(chain)
    allocation = lab.start(chain, fetch)
    assert allocation.tokens_from == {"disk": 2 * BLOCK, "host": 2 * BLOCK, "device": 4 * BLOCK}


def test_abort_of_unscheduled_request_releases_all_leases():
    lab = Lab(5, host=HostConfig(20), stores=[disk()])
    lab.serve(prompt(1, 4))
    lab.manager.reset()
    running = lab.start(prompt(2, 3))
    for _ in range(5):
        fetch = lab.fetched(prompt(1, 4))
        allocation = lab.manager.match(prompt(1, 4), prefetch=fetch)
        assert isinstance(lab.manager.allocate(allocation, 17), Shortage)
        lab.manager.abort(allocation)
        lab.manager.end_prefetch(fetch)
    assert lab.manager.tree.num_leases == 1
    lab.manager.abort(running)
    assert lab.manager.tree.num_leases == 0


def test_aborted_requests_do_not_count_as_uses():
    lab = Lab(20, host=HostConfig(20, saving=WritebackConfig(WritePolicy.SELECTIVE)))
    lab.serve(prompt(1, 4))
    for _ in range(5):
        lab.manager.abort(lab.start(prompt(1, 4)))
    lab.settle()
    assert lab.num_in("host", prompt(1, 4)) == 0
    lab.serve(prompt(1, 4))
    assert lab.num_in("host", prompt(1, 4)) == 4


def test_save_and_load_in_one_step_can_use_same_host_slots():
    """Host and device are full, so the loads and saves in one step need the same host slots."""
    lab = Lab(8, host=HostConfig(4, exclusive=False))
    for turn in range(12):
        lab.serve(prompt(turn % 3, 4))
    assert lab.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks >= 8


def test_failed_save_is_retried():
    lab = Lab(20)
    lab.serve(prompt(1, 4), lose=lambda move, _: [move.route is Route.DEVICE_TO_HOST] * move.num_blocks)
    assert lab.num_in("host", prompt(1, 4)) == 0
    assert lab.manager.transfers.counts[Route.DEVICE_TO_HOST].num_failed == 4
    assert lab.control.tier("host").pool.num_used == 0
    lab.evict("device")
    assert lab.serve(prompt(1, 4)).num_cached_tokens == 0
    assert lab.num_in("host", prompt(1, 4)) == 4


def test_recomputed_block_is_not_saved_again():
    lab = Lab(20)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    allocation = lab.manager.match(prompt(1, 4), may_load=False)
    lab.manager.allocate(allocation, 17)
    lab.compute(allocation)
    lab.manager.finish(allocation)
    lab.settle()
    assert lab.num_in("device", prompt(1, 4)) == 4
    assert [move.route for move in lab.worker.done] == [Route.DEVICE_TO_HOST]


def test_call_with_ended_allocation_raises():
    lab = Lab(20)
    allocation = lab.start(prompt(1, 2))
    lab.manager.finish(allocation)
    for end in (lab.manager.finish, lab.manager.abort, lab.manager.is_ready):
        with pytest.raises(StateError, match="ended"):
            end(allocation)
    assert isinstance(allocation, Allocation)
    lab.manager.check()


def test_match_stops_before_block_being_fetched():
    lab = Lab(20, stores=[disk()])
    lab.serve(prompt(1, 4))
    lab.manager.reset()
    fetch = lab.manager.prefetch(prompt(1, 4))
    lab.plan()
    allocation = lab.manager.match(prompt(1, 4))
    assert allocation.num_cached_tokens == 0
    lab.manager.abort(allocation)
    lab.run_workers()
    lab.manager.end_prefetch(fetch)
    assert lab.manager.tree.num_leases == 0
    assert lab.control.tier("host").num_evictable == 4
