"""What several test files need: host streams to hold back and to close, processes to stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.memory import Stream


@contextlib.contextmanager
def held_back(stream: Stream) -> Iterator[None]:
    """Inside the block, nothing enqueued on this host stream from now on runs."""
    gate = threading.Event()
    stream.enqueue(gate.wait)
    try:
        yield
    finally:
        gate.set()


@contextlib.contextmanager
def new_stream() -> Iterator[Stream]:
    """A stream that is closed again; closing tells the errors nobody saw, which some tests leave behind on purpose."""
    stream = Stream()
    try:
        yield stream
    finally:
        with contextlib.suppress(ValueError):
            stream.close()


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still: beside others one may go on for a while, and answer."""
    os.kill(pid, signal.SIGSTOP)
    while not all(map(_stands_still, Path(f"/proc/{pid}/task").iterdir())):
        time.sleep(0.001)


def _stands_still(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return True
    return stat.rpartition(")")[2].split()[0] not in "RSD"
