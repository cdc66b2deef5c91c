"""The streams of the two sides of a pipeline, and the events between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvtier.batch.data import BatchData
from kvtier.batch.op import Side
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
