"""HostQueue: order of tasks, marks (recorded positions in a queue), errors, lifetime of task memory, and closing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvtier.errors import StateError
from kvtier.memory.stream import HostMark, HostQueue

TIMEOUT_S = 10  # reached only if a call hangs


@contextlib.contextmanager
def new_queue() -> Iterator[HostQueue]:
    """Yield a queue and close it. Ignore a ValueError from `close`, because tasks of some tests raise it."""
    queue = HostQueue("test")
    try:
        yield queue
    finally:
        with contextlib.suppress(ValueError):
            queue.close()


@contextlib.contextmanager
def held_back(queue: HostQueue) -> Iterator[None]:
    """Block the queue until the end of the `with` block."""
    gate = threading.Event()
    queue.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def mark_on(queue: HostQueue) -> HostMark:
    return queue.record()


def mark_on_new_queue() -> HostMark:
    with new_queue() as queue:
        return mark_on(queue)


def failing(error: BaseException) -> Callable[[], None]:
    def task() -> None:
        raise error

    return task


def result_of(call: Callable[[], object]) -> object:
    """Return the result of a call, or the exception that it raises. Fail the test if the call hangs."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert results, "the call hangs"
    return results[0]


# ---- order and asynchrony ----


def test_queue_runs_tasks_in_submission_order():
    ran: list[int] = []
    with new_queue() as queue:
        for number in range(500):
            queue.submit(functools.partial(ran.append, number))
        queue.synchronize()
        assert ran == list(range(500))


def test_queue_runs_tasks_on_one_named_thread():
    threads: list[threading.Thread] = []
    with new_queue() as queue:
        for _ in range(3):
            queue.submit(lambda: threads.append(threading.current_thread()))
        queue.synchronize()
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert threads[0].name == "test"


def test_submit_does_not_wait_for_task():
    ran: list[str] = []
    with new_queue() as queue:
        with held_back(queue):
            queue.submit(lambda: ran.append("task"))
            ran.append("caller")
        queue.synchronize()
    assert ran == ["caller", "task"]


def test_two_queues_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=TIMEOUT_S)
    with new_queue() as one, new_queue() as other:
        one.submit(barrier.wait)  # returns only if both tasks run at the same time
        other.submit(barrier.wait)
        one.synchronize()
        other.synchronize()


def test_blocked_queue_does_not_block_another():
    ran: list[str] = []
    with new_queue() as one, new_queue() as other, held_back(one):
        other.submit(lambda: ran.append("other"))
        other.synchronize()
        assert ran == ["other"]
        assert not one.query()


def test_queue_task_can_submit_tasks():
    ran: list[str] = []
    with new_queue() as queue:
        with held_back(queue):
            queue.submit(lambda: queue.submit(lambda: ran.append("submitted by a task")))
            queue.submit(lambda: ran.append("submitted by the test"))
        queue.synchronize()  # may return before the inner task has run
        queue.synchronize()
    assert ran == ["submitted by the test", "submitted by a task"]


def test_queue_keeps_order_of_each_submitting_thread():
    ran: list[tuple[int, int]] = []
    with new_queue() as queue:

        def submit_all(thread_number: int) -> None:
            for number in range(200):
                queue.submit(functools.partial(ran.append, (thread_number, number)))

        threads = [threading.Thread(target=submit_all, args=(thread_number,)) for thread_number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queue.synchronize()
        assert queue.query()
    assert len(ran) == 800
    for thread_number in range(4):
        assert [number for thread, number in ran if thread == thread_number] == list(range(200))


def test_queue_query_is_true_when_idle():
    with new_queue() as queue:
        assert queue.query()
        with held_back(queue):
            assert not queue.query()
        queue.synchronize()
        assert queue.query()


def test_queue_synchronize_waits_for_all_tasks():
    ran: list[int] = []
    with new_queue() as queue:
        for round_number in range(50):
            queue.submit(functools.partial(ran.append, round_number))
            queue.synchronize()
            assert ran[-1] == round_number


# ---- marks ----


def test_mark_is_reached_after_earlier_tasks():
    ran: list[str] = []
    with new_queue() as queue:
        with held_back(queue):
            queue.submit(lambda: ran.append("before"))
            mark = mark_on(queue)
            assert not mark.query()
        mark.synchronize()
        assert ran == ["before"]
        assert mark.query()


def test_mark_does_not_wait_for_later_tasks():
    with new_queue() as queue:
        mark = mark_on(queue)
        with held_back(queue):
            mark.synchronize()
            assert mark.query()


def test_wait_event_orders_two_queues():
    ran: list[str] = []
    with new_queue() as first, new_queue() as second:
        with held_back(first):
            first.submit(lambda: ran.append("first"))
            second.submit(lambda: ran.append("before the wait"))
            second.wait_event(mark_on(first))
            before = mark_on(second)
            second.submit(lambda: ran.append("second"))
            assert not before.query()
        second.synchronize()
    assert ran.index("first") < ran.index("second")
    assert ran.index("before the wait") < ran.index("second")


def test_wait_event_on_mark_of_same_queue_returns():
    with new_queue() as queue:
        queue.wait_event(mark_on(queue))
        queue.synchronize()


def test_wait_event_orders_chain_of_three_queues():
    ran: list[str] = []
    with new_queue() as a, new_queue() as b, new_queue() as c:
        with held_back(a):
            a.submit(lambda: ran.append("a"))
            b.wait_event(mark_on(a))
            b.submit(lambda: ran.append("b"))
            c.wait_event(mark_on(b))
            c.submit(lambda: ran.append("c"))
        c.synchronize()
    assert ran == ["a", "b", "c"]


def test_elapsed_time_sign_follows_mark_order():
    with new_queue() as queue:
        start, end = mark_on(queue), mark_on(queue)
        assert start.elapsed_time(end) >= 0
        assert start.elapsed_time(end) == -end.elapsed_time(start)
        assert start.elapsed_time(start) == 0


def test_elapsed_time_waits_for_both_marks():
    with new_queue() as queue:
        start = mark_on(queue)
        with held_back(queue):
            end = mark_on(queue)
        assert start.elapsed_time(end) >= 0
        assert end.query()


# ---- errors ----


def test_task_error_skips_later_tasks_and_is_raised():
    ran: list[str] = []
    error = ValueError("task 2 went wrong")
    with new_queue() as queue:
        queue.submit(lambda: ran.append("before"))
        queue.submit(failing(error))
        queue.submit(lambda: ran.append("after"))
        with pytest.raises(ValueError, match="task 2 went wrong") as caught:
            queue.synchronize()
    assert caught.value is error
    assert ran == ["before"]


def test_task_error_is_raised_once_and_queue_recovers():
    ran: list[str] = []
    with new_queue() as queue:
        queue.submit(failing(ValueError("once")))
        with pytest.raises(ValueError, match="once"):
            queue.synchronize()
        queue.synchronize()
        queue.submit(lambda: ran.append("afterwards"))
        mark = mark_on(queue)
        queue.synchronize()
        mark.synchronize()
    assert ran == ["afterwards"]


def test_queue_raises_first_of_several_errors():
    with new_queue() as queue:
        queue.submit(failing(ValueError("first")))
        queue.submit(failing(KeyError("second")))
        with pytest.raises(ValueError, match="first"):
            queue.synchronize()
        queue.synchronize()


def test_queue_and_mark_are_done_after_error():
    with new_queue() as queue:
        queue.submit(failing(ValueError("done")))
        mark = mark_on(queue)
        with pytest.raises(ValueError, match="done"):
            mark.synchronize()
        assert mark.query()
        assert queue.query()


def test_mark_raises_only_errors_of_earlier_tasks():
    with new_queue() as queue:
        before = mark_on(queue)
        queue.submit(failing(ValueError("between")))
        with_error = mark_on(queue)
        with pytest.raises(ValueError, match="between"):
            queue.synchronize()
        after = mark_on(queue)
        before.synchronize()
        after.synchronize()
        for _ in range(2):  # a mark keeps its error
            with pytest.raises(ValueError, match="between"):
                with_error.synchronize()


def test_elapsed_time_to_failed_mark_raises_error_of_the_mark():
    with new_queue() as queue:
        start = mark_on(queue)
        queue.submit(failing(ValueError("no time")))
        end = mark_on(queue)
        with pytest.raises(ValueError, match="no time"):
            start.elapsed_time(end)


def test_queue_waiting_for_failed_queue_raises_same_error():
    ran: list[str] = []
    error = ValueError("of the first queue")
    with new_queue() as first, new_queue() as second:
        first.submit(failing(error))
        second.wait_event(mark_on(first))
        second.submit(lambda: ran.append("after the wait"))
        with pytest.raises(ValueError, match="of the first queue") as caught:
            second.synchronize()
        assert caught.value is error
        second.submit(lambda: ran.append("afterwards"))
        second.synchronize()
        with pytest.raises(ValueError, match="of the first queue"):
            first.synchronize()
    assert ran == ["afterwards"]


def test_queue_not_waiting_for_failed_queue_is_unaffected():
    ran: list[str] = []
    with new_queue() as first, new_queue() as second:
        before = mark_on(first)
        first.submit(failing(ValueError("not yours")))
        second.wait_event(before)
        second.submit(lambda: ran.append("second"))
        second.synchronize()
    assert ran == ["second"]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=["SystemExit", "CancelledError"])
def test_base_exception_in_task_does_not_hang_synchronize(error):
    queue = HostQueue("test")
    queue.submit(failing(error))
    assert result_of(queue.synchronize) is error
    assert result_of(queue.synchronize) is None
    queue.close()


def test_synchronize_in_task_of_same_queue_raises():
    with new_queue() as queue:
        queue.submit(queue.synchronize)
        with pytest.raises(StateError, match="cannot wait for itself"):
            queue.synchronize()


def test_synchronize_raises_error_of_task_that_waits_for_itself():
    tried = threading.Event()

    def task() -> None:
        try:
            queue.synchronize()
        finally:
            tried.set()

    with new_queue() as queue:
        queue.submit(task)
        tried.wait()
        with pytest.raises(StateError, match="cannot wait for itself"):
            queue.synchronize()


def test_task_waiting_for_later_mark_of_its_queue_raises():
    queue = HostQueue("test")
    queue.submit(lambda: mark_on(queue).synchronize())
    assert isinstance(result_of(queue.synchronize), StateError)
    queue.close()


# ---- lifetime ----


class Memory:
    """An object that a task uses. The tests observe its lifetime through a weak reference."""

    def use(self) -> None:
        pass

    def fail(self) -> None:
        raise ValueError("failed with memory in use")


def test_queue_releases_a_task_before_it_starts_the_next():
    with new_queue() as queue:
        memory = Memory()
        watched = weakref.ref(memory)
        queue.submit(memory.use)
        queue.submit(int)  # when this task starts, the queue has released the first task
        del memory
        queue.synchronize()
        gc.collect()
        assert watched() is None


def test_mark_does_not_keep_earlier_tasks_alive():
    with new_queue() as queue:
        memory = Memory()
        watched = weakref.ref(memory)
        queue.submit(memory.use)
        mark = mark_on(queue)
        del memory
        queue.synchronize()
        gc.collect()
        assert watched() is None
        assert mark.query()


def test_raised_error_does_not_keep_task_memory_alive():
    with new_queue() as queue:
        memory = Memory()
        watched = weakref.ref(memory)
        queue.submit(memory.fail)
        del memory
        with contextlib.suppress(ValueError):
            queue.synchronize()
        gc.collect()
        assert watched() is None, "the idle queue still holds the error with its traceback and frames"


def test_gc_during_submit_can_submit_to_same_queue():
    """A finalizer can submit a deallocation at any time, because the garbage collector can run at any allocation."""
    script = """
        import gc
        from kvtier.memory.stream import HostQueue

        queue, ran = HostQueue("test"), []
        gc.freeze()  # exclude torch's objects, which would make every collection slow

        class Garbage:
            def __init__(self):
                self.itself = self  # only the collector frees it

            def __del__(self):
                queue.submit(lambda: ran.append(1))

        for phase in range(120):  # in each round, the collector runs at another allocation in submit()
            gc.disable()
            fill = spare = None
            gc.collect()
            Garbage()
            spare = [(queue, queue, number) for number in range(3000)]  # exhausts the free list of tuples
            fill = [[] for _ in range(phase)]
            gc.set_threshold(3100)  # the collector runs after about (100 - phase) more allocations
            gc.enable()
            queue.submit(int)
        gc.collect()
        queue.synchronize()
        print(len(ran), queue.query())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]  # in a subprocess, so that a hang fails only this test
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "120 True\n"


# ---- closing ----


def test_queue_close_finishes_submitted_tasks():
    ran: list[int] = []
    queue = HostQueue("test")
    for number in range(100):
        queue.submit(functools.partial(ran.append, number))
    queue.close()
    assert ran == list(range(100))


def test_queue_close_ends_the_thread():
    threads: list[threading.Thread] = []
    queue = HostQueue("test")
    queue.submit(lambda: threads.append(threading.current_thread()))
    queue.close()
    assert not threads[0].is_alive()


def test_queue_close_twice_is_allowed():
    queue = HostQueue("test")
    queue.close()
    assert result_of(queue.close) is None


def test_task_can_close_its_own_queue():
    queue = HostQueue("test")
    threads: list[threading.Thread] = []
    queue.submit(lambda: threads.append(threading.current_thread()))
    with held_back(queue):
        queue.submit(queue.close)
        mark = mark_on(queue)
    mark.synchronize()
    threads[0].join(TIMEOUT_S)
    assert not threads[0].is_alive()


@pytest.mark.parametrize(
    "use",
    [
        lambda queue: queue.submit(int),
        lambda queue: queue.record(),
        lambda queue: queue.wait_event(mark_on_new_queue()),
        lambda queue: queue.synchronize(),
    ],
    ids=["submit", "record", "wait_event", "synchronize"],
)
def test_queue_use_after_close_raises(use):
    queue = HostQueue("test")
    queue.close()
    assert isinstance(result_of(lambda: use(queue)), StateError)


def test_queue_close_raises_pending_error_once():
    queue = HostQueue("test")
    queue.submit(failing(ValueError("unseen")))
    with pytest.raises(ValueError, match="unseen"):
        queue.close()
    queue.close()


def test_queue_close_does_not_repeat_raised_error():
    queue = HostQueue("test")
    queue.submit(failing(ValueError("seen")))
    with pytest.raises(ValueError, match="seen"):
        queue.synchronize()
    queue.close()
