"""Stream and Event: order of work, on the host and on CUDA, behind one small interface."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kvtier.errors import ArgumentError, ClosedError, PlacementError, StateError
from kvtier.memory.host_queue import HostMark, HostQueue
from kvtier.memory.placement import CPU, Placement

_host_ids = itertools.count(1)
_QUERY_SECONDS = 20e-6  # between two looks at a CUDA event: little beside any transfer, and a core is free meanwhile
# A thread that sleeps in the driver wakes 0.13 to 0.27 ms late, one that looks again and again 0.03 to 0.06 (H200 in a
# virtual machine, 2026-11-15): much of a short transfer, nothing of a long one.
_LOOK_SECONDS = 3e-3
LEGACY_DEFAULT_HANDLES = (0, 1)  # torch's default stream, and CU_STREAM_LEGACY: both are the legacy default stream


class Stream:
    """An in-order queue of work. `Stream("cpu")` has a thread of its own, `Stream("cuda:0")` is a new CUDA stream.

    `native` is the queue beneath: a torch.cuda.Stream, or a HostQueue of the same shape.
    """

    __slots__ = ("__weakref__", "_finalizer", "_native", "handle", "placement")

    def __init__(self, placement: Placement | str = CPU, *, priority: int = 0) -> None:
        self.placement = Placement.parse(placement).require()
        self._native: Any
        if self.placement.is_device:
            self._native = torch.cuda.Stream(self.placement.torch, priority=priority)
            self.handle: int = self._native.cuda_stream
            self._finalizer = None
        else:
            self.handle = -next(_host_ids)
            self._native = HostQueue(f"kvtier-stream{self.handle}")
            # a dropped stream finishes by itself; waiting for it here could wait for whoever drops it
            self._finalizer = weakref.finalize(self, self._native.close, wait=False)

    @classmethod
    def wrap(cls, foreign: torch.cuda.Stream | int, placement: Placement | str | None = None) -> Stream:
        """A Stream over a torch.cuda.Stream, or over a raw CUDA handle of the GPU `placement`.

        The owner keeps it alive.
        """
        if isinstance(foreign, int):
            if placement is None:
                raise ArgumentError(
                    f"the raw stream handle {foreign:#x} says nothing about its GPU: pass placement='cuda:0'"
                )
            where = Placement.parse(placement).require()
            if not where.is_device:
                raise PlacementError(f"a raw stream handle belongs to a GPU, not to {where}")
            if foreign in LEGACY_DEFAULT_HANDLES:
                foreign = torch.cuda.default_stream(where.torch)
            else:
                foreign = torch.cuda.ExternalStream(foreign, where.torch)
        if not isinstance(foreign, torch.cuda.Stream):
            raise ArgumentError(
                f"cannot wrap {type(foreign).__name__} as a stream: pass a torch.cuda.Stream or a raw CUDA handle"
            )
        if placement is not None and Placement.parse(placement) != Placement("cuda", foreign.device_index):
            raise PlacementError(f"this stream is on cuda:{foreign.device_index}, not on {placement}")
        stream = cls.__new__(cls)
        stream._native = foreign
        stream._finalizer = None
        stream.handle = foreign.cuda_stream
        stream.placement = Placement("cuda", foreign.device_index)
        return stream

    def __repr__(self) -> str:
        return f"Stream({str(self.placement)!r}, handle={self.handle:#x})"

    @property
    def native(self) -> Any:
        """The queue beneath; an error once closed."""
        if self._native is None:
            raise ClosedError(f"this stream on {self.placement} was closed")
        return self._native

    def enqueue(self, task: Callable[[], object]) -> None:
        """Run `task` on this host stream after everything before it. CUDA streams take device work, not tasks."""
        if self.placement.is_device:
            raise PlacementError(
                f"a stream on {self.placement} runs device work; enqueue() needs a host stream: Stream('cpu')"
            )
        self.native.submit(task)

    def record(self, event: Event | None = None) -> Event:
        """Record `event` (or a new one) at the present end of this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on wait for `event`. A CUDA stream waiting for a host event blocks the caller."""
        event.wait(self)

    def query(self) -> bool:
        """Whether everything enqueued is done."""
        return bool(self.native.query())

    def synchronize(self) -> None:
        """Wait until everything enqueued is done; raises the error of a failed host task, once."""
        self.native.synchronize()

    def close(self) -> None:
        """Finish what was enqueued and give the queue up. A wrapped stream is only let go. Closing twice is fine."""
        if self._native is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._native.close()
        self._native = None


class Event:
    """A place in a stream: record it, wait for it from other streams or the host, measure between two of them."""

    __slots__ = ("_blocking", "_native", "_on_device", "_timing")

    def __init__(self, *, timing: bool = False, blocking: bool = False) -> None:
        """`timing`: elapsed() may be asked. `blocking`: whoever waits long on the host sleeps instead of spinning."""
        self._timing = timing
        self._blocking = blocking
        self._native: Any = None  # made by the first record: only then is it known whether host or CUDA
        self._on_device = False

    def record(self, stream: Stream) -> None:
        """Move this event to the present end of `stream`."""
        native = stream.native
        on_device = stream.placement.is_device
        if self._native is None or on_device != self._on_device:
            self._native = _device_event(self._timing, self._blocking) if on_device else HostMark()
            self._on_device = on_device
        self._native.record(native)

    def wait(self, stream: Stream) -> None:
        """Make work enqueued on `stream` from now on wait for this event; an unrecorded event is no wait."""
        if self._native is None:
            return
        if self._on_device == stream.placement.is_device:
            stream.native.wait_event(self._native)
        elif self._on_device:
            stream.enqueue(self._native.synchronize)
        else:
            self._native.synchronize()

    def query(self) -> bool:
        """Whether the place is reached; an unrecorded event counts as reached."""
        return self._native is None or bool(self._native.query())

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until the place is reached, at most `timeout` seconds; whether it is.

        Raises the error its host stream was in.
        """
        if self._native is None:
            return True
        if not self._on_device:
            if timeout is not None:
                return bool(self._native.wait_for(timeout))
            self._native.synchronize()
            return True
        if timeout is not None:
            return self._look(timeout)  # CUDA has no wait with an end
        if not (self._blocking and self._look(_LOOK_SECONDS)):
            self._native.synchronize()
        return True

    def settle(self, *, patient: bool = False) -> None:
        """Block until the place is reached, whatever became of the work before it.

        `patient` does not look at it meanwhile: for threads that would take the interpreter from others by that.
        """
        if self._on_device and patient and self._native is not None:
            self._native.synchronize()
        elif self._on_device:
            self.synchronize()
        elif self._native is not None:
            self._native.settle()

    def _look(self, seconds: float) -> bool:
        """Look at a CUDA event again and again, at most so long; whether it is reached."""
        deadline = time.monotonic() + seconds
        while not self._native.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_QUERY_SECONDS)
        return True

    def elapsed(self, end: Event) -> float:
        """Milliseconds from this event to `end`. Both recorded, on the same kind of stream, with timing=True."""
        if self._native is None or end._native is None:
            raise StateError("elapsed() needs both events recorded on a stream first")
        if self._on_device != end._on_device:
            raise StateError("elapsed() cannot compare a host event with a CUDA event: their clocks differ")
        if not (self._timing and end._timing):
            raise StateError("elapsed() needs events made with Event(timing=True)")
        self._native.synchronize()
        end._native.synchronize()
        return float(self._native.elapsed_time(end._native))


def _device_event(timing: bool, blocking: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)
