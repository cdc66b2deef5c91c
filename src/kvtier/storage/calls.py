"""One call of a store: the circuit breaker, threads, the deadline and the results.

A failing store costs one deadline: Batch ends calls in time, Breaker stops new ones.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from kvtier.errors import ArgumentError
from kvtier.storage.store import ObjectResult, ObjectStatus
from kvtier.storage.workers import Job, Scratch, Workers


class Batch:
    """One call: the outcomes of its objects, filled in by workers, and the moment from which nobody may.

    A worker that is stuck in the kernel cannot be stopped. So it works on memory of its own, and touches the caller's
    memory and the store's books only inside `settle`, which does nothing once the call has returned:

        running --settle(all)--> settled --wait()--> returned
        running --deadline-----> expired: open objects are FAILED --> returned; late workers find it closed

    Each job is run inside `with batch`; `is_running` tells whether some have not ended yet.
    """

    def __init__(self, num_objects: int) -> None:
        self._condition = threading.Condition()
        self._outcomes: list[ObjectResult | None] = [None] * num_objects
        self._num_open = self.num_objects = num_objects
        self._num_settling = 0
        self._num_jobs = 0
        self._is_expired = False
        self.is_late = False
        """Whether it returned before all was done."""
        self.trouble = ""
        """What an unhealthy store did to this call; nothing if it was well."""

    def settle(self, outcomes: Mapping[int, ObjectResult], act: Callable[[], object] | None = None) -> bool:
        """Give objects their outcomes, after `act`, which must be brief. False: the call has returned, nothing done."""
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
        """Give all objects that have no outcome yet the same bad one."""
        with self._condition:
            self.trouble = trouble
            left = [index for index, outcome in enumerate(self._outcomes) if outcome is None]
        self.settle(dict.fromkeys(left, ObjectResult(ObjectStatus.FAILED, reason=trouble)))

    def wait(self, timeout_s: float) -> tuple[ObjectResult, ...]:
        """The outcomes, when all are there or the time is over. Nothing of the caller's is touched from then on."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_open, timeout_s)
            self._is_expired = True
            self._condition.wait_for(lambda: not self._num_settling)
            if self._num_open:
                self.is_late = True
                self.trouble = f"{self._num_open} of {len(self._outcomes)} objects not done within {timeout_s:g} s"
            late = ObjectResult(ObjectStatus.FAILED, reason=f"not done within {timeout_s:g} s")
            return tuple(outcome or late for outcome in self._outcomes)

    @property
    def is_expired(self) -> bool:
        """Whether the call has returned."""
        with self._condition:
            return self._is_expired

    @property
    def is_running(self) -> bool:
        """Whether a worker is still busy with it."""
        with self._condition:
            return self._num_jobs > 0

    def add_jobs(self, count: int) -> None:
        """Announce jobs, each of which will be run inside `with batch`."""
        with self._condition:
            self._num_jobs += count

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._num_jobs -= 1


class Breaker:
    """Decides whether a call may try the store.

    closed --a deadline missed, or `max_failures` unhealthy calls in a row--> open
    open --after `retry_s`, and when nothing hangs any more--> half open: one call may try
    half open --well--> closed
    half open --unhealthy--> open, for twice as long, up to `max_retry_s`
    """

    def __init__(
        self,
        retry_s: float = 1.0,
        max_retry_s: float = 60.0,
        max_failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= retry_s <= max_retry_s or max_failures < 1:
            raise ArgumentError(f"a breaker needs 0 <= {retry_s=} <= {max_retry_s=} and {max_failures=} of at least 1")
        self._retry_s, self._max_retry_s, self._max_failures = retry_s, max_retry_s, max_failures
        self._clock = clock
        self._lock = threading.Lock()
        self._overdue: list[Batch] = []
        self._num_failures = 0
        self._wait_s = retry_s
        self._open_until: float | None = None
        self._is_trying = False
        self._reason = ""
        self.num_refused = 0

    def opinion(self) -> str:
        """Why a call would be turned away now; nothing if it would not. For calls that do not reach the store."""
        with self._lock:
            self._overdue = [batch for batch in self._overdue if batch.is_running]
            if not self._overdue and (self._open_until is None or self._open_until <= self._clock()):
                return ""
            return f"breaker open ({self._reason})"

    def refusal(self) -> str:
        """Why a call may not be made now; nothing if it may, and then `record` must be told how it went."""
        with self._lock:
            self._overdue = [batch for batch in self._overdue if batch.is_running]
            reason = self._refusal()
            self.num_refused += bool(reason)
            return reason

    def _refusal(self) -> str:
        if self._overdue:
            return f"breaker open: {len(self._overdue)} earlier calls still hang ({self._reason})"
        if self._open_until is None:
            return ""
        left = self._open_until - self._clock()
        if left > 0:
            return f"breaker open for another {left:.3g} s ({self._reason})"
        if self._is_trying:
            return f"breaker open, another call tries the store ({self._reason})"
        self._is_trying = True
        return ""

    def record(self, batch: Batch) -> None:
        """How an admitted call went."""
        with self._lock:
            was_trying, self._is_trying = self._is_trying, False
            if not batch.trouble:
                self._num_failures, self._open_until, self._wait_s = 0, None, self._retry_s
                return
            self._num_failures += 1
            self._reason = batch.trouble
            if batch.is_late:
                self._overdue.append(batch)
            if batch.is_late or was_trying or self._num_failures >= self._max_failures:
                self._open_until = self._clock() + self._wait_s
                self._wait_s = min(2 * self._wait_s, self._max_retry_s)


class CallRunner:
    """Has the jobs of a call done by its deadline, unless the breaker is open."""

    def __init__(self, workers: Workers, breaker: Breaker, timeout_s: float) -> None:
        self._workers, self._breaker, self._timeout_s = workers, breaker, timeout_s

    def run(self, count: int, plan: Callable[[Batch], list[Job]], timeout_s: float | None) -> Sequence[ObjectResult]:
        """The outcomes of so many objects. `plan` settles what needs no work and returns the jobs for the rest."""
        refusal = self._breaker.refusal()
        if refusal:
            return [ObjectResult(ObjectStatus.FAILED, reason=refusal)] * count
        batch = Batch(count)
        jobs = plan(batch)
        batch.add_jobs(len(jobs))
        for job in jobs:
            self._workers.submit(functools.partial(_run_job, batch, job))
        outcomes = batch.wait(self._timeout_s if timeout_s is None else timeout_s)
        self._breaker.record(batch)
        return outcomes


def _run_job(batch: Batch, job: Job, scratch: Scratch) -> None:
    """A job that fails costs its call, not its thread."""
    with batch:
        try:
            job(scratch)
        except Exception as error:  # the edge of a thread: whatever it is, somebody waits for this batch
            batch.fail(f"{type(error).__name__}: {error}")
