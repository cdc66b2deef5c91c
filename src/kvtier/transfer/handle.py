"""One transfer on its way, and the report at its end.

QUEUED ──> RUNNING ──────────────> DONE
  │           ├─(a slice failed)──> FAILED       every end: what was submitted is waited for first, so that no copy
  ├───────────┼─(cancel)──────────> CANCELLED    touches a block after the report. Blocks whose slices all arrived
  └───────────┴─(deadline)────────> LATE         are reported as moved, whatever became of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.errors import CancelledTransferError, TransferError, TransferTimeoutError
from kvtier.memory import Event
from kvtier.memory.copy_plan import I64
from kvtier.memory.region import MemoryRef
from kvtier.transfer.compiled import CompiledTransfer
from kvtier.transfer.layers import LayerDoneCounter
from kvtier.transfer.plane import Direction
from kvtier.transfer.strategy import Strategy, StrategyChoice


class TransferStatus(StrEnum):
    """Where a transfer is, or how it ended."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class BlockFailure:
    """A block that did not arrive: its content at the destination is undefined."""

    device_id: int
    host_id: int
    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class TransferReport:
    """What became of a transfer."""

    id: int
    group: str
    direction: Direction
    status: TransferStatus
    device_ids: I64
    """As they were asked for, and in that order."""
    host_ids: I64
    failures: tuple[BlockFailure, ...]
    """Exactly the blocks that did not arrive."""
    nbytes: int
    """Of the blocks that arrived."""
    num_copies: int
    seconds: float
    """From the first copy to the end of the last, by the clock of the stream."""
    choice: StrategyChoice
    """How it crossed the link."""

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """(device id, host id) of each block that arrived. Made when asked: an engine asks for failures only."""
        lost = {(failure.device_id, failure.host_id) for failure in self.failures}
        pairs = zip(self.device_ids.tolist(), self.host_ids.tolist(), strict=True)
        return tuple(pair for pair in pairs if pair not in lost)

    @property
    def strategy(self) -> Strategy:
        """The way that was chosen."""
        return self.choice.strategy

    @property
    def why(self) -> str:
        """Why this one; reckoned when asked, which takes longer than the rest of a report."""
        return self.choice.why

    @property
    def gbs(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(slots=True)
class Checksums:
    """Checksums on their way: complete, or failed, when `ready` is reached."""

    ready: Event
    sums: dict[int, int] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(slots=True)
class _SliceProgress:
    """How far the slices of a transfer are."""

    next: int = 0
    """Those before it are submitted or claimed."""
    num_claimed: int = 0
    """Of these, not submitted yet."""
    ends: list[Event] = field(default_factory=list)
    errors: dict[int, BaseException] = field(default_factory=dict)
    """By slice."""


class TransferHandle:
    """A transfer given to a TransferManager. `wait()` for its report, or ask the manager's `poll()`."""

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
        """The copies come behind it."""
        self._changed = threading.Condition()
        self.layers = LayerDoneCounter(compiled.layer_groups, self._changed)
        self.begin: Event | None = None
        self._compiled: CompiledTransfer | None = compiled
        self._deadline = deadline
        self._keep = keep
        self._slices = _SliceProgress()
        self._status = TransferStatus.QUEUED
        self._report: TransferReport | None = None
        self._checksums: Checksums | None = None
        self.was_waited_for = False
        """Whether wait() has told the report to somebody."""
        if not compiled.slices:  # no blocks: there is nothing to wait for
            for group in range(len(compiled.layer_groups)):
                self.layers.submitted(group, Event())

    @property
    def status(self) -> TransferStatus:
        """Where it is."""
        return self._status if self._report is None else self._report.status

    @property
    def report(self) -> TransferReport | None:
        """What became of it; None while it is under way."""
        with self._changed:
            if self._report is None:
                self._expire()
                if self._all_submitted() and self._ends_reached():
                    self._finish()
            return self._report

    def wait(self, timeout: float | None = None) -> TransferReport:
        """The report, once it is there. TransferTimeoutError after `timeout` seconds; the transfer then goes on."""
        report = self.settle(timeout)
        self.was_waited_for = True
        return report

    def settle(self, timeout: float | None = None) -> TransferReport:
        """The same, but the manager's poll() will still tell it."""
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
        """Do not submit what has not been; what has been is finished. False if there was nothing left to stop."""
        return self._drop_rest(
            CancelledTransferError(f"transfer {self.id} was cancelled before this block was moved"),
            TransferStatus.CANCELLED,
        )

    def checksums(self, timeout: float | None = None) -> Mapping[int, int]:
        """CRC-32 by host id, of the blocks that arrived, if the save was to compute them; waits for it."""
        if self._checksums is None:
            raise TransferError(f"transfer {self.id} computes no checksums; ask for them with save(checksum=True)")
        found = self._checksums
        if not found.ready.synchronize(timeout):
            raise TransferTimeoutError(f"the checksums of transfer {self.id} are not there after {timeout} seconds")
        if found.error is not None:
            raise TransferError(f"the checksums of transfer {self.id} could not be computed") from found.error
        return found.sums

    # ---- for the lane that carries it out ----

    @property
    def compiled(self) -> CompiledTransfer:
        """What to do; gone once it is over."""
        assert self._compiled is not None
        return self._compiled

    @property
    def next_bytes(self) -> int | None:
        """Bytes of the slice to submit next; None if there is none left."""
        with self._changed:
            self._expire()
            return None if self._is_over() else self.compiled.slices[self._slices.next].nbytes

    def claim(self) -> int | None:
        """The slice to submit next, which cancelling no longer stops; `submitted` must follow."""
        with self._changed:
            if self._is_over():
                return None
            self._slices.next += 1
            self._slices.num_claimed += 1
            return self._slices.next - 1

    def submitted(self, index: int, end: Event, error: BaseException | None = None) -> None:
        """Slice `index` was submitted and ends with the event; with an error, only part of it may have been."""
        with self._changed:
            slices = self.compiled.slices
            if self._status is TransferStatus.QUEUED:
                self._status = TransferStatus.RUNNING
            self._slices.ends.append(end)
            self._slices.num_claimed -= 1
            if error is not None:
                self.failed(index, error)
            group = slices[index].layer_group
            if index + 1 == len(slices) or slices[index + 1].layer_group != group:
                self.layers.submitted(group, end)
            self._changed.notify_all()

    def failed(self, index: int, error: BaseException) -> None:
        """Slice `index` did not arrive. May be told while it runs, before its event."""
        with self._changed:
            if self._compiled is not None:
                self._slices.errors.setdefault(index, error)
                self.layers.failed(self.compiled.slices[index].layer_group, error)

    def attach_checksums(self, checksums: Checksums) -> None:
        """They will be there when their event is reached."""
        self._checksums = checksums

    # ---- its end ----

    def _is_over(self) -> bool:
        """Nothing is left to submit."""
        return self._compiled is None or self._slices.next >= len(self._compiled.slices)

    def _all_submitted(self) -> bool:
        return self._is_over() and not self._slices.num_claimed

    def _ends_reached(self) -> bool:
        try:
            return all(event.query() for event in self._slices.ends)
        except Exception as error:  # the GPU is lost, and with it whatever was on its way
            for index in range(len(self.compiled.slices)):
                self.failed(index, error)
            self._slices.ends = []
            return True

    def _expire(self) -> None:
        if self._deadline is not None and not self._is_over() and time.monotonic() >= self._deadline:
            error = TransferTimeoutError(f"the deadline of transfer {self.id} passed before this block was moved")
            self._drop_rest(error, TransferStatus.LATE)

    def _drop_rest(self, error: BaseException, status: TransferStatus) -> bool:
        with self._changed:
            if self._is_over():
                return False
            for index in range(self._slices.next, len(self.compiled.slices)):
                self.failed(index, error)  # also wakes threads that wait for a submission
            self._slices.next, self._status = len(self.compiled.slices), status
            return True

    def _wait_for_submission(self, step: int, seconds: float) -> Event | None:
        """The end of the `step`-th slice submitted; None if it took too long, or there will be none."""
        with self._changed:
            if step < len(self._slices.ends):
                return self._slices.ends[step]
            if not self._all_submitted():
                until = seconds if self._deadline is None else min(seconds, self._deadline - time.monotonic())
                self._changed.wait(None if until == float("inf") else max(0.0, until))
            return None

    def _finish(self) -> None:
        compiled = self.compiled
        bad: dict[int, BaseException] = {}
        for index, error in sorted(self._slices.errors.items()):
            for position in compiled.slices[index].blocks.tolist():
                bad.setdefault(position, error)
        device_ids, host_ids, count = compiled.device_ids, compiled.host_ids, len(compiled.device_ids)
        lost = [BlockFailure(int(device_ids[at]), int(host_ids[at]), error) for at, error in sorted(bad.items())]
        ended = self._status if self._status in (TransferStatus.CANCELLED, TransferStatus.LATE) else TransferStatus.DONE
        copied = all(isinstance(error, CancelledTransferError | TransferTimeoutError) for error in bad.values())
        self._report = TransferReport(
            self.id,
            compiled.group.name,
            compiled.direction,
            ended if copied else TransferStatus.FAILED,
            device_ids,
            host_ids,
            tuple(lost),
            compiled.nbytes // max(1, count) * (count - len(bad)),
            compiled.num_copies,
            self.begin.elapsed(self._slices.ends[-1]) / 1e3 if self.begin is not None and self._slices.ends else 0.0,
            compiled.choice,
        )
        self._compiled, self._keep, self.after = None, [], None
