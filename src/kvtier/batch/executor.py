"""Executor: runs the device ops of batches. Streams: the streams of the engine and of the executor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from kvtier.batch.data import BatchData, Side
from kvtier.memory import Event, Placement, Stream, context


class Streams:
    """One stream for each side. The sides are the engine thread and the executor.

    On the CPU, a stream is a thread. Without `threads` there are no streams on the CPU, and work runs immediately.
    """

    def __init__(self, placement: Placement, *, threads: bool) -> None:
        sides: tuple[Side, ...] = ("engine", "executor") if threads or placement.is_device else ()
        self._streams = {side: Stream(placement) for side in sides}

    def of(self, side: Side) -> Stream | None:
        return self._streams.get(side)

    @contextlib.contextmanager
    def on(self, side: Side, *, after: Event | None = None, then: Event | None = None) -> Iterator[None]:
        """Make the stream of a side current, if there is one, for the `with` body.

        The stream waits for `after` before the work of the body, and records `then` afterwards unless the body raises.
        On a GPU, the stream is also the current stream of torch, because modules use both torch and kvtier.memory.
        """
        stream = self.of(side)
        if stream is None:
            yield
            return
        if after is not None:
            stream.wait(after)
        of_torch = torch.cuda.stream(stream.native) if stream.placement.is_device else contextlib.nullcontext()
        with context(stream=stream), of_torch:
            yield
        if then is not None:
            stream.record(then)

    def synchronize(self) -> None:
        """Wait for all work on the engine's stream. Raise an error if some of this work has failed."""
        if not self._streams:
            return
        try:
            self._streams["engine"].synchronize()
        except Exception:
            with contextlib.suppress(Exception):  # clears the same error on the executor's stream
                self._streams["executor"].synchronize()
            raise

    def settle(self, side: Side) -> None:
        """Wait for the stream of a side after a failure. Ignore errors, because they may belong to another batch."""
        stream = self.of(side)
        if stream is not None:
            stream.record().settle()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


Work = Callable[[BatchData], None]


class Executor:
    """Runs batches in order, by default on its own thread, so that the engine thread can prepare the next batch."""

    def __init__(self, work: Work, *, threaded: bool = True) -> None:
        """If `threaded` is False, `submit` runs the batch. This suits callers with one batch in flight at a time."""
        self._work = work
        self._inbound: SimpleQueue[BatchData | None] = SimpleQueue()
        self._outbound: SimpleQueue[BatchData] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-executor", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, batch: BatchData) -> None:
        if self._thread is not None:
            self._inbound.put(batch)
            return
        self._work(batch)  # stores errors in the batch and never raises
        self._outbound.put(batch)

    def has_result(self) -> bool:
        """True if `collect` returns at once."""
        return not self._outbound.empty()

    def collect(self) -> BatchData:
        """Wait for the oldest batch that was submitted and not yet collected, and return this batch."""
        return self._outbound.get()

    def close(self) -> None:
        if self._thread is not None:
            self._inbound.put(None)
            self._thread.join()
        del self._work  # breaks a reference cycle that would keep memory allocated until a garbage collection

    def _run(self) -> None:
        while (batch := self._inbound.get()) is not None:
            self._work(batch)
            self._outbound.put(batch)
