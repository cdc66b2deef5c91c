"""Host streams: an in-order queue with a thread of its own, in the shape of torch's CUDA stream and event.

With it asynchrony, ordering and overlap are real, and testable, without a GPU. An error in a task poisons the queue:
the tasks behind it are skipped, every mark recorded meanwhile carries the error to whoever waits for it (another queue
included), and the next synchronize() raises it and makes the queue usable again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from kvtier.errors import StateError

Task = Callable[[], object]


class _Point:
    """One recorded place in a queue."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0

    def wait(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


class HostQueue:
    """Runs tasks one after another on its own thread. Anybody may submit."""

    def __init__(self, name: str) -> None:
        # (task or nothing, the point reached after it, whether that clears the error); None ends the thread
        self._entries: SimpleQueue[tuple[Task | None, _Point, bool] | None] = SimpleQueue()
        self._lock = threading.Lock()  # so that _last is the point put last
        self._last = _Point()
        self._last.reached.set()
        self._thread = threading.Thread(target=_work, args=(self._entries,), name=name, daemon=True)
        self._thread.start()

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
        return self._last.reached.is_set()

    def synchronize(self) -> None:
        """Wait until everything submitted is done, and raise the first error among it."""
        if threading.current_thread() is self._thread:
            raise StateError("a host stream cannot wait for itself: synchronize() was called from one of its own tasks")
        self._put(None, clear=True).wait()

    def close(self) -> None:
        """Finish what was submitted and end the thread. Submitting afterwards is not allowed."""
        self._entries.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, task: Task | None, *, clear: bool = False) -> _Point:
        point = _Point()
        with self._lock:
            self._entries.put((task, point, clear))
            self._last = point
        return point


def _work(entries: SimpleQueue[tuple[Task | None, _Point, bool] | None]) -> None:
    error: Exception | None = None
    while (entry := entries.get()) is not None:
        task, point, clear = entry
        if task is not None and error is None:
            try:
                task()
            except Exception as raised:  # kept, not swallowed: every point behind it raises it where somebody waits
                error = raised
        point.error, point.seconds = error, time.perf_counter()
        if clear:
            error = None
        point.reached.set()
        del entry, task, point  # an idle thread must not keep the last task's buffers alive


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

    def elapsed_time(self, end: HostMark) -> float:
        """Milliseconds from this place to `end`; both must be recorded. Waits for both."""
        if self.point is None or end.point is None:
            raise StateError("elapsed time needs both events recorded on a stream first")
        self.point.wait()
        end.point.wait()
        return (end.point.seconds - self.point.seconds) * 1e3
