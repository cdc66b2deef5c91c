"""Stream and Event: one interface for ordering work on CUDA and on the host.

A host stream is a HostQueue: an in-order queue with a thread and the interface of torch's CUDA stream. Tests of
asynchrony, ordering and overlap can use host streams without a GPU. A HostMark is a recorded position in a queue. If a
task fails, later tasks of its queue are skipped, and later marks store the error. `synchronize` of such a mark raises
the error, so a queue that waits for the mark also fails. `HostQueue.synchronize` raises and clears the error of its
queue, so that new tasks run.
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


class HostMark:
    """A recorded position in a HostQueue, with the interface of torch's CUDA event."""

    def __init__(self, thread: threading.Thread) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self.seconds = 0.0
        self._thread = thread

    def query(self) -> bool:
        return self.reached.is_set()

    def settle(self) -> None:
        """Wait for the position, without raising the error of the queue."""
        if threading.current_thread() is self._thread and not self.reached.is_set():
            raise StateError("a host stream cannot wait for itself: one of its tasks waits for a later task")
        self.reached.wait()

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for the position, or return False after `timeout` seconds. Raise the error of a failed earlier task."""
        if timeout is None:
            self.settle()
        elif not self.reached.wait(timeout):
            return False
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)  # otherwise, the traceback would grow with each waiter
        return True

    def elapsed_time(self, end: HostMark) -> float:
        """Wait for both positions and return the milliseconds between them."""
        self.synchronize()
        end.synchronize()
        return (end.seconds - self.seconds) * 1e3


class HostQueue:
    """Runs tasks one after another on a thread. Thread-safe."""

    def __init__(self, name: str) -> None:
        # entries: (task or None, the mark after the task, True if the mark clears the error); None stops the thread
        self._entries: SimpleQueue[tuple[Task | None, HostMark, bool] | None] = SimpleQueue()
        self._unfinished: deque[None] = deque()  # one item per unfinished entry; append and pop are atomic
        # re-entrant, because submitting may start a garbage collection, which may submit on the same thread
        self._lock = threading.RLock()
        self._closed = False
        self._unseen: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # finish submitted tasks at exit

    def submit(self, task: Task | None, *, clear: bool = False) -> HostMark:
        """Submit a task. Return the mark after the task. With `clear`, the mark clears the error of the queue."""
        mark = HostMark(self._thread)
        with self._lock:
            if self._closed:
                raise ClosedError("this host stream was closed; create another Stream")
            self._unfinished.append(None)
            self._entries.put((task, mark, clear))
        return mark

    def record(self) -> HostMark:
        return self.submit(None)

    def wait_event(self, mark: HostMark) -> None:
        """Make later tasks wait until `mark` is reached."""
        self.submit(mark.synchronize)

    def query(self) -> bool:
        return not self._unfinished

    def synchronize(self) -> None:
        """Wait until all submitted tasks are done or skipped. If a task failed, raise and clear the error."""
        if threading.current_thread() is self._thread:  # check first, because the mark would clear the error
            raise StateError("a host stream cannot wait for itself: synchronize() was called from one of its own tasks")
        mark = self.submit(None, clear=True)
        mark.settle()
        error, mark.error, mark.traceback = mark.error, None, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and the cycle would keep the task's memory alive

    def close(self, *, wait: bool = True) -> None:
        """Let the thread finish submitted tasks and stop. With `wait`, join the thread and raise an uncleared error."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
            error, self._unseen = self._unseen, None
            if error is not None:
                raise error

    def _work(self) -> None:
        error: BaseException | None = None
        while (entry := self._entries.get()) is not None:
            task, mark, clear = entry
            if task is not None and error is None:
                try:
                    task()
                except BaseException as raised:  # later marks raise this error when a thread waits for them
                    error = raised
            mark.error, mark.seconds = error, time.perf_counter()
            mark.traceback = None if error is None else error.__traceback__
            if clear:
                error = None
            del entry, task  # an idle thread must not keep the last task's buffers alive
            self._unfinished.pop()
            mark.reached.set()
            del mark
        self._unseen = error
        if error is None:  # otherwise close() raises the error at exit
            atexit.unregister(self.close)


_host_ids = itertools.count(1)
_POLL_INTERVAL = 20e-6  # seconds; short compared with any transfer, and the core is free in between
# A wait for a `blocking` event polls for this time and then sleeps. A thread that sleeps in the driver wakes 0.13 to
# 0.27 ms late; a polling thread is 0.03 to 0.06 ms late (H200 in a virtual machine, 2026-11-15).
_POLL_SECONDS = 3e-3
LEGACY_DEFAULT_HANDLES = (0, 1)  # torch's default stream, and CU_STREAM_LEGACY: both are the legacy default stream


class Stream:
    """An in-order queue of work. `Stream("cpu")` runs work on a thread. `Stream("cuda:0")` is a new CUDA stream."""

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
            # The queue still finishes its tasks after the Stream is deleted. Waiting for the tasks here could deadlock.
            self._finalizer = weakref.finalize(self, self._native.close, wait=False)

    @classmethod
    def wrap(cls, foreign: torch.cuda.Stream | int, placement: Placement | str | None = None) -> Stream:
        """Wrap a torch.cuda.Stream, or a raw CUDA handle on the GPU `placement`. The handle must stay valid."""
        if isinstance(foreign, int):
            if placement is None:
                raise ArgumentError(
                    f"the raw stream handle {foreign:#x} does not identify its GPU: pass placement='cuda:0'"
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
        """The torch.cuda.Stream or HostQueue. Raises ClosedError after `close`."""
        if self._native is None:
            raise ClosedError(f"this stream on {self.placement} was closed")
        return self._native

    def enqueue(self, task: Callable[[], object]) -> None:
        """Run `task` on this host stream, after all earlier work. A CUDA stream cannot run tasks."""
        if self.placement.is_device:
            raise ArgumentError(
                f"a stream on {self.placement} runs device work; enqueue() needs a host stream: Stream('cpu')"
            )
        self.native.submit(task)

    def record(self, event: Event | None = None) -> Event:
        """Record `event` (default: a new event) at the current end of this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait(self, event: Event) -> None:
        """Make later work wait for `event`. A CUDA stream cannot wait for a host event, so the caller waits instead."""
        event.wait(self)

    def query(self) -> bool:
        """True if all enqueued work is done."""
        return bool(self.native.query())

    def synchronize(self) -> None:
        """Wait until all enqueued work is done. Raises the error of a failed host task, but only once."""
        self.native.synchronize()

    def close(self) -> None:
        """Release the stream. A host stream first finishes its tasks. Closing twice is allowed."""
        if self._native is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._native.close()
        self._native = None


class Event:
    """A recorded position in a stream. Streams and the host can wait for an event."""

    __slots__ = ("_blocking", "_native", "_on_device", "_timing")

    def __init__(self, *, timing: bool = False, blocking: bool = False) -> None:
        """`timing` allows elapsed(). With `blocking`, the host sleeps instead of spinning in long waits."""
        self._timing = timing
        self._blocking = blocking
        self._native: Any = None  # a HostMark or torch.cuda.Event, set by record()
        self._on_device = False

    def record(self, stream: Stream) -> None:
        """Move this event to the current end of `stream`."""
        native = stream.native
        if not stream.placement.is_device:
            self._native, self._on_device = native.record(), False
            return
        if not self._on_device:
            self._native = torch.cuda.Event(enable_timing=self._timing, blocking=self._blocking)
            self._on_device = True
        self._native.record(native)

    def wait(self, stream: Stream) -> None:
        """Make later work on `stream` wait for this event. An unrecorded event has no effect."""
        if self._native is None:
            return
        if self._on_device == stream.placement.is_device:
            stream.native.wait_event(self._native)
        elif self._on_device:
            stream.enqueue(self._native.synchronize)
        else:
            self._native.synchronize()

    def query(self) -> bool:
        """True if the event is reached or was never recorded."""
        return self._native is None or bool(self._native.query())

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until the event is reached, or return False after `timeout` seconds. Raises errors of host tasks."""
        if self._native is None:
            return True
        if not self._on_device:
            return bool(self._native.synchronize(timeout))
        if timeout is not None:
            return self._poll(timeout)  # CUDA has no wait with a timeout
        if not (self._blocking and self._poll(_POLL_SECONDS)):
            self._native.synchronize()
        return True

    def settle(self, *, polling: bool = True) -> None:
        """Wait, but raise no errors of host tasks. For `blocking` events, `polling` is faster, but takes the GIL."""
        if self._on_device and not polling and self._native is not None:
            self._native.synchronize()
        elif self._on_device:
            self.synchronize()
        elif self._native is not None:
            self._native.settle()

    def _poll(self, seconds: float) -> bool:
        """Poll a CUDA event for at most `seconds`; True if it is reached."""
        deadline = time.monotonic() + seconds
        while not self._native.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_INTERVAL)
        return True

    def elapsed(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`. Both need timing=True and streams of the same kind."""
        if self._native is None or end._native is None:
            raise StateError("elapsed() needs both events recorded on a stream first")
        if self._on_device != end._on_device:
            raise StateError("elapsed() cannot compare a host event with a CUDA event: their clocks differ")
        if not (self._timing and end._timing):
            raise StateError("elapsed() needs events made with Event(timing=True)")
        self._native.synchronize()
        end._native.synchronize()
        return float(self._native.elapsed_time(end._native))
