"""Streams and events: order, errors, closing, wrapping, and random operations compared with a model."""

from __future__ import annotations

import dataclasses
import functools
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ArgumentError, ClosedError, StateError, UnavailableError
from kvtier.memory import CPU, Event, Placement, Stream
from support import held_back, new_stream

TIMEOUT_S = 10  # reached only if a thread hangs

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA GPU")


def failing(error: Exception) -> Callable[[], None]:
    def task() -> None:
        raise error

    return task


def thread_of(stream: Stream) -> threading.Thread:
    threads: list[threading.Thread] = []
    stream.enqueue(lambda: threads.append(threading.current_thread()))
    stream.synchronize()
    return threads[0]


def has_ended(thread: threading.Thread) -> bool:
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


def output_of(script: str) -> str:
    """Return the output of a Python script. The test fails if the script fails or hangs."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- streams ----


def test_stream_default_placement_is_cpu():
    with new_stream() as stream:
        assert stream.placement == CPU
        assert "cpu" in repr(stream)


def test_host_stream_handles_are_unique_and_negative():
    with new_stream() as one, new_stream() as other:
        assert one.handle != other.handle
        assert max(one.handle, other.handle) < 0


def test_stream_runs_tasks_in_order_asynchronously():
    ran: list[int] = []
    with new_stream() as stream:
        with held_back(stream):
            for number in range(100):
                stream.enqueue(functools.partial(ran.append, number))
            assert not ran
            assert not stream.query()
        stream.synchronize()
        assert stream.query()
    assert ran == list(range(100))


def test_tasks_on_two_streams_run_concurrently():
    barrier = threading.Barrier(2, timeout=TIMEOUT_S)
    with new_stream() as one, new_stream() as other:
        one.enqueue(barrier.wait)
        other.enqueue(barrier.wait)
        one.synchronize()
        other.synchronize()


def test_stream_synchronize_works_from_any_thread():
    ran: list[str] = []
    with new_stream() as stream:
        waiting = threading.Thread(target=lambda: (stream.synchronize(), ran.append("waited")))
        with held_back(stream):
            stream.enqueue(lambda: ran.append("task"))
            waiting.start()
        assert has_ended(waiting)
    assert ran == ["task", "waited"]


def test_stream_error_skips_later_tasks_and_is_raised_once():
    ran: list[str] = []
    with new_stream() as stream:
        stream.enqueue(failing(ValueError("broken")))
        stream.enqueue(lambda: ran.append("skipped"))
        with pytest.raises(ValueError, match="broken"):
            stream.synchronize()
        stream.synchronize()
        stream.enqueue(lambda: ran.append("afterwards"))
        stream.synchronize()
    assert ran == ["afterwards"]


def test_stream_synchronize_in_own_task_raises():
    with new_stream() as stream:
        stream.enqueue(stream.synchronize)
        with pytest.raises(StateError, match="cannot wait for itself"):
            stream.synchronize()


# ---- events ----


def test_unrecorded_event_counts_as_reached():
    event = Event()
    assert event.query()
    event.synchronize()
    with new_stream() as stream:
        stream.wait(event)
        stream.synchronize()


def test_stream_record_returns_new_or_given_event():
    with new_stream() as stream:
        made = stream.record()
        assert isinstance(made, Event)
        assert stream.record(made) is made
        assert stream.record() is not made


def test_event_is_reached_after_earlier_tasks():
    ran: list[str] = []
    with new_stream() as stream:
        with held_back(stream):
            stream.enqueue(lambda: ran.append("before"))
            event = stream.record()
            assert not event.query()
        event.synchronize()
        assert event.query()
        assert ran == ["before"]


def test_event_does_not_wait_for_later_tasks():
    with new_stream() as stream:
        event = stream.record()
        with held_back(stream):
            event.synchronize()
            assert event.query()
            assert not stream.query()


def test_event_recorded_again_is_reached_at_new_position():
    with new_stream() as stream:
        event = stream.record()
        event.synchronize()
        with held_back(stream):
            event.record(stream)
            assert not event.query()
        event.synchronize()


def test_event_can_be_recorded_again_on_another_stream():
    with new_stream() as blocked, new_stream() as free, held_back(blocked):
        event = blocked.record()
        free.record(event)
        event.synchronize()
        assert event.query()


def test_stream_wait_orders_two_streams():
    ran: list[str] = []
    with new_stream() as first, new_stream() as second:
        with held_back(first):
            first.enqueue(lambda: ran.append("first"))
            second.wait(first.record())
            second.enqueue(lambda: ran.append("second"))
            assert not second.query()
        second.synchronize()
    assert ran == ["first", "second"]


def test_event_wait_orders_two_streams():
    ran: list[str] = []
    with new_stream() as first, new_stream() as second:
        with held_back(first):
            first.enqueue(lambda: ran.append("first"))
            first.record().wait(second)
            second.enqueue(lambda: ran.append("second"))
        second.synchronize()
    assert ran == ["first", "second"]


def test_stream_wait_ignores_later_recordings_of_the_event():
    with new_stream() as first, new_stream() as second:
        event = first.record()
        second.wait(event)
        with held_back(first):
            first.record(event)
            second.synchronize()  # waits only for the first recording, which is not held back
            assert not event.query()


def test_event_passes_error_of_its_stream_to_waiting_streams():
    error = ValueError("on the first stream")
    with new_stream() as first, new_stream() as second:
        clean = first.record()
        first.enqueue(failing(error))
        event = first.record()
        second.wait(event)
        for wait in (event.synchronize, second.synchronize, first.synchronize):
            with pytest.raises(ValueError, match="on the first stream") as caught:
                wait()
            assert caught.value is error
        clean.synchronize()
        first.synchronize()
        second.synchronize()


def test_event_elapsed_sign_follows_order():
    start, end = Event(timing=True), Event(timing=True)
    with new_stream() as stream:
        stream.record(start)
        stream.enqueue(lambda: None)
        with held_back(stream):
            stream.record(end)
        assert start.elapsed(end) >= 0
        assert end.query()
        assert end.elapsed(start) == -start.elapsed(end)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_event_elapsed_with_unrecorded_event_raises(first, second):
    start, end = Event(timing=True), Event(timing=True)
    with new_stream() as stream:
        for event, recorded in ((start, first), (end, second)):
            if recorded:
                stream.record(event)
        with pytest.raises(StateError, match="needs both events recorded"):
            start.elapsed(end)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_event_elapsed_without_timing_raises(first, second):
    with new_stream() as stream:
        start, end = stream.record(Event(timing=first)), stream.record(Event(timing=second))
        with pytest.raises(StateError, match="timing=True"):
            start.elapsed(end)


def test_event_elapsed_to_failed_event_raises_error_of_the_event():
    with new_stream() as stream:
        start = stream.record(Event(timing=True))
        stream.enqueue(failing(ValueError("no time")))
        end = stream.record(Event(timing=True))
        with pytest.raises(ValueError, match="no time"):
            start.elapsed(end)


# ---- close, drop, interpreter exit ----


def test_stream_close_finishes_tasks_and_ends_thread():
    ran: list[int] = []
    stream = Stream()
    thread = thread_of(stream)
    for number in range(100):
        stream.enqueue(functools.partial(ran.append, number))
    stream.close()
    assert ran == list(range(100))
    assert not thread.is_alive()


def test_stream_close_twice_is_allowed():
    stream = Stream()
    stream.close()
    stream.close()


def test_stream_can_be_closed_by_its_own_task():
    ran: list[str] = []
    stream = Stream()
    thread = thread_of(stream)
    with held_back(stream):
        stream.enqueue(stream.close)
        stream.enqueue(lambda: ran.append("enqueued before close"))
    assert has_ended(thread)
    assert ran == ["enqueued before close"]
    stream.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda stream, _event: stream.enqueue(lambda: None),
        lambda stream, _event: stream.record(),
        lambda stream, event: stream.record(event),
        lambda stream, event: stream.wait(event),
        lambda stream, _event: stream.query(),
        lambda stream, _event: stream.synchronize(),
        lambda stream, _event: stream.native,
        lambda stream, event: event.record(stream),
        lambda stream, event: event.wait(stream),
    ],
)
def test_stream_use_after_close_raises(use):
    stream = Stream()
    event = stream.record()
    stream.close()
    with pytest.raises(ClosedError, match="was closed"):
        use(stream, event)


def test_event_can_be_used_after_its_stream_is_closed():
    stream = Stream()
    clean = stream.record(Event(timing=True))
    stream.enqueue(failing(ValueError("failed before close")))
    broken = stream.record(Event(timing=True))
    with pytest.raises(ValueError, match="failed before close"):
        stream.close()
    assert clean.query()
    assert broken.query()
    clean.synchronize()
    with pytest.raises(ValueError, match="failed before close"):
        broken.synchronize()


def test_dropped_stream_ends_its_thread():
    stream = Stream()
    thread, watched = thread_of(stream), weakref.ref(stream)
    del stream
    gc.collect()
    assert watched() is None
    assert has_ended(thread)
    assert thread not in threading.enumerate()


def test_dropped_stream_finishes_its_tasks():
    ran: list[int] = []
    stream = Stream()
    thread = thread_of(stream)
    for number in range(100):
        stream.enqueue(functools.partial(ran.append, number))
    del stream
    assert has_ended(thread)
    assert ran == list(range(100))


def test_event_of_dropped_stream_is_reached():
    stream = Stream()
    event = stream.record()
    del stream
    event.synchronize()
    assert event.query()


def test_stream_referenced_only_by_its_task_ends_its_thread():
    stream = Stream()
    thread = thread_of(stream)
    with held_back(stream):
        stream.enqueue(stream.query)
        del stream
    assert has_ended(thread)


def test_collected_stream_in_reference_cycle_ends_its_thread():
    stream = Stream()
    thread = thread_of(stream)
    cycle = {"stream": stream}
    cycle["itself"] = cycle
    del stream, cycle
    gc.collect()
    assert has_ended(thread)


def test_dropped_stream_that_waits_for_task_does_not_deadlock():
    script = """
        import functools, threading
        from kvtier.memory import Stream

        first, second = Stream(), Stream()
        gate = threading.Event()
        first.enqueue(functools.partial(lambda held: gate.wait(), second))  # the task holds a reference to `second`
        second.wait(first.record())
        second.enqueue(lambda: print("second"))
        del second  # now the task holds the last reference
        gate.set()
        first.synchronize()
    """
    assert output_of(script) == "second\n"


def test_stream_tasks_finish_before_interpreter_exit():
    script = """
        import atexit, threading
        from kvtier.memory import Stream

        first, second, dropped = Stream(), Stream(), Stream()
        gate = threading.Event()
        atexit.register(gate.set)  # opens the gate after the last line of the script
        first.enqueue(gate.wait)
        first.enqueue(lambda: print("first"))
        second.wait(first.record())
        second.enqueue(lambda: print("second"))
        dropped.wait(second.record())
        dropped.enqueue(lambda: print("dropped"))
        del dropped
    """
    assert output_of(script) == "first\nsecond\ndropped\n"


# ---- wrapping ----


@pytest.mark.parametrize("foreign", [None, "cuda:0", object(), 1.5])
def test_stream_wrap_of_other_object_raises(foreign):
    with pytest.raises(ArgumentError, match=f"cannot wrap {type(foreign).__name__}"):
        Stream.wrap(foreign)


def test_stream_wrap_of_host_stream_raises():
    with new_stream() as stream:
        with pytest.raises(ArgumentError, match="cannot wrap Stream"):
            Stream.wrap(stream)
        with pytest.raises(ArgumentError, match="cannot wrap HostQueue"):
            Stream.wrap(stream.native)


def test_stream_wrap_of_handle_without_placement_raises():
    with pytest.raises(ArgumentError, match=r"0x1234 does not identify its GPU: pass placement='cuda:0'"):
        Stream.wrap(0x1234)


def test_stream_wrap_of_handle_on_cpu_raises():
    with pytest.raises(ArgumentError, match="belongs to a GPU, not to cpu"):
        Stream.wrap(0x1234, "cpu")


@needs_no_gpu
def test_stream_wrap_of_handle_on_missing_gpu_raises():
    with pytest.raises(UnavailableError, match="cuda:0"):
        Stream.wrap(0x1234, "cuda:0")


@needs_no_gpu
def test_stream_on_missing_gpu_raises():
    with pytest.raises(UnavailableError, match="cuda:3"):
        Stream(Placement("cuda", 3))


# ---- random streams against a model ----


@dataclasses.dataclass
class Place:
    """The model of a position in a stream: the current end of the stream, or the position of an event."""

    completed: frozenset[int] = frozenset()
    """Tasks that must have run before this position is reached."""
    gates: frozenset[int] = frozenset()
    """Numbers of the gates that must be open before this position is reached. A gate is an Event that a task awaits."""
    error: Exception | None = None

    def after(self, other: Place) -> Place:
        """Return a position that is after both this position and `other`."""
        return Place(self.completed | other.completed, self.gates | other.gates, self.error or other.error)


class StreamsMachine(RuleBasedStateMachine):
    """Drives up to three streams from one thread, so that the model can predict order and errors.

    For each task, the model records the tasks and gates before this task. A running task checks that all these tasks
    have run and that all these gates are open, and then appends its number to the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.ends: list[Place] = []
        self.orders: list[list[int]] = []  # for each stream, the tasks that must run, in order of execution
        self.events: list[tuple[Event, Place]] = []
        self.gates: list[threading.Event] = []
        self.log: list[int] = []
        self.violations: list[str] = []
        self.num_tasks = 0

    def teardown(self) -> None:
        for gate in self.gates:
            gate.set()
        for number, stream in enumerate(self.streams):
            self._expect(stream.synchronize, self.ends[number])
            stream.close()
        assert self.violations == []
        for order in self.orders:
            assert [task for task in self.log if task in set(order)] == order
        assert sorted(self.log) == sorted(task for order in self.orders for task in order)

    # -- rules --

    @precondition(lambda self: len(self.streams) < 3)
    @rule()
    def open_stream(self) -> None:
        self.streams.append(Stream())
        self.ends.append(Place())
        self.orders.append([])

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2), fails=st.sampled_from([False, False, False, True]))
    def enqueue(self, which: int, fails: bool) -> None:
        number, end = self._pick(which)
        task = self.num_tasks
        self.num_tasks += 1
        error = ValueError(f"task {task}") if fails else None
        self.streams[number].enqueue(functools.partial(self._run, task, end, error))
        if end.error is None:
            self.orders[number].append(task)
            self.ends[number] = dataclasses.replace(end, completed=end.completed | {task}, error=error)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2))
    def enqueue_gate(self, which: int) -> None:
        number, end = self._pick(which)
        if end.error is not None:  # if the stream wrongly ran a gate after an error, the test would hang
            return self.enqueue(which, fails=False)
        self.gates.append(threading.Event())
        self.streams[number].enqueue(self.gates[-1].wait)
        self.ends[number] = dataclasses.replace(end, gates=end.gates | {len(self.gates) - 1})

    @precondition(lambda self: self.gates)
    @rule(which=st.integers(0, 99))
    def open_gate(self, which: int) -> None:
        self.gates[which % len(self.gates)].set()

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2))
    def record_new_event(self, which: int) -> None:
        number, end = self._pick(which)
        self.events.append((self.streams[number].record(), end))

    @precondition(lambda self: self.streams and self.events)
    @rule(which=st.integers(0, 2), event=st.integers(0, 99))
    def record_event_again(self, which: int, event: int) -> None:
        number, end = self._pick(which)
        position = event % len(self.events)
        self.streams[number].record(self.events[position][0])
        self.events[position] = (self.events[position][0], end)

    @precondition(lambda self: self.streams and self.events)
    @rule(which=st.integers(0, 2), event=st.integers(0, 99))
    def wait_for_event(self, which: int, event: int) -> None:
        number, end = self._pick(which)
        recorded, place = self.events[event % len(self.events)]
        self.streams[number].wait(recorded)
        if end.error is None:
            self.ends[number] = end.after(place)

    @precondition(lambda self: any(self._is_free(end) for end in self.ends))
    @rule(which=st.integers(0, 2))
    def synchronize_free_stream(self, which: int) -> None:
        free = [number for number, end in enumerate(self.ends) if self._is_free(end)]
        number = free[which % len(free)]
        self._expect(self.streams[number].synchronize, self.ends[number])
        self.ends[number] = dataclasses.replace(self.ends[number], error=None)
        assert self.streams[number].query()

    @precondition(lambda self: any(self._is_free(place) for _, place in self.events))
    @rule(which=st.integers(0, 99))
    def synchronize_free_event(self, which: int) -> None:
        free = [(event, place) for event, place in self.events if self._is_free(place)]
        event, place = free[which % len(free)]
        self._expect(event.synchronize, place)
        assert event.query()

    # -- invariants --

    @invariant()
    def nothing_behind_closed_gate_is_reached(self) -> None:
        assert not any(stream.query() for stream, end in zip(self.streams, self.ends, strict=True) if self._held(end))
        assert not any(event.query() for event, place in self.events if self._held(place))

    @invariant()
    def no_task_ran_too_early(self) -> None:
        assert self.violations == []

    # -- helpers --

    def _run(self, task: int, place: Place, error: Exception | None) -> None:
        if place.error is not None:
            self.violations.append(f"task {task} ran after the error {place.error}")
        if missing := place.completed - set(self.log):
            self.violations.append(f"task {task} ran before tasks {sorted(missing)}")
        if not self._is_free(place):
            self.violations.append(f"task {task} ran behind a closed gate")
        self.log.append(task)
        if error is not None:
            raise error

    def _expect(self, wait: Callable[[], None], place: Place) -> None:
        raised: Exception | None = None
        try:
            wait()
        except ValueError as error:
            raised = error
        assert raised is place.error
        assert place.completed <= set(self.log)

    def _pick(self, which: int) -> tuple[int, Place]:
        number = which % len(self.streams)
        return number, self.ends[number]

    def _is_free(self, place: Place) -> bool:
        return all(self.gates[gate].is_set() for gate in place.gates)

    def _held(self, place: Place) -> bool:
        return not self._is_free(place)


TestStreamsMachine = StreamsMachine.TestCase
TestStreamsMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
