"""The deciding side with stores under random events: no wrong block, no lost slot, everything comes to an end.

The tiers are dictionaries (cache_support.Worker): a slot holds what was written there last, and rubbish from the plan
of a copy to its end, so a block that is reused while it is read, or read before it is written, shows as wrong content.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_support import Lab, chain_of, content
from kvtier.cache.allocation import Allocation
from kvtier.cache.config import HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import LoadError
from kvtier.index import Chain, Lease, MediaItem
from kvtier.messages import Drop, Route, split_keys

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
STEPS = 60
SAVINGS = st.builds(
    WritebackConfig,
    st.sampled_from(WritePolicy),
    min_uses=st.sampled_from([1, 2]),
    max_blocks=st.sampled_from([1, 3, 100]),
    low_share=st.sampled_from([0.3, 1.0]),
    blocks_per_second=st.sampled_from([2.0, float("inf")]),
)
STORES = st.builds(
    StoreConfig,
    saving=SAVINGS,
    wait=st.sampled_from(WaitPolicy),
    wait_seconds=st.just(3.0),
    is_shared=st.booleans(),
    max_fetching_blocks=st.sampled_from([1, 4, 100]),
    max_known=st.sampled_from([5, 1000]),
)
PROMPTS = st.sampled_from(
    [
        *[(system, tail, length, "") for system in (1, 2) for tail in (0, 1) for length in (1, 2, 3)],
        *[(2, 0, 2, kind) for kind in "tma"],
        (0, 0, 0, ""),
        (2, 1, 3, "m"),
        (1, 0, 3, "t"),
    ]
)


class ManagerMachine(RuleBasedStateMachine):
    """Requests, operators, failures and stores that forget, over a manager and one or two ranks."""

    steps: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.sampled_from([7, 12, 24]),
        host=st.builds(HostConfig, st.sampled_from([2, 8, 40]), saving=SAVINGS, free_share=st.sampled_from([0.0, 0.2])),
        stores=st.lists(STORES, min_size=1, max_size=2),
        num_ranks=st.sampled_from([1, 1, 2]),
        always_load=st.booleans(),
        free_share=st.sampled_from([0.0, 0.2]),
        seed=st.integers(0, 1 << 20),
        loss=st.sampled_from([0.0, 0.2]),
    )
    def begin(self, num_blocks, host, stores, num_ranks, always_load, free_share, seed, loss):
        self.random = random.Random(seed)
        stores = [StoreConfig(f"store{i}", *fields(each)) for i, each in enumerate(stores)]
        self.lab = Lab(
            num_blocks, host=host, stores=stores, num_ranks=num_ranks, always_load=always_load, free_share=free_share
        )
        self.loss = loss
        self.waiting: list[tuple[Chain, Prefetch]] = []
        self.running: list[tuple[Allocation, bool]] = []
        self.pins: list[Lease] = []
        self.contents: dict[bytes, object] = {}

    def chain(self, which) -> Chain:
        """Prompts that share beginnings, of tenants, with adapters and images."""
        system, tail, length, kind = which
        tokens = [*([1] * (8 * system)), *([2 + tail] * (5 * length)), 7]
        media = [MediaItem(min(3, len(tokens) - 1), 2, b"%d" % tail)] if kind == "m" and len(tokens) > 5 else []
        chain = chain_of(*tokens, salt=b"t" * (kind == "t"), adapter=b"a" * (kind == "a"), media=media)
        self.know(chain)
        return chain

    def know(self, chain: Chain) -> None:
        for block, key in enumerate(split_keys(chain.keys())):
            self.contents[key] = content(chain, block)

    # ---- requests --------------------------------------------------------------------------------------------------

    @rule(which=PROMPTS)
    @precondition(lambda self: len(self.waiting) < 5)
    def ask(self, which):
        chain = self.chain(which)
        self.waiting.append((chain, self.lab.manager.prefetch(chain, now=self.lab.now)))

    @rule(first=PROMPTS, second=PROMPTS, count=st.integers(3, 8), until=st.sampled_from(["computed", "over"]))
    @precondition(lambda self: len(self.waiting) < 4)
    def ask_and_live(self, first, second, count, until):
        self.ask(first)
        self.ask(second)
        self.live(count, until)

    @rule(may_load=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.waiting)
    def admit(self, may_load):
        chain, fetch = self.waiting[self.random.randrange(len(self.waiting))]
        manager = self.lab.manager
        if not manager.is_prefetched(fetch, now=self.lab.now):
            return
        hold = manager.match(chain, now=self.lab.now, may_load=may_load, prefetch=fetch)
        for tier, count in hold.tokens_from.items():
            self.steps[tier] += count
        if manager.allocate(hold, chain.num_tokens) is not None:
            manager.abort(hold)
            return
        self.waiting.remove((chain, fetch))
        manager.end_prefetch(fetch)
        self.running.append((hold, False))

    @rule(more=st.integers(0, 5))
    @precondition(lambda self: self.running)
    def compute(self, more):
        """All its tokens the first time, some more that were generated after that."""
        lab, place = self.lab, self.random.randrange(len(self.running))
        hold, is_computed = self.running[place]
        try:
            if not lab.manager.is_ready(hold):
                return
        except LoadError:
            self.running.pop(place)
            lab.manager.abort(hold)
            return
        if is_computed:
            lab.manager.extend(hold, [self.random.randrange(8, 10) for _ in range(more)])
            self.know(hold.chain)
            if lab.manager.allocate(hold, hold.chain.num_tokens) is not None:
                self.running.pop(place)
                lab.manager.preempt(hold)
                return
        else:
            self.verify(hold)
        self.write(hold)
        self.running[place] = (hold, True)

    def verify(self, hold: Allocation) -> None:
        self.lab.verify(hold)
        if hold.copy is not None:
            tokens = hold.chain.tokens[: hold.num_cached_tokens].tolist()
            for worker in self.lab.workers:
                found = worker.device[hold.copy.source]
                assert list(found[-1][: len(tokens)]) == tokens, "the block to copy from begins otherwise"

    def write(self, hold: Allocation) -> None:
        lab = self.lab
        lab.manager.on_scheduled(hold, now=lab.now)
        for worker in lab.workers:
            for block in range(hold.lease.num_matched, len(hold.table)):
                if block >= hold.lease.num_blocks:  # its own
                    worker.device[int(hold.table[block])] = content(hold.chain, block)
        lab.manager.publish(hold, hold.chain.num_tokens, now=lab.now)

    @rule(how=st.sampled_from(["finish", "finish", "abort", "preempt"]))
    @precondition(lambda self: self.running)
    def end(self, how):
        hold, _ = self.running.pop(self.random.randrange(len(self.running)))
        getattr(self.lab.manager, how)(hold)

    @rule()
    @precondition(lambda self: self.waiting)
    def give_up(self):
        _, fetch = self.waiting.pop(self.random.randrange(len(self.waiting)))
        self.lab.manager.end_prefetch(fetch)

    # ---- time, workers, stores -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def plan(self, seconds):
        self.lab.plan(seconds)

    @rule(count=st.integers(1, 8))
    def hear(self, count):
        """Some tasks are done, in any order but that of one store's writes and drops."""
        for _ in range(count):
            worker = self.random.choice(self.lab.workers)
            if worker.todo:
                at = self.random.randrange(len(worker.todo))
                task = worker.todo[at][1]
                if isinstance(task, Drop) or getattr(task, "purpose", None) is Route.HOST_TO_STORE:
                    store = task.store
                    at = next(
                        i
                        for i, (_, each) in enumerate(worker.todo)
                        if (isinstance(each, Drop) or getattr(each, "purpose", None) is Route.HOST_TO_STORE)
                        and each.store == store
                    )
                self.lab.manager.apply(worker.work(self.lose, at))

    def lose(self, transfer, _rank):
        if self.random.random() >= self.loss:
            return [False] * transfer.num_blocks
        return [self.random.random() < 0.5 for _ in range(transfer.num_blocks)]

    @rule(count=st.integers(1, 6), until=st.sampled_from(["computed", "over"]))
    def live(self, count, until):
        """What an engine does all the time."""
        for _ in range(count):
            self.lab.plan(0.1)
            self.hear(20)
            if self.waiting:
                self.admit(True)
            if self.running:
                self.compute(2)
            if self.running and until == "over":
                self.end("finish")

    @rule()
    def forget(self):
        """Memory is needed for something else."""
        self.lab.evict("device")
        if self.random.random() < 0.5:
            self.lab.evict("host")

    @rule()
    def a_store_forgets(self):
        store = self.random.choice(list(self.random.choice(self.lab.workers).stores.values()))
        for key in self.random.sample(sorted(store), len(store) // 2):
            del store[key]

    # ---- operators -------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["drop", "demote", "save", "pin", "save_all", "clear", "reset", "quota"]), which=PROMPTS)
    def operate(self, what, which):
        manager, control = self.lab.manager, self.lab.control
        if what in ("drop", "demote", "save"):
            getattr(control, what)(self.chain(which))
        elif what == "save_all":
            control.save_all()
            control.plan_saves(self.lab.now)
        elif what == "clear":
            control.clear_stores()
        elif what == "reset":
            manager.reset()
        elif what == "quota":
            control.set_quota(self.random.choice(["device", "host"]), b"t", self.random.choice([1, 6, None]))
        elif self.pins:
            manager.unpin(self.pins.pop())
        else:
            self.pins.append(manager.pin(self.chain(which), now=self.lab.now))

    @rule(what=st.sampled_from(["vacate", "resize"]), tier=st.sampled_from(["device", "host"]), size=st.integers(2, 30))
    @precondition(lambda self: not self.running)
    def change(self, what, tier, size):
        while self.lab.manager.transfers.in_flight:
            self.lab.plan()
            self.hear(20)
        if what == "vacate":
            self.lab.control.vacate(tier)
        else:
            self.lab.control.resize(tier, max(size, 7) if tier == "device" else size)

    # ---- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self):
        self.steps["steps"] += 1
        if hasattr(self, "lab"):
            self.lab.manager.check()
            for worker in self.lab.workers:
                for store in worker.stores.values():
                    for key, found in store.items():
                        assert found == self.contents[key], "another block under this key"

    def teardown(self):
        """All come to an end, and then nothing is held and every slot can be had."""
        if not hasattr(self, "lab"):
            return
        lab = self.lab
        while self.running:
            lab.manager.abort(self.running.pop()[0])
        for _ in range(100):
            if all(lab.manager.is_prefetched(fetch, now=lab.now) for _, fetch in self.waiting):
                break
            lab.plan(0.5)
            self.hear(20)
        assert all(lab.manager.is_prefetched(fetch, now=lab.now) for _, fetch in self.waiting), "a fetch has no end"
        for pin in self.pins:
            lab.manager.unpin(pin)
        for _, fetch in self.waiting:
            lab.manager.end_prefetch(fetch)
        lab.settle()
        lab.manager.check()
        assert lab.manager.tree.num_leases == 0
        for name in ("device", "host"):
            lab.evict(name)
            assert lab.control.tier(name).pool.num_used == 0
        assert not any(lab.control.tier(name).used_by for name in ("device", "host"))


def fields(config: StoreConfig):
    """All but its name, in order."""
    return (
        config.saving,
        config.wait,
        config.wait_seconds,
        config.is_shared,
        config.max_fetching_blocks,
        config.max_known,
    )


def test_manager_machine_serves_no_wrong_block():
    """At least 5,000 steps; KVTIER_SOAK multiplies them."""
    before = ManagerMachine.steps["steps"]
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(
            max_examples=150 * SOAK,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert ManagerMachine.steps["steps"] - before >= 5_000 * SOAK
    assert min(ManagerMachine.steps[tier] for tier in ("device", "host", "store0")) > 0
