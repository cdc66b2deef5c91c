"""Pipeline: runs batches through its modules, with up to `phases` batches in flight."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from kvtier.batch.data import BATCH, COPY, BatchData, BatchOp, Module, Side, check_modules
from kvtier.batch.executor import Executor, Streams, Work
from kvtier.batch.timeline import Timeline, TimelineSpan
from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.memory import CPU, Placement
from kvtier.state import Permutation


class TicketStatus(Enum):
    """State of a request in the pipeline. FINISHED, CANCELLED and FAILED are final.

    The caller, not the pipeline, records whether a request waits for its next batch.
    """

    RUNNING = "running"
    """The request may be in the next batch."""
    RETIRING = "retiring"
    """The outcome is decided. The request is removed when none of its batches is in flight."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Ticket:
    """A request in a pipeline. Call all methods on the engine thread.

    RUNNING -> RETIRING          the first finish(), cancel() or error decides the outcome
    RETIRING -> final status     in `collect`, in `close` or after an error, once `num_in_flight` is 0
    """

    __slots__ = ("_in_flight", "_on_retire", "_outcome", "error", "has_run", "request", "status")

    def __init__(
        self, request: Any, in_flight: Collection[Container[Ticket]], on_retire: Callable[[Ticket], object]
    ) -> None:
        self.request = request
        self.status = TicketStatus.RUNNING
        self.error: BaseException | None = None
        self.has_run = False
        """True if SETUP of a batch with this request has succeeded. RowOrder uses this to sort the rows."""
        self._outcome = TicketStatus.FINISHED
        self._in_flight = in_flight
        self._on_retire = on_retire

    def __repr__(self) -> str:
        return f"Ticket({self.request!r}, {self.status.value}, {self.num_in_flight} in flight)"

    @property
    def num_in_flight(self) -> int:
        """Number of batches in flight that contain this request. Computed on demand; a counter would take more time."""
        return sum(self in rows for rows in self._in_flight)

    @property
    def is_running(self) -> bool:
        """True if the request may still be put into a batch."""
        return self.status is TicketStatus.RUNNING

    def finish(self) -> None:
        self.retire(TicketStatus.FINISHED)

    def cancel(self) -> None:
        self.retire(TicketStatus.CANCELLED)

    def fail(self, error: BaseException) -> None:
        if self.is_running:
            self.error = error
        self.retire(TicketStatus.FAILED)

    def retire(self, outcome: TicketStatus) -> None:
        """Decide the outcome, unless it is already decided."""
        if self.is_running:
            self.status, self._outcome = TicketStatus.RETIRING, outcome
            self._on_retire(self)

    def release(self) -> None:
        """Set the final status. The pipeline calls this once, when no batch with this request is in flight."""
        self.status = self._outcome
        del self._on_retire  # the callback would keep the pipeline alive as long as this ticket
        self._in_flight = ()


class RowOrder:
    """The rows of a batch. Consecutive batches with the same rows in the same order share one RowOrder.

    The rows of generating requests come first, and all other rows follow. Each of these two groups has three parts: the
    rows of the previous batch in their old order, then requests that ran before but not in the previous batch, then
    requests that have never run. The permutation marks all rows except those of the previous batch as new.
    """

    __slots__ = ("row_of", "stay", "tickets")

    def __init__(self, tickets: Iterable[Ticket] = ()) -> None:
        self.tickets = tuple(tickets)
        self.row_of = dict(zip(self.tickets, range(len(self.tickets)), strict=True))
        self.stay = Permutation.identity(len(self.tickets))
        """The permutation for a batch with the same rows as the previous batch."""

    def next(self, chosen: dict[Ticket, None], generating: Collection[Ticket]) -> tuple[RowOrder, Permutation]:
        """Return the order of the next batch, and the permutation from the current order to the next order."""
        first = chosen.keys() & generating
        if chosen.keys() == self.row_of.keys() and self._begins_with(first):
            return self, self.stay
        newcomers = [ticket for ticket in chosen if ticket not in self.row_of]
        rows = [ticket for ticket in self.tickets if ticket in chosen]
        rows += [ticket for ticket in newcomers if ticket.has_run]
        rows += [ticket for ticket in newcomers if not ticket.has_run]
        if 0 < len(first) < len(rows):
            rows = [ticket for ticket in rows if ticket in first] + [ticket for ticket in rows if ticket not in first]
        size0 = len(self.tickets)
        index = np.fromiter(map(self.row_of.get, rows, itertools.repeat(size0)), np.int64, len(rows))
        return RowOrder(rows), Permutation(index, size0)

    def _begins_with(self, first: Collection[Ticket]) -> bool:
        return max(map(self.row_of.__getitem__, first), default=-1) == len(first) - 1


class Pipeline:
    """Runs the host ops of batches on the caller's thread and the device ops on the executor.

        step t      SETUP ──ready──> [executor: PREPARE FORWARD UNPREP] ──done──> FETCH, one host sync, UPDATE
        step t+1         SETUP ──ready──> ...          up to `phases` batches in flight; results lag by phases - 1 steps

    Call all methods on the engine thread. `BatchData.requests` contains Tickets. An error in an op of a batch fails
    only the requests of this batch. After an error in a device op, the order of rows on the device is unknown. Later
    batches in flight are then skipped, or their results are discarded. In the first batch after them, all rows are new.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        phases: int = 2,
        placement: Placement | str = CPU,
        executor: Callable[[Work], Executor] = Executor,
        timeline: Timeline | None = None,
    ) -> None:
        """On the CPU with the default `executor`, the copies of an op run on streams, as on a GPU.

        On the CPU with another `executor`, the copies run immediately, in the thread of the op.
        """
        if phases < 1:
            raise ArgumentError(f"a pipeline needs at least one phase, got {phases}")
        check_modules(modules, [BATCH, COPY])
        self.modules = tuple(modules)
        self.phases = phases
        self._timeline = timeline
        place = Placement.parse(placement)
        self._streams = Streams(place, threads=executor is Executor)
        self._executor = executor(self._execute)
        # On a device, a kernel ("gather") makes the copies. The copy engines of the GPU would first finish the queued
        # copies of cache blocks. While 256 MiB were copied in each direction, a decode step took 12.9 ms with the
        # kernel and 17 to 18.5 ms with the copy engines (H200, measured on 2026-11-15).
        self._free = [BatchData(phase, "gather" if place.is_device else None) for phase in range(phases)]
        self._steps = itertools.count()
        self._order = RowOrder()  # the rows of the latest batch
        self._in_flight: dict[BatchData, Collection[Ticket]] = {}  # batches with their requests, oldest first
        self._running: dict[Ticket, None] = {}  # requests that may be in the next batch
        self._retiring: list[Ticket] = []  # requests whose outcome is decided, but not removed yet
        self._broken_at: int | None = None  # the step that failed on the device; results of later steps are invalid
        self._closed = False

    @property
    def num_in_flight(self) -> int:
        """Number of batches that were submitted and not yet collected."""
        return len(self._in_flight)

    def add(self, request: Any) -> Ticket:
        """Add a request. If a module raises, the request fails immediately."""
        self._check_open()
        ticket = Ticket(request, self._in_flight.values(), self._retire)
        self._running[ticket] = None
        try:
            with self._span("ADD", BatchOp.ADD):
                for module in self.modules:
                    module.add([request])
        except Exception as error:  # the error is the outcome of the request
            ticket.fail(error)
            self._release()
        return ticket

    def step(
        self, tickets: Iterable[Ticket], *, generating: Collection[Ticket] = (), tokens: Sequence[int] = ()
    ) -> None:
        """Submit a batch with these requests. If all phases are then in use, collect the oldest batch.

        After a failure on the device, first collect all batches in flight. Requests that are not in `tickets` are
        preempted and can be resumed later. Retiring requests in `tickets` are ignored. The rows of the requests in
        `generating` come first (see RowOrder). `tokens` contains the number of tokens of this step for each rank.
        """
        chosen = list(tickets)
        if self._broken_at is not None:
            self._check_known(chosen)
            self.drain()
            chosen = [ticket for ticket in chosen if ticket in self._running]
        self.submit(chosen, generating=generating, tokens=tokens)
        while self.num_in_flight >= self.phases:
            self.collect()

    def submit(
        self,
        tickets: Iterable[Ticket],
        *,
        generating: Collection[Ticket] = (),
        tokens: Sequence[int] = (),
        work: Any = None,
    ) -> BatchData:
        """Submit a batch like `step`, but collect other batches only if no phase is free.

        `work` is passed to the modules. If SETUP fails, the returned batch has an error and is not in flight.
        """
        self._check_open()
        chosen, tokens = dict.fromkeys(tickets), tuple(tokens)
        self._check_known(chosen)
        while not self._free:
            self.collect()
        for ticket in chosen.keys() - self._running.keys():  # `collect` may have retired them
            del chosen[ticket]
        order, perm = self._order.next(chosen, generating)
        batch = self._free.pop()
        batch.begin(next(self._steps), perm, order.tickets, tokens, work)
        try:
            with self._streams.on("engine", then=batch.ready):
                self._run_op(BatchOp.SETUP, batch)
        except BaseException as error:  # the order of rows on the device has not changed
            self._fail_on_host(batch, error)
            return batch
        self._take(order)
        self._in_flight[batch] = order.row_of
        self._executor.submit(batch)
        return batch

    @property
    def has_result(self) -> bool:
        """True if the oldest batch in flight has run, so that `collect` does not wait for the executor."""
        return bool(self._in_flight) and self._executor.has_result() and next(iter(self._in_flight)).done.query()

    def collect(self) -> BatchData | None:
        """Process the results of the oldest batch in flight and return it. Return None if no batch is in flight."""
        if not self.num_in_flight:
            return None
        batch = self._executor.collect()
        del self._in_flight[batch]
        if batch.error is None and self._broken_at is not None and batch.sequence > self._broken_at:
            batch.error = StateError("an earlier batch failed on the device")  # this batch used invalid rows
        try:
            if batch.error is not None:
                self._give_up(batch, "executor")
            else:
                self._fetch_and_update(batch)
        finally:
            if self._broken_at is not None and not self.num_in_flight:  # the order of rows on the device is unknown
                self._take(RowOrder())
                self._broken_at = None
        self._release()
        return batch

    def _fetch_and_update(self, batch: BatchData) -> None:
        try:
            with self._streams.on("engine", after=batch.done):
                self._run_op(BatchOp.FETCH, batch)
                try:
                    self._streams.synchronize()
                except Exception:
                    self._broken_at = batch.sequence
                    raise
                self._run_op(BatchOp.UPDATE, batch)
            self._free.append(batch)
        except BaseException as error:
            self._fail_on_host(batch, error)

    def drain(self) -> None:
        while self.collect():
            pass

    def close(self) -> None:
        """Collect all batches, cancel the remaining requests, and stop the executor. Idempotent."""
        if self._closed:
            return
        try:
            self.drain()
            for ticket in tuple(self._running):
                ticket.cancel()
            self._release()
        finally:
            self._closed = True
            self._executor.close()
            self._streams.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed; create another one")

    def _check_known(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if ticket not in self._running and ticket not in self._retiring:
                raise ArgumentError(f"{ticket!r} is not in this pipeline")

    def _execute(self, batch: BatchData) -> None:
        """Run the device ops, unless an earlier batch failed on the device. Errors are stored in the batch."""
        if self._broken_at is not None:
            batch.error = StateError("an earlier batch failed on the device")
            return
        try:
            with self._streams.on("executor", after=batch.ready, then=batch.done):
                for op in (BatchOp.PREPARE, BatchOp.FORWARD, BatchOp.UNPREP):
                    self._run_op(op, batch)
        except BaseException as error:  # the executor's thread must continue after any error
            batch.error = error
            batch.failed_itself = True
            self._broken_at = batch.sequence

    def _run_op(self, op: BatchOp, batch: BatchData) -> None:
        """Run an op in all modules, and then the copies that they added. If a module raises, discard the copies."""
        batch.check(op)
        env = batch.environment(op)
        copy, method = env.at(COPY), op.value
        with self._span(op.name, op, batch) as whole:
            try:
                for module in self.modules:
                    getattr(module, method)(env)
            except BaseException:
                copy.discard()
                raise
            if len(copy):
                with self._span("copy", op, batch) as span:
                    result = copy.run()
                    for each in (span, whole):
                        if each is not None:
                            each.copied(result)
        batch.finish(op)

    def _span(
        self, name: str, op: BatchOp, batch: BatchData | None = None
    ) -> contextlib.AbstractContextManager[TimelineSpan | None]:
        if self._timeline is None:
            return contextlib.nullcontext()
        if batch is None:
            return self._timeline.span(name, track=op.side, phase=-1, step=-1, num_rows=1)
        stream = self._streams.of(op.side)
        return self._timeline.span(
            name, track=op.side, phase=batch.phase, step=batch.sequence, num_rows=batch.bsz, stream=stream
        )

    def _take(self, order: RowOrder) -> None:
        if order is self._order:
            return
        for ticket in order.row_of.keys() - self._order.row_of.keys():
            ticket.has_run = True
        self._order = order

    def _fail_on_host(self, batch: BatchData, error: BaseException) -> None:
        """Fail the requests of a batch after an error in a host op. Re-raise an exit or an interrupt."""
        batch.error, batch.failed_itself = error, True
        self._give_up(batch, "engine")
        self._release()
        if not isinstance(error, Exception):
            raise error

    def _give_up(self, batch: BatchData, side: Side) -> None:
        """Make a BatchData reusable after an error. If the error occurred in this batch, fail its requests."""
        self._streams.settle(side)
        batch.abandon()
        self._free.append(batch)
        if batch.failed_itself and batch.error is not None:
            for ticket in batch.requests:
                ticket.fail(batch.error)

    def _retire(self, ticket: Ticket) -> None:
        del self._running[ticket]
        self._retiring.append(ticket)

    def _release(self) -> None:
        """Remove retiring requests that are in no batch in flight. Then raise the first error of REMOVE, if any."""
        if not self._retiring:
            return
        leaving = [ticket for ticket in self._retiring if not ticket.num_in_flight]
        self._retiring = [ticket for ticket in self._retiring if ticket.num_in_flight]
        first: Exception | None = None
        for ticket in leaving:
            ticket.release()
            with self._span("REMOVE", BatchOp.REMOVE):
                for module in self.modules:
                    try:
                        module.remove([ticket.request])
                    except Exception as error:
                        first = first or error
        if first is not None:
            raise first
