"""Ticket: one request's way through a pipeline, from add to its one terminal status."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import Any

from kvtier.errors import StateError


class Status(Enum):
    """Where a request stands. The last three are terminal: a request gets exactly one of them."""

    WAITING = "waiting"
    """In no batch: new, or preempted."""
    ACTIVE = "active"
    """In the batch issued last."""
    RETIRING = "retiring"
    """Decided; leaves when none of its batches is in flight."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows."""
        return self in (Status.FINISHED, Status.CANCELLED, Status.FAILED)


class Ticket:
    """A request in a pipeline, which fills it. Anybody on the engine thread may call `finish` and `cancel`.

    WAITING <-> ACTIVE          by being left out of a step, or taken in again
    WAITING, ACTIVE -> RETIRING by finish(), cancel() or an error; the first one decides
    RETIRING -> terminal        once `num_in_flight` is 0
    """

    __slots__ = ("_in_flight", "_on_retire", "_outcome", "error", "has_run", "request", "status")

    def __init__(
        self,
        request: Any,
        in_flight: Sequence[Container[Ticket]] = (),
        on_retire: Callable[[Ticket], object] = lambda _: None,
    ) -> None:
        self.request = request
        self.status = Status.WAITING
        self.error: BaseException | None = None
        self.has_run = False
        """Whether it was in a batch before: then its next row is resumed, not new."""
        self._outcome = Status.FINISHED
        self._in_flight = in_flight
        self._on_retire = on_retire

    def __repr__(self) -> str:
        return f"Ticket({self.request!r}, {self.status.value}, {self.num_in_flight} in flight)"

    @property
    def num_in_flight(self) -> int:
        """Batches issued that hold this request and are not collected.

        Looked up in those batches: a count of its own would have to change for every row in every step.
        """
        return sum(self in rows for rows in self._in_flight)

    @property
    def is_running(self) -> bool:
        """Whether it may still be put into a batch."""
        return self.status in (Status.WAITING, Status.ACTIVE)

    def finish(self) -> None:
        """It has all it wanted."""
        self.retire(Status.FINISHED)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.retire(Status.CANCELLED)

    def fail(self, error: BaseException) -> None:
        """It cannot go on."""
        if self.is_running:
            self.error = error
        self.retire(Status.FAILED)

    def retire(self, outcome: Status) -> None:
        """Decide the outcome, unless it is decided already."""
        if self.is_running:
            self.status, self._outcome = Status.RETIRING, outcome
            self._on_retire(self)

    def release(self) -> None:
        """Reach the terminal status; the pipeline calls it once, when nothing is in flight."""
        if self.status is not Status.RETIRING or self.num_in_flight:
            raise StateError(f"{self!r} cannot be released")
        self.status = self._outcome
