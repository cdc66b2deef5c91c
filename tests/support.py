"""Functions for several test files: block a host stream, stop a process, check the state of a pipeline."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.batch import Executor, Pipeline, TicketStatus
from kvtier.memory import Stream


@contextlib.contextmanager
def held_back(stream: Stream) -> Iterator[None]:
    """Block a host stream. Tasks that are enqueued inside the `with` statement run after the statement."""
    gate = threading.Event()
    stream.enqueue(gate.wait)
    try:
        yield
    finally:
        gate.set()


@contextlib.contextmanager
def new_stream() -> Iterator[Stream]:
    """Yield a stream and close it. Ignore ValueError, because in some tests a task fails on purpose."""
    stream = Stream()
    try:
        yield stream
    finally:
        with contextlib.suppress(ValueError):
            stream.close()


def inline_executor(work) -> Executor:
    """Return an executor that runs each batch in the thread that submits it."""
    return Executor(work, threaded=False)


def stop_process(pid: int) -> None:
    """Send SIGSTOP and wait until all threads have stopped, because a thread can run for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
    return stat.rpartition(")")[2].split()[0] not in "RSD"


FINAL_STATUSES = (TicketStatus.FINISHED, TicketStatus.CANCELLED, TicketStatus.FAILED)


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise AssertionError if the rows, the number of batches in flight, or the lists of requests are inconsistent."""
    order, num_in_flight, free = pipeline._order, pipeline.num_in_flight, pipeline._free
    assert [*order.row_of] == [*order.tickets], f"a request has two rows or no row: {order.tickets}"
    assert [*order.row_of.values()] == [*range(len(order.tickets))], order.row_of
    assert num_in_flight + len(free) == pipeline.phases, (
        f"{num_in_flight} batches are in flight and {len(free)} are free, expected {pipeline.phases} in total"
    )
    for ticket in (*pipeline._running, *pipeline._retiring):
        assert ticket.status not in FINAL_STATUSES, f"{ticket!r} has ended but is still listed"
        assert ticket.is_running == (ticket in pipeline._running), f"{ticket!r} is in the wrong list"
