"""Scheduler and CacheManager against a model of the device: every step finds in its slots exactly its own prefix."""

from __future__ import annotations

import os
import random
import zlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.cache.manager import CacheConfig, CacheManager
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, MissReason, Namespace
from kvtier.scheduler import Control, Request, RequestState, RowResult, Scheduler, SchedulerConfig, Step

BLOCK = 4


class Device:
    """The device tier as a dictionary: (slot, offset) -> the prefix whose KV was computed there."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: Step, finish: set[str] = frozenset()) -> list[RowResult]:
        for copy in step.copies:
            for offset in range(copy.num_tokens):
                self.kv[copy.target, offset] = self.kv[copy.source, offset]
        results = []
        for row in step.rows:
            request, table = row.request, row.request.hold.table.tolist()
            tokens = (*request.chain.tokens.tolist(), *request.draft)
            for position in range(row.first):  # everything before must be there, computed from this very prefix
                assert self.kv[table[position // BLOCK], position % BLOCK] == tokens[: position + 1]
            for position in range(row.first, row.stop):
                self.kv[table[position // BLOCK], position % BLOCK] = tokens[: position + 1]
            results.append(RowResult(self.sample(row, tokens), request.id in finish))
        return results

    def sample(self, row, tokens) -> tuple[int, ...]:
        if not row.wants_token:
            return ()
        known = row.stop - row.num_draft
        new = [next_token(tokens[:known])]
        for guess in tokens[known : row.stop]:
            if guess != new[-1]:
                break
            new.append(next_token((*tokens[:known], *new)))
        return tuple(new)


def next_token(prefix: tuple[int, ...]) -> int:
    """What the model says after a prefix."""
    return zlib.crc32(repr(prefix).encode()) % 3


def alone(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


def make(num_blocks: int = 8, *, prefix_caching: bool = True, **limits) -> Scheduler:
    namespace = Namespace("model", block_tokens=BLOCK)
    manager = CacheManager(namespace, CacheConfig(num_blocks, prefix_caching=prefix_caching))
    return Scheduler(manager, SchedulerConfig(**{"max_rows": 4, "max_step_tokens": 8, **limits}))


def request(scheduler: Scheduler, name: str, prompt, new: int = 4, *, now: float = 0.0, priority: int = 0) -> Request:
    made = Request(name, Chain(scheduler.manager.namespace, list(prompt)), new, priority=priority)
    scheduler.add(made, now)
    return made


def run(scheduler: Scheduler, device: Device, steps: int = 1000) -> int:
    """Until there is nothing to do; returns the steps taken."""
    for taken in range(steps):
        if not scheduler.has_work():
            return taken
        step = scheduler.schedule(float(taken))
        scheduler.update(step, device.run(step), float(taken))
        scheduler.check()
    raise AssertionError("no end")


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, cancellations, priorities, drafts, resets and tiny pools; what is generated is never wrong."""

    @initialize(
        num_blocks=st.sampled_from([3, 5, 9, 20]),
        caching=st.booleans(),
        rows=st.integers(1, 4),
        budget=st.sampled_from([4, 5, 16]),
    )
    def begin(self, num_blocks, caching, rows, budget):
        self.scheduler = make(num_blocks, prefix_caching=caching, max_rows=rows, max_step_tokens=budget)
        self.device, self.now = Device(), 0.0
        self.requests: list[tuple[Request, tuple[int, ...]]] = []
        self.controls: list[str] = []
        self.num_controls = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), new=st.integers(1, 9), priority=st.integers(0, 2)
    )
    def add(self, prompt, new, priority):
        name = f"r{len(self.requests)}"
        made = request(self.scheduler, name, prompt, new, priority=priority)
        self.requests.append((made, tuple(prompt)))

    @precondition(lambda self: self.scheduler.has_work())
    @rule(data=st.data(), steps=st.integers(1, 4))
    def step(self, data, steps):
        for _ in range(steps):
            self.now += 1.0
            running = self.scheduler.running
            for each in running:
                if each.is_generating and data.draw(st.booleans()):
                    prefix = tuple(each.chain.tokens.tolist())
                    guess = alone(prefix, 2) if data.draw(st.booleans()) else (0, 1)
                    room = each.max_new_tokens - each.num_new_tokens - 1
                    each.draft = guess[: max(0, room)]
            step = self.scheduler.schedule(self.now)
            assert step.num_tokens <= self.scheduler.config.max_step_tokens
            assert len({row.request.id for row in step.rows}) == len(step.rows) <= self.scheduler.config.max_rows
            for control in step.controls:
                control.run()
            finish = {each.id for each in running if data.draw(st.integers(0, 15)) == 0}
            self.scheduler.update(step, self.device.run(step, finish), self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        chosen, _ = data.draw(st.sampled_from(self.requests))
        was_over = chosen.state.is_over
        assert self.scheduler.cancel(chosen, self.now) is not was_over

    @rule()
    def reset(self):
        name = f"c{self.num_controls}"
        self.num_controls += 1
        self.scheduler.control(Control(name, lambda: (self.controls.append(name), self.scheduler.manager.reset())))

    @invariant()
    def right(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert len(self.controls) == len(set(self.controls))
        for each, prompt in self.requests:
            new = tuple(each.chain.tokens.tolist())[len(prompt) :]
            assert new == alone(prompt, len(new))
            assert len(new) <= each.max_new_tokens

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.now += 1000.0
            run(self.scheduler, self.device)
            assert all(each.state.is_over for each, _ in self.requests)
            assert self.scheduler.manager.stats.num_holds == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150 * int(os.environ.get("KVTIER_SOAK", "1")), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("num_blocks", [4, 7, 50])
@pytest.mark.parametrize("caching", [True, False])
def test_many_requests_generate_what_each_would_alone(num_blocks, caching):
    random_ = random.Random(num_blocks)
    scheduler, device = make(num_blocks, prefix_caching=caching), Device()
    prompts = [tuple(random_.randrange(2) for _ in range(random_.randint(1, 10))) for _ in range(30)]
    requests = [request(scheduler, str(i), prompt, 5) for i, prompt in enumerate(prompts)]
    run(scheduler, device)
    for made, prompt in zip(requests, prompts, strict=True):
        assert made.state is RequestState.FINISHED
        assert tuple(made.chain.tokens.tolist())[len(prompt) :] == alone(prompt, 5)


def test_a_whole_prompt_hit_recomputes_one_token():
    scheduler, device = make(20), Device()
    first = request(scheduler, "a", [1] * 8, 1)
    run(scheduler, device)
    assert first.num_cached_tokens == 0
    second = request(scheduler, "b", [1] * 8, 1)
    step = scheduler.schedule(1.0)
    assert [(row.first, row.num_tokens) for row in step.rows] == [(7, 1)]
    assert len(step.copies) == 1
    assert step.copies[0].num_tokens == 3
    scheduler.update(step, device.run(step), 1.0)
    assert second.num_cached_tokens == 7
    scheduler.check()


def test_the_beginning_of_a_cached_block_is_reused_by_copy():
    scheduler, device = make(20), Device()
    request(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    run(scheduler, device)
    made = request(scheduler, "b", [1, 2, 3, 4, 5, 6, 9, 9, 9, 9], 1)
    step = scheduler.schedule(1.0)
    assert made.num_cached_tokens == 6
    assert step.copies[0].num_tokens == 2
    scheduler.update(step, device.run(step), 1.0)
    scheduler.check()


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9], [1, 2, 9] * 3])
def test_a_block_to_copy_from_is_given_up_where_it_is_in_the_way(prompt):
    scheduler, device = make(3, max_step_tokens=16), Device()
    request(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 2)
    run(scheduler, device)
    made = request(scheduler, "b", prompt, 1)
    run(scheduler, device)
    assert made.state is RequestState.FINISHED
    assert made.num_cached_tokens % BLOCK == 0


def test_long_prompts_are_computed_in_chunks_beside_others():
    scheduler, device = make(50), Device()
    request(scheduler, "short", [1, 1], 9)
    request(scheduler, "long", [0] * 30, 2)
    sizes = []
    while scheduler.has_work():
        step = scheduler.schedule(0.0)
        sizes.append({row.request.id: row.num_tokens for row in step.rows})
        scheduler.update(step, device.run(step), 0.0)
    assert sizes[0] == {"short": 2, "long": 6}
    assert sizes[1] == {"short": 1, "long": 7}
    assert max(sum(size.values()) for size in sizes) <= 8


def test_when_blocks_run_out_the_last_to_come_is_preempted_and_resumes_by_a_hit():
    scheduler, device = make(6, max_rows=2), Device()
    first = request(scheduler, "first", [1] * 7, 12)
    scheduler.update(step := scheduler.schedule(0.0), device.run(step), 0.0)
    second = request(scheduler, "second", [0] * 7, 8, now=1.0)
    run(scheduler, device)
    assert first.num_preempted == 0
    assert second.num_preempted > 0
    assert {first.state, second.state} == {RequestState.FINISHED}


def test_priority_goes_first_and_waiting_counts():
    scheduler = make(50, max_rows=1, age_seconds=10.0)
    low = request(scheduler, "low", [1], 1)
    high = request(scheduler, "high", [2], 1, priority=1)
    assert scheduler.schedule(1.0).rows[0].request is high
    scheduler = make(50, max_rows=1, age_seconds=10.0)
    low = request(scheduler, "low", [1], 1)
    high = Request("high", Chain(scheduler.manager.namespace, [2]), 1, priority=1)
    scheduler.add(high, 20.0)
    assert scheduler.schedule(20.0).rows[0].request is low


def test_a_large_request_is_not_overtaken_for_ever():
    scheduler, device = make(8, max_rows=4), Device()
    running = request(scheduler, "running", [1] * 16, 8)
    step = scheduler.schedule(0.0)
    scheduler.update(step, device.run(step), 0.0)
    large = request(scheduler, "large", [2] * 20, 1)
    small = request(scheduler, "small", [3], 1)
    order = []
    while scheduler.has_work():
        step = scheduler.schedule(1.0)
        order += [row.request.id for row in step.rows]
        scheduler.update(step, device.run(step), 1.0)
    assert order.index("large") < order.index("small")
    assert {running.state, large.state, small.state} == {RequestState.FINISHED}


def test_what_can_never_fit_is_refused_and_says_why():
    scheduler = make(2)
    made = request(scheduler, "huge", [1] * 9, 1)
    step = scheduler.schedule(0.0)
    assert step.refused == (made,)
    assert made.state is RequestState.REFUSED
    assert "9 tokens" in made.reason
    assert "8 tokens" in made.reason
    scheduler.update(step, [], 0.0)
    scheduler.check()


def test_controls_run_once_and_are_no_requests():
    scheduler = make()
    done = []
    scheduler.control(Control("reset", lambda: done.append(1)))
    with pytest.raises(ArgumentError, match="requests go to add"):
        scheduler.control(Request("r", Chain(scheduler.manager.namespace, [1]), 1))
    step = scheduler.schedule(0.0)
    for control in step.controls:
        control.run()
    scheduler.update(step, [], 0.0)
    assert done == [1]
    assert scheduler.schedule(0.0).controls == ()


def test_a_step_is_updated_once_and_with_all_its_results():
    scheduler, device = make(), Device()
    request(scheduler, "a", [1, 2], 2)
    step = scheduler.schedule(0.0)
    with pytest.raises(StateError, match="not been given"):
        scheduler.schedule(0.0)
    with pytest.raises(ArgumentError, match="1 rows were run, 0 results"):
        scheduler.update(step, [], 0.0)
    scheduler.update(step, device.run(step), 0.0)
    with pytest.raises(StateError, match="once"):
        scheduler.update(step, [RowResult()], 0.0)


def test_a_failed_step_ends_its_requests_and_publishes_nothing():
    scheduler, device = make(), Device()
    made = request(scheduler, "a", [1] * 8, 2)
    step = scheduler.schedule(0.0)
    assert scheduler.fail(step, 0.0) == (made,)
    assert made.state is RequestState.CANCELLED
    again = request(scheduler, "b", [1] * 8, 1)
    run(scheduler, device)
    assert again.num_cached_tokens == 0


def test_a_cancelled_request_in_a_step_gets_no_tokens():
    scheduler, device = make(), Device()
    made = request(scheduler, "a", [1, 2], 5)
    step = scheduler.schedule(0.0)
    results = device.run(step)
    assert scheduler.cancel(made, 0.0)
    scheduler.update(step, results, 0.0)
    assert made.state is RequestState.CANCELLED
    assert made.num_new_tokens == 0
    assert not scheduler.cancel(made, 0.0)
    scheduler.check()


def test_why_a_prompt_missed():
    scheduler, device = make(20), Device()
    request(scheduler, "a", [1] * 9, 1)
    run(scheduler, device)
    made = request(scheduler, "b", [2] * 9, 1)
    scheduler.schedule(0.0)
    assert scheduler.manager.explain(made.hold).reason is MissReason.NEVER_SEEN


def test_bad_limits_are_refused():
    for wrong in ({"max_rows": 0}, {"max_step_tokens": 2}, {"age_seconds": 0.0}):
        with pytest.raises(RangeError):
            SchedulerConfig(**{"max_rows": 4, "max_step_tokens": 8, **wrong})
    namespace = Namespace("m", block_tokens=4)
    with pytest.raises(ArgumentError, match="no tokens"):
        Request("r", Chain(namespace, []), 1)
    with pytest.raises(RangeError, match="at least one"):
        Request("r", Chain(namespace, [1]), 0)
    with pytest.raises(RangeError):
        CacheConfig(0)


def test_a_hold_ends_once():
    manager = make().manager
    hold = manager.match(Chain(manager.namespace, [1, 2, 3]))
    manager.abort(hold)
    for call in (manager.finish, manager.abort, manager.preempt):
        with pytest.raises(StateError, match="has ended"):
            call(hold)
    with pytest.raises(ArgumentError, match="at least one token"):
        manager.match(Chain(manager.namespace, []))


def test_the_configuration_is_not_changed():
    config = CacheConfig(4, policy="s3fifo")
    manager = CacheManager(Namespace("m", block_tokens=4), config)
    assert manager.config is config
    assert config == CacheConfig(4, policy="s3fifo")
