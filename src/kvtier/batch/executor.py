"""Executors of the device side of batches, and the streams of both sides.

The streams of the two sides of a pipeline, and the events between them.

Executors: who runs the device side of a batch, and when.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

import torch

from kvtier.batch.data import BatchData, Side
from kvtier.memory import Placement, Stream, context


class Streams:
    """One stream for each side; none without threads and without a GPU, where all is done at once."""

    def __init__(self, placement: Placement, *, threads: bool) -> None:
        wanted = threads or placement.is_device
        self._engine = Stream(placement) if wanted else None
        self._executor = Stream(placement) if wanted else None

    def of(self, side: Side) -> Stream | None:
        """The stream of a side."""
        return self._engine if side == "engine" else self._executor

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """Inside the block, work goes to the engine's stream."""
        with _in_force(self._engine):
            yield

    @contextlib.contextmanager
    def executor(self, batch: BatchData) -> Iterator[None]:
        """Inside the block, work goes to the executor's stream, behind what SETUP enqueued and before `done`."""
        if self._executor is not None:
            self._executor.wait(batch.ready)
        with _in_force(self._executor):
            yield
        if self._executor is not None:
            self._executor.record(batch.done)

    def record_ready(self, batch: BatchData) -> None:
        """What SETUP enqueued ends here."""
        if self._engine is not None:
            self._engine.record(batch.ready)

    def wait_done(self, batch: BatchData) -> None:
        """Put what FETCH enqueues behind the batch's work on the device."""
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

    def settle(self, side: Side) -> None:
        """After a failure: wait for what a side has enqueued, so that the slot's memory may be used again.

        An error that the stream carries stays there: it may be another batch's.
        """
        stream = self.of(side)
        if stream is not None:
            stream.record().settle()

    def close(self) -> None:
        """Finish what was enqueued and end the streams."""
        for stream in (self._engine, self._executor):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def _in_force(stream: Stream | None) -> Iterator[None]:
    """Make it the stream of our copies and, on a GPU, of torch: a module uses both."""
    if stream is None:
        yield
        return
    of_torch = torch.cuda.stream(stream.native) if stream.placement.is_device else contextlib.nullcontext()
    with context(stream=stream), of_torch:
        yield


Work = Callable[[BatchData], None]


class Executor(Protocol):
    """Runs the device side of batches in the order they are submitted."""

    def submit(self, batch: BatchData) -> None:
        """Run it, now or later."""
        ...

    def collect(self) -> BatchData:
        """The oldest batch submitted and not collected; waits until it has run."""
        ...

    def close(self) -> None:
        """Finish what was submitted."""
        ...


class ThreadExecutor:
    """A thread of its own: the host prepares the next batch while it drives the device through this one."""

    def __init__(self, work: Work) -> None:
        self._inbound: SimpleQueue[BatchData | None] = SimpleQueue()
        self._outbound: SimpleQueue[BatchData] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(work,), name="kvtier-executor", daemon=True)
        self._thread.start()

    def submit(self, batch: BatchData) -> None:
        """Hand it to the thread."""
        self._inbound.put(batch)

    def collect(self) -> BatchData:
        """Wait for the oldest."""
        return self._outbound.get()

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._inbound.put(None)
        self._thread.join()

    def _run(self, work: Work) -> None:
        while (batch := self._inbound.get()) is not None:
            work(batch)  # never raises: what fails is kept in the batch
            self._outbound.put(batch)


class InlineExecutor:
    """No thread: batches run in the caller's, at moments drawn from a seed, the same for the same seed."""

    def __init__(self, work: Work, seed: int = 0) -> None:
        self._work = work
        self._random = random.Random(seed)
        self._waiting: deque[BatchData] = deque()
        self._done: deque[BatchData] = deque()

    def submit(self, batch: BatchData) -> None:
        """Perhaps run some of what is waiting now."""
        self._waiting.append(batch)
        while self._waiting and self._random.random() < 0.5:
            self._run_one()

    def collect(self) -> BatchData:
        """Run until the oldest is done."""
        while not self._done:
            self._run_one()
        return self._done.popleft()

    def close(self) -> None:
        """Run what is waiting."""
        while self._waiting:
            self._run_one()

    def _run_one(self) -> None:
        batch = self._waiting.popleft()
        self._work(batch)
        self._done.append(batch)
