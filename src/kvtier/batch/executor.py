"""Executors: who runs the device side of a batch, and when."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from kvtier.batch.data import BatchData

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
