"""State machine of one cache manager and two ranks. Copies and store calls fail on each rank independently."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from benchmarks.random_weights import random_weights
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.engine.cache_runtime import CacheRuntime, new_controller
from kvtier.engine.model import Model
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.index import Namespace
from kvtier.messages import Plan, Report
from kvtier.scheduler import RowResult, Scheduler, SchedulerConfig, Step
from kvtier.storage import MemoryStore
from kvtier.worker.controller import CacheController
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.sharding import Sharding
from storage_support import FaultyStore
from tiers_machine import BLOCK, TINY, Faults, TiersMachine, kv_of, run

RANKS = 2
HEADS = 2  # KV heads of each rank
RANK_CONFIG = replace(TINY, num_heads=HEADS, num_kv_heads=HEADS)
MODEL = Model(RANK_CONFIG, random_weights(RANK_CONFIG, torch.float32, torch.device("cpu"), seed=1))


class AllControllers:
    """The controllers of all ranks in one process, with the interface of one controller."""

    def __init__(self, controllers: Sequence[CacheController], groups: Sequence[DeviceCacheGroup]) -> None:
        self.all, self.groups = controllers, groups

    overlaps_compute = False

    def submit(self, plan: Plan) -> None:
        for controller in self.all:
            controller.submit(plan)

    def poll(self, *, loads_only: bool = False) -> list[Report]:
        return [report for controller in self.all for report in controller.poll(loads_only=loads_only)]

    @property
    def is_busy(self) -> bool:
        return any(controller.is_busy for controller in self.all)

    def wait(self, timeout: float) -> None:
        for controller in self.all:
            if controller.is_busy:
                controller.wait(timeout)

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        """Wait for the given loads on all ranks except rank 0. Return the layer waits of rank 0."""
        for controller in self.all[1:]:
            controller.layer_waits(transfer_ids).arrived()
        return self.all[0].layer_waits(transfer_ids)

    def release(self) -> None:
        for controller, group in zip(self.all, self.groups, strict=True):
            controller.release()
            group.free()

    def register(self, caches: Sequence[torch.Tensor]) -> None:
        for group in self.groups[1:]:
            group.renew(len(caches[0]))
        for controller, group in zip(self.all, self.groups, strict=True):
            controller.register([group.cache])

    def resize_host(self, num_blocks: int, _: Sequence[torch.Tensor]) -> None:
        for controller, group in zip(self.all, self.groups, strict=True):
            controller.resize_host(num_blocks, [group.cache])

    def close(self) -> None:
        for controller in self.all:
            controller.close()


class RanksMachine(TiersMachine):
    """TiersMachine with two ranks. Each rank has its own KV heads."""

    steps: ClassVar[Counter[str]] = Counter()
    hits: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.sampled_from([9, 12, 20]),
        num_host=st.sampled_from([3, 10, 60]),
        saving=st.builds(WritebackConfig, st.sampled_from(WritePolicy), max_blocks=st.sampled_from([1, 4, 100])),
        wait=st.sampled_from(WaitPolicy),
        is_shared=st.booleans(),
        num_shards=st.sampled_from([2, 4]),
        store_bytes=st.sampled_from([16000, 1 << 20]),
        seed=st.integers(0, 1 << 20),
        share=st.sampled_from([0.0, 0.15, 0.6]),
    )
    def begin(self, num_blocks, num_host, saving, wait, is_shared, num_shards, store_bytes, seed, share):
        namespace = Namespace("model", block_tokens=BLOCK)
        self.groups = [DeviceCacheGroup(MODEL, num_blocks, BLOCK) for _ in range(RANKS)]
        controllers = []
        for rank, group in enumerate(self.groups):
            store = FaultyStore(MemoryStore(store_bytes), Faults(seed + rank, share))
            sharding = Sharding(rank, RANKS, num_shards)
            self.controller = new_controller(num_host, [group], {"disk": store}, namespace.fingerprint, sharding)
            self.break_copies(random.Random(seed + 10 + rank), share / 2)
            controllers.append(self.controller)
        self.together = AllControllers(controllers, self.groups)
        disk = StoreConfig("disk", saving, wait, 3.0, is_shared=is_shared, max_fetching_blocks=6)
        config = CacheConfig(num_blocks, host=HostConfig(num_host, saving=saving), stores=(disk,), always_load=True)
        self.manager = CacheManager(namespace, config, num_ranks=RANKS, num_host_ready=num_host)
        limits = SchedulerConfig(max_rows=3, max_step_tokens=12, starts_early=True)
        self.scheduler = Scheduler(self.manager, limits)
        self.now = 0.0
        stores = {"disk": MemoryStore(1)}  # CacheRuntime uses these stores only for statistics
        self.tiers = CacheRuntime(
            self.manager, self.groups[:1], self.together, stores, self.scheduler, lambda: self.now
        )
        self.requests, self.num_requests, self.pins = [], 0, []
        self.samples = random.Random(seed + 2)

    def apply_reports(self) -> None:
        for controller in self.together.all:
            while controller._in_flight or controller._stores._num_open:
                controller.wait(0.01)
                for report in controller._transfers.poll():
                    controller._take(report)
        self.tiers.poll()

    def prepared(self, step: Step):
        for group in self.groups:
            for copy in step.copies:
                group.cache[copy.target] = group.cache[copy.source]
        return step.rows

    def compute(self, row) -> RowResult:
        """On every rank, check the KV of all tokens before the row, and write the KV of the row's tokens."""
        request = row.request
        table, tokens, salt = request.allocation.table, request.chain.tokens, request.chain.salt
        for rank, group in enumerate(self.groups):
            for position in range(row.stop):
                place = group.cache[int(table[position // BLOCK])][:, :, position % BLOCK]
                heads = [kv_of(tokens[: position + 1], salt + bytes([rank, head])) for head in range(HEADS)]
                if position >= row.first:
                    place[:] = torch.cat(heads, dim=2)
                elif not torch.equal(place, torch.cat(heads, dim=2)):
                    raise AssertionError(f"{request!r}: earlier token {position} has wrong KV on rank {rank}")
        for tier, count in request.tokens_from.items():
            self.hits[tier] += count
        return RowResult((self.samples.randrange(4, 8),) if row.wants_token else (), False)


def test_ranks_machine_never_reads_wrong_bytes():
    """Run at least 6,000 steps (40 per example on average). KVTIER_SOAK=200 runs 200 times as many examples."""
    run(RanksMachine, 150)
