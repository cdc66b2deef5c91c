"""What every call of a store goes through: the breaker, threads, the deadline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from kvtier.storage.guard import Batch, Breaker
from kvtier.storage.store import Outcome, Status
from kvtier.storage.workers import Job, Scratch, Workers


class Calls:
    """Has the jobs of a call done by its deadline, unless the breaker is open."""

    def __init__(self, workers: Workers, breaker: Breaker, timeout_s: float) -> None:
        self._workers, self._breaker, self._timeout_s = workers, breaker, timeout_s

    def run(self, count: int, plan: Callable[[Batch], list[Job]], timeout_s: float | None) -> Sequence[Outcome]:
        """The outcomes of so many objects. `plan` settles what needs no work and returns the jobs for the rest."""
        refusal = self._breaker.refusal()
        if refusal:
            return [Outcome(Status.FAILED, reason=refusal)] * count
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
