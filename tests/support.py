"""What several test files need: host streams to hold back and to close."""

import contextlib
import threading
from collections.abc import Iterator

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
