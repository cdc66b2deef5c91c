"""The router's choices agree with estimates made by hand, and its queues stay consistent under random requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.cache.cost_model import CostModel
from kvtier.errors import ArgumentError, RangeError
from kvtier.messages import Route
from kvtier.router import EventBatch, ReplicaCosts, Router, RouterConfig, median_costs

SIZE = 16  # tokens per block
PROMPT = np.arange(1, 33, dtype=np.uint64) << np.uint64(40)  # the hashes of 32 blocks
TOKENS = 32 * SIZE + 8
# 10 ms per step, 1 ms per token, nothing for attention, 2 ms per block on the host and 20 ms per block in a store
COSTS = ReplicaCosts(0.01, 0.001, 0.0, 0.002, 0.02)


def new_router(names="abc", costs=COSTS, duplicate_cost=0.0):
    router = Router(RouterConfig(SIZE, 8, duplicate_cost))
    for name in names:
        router.add(name, costs)
    return router


def stored(router, name, hashes, medium="GPU", number=0):
    event = {"type": "BlockStored", "block_hashes": hashes.tolist(), "medium": medium}
    router.feed(name).apply(EventBatch(number, float(number), [event]))


def test_router_without_events_uses_replicas_in_turn():
    router = new_router()
    prompts = np.random.default_rng(0).integers(1, 1 << 63, (9, 4), np.uint64)
    decisions = [router.route(prompt, 64) for prompt in prompts]
    assert "".join(decision.replica for decision in decisions) == "abcabcabc"
    assert decisions[4].queue_seconds == pytest.approx(0.01 + 64 * 0.001)
    for decision in decisions:
        router.on_finish(decision)
    router.check()
    assert router.index.num_blocks == 0


def test_router_prefers_the_replica_with_the_longest_prefix():
    router = new_router()
    stored(router, "a", PROMPT[:10])
    stored(router, "b", PROMPT[:20])
    stored(router, "c", PROMPT[5:])  # useless without the first blocks of the prompt
    decision = router.route(PROMPT, TOKENS)
    assert (decision.replica, decision.num_blocks) == ("b", {"device": 20, "host": 0, "store": 0, "expected": 0})
    assert decision.start_seconds == pytest.approx(0.01 + (TOKENS - 20 * SIZE) * 0.001)


def test_router_weighs_tiers_by_replica_costs():
    """Loading takes 2 ms per host block and 20 ms per store block. Computing a block takes 16 ms."""
    router = new_router()
    stored(router, "a", PROMPT, "STORAGE")
    stored(router, "b", PROMPT[:16], "CPU")
    stored(router, "c", PROMPT[:15])
    decision = router.route(PROMPT, TOKENS)
    assert decision.replica == "c"
    assert decision.start_seconds == pytest.approx(0.01 + (TOKENS - 15 * SIZE) * 0.001)
    decision = router.route(PROMPT, TOKENS, without=frozenset("c"))
    assert decision.replica == "b"
    assert decision.start_seconds == pytest.approx(0.01 + 16 * 0.002 + (TOKENS - 16 * SIZE) * 0.001)
    decision = router.route(PROMPT, TOKENS, without=frozenset("bc"))
    assert decision.start_seconds == pytest.approx(0.01 + TOKENS * 0.001)  # computing is faster than the store


def test_router_avoids_replica_with_too_long_queue():
    router = new_router("ab")
    stored(router, "a", PROMPT)
    names = [router.route(PROMPT[:20], 20 * SIZE + 1).replica for _ in range(40)]
    assert names[:20] == ["a"] * 20  # a prompt takes 11 ms on replica a, and 331 ms on replica b
    assert "b" in names[20:]


@pytest.mark.parametrize(("duplicate_cost", "num_before"), [(0.0, 331 // 11), (1.0, 651 // 11)])
def test_router_charges_for_blocks_of_another_replica(duplicate_cost, num_before):
    """Replica a has the blocks of the prompt. The prompt takes 11 ms on a, and 331 ms on b.

    With a duplicate cost of 1, the router adds 320 ms to the time on b.
    """
    router = new_router("ab", duplicate_cost=duplicate_cost)
    stored(router, "a", PROMPT)
    names = [router.route(PROMPT[:20], 20 * SIZE + 1).replica for _ in range(80)]
    assert names.index("b") == num_before


def test_router_sends_equal_prefixes_to_one_replica():
    router = new_router()
    router.route(PROMPT[:4], 4 * SIZE + 1)
    first = router.route(PROMPT[8:], 24 * SIZE + 1)
    router.on_first_token(first)
    second = router.route(PROMPT[8:], 24 * SIZE + 9)
    assert first.replica == second.replica
    assert second.num_blocks["expected"] == 24
    router.on_finish(first)
    router.on_finish(second)
    router.check()
    assert router.route(PROMPT[8:], 24 * SIZE + 9).num_blocks["expected"] == 0


def test_router_without_available_replicas_returns_none():
    router = new_router("a")
    assert router.route(PROMPT, TOKENS, without=frozenset("a")) is None
    open_decision = router.route(PROMPT, TOKENS)
    router.remove("a")
    assert router.route(PROMPT, TOKENS) is None
    router.on_finish(open_decision)
    router.add("b")
    router.on_finish(open_decision)  # the call must not change replica b, which took the place of a
    router.check()
    assert router.route(PROMPT, TOKENS).replica == "b"


def test_router_with_bad_arguments_raises():
    router = new_router("a")
    with pytest.raises(ArgumentError, match="exists already"):
        router.add("a")
    for call in (router.remove, router.feed):
        with pytest.raises(ArgumentError, match="there is no replica 'x'; the replicas are a"):
            call("x")
    for name in "bcdefgh":
        router.add(name)
    with pytest.raises(RangeError, match="all 8 places"):
        router.add("i")
    with pytest.raises(RangeError, match="finite"):
        ReplicaCosts(0.0, float("nan"), 0.0, 0.0, 0.0)
    with pytest.raises(RangeError, match="at least 1"):
        RouterConfig(0)


def test_replica_costs_reproduce_cost_model_predictions():
    model = CostModel()
    assert ReplicaCosts.of(model, SIZE) == ReplicaCosts.guess(SIZE)
    for count, context in ((64, 0), (128, 500), (512, 0), (1, 2000), (256, 4000), (32, 100)) * 10:
        attended = count * (context + count / 2)
        model.observe_compute(count, attended, 0.005 + count * 2e-4 + attended * 3e-8)
    for count in (1, 8, 64, 200):
        model.observe_transfer((Route.HOST_TO_DEVICE, ""), count, 0.001 + count * 4e-5)
    costs = ReplicaCosts.of(model, SIZE)
    assert costs.step_seconds == pytest.approx(0.005, rel=1e-3)
    assert costs.token_seconds == pytest.approx(2e-4, rel=1e-3)
    assert costs.attended_seconds == pytest.approx(3e-8, rel=1e-3)
    assert costs.host_seconds == pytest.approx(4e-5, rel=1e-3)
    assert costs.store_seconds > costs.host_seconds


class RouterMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.router = Router(RouterConfig(SIZE, 4))
        self.open, self.numbers = [], {}

    @rule(name=st.sampled_from("abcd"))
    def toggle(self, name):
        if name in self.router.replicas:
            self.router.remove(name)
        else:
            self.router.add(name)
            self.numbers[name] = 0

    @rule(data=st.data(), first=st.integers(0, 20), count=st.integers(0, 12))
    def event(self, data, first, count):
        if self.router.replicas:
            name = data.draw(st.sampled_from(self.router.replicas))
            kind = data.draw(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]))
            medium = data.draw(st.sampled_from(["GPU", "CPU", "STORAGE"]))
            event = {"type": kind, "block_hashes": PROMPT[first : first + count].tolist(), "medium": medium}
            self.router.feed(name).apply(EventBatch(self.numbers[name], 0.0, [event]))
            self.numbers[name] += 1

    @rule(first=st.integers(0, 8), count=st.integers(0, 24), tokens=st.integers(1, 15))
    def route(self, first, count, tokens):
        decision = self.router.route(PROMPT[first : first + count], count * SIZE + tokens)
        assert (decision is None) == (not self.router.replicas)
        if decision is not None:
            assert decision.replica in self.router.replicas
            assert decision.start_seconds >= 0
            self.open.append(decision)

    @rule(data=st.data(), ends=st.booleans())
    def progress(self, data, ends):
        if self.open:
            decision = data.draw(st.sampled_from(self.open))
            (self.router.on_finish if ends else self.router.on_first_token)(decision)
            if ends:
                self.open.remove(decision)

    @invariant()
    def check(self):
        self.router.check()


def test_router_machine_keeps_queues_and_index_consistent():
    run_state_machine_as_test(RouterMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_measured_costs_are_none_for_steps_of_one_length():
    model = CostModel()
    assert ReplicaCosts.measured(model, 16) is None
    for _ in range(20):
        model.observe_compute(8, 8 * 100.0, 0.01)
    assert ReplicaCosts.measured(model, 16) is None
    assert ReplicaCosts.of(model, 16) == ReplicaCosts.guess(16)
    for num_tokens in (64, 256, 512):
        for _ in range(20):
            model.observe_compute(num_tokens, num_tokens * num_tokens / 2, 0.01 + 1e-3 * num_tokens)
    assert ReplicaCosts.measured(model, 16).token_seconds == pytest.approx(1e-3, rel=0.1)


def test_median_costs_ignore_one_wrong_fit():
    usual, odd = ReplicaCosts(0.1, 1e-3, 0.0, 0.01, 0.1), ReplicaCosts(0.0, 1e-6, 0.0, 0.0, 0.0)
    assert median_costs([usual, odd, usual]) == usual
