"""Check the scheduler with two steps in flight, on a simulated device that verifies the KV of every row."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from kvtier.cache.config import HostConfig, WritebackConfig, WritePolicy
from kvtier.errors import StateError
from kvtier.scheduler import Request, RequestState, RowResult, Step
from scheduler_support import BLOCK, WORTHLESS, Device, Inputs, alone, check_scheduler, make, request, run, verify_step

NUM_STEPS = 24_000 * int(os.environ.get("KVTIER_SOAK", "1"))
_NUM_LIVES = 240


class Life:
    """Random requests on one scheduler. Steps are computed at random times between `schedule` and `update`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        host = HostConfig(
            pick([1, 4, 40]),
            saving=WritebackConfig(pick(list(WritePolicy)), max_blocks=pick([1, 3, 100]), low_share=pick([0.3, 1.0])),
        )
        self.scheduler = make(
            pick([3, 5, 9, 20]),
            prefix_caching=self.random.random() < 0.8,
            host=pick([None, host]),
            starts_early=pick([True, False]),
            max_rows=pick([1, 2, 3, 4]),
            max_step_tokens=pick([4, 5, 16]),
            lookahead_tokens=pick([0, 0, 2, 5]),
        )
        self.device, self.now, self.seen = Device(), 0.0, Counter()
        self.requests: list[tuple[Request, tuple[int, ...]]] = []
        self.sent: list[tuple[Step, list[Inputs], set[str]]] = []
        self.computed: list[list[RowResult]] = []  # results of the steps in `sent` that are already computed

    def act(self) -> None:
        """Sometimes take a random action. Then schedule a step, or call `update` or `fail` for the oldest step."""
        act, scheduler = self.random.random(), self.scheduler
        if act < 0.3:
            self.add()
        elif act < 0.4 and self.requests:
            chosen, _ = self.random.choice(self.requests[-6:])
            self.seen["cancelled in flight"] += bool(chosen.in_flight) and not chosen.state.is_over
            scheduler.cancel(chosen, self.now)
        elif act < 0.6:
            self.device.move(scheduler, self.random.randint(1, 5), ok=self.random.random() < 0.7)
        elif act < 0.61:
            scheduler.manager.reset()
        if len(self.sent) < 2 and (not self.sent or self.random.random() < 0.7):
            self.schedule()
        elif self.random.random() < 0.1:
            self.fail()
        else:
            self.update()
        if self.random.random() < 0.5:
            self.compute()
        check_scheduler(scheduler)

    def add(self) -> None:
        prompt = tuple(self.random.randrange(2) for _ in range(self.random.randint(1, 14)))
        if self.requests and self.random.random() < 0.5:  # repeat a prompt, whose blocks are possibly only on the host
            _, prompt = self.random.choice(self.requests)
        created = request(
            self.scheduler,
            f"r{len(self.requests)}",
            prompt,
            self.random.randint(1, 9),
            now=self.now,
            priority=self.random.randrange(3),
            waits_for_token=self.random.random() < 0.2,
        )
        self.requests.append((created, prompt))

    def schedule(self) -> None:
        self.now += 1.0
        running = self.scheduler.running
        for each in running:
            if each.is_generating and not each.in_flight and self.random.random() < 0.3:
                guess = alone(tuple(each.chain.tokens.tolist()), 2) if self.random.random() < 0.5 else (0, 1)
                each.draft = guess[: max(0, each.max_new_tokens - each.num_new_tokens - 1)]
        step = self.scheduler.schedule(self.now)
        verify_step(self.scheduler, step, running)
        self.sent.append((step, self.device.submit(step), {each.id for each in running if self.random.random() < 0.06}))
        self.seen["preempted"] += len(step.preempted)
        self.seen["overlapped rows"] += sum(len(row.request.in_flight) > 1 for row in step.rows)
        self.seen["early starts behind a step"] += bool(step.loads and len(self.sent) > 1)
        assert not step.rows or not any(each.loads for each, *_ in self.sent[:-1]), (
            "a step with rows follows a step with loads"
        )

    def compute(self) -> None:
        """Compute the oldest step that has not been computed."""
        if len(self.computed) == len(self.sent):
            return
        step, inputs, finish = self.sent[len(self.computed)]
        ok = not step.loads or self.random.random() < 0.75
        results = self.device.compute(step, inputs, finish, scheduler=self.scheduler, ok=ok)
        self.computed.append(results)

    def update(self) -> None:
        while not self.computed:
            self.compute()
        (step, _, finish), results = self.sent.pop(0), self.computed.pop(0)
        live = [row.request for row in step.rows if row.request.state is RequestState.RUNNING]
        late = [each for each in live if each.id in finish and each.in_flight[1:]]
        self.seen["late stops"] += len(late)
        self.scheduler.update(step, results, self.now)
        for row, result in zip(step.rows, results, strict=True):
            if row.request in live and result.finished and result is not WORTHLESS:
                assert row.request.state is RequestState.FINISHED
        for each in late:
            assert each.allocation is not None, "blocks were freed while a row in flight writes to them"

    def fail(self) -> None:
        """Fail the oldest step and discard the next one. If the oldest is already computed, call `update` instead."""
        if self.computed:
            self.update()
            return
        (step, inputs, _), *later = self.sent
        self.device.spoil(step, inputs)
        running = [row.request for row in step.rows if row.request.state is RequestState.RUNNING]
        assert list(self.scheduler.fail(step, self.now)) == running
        for other, _, _ in later:
            spared = [row.request for row in other.rows if row.request.state is RequestState.RUNNING]
            self.scheduler.discard(other, self.now)
            assert all(each.state is RequestState.RUNNING and not each.in_flight for each in spared)
            self.seen["spared by a failure"] += len(spared)
        self.sent = []

    def verify(self) -> None:
        for each, prompt in self.requests:
            new = tuple(each.chain.tokens.tolist())[len(prompt) :]
            assert new == alone(prompt, len(new))
            assert len(new) <= each.max_new_tokens

    def end(self) -> None:
        while self.sent:
            self.update()
        self.now += 1000.0
        self.device.move(self.scheduler)
        run(self.scheduler, self.device)
        self.verify()
        assert all(each.state.is_over and each.allocation is None for each, _ in self.requests)
        assert self.scheduler.manager.stats.num_allocations == 0


def test_two_steps_in_flight_generate_right_tokens():
    seen: Counter[str] = Counter()
    for seed in range(_NUM_LIVES):
        life = Life(seed)
        for _ in range(NUM_STEPS // _NUM_LIVES):
            life.act()
        life.end()
        seen += life.seen
    assert len(seen) == 6, seen  # every counter of Life has counted something
    assert min(seen.values()) >= 10, seen


def _two_steps(scheduler, device, names="a", new=4, **options):
    """Add requests and schedule two steps, which have no results yet. The first step computes the prompts."""
    created = [request(scheduler, name, [1, 2], new, **options) for name in names]
    steps = [scheduler.schedule(0.0), scheduler.schedule(1.0)]
    return created, [(step, device.submit(step)) for step in steps]


def test_third_schedule_without_results_raises():
    scheduler = make()
    _two_steps(scheduler, Device())
    with pytest.raises(StateError, match="2 steps have no results"):
        scheduler.schedule(2.0)


def test_update_of_newer_step_first_raises():
    scheduler, device = make(), Device()
    _, ((first, sent), (second, _)) = _two_steps(scheduler, device)
    with pytest.raises(StateError, match="in the order of schedule"):
        scheduler.update(second, [RowResult((0,))], 2.0)
    scheduler.update(first, device.compute(first, sent), 2.0)


def test_schedule_with_step_in_flight_continues_each_row():
    scheduler, device = make(), Device()
    (created, _), steps = _two_steps(scheduler, device, "ab")
    assert [(row.first, row.num_tokens, row.wants_token) for row in steps[1][0].rows] == [(2, 1, True)] * 2
    for now, (step, sent) in enumerate(steps):
        scheduler.update(step, device.compute(step, sent), 2.0 + now)
    assert tuple(created.chain.tokens.tolist()) == (1, 2, *alone((1, 2), 2))


def test_request_with_last_token_in_flight_gets_no_row():
    scheduler, device = make(), Device()
    _, ((_, _), (second, _)) = _two_steps(scheduler, device, new=1)
    assert not second.rows


def test_request_that_waits_for_token_skips_every_other_step():
    scheduler, device = make(20, max_step_tokens=16), Device()
    request(scheduler, "grammar", [1, 2], 4, waits_for_token=True)
    request(scheduler, "plain", [1, 2], 8)
    names, sent = [], []
    for now in range(7):
        step = scheduler.schedule(float(now))
        names.append([row.request.id for row in step.rows])
        sent.append((step, device.submit(step)))
        if now:
            old, inputs = sent.pop(0)
            scheduler.update(old, device.compute(old, inputs), float(now))
    assert names == [["grammar", "plain"], ["plain"]] * 3 + [["grammar", "plain"]]


def test_stop_discards_row_in_flight_and_then_frees_blocks():
    scheduler, device = make(), Device()
    (created,), ((first, sent), (second, later)) = _two_steps(scheduler, device, new=9)
    scheduler.update(first, device.compute(first, sent, {"a"}), 2.0)
    assert created.state is RequestState.FINISHED
    assert scheduler.manager.stats.num_allocations == 1
    check_scheduler(scheduler)
    scheduler.update(second, device.compute(second, later), 3.0)
    assert created.num_new_tokens == 1
    assert scheduler.manager.stats.num_allocations == 0
    check_scheduler(scheduler)


def test_cancelled_request_keeps_blocks_while_rows_run():
    scheduler, device = make(), Device()
    (created,), ((first, _), (second, _)) = _two_steps(scheduler, device)
    assert scheduler.cancel(created, 2.0)
    assert not scheduler.cancel(created, 2.0)
    for step, left in ((first, 1), (second, 0)):
        scheduler.update(step, [WORTHLESS], 3.0)
        assert scheduler.manager.stats.num_allocations == left
        check_scheduler(scheduler)
    assert created.num_new_tokens == 0


def test_failed_step_spares_requests_of_the_next_step():
    scheduler, device = make(20), Device()
    failing = request(scheduler, "failing", [1, 2], 4)
    first = scheduler.schedule(0.0)
    spared = request(scheduler, "spared", [1] * 6, 4)
    second = scheduler.schedule(1.0)
    assert {row.request for row in second.rows} == {failing, spared}
    assert scheduler.fail(first, 2.0) == (failing,)
    with pytest.raises(StateError, match="once"):
        scheduler.fail(first, 2.0)
    scheduler.discard(second, 2.0)
    assert scheduler.manager.stats.num_allocations == 1
    run(scheduler, device)
    assert tuple(spared.chain.tokens.tolist())[6:] == alone((1,) * 6, 4)


def test_discard_of_step_that_is_not_last_raises():
    scheduler, device = make(), Device()
    _, ((first, _), _) = _two_steps(scheduler, device)
    with pytest.raises(StateError, match="only the last step"):
        scheduler.discard(first, 2.0)


def test_shortage_preempts_request_after_its_row_ended():
    scheduler, device = make(2, max_step_tokens=16), Device()
    old, young = (request(scheduler, name, [at] * (BLOCK - 1), 4, now=at) for at, name in enumerate("ab"))
    first = scheduler.schedule(1.0)  # the step computes 3 tokens of each request and samples the fourth
    sent = device.submit(first)
    second = scheduler.schedule(2.0)
    later = device.submit(second)
    assert len(second.rows) == 2
    scheduler.update(first, device.compute(first, sent), 3.0)
    third = scheduler.schedule(4.0)  # each request needs a second block, but both requests have rows in flight
    assert not third.rows
    assert not third.preempted
    scheduler.update(second, device.compute(second, later), 5.0)
    scheduler.update(third, [], 5.0)
    fourth = scheduler.schedule(6.0)
    assert fourth.preempted == (young,)
    assert [row.request for row in fourth.rows] == [old]
    assert young.num_new_tokens == 2


def test_pause_with_step_in_flight_raises_error():
    scheduler = make()
    _two_steps(scheduler, Device())
    with pytest.raises(StateError, match="in flight"):
        scheduler.pause(2.0)


def test_step_time_begins_with_results_of_step_before():
    scheduler, device = make(20), Device()
    _, steps = _two_steps(scheduler, device)
    times = []
    scheduler.manager.cost_model.observe_compute = lambda *observed: times.append(observed[-1])
    for now, (step, sent) in zip((5.0, 8.0), steps, strict=True):
        scheduler.update(step, device.compute(step, sent), now)
    assert times == [5.0, 3.0]
