"""CacheRuntime with a real controller: sleep, wake, resize, prefetch, demote, drop and reset, also during transfers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from benchmarks.random_weights import random_weights

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.engine.cache_runtime import CacheRuntime, new_controller
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.errors import ArgumentError, OutOfMemoryError, RangeError, StateError
from kvtier.index import Chain, Namespace
from kvtier.messages import Route, split_keys
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, SchedulerConfig
from kvtier.storage import MemoryStore
from kvtier.transfer import HostMemory
from scheduler_support import check_scheduler
from storage_support import Fault, FaultyStore
from tiers_machine import TiersMachine

BLOCK = 4
TINY = ModelConfig("llama", 2, 8, 8, 1, 1, 4, 16, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
MODEL = Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=1))


class Cache:
    """An engine that runs no model.

    `serve` writes KV that is computed from the tokens, and checks all KV that it reads.
    """

    def __init__(self, num_blocks=16, num_host=24, saving=None, store=None, **limits) -> None:
        self.namespace = Namespace("model", block_tokens=BLOCK)
        saving = saving or WritebackConfig()
        self.memory = MemoryStore(1 << 22)
        self.stores = {"disk": store or self.memory}
        config = CacheConfig(
            num_blocks,
            host=HostConfig(num_host, saving=saving),
            stores=(StoreConfig("disk", saving, WaitPolicy.WAIT),),
            always_load=True,
        )
        self.groups = [DeviceCacheGroup(MODEL, num_blocks, BLOCK)]
        self.controller = new_controller(num_host, self.groups, self.stores, self.namespace.fingerprint)
        self.manager = CacheManager(self.namespace, config, num_host_ready=self.controller.num_host_ready)
        self.scheduler = Scheduler(self.manager, SchedulerConfig(max_rows=4, max_step_tokens=64, **limits))
        self.now = 0.0
        self.tiers = CacheRuntime(
            self.manager, self.groups, self.controller, self.stores, self.scheduler, lambda: self.now
        )

    def chain(self, number: int, num_blocks: int = 4, salt: bytes = b"") -> Chain:
        return Chain(self.namespace, [number] * (num_blocks * BLOCK) + [1], salt=salt)

    def add(self, chain: Chain) -> Request:
        request = Request(f"r{self.now}-{chain.tokens[0]}", chain, 1)
        self.scheduler.add(request, self.now)
        return request

    def step(self) -> None:
        self.now += 0.01
        step = self.scheduler.schedule(self.now)
        self.tiers.submit(step.plan)
        results = [self.compute(row) for row in step.rows]
        self.scheduler.update(step, results, self.now)
        if not step.rows:
            self.tiers.wait()
        self.tiers.poll()
        check_scheduler(self.scheduler)

    def compute(self, row) -> RowResult:
        table, tokens = row.request.allocation.table, row.request.chain.tokens
        cache = self.groups[0].cache
        for position in range(row.stop):
            place = cache[int(table[position // BLOCK])][:, :, position % BLOCK]
            expected = kv_of(tokens[: position + 1], row.request.chain.salt, place.shape)
            if position >= row.first:
                place[:] = expected
            else:
                assert torch.equal(place, expected), position
        return RowResult((1,) if row.wants_token else (), False)

    def serve(self, chain: Chain) -> Request:
        request = self.add(chain)
        for _ in range(2000):
            if request.state.is_over:
                self.tiers._drain()
                return request
            self.step()
        raise AssertionError("the request did not finish")

    def num_in(self, name: str) -> int:
        return next(tier.num_used for tier in self.manager.stats.tiers if tier.name == name)


def kv_of(tokens: np.ndarray, salt: bytes, shape) -> torch.Tensor:
    digest = hashlib.shake_128(salt + tokens.astype("<i4").tobytes()).digest(2 * int(np.prod(shape)))
    return torch.from_numpy(np.frombuffer(digest, "<u2").astype(np.float32)).view(shape)


@pytest.fixture
def caches():
    made: list[Cache] = []

    def make(**options) -> Cache:
        made.append(Cache(**options))
        return made[-1]

    yield make
    for cache in made:
        cache.tiers.close()


def test_sleep_frees_device_blocks_and_wake_loads_from_host(caches):
    cache = caches()
    cache.serve(cache.chain(1))
    cache.tiers.sleep()
    cache.tiers.sleep()
    assert cache.groups[0].cache.numel() == 0
    assert (cache.num_in("device"), cache.num_in("host")) == (0, 4)
    waiting = cache.add(cache.chain(1))
    cache.step()
    assert waiting.state is RequestState.WAITING
    cache.tiers.wake()
    cache.tiers.wake()
    while not waiting.state.is_over:
        cache.step()
    assert waiting.tokens_from == {"host": 16, "device": 0}
    assert cache.groups[0].cache.shape[0] == 16


@pytest.mark.parametrize("num_blocks", [6, 16, 40])
def test_wake_with_new_size_waits_for_store_writes(caches, num_blocks):
    """While the engine sleeps, blocks are still copied between host and store. `wake` must wait for these copies."""
    cache = caches(saving=WritebackConfig(max_blocks=1))
    cache.add(cache.chain(1))
    for _ in range(3):
        cache.step()
    cache.tiers.sleep()
    step = cache.scheduler.schedule(cache.now)
    cache.tiers.submit(step.plan)
    cache.scheduler.update(step, [], cache.now)
    cache.manager.stores["disk"].drop(cache.chain(1).keys())  # so that `save_all` writes these blocks again
    cache.tiers._admin.save_all()
    cache.step()
    cache.tiers.wake(num_blocks)
    assert cache.manager.num_blocks == cache.groups[0].cache.shape[0] == num_blocks
    cache.serve(cache.chain(1))


@pytest.mark.parametrize("policy", WritePolicy)
def test_sleep_saves_all_blocks_with_any_write_policy(caches, policy):
    cache = caches(saving=WritebackConfig(policy, min_uses=5, low_share=0.0, max_blocks=2))
    for number in range(2):
        cache.serve(cache.chain(number))
    cache.tiers.sleep()
    cache.tiers.wake()
    for number in range(2):
        assert cache.serve(cache.chain(number)).tokens_from == {"host": 16, "device": 0}


def test_prefetch_does_not_wait_for_block_that_was_not_fetched(caches):
    """One block is not in the store, but the lease of another request keeps the node of this block in the tree.

    `prefetch` must not wait for the block.
    """
    memory = MemoryStore(1 << 22)
    cache = caches(store=memory)
    cache.serve(cache.chain(1))
    cache.tiers.reset()
    lost = cache.chain(1).keys()[32:64]
    memory.remove([lost])
    request = cache.add(cache.chain(1))
    request.prefetch = cache.manager.prefetch(request.chain, now=cache.now)
    while not request.prefetch.is_over:
        cache.tiers._drain()
    assert cache.tiers.prefetch(cache.chain(1)) == 0
    while not request.state.is_over:
        cache.step()
    assert request.tokens_from == {"disk": 4, "host": 0, "device": 0}


def test_prefetch_fetches_prompt_from_store_to_host(caches):
    cache = caches()
    cache.serve(cache.chain(1))
    cache.tiers.reset()
    assert cache.num_in("host") == 0
    assert cache.tiers.prefetch(cache.chain(1)) == 4
    assert cache.num_in("host") == 4
    assert cache.tiers.prefetch(cache.chain(2)) == 0
    assert cache.serve(cache.chain(1)).tokens_from == {"host": 16, "device": 0}


def test_demote_and_drop_affect_only_the_given_chain(caches):
    cache = caches(saving=WritebackConfig(WritePolicy.BACK, low_share=0.0))
    for number in (1, 2):
        cache.serve(cache.chain(number))
    assert cache.tiers.demote(cache.chain(1)) == 4
    assert cache.serve(cache.chain(1)).tokens_from == {"host": 16, "device": 0}
    cache.tiers.save_all()
    assert len(cache.memory.objects) == 8
    cache.tiers.drop(cache.chain(1))
    assert len(cache.memory.objects) == 4
    assert cache.serve(cache.chain(1)).num_cached_tokens == 0
    assert cache.serve(cache.chain(2)).tokens_from == {"device": 16}


@pytest.mark.parametrize("clear", [False, True])
def test_reset_removes_stored_blocks_only_with_clear_stores(caches, clear):
    cache = caches()
    cache.serve(cache.chain(1))
    cache.tiers.pin("system", cache.chain(1))
    cache.tiers.reset(clear_stores=clear)
    assert len(cache.memory.objects) == (0 if clear else 4)
    assert cache.serve(cache.chain(1)).num_cached_tokens == (0 if clear else 16)
    cache.tiers.pin("system", cache.chain(1))
    with pytest.raises(ArgumentError, match="'system' is pinned already"):
        cache.tiers.pin("system", cache.chain(1))
    cache.tiers.unpin("system")
    with pytest.raises(ArgumentError, match="no prompt is pinned"):
        cache.tiers.unpin("system")


@pytest.mark.parametrize(("tier", "size"), [("device", 6), ("device", 30), ("host", 4), ("host", 50)])
def test_waiting_requests_finish_after_resize_during_transfers(caches, tier, size):
    cache = caches()
    for number in range(3):
        cache.serve(cache.chain(number))
    requests = [cache.add(cache.chain(number, 3)) for number in range(3)]
    cache.step()
    cache.tiers.resize(tier, size)
    for _ in range(500):
        if all(request.state.is_over for request in requests):
            break
        cache.step()
    assert all(request.state is RequestState.FINISHED for request in requests)
    with pytest.raises(ArgumentError, match="no tier 'tape'"):
        cache.tiers.resize("tape", 3)


def test_resize_host_while_asleep_raises(caches):
    cache = caches()
    cache.tiers.sleep()
    with pytest.raises(StateError, match="asleep"):
        cache.tiers.resize("host", 30)
    cache.tiers.wake()


def test_store_errors_cause_misses_but_no_failed_requests(caches):
    memory = MemoryStore(1 << 22)
    faults = [Fault(), *[Fault("an error")] * 6]  # the first call succeeds, the next six fail, all later calls succeed
    cache = caches(store=FaultyStore(memory, faults))
    for number in range(4):
        assert cache.serve(cache.chain(number)).state is RequestState.FINISHED
    cache.tiers.reset()
    for _ in range(2):
        for number in range(4):
            assert cache.serve(cache.chain(number)).state is RequestState.FINISHED
    cache.tiers.reset()
    assert cache.serve(cache.chain(3)).tokens_from == {"disk": 16, "host": 0, "device": 0}


@pytest.mark.parametrize("tier", ["device", "host"])
def test_resize_beyond_free_memory_raises_and_keeps_sizes(tier):
    """Regression: a resize request from the fuzzer killed the server."""
    machine = TiersMachine()
    machine.begin(
        num_blocks=12,
        num_host=10,
        saving=WritebackConfig(),
        wait=WaitPolicy.WAIT,
        is_shared=False,
        always_load=True,
        free_share=0.0,
        store_bytes=1 << 20,
        seed=1,
        share=0.0,  # no faults
    )
    with pytest.raises(RangeError, match="GiB are available"):
        machine.tiers.resize(tier, 1 << 40)
    assert [state.num_blocks for state in machine.tiers.states()[:2]] == [12, 10]
    machine.add([1] * 9, 1, b"")
    machine.teardown()


def test_drop_runs_after_planned_writes_to_store(caches):
    """Regression: a plan contained a write of blocks to the store and a drop of them, and the drop ran first."""
    cache = caches()
    request, chain = cache.add(cache.chain(1)), cache.chain(1)
    planned = 0
    while not (request.state.is_over and not cache.manager.has_plans):
        cache.step()
        if cache.manager.transfers.has_plan and not planned:
            planned = sum(transfer.route is Route.HOST_TO_STORE for transfer in cache.manager.transfers._planned)
            if planned:
                cache.tiers.drop(chain)
    assert planned
    cache.tiers._drain()
    left = {key for key in split_keys(chain.keys()) if key in cache.memory.objects}
    assert not left


@pytest.mark.parametrize("asleep", [False, True])
def test_failed_device_resize_keeps_size_and_sleep_state(caches, asleep, monkeypatch):
    cache = caches()
    cache.serve(cache.chain(1))
    if asleep:
        cache.tiers.sleep()
    with pytest.raises(RangeError, match="at least one block"):
        cache.tiers.resize("device", 0)
    renew = DeviceCacheGroup.renew

    def too_much(self, num_blocks: int) -> None:
        if num_blocks == 40:
            raise OutOfMemoryError("no memory for 40 blocks")
        renew(self, num_blocks)

    monkeypatch.setattr(DeviceCacheGroup, "renew", too_much)
    with pytest.raises(OutOfMemoryError):
        cache.tiers.resize("device", 40)
    assert (cache.tiers.is_asleep, cache.manager.num_blocks) == (asleep, 16)
    cache.tiers.wake()
    assert cache.serve(cache.chain(1)).tokens_from == {"host": 16, "device": 0}


def test_failed_host_resize_keeps_size_and_blocks(caches, monkeypatch):
    cache = caches()
    cache.serve(cache.chain(1))
    make_present = HostMemory._make_present

    def refused(self, offset: int, nbytes: int) -> None:
        if self.num_slots == 100:
            raise OutOfMemoryError("the driver cannot pin more memory")
        make_present(self, offset, nbytes)

    monkeypatch.setattr(HostMemory, "_make_present", refused)
    with pytest.raises(OutOfMemoryError, match="of 100 host slots"):
        cache.tiers.resize("host", 100)
    assert cache.tiers.states()[1].num_blocks == 24
    cache.tiers.demote(cache.chain(1))
    assert cache.serve(cache.chain(1)).tokens_from == {"host": 16, "device": 0}
    cache.serve(cache.chain(2))
    assert cache.num_in("host") == 8
