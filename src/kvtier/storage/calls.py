"""Calls to a store: threads, deadline, results and the circuit breaker.

A call consists of jobs, which run on threads. The call returns at its deadline even if a job hangs. The Breaker then
refuses further calls for some time, and in any case until all jobs of the late call have ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.errors import ArgumentError
from kvtier.storage.codec import Scratch
from kvtier.storage.store import ObjectResult, ObjectStatus

Job = Callable[[Scratch], object]


class Batch:
    """One call to a store, with one result per object. Worker threads set the results until the deadline.

    A thread that hangs in the kernel cannot be stopped. Each thread therefore reads into memory of its own, and writes
    to the caller's memory only inside `settle`. Once the call has returned, `settle` does nothing.

        running --all objects are settled--> returned
        running --deadline-----------------> returned; objects without a result are FAILED
    """

    def __init__(self, num_objects: int) -> None:
        self._condition = threading.Condition()
        self._outcomes: list[ObjectResult | None] = [None] * num_objects
        self._num_open = self.num_objects = num_objects
        self._num_settling = 0
        self._num_jobs = 0
        self._is_expired = False
        self.is_late = False
        """True if the call returned before all objects were done."""
        self.trouble = ""
        """Failure of the store in this call; empty if there was none."""

    def settle(self, outcomes: Mapping[int, ObjectResult], act: Callable[[], object] | None = None) -> bool:
        """Run `act`, which must be short, and set the results. If the call has returned, only return False."""
        with self._condition:
            if self._is_expired:
                return False
            self._num_settling += 1
        settled: Mapping[int, ObjectResult] = {}
        try:
            if act is not None:
                act()
            settled = outcomes
        finally:
            with self._condition:
                self._num_settling -= 1
                for index, outcome in settled.items():
                    self._num_open -= self._outcomes[index] is None
                    self._outcomes[index] = outcome
                if not self._num_open or self._is_expired:  # do not wake the caller for every object
                    self._condition.notify_all()
        return True

    def fail(self, trouble: str) -> None:
        """Set all objects without a result to FAILED, with `trouble` as the reason."""
        with self._condition:
            self.trouble = trouble
            left = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        self.settle(dict.fromkeys(left, ObjectResult(ObjectStatus.FAILED, reason=trouble)))

    def wait(self, timeout_s: float) -> tuple[ObjectResult, ...]:
        """Return the results when all are set or the time is up. The caller's memory is not accessed afterwards."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_open, timeout_s)
            self.expire()
            if self._num_open:
                self.is_late = True
                self.trouble = f"{self._num_open} of {len(self._outcomes)} objects not done within {timeout_s:g} s"
            late = ObjectResult(ObjectStatus.FAILED, reason=f"not done within {timeout_s:g} s")
            return tuple(outcome or late for outcome in self._outcomes)

    def expire(self) -> None:
        """End the call. Wait until `settle` no longer accesses the caller's memory."""
        with self._condition:
            self._is_expired = True
            self._condition.wait_for(lambda: not self._num_settling)

    @property
    def is_expired(self) -> bool:
        """True once the call has returned, with or without all results."""
        with self._condition:
            return self._is_expired

    @property
    def is_running(self) -> bool:
        """True if a job of this call is queued or running."""
        with self._condition:
            return self._num_jobs > 0

    def add_jobs(self, count: int) -> None:
        with self._condition:
            self._num_jobs += count


class Breaker:
    """Decides whether a call may try the store.

    closed --a missed deadline, or a failure of the store in `max_failures` calls in a row--> open
    open --after `retry_s`, and when no call hangs--> half open: one call may try the store
    half open --the store works--> closed
    half open --the store fails--> open, for twice as long, up to `max_retry_s`
    """

    def __init__(
        self,
        retry_s: float = 1.0,
        max_retry_s: float = 60.0,
        max_failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= retry_s <= max_retry_s or max_failures < 1:
            raise ArgumentError(
                "a breaker needs 0 <= retry_s <= max_retry_s and max_failures of at least 1, "
                f"got {retry_s=}, {max_retry_s=}, {max_failures=}"
            )
        self._retry_s, self._max_retry_s, self._max_failures = retry_s, max_retry_s, max_failures
        self._clock = clock
        self._lock = threading.Lock()
        self._overdue: list[Batch] = []
        self._num_failures = 0
        self._wait_s = retry_s
        self._open_until: float | None = None
        self._trying: int | None = None
        """The thread of the call that tries the store in the half-open state."""
        self._reason = ""
        self.num_refused = 0

    def refusal(self, *, is_try: bool = True) -> str:
        """Return the reason for refusing a call, or an empty string to admit it.

        `is_try` is False for a call that is answered from memory; its refusal is not counted in `num_refused`. The
        thread of any other admitted call must later call `record` or `abandon`.
        """
        with self._lock:
            self._overdue = [batch for batch in self._overdue if batch.is_running]
            left = self._open_until - self._clock() if self._open_until is not None else 0.0
            if self._overdue:
                reason = f"breaker open: {len(self._overdue)} earlier calls still hang ({self._reason})"
            elif left > 0:
                reason = f"breaker open for another {left:.3g} s ({self._reason})"
            elif is_try and self._trying is not None:
                reason = f"breaker open while another call tries the store ({self._reason})"
            else:
                if is_try and self._open_until is not None:
                    self._trying = threading.get_ident()
                return ""
            self.num_refused += is_try
            return reason

    def abandon(self) -> None:
        """End an interrupted call. If this was the one call of the half-open state, another call may try the store."""
        with self._lock:
            if self._trying == threading.get_ident():
                self._trying = None

    def record(self, batch: Batch) -> None:
        with self._lock:
            was_trying = self._trying == threading.get_ident()
            if batch.is_late:
                self._overdue.append(batch)
            if was_trying:
                self._trying = None
            elif self._open_until is not None:
                return  # the call was admitted before the breaker opened
            if not batch.trouble:
                self._num_failures, self._open_until, self._wait_s = 0, None, self._retry_s
                return
            self._num_failures += 1
            self._reason = batch.trouble
            if batch.is_late or was_trying or self._num_failures >= self._max_failures:
                self._open_until = self._clock() + self._wait_s
                self._wait_s = min(2 * self._wait_s, self._max_retry_s)


class CallRunner:
    """Runs the jobs of a call on daemon threads, unless the breaker refuses the call. Each thread has scratch memory.

    The threads are daemons, because a thread that hangs in the kernel on a dead disk must not keep the process alive.
    """

    def __init__(self, num_threads: int, name: str, breaker: Breaker, timeout_s: float) -> None:
        self._breaker, self._timeout_s = breaker, timeout_s
        self._jobs: queue.SimpleQueue[tuple[Batch, Job] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, count: int, plan: Callable[[Batch], list[Job]], timeout_s: float | None) -> Sequence[ObjectResult]:
        """Return the results of `count` objects.

        `plan` settles the objects that need no I/O and returns jobs for the other objects.
        """
        refusal = self._breaker.refusal()
        if refusal:
            return [ObjectResult(ObjectStatus.FAILED, reason=refusal)] * count
        batch = Batch(count)
        try:
            self.submit(batch, plan(batch))
            outcomes = batch.wait(self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # such as KeyboardInterrupt
            batch.expire()
            self._breaker.abandon()
            raise
        self._breaker.record(batch)
        return outcomes

    def submit(self, batch: Batch, jobs: Sequence[Job]) -> None:
        """Add jobs to a running call."""
        batch.add_jobs(len(jobs))
        for job in jobs:
            self._jobs.put((batch, job))

    def close(self) -> bool:
        """Finish submitted jobs and stop the threads. Return False if a thread still hangs after `timeout_s`."""
        for _ in self._threads:
            self._jobs.put(None)
        give_up = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        scratch = Scratch()
        while (task := self._jobs.get()) is not None:
            batch, job = task
            try:
                job(scratch)
            except Exception as error:  # the job's call fails, but the thread continues
                batch.fail(f"{type(error).__name__}: {error}")
            finally:
                batch.add_jobs(-1)
            del task, batch, job  # these names would keep a finished call in memory until the next job
