"""The memory under a Buffer: who keeps it alive, and whether it may still be used.

Buffer ─┐
Buffer ─┼─> Region ──(until close)──> Holding ──> owner: tensor, mmap, ndarray, an allocator's grant …
Buffer ─┘                                ^
numpy / torch / DLPack export ───────────┘   exports outlive close(): they hold the Holding, not the Region
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvtier.errors import ClosedError
from kvtier.memory.placement import Placement
from kvtier.memory.stream import Event, Stream


class MemoryRef:
    """Keeps memory alive, and gives it back once nothing refers to it and no copy in flight uses it."""

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
        self._pooled = pooled and placement.is_device  # `owner` is a tensor of torch's CUDA pool
        self._in_flight: dict[tuple[Placement, int], Event] = {}

    def used_in_pool(self, stream: Stream) -> bool:
        """Tell torch's pool, if the memory is of it, that work given to `stream` so far uses it. False: it is not."""
        if not (self._pooled and isinstance(self.owner, torch.Tensor)):
            return False
        self.owner.record_stream(stream.native)  # the pool waits without blocking the host
        return True

    def used_by(self, stream: Stream, event: Event) -> None:
        """Note that work on `stream` up to `event` uses this memory. Later work on the same stream replaces it."""
        self._in_flight[stream.placement, stream.handle] = event  # every GPU has a stream of handle 0

    def wait(self) -> None:
        """Block until the copies in flight that use this memory are done, or have failed."""
        for event in tuple(self._in_flight.values()):  # another thread may add one
            event.settle()

    def tensor(self) -> torch.Tensor:
        """All bytes as a uint8 tensor that keeps this Holding alive."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.placement.torch)
        view = _ArrayView(self)
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


class _ArrayView:
    """Bytes at an address, as the numpy and CUDA array protocols show them. The array made from it keeps it alive."""

    def __init__(self, holding: MemoryRef) -> None:
        self.holding = holding
        name = "__cuda_array_interface__" if holding.placement.is_device else "__array_interface__"
        setattr(self, name, array_interface(holding.pointer, holding.nbytes, "|u1", readonly=False))


def gpu_of(pointer: int) -> int:
    """Which GPU this device address is on; torch asks the driver when it is not told."""
    view = _ArrayView(MemoryRef(pointer, 1, Placement("cuda")))
    return int(torch.as_tensor(view).device.index)


def array_interface(pointer: int, count: int, typestr: str, *, readonly: bool) -> dict[str, Any]:
    """The description that `__array_interface__` and `__cuda_array_interface__` share."""
    return {"shape": (count,), "typestr": typestr, "data": (pointer, readonly), "strides": None, "version": 3}


class Region:
    """Memory shared by a Buffer and all its slices and views, until one of them closes it for all.

    A borrowed Region holds nothing: it watches the Holding it came from, and is closed when that is gone.
    """

    __slots__ = ("_borrowed", "_holding", "_tensor", "pointer", "readonly")

    def __init__(self, holding: MemoryRef, *, readonly: bool = False) -> None:
        self.pointer = holding.pointer
        self._holding: MemoryRef | None = holding
        self._borrowed: weakref.ref[MemoryRef] | None = None
        self._tensor: torch.Tensor | None = None
        self.readonly = readonly

    def borrow(self) -> Region:
        """A Region over the same memory that does not keep it alive."""
        holding = self.holding
        borrowed = Region(holding, readonly=self.readonly)
        borrowed._holding, borrowed._borrowed = None, weakref.ref(holding)
        return borrowed

    @property
    def holding(self) -> MemoryRef:
        """What keeps the memory alive; an error once closed."""
        holding = self._holding if self._borrowed is None else self._borrowed()
        if holding is None:
            if self._borrowed is not None:
                raise ClosedError(
                    "this Buffer borrows memory whose owner is gone; keep the owner alive, or use a slice of it"
                )
            raise ClosedError("this Buffer was closed, by itself or through another view of the same memory")
        return holding

    @property
    def is_open(self) -> bool:
        """Whether the memory may still be used."""
        return (self._holding if self._borrowed is None else self._borrowed()) is not None

    def tensor(self) -> torch.Tensor:
        """All bytes as a uint8 tensor. Made once; a borrowed Region makes it anew, since the tensor would own."""
        if self._borrowed is not None:
            return self.holding.tensor()
        if self._tensor is None:
            self._tensor = self.holding.tensor()
        return self._tensor

    def close(self) -> None:
        """Give the memory up for every view. It is freed when the last export and copy in flight are done with it."""
        self._holding = self._tensor = self._borrowed = None
