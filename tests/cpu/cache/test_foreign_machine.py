"""State machine of a manager without a device tier (`CacheManager.foreign`). A small engine owns the device blocks.

The engine checks all KV that it reads. Like vLLM, it counts references to its blocks. It fills a block with NaN when
the last reference is released. If a save reads a freed block, or if a step uses a block before the load of the block
has ended, a later check of the KV fails.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier import dtype as dt
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.foreign import SavePoint
from kvtier.cache.manager import CacheManager
from kvtier.cache.prefetch import Prefetch
from kvtier.index import Chain, Namespace
from kvtier.layout import CacheGroup, KVLayout, LayerSpec, TensorSpec
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Route
from kvtier.storage import MemoryStore
from kvtier.transfer import DeviceCache
from kvtier.worker.controller import CacheController
from kvtier.worker.sharding import Sharding
from storage_support import FaultyStore
from tiers_machine import Faults

BLOCK, LAYERS, DIM = 4, 3, 2
SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
SYSTEMS = [[1] * 9, [2] * 8, [1] * 5 + [3] * 12]
GROUP = CacheGroup("main", (LayerSpec((TensorSpec("kv", dt.f32, (1, BLOCK, DIM), head_axis=0),)),) * LAYERS)


@functools.lru_cache(1 << 16)  # large, because every step checks all earlier tokens
def kv_of(tokens: bytes, salt: bytes, rank: int) -> torch.Tensor:
    """Return the KV of the last token as [layer, dim]. The KV depends on all tokens, the salt and the rank."""
    digest = hashlib.shake_128(tokens + salt + bytes([rank])).digest(LAYERS * DIM * 2)
    return torch.from_numpy(np.frombuffer(digest, "<u2").astype(np.float32)).view(LAYERS, DIM)


@dataclass(eq=False)
class Running:
    """A request of the engine."""

    chain: Chain
    max_tokens: int
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    saved: SavePoint = field(default_factory=SavePoint)
    may_load: bool = True
    load: int | None = None
    prefetch: Prefetch | None = None
    is_running: bool = False
    is_over: bool = False


class ForeignMachine(RuleBasedStateMachine):
    """An engine that owns the device blocks, with random requests, aborts, preemptions, resets and faults."""

    steps: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.sampled_from([12, 16, 30]),  # the longest request has 40 tokens (10 blocks)
        num_host=st.sampled_from([3, 10, 60]),
        max_saving=st.sampled_from([1, 4, 100]),
        write=st.sampled_from(WritePolicy),
        wait=st.sampled_from(WaitPolicy),
        is_shared=st.booleans(),
        num_ranks=st.sampled_from([1, 2]),
        seed=st.integers(0, 1 << 20),
        share=st.sampled_from([0.0, 0.15, 0.6]),
    )
    def begin(self, num_blocks, num_host, max_saving, write, wait, is_shared, num_ranks, seed, share):
        namespace = Namespace("model", block_tokens=BLOCK)
        self.num_ranks, self.now, self.faults = num_ranks, 0.0, random.Random(seed)
        self.share = share / 2  # copies fail half as often as calls to a store
        self.views, self.controllers = [], []
        for rank in range(num_ranks):
            memory = torch.full((LAYERS, num_blocks, 1, BLOCK, DIM), torch.nan)
            cache = DeviceCache.layer_first(GROUP, [{"kv": layer} for layer in memory])
            store = FaultyStore(MemoryStore(1 << 20), Faults(seed + rank, share))
            self.views.append(memory)
            self.controllers.append(
                CacheController(
                    KVLayout(BLOCK, (GROUP,)),
                    [cache],
                    num_host,
                    stores={"disk": store},
                    namespace=namespace.fingerprint,
                    sharding=Sharding(rank, num_ranks, num_ranks),
                    layer_wise=False,
                    mover=self.copy_or_fail,
                )
            )
        saving = WritebackConfig(write, max_blocks=4)
        config = CacheConfig(
            0,
            owns_device=False,
            host=HostConfig(num_host, saving=WritebackConfig(max_blocks=max_saving)),
            stores=(StoreConfig("disk", saving, wait, 3.0, is_shared=is_shared, max_fetching_blocks=6),),
            always_load=True,
        )
        num_ready = min(each.num_host_ready for each in self.controllers)
        self.manager = CacheManager(namespace, config, num_ranks=num_ranks, num_host_ready=num_ready)
        self.references = [0] * num_blocks
        self.requests: list[Running] = []
        self.reads: dict[int, list[int]] = {}  # transfer id of a save -> device blocks that the save reads
        self.loads: dict[int, Running] = {}  # by transfer id
        self.samples = random.Random(seed + 2)

    def copy_or_fail(self, *arguments):
        if self.faults.random() < self.share:
            raise RuntimeError("the link is down")
        return run_path(*arguments)

    # ---- device blocks ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        free = [block for block, references in enumerate(self.references) if not references]
        if count > len(free):
            return None
        for block in free[:count]:
            self.references[block] += 1
        return free[:count]

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0
            if not self.references[block]:
                for memory in self.views:
                    memory[:, block] = torch.nan

    # ---- requests --------------------------------------------------------------------------------------------------

    @rule(system=st.sampled_from(SYSTEMS), tail=st.lists(st.integers(4, 5), max_size=14), new=st.integers(1, 9))
    def add_request(self, system, tail, new):
        if len(self.requests) < 5:
            salt = b"other" if new == 3 else b""  # some requests belong to another tenant
            chain = Chain(self.manager.namespace, [*system, *tail], salt=salt)
            request = Running(chain, chain.num_tokens + new)
            request.prefetch = self.manager.prefetch(chain, now=self.now)
            self.requests.append(request)

    @rule(which=st.integers(0, 4))
    def abort(self, which):
        if self.requests:
            self.end(self.requests[which % len(self.requests)])

    @rule(which=st.integers(0, 4))
    def preempt(self, which):
        running = [request for request in self.requests if request.is_running]
        if running:
            self.restart(running[which % len(running)])

    def restart(self, request: Running) -> None:
        self.free(request.table)
        request.table, request.num_computed, request.saved, request.is_running = [], 0, SavePoint(), False

    @rule(has_new_weights=st.booleans())
    def reset(self, has_new_weights):
        namespace = Namespace("model", "other weights", block_tokens=BLOCK) if has_new_weights else None
        if namespace is None:
            self.manager.reset()
        elif not self.requests:
            self.manager.reset(namespace)

    def end(self, request: Running) -> None:
        self.requests.remove(request)
        if request.prefetch is not None:
            self.manager.end_prefetch(request.prefetch)
        request.is_over = True
        if request.load is None:  # otherwise `finish_load` frees the blocks
            self.free(request.table)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), waits=st.booleans())
    def run(self, count, waits):
        for _ in range(count):
            self.step(waits=waits)

    def step(self, *, waits: bool) -> None:
        self.now += 0.25
        for request in [each for each in self.requests if not each.is_running and each.load is None]:
            self.admit(request)
        running = [request for request in self.requests if request.is_running]
        scheduled = [request for request in running if self.prepare(request)]
        if running and not scheduled:
            self.restart(running[-1])
        for request in scheduled:  # vLLM's connector also plans saves before the step computes the blocks
            self.save(request, min(request.num_computed + self.chunk(request), request.chain.num_tokens) // BLOCK)
        plan = self.manager.plan(now=self.now)
        loads = [each.id for each in plan.transfers if each.route is Route.HOST_TO_DEVICE]
        for controller in self.controllers:
            controller.submit(plan.only(loads))
        for request in scheduled:
            self.compute(request)
        for controller in self.controllers:
            controller.submit(plan.without(loads))
        self.apply_reports(waits=waits)

    def admit(self, request: Running) -> None:
        if request.prefetch is not None and not self.manager.is_prefetched(request.prefetch, now=self.now):
            return
        allocation = self.manager.match(request.chain, now=self.now, prefetch=request.prefetch)
        count = allocation.lease.num_matched if request.may_load else 0
        table = self.allocate(-(-request.chain.num_tokens // BLOCK))
        if table is not None:
            request.table = table
            request.is_running = not count
            self.steps["hits"] += count
            if count:
                blocks = np.array(table[:count], np.int32)
                request.load = self.manager.foreign.load(allocation, 0, blocks, request.prefetch)
                self.loads[request.load] = request
            self.manager.on_scheduled(allocation, now=self.now)
        self.manager.abort(allocation, now=self.now)
        if table is not None and request.prefetch is not None:
            self.manager.end_prefetch(request.prefetch)
            request.prefetch = None

    def chunk(self, request: Running) -> int:
        return min(6, request.chain.num_tokens - request.num_computed)

    def prepare(self, request: Running) -> bool:
        """Allocate blocks for all tokens of a request. Return True if the request can be in this step."""
        missing = -(-request.chain.num_tokens // BLOCK) - len(request.table)
        blocks = self.allocate(missing) if missing > 0 else []
        if blocks is not None:
            request.table += blocks
        return blocks is not None

    def save(self, request: Running, stop: int) -> None:
        if stop <= request.saved.num_blocks:
            return
        started = self.manager.foreign.save(request.chain, request.table, request.saved, stop, now=self.now)
        for number, blocks in started.items():
            self.reads[number] = blocks.tolist()
            self.steps["saves"] += len(blocks)
            for block in self.reads[number]:
                self.references[block] += 1

    def compute(self, request: Running) -> None:
        """Check the earlier KV and write a chunk of KV. After the last chunk, sample a token or end the request."""
        tokens, stop = request.chain.tokens.tobytes(), request.num_computed + self.chunk(request)
        for rank, memory in enumerate(self.views):
            for position in range(stop):
                place = memory[:, request.table[position // BLOCK], 0, position % BLOCK]
                expected = kv_of(tokens[: 4 * position + 4], request.chain.salt, rank)
                if position >= request.num_computed:
                    place[:] = expected
                elif not torch.equal(place, expected):
                    raise AssertionError(f"token {position} of {request.num_computed} is wrong on rank {rank}")
        request.num_computed = stop
        if stop == request.chain.num_tokens:
            if stop >= request.max_tokens:
                self.end(request)
            else:
                request.chain.append([self.samples.randrange(4, 8)])

    def apply_reports(self, *, waits: bool) -> None:
        while waits and any(each._in_flight or each._stores._num_open for each in self.controllers):
            for controller in self.controllers:
                if controller.is_busy:
                    controller.wait(0.01)
            self.poll()
        self.poll()

    def poll(self) -> None:
        for controller in self.controllers:
            for report in controller.poll():
                for done in self.manager.apply(report):
                    number = done.transfer.id
                    if number in self.reads:
                        self.free(self.reads.pop(number))
                    elif number in self.loads:
                        self.finish_load(self.loads.pop(number), done.arrived)

    def finish_load(self, request: Running, arrived: bytes) -> None:
        request.load = None
        if request.is_over:
            self.free(request.table)
            return
        stop = arrived.find(0)
        request.may_load = stop < 0
        request.num_computed = (len(arrived) if stop < 0 else stop) * BLOCK
        request.is_running = True

    # ---- invariants ------------------------------------------------------------------------------------------------

    @invariant()
    def check(self):
        self.steps["steps"] += 1
        if hasattr(self, "manager"):
            self.manager.check()
            expected = Counter(block for request in self.requests for block in request.table)
            expected.update(block for blocks in self.reads.values() for block in blocks)
            expected.update(block for each in self.loads.values() if each.is_over for block in each.table)
            assert {block: count for block, count in enumerate(self.references) if count} == expected

    def teardown(self):
        """Run all requests to their end, and check that all leases and references are released."""
        if not hasattr(self, "manager"):
            return
        for _ in range(400):
            if not (self.requests or self.manager.has_plans):
                break
            self.step(waits=True)
        assert not self.requests
        assert not self.manager.transfers.in_flight
        self.check()
        assert self.manager.tree.num_leases == 0
        assert not any(self.references)
        for controller in self.controllers:
            controller.close()


def test_foreign_machine_never_reads_wrong_bytes():
    """Examples have at least 40 steps on average. KVTIER_SOAK=200 runs 200 times as many examples."""
    examples = 100 * SOAK
    run_state_machine_as_test(
        ForeignMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert ForeignMachine.steps["steps"] >= 40 * examples
    assert min(ForeignMachine.steps["hits"], ForeignMachine.steps["saves"]) > 0
