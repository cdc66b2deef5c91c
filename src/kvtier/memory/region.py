"""The memory of a Buffer, its lifetime, and the check that the memory may still be used.

Buffer ─┐
Buffer ─┼─> Region ──(until close)──> MemoryRef ──> owner: tensor, mmap, ndarray, an allocation …
Buffer ─┘                                ^
numpy / torch / DLPack export ───────────┘   exports outlive close(), because they bypass the Region
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtier.errors import ClosedError
from kvtier.memory.placement import Placement
from kvtier.memory.stream import Event, Stream


class MemoryRef:
    """Keeps memory alive. Frees it when nothing refers to this object and no copy in flight uses the memory."""

    __slots__ = ("__weakref__", "_in_flight", "_pooled", "_release", "nbytes", "owner", "placement", "pointer")

    def __init__(
        self,
        pointer: int,
        nbytes: int,
        placement: Placement,
        owner: object = None,
        release: Callable[[], None] | None = None,
        *,
        pooled: bool = False,
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.placement = placement
        self.owner = owner
        self._release = release
        self._pooled = pooled and placement.is_device  # True if `owner` is a tensor from torch's CUDA pool
        self._in_flight: dict[tuple[Placement, int], Event] = {}

    def used_in_pool(self, stream: Stream) -> bool:
        """Record in torch's pool that work on `stream` uses the memory. Return False if the memory is not pooled."""
        if not (self._pooled and isinstance(self.owner, torch.Tensor)):
            return False
        self.owner.record_stream(stream.native)  # the pool waits for that work, the host does not
        return True

    def used_by(self, stream: Stream, event: Event) -> None:
        """Record that work on `stream` up to `event` uses this memory. Replaces an earlier event of the stream."""
        self._in_flight[stream.placement, stream.handle] = event  # handles are unique only per GPU

    def wait(self) -> None:
        """Wait until the work recorded by `used_by` is done, or has failed."""
        for event in tuple(self._in_flight.values()):  # a copy, because another thread may add an event
            event.settle()

    def tensor(self) -> torch.Tensor:
        """Return all bytes as a uint8 tensor that keeps this reference alive."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.placement.torch)
        view = _array_view(self)
        if self.placement.is_device:
            return torch.as_tensor(view, device=self.placement.torch)
        return torch.from_numpy(np.asarray(view))

    def __del__(self) -> None:
        try:
            if self._in_flight:
                self.wait()
        finally:
            if self._release is not None:
                self._release()


def _array_view(holding: MemoryRef) -> SimpleNamespace:
    """Return an object with the numpy or CUDA array protocol. The array made from it keeps the memory alive."""
    name = "__cuda_array_interface__" if holding.placement.is_device else "__array_interface__"
    interface = array_interface(holding.pointer, holding.nbytes, "|u1", readonly=False)
    return SimpleNamespace(holding=holding, **{name: interface})


def gpu_of(pointer: int) -> int:
    """Return the index of the GPU that owns a device address, as reported to torch by the driver."""
    view = _array_view(MemoryRef(pointer, 1, Placement("cuda")))
    return int(torch.as_tensor(view).device.index)


def array_interface(pointer: int, count: int, typestr: str, *, readonly: bool) -> dict[str, Any]:
    return {"shape": (count,), "typestr": typestr, "data": (pointer, readonly), "strides": None, "version": 3}


class Region:
    """Memory that a Buffer shares with its slices and views. Closing any of these Buffers closes all of them.

    A borrowed Region has only a weak reference to the memory, and is closed when the memory is freed.
    """

    __slots__ = ("_borrowed", "_holding", "_tensor", "pointer", "readonly")

    def __init__(self, holding: MemoryRef, *, readonly: bool = False) -> None:
        self.pointer = holding.pointer
        self._holding: MemoryRef | None = holding
        self._borrowed: weakref.ref[MemoryRef] | None = None
        self._tensor: torch.Tensor | None = None
        self.readonly = readonly

    def borrow(self) -> Region:
        """Return a Region that refers to the same memory, but does not keep the memory alive."""
        holding = self.holding
        borrowed = Region(holding, readonly=self.readonly)
        borrowed._holding, borrowed._borrowed = None, weakref.ref(holding)
        return borrowed

    @property
    def holding(self) -> MemoryRef:
        """The reference that keeps the memory alive. Raises ClosedError if closed or if borrowed memory was freed."""
        holding = self._holding if self._borrowed is None else self._borrowed()
        if holding is None:
            if self._borrowed is not None:
                raise ClosedError("this Buffer borrows memory that was freed; keep the owner alive, or do not borrow()")
            raise ClosedError("this Buffer was closed, directly or through another view of the same memory")
        return holding

    @property
    def is_open(self) -> bool:
        return (self._holding if self._borrowed is None else self._borrowed()) is not None

    def tensor(self) -> torch.Tensor:
        """Return all bytes as a uint8 tensor. A borrowed Region caches no tensor, so that memory can be freed."""
        if self._borrowed is not None:
            return self.holding.tensor()
        if self._tensor is None:
            self._tensor = self.holding.tensor()
        return self._tensor

    def close(self) -> None:
        """Close all Buffers of this Region. Memory is freed when no other Region, export or copy in flight uses it."""
        self._holding = self._tensor = self._borrowed = None
