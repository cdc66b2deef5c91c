"""State machine that runs a cache manager and a controller with real copies and faulty stores.

The machine checks that no request reads wrong KV. The KV of a token depends only on the salt, the token and all earlier
tokens.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections import Counter
from typing import ClassVar

import numpy as np
import torch
from benchmarks.random_weights import random_weights
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.engine.cache_runtime import CacheRuntime, new_controller
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.index import Chain, Namespace
from kvtier.scheduler import Request, RowResult, Scheduler, SchedulerConfig, Step
from kvtier.storage import MemoryStore
from scheduler_support import check_scheduler
from storage_support import Fault, FaultyStore

BLOCK = 4
SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
STEPS = 60
TINY = ModelConfig("llama", 3, 8, 8, 1, 1, 4, 16, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
SYSTEMS = [[1] * 9, [2] * 8, [1] * 5 + [3] * 12]
PROMPT = {"which": st.integers(0, 2), "longer": st.integers(0, 6)}
LAYERS, DIM = TINY.num_layers, TINY.head_dim


def kv_of(tokens: np.ndarray, salt: bytes) -> torch.Tensor:
    """Return the KV of the last token as a tensor [layer, K/V, head, dim]. All values are exact in float32."""
    return _kv_of(salt + tokens.astype("<i4").tobytes())


@functools.lru_cache(1 << 14)  # every step needs the KV of all earlier tokens again
def _kv_of(data: bytes) -> torch.Tensor:
    digest = hashlib.shake_128(data).digest(LAYERS * 2 * DIM * 2)
    return torch.from_numpy(np.frombuffer(digest, "<u2").astype(np.float32)).view(LAYERS, 2, 1, DIM)


class Faults:
    """Yields a random fault for a share of the store calls, and no fault for the others.

    The faults depend only on the seed, so that a failing example is reproducible.
    """

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share

    def __iter__(self):
        return self

    def __next__(self) -> Fault:
        if self._random.random() >= self._share:
            return Fault()
        bit = self._random.randrange(1 << 12)
        chosen = bytes(self._random.sample(range(256), 128))
        some = lambda key: key[0] in chosen  # noqa: E731
        kinds = [Fault("an error"), Fault("an error", only=some), Fault(hangs=True, only=some)]
        kinds += [Fault(flip_bit=bit, only=some), Fault(cut_to=bit % 100, only=some)]
        return self._random.choice(kinds)


class TiersMachine(RuleBasedStateMachine):
    """Runs random requests, aborts, preemptions, faults and operations on two or three tiers."""

    device: ClassVar[str] = "cpu"
    steps: ClassVar[Counter[str]] = Counter()
    hits: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.sampled_from([9, 12, 20]),
        num_host=st.sampled_from([3, 10, 60]),
        saving=st.builds(
            WritebackConfig,
            st.sampled_from(WritePolicy),
            max_blocks=st.sampled_from([1, 4, 100]),
            low_share=st.sampled_from([0.3, 1.0]),
        ),
        wait=st.sampled_from(WaitPolicy),
        is_shared=st.booleans(),
        always_load=st.sampled_from([True, True, False]),
        free_share=st.sampled_from([0.0, 0.2]),
        store_bytes=st.sampled_from([8000, 1 << 20]),
        seed=st.integers(0, 1 << 20),
        share=st.sampled_from([0.0, 0.15, 0.6]),
        policy=st.sampled_from(["lru", "learned", "arc"]),
        exclusive=st.sampled_from([True, True, False]),
        has_store=st.sampled_from([True, True, False]),
    )
    def begin(
        self,
        num_blocks,
        num_host,
        saving,
        wait,
        is_shared,
        always_load,
        free_share,
        store_bytes,
        seed,
        share,
        policy="lru",
        exclusive=True,
        has_store=True,
    ):
        namespace = Namespace("model", block_tokens=BLOCK)
        model = Model(TINY, random_weights(TINY, torch.float32, torch.device(self.device), seed=1))
        self.groups = [DeviceCacheGroup(model, num_blocks, BLOCK)]
        self.share = share
        self.memory = MemoryStore(store_bytes)
        stores = {"disk": FaultyStore(self.memory, Faults(seed, share))}
        store = StoreConfig("disk", saving, wait, 3.0, is_shared=is_shared, max_fetching_blocks=6)
        host = HostConfig(num_host, policy, saving, free_share=free_share, exclusive=exclusive)
        config = CacheConfig(
            num_blocks,
            policy=policy,
            host=host,
            stores=(store,) if has_store else (),
            always_load=always_load,
            free_share=free_share,
        )
        self.controller = new_controller(num_host, self.groups, stores, namespace.fingerprint)
        self.break_copies(random.Random(seed + 1), share / 2)
        self.manager = CacheManager(namespace, config, num_host_ready=self.controller.num_host_ready)
        limits = SchedulerConfig(max_rows=3, max_step_tokens=12, starts_early=True)
        self.scheduler = Scheduler(self.manager, limits)
        self.now = 0.0
        self.tiers = CacheRuntime(self.manager, self.groups, self.controller, stores, self.scheduler, lambda: self.now)
        self.requests: list[Request] = []
        self.num_requests = 0
        self.pins: list[str] = []
        self.samples = random.Random(seed + 2)

    def break_copies(self, faults: random.Random, share: float) -> None:
        for lane in self.controller._transfers._lanes.values():
            mover = lane._mover

            def sometimes(*arguments, mover=mover):
                if faults.random() < share:
                    raise RuntimeError("the link is down")
                return mover(*arguments)

            lane._mover = sometimes

    # ---- requests and steps ----------------------------------------------------------------------------------------

    @rule(system=st.sampled_from(SYSTEMS), tail=st.lists(st.integers(4, 5), max_size=14), new=st.integers(1, 6))
    def add_prompt(self, system, tail, new):
        self.add([*system, *tail], new, b"")

    @rule(new=st.integers(1, 4), salt=st.sampled_from([b"", b"other"]), which=st.integers(0, 10))
    def add_known_prompt(self, new, salt, which):
        self.add([*SYSTEMS[which % 3], *([which] * which)], new, salt)

    def add(self, tokens, new, salt):
        # This check is not a Hypothesis precondition, because the number of requests depends on timing. If timing
        # decided which rules can run, Hypothesis could not reproduce a failure.
        if len(self.requests) >= 6:
            return
        self.num_requests += 1
        chain = Chain(self.manager.namespace, tokens, salt=salt)
        request = Request(f"r{self.num_requests}", chain, new, priority=self.num_requests % 2)
        self.requests.append(request)
        self.scheduler.add(request, self.now)

    @rule(count=st.integers(1, 12))
    def run_with_reports(self, count):
        """Run steps. Before each step, wait for all transfers and apply their reports."""
        for _ in range(count):
            self.apply_reports()
            self.step()

    @rule(count=st.integers(1, 4))
    def run(self, count):
        """Run steps without waiting for transfers."""
        for _ in range(count):
            self.step()

    def apply_reports(self) -> None:
        """Wait for all transfers and apply their reports, so that the result does not depend on timing."""
        while self.controller._in_flight or self.controller._stores._num_open:
            self.controller.wait(0.01)
            for report in self.controller._transfers.poll():
                self.controller._take(report)
        self.tiers.poll()

    def step(self) -> None:
        self.now += 0.25
        step = self.scheduler.schedule(self.now)
        transfers = self.tiers.begin_step(step.plan, step.loads)
        transfers.on_forward_launched()
        has_loaded = all([transfers.have_arrived(), transfers.have_succeeded()])
        results = [self.compute(row) if has_loaded else RowResult() for row in self.prepared(step)]
        if step.loads:
            self.apply_reports()
        self.scheduler.update(step, results, self.now)
        self.requests = [request for request in self.requests if not request.state.is_over]

    def prepared(self, step: Step):
        cache = self.groups[0].cache
        for copy in step.copies:
            cache[copy.target] = cache[copy.source]
        return step.rows

    def compute(self, row) -> RowResult:
        """Check the KV of every earlier token, then write the KV of the row."""
        request, cache = row.request, self.groups[0].cache
        table, tokens, salt = request.allocation.table, request.chain.tokens, request.chain.salt
        for position in range(row.stop):
            block = cache[int(table[position // BLOCK])]
            expected = kv_of(tokens[: position + 1], salt).to(cache.device)
            if position >= row.first:
                block[:, :, position % BLOCK] = expected
            elif not torch.equal(block[:, :, position % BLOCK], expected):
                raise AssertionError(f"{request!r}: token {position}, one of {row.first} earlier tokens, has wrong KV")
        for tier, count in request.tokens_from.items():
            self.hits[tier] += count
        return RowResult((self.samples.randrange(4, 8),) if row.wants_token else (), False)

    @rule(which=st.integers(0, 5))
    def cancel(self, which):
        if self.requests:
            self.scheduler.cancel(self.requests.pop(which % len(self.requests)), self.now)

    # ---- operations ------------------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["demote", "drop", "prefetch", "save_all", "reset", "forget", "forget", "forget", "sleep"]
        ),
        **PROMPT,
    )
    def operate(self, what, which, longer):
        """Run an operation. `reset` clears the stores if `longer` < 2.

        `forget` is a reset that keeps the stores. It is listed three times in the rule, so that it is frequent.
        """
        prompt = self.prompt(which, longer)
        if what in ("demote", "drop", "prefetch"):
            getattr(self.tiers, what)(prompt)
        elif what == "save_all":
            self.tiers.save_all()
        elif what == "sleep":
            self.tiers.sleep()
            assert self.groups[0].cache.shape[0] == 0
            self.step()
            self.tiers.wake(None if longer < 3 else 6 + longer)
        else:
            self.pins = []
            self.tiers.reset(clear_stores=what == "reset" and longer < 2)

    @rule(what=st.sampled_from(["device", "host", "pin"]), **PROMPT)
    def change(self, what, which, longer):
        if what != "pin":
            self.tiers.resize(what, 8 + 3 * longer)
        elif self.pins:
            self.tiers.unpin(self.pins.pop())
        else:
            self.num_requests += 1
            self.pins.append(f"pin{self.num_requests}")
            self.tiers.pin(self.pins[-1], Chain(self.manager.namespace, SYSTEMS[which][:8]))

    def prompt(self, which: int, longer: int) -> Chain:
        return self.manager_chain([*SYSTEMS[which], *([longer] * longer)])

    def manager_chain(self, tokens: list[int]) -> Chain:
        return Chain(self.manager.namespace, tokens)

    # ---- invariants ------------------------------------------------------------------------------------------------

    @invariant()
    def check_scheduler(self):
        self.steps["steps"] += 1
        if hasattr(self, "scheduler"):
            check_scheduler(self.scheduler)

    def teardown(self):
        """Run all requests until they end. Then check that no transfer and no lease remains."""
        if not hasattr(self, "scheduler"):
            return
        for pin in self.pins:
            self.tiers.unpin(pin)
        for _ in range(400):
            if not (self.scheduler.has_work() or self.manager.has_plans):
                break
            self.apply_reports()
            self.step()
        assert not self.scheduler.has_work()
        assert not self.manager.has_plans
        self.apply_reports()
        check_scheduler(self.scheduler)
        assert not self.manager.transfers.in_flight
        assert self.manager.tree.num_leases == 0
        self.tiers.close()


def run(machine: type[TiersMachine], examples: int, tiers: tuple[str, ...] = ("device", "host", "disk")) -> None:
    """Run a machine. Check that the examples had at least 40 steps on average and that every tier had hits.

    Examples are random, so a tier may have no hits by chance. Therefore, run the machine up to three times.
    """
    limits = settings(
        max_examples=examples * SOAK,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    for _ in range(3):
        before = machine.steps["steps"]
        run_state_machine_as_test(machine, settings=limits)
        assert machine.steps["steps"] - before >= 40 * examples * SOAK
        if min(machine.hits[tier] for tier in tiers) > 0:
            return
    raise AssertionError(f"a tier had no hits in three runs: {dict(machine.hits)}")
