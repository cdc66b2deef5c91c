"""Scheduler and CacheManager with a simulated device that verifies the KV of every row."""

from __future__ import annotations

import os
import pickle
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.cache.config import CacheConfig, HostConfig, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Lease, MissReason, Namespace
from kvtier.messages import Plan, Report, Route, TransferRequest, TransferResult
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, SchedulerConfig
from scheduler_support import BLOCK, Device, alone, check_scheduler, make, request, run, verify_step

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([b"", b"", b"a", b"a\0x"])


class SchedulerMachine(RuleBasedStateMachine):
    """Schedules random requests with cancellations, priorities, drafts, resets, pins, quotas and tiny pools.

    Every generated token is correct, and every request ends even if pins remain.
    """

    @initialize(
        num_blocks=st.sampled_from([3, 5, 9, 20]),
        caching=st.booleans(),
        rows=st.integers(1, 4),
        budget=st.sampled_from([4, 5, 16]),
        lookahead=st.sampled_from([0, 0, 2, 5]),
        starts_early=st.booleans(),
        host=st.none()
        | st.builds(
            HostConfig,
            st.sampled_from([1, 4, 40]),
            saving=st.builds(
                WritebackConfig,
                st.sampled_from(WritePolicy),
                max_blocks=st.sampled_from([1, 3, 100]),
                low_share=st.sampled_from([0.3, 1.0]),
            ),
        ),
    )
    def begin(self, num_blocks, caching, rows, budget, lookahead, starts_early, host):
        limits = {"max_rows": rows, "max_step_tokens": budget, "lookahead_tokens": lookahead}
        self.scheduler = make(num_blocks, prefix_caching=caching, host=host, starts_early=starts_early, **limits)
        self.device, self.now = Device(), 0.0
        self.requests: list[tuple[Request, tuple[int, ...]]] = []
        self.pins: list[Lease] = []

    @rule(prompt=PROMPTS, new=st.integers(1, 9), priority=st.integers(0, 2), salt=SALTS)
    def add(self, prompt, new, priority, salt):
        name = f"r{len(self.requests)}"
        created = request(self.scheduler, name, prompt, new, now=self.now, priority=priority, salt=salt)
        self.requests.append((created, tuple(prompt)))

    @rule(prompt=PROMPTS, salt=SALTS)
    def pin(self, prompt, salt):
        manager = self.scheduler.manager
        self.pins.append(manager.pin(Chain(manager.namespace, prompt, salt=salt), now=self.now))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.scheduler.manager.unpin(self.pins.pop())

    @rule(tier=st.integers(0, 1), quota=st.sampled_from([None, 0, 2, 4]))
    def set_quota(self, tier, quota):
        tree = self.scheduler.manager.tree
        tree.tiers[tier % len(tree.tiers)].set_quota(b"a", quota, tree.nodes())

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
            verify_step(self.scheduler, step, running)
            finish = {each.id for each in running if data.draw(st.integers(0, 15)) == 0}
            ok = not step.loads or data.draw(st.integers(0, 3)) > 0
            self.scheduler.update(step, self.device.run(step, finish, scheduler=self.scheduler, ok=ok), self.now)
            ended = [row.request for row in step.rows if row.request.id in finish and (ok or not row.loads)]
            assert all(each.state is RequestState.FINISHED for each in ended)

    @rule(count=st.integers(1, 5), ok=st.sampled_from([True, True, False]))
    def move(self, count, ok):
        self.device.move(self.scheduler, count, ok=ok)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        chosen, _ = data.draw(st.sampled_from(self.requests))
        was_over = chosen.state.is_over
        assert self.scheduler.cancel(chosen, self.now) is not was_over

    @rule()
    def reset(self):
        self.scheduler.manager.reset()

    @invariant()
    def check_generated_tokens(self):
        if not hasattr(self, "scheduler"):
            return
        check_scheduler(self.scheduler)
        for each, prompt in self.requests:
            new = tuple(each.chain.tokens.tolist())[len(prompt) :]
            assert new == alone(prompt, len(new))
            assert len(new) <= each.max_new_tokens

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.now += 1000.0
            run(self.scheduler, self.device)
            assert all(each.state.is_over for each, _ in self.requests)
            assert self.scheduler.manager.stats.num_allocations == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150 * int(os.environ.get("KVTIER_SOAK", "1")), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("num_blocks", [4, 7, 50])
@pytest.mark.parametrize("caching", [True, False])
def test_concurrent_and_single_requests_generate_same_tokens(num_blocks, caching):
    random_ = random.Random(num_blocks)
    scheduler, device = make(num_blocks, prefix_caching=caching), Device()
    prompts = [tuple(random_.randrange(2) for _ in range(random_.randint(1, 10))) for _ in range(30)]
    requests = [request(scheduler, str(i), prompt, 5) for i, prompt in enumerate(prompts)]
    run(scheduler, device)
    for created, prompt in zip(requests, prompts, strict=True):
        assert created.state is RequestState.FINISHED
        assert tuple(created.chain.tokens.tolist())[len(prompt) :] == alone(prompt, 5)


def test_full_prompt_hit_recomputes_only_last_token():
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
    check_scheduler(scheduler)


def test_partly_matching_block_is_copied_and_reused():
    scheduler, device = make(20), Device()
    request(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    run(scheduler, device)
    created = request(scheduler, "b", [1, 2, 3, 4, 5, 6, 9, 9, 9, 9], 1)
    step = scheduler.schedule(1.0)
    assert created.num_cached_tokens == 6
    assert step.copies[0].num_tokens == 2
    scheduler.update(step, device.run(step), 1.0)
    check_scheduler(scheduler)


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9], [1, 2, 9] * 3])
def test_source_of_partial_copy_is_released_if_slot_is_needed(prompt):
    scheduler, device = make(3, max_step_tokens=16), Device()
    request(scheduler, "a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 2)
    run(scheduler, device)
    created = request(scheduler, "b", prompt, 1)
    run(scheduler, device)
    assert created.state is RequestState.FINISHED
    assert created.num_cached_tokens % BLOCK == 0


def test_long_prompt_is_chunked_while_other_request_decodes():
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


def test_latest_request_is_preempted_if_blocks_run_out():
    scheduler, device = make(6, max_rows=2), Device()
    first = request(scheduler, "first", [1] * 7, 12)
    scheduler.update(step := scheduler.schedule(0.0), device.run(step), 0.0)
    second = request(scheduler, "second", [0] * 7, 8, now=1.0)
    run(scheduler, device)
    assert first.num_preempted == 0
    assert second.num_preempted > 0
    assert {first.state, second.state} == {RequestState.FINISHED}


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_is_not_started_if_its_blocks_do_not_fit(caching):
    """Of 16 blocks, request a holds 3, b holds 7, and 6 are free. Request c needs 10 blocks and waits for the end of b.

    Without the wait, c would run out of blocks and be preempted, and its first half would be computed twice.
    """
    scheduler, device = make(16, max_step_tokens=8 * BLOCK, prefix_caching=caching), Device()
    prompts = {"a": [1] * 11, "b": [2] * 28, "c": [3] * 40}
    created = [request(scheduler, name, prompt, 4) for name, prompt in prompts.items()]
    num_computed = 0
    while scheduler.has_work():
        step = scheduler.schedule(0.0)
        num_computed += sum(row.num_tokens for row in step.rows)
        scheduler.update(step, device.run(step), 0.0)
        check_scheduler(scheduler)
    assert [each.state for each in created] == [RequestState.FINISHED] * 3
    assert [each.num_preempted for each in created] == [0, 0, 0]
    # each request generates four tokens, but no step computes the KV of the last one
    assert num_computed == sum(map(len, prompts.values())) + 3 * 3, "a token was computed twice"


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_is_not_started_if_tenant_quota_has_no_room(caching):
    """The pool has free blocks, but the quota of tenant t has no room for prompt c. Therefore c waits while d runs."""
    scheduler, device = make(100, max_step_tokens=8 * BLOCK, prefix_caching=caching), Device()
    scheduler.manager.tree.tiers[0].set_quota(b"t", 16, scheduler.manager.tree.nodes())
    prompts = {"a": (b"t", [1] * 11), "b": (b"t\0x", [2] * 28), "c": (b"t", [3] * 40), "d": (b"", [4] * 40)}
    created = [request(scheduler, name, prompt, 4, salt=salt) for name, (salt, prompt) in prompts.items()]
    num_computed, order = 0, []
    while scheduler.has_work():
        step = scheduler.schedule(0.0)
        num_computed += sum(row.num_tokens for row in step.rows)
        scheduler.update(step, device.run(step), 0.0)
        check_scheduler(scheduler)
        order += [each.id for each in created if each.state is RequestState.FINISHED and each.id not in order]
    assert [each.num_preempted for each in created] == [0, 0, 0, 0]
    # each request generates four tokens, but no step computes the KV of the last one
    assert num_computed == sum(len(prompt) for _, prompt in prompts.values()) + 4 * 3, "a token was computed twice"
    assert order[-1] == "c"


def test_prompt_with_host_blocks_waits_until_all_blocks_fit():
    scheduler, device = make(10, host=HostConfig(20), max_step_tokens=BLOCK), Device()
    request(scheduler, "a", [1] * 24, 1)
    run(scheduler, device)
    request(scheduler, "b", [2] * 39, 1)
    run(scheduler, device)  # the blocks of request a are now only in host memory
    first = request(scheduler, "c", [3] * 9, 8)
    for now in range(3):
        scheduler.update(step := scheduler.schedule(now), device.run(step), now)
    # while c runs, only 7 of the 9 blocks of "a again" fit: the 6 blocks from the host and one new block
    again = request(scheduler, "a again", [1] * 24 + [4] * 12, 1, now=3.0)
    run(scheduler, device)
    assert (first.num_preempted, again.num_preempted) == (0, 0)
    assert again.num_cached_tokens == 24


def test_request_that_cannot_finish_because_of_pin_is_refused():
    """Without refusals, the requests would fill the pool, be preempted and lose their blocks, again and again."""
    scheduler, device = make(3, max_rows=2, max_step_tokens=4), Device()
    request(scheduler, "pinned", [1] * 4, 1)
    run(scheduler, device)
    scheduler.manager.pin(Chain(scheduler.manager.namespace, [1] * 4))
    created = [request(scheduler, name, prompt, 9) for name, prompt in (("a", [0, 0]), ("b", [0, 1]))]
    run(scheduler, device)
    for each in created:
        assert each.state is RequestState.REFUSED
        assert each.chain.num_tokens == 2 * BLOCK + 1, "all tokens that fit must be generated"
        assert "pinned" in each.reason


def test_priority_decides_order_and_rises_with_waiting_time():
    scheduler = make(50, max_rows=1, age_seconds=10.0)
    low = request(scheduler, "low", [1], 1)
    high = request(scheduler, "high", [2], 1, priority=1)
    assert scheduler.schedule(1.0).rows[0].request is high
    scheduler = make(50, max_rows=1, age_seconds=10.0)
    low = request(scheduler, "low", [1], 1)
    high = Request("high", Chain(scheduler.manager.namespace, [2]), 1, priority=1)
    scheduler.add(high, 20.0)
    assert scheduler.schedule(20.0).rows[0].request is low


def test_small_request_does_not_overtake_large_request():
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


def test_request_larger_than_pool_is_refused_with_token_counts():
    scheduler = make(2)
    created = request(scheduler, "huge", [1] * 9, 1)
    step = scheduler.schedule(0.0)
    assert step.refused == (created,)
    assert created.state is RequestState.REFUSED
    assert "9 tokens" in created.reason
    assert "8 tokens" in created.reason
    scheduler.update(step, [], 0.0)
    check_scheduler(scheduler)


def test_request_that_does_not_fit_next_to_pins_is_refused():
    scheduler, device = make(4), Device()
    request(scheduler, "first", [1] * 12, 1)
    run(scheduler, device)
    pin = scheduler.manager.pin(Chain(scheduler.manager.namespace, [1] * 12))
    large, small = request(scheduler, "large", [2] * 7), request(scheduler, "small", [3], 2)
    run(scheduler, device)
    assert (large.state, small.state) == (RequestState.REFUSED, RequestState.FINISHED)
    assert "2 slots of device wanted, 1 free and 0 evictable" in large.reason
    assert "pinned" in large.reason
    growing = request(scheduler, "growing", [4] * 3, 9)
    run(scheduler, device)
    assert (growing.state, growing.num_new_tokens) == (RequestState.REFUSED, 2)  # two generated tokens fit
    scheduler.manager.unpin(pin)
    again = request(scheduler, "again", [2] * 7)
    run(scheduler, device)
    assert again.state is RequestState.FINISHED


def test_tenant_quota_preempts_only_requests_of_that_tenant():
    scheduler, device = make(20, max_rows=8, max_step_tokens=64), Device()
    scheduler.manager.tree.tiers[0].set_quota(b"a", 4, scheduler.manager.tree.nodes())
    own = [request(scheduler, f"a{number}", [number] * 7, 6, salt=b"a") for number in range(3)]
    others = [request(scheduler, f"b{number}", [number] * 7, 6, salt=b"b") for number in range(3)]
    step = scheduler.schedule(0.0)
    assert [row.request.id for row in step.rows] == ["a0", "a1", "b0", "b1", "b2"]
    scheduler.update(step, device.run(step), 0.0)
    run(scheduler, device)
    assert {each.state for each in own + others} == {RequestState.FINISHED}
    assert sum(each.num_preempted for each in own) > 0
    assert sum(each.num_preempted for each in others) == 0
    assert scheduler.manager.tree.tiers[0].used_by[b"a"] <= 4
    for each in own + others:
        prompt = tuple(each.chain.tokens[: each.num_prompt_tokens].tolist())
        assert tuple(each.chain.tokens[each.num_prompt_tokens :].tolist()) == alone(prompt, 6)


def test_request_is_refused_if_pins_use_up_tenant_quota():
    scheduler, device = make(20, host=HostConfig(40), max_step_tokens=64), Device()
    manager = scheduler.manager
    manager.tree.tiers[0].set_quota(b"a", 4, manager.tree.nodes())
    request(scheduler, "a0", [1] * 12, 1, salt=b"a")
    run(scheduler, device)
    manager.pin(Chain(manager.namespace, [1] * 12, salt=b"a"))
    other = request(scheduler, "b0", [2] * 20, 9, salt=b"b")
    step = scheduler.schedule(0.0)
    scheduler.update(step, device.run(step), 0.0)
    late = request(scheduler, "a1", [3] * 7, 1, salt=b"a")
    step = scheduler.schedule(1.0)
    assert other.state is RequestState.RUNNING
    assert manager.transfers.in_flight  # saves of request b0
    assert step.refused == (late,)
    assert "within the quota" in late.reason
    scheduler.update(step, device.run(step), 1.0)
    run(scheduler, device)
    assert other.state is RequestState.FINISHED


def test_request_larger_than_tenant_quota_is_refused():
    scheduler = make(20)
    scheduler.manager.tree.tiers[0].set_quota(b"a", 2, scheduler.manager.tree.nodes())
    huge = request(scheduler, "huge", [1] * 8, salt=b"a\0part")
    request(scheduler, "other", [1] * 8, salt=b"b")
    step = scheduler.schedule(0.0)
    assert (step.refused, [row.request.id for row in step.rows]) == ((huge,), ["other"])
    assert "the tenant has room for 8 tokens" in huge.reason


def test_update_of_step_twice_or_without_results_raises():
    scheduler, device = make(), Device()
    request(scheduler, "a", [1, 2], 2)
    step = scheduler.schedule(0.0)
    with pytest.raises(ArgumentError, match="1 rows needs one result per row, got 0"):
        scheduler.update(step, [], 0.0)
    scheduler.update(step, device.run(step), 0.0)
    with pytest.raises(StateError, match="once"):
        scheduler.update(step, [RowResult()], 0.0)


def test_failed_step_cancels_requests_and_publishes_nothing():
    scheduler, device = make(), Device()
    created = request(scheduler, "a", [1] * 8, 2)
    step = scheduler.schedule(0.0)
    assert scheduler.fail(step, 0.0) == (created,)
    assert created.state is RequestState.CANCELLED
    again = request(scheduler, "b", [1] * 8, 1)
    run(scheduler, device)
    assert again.num_cached_tokens == 0


def test_request_cancelled_during_step_receives_no_tokens():
    scheduler, device = make(), Device()
    created = request(scheduler, "a", [1, 2], 5)
    step = scheduler.schedule(0.0)
    results = device.run(step)
    assert scheduler.cancel(created, 0.0)
    scheduler.update(step, results, 0.0)
    assert created.state is RequestState.CANCELLED
    assert created.num_new_tokens == 0
    assert not scheduler.cancel(created, 0.0)
    check_scheduler(scheduler)


def test_explain_reports_reason_of_miss():
    scheduler, device = make(20), Device()
    request(scheduler, "a", [1] * 9, 1)
    run(scheduler, device)
    created = request(scheduler, "b", [2] * 9, 1)
    scheduler.schedule(0.0)
    assert scheduler.manager.explain(created.allocation).reason is MissReason.NEVER_SEEN


def test_invalid_config_and_requests_raise():
    for wrong in ({"max_rows": 0}, {"max_step_tokens": 2}, {"age_seconds": 0.0}):
        with pytest.raises(RangeError):
            SchedulerConfig(**{"max_rows": 4, "max_step_tokens": 8, **wrong})
    namespace = Namespace("m", block_tokens=4)
    with pytest.raises(ArgumentError, match="no tokens"):
        Request("r", Chain(namespace, []), 1)
    with pytest.raises(RangeError, match="at least 1"):
        Request("r", Chain(namespace, [1]), 0)
    with pytest.raises(RangeError):
        CacheConfig(0)


def test_ended_allocation_cannot_be_finished_or_aborted():
    manager = make().manager
    allocation = manager.match(Chain(manager.namespace, [1, 2, 3]))
    manager.abort(allocation)
    for call in (manager.finish, manager.abort):
        with pytest.raises(StateError, match="already ended"):
            call(allocation)
    with pytest.raises(ArgumentError, match="at least one token"):
        manager.match(Chain(manager.namespace, []))


def test_manager_leaves_given_config_unchanged():
    config = CacheConfig(4, policy="s3fifo")
    manager = CacheManager(Namespace("m", block_tokens=4), config)
    assert manager.config is config
    assert config == CacheConfig(4, policy="s3fifo")


def evicted_to_host(write: WritePolicy = WritePolicy.THROUGH, **more) -> tuple[Scheduler, Device]:
    """Run request a, then request b, which evicts a's blocks from the device. The host keeps copies of a's blocks."""
    scheduler, device = make(4, host=HostConfig(20, saving=WritebackConfig(write, low_share=1.0, **more))), Device()
    request(scheduler, "a", [1] * 9, 1)
    run(scheduler, device)
    request(scheduler, "b", [0] * 13, 1)
    run(scheduler, device)
    return scheduler, device


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_evicted_blocks_are_loaded_from_host(write):
    scheduler, device = evicted_to_host(write)
    created = request(scheduler, "again", [1] * 9, 2)
    step = scheduler.schedule(9.0)
    assert step.rows == ()
    assert [(t.route, t.num_blocks) for t in step.plan.transfers if t.route is Route.HOST_TO_DEVICE] == [
        (Route.HOST_TO_DEVICE, 2)
    ]
    scheduler.update(step, device.run(step), 9.0)
    waiting = scheduler.schedule(9.0)
    assert waiting.rows == ()  # the load has not been reported yet
    scheduler.update(waiting, [], 9.0)
    device.move(scheduler)
    step = scheduler.schedule(9.0)
    assert [(row.first, row.num_tokens) for row in step.rows] == [(8, 1)]
    scheduler.update(step, device.run(step), 9.0)
    assert created.num_cached_tokens == 8
    assert created.tokens_from == {"device": 0, "host": 8}
    run(scheduler, device)
    assert created.state is RequestState.FINISHED


def test_selective_policy_saves_only_reused_blocks():
    scheduler, device = make(8, host=HostConfig(20, saving=WritebackConfig(WritePolicy.SELECTIVE))), Device()
    request(scheduler, "a", [1] * 9, 1)
    run(scheduler, device)
    assert scheduler.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks == 0
    request(scheduler, "b", [1] * 9, 1)
    run(scheduler, device)
    assert scheduler.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks == 2


def test_host_copy_remains_after_load():
    scheduler, device = evicted_to_host()
    request(scheduler, "again", [1] * 9, 1)
    run(scheduler, device)
    request(scheduler, "c", [2] * 13, 1)
    run(scheduler, device)
    request(scheduler, "third", [1] * 9, 1)
    run(scheduler, device)
    assert scheduler.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks == 4
    assert scheduler.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks == 2 + 3 + 3  # saves of a, b and c


def test_save_queue_has_at_most_1024_jobs():
    scheduler, device = (
        make(200, host=HostConfig(20, saving=WritebackConfig(WritePolicy.BACK, low_share=0.0))),
        Device(),
    )
    for i in range(1100):
        request(scheduler, str(i), [i] * 5, 1)
        run(scheduler, device, check=i % 50 == 0)  # check rarely, because a check visits all blocks
    check_scheduler(scheduler)
    assert len(scheduler.manager.queues[0].jobs) == 1024


def test_failed_load_counts_as_miss():
    scheduler, device = evicted_to_host()
    created = request(scheduler, "again", [1] * 9, 1)
    step = scheduler.schedule(9.0)
    scheduler.update(step, device.run(step), 9.0)
    device.move(scheduler, ok=False)
    check_scheduler(scheduler)
    run(scheduler, device)
    assert created.state is RequestState.FINISHED
    assert created.num_cached_tokens == 0
    assert scheduler.manager.transfers.counts[Route.HOST_TO_DEVICE].num_failed == 2


def test_two_requests_share_one_load():
    scheduler, device = evicted_to_host()
    both = [request(scheduler, name, [1] * 9, 1) for name in ("one", "two")]
    step = scheduler.schedule(9.0)
    assert sum(t.num_blocks for t in step.plan.transfers if t.route is Route.HOST_TO_DEVICE) == 2
    scheduler.update(step, device.run(step), 9.0)
    run(scheduler, device)
    assert [created.num_cached_tokens for created in both] == [8, 8]


def test_reset_discards_transfers_in_flight():
    scheduler, device = evicted_to_host()
    created = request(scheduler, "again", [1] * 9, 1)
    step = scheduler.schedule(9.0)
    scheduler.update(step, device.run(step), 9.0)
    scheduler.manager.reset()
    check_scheduler(scheduler)
    device.move(scheduler)
    check_scheduler(scheduler)
    run(scheduler, device)
    assert created.state is RequestState.FINISHED
    assert scheduler.manager.stats.num_allocations == 0


def test_cancel_during_load_releases_all_leases():
    scheduler, device = evicted_to_host()
    created = request(scheduler, "again", [1] * 9, 1)
    step = scheduler.schedule(9.0)
    scheduler.update(step, device.run(step), 9.0)
    scheduler.cancel(created, 9.0)
    check_scheduler(scheduler)
    device.move(scheduler)
    check_scheduler(scheduler)
    assert not scheduler.manager.transfers.leases


def test_transfer_must_be_reported_once_by_each_rank():
    namespace = Namespace("model", block_tokens=BLOCK)
    manager = CacheManager(namespace, CacheConfig(4, host=HostConfig(4)), num_ranks=2)
    allocation = manager.match(Chain(namespace, [1] * 9))
    manager.allocate(allocation, 9)
    manager.publish(allocation, 8)
    (transfer,) = manager.plan().transfers
    done = (TransferResult(transfer.id, True, 10, 0.1),)
    manager.apply(Report(0, 0, done))
    assert len(manager.transfers.leases) == 1
    with pytest.raises(StateError, match="not in flight on this rank"):
        manager.apply(Report(0, 0, done))
    with pytest.raises(ArgumentError, match="invalid rank 2"):
        manager.apply(Report(0, 2, done))
    manager.apply(Report(0, 1, done))
    assert not manager.transfers.leases
    manager.finish(allocation)
    manager.check()


def test_invalid_transfer_request_or_config_raises():
    transfer = TransferRequest(1, Route.DEVICE_TO_HOST, "device", "host", b"\1\0\0\0", b"\2\0\0\0")
    plan = Plan(1, 0, (transfer,))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert transfer.sources.tolist() == [1]
    assert transfer.targets.tolist() == [2]
    assert not Plan(2, 0, ())
    with pytest.raises(ArgumentError, match="bytes of source slots"):
        TransferRequest(1, Route.DEVICE_TO_HOST, "device", "host", b"\1\0\0\0", b"")
    for wrong in ({"low_share": 2.0}, {"min_uses": 0}, {"max_blocks": 0}, {"blocks_per_second": 0.0}):
        with pytest.raises(RangeError):
            WritebackConfig(**wrong)
    for wrong in ({"num_blocks": 0}, {"num_blocks": 1, "free_share": 1.0}):
        with pytest.raises(RangeError):
            HostConfig(**wrong)
