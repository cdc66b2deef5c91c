"""Pipeline: drives batches through the eight ops, with up to `phases` of them in flight."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtier.batch.data import BATCH, COPY, BatchData
from kvtier.batch.environment import Environment
from kvtier.batch.executor import Executor, ThreadExecutor, Work
from kvtier.batch.module import Module, check_modules
from kvtier.batch.op import BatchOp
from kvtier.batch.ticket import Status, Ticket
from kvtier.batch.timeline import Timeline
from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.memory import CPU, Placement, Stream, context
from kvtier.state import Permutation


class Pipeline:
    """Runs modules over batches: host-side ops on the caller's thread, device-side ones on the executor's.

        step t      SETUP ──ready──> [executor: PREPARE FORWARD UNPREP] ──done──> FETCH, one host sync, UPDATE
        step t+1         SETUP ──ready──> ...          up to `phases` in flight; results lag by phases - 1 steps

    All methods are for one thread, the engine's. The requests of a BatchData are Tickets. An error in a module fails
    the requests of its batch and no others: if it came on the device side, the order of the rows there is unknown, so
    the batches behind it do not run; their other requests go back to waiting, and every row starts anew.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        phases: int = 2,
        placement: Placement | str = CPU,
        executor: Callable[[Work], Executor] = ThreadExecutor,
        timeline: Timeline | None = None,
    ) -> None:
        if phases < 1:
            raise ArgumentError(f"a pipeline has at least one phase, got {phases}")
        check_modules(modules, [BATCH, COPY])
        self.modules = tuple(modules)
        self.phases = phases
        self._timeline = timeline
        self._streams = _Streams(Placement.parse(placement), threads=executor is ThreadExecutor)
        self._executor = executor(self._execute)
        self._free = [BatchData(phase) for phase in range(phases)]
        self._steps = itertools.count()
        self._order: list[Ticket] = []  # the rows of the batch issued last
        self._tickets: dict[int, Ticket] = {}  # all that are not terminal
        self._broken_at: int | None = None  # the step that failed on the device; what follows counts for nothing
        self._closed = False

    @property
    def num_in_flight(self) -> int:
        """Batches issued and not collected."""
        return self.phases - len(self._free)

    @property
    def order(self) -> tuple[Ticket, ...]:
        """The rows of the batch issued last."""
        return tuple(self._order)

    def add(self, request: Any) -> Ticket:
        """Take a request in. A module that refuses it, by raising, makes it fail at once."""
        self._check_open()
        ticket = Ticket(request)
        self._tickets[id(ticket)] = ticket
        try:
            for module in self.modules:
                module.add([request])
        except Exception as error:  # whatever a module raises is the request's outcome
            ticket.fail(error)
            self._release()
        return ticket

    def step(
        self, tickets: Iterable[Ticket], *, generating: Collection[Ticket] = (), tokens: Sequence[int] = ()
    ) -> None:
        """Issue a batch of these requests, and collect the oldest if all phases are taken.

        Rows: those that generate first; among them, and among the others, existing ones in their order, then resumed,
        then new. Requests left out are preempted and may come back. Those that are retiring are left out silently.
        """
        self._check_open()
        chosen = list(dict.fromkeys(tickets))
        for ticket in chosen:
            if id(ticket) not in self._tickets:
                raise ArgumentError(f"{ticket!r} is not in this pipeline, or has left it")
        if self._broken_at is not None:
            self.drain()
        while not self._free:
            self.collect()
        position = {id(ticket): row for row, ticket in enumerate(self._order)}
        rows = _in_order(chosen, generating, position)  # some may have left with what was just collected
        batch = self._free.pop()
        index = np.array([position.get(id(ticket), len(position)) for ticket in rows], np.int64)
        batch.begin(next(self._steps), Permutation(index, len(position)), rows, tokens)
        try:
            with self._streams.engine():
                self._run_op(BatchOp.SETUP, batch)
                self._streams.record_ready(batch)
        except Exception as error:  # nothing of it reached the device: the order there is still the old one
            self._give_up(batch, rows, error)
            return
        for ticket in self._order:
            if ticket.status is Status.ACTIVE:
                ticket.status = Status.WAITING
        for ticket in rows:
            ticket.status, ticket.has_run = Status.ACTIVE, True
            ticket.num_in_flight += 1
        self._order = rows
        self._executor.submit(batch)
        while self.num_in_flight >= self.phases:
            self.collect()

    def collect(self) -> bool:
        """Take the results of the oldest batch in flight; False if there is none."""
        if not self.num_in_flight:
            return False
        batch = self._executor.collect()
        rows: Sequence[Ticket] = batch.requests
        for ticket in rows:
            ticket.num_in_flight -= 1
        if batch.error is None and self._broken_at is not None and batch.sequence > self._broken_at:
            batch.error = StateError("a batch before it failed on the device")  # it ran, on rows nobody knows
        if batch.error is not None:
            self._after_failure(batch, rows)
        else:
            try:
                with self._streams.engine():
                    self._streams.wait_done(batch)
                    self._run_op(BatchOp.FETCH, batch)
                    if not self._streams.synchronize(batch):
                        self._broken_at = batch.sequence
                    if batch.error is not None:
                        raise batch.error
                    self._run_op(BatchOp.UPDATE, batch)
                self._free.append(batch)
            except Exception as error:
                self._give_up(batch, rows, error)
        self._start_anew()
        self._release()
        return True

    def drain(self) -> None:
        """Collect everything in flight."""
        while self.collect():
            pass

    def close(self) -> None:
        """Collect everything, cancel whoever is left, and end the threads. Closing twice is fine."""
        if self._closed:
            return
        try:
            self.drain()
            for ticket in list(self._tickets.values()):
                ticket.cancel()
            self._release()
        finally:
            self._closed = True
            self._executor.close()
            self._streams.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed")

    # ---- the device side ----

    def _execute(self, batch: BatchData) -> None:
        """Run on the executor: never raises, keeps the error in the batch."""
        if self._broken_at is not None:
            batch.error = StateError("a batch before it failed on the device")
            return
        try:
            with self._streams.executor(batch):
                for op in (BatchOp.PREPARE, BatchOp.FORWARD, BatchOp.UNPREP):
                    self._run_op(op, batch)
        except BaseException as error:  # kept for the engine: the executor's thread must not die of a module
            batch.error = error
            batch.failed_itself = True
            self._broken_at = batch.sequence

    def _run_op(self, op: BatchOp, batch: BatchData) -> None:
        batch.check(op)
        env = batch.environment(op)
        if self._timeline is None:
            self._run_modules(op, env)
        else:
            with self._timeline.span(
                op.name, track=op.side, phase=batch.phase, step=batch.sequence, num_rows=batch.bsz
            ) as span:
                span.copied_bytes = self._run_modules(op, env)
        batch.finish(op)

    def _run_modules(self, op: BatchOp, env: Environment) -> int:
        """The op of every module, then their copies, which are discarded if one raises. Returns the bytes copied."""
        with env.at(COPY) as copy:
            for module in self.modules:
                getattr(module, op.value)(env)
        return copy.result.nbytes if copy.result is not None else 0

    # ---- rows and requests ----

    def _give_up(self, batch: BatchData, rows: Sequence[Ticket], error: BaseException) -> None:
        batch.abandon()
        self._free.append(batch)
        for ticket in rows:
            ticket.fail(error)
        self._release()

    def _after_failure(self, batch: BatchData, rows: Sequence[Ticket]) -> None:
        error, failed_itself = batch.error, batch.failed_itself
        batch.abandon()
        self._free.append(batch)
        for ticket in rows:
            if failed_itself and error is not None:
                ticket.fail(error)
            elif ticket.status is Status.ACTIVE:
                ticket.status = Status.WAITING

    def _start_anew(self) -> None:
        """After a failure on the device, once all that was in flight is collected: no row is anywhere."""
        if self._broken_at is not None and not self.num_in_flight:
            for ticket in self._order:
                if ticket.status is Status.ACTIVE:
                    ticket.status = Status.WAITING
            self._order, self._broken_at = [], None

    def _release(self) -> None:
        """Let those go that are decided and in no batch in flight. An error in REMOVE is raised when all have gone."""
        first: Exception | None = None
        for ticket in list(self._tickets.values()):
            if ticket.status is not Status.RETIRING or ticket.num_in_flight:
                continue
            ticket.release()
            del self._tickets[id(ticket)]
            for module in self.modules:
                try:
                    module.remove([ticket.request])
                except Exception as error:
                    first = first or error
        if first is not None:
            raise first

    def check(self) -> None:
        """Raise unless the books agree: no row twice, counts of batches in flight right, nobody kept who has left."""
        if len({id(ticket) for ticket in self._order}) != len(self._order):
            raise AssertionError(f"a request has two rows: {self._order}")
        for ticket in self._tickets.values():
            if ticket.status.is_terminal or not 0 <= ticket.num_in_flight <= self.num_in_flight:
                raise AssertionError(f"{ticket!r} with {self.num_in_flight} batches in flight")
            if (ticket.status is Status.ACTIVE) and not any(each is ticket for each in self._order):
                raise AssertionError(f"{ticket!r} is active in no row")


def _in_order(chosen: Sequence[Ticket], generating: Collection[Ticket], position: dict[int, int]) -> list[Ticket]:
    """Those that generate, then the others; in each, existing rows in their order, then resumed ones, then new ones."""
    first = {id(ticket) for ticket in generating}
    resumed, new = len(position), len(position) + 1
    others = new + 1

    def key(ticket: Ticket) -> int:
        name = id(ticket)
        row = position.get(name, resumed if ticket.has_run else new)
        return row if name in first else others + row

    return sorted((ticket for ticket in chosen if ticket.is_running), key=key)


class _Streams:
    """The streams of the two sides, and the events between them; none without threads, where all is done at once."""

    def __init__(self, placement: Placement, *, threads: bool) -> None:
        self._engine = Stream(placement) if threads or placement.is_device else None
        self._executor = Stream(placement) if threads or placement.is_device else None

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        with context(stream=self._engine):
            yield

    @contextlib.contextmanager
    def executor(self, batch: BatchData) -> Iterator[None]:
        if self._executor is None:
            yield
            return
        self._executor.wait(batch.ready)
        with context(stream=self._executor):
            yield
        self._executor.record(batch.done)

    def record_ready(self, batch: BatchData) -> None:
        if self._engine is not None:
            self._engine.record(batch.ready)

    def wait_done(self, batch: BatchData) -> None:
        if self._engine is not None:
            self._engine.wait(batch.done)

    def synchronize(self, batch: BatchData) -> bool:
        """The one wait of the host per step. False, with the error in the batch, if the device's work failed."""
        if self._engine is None or self._executor is None:
            return True
        try:
            self._engine.synchronize()
        except Exception as error:
            batch.error = error
            with contextlib.suppress(Exception):  # the same error, which its own stream still carries
                self._executor.synchronize()
            return False
        return True

    def close(self) -> None:
        for stream in (self._engine, self._executor):
            if stream is not None:
                stream.close()
