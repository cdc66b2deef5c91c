"""Rules of the scheduler for limits, order, preemption, refusals, lookahead, early starts and prefetches."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_support import Lab, content, disk
from cache_support import prompt as stored_prompt
from kvtier.cache.config import HostConfig
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Retention
from kvtier.messages import Route
from kvtier.scheduler import Request, RequestState, Row, RowResult, Scheduler, SchedulerConfig, Step
from scheduler_support import BLOCK, Device, alone, check_scheduler, make, request, run, verify_step


def advance(scheduler: Scheduler, device: Device, now: float = 0.0) -> Step:
    """Run one step. Leave its transfers in flight, except the loads that the rows of the step wait for."""
    was_running = scheduler.running
    step = scheduler.schedule(now)
    verify_step(scheduler, step, was_running)
    scheduler.update(step, device.run(step, scheduler=scheduler), now)
    check_scheduler(scheduler)
    return step


def sizes(step: Step) -> dict[str, int]:
    return {row.request.id: row.num_tokens for row in step.rows}


def answer(created: Request) -> tuple[int, ...]:
    return tuple(created.chain.tokens[created.num_prompt_tokens :].tolist())


# ---- the order of a step -------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """The expected progress of a request, in tokens: `known` or `computed` so far, and `left` to be generated."""

    id: str
    known: int
    left: int
    priority: int
    arrival: float
    computed: int = 0


def expected_rows(waiting: list[Expected], running: list[Expected], limits: SchedulerConfig, now: float) -> list[tuple]:
    """Return the expected rows as (id, first, num_tokens) and move started requests from `waiting` to `running`."""
    rows, budget = [], limits.max_step_tokens

    def take(each: Expected) -> None:
        nonlocal budget
        count = min(each.known - each.computed, budget)
        if count:
            rows.append((each.id, each.computed, count))
            budget -= count

    generating = [each for each in running if 0 < each.computed == each.known - 1]
    for each in (*generating, *(each for each in running if each not in generating)):
        take(each)
    in_order = sorted(
        waiting, key=lambda each: (-each.priority - (now - each.arrival) / limits.age_seconds, each.arrival)
    )
    for each in in_order:
        if budget and len(running) < limits.max_rows:
            waiting.remove(each)
            running.append(each)
            take(each)
    return rows


ARRIVALS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 4), st.integers(0, 2)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6), rows=st.integers(1, 4), more=st.integers(0, 7))
def test_steps_equal_reference_if_memory_is_ample(arrivals, rows, more):
    limits = {"max_rows": rows, "max_step_tokens": rows + more, "age_seconds": 2.0}
    scheduler = make(1000, prefix_caching=False, **limits)
    waiting: list[Expected] = []
    running: list[Expected] = []
    for now in range(400):
        for number, (length, new, priority) in enumerate(arrivals[now] if now < len(arrivals) else ()):
            name = f"{now}.{number}"
            request(scheduler, name, [1] * length, new, now=float(now), priority=priority)
            waiting.append(Expected(name, length, new, priority, float(now)))
        rows_expected = expected_rows(waiting, running, scheduler.config, float(now))
        step = scheduler.schedule(float(now))
        assert [(row.request.id, row.first, row.num_tokens) for row in step.rows] == rows_expected
        scheduler.update(step, [RowResult((1,) if row.wants_token else ()) for row in step.rows], float(now))
        by_id = {each.id: each for each in running}
        for name, first, count in rows_expected:
            each = by_id[name]
            each.computed = first + count
            if each.computed == each.known:
                each.known, each.left = each.known + 1, each.left - 1
        running[:] = [each for each in running if each.left]
        assert [each.id for each in scheduler.running] == [each.id for each in running]
        if now >= len(arrivals) and not scheduler.has_work():
            return
    raise AssertionError("the scheduler still has work after 400 steps")


def test_earlier_arrival_is_first_at_equal_aged_priority():
    scheduler = make(50, max_rows=1, age_seconds=10.0)
    late = Request("late", Chain(scheduler.manager.namespace, [2]), 1, priority=1)
    early = Request("early", Chain(scheduler.manager.namespace, [1]), 1)
    scheduler.add(late, 10.0)
    scheduler.add(early, 0.0)
    assert (late.arrival, early.arrival) == (10.0, 0.0)
    assert [row.request.id for row in scheduler.schedule(20.0).rows] == ["early"]


def test_draft_is_shortened_to_token_budget_of_step():
    scheduler, device = make(50, max_rows=2, max_step_tokens=4), Device()
    first = request(scheduler, "first", [1, 1], 9)
    advance(scheduler, device)
    first.draft = alone(tuple(first.chain.tokens.tolist()), 5)
    second = request(scheduler, "second", [0, 1, 1], 1)
    second.draft = (1, 1)  # ignored because the prompt is not computed yet
    step = advance(scheduler, device)
    assert [(row.request.id, row.num_tokens, row.num_draft) for row in step.rows] == [("first", 4, 3)]
    assert answer(first) == alone((1, 1), 1 + 4)  # all drafts are accepted, and one more token is sampled
    step = advance(scheduler, device)
    assert [(row.request.id, row.num_tokens, row.num_draft) for row in step.rows] == [("first", 1, 0), ("second", 3, 0)]
    assert answer(second) == alone((0, 1, 1), 1)


# ---- configuration and value types ---------------------------------------------------------------------------------


def test_config_accepts_minimum_and_rejects_smaller_values():
    SchedulerConfig(max_rows=1, max_step_tokens=1, max_context=1, lookahead_tokens=0, age_seconds=0.001)
    SchedulerConfig(max_rows=4, max_step_tokens=4)
    cases = {
        "max_rows": {"max_rows": 0},
        "max_step_tokens must": {"max_step_tokens": 0},
        "max_context": {"max_context": 0},
        "lookahead_tokens": {"lookahead_tokens": -1},
        "age_seconds": {"age_seconds": 0.0},
        r"at least max_rows \(5\)": {"max_rows": 5, "max_step_tokens": 4},
    }
    for name, wrong in cases.items():
        with pytest.raises(RangeError, match=name):
            SchedulerConfig(**wrong)


def test_step_sums_its_rows():
    plan = make(8, host=HostConfig(2)).manager.plan()
    created = Request("r", Chain(make().manager.namespace, [1] * 14), 1)
    row = Row.of(created, 4, (7, 9))
    created.num_computed = 8
    both = Step((row, Row.of(created, 6, (3,))), (), (), (), plan)
    assert (both.num_tokens, both.loads) == (10, (7, 9, 3))
    # a token attends to all tokens before the row and, on average, to half of the row
    assert both.attended_tokens == 4 * (0 + 2) + 6 * (8 + 3)
    assert [(each.stop, each.wants_token) for each in both.rows] == [(4, False), (14, True)]


def test_pickled_request_omits_allocation_and_prefetch():
    lab = Lab(8, stores=[disk()])
    scheduler = Scheduler(lab.manager)
    lab.serve(stored_prompt(1, 2))
    created = Request("r", stored_prompt(1, 2), 3, priority=2)
    scheduler.add(created, 4.0)
    created.allocation, created.prefetch = lab.manager.match(created.chain), lab.manager.prefetch(created.chain)
    copy = pickle.loads(pickle.dumps(created))
    assert (copy.allocation, copy.prefetch) == (None, None)
    assert (copy.id, copy.max_new_tokens, copy.priority, copy.arrival) == ("r", 3, 2, 4.0)
    assert copy.chain.tokens.tolist() == created.chain.tokens.tolist()
    assert copy.retention.priority == 2
    assert repr(copy) == "Request(r, waiting, 0 of 9 computed)"
    assert Request("r", created.chain, 1, priority=2, retention=Retention(priority=5)).retention.priority == 5


@pytest.mark.parametrize(("length", "computed", "is_generating"), [(1, 0, False), (2, 0, False), (2, 1, True)])
def test_request_is_generating_if_computed_up_to_last_token(length, computed, is_generating):
    created = Request("r", Chain(make().manager.namespace, [1] * length), 1)
    assert (created.num_computed, created.num_cached_tokens, created.num_new_tokens) == (0, 0, 0)
    created.num_computed = computed
    assert created.is_generating is is_generating


# ---- adding, ending, pausing ---------------------------------------------------------------------------------------


def test_has_work_is_false_while_paused():
    scheduler, device = make(), Device()
    assert not scheduler.has_work()
    request(scheduler, "a", [1], 3)
    assert scheduler.has_work()
    advance(scheduler, device)
    assert (len(scheduler.waiting), len(scheduler.running)) == (0, 1)
    assert scheduler.has_work()
    scheduler.pause(0.0)
    assert not scheduler.has_work()
    scheduler.resume()
    assert scheduler.has_work()


def test_second_add_of_request_raises():
    scheduler, device = make(), Device()
    created = request(scheduler, "a", [1], 2)
    for _ in range(2):  # add the request again while it is waiting and while it is running
        with pytest.raises(StateError, match="was already added"):
            scheduler.add(created, 1.0)
        advance(scheduler, device)
    assert created.state is RequestState.FINISHED
    with pytest.raises(StateError, match="was already added"):
        scheduler.add(created, 1.0)
    unknown = Request("unknown", Chain(scheduler.manager.namespace, [1]), 1)
    with pytest.raises(StateError, match="not in this scheduler"):
        scheduler.cancel(unknown, 0.0)
    assert unknown.state is RequestState.WAITING


def test_pause_preempts_all_requests_and_resume_continues_them():
    scheduler, device = make(50, max_rows=2), Device()
    created = [request(scheduler, name, [number] * 5, 4) for number, name in enumerate("abc")]
    step = scheduler.schedule(0.0)
    with pytest.raises(StateError, match="a step is in flight"):
        scheduler.pause(0.0)
    scheduler.update(step, device.run(step), 0.0)
    assert not scheduler.is_paused
    scheduler.pause(1.0)
    assert (len(scheduler.waiting), scheduler.running) == (3, ())
    assert [each.num_preempted for each in created] == [1, 1, 0]
    assert scheduler.manager.stats.num_allocations == 0
    assert advance(scheduler, device, 1.0).rows == ()
    scheduler.resume()
    run(scheduler, device)
    assert [answer(each) for each in created] == [alone((number,) * 5, 4) for number in range(3)]


def test_pause_ends_prefetches_of_waiting_requests():
    lab = Lab(8, stores=[disk()])
    lab.serve(stored_prompt(1, 2))
    lab.evict("device")
    lab.evict("host")
    scheduler = Scheduler(lab.manager)
    created = Request("r", stored_prompt(1, 2), 1)
    scheduler.add(created, 0.0)
    step = scheduler.schedule(0.0)
    scheduler.update(step, [], 0.0)
    (fetch,) = step.plan.transfers
    assert fetch.route is Route.STORE_TO_HOST
    assert created.prefetch is not None
    scheduler.pause(0.0)
    assert created.prefetch is None
    for worker in lab.workers:
        worker.submit(step.plan)
    lab.run_workers()
    assert lab.manager.tree.num_leases == 0


def test_failed_step_cancels_only_requests_in_its_rows():
    scheduler, device = make(50, max_rows=2), Device()
    first, second, third = (request(scheduler, name, [1, 2], 3) for name in "abc")
    step = scheduler.schedule(0.0)
    scheduler.cancel(first, 0.0)
    assert scheduler.fail(step, 0.0) == (second,)
    assert [each.state.value for each in (first, second, third)] == ["cancelled", "cancelled", "waiting"]
    with pytest.raises(StateError, match="once"):
        scheduler.fail(step, 0.0)
    check_scheduler(scheduler)
    run(scheduler, device)
    assert answer(third) == alone((1, 2), 3)


@pytest.mark.parametrize("tokens", [(), (1, 1, 1, 1)])
def test_row_result_with_wrong_number_of_tokens_raises(tokens):
    scheduler, device = make(), Device()
    created = request(scheduler, "a", [1], 9)
    advance(scheduler, device)
    created.draft = (0, 1)
    step = scheduler.schedule(0.0)
    with pytest.raises(ArgumentError, match=f"needs 1 to 3 sampled tokens, got {len(tokens)}"):
        scheduler.update(step, [RowResult(tokens)], 0.0)


def test_row_result_with_token_for_unfinished_prompt_raises():
    scheduler = make(max_step_tokens=4)
    request(scheduler, "a", [1] * 6, 1)
    with pytest.raises(ArgumentError, match="needs 0 sampled tokens, got 1"):
        scheduler.update(scheduler.schedule(0.0), [RowResult((1,))], 0.0)


def test_step_time_is_measured_from_schedule_to_update():
    scheduler = make(100, prefix_caching=False, max_step_tokens=64)
    for number in range(40):
        length = 4 + number % 13
        created = request(scheduler, str(number), [1] * length, 1)
        step = scheduler.schedule(10.0 * number)
        scheduler.update(step, [RowResult((1,))], 10.0 * number + 0.5 + 0.25 * length)
        assert created.state is RequestState.FINISHED
        scheduler.update(scheduler.schedule(10.0 * number), [], 10.0 * number + 9.0)  # an empty step is not measured
    found = scheduler.manager.cost_model.compute_seconds(0, 10)
    assert found == pytest.approx(0.5 + 0.25 * 10, rel=0.05)


def test_step_that_waits_for_loads_is_not_measured():
    scheduler, device = with_blocks_on_host(starts_early=True)
    before = scheduler.manager.cost_model.compute_seconds(0, 10)
    request(scheduler, "again", [1] * 9, 1)
    step = scheduler.schedule(9.0)
    assert step.loads
    scheduler.update(step, device.run(step, scheduler=scheduler), 5000.0)
    assert scheduler.manager.cost_model.compute_seconds(0, 10) == before


def test_row_result_marked_as_finished_ends_request():
    scheduler, device = make(), Device()
    created, other = (request(scheduler, name, [1, 2], 9) for name in "ab")
    step = scheduler.schedule(0.0)
    scheduler.update(step, device.run(step, {"a"}), 0.0)
    assert (created.state, created.num_new_tokens) == (RequestState.FINISHED, 1)
    assert other.state is RequestState.RUNNING
    assert scheduler.cancel(created, 0.0) is False
    assert scheduler.cancel(other, 0.0) is True


def test_queried_and_hit_tokens_are_counted_once_per_request():
    scheduler, device = make(20, max_step_tokens=8), Device()
    for name in "ab":
        request(scheduler, name, [1] * 18, 3)
        run(scheduler, device)
    stats = scheduler.manager.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (2 * 18, 17)


# ---- memory and context limits -------------------------------------------------------------------------------------


def test_longest_prompt_leaves_room_for_one_generated_token():
    for limits, max_tokens in (({}, 2 * BLOCK), ({"max_context": 6}, 6)):
        scheduler, device = make(2, **limits), Device()
        fits, too_long = (request(scheduler, str(length), [1] * length, 9) for length in (max_tokens - 1, max_tokens))
        run(scheduler, device)
        assert too_long.state is RequestState.REFUSED
        assert str(max_tokens) in too_long.reason
        assert fits.num_new_tokens >= 1
        # if memory is the only limit, one more token can be generated, because the last token needs no slot
        assert fits.chain.num_tokens <= max_tokens + (not limits)


def test_request_ends_at_max_context():
    scheduler, device = make(50, max_context=6), Device()
    created = request(scheduler, "a", [1, 1, 1], 9)
    run(scheduler, device)
    assert (created.state, created.num_new_tokens) == (RequestState.FINISHED, 3)


def test_quota_larger_than_pool_is_limited_by_pool():
    scheduler = make(2)
    scheduler.manager.tree.tiers[0].set_quota(b"a", 50, scheduler.manager.tree.nodes())
    created = request(scheduler, "a", [1] * 8, 1, salt=b"a")
    assert scheduler.schedule(0.0).refused == (created,)
    assert "the tenant has room for 8 tokens" in created.reason


@pytest.mark.parametrize(
    ("needs_block", "priorities", "arrivals", "victim"),
    [
        (0, (0, 0, 0), (0.0, 1.0, 2.0), "c"),
        (0, (1, 0, 1), (0.0, 0.0, 5.0), "b"),
        (0, (0, 0, 0), (3.0, 3.0, 3.0), "c"),
        (0, (0, 1, 1), (0.0, 1.0, 2.0), "a"),
        (1, (0, 0, 0), (9.0, 0.0, 1.0), "a"),
        (2, (1, 0, 0), (0.0, 1.0, 2.0), "c"),
        (1, (2, 1, 0), (0.0, 0.0, 0.0), "c"),
    ],
)
def test_preemption_picks_lowest_priority_then_latest_arrival(needs_block, priorities, arrivals, victim):
    """Three requests fill the pool. The request with number `needs_block` is the first to need another block."""
    scheduler, device = make(6, max_rows=3, max_step_tokens=64, prefix_caching=False), Device()
    for number, name in enumerate("abc"):
        tokens = [number] * (2 * BLOCK if number == needs_block else 2 * BLOCK - 3)
        created = Request(name, Chain(scheduler.manager.namespace, tokens), 9, priority=priorities[number])
        scheduler.add(created, arrivals[number])
    assert len(advance(scheduler, device, 9.0).rows) == 3
    preempted = [each.id for each in advance(scheduler, device, 9.0).preempted]
    assert preempted == [victim]


def test_resumed_request_keeps_metrics_of_first_schedule():
    scheduler, device = make(6, max_rows=2), Device()
    first = request(scheduler, "first", [1] * 7, 12)
    advance(scheduler, device, 0.0)
    second = request(scheduler, "second", [0] * 7, 8, now=1.0)
    run(scheduler, device)
    assert first.num_preempted == 0
    assert second.num_preempted > 0
    assert second.scheduled_at is not None
    assert second.scheduled_at < 3.0
    # hits of the resumed request on its own blocks are not counted
    assert (second.num_cached_tokens, second.tokens_from["device"]) == (0, 0)
    assert second.stuck_at == 0
    assert answer(second) == alone((0,) * 7, 8)


def test_token_budget_of_preempted_row_passes_to_next_row():
    """Request g needs a block and preempts b. Then p gets the token budget of b's row and two of b's blocks."""
    scheduler, device = make(40, max_rows=4, max_step_tokens=8, prefix_caching=False), Device()
    b = request(scheduler, "b", [2] * 9, 9)
    advance(scheduler, device)
    g = request(scheduler, "g", [1] * 7, 9, priority=1)
    assert sizes(advance(scheduler, device)) == {"b": 1, "g": 7}
    p = request(scheduler, "p", [3] * 24, 1, priority=1)
    assert sizes(advance(scheduler, device)) == {"b": 1, "g": 1, "p": 6}
    manager = scheduler.manager
    rest = manager.match(Chain(manager.namespace, [9]))
    assert manager.allocate(rest, manager.num_available * BLOCK) is None  # takes all free blocks
    step = scheduler.schedule(0.0)
    assert (step.preempted, sizes(step)) == ((b,), {"g": 1, "p": 7})
    scheduler.update(step, device.run(step), 0.0)
    assert (b.state, b.num_preempted) == (RequestState.WAITING, 1)
    manager.abort(rest)
    run(scheduler, device)
    assert [answer(each) for each in (b, g, p)] == [alone((2,) * 9, 9), alone((1,) * 7, 9), alone((3,) * 24, 1)]


# ---- lookahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lookahead", "blocks"), [(0, 2), (1, 3), (4, 3), (5, 4)])
def test_lookahead_reserves_slots_beyond_step(lookahead, blocks):
    scheduler, device = make(50, lookahead_tokens=lookahead), Device()
    created = request(scheduler, "a", [1] * 8, 9)
    scheduler.schedule(0.0)
    assert len(created.allocation.table) == blocks
    scheduler, device = make(50, lookahead_tokens=lookahead), Device()
    created = request(scheduler, "a", [1] * 5, 9)
    advance(scheduler, device)
    advance(scheduler, device)
    advance(scheduler, device)
    scheduler.schedule(0.0)  # the step computes the 8th token
    assert created.num_computed == 7
    assert len(created.allocation.table) == blocks


def test_lookahead_applies_only_to_last_prompt_chunk():
    scheduler, device = make(50, lookahead_tokens=8, max_step_tokens=4), Device()
    created = request(scheduler, "a", [1] * 12, 9)
    tables = []
    for _ in range(3):
        advance(scheduler, device)
        tables.append(len(created.allocation.table))
    assert tables == [1, 2, 5]


def test_lookahead_and_drafts_do_not_preempt_requests():
    scheduler, device = make(4, max_rows=2, lookahead_tokens=8), Device()
    first, second = (request(scheduler, name, [number] * 6, 3) for number, name in enumerate("ab"))
    advance(scheduler, device)
    first.draft = (1,)
    run(scheduler, device)
    assert (first.num_preempted, second.num_preempted) == (0, 0)
    assert [answer(each) for each in (first, second)] == [alone((0,) * 6, 3), alone((1,) * 6, 3)]


# ---- loads ---------------------------------------------------------------------------------------------------------


def with_blocks_on_host(**limits) -> tuple[Scheduler, Device]:
    """Return a scheduler and a device. The blocks of prompt [1] * 8 are only in host memory."""
    scheduler, device = make(6, host=HostConfig(20), **limits), Device()
    request(scheduler, "before", [1] * 9, 1)
    run(scheduler, device)
    request(scheduler, "after", [0] * 21, 1)
    run(scheduler, device)
    return scheduler, device


@pytest.mark.parametrize("ok", [True, False])
def test_early_start_generates_token_only_if_loads_succeed(ok):
    scheduler, device = with_blocks_on_host(starts_early=True)
    created = request(scheduler, "again", [1] * 9, 2)
    step = scheduler.schedule(9.0)
    loads = [each.id for each in step.plan.transfers if each.route is Route.HOST_TO_DEVICE]
    assert [(row.request, row.first, row.num_tokens, list(row.loads)) for row in step.rows] == [(created, 8, 1, loads)]
    scheduler.update(step, device.run(step, scheduler=scheduler, ok=ok), 9.0)
    assert created.num_new_tokens == ok
    assert created.may_load is ok
    assert created.state is (RequestState.RUNNING if ok else RequestState.WAITING)
    run(scheduler, device)
    assert answer(created) == alone((1,) * 9, 2)


def test_early_start_waits_while_other_request_has_work():
    scheduler, device = with_blocks_on_host(starts_early=True)
    other = request(scheduler, "other", [2, 2], 9)
    advance(scheduler, device, 9.0)
    created = request(scheduler, "again", [1] * 9, 2)
    step = advance(scheduler, device, 9.0)
    assert (sizes(step), step.loads) == ({"other": 1}, ())
    assert created.state is RequestState.RUNNING
    scheduler.cancel(other, 9.0)
    step = advance(scheduler, device, 9.0)
    assert (sizes(step), len(step.loads)) == ({"again": 1}, 1)
    assert answer(created) == alone((1,) * 9, 1)


def test_early_start_allocates_slots_for_all_tokens_of_step():
    """Request "again" is admitted with 3 blocks. The step that computes its last 5 tokens needs a fourth block."""
    scheduler, device = with_blocks_on_host(starts_early=True)
    other = request(scheduler, "other", [2] * 7, 9)
    created = request(scheduler, "again", [1] * 8 + [3] * 5, 2)
    assert sizes(advance(scheduler, device, 9.0)) == {"other": 7}
    assert (created.state, len(created.allocation.table)) == (RequestState.RUNNING, 3)
    scheduler.cancel(other, 9.0)
    step = advance(scheduler, device, 9.0)
    assert (sizes(step), len(step.loads), len(created.allocation.table)) == ({"again": 5}, 1, 4)
    run(scheduler, device)
    assert answer(created) == alone((1,) * 8 + (3,) * 5, 2)


def test_request_waits_for_load_without_early_start():
    scheduler, device = with_blocks_on_host()
    created = request(scheduler, "again", [1] * 9, 2)
    for _ in range(2):
        assert advance(scheduler, device, 9.0).rows == ()
    device.move(scheduler)
    assert sizes(advance(scheduler, device, 9.0)) == {"again": 1}
    assert created.why_loaded == ""


def test_update_before_reports_of_loads_raises():
    scheduler, _ = with_blocks_on_host(starts_early=True)
    request(scheduler, "again", [1] * 9, 2)
    step = scheduler.schedule(9.0)
    with pytest.raises(StateError, match="apply the reports of the loads"):
        scheduler.update(step, [RowResult((1,))], 9.0)


# ---- check_scheduler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "defect",
    [
        "wrong state in queue",
        "queued with KV",
        "wrong state in step",
        "running without KV",
        "queued twice",
        "leaked allocation",
    ],
)
def test_check_detects_misplaced_requests(defect):
    scheduler, device = make(max_rows=1), Device()
    running, waiting = (request(scheduler, name, [1, 1], 9) for name in "ab")
    advance(scheduler, device)
    check_scheduler(scheduler)
    manager: CacheManager = scheduler.manager
    if defect == "wrong state in queue":
        waiting.state = RequestState.FINISHED
    elif defect == "queued with KV":
        waiting.allocation = running.allocation
    elif defect == "wrong state in step":
        running.state = RequestState.WAITING
    elif defect == "running without KV":
        running.allocation = None
    elif defect == "queued twice":
        scheduler._waiting.append(waiting)
    else:
        manager.match(Chain(manager.namespace, [1]))
    with pytest.raises(AssertionError):
        check_scheduler(scheduler)


# ---- tenants -------------------------------------------------------------------------------------------------------


def test_request_is_not_overtaken_by_request_of_same_tenant():
    scheduler, device = make(50, max_rows=8, max_step_tokens=64, prefix_caching=False), Device()
    scheduler.manager.tree.tiers[0].set_quota(b"a", 4, scheduler.manager.tree.nodes())
    request(scheduler, "first", [1] * 6, 3, salt=b"a")
    advance(scheduler, device)
    request(scheduler, "large", [2] * 10, 1, salt=b"a")
    request(scheduler, "small", [3] * 2, 1, salt=b"a\0part")
    request(scheduler, "other", [4] * 10, 1, salt=b"b")
    assert sizes(advance(scheduler, device)) == {"first": 1, "other": 10}
    order = []
    while scheduler.has_work():
        order += [row.request.id for row in advance(scheduler, device).rows]
    assert order.index("large") <= order.index("small")


def test_step_with_preemption_admits_no_request():
    scheduler, device = make(50, max_rows=8, max_step_tokens=64, prefix_caching=False), Device()
    scheduler.manager.tree.tiers[0].set_quota(b"a", 4, scheduler.manager.tree.nodes())
    for name in ("a0", "a1"):
        request(scheduler, name, [1] * 8, 3, salt=b"a")
    advance(scheduler, device)
    request(scheduler, "b", [2] * 5, 1, salt=b"b")
    step = advance(scheduler, device)
    assert ([each.id for each in step.preempted], sizes(step)) == (["a1"], {"a0": 1})
    assert sizes(advance(scheduler, device)) == {"a0": 1, "b": 5}


def test_prefetch_is_released_only_for_quota_of_its_own_tenant():
    """One request of each tenant waits for two store blocks and leases two device blocks.

    Then another request of tenant a needs the whole quota of the tenant.
    """
    lab = Lab(20, stores=[disk()])
    for salt in (b"a", b"b"):
        lab.serve(stored_prompt(1, 4, salt=salt))
    lab.evict("device")
    lab.evict("host")
    for salt in (b"a", b"b"):
        lab.serve(stored_prompt(1, 2, salt=salt))
    lab.manager.tree.tiers[0].set_quota(b"a", 4, lab.manager.tree.nodes())
    scheduler = Scheduler(lab.manager)
    waiting = [Request(f"waits {salt}", stored_prompt(1, 4, salt=salt), 1) for salt in (b"a", b"b")]
    for each in waiting:
        scheduler.add(each, 0.0)
    step = scheduler.schedule(0.0)
    scheduler.update(step, [], 0.0)
    assert [transfer.num_blocks for transfer in step.plan.transfers] == [2, 2]
    newcomer = Request("newcomer", stored_prompt(2, 3, salt=b"a"), 1)
    scheduler.add(newcomer, 1.0)
    ended_prefetch = waiting[0].prefetch
    assert scheduler.schedule(1.0).rows == ()  # the transfers in flight still hold the blocks
    assert waiting[0].prefetch is None
    assert waiting[1].prefetch is not None
    with pytest.raises(StateError, match="already ended"):
        lab.manager.end_prefetch(ended_prefetch)
    check_scheduler(scheduler)


# ---- stores --------------------------------------------------------------------------------------------------------


def submit(lab: Lab, step: Step) -> None:
    """Submit the plan of a step to the workers and write the KV of the rows in the step."""
    for worker in lab.workers:
        worker.submit(step.plan)
        for row in step.rows:
            table = row.request.allocation.table.tolist()
            worker.device.update({slot: content(row.request.chain, block) for block, slot in enumerate(table)})


def run_step(scheduler: Scheduler, lab: Lab, now: float) -> Step:
    """Run one step and complete its transfers."""
    step = scheduler.schedule(now)
    submit(lab, step)
    scheduler.update(step, [RowResult((7,) if row.wants_token else ()) for row in step.rows], now)
    lab.run_workers()
    check_scheduler(scheduler)
    return step


def with_stored_prompt(num_device: int, **limits) -> tuple[Lab, Scheduler]:
    """Return a lab and its scheduler. The store holds three blocks of prompt 1, and memory holds the first two."""
    lab = Lab(num_device, stores=[disk()])
    lab.serve(stored_prompt(1, 3))
    lab.evict("device")
    lab.evict("host")
    lab.serve(stored_prompt(1, 2))
    return lab, Scheduler(lab.manager, SchedulerConfig(max_step_tokens=64, **limits))


def test_running_request_can_take_blocks_of_waiting_request():
    lab, scheduler = with_stored_prompt(4, max_rows=1)
    runs = Request("runs", stored_prompt(2, 1), 9)
    scheduler.add(runs, 0.0)
    assert sizes(run_step(scheduler, lab, 0.0)) == {"runs": 5}
    waits = Request("waits", stored_prompt(1, 3), 1)
    scheduler.add(waits, 0.0)
    for now in range(1, 4):  # the next three tokens fit into the two blocks of `runs`
        assert sizes(run_step(scheduler, lab, float(now))) == {"runs": 1}
    assert waits.prefetch is not None
    assert waits.prefetch.is_over
    kept = waits.prefetch
    assert sizes(run_step(scheduler, lab, 4.0)) == {"runs": 1}
    assert waits.prefetch is not kept
    assert (runs.num_preempted, runs.num_new_tokens) == (0, 5)


def test_waiting_request_starts_one_prefetch():
    lab, scheduler = with_stored_prompt(20, max_rows=4)
    waits, other = Request("waits", stored_prompt(1, 3), 1), Request("other", stored_prompt(2, 1), 2)
    scheduler.add(waits, 0.0)
    scheduler.add(other, 1.0)
    step = scheduler.schedule(1.0)
    fetch, leases = waits.prefetch, lab.manager.tree.num_leases
    assert sizes(step) == {"other": 5}
    scheduler.update(step, [RowResult((7,))], 1.0)
    again = scheduler.schedule(1.0)
    assert waits.prefetch is fetch
    assert sizes(again) == {"other": 1}
    assert lab.manager.tree.num_leases <= leases + 1  # the save of a block of `other` can add a lease
    scheduler.update(again, [RowResult((7,))], 1.0)
    for each in (step, again):
        for worker in lab.workers:
            worker.submit(each.plan)
            worker.device.update({slot: "other" for slot in range(20) if slot not in worker.device})
    lab.run_workers()
    now = 2.0
    while not waits.state.is_over:
        run_step(scheduler, lab, now)
        now += 1.0
        assert now < 20.0
    assert waits.tokens_from == {"disk": BLOCK, "host": 0, "device": 2 * BLOCK}
    assert waits.prefetch is None


def test_second_prefetch_of_request_does_not_delay_others():
    """The blocks of `waits` are in memory when this request arrives, and are evicted before the request is admitted."""
    lab, scheduler = with_stored_prompt(20, max_rows=2)
    waits, other = Request("waits", stored_prompt(1, 2), 1), Request("other", stored_prompt(2, 1), 1)
    running = [Request(f"runs {number}", stored_prompt(3 + number, 1), 2) for number in range(2)]
    for each in (*running, waits, other):
        scheduler.add(each, 0.0)
    assert len(run_step(scheduler, lab, 0.0).rows) == 2
    assert waits.prefetch.is_over
    run_step(scheduler, lab, 1.0)
    lab.settle()
    lab.evict("device")
    lab.evict("host")
    assert sizes(run_step(scheduler, lab, 2.0)) == {"other": 5}
    assert waits.state is RequestState.WAITING
    assert lab.manager.stats.num_allocations == 0
    assert sizes(run_step(scheduler, lab, 3.0)) == {}
    assert sizes(run_step(scheduler, lab, 3.0)) == {"waits": 1}
    assert waits.tokens_from == {"disk": 2 * BLOCK, "host": 0, "device": 0}


@pytest.mark.parametrize("how", ["cancel", "refuse"])
def test_cancelled_or_refused_request_ends_its_prefetch(how):
    lab, scheduler = with_stored_prompt(20, max_rows=2, max_context=13 if how == "refuse" else 1000)
    created = Request("ended", stored_prompt(1, 3), 1)
    scheduler.add(created, 0.0)
    step = scheduler.schedule(0.0)
    scheduler.update(step, [], 0.0)
    if how == "cancel":
        assert created.prefetch is not None
        assert scheduler.cancel(created, 0.0) is True
    submit(lab, step)
    lab.run_workers()
    if how == "refuse":
        run_step(scheduler, lab, 1.0)
        assert created.state is RequestState.REFUSED
    assert created.prefetch is None
    assert scheduler.waiting == ()
    assert lab.manager.tree.num_leases == 0
