"""Host streams: an in-order queue with a thread of its own, in the shape of torch's CUDA stream and event.

With it asynchrony, ordering and overlap are real, and testable, without a GPU. An error in a task poisons the queue:
the tasks behind it are skipped, every mark recorded meanwhile carries the error to whoever waits for it (another queue
included), and the next synchronize() raises it and makes the queue usable again.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

from kvtier.errors import ClosedError, StateError

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
