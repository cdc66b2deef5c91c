"""TransferHandle: a transfer in flight, and the report at its end.

QUEUED ──> RUNNING ──────────────> DONE
  │           ├─(a slice failed)──> FAILED
  ├───────────┼─(cancel)──────────> CANCELLED
  └───────────┴─(deadline)────────> LATE

A transfer is submitted in slices (see compiled.py). The layers of a block can be in several slices. The block counts as
moved if all these slices arrived. There is no report before all submitted slices have ended, so no copy touches a block
after the report. If a slice fails, the report says FAILED even if the transfer was also cancelled or late.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import CancelledTransferError, TransferTimeoutError
from kvtier.memory import Event
from kvtier.memory.copy_plan import I64
from kvtier.memory.region import MemoryRef
from kvtier.transfer.block_view import Direction
from kvtier.transfer.compiled import CompiledTransfer
from kvtier.transfer.layers import LayerDoneCounter
from kvtier.transfer.strategy import StrategyChoice


class TransferStatus(StrEnum):
    """State of a transfer. A report has one of the last four states."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class BlockFailure:
    """A block that did not arrive. The content of its destination is undefined."""

    device_id: int
    host_id: int
    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class TransferReport:
    """Result of a transfer."""

    id: int
    group: str
    direction: Direction
    status: TransferStatus
    device_ids: I64
    """Device block ids in the caller's order, paired with `host_ids`."""
    host_ids: I64
    failures: tuple[BlockFailure, ...]
    """The blocks that did not arrive."""
    nbytes: int
    """Bytes of the blocks that arrived."""
    num_copies: int
    seconds: float
    """Time from the start of the first copy to the end of the last copy, measured on the stream; 0 without copies."""
    choice: StrategyChoice
    """The strategy, and the reason for it."""

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """(device id, host id) of each block that arrived. Computed on demand, because engines need only `failures`."""
        lost = {(failure.device_id, failure.host_id) for failure in self.failures}
        pairs = zip(self.device_ids.tolist(), self.host_ids.tolist(), strict=True)
        return tuple(pair for pair in pairs if pair not in lost)


class TransferHandle:
    """A transfer submitted to a TransferManager. `wait()` or the manager's `poll()` returns the report."""

    def __init__(
        self,
        number: int,
        compiled: CompiledTransfer,
        *,
        urgent: bool,
        after: Event | None,
        deadline: float | None,
        keep: list[MemoryRef],
    ) -> None:
        self.id = number
        self.urgent = urgent
        self.after = after
        """The copies wait for this event."""
        self._changed = threading.Condition()
        self.layers = LayerDoneCounter(compiled.layer_groups, self._changed)
        self.begin: Event | None = None
        self._compiled: CompiledTransfer | None = compiled
        self._deadline = deadline
        self._keep = keep
        self._next_slice = 0  # the next slice to claim
        self._num_claimed = 0  # slices claimed and not yet submitted
        self._ends: list[Event] = []
        self._errors: dict[int, BaseException] = {}  # by index of the slice
        self._status = TransferStatus.QUEUED
        self._report: TransferReport | None = None
        self.was_waited_for = False
        """True once wait() has returned the report."""
        if not compiled.slices:  # no blocks
            for group in range(len(compiled.layer_groups)):
                self.layers.submitted(group, Event())

    @property
    def status(self) -> TransferStatus:
        return self._status if self._report is None else self._report.status

    @property
    def report(self) -> TransferReport | None:
        """The result; None while the transfer is in flight."""
        with self._changed:
            if self._report is None:
                self._expire()
                if self._all_submitted() and self._ends_reached():
                    self._finish()
            return self._report

    def wait(self, timeout: float | None = None) -> TransferReport:
        """Wait for the report. Raises TransferTimeoutError after `timeout` seconds, but the transfer continues."""
        report = self.settle(timeout)
        self.was_waited_for = True
        return report

    def settle(self, timeout: float | None = None) -> TransferReport:
        """Wait for the report, and leave it in the manager for poll().

        In contrast, a report that `wait` has returned is dropped by the manager's next submit().
        """
        limit = float("inf") if timeout is None else time.monotonic() + timeout
        step = 0
        while (report := self.report) is None:
            left = limit - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(f"transfer {self.id} is still {self.status} after {timeout} seconds")
            end = self._wait_for_submission(step, left)
            if end is None:
                continue
            if timeout is None:
                end.settle()
            elif not end.synchronize(left):
                continue
            step += 1
        return report

    def cancel(self) -> bool:
        """Drop the slices whose submission has not begun. Other slices finish. Return False if no slice was dropped."""
        error = CancelledTransferError(f"transfer {self.id} was cancelled before this block was moved")
        return self._drop_rest(error, TransferStatus.CANCELLED)

    # ---- called by the lane (lane.py), which submits the slices ----

    @property
    def compiled(self) -> CompiledTransfer:
        """The compiled transfer. Not available after the transfer has ended."""
        assert self._compiled is not None
        return self._compiled

    @property
    def next_bytes(self) -> int | None:
        """Size of the next slice to claim, or None if no slice is left to claim."""
        with self._changed:
            self._expire()
            return None if self._is_claimed() else self.compiled.slices[self._next_slice].nbytes

    def claim(self) -> int | None:
        """Claim the next slice and return its index, or None if no slice is left. The caller must submit the slice."""
        with self._changed:
            if self._is_claimed():
                return None
            self._next_slice += 1
            self._num_claimed += 1
            return self._next_slice - 1

    def submitted(self, index: int, end: Event, error: BaseException | None = None) -> None:
        """Record that the copies of slice `index` were submitted. The event `end` is reached after the copies.

        An `error` means that some or all of the copies were not submitted.
        """
        with self._changed:
            slices = self.compiled.slices
            if self._status is TransferStatus.QUEUED:
                self._status = TransferStatus.RUNNING
            self._ends.append(end)
            self._num_claimed -= 1
            if error is not None:
                self.failed(index, error)
            group = slices[index].layer_group
            if index + 1 == len(slices) or slices[index + 1].layer_group != group:
                self.layers.submitted(group, end)
            self._changed.notify_all()

    def failed(self, index: int, error: BaseException) -> None:
        """Record that slice `index` did not arrive. May be called before the end event of the slice is reached."""
        with self._changed:
            if self._compiled is not None:
                self._errors.setdefault(index, error)
                self.layers.failed(self.compiled.slices[index].layer_group, error)

    # ---- completion ----

    def _is_claimed(self) -> bool:
        """True if no slice is left to claim. Some claimed slices are possibly still waiting for their submission."""
        return self._compiled is None or self._next_slice >= len(self._compiled.slices)

    def _all_submitted(self) -> bool:
        return self._is_claimed() and not self._num_claimed

    def _ends_reached(self) -> bool:
        try:
            return all(event.query() for event in self._ends)
        except Exception as error:  # the GPU is lost, and all copies in flight with it
            for index in range(len(self.compiled.slices)):
                self.failed(index, error)
            self._ends = []
            return True

    def _expire(self) -> None:
        if self._deadline is not None and not self._is_claimed() and time.monotonic() >= self._deadline:
            error = TransferTimeoutError(f"the deadline of transfer {self.id} passed before this block was moved")
            self._drop_rest(error, TransferStatus.LATE)

    def _drop_rest(self, error: BaseException, status: TransferStatus) -> bool:
        with self._changed:
            if self._is_claimed():
                return False
            for index in range(self._next_slice, len(self.compiled.slices)):
                self.failed(index, error)  # also wakes threads waiting for a submission
            self._next_slice, self._status = len(self.compiled.slices), status
            return True

    def _wait_for_submission(self, step: int, seconds: float) -> Event | None:
        """Return end event number `step`, or None if it does not exist yet.

        If slices are left to submit, wait at most `seconds` for a change before returning None.
        """
        with self._changed:
            if step < len(self._ends):
                return self._ends[step]
            if not self._all_submitted():
                until = seconds if self._deadline is None else min(seconds, self._deadline - time.monotonic())
                self._changed.wait(None if until == float("inf") else max(0.0, until))
            return None

    def _finish(self) -> None:
        compiled = self.compiled
        bad: dict[int, BaseException] = {}
        for index, error in sorted(self._errors.items()):
            for position in compiled.slices[index].blocks.tolist():
                bad.setdefault(position, error)
        device_ids, host_ids, count = compiled.device_ids, compiled.host_ids, len(compiled.device_ids)
        lost = [BlockFailure(int(device_ids[at]), int(host_ids[at]), error) for at, error in sorted(bad.items())]
        ended = self._status if self._status in (TransferStatus.CANCELLED, TransferStatus.LATE) else TransferStatus.DONE
        copied = all(isinstance(error, CancelledTransferError | TransferTimeoutError) for error in bad.values())
        self._report = TransferReport(
            self.id,
            compiled.cache.group.name,
            compiled.direction,
            ended if copied else TransferStatus.FAILED,
            device_ids,
            host_ids,
            tuple(lost),
            compiled.nbytes // max(1, count) * (count - len(bad)),
            compiled.num_copies,
            self.begin.elapsed(self._ends[-1]) / 1e3 if self.begin is not None and self._ends else 0.0,
            compiled.choice,
        )
        self._compiled, self._keep, self.after = None, [], None
