"""Streams and events on CUDA and on the host.

Host streams: an in-order queue with a thread of its own, in the shape of torch's CUDA stream and event.

With it asynchrony, ordering and overlap are real, and testable, without a GPU. An error in a task poisons the queue:
the tasks behind it are skipped, every mark recorded meanwhile carries the error to whoever waits for it (another queue
included), and the next synchronize() raises it and makes the queue usable again.

Stream and Event: order of work, on the host and on CUDA, behind one small interface.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch

from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.memory.placement import CPU, Placement

Task = Callable[[], object]


class _Point:
    """One recorded place in a queue."""

    def __init__(self, thread: threading.Thread) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self.seconds = 0.0
        self._thread = thread

    def settle(self) -> None:
        """Wait for the place, whatever the queue was in there."""
        if threading.current_thread() is self._thread and not self.reached.is_set():
            raise StateError("a host stream cannot wait for itself: one of its tasks waits for what comes after it")
        self.reached.wait()

    def wait(self) -> None:
        """Wait for the place, and raise the error the queue was in there."""
        self.settle()
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)  # as it was: it does not grow with everyone who waits


class HostQueue:
    """Runs tasks one after another on its own thread. Anybody may submit."""

    def __init__(self, name: str) -> None:
        # (task or nothing, the point reached after it, whether that clears the error); None ends the thread
        self._entries: SimpleQueue[tuple[Task | None, _Point, bool] | None] = SimpleQueue()
        self._unfinished: deque[None] = deque()  # as long as what was submitted and is not done; both ends are atomic
        # re-entrant: what is submitted may start a garbage collection, and that may submit, on this very thread
        self._lock = threading.RLock()
        self._closed = False
        self._unseen: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # what was submitted is finished, not lost

    def submit(self, task: Task) -> None:
        """Run `task` after everything submitted before."""
        self._put(task)

    def record(self) -> _Point:
        """A point that is reached when everything submitted before is done."""
        return self._put(None)

    def wait_event(self, mark: HostMark) -> None:
        """Hold the tasks submitted from now on until `mark`, as recorded now, is reached.

        Unrecorded marks are no wait.
        """
        if mark.point is not None:
            self.submit(mark.point.wait)

    def query(self) -> bool:
        """Whether everything submitted is done."""
        return not self._unfinished

    def synchronize(self) -> None:
        """Wait until everything submitted is done, and raise the first error among it."""
        if threading.current_thread() is self._thread:  # before anything is put: it would clear this very error
            raise StateError("a host stream cannot wait for itself: synchronize() was called from one of its own tasks")
        point = self._put(None, clear=True)
        point.settle()
        error, point.error, point.traceback = point.error, None, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame: no cycle, or what the task used would live on in it

    def close(self, *, wait: bool = True) -> None:
        """Finish what was submitted and end the thread; with `wait`, see it end and raise an error nobody saw.

        Using the queue then is an error; closing it again is not.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
            error, self._unseen = self._unseen, None
            if error is not None:
                raise error

    def _put(self, task: Task | None, *, clear: bool = False) -> _Point:
        point = _Point(self._thread)
        with self._lock:
            if self._closed:
                raise ClosedError("this host stream was closed")
            self._unfinished.append(None)
            self._entries.put((task, point, clear))
        return point

    def _work(self) -> None:
        error: BaseException | None = None
        while (entry := self._entries.get()) is not None:
            task, point, clear = entry
            if task is not None and error is None:
                try:
                    task()
                except BaseException as raised:  # kept, not swallowed: every point behind it raises it where one waits
                    error = raised
            point.error, point.seconds = error, time.perf_counter()
            point.traceback = None if error is None else error.__traceback__
            if clear:
                error = None
            del entry, task  # an idle thread must not keep the last task's buffers alive
            self._unfinished.pop()
            point.reached.set()
            del point
        self._unseen = error
        if error is None:  # else it is told at exit at the latest
            atexit.unregister(self.close)


class HostMark:
    """A place in a HostQueue; recording it again moves it."""

    def __init__(self) -> None:
        self.point: _Point | None = None

    def record(self, queue: HostQueue) -> None:
        """Move this mark to the present end of `queue`."""
        self.point = queue.record()

    def query(self) -> bool:
        """Whether the place is reached (an unrecorded mark always is)."""
        return self.point is None or self.point.reached.is_set()

    def synchronize(self) -> None:
        """Wait for the place, and raise the error the queue was in there."""
        if self.point is not None:
            self.point.wait()

    def wait_for(self, timeout: float) -> bool:
        """The same, but for at most so many seconds; whether the place is reached."""
        if self.point is None:
            return True
        reached = self.point.reached.wait(timeout)
        if reached:
            self.point.wait()
        return reached

    def settle(self) -> None:
        """Wait for the place, whatever the queue was in there."""
        if self.point is not None:
            self.point.settle()

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from this place to `end`; both must be recorded. Waits for both."""
        if self.point is None or end.point is None:
            raise StateError("elapsed time needs both events recorded on a stream first")
        self.point.wait()
        end.point.wait()
        return (end.point.seconds - self.point.seconds) * 1e3


_host_ids = itertools.count(1)
_QUERY_SECONDS = 20e-6  # between two looks at a CUDA event: little beside any transfer, and a core is free meanwhile
# A thread that sleeps in the driver wakes 0.13 to 0.27 ms late, one that looks again and again 0.03 to 0.06 (H200 in a
# virtual machine, 2026-11-15): much of a short transfer, nothing of a long one.
_LOOK_SECONDS = 3e-3
LEGACY_DEFAULT_HANDLES = (0, 1)  # torch's default stream, and CU_STREAM_LEGACY: both are the legacy default stream


class Stream:
    """An in-order queue of work. `Stream("cpu")` has a thread of its own, `Stream("cuda:0")` is a new CUDA stream.

    `native` is the queue beneath: a torch.cuda.Stream, or a HostQueue of the same shape.
    """

    __slots__ = ("__weakref__", "_finalizer", "_native", "handle", "placement")

    def __init__(self, placement: Placement | str = CPU, *, priority: int = 0) -> None:
        self.placement = Placement.parse(placement).require()
        self._native: Any
        if self.placement.is_device:
            self._native = torch.cuda.Stream(self.placement.torch, priority=priority)
            self.handle: int = self._native.cuda_stream
            self._finalizer = None
        else:
            self.handle = -next(_host_ids)
            self._native = HostQueue(f"kvtier-stream{self.handle}")
            # a dropped stream finishes by itself; waiting for it here could wait for whoever drops it
            self._finalizer = weakref.finalize(self, self._native.close, wait=False)

    @classmethod
    def wrap(cls, foreign: torch.cuda.Stream | int, placement: Placement | str | None = None) -> Stream:
        """A Stream over a torch.cuda.Stream, or over a raw CUDA handle of the GPU `placement`.

        The owner keeps it alive.
        """
        if isinstance(foreign, int):
            if placement is None:
                raise ArgumentError(
                    f"the raw stream handle {foreign:#x} says nothing about its GPU: pass placement='cuda:0'"
                )
            where = Placement.parse(placement).require()
            if not where.is_device:
                raise ArgumentError(f"a raw stream handle belongs to a GPU, not to {where}")
            if foreign in LEGACY_DEFAULT_HANDLES:
                foreign = torch.cuda.default_stream(where.torch)
            else:
                foreign = torch.cuda.ExternalStream(foreign, where.torch)
        if not isinstance(foreign, torch.cuda.Stream):
            raise ArgumentError(
                f"cannot wrap {type(foreign).__name__} as a stream: pass a torch.cuda.Stream or a raw CUDA handle"
            )
        if placement is not None and Placement.parse(placement) != Placement("cuda", foreign.device_index):
            raise ArgumentError(f"this stream is on cuda:{foreign.device_index}, not on {placement}")
        stream = cls.__new__(cls)
        stream._native = foreign
        stream._finalizer = None
        stream.handle = foreign.cuda_stream
        stream.placement = Placement("cuda", foreign.device_index)
        return stream

    def __repr__(self) -> str:
        return f"Stream({str(self.placement)!r}, handle={self.handle:#x})"

    @property
    def native(self) -> Any:
        """The queue beneath; an error once closed."""
        if self._native is None:
            raise ClosedError(f"this stream on {self.placement} was closed")
        return self._native

    def enqueue(self, task: Callable[[], object]) -> None:
        """Run `task` on this host stream after everything before it. CUDA streams take device work, not tasks."""
        if self.placement.is_device:
            raise ArgumentError(
                f"a stream on {self.placement} runs device work; enqueue() needs a host stream: Stream('cpu')"
            )
        self.native.submit(task)

    def record(self, event: Event | None = None) -> Event:
        """Record `event` (or a new one) at the present end of this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on wait for `event`. A CUDA stream waiting for a host event blocks the caller."""
        event.wait(self)

    def query(self) -> bool:
        """Whether everything enqueued is done."""
        return bool(self.native.query())

    def synchronize(self) -> None:
        """Wait until everything enqueued is done; raises the error of a failed host task, once."""
        self.native.synchronize()

    def close(self) -> None:
        """Finish what was enqueued and give the queue up. A wrapped stream is only let go. Closing twice is fine."""
        if self._native is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._native.close()
        self._native = None


class Event:
    """A place in a stream: record it, wait for it from other streams or the host, measure between two of them."""

    __slots__ = ("_blocking", "_native", "_on_device", "_timing")

    def __init__(self, *, timing: bool = False, blocking: bool = False) -> None:
        """`timing`: elapsed() may be asked. `blocking`: whoever waits long on the host sleeps instead of spinning."""
        self._timing = timing
        self._blocking = blocking
        self._native: Any = None  # made by the first record: only then is it known whether host or CUDA
        self._on_device = False

    def record(self, stream: Stream) -> None:
        """Move this event to the present end of `stream`."""
        native = stream.native
        on_device = stream.placement.is_device
        if self._native is None or on_device != self._on_device:
            self._native = _device_event(self._timing, self._blocking) if on_device else HostMark()
            self._on_device = on_device
        self._native.record(native)

    def wait(self, stream: Stream) -> None:
        """Make work enqueued on `stream` from now on wait for this event; an unrecorded event is no wait."""
        if self._native is None:
            return
        if self._on_device == stream.placement.is_device:
            stream.native.wait_event(self._native)
        elif self._on_device:
            stream.enqueue(self._native.synchronize)
        else:
            self._native.synchronize()

    def query(self) -> bool:
        """Whether the place is reached; an unrecorded event counts as reached."""
        return self._native is None or bool(self._native.query())

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until the place is reached, at most `timeout` seconds; whether it is.

        Raises the error its host stream was in.
        """
        if self._native is None:
            return True
        if not self._on_device:
            if timeout is not None:
                return bool(self._native.wait_for(timeout))
            self._native.synchronize()
            return True
        if timeout is not None:
            return self._look(timeout)  # CUDA has no wait with an end
        if not (self._blocking and self._look(_LOOK_SECONDS)):
            self._native.synchronize()
        return True

    def settle(self, *, polling: bool = True) -> None:
        """Block until the event is reached, even if the work before it failed.

        Polling reacts faster, but takes the interpreter from other threads.
        """
        if self._on_device and not polling and self._native is not None:
            self._native.synchronize()
        elif self._on_device:
            self.synchronize()
        elif self._native is not None:
            self._native.settle()

    def _look(self, seconds: float) -> bool:
        """Look at a CUDA event again and again, at most so long; whether it is reached."""
        deadline = time.monotonic() + seconds
        while not self._native.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_QUERY_SECONDS)
        return True

    def elapsed(self, end: Event) -> float:
        """Milliseconds from this event to `end`. Both recorded, on the same kind of stream, with timing=True."""
        if self._native is None or end._native is None:
            raise StateError("elapsed() needs both events recorded on a stream first")
        if self._on_device != end._on_device:
            raise StateError("elapsed() cannot compare a host event with a CUDA event: their clocks differ")
        if not (self._timing and end._timing):
            raise StateError("elapsed() needs events made with Event(timing=True)")
        self._native.synchronize()
        end._native.synchronize()
        return float(self._native.elapsed_time(end._native))


def _device_event(timing: bool, blocking: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)
