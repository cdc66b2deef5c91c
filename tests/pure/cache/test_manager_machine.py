"""Random events on a manager with stores never cause a wrong block, a lost slot or a request that does not end.

cache_support.Worker simulates the tiers with dictionaries. The target slots of a copy hold RUBBISH until the copy ends.
Therefore, a block has the wrong content if it is read too early or overwritten too early.
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
from kvtier.cache.manager import CacheManager
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import LoadError
from kvtier.index import BlocksRemoved, Chain, Event, IndexCleared, Lease, MediaItem
from kvtier.index.node import WRITING
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
# (system, tail, length, kind): see `ManagerMachine.chain`
PROMPTS = st.sampled_from(
    [
        *[(system, tail, length, "") for system in (1, 2) for tail in (0, 1) for length in (1, 2, 3)],
        *[(2, 0, 2, kind) for kind in "tma"],
        (0, 0, 0, ""),
        (2, 1, 3, "m"),
        (1, 0, 3, "t"),
    ]
)


class Mirror:
    """Collects the keys of the blocks in every tier from the events of the index and of the stores."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, IndexCleared):
            self.tiers.clear()
            return
        tier, keys = self.tiers.setdefault(event.tier, set()), split_keys(event.keys)
        if isinstance(event, BlocksRemoved):
            assert tier.issuperset(keys), "an unknown block was removed"
            tier.difference_update(keys)
        else:
            assert tier.isdisjoint(keys), "a block was stored twice"
            tier.update(keys)

    def check(self, manager: CacheManager) -> None:
        """Compare the keys of the device and the host with the tree, and the keys of stores with the manager."""
        held: dict[str, set[bytes]] = {}
        for node in manager.tree.nodes():
            for tier, part in zip(manager.tree.tiers, node.held, strict=True):
                states = part.states if part is not None else b""
                keys = {key for key, state in zip(split_keys(node.keys), states, strict=False) if state > WRITING}
                held.setdefault(tier.name, set()).update(keys)
        for tier in manager.tree.tiers:
            assert self.tiers.get(tier.name, set()) == held.get(tier.name, set()), tier.name
        for name, store in manager.stores.items():
            assert all(store.num_leading([key]) for key in self.tiers.get(name, ())), (
                "the events report a block that the manager does not know"
            )


class ManagerMachine(RuleBasedStateMachine):
    """Runs requests and operator commands on one or two ranks while transfers fail and stores lose objects."""

    steps: ClassVar[Counter[str]] = Counter()
    """Sums over all examples: the number of steps under "steps", and the cached tokens of each tier under its name."""

    @initialize(
        num_blocks=st.sampled_from([7, 12, 24]),
        host=st.builds(
            HostConfig,
            st.sampled_from([2, 8, 40]),
            policy=st.sampled_from(["lru", "learned"]),
            saving=SAVINGS,
            free_share=st.sampled_from([0.0, 0.2]),
            exclusive=st.sampled_from([True, True, False]),
            ahead_share=st.sampled_from([0.1, 1.0]),
        ),
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
        options = {"always_load": always_load, "free_share": free_share}
        self.mirror = Mirror()
        self.lab = Lab(num_blocks, host=host, stores=stores, num_ranks=num_ranks, listener=self.mirror, **options)
        self.loss = loss
        self.waiting: list[tuple[Chain, Prefetch]] = []
        self.running: list[tuple[Allocation, bool]] = []  # the bool is True if the prompt is computed
        self.pins: list[Lease] = []
        self.contents: dict[bytes, object] = {}

    def chain(self, which) -> Chain:
        """Return the prompt that an item of PROMPTS describes.

        The prompt begins with 8 * `system` times the token 1. Then come 5 * `length` times the token 2 + `tail`, and
        one token 7. Kind "t" sets a tenant. Kind "a" sets an adapter. Kind "m" adds an image if the prompt has more
        than five tokens.
        """
        system, tail, length, kind = which
        tokens = [*([1] * (8 * system)), *([2 + tail] * (5 * length)), 7]
        media = [MediaItem(min(3, len(tokens) - 1), 2, b"%d" % tail)] if kind == "m" and len(tokens) > 5 else []
        chain = chain_of(*tokens, salt=b"t" * (kind == "t"), adapter=b"a" * (kind == "a"), media=media)
        self.remember(chain)
        return chain

    def remember(self, chain: Chain) -> None:
        for block, key in enumerate(split_keys(chain.keys())):
            self.contents[key] = content(chain, block)

    # ---- requests --------------------------------------------------------------------------------------------------

    @rule(which=PROMPTS)
    @precondition(lambda self: len(self.waiting) < 5)
    def add(self, which):
        chain = self.chain(which)
        self.waiting.append((chain, self.lab.manager.prefetch(chain, now=self.lab.now)))

    @rule(first=PROMPTS, second=PROMPTS, count=st.integers(3, 8), until=st.sampled_from(["computed", "over"]))
    @precondition(lambda self: len(self.waiting) < 4)
    def add_and_serve(self, first, second, count, until):
        self.add(first)
        self.add(second)
        self.serve(count, until)

    @rule(may_load=st.sampled_from([True, True, False]))
    @precondition(lambda self: self.waiting)
    def admit(self, may_load):
        chain, fetch = self.waiting[self.random.randrange(len(self.waiting))]
        manager = self.lab.manager
        if not manager.is_prefetched(fetch, now=self.lab.now):
            return
        allocation = manager.match(chain, now=self.lab.now, may_load=may_load, prefetch=fetch)
        for tier, count in allocation.tokens_from.items():
            self.steps[tier] += count
        if manager.allocate(allocation, chain.num_tokens) is not None:
            manager.abort(allocation)
            return
        self.waiting.remove((chain, fetch))
        manager.end_prefetch(fetch)
        self.running.append((allocation, False))

    @rule(more=st.integers(0, 5))
    @precondition(lambda self: self.running)
    def compute(self, more):
        """Compute the prompt of a random request. If the prompt is computed, append and compute `more` tokens."""
        lab, place = self.lab, self.random.randrange(len(self.running))
        allocation, is_computed = self.running[place]
        try:
            if not lab.manager.is_ready(allocation):
                return
        except LoadError:
            self.running.pop(place)
            lab.manager.abort(allocation)
            return
        if is_computed:
            lab.manager.extend(allocation, [self.random.randrange(8, 10) for _ in range(more)])
            self.remember(allocation.chain)
            if lab.manager.allocate(allocation, allocation.chain.num_tokens) is not None:
                self.running.pop(place)
                lab.manager.finish(allocation)
                return
        else:
            self.verify(allocation)
        self.write(allocation)
        self.running[place] = (allocation, True)

    def verify(self, allocation: Allocation) -> None:
        self.lab.verify(allocation)
        if allocation.copy is not None:
            tokens = allocation.chain.tokens[: allocation.num_cached_tokens].tolist()
            for worker in self.lab.workers:
                found = worker.device[allocation.copy.source]
                assert list(found[-1][: len(tokens)]) == tokens, "the source block of the copy contains other tokens"

    def write(self, allocation: Allocation) -> None:
        lab = self.lab
        lab.manager.on_scheduled(allocation, now=lab.now)
        for worker in lab.workers:
            for block in range(allocation.lease.num_matched, len(allocation.table)):
                if block >= allocation.lease.num_blocks:  # the tree does not hold this block
                    worker.device[int(allocation.table[block])] = content(allocation.chain, block)
        lab.manager.publish(allocation, allocation.chain.num_tokens, now=lab.now)

    @rule(how=st.sampled_from(["finish", "finish", "finish", "abort"]))
    @precondition(lambda self: self.running)
    def end(self, how):
        allocation, _ = self.running.pop(self.random.randrange(len(self.running)))
        getattr(self.lab.manager, how)(allocation)

    @rule()
    @precondition(lambda self: self.waiting)
    def cancel(self):
        _, fetch = self.waiting.pop(self.random.randrange(len(self.waiting)))
        self.lab.manager.end_prefetch(fetch)

    # ---- time, workers, stores -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def plan(self, seconds):
        self.lab.plan(seconds)

    @rule(count=st.integers(1, 8))
    def run_workers(self, count):
        """Run tasks in random order, but keep the order of the writes and drops of each store."""
        for _ in range(count):
            worker = self.random.choice(self.lab.workers)
            if worker.todo:
                at = self.random.randrange(len(worker.todo))
                task = worker.todo[at][1]
                if isinstance(task, Drop) or getattr(task, "route", None) is Route.HOST_TO_STORE:
                    store = task.store
                    at = next(
                        i
                        for i, (_, each) in enumerate(worker.todo)
                        if (isinstance(each, Drop) or getattr(each, "route", None) is Route.HOST_TO_STORE)
                        and each.store == store
                    )
                self.lab.manager.apply(worker.work(self.lose, at))

    def lose(self, transfer, _rank):
        if self.random.random() >= self.loss:
            return [False] * transfer.num_blocks
        return [self.random.random() < 0.5 for _ in range(transfer.num_blocks)]

    @rule(count=st.integers(1, 6), until=st.sampled_from(["computed", "over"]))
    def serve(self, count, until):
        """Run `count` engine steps. Each step plans, runs workers, tries to admit a request and computes a request.

        If `until` is "over", each step also finishes a random request.
        """
        for _ in range(count):
            self.lab.plan(0.1)
            self.run_workers(20)
            if self.waiting:
                self.admit(True)
            if self.running:
                self.compute(2)
            if self.running and until == "over":
                self.end("finish")

    @rule()
    def evict(self):
        self.lab.evict("device")
        if self.random.random() < 0.5:
            self.lab.evict("host")

    @rule()
    def lose_half_of_a_store(self):
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
            self.run_workers(20)
        if what == "vacate":
            self.lab.control.vacate(tier)
        else:
            # the device has at least 7 blocks, as in `begin`
            self.lab.control.resize(tier, max(size, 7) if tier == "device" else size)

    # ---- invariants ------------------------------------------------------------------------------------------------

    @invariant()
    def check_manager_and_stores(self):
        self.steps["steps"] += 1
        if hasattr(self, "lab"):
            self.lab.manager.check()
            self.mirror.check(self.lab.manager)
            for worker in self.lab.workers:
                for store in worker.stores.values():
                    for key, found in store.items():
                        assert found == self.contents[key], "the store holds another block under this key"

    def teardown(self):
        """End all requests, prefetches and pins, then check that no lease remains and every slot is free."""
        if not hasattr(self, "lab"):
            return
        lab = self.lab
        while self.running:
            lab.manager.abort(self.running.pop()[0])
        for _ in range(100):
            if all(lab.manager.is_prefetched(fetch, now=lab.now) for _, fetch in self.waiting):
                break
            lab.plan(0.5)
            self.run_workers(20)
        assert all(lab.manager.is_prefetched(fetch, now=lab.now) for _, fetch in self.waiting), "a prefetch did not end"
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
    """Return all fields except the name, in the order of the constructor's parameters."""
    return (
        config.saving,
        config.wait,
        config.wait_seconds,
        config.is_shared,
        config.max_fetching_blocks,
        config.max_known,
    )


def test_manager_serves_no_wrong_block_under_random_events():
    """Run at least 5,000 steps. KVTIER_SOAK multiplies this number."""
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


def test_store_events_follow_writes_drops_and_resets():
    mirror = Mirror()
    lab = Lab(20, stores=[StoreConfig("disk")], listener=mirror)
    chain = chain_of(*range(1, 21), 7)

    def serve() -> None:
        allocation = lab.manager.match(chain, now=lab.now)
        assert lab.manager.allocate(allocation, chain.num_tokens) is None
        lab.settle()
        lab.compute(allocation)
        lab.manager.finish(allocation)
        lab.settle()

    serve()
    assert mirror.tiers["disk"] == {*split_keys(chain.keys())} == {*lab.worker.stores["disk"]}
    lab.control.drop(chain)
    assert not mirror.tiers["disk"]
    lab.settle()
    serve()
    lab.manager.reset()
    assert mirror.tiers == {}  # IndexCleared removes the keys of the store too, although the store keeps its blocks
    assert lab.worker.stores["disk"]
    lab.manager.stores["disk"].clear()
    mirror.check(lab.manager)
