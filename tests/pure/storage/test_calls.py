"""Calls to stores: results and deadlines of a Batch, and the calls to a failing store that a Breaker refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ArgumentError
from kvtier.storage import Breaker, ObjectResult, ObjectStatus
from kvtier.storage.calls import Batch, CallRunner, Job
from storage_support import Clock

FOUND = ObjectResult(ObjectStatus.FOUND)


def failed_batch(trouble: str = "a bad disk") -> Batch:
    batch = Batch(1)
    batch.fail(trouble)
    batch.wait(0)
    return batch


def good_batch() -> Batch:
    batch = Batch(1)
    batch.settle({0: FOUND})
    batch.wait(0)
    return batch


def hanging_batch() -> Batch:
    batch = Batch(1)
    batch.add_jobs(1)
    batch.wait(0)
    return batch


def test_batch_returns_results_in_order_of_objects():
    batch = Batch(3)
    batch.settle({2: FOUND})
    batch.settle({0: ObjectResult(ObjectStatus.MISSING), 1: FOUND})
    assert [outcome.status.value for outcome in batch.wait(0)] == ["missing", "found", "found"]
    assert not batch.trouble


def test_object_not_settled_by_deadline_fails():
    batch = Batch(2)
    batch.settle({0: FOUND})
    outcomes = batch.wait(0)
    assert [outcome.status for outcome in outcomes] == [ObjectStatus.FOUND, ObjectStatus.FAILED]
    assert "not done within 0 s" in outcomes[1].reason
    assert batch.is_late


def test_settle_after_deadline_does_not_run_copy():
    batch = Batch(1)
    batch.wait(0)
    touched = []
    assert not batch.settle({0: FOUND}, lambda: touched.append(1))
    assert touched == []


def test_wait_does_not_return_while_copy_runs():
    batch = Batch(2)
    copying, resume, returned = threading.Event(), threading.Event(), threading.Event()
    outcomes = []

    def copy():
        copying.set()
        resume.wait()
        assert not returned.is_set()

    worker = threading.Thread(target=lambda: batch.settle({0: FOUND}, copy))
    worker.start()
    copying.wait()
    caller = threading.Thread(target=lambda: (outcomes.extend(batch.wait(0)), returned.set()))
    caller.start()
    while not batch.is_expired:
        pass
    resume.set()
    worker.join()
    caller.join()
    assert [outcome.status for outcome in outcomes] == [ObjectStatus.FOUND, ObjectStatus.FAILED]


def test_object_fails_if_its_copy_raises():
    batch = Batch(1)
    with pytest.raises(ZeroDivisionError):
        batch.settle({0: FOUND}, lambda: 1 // 0)
    assert batch.wait(0)[0].status is ObjectStatus.FAILED


def test_breaker_opens_after_failures_and_closes_after_success():
    clock = Clock()
    breaker = Breaker(retry_s=1, max_failures=3, clock=clock)
    for _ in range(2):
        assert not breaker.refusal()
        breaker.record(failed_batch())
    breaker.record(good_batch())  # a success resets the count of failures
    for _ in range(3):
        assert not breaker.refusal()
        breaker.record(failed_batch())
    assert "a bad disk" in breaker.refusal()
    assert breaker.refusal(is_try=False)
    clock.now = 1.0
    assert not breaker.refusal(is_try=False)
    assert not breaker.refusal()
    assert "tries the store" in breaker.refusal(), "a second call was allowed to try the store"
    breaker.record(good_batch())
    assert not breaker.refusal()
    assert breaker.num_refused == 2


def test_failed_trial_doubles_retry_time_up_to_maximum():
    clock = Clock()
    breaker = Breaker(retry_s=1, max_retry_s=4, max_failures=1, clock=clock)
    breaker.record(failed_batch())
    for wait in (1, 2, 4, 4):
        clock.now += wait - 0.5
        assert breaker.refusal()
        clock.now += 0.5
        assert not breaker.refusal()
        breaker.record(failed_batch())


def test_breaker_stays_open_while_call_past_deadline_hangs():
    clock = Clock()
    breaker = Breaker(retry_s=1, clock=clock)
    hanging = hanging_batch()
    breaker.record(hanging)
    clock.now = 1e6
    assert "still hang" in breaker.refusal()
    breaker.record(good_batch())  # the success of another call does not close the breaker
    assert "still hang" in breaker.refusal()
    hanging.add_jobs(-1)
    assert not breaker.refusal()


@pytest.mark.parametrize("ended", [good_batch, failed_batch])
def test_call_from_before_opening_does_not_end_the_try(ended):
    clock = Clock()
    breaker = Breaker(retry_s=1, max_failures=1, clock=clock)
    with ThreadPoolExecutor() as threads:
        for _ in range(2):
            assert not threads.submit(breaker.refusal).result()
        assert not breaker.refusal()
        breaker.record(failed_batch())
        threads.submit(breaker.record, ended()).result()
        assert "for another 1 s" in breaker.refusal()
        clock.now = 1.0
        assert not breaker.refusal()
        threads.submit(breaker.record, ended()).result()
        assert "tries the store" in breaker.refusal(), "a second call was allowed to try the store"
    breaker.record(failed_batch())
    assert "for another 2 s" in breaker.refusal()
    clock.now = 3.0
    assert not breaker.refusal()
    breaker.record(good_batch())
    assert not breaker.refusal()


def test_interrupted_try_lets_the_next_call_try():
    clock = Clock()
    breaker = Breaker(max_failures=1, clock=clock)
    runner = CallRunner(1, "interrupted", breaker, 10.0)
    runner.run(1, lambda batch: batch.fail("a bad disk") or [], None)
    clock.now += 1

    interrupted: list[Batch] = []

    def interrupt(batch: Batch) -> list[Job]:
        interrupted.append(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(1, interrupt, None)
    assert not interrupted[0].settle({0: FOUND}, lambda: pytest.fail("a call that has ended changed memory"))
    (outcome,) = runner.run(1, lambda batch: batch.settle({0: FOUND}) and [], None)
    assert outcome.status is ObjectStatus.FOUND
    assert runner.close()


@pytest.mark.parametrize("settings", [{"retry_s": -1}, {"retry_s": 2, "max_retry_s": 1}, {"max_failures": 0}])
def test_invalid_breaker_settings_raise(settings):
    with pytest.raises(ArgumentError):
        Breaker(**settings)
