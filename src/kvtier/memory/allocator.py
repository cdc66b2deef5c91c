"""Allocators: one class that counts and reports, over a source of memory per placement (or any two callables)."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.errors import ArgumentError, OutOfMemoryError, RangeError
from kvtier.memory.placement import CPU, PINNED, Placement
from kvtier.memory.region import MemoryRef


@dataclass(frozen=True, slots=True)
class Grant:
    """Memory handed out by a Source: its address, and the object that is it, if there is one."""

    pointer: int
    owner: object = None
    pooled: bool = False
    """Whether the owner is a tensor of torch's CUDA pool."""


class MemorySource(Protocol):
    """Where an Allocator gets its memory. May be called from several threads."""

    def allocate(self, nbytes: int) -> Grant:
        """Memory of at least `nbytes` (> 0), uninitialised. MemoryError or RuntimeError when there is none."""
        ...

    def deallocate(self, grant: Grant, nbytes: int) -> None:
        """Take back what `allocate(nbytes)` granted."""
        ...

    def trim(self) -> None:
        """Return cached memory to the system."""
        ...

    def free_bytes(self) -> int | None:
        """What the system could still give, if it says."""
        ...


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """What an Allocator has handed out."""

    allocated_bytes: int
    peak_bytes: int
    num_live: int
    """Allocations not yet given back."""
    num_allocations: int
    """Allocations ever made."""


class Allocator:
    """Hands out uninitialised memory of one placement and keeps count. Thread-safe."""

    def __init__(self, placement: Placement | str, source: MemorySource) -> None:
        self.placement = Placement.parse(placement)
        self._source = source
        # re-entrant: an allocation may trigger the collection of a Buffer, whose release takes the lock on this very
        # thread
        self._lock = threading.RLock()
        self._allocated_bytes = self._peak_bytes = self._num_live = self._num_allocations = 0

    @classmethod
    def from_callables(
        cls,
        placement: Placement | str,
        allocate: Callable[[int], int],
        deallocate: Callable[[int, int], None],
    ) -> Allocator:
        """An allocator from `allocate(nbytes) -> address` and `deallocate(address, nbytes)`."""
        return cls(placement, _CallableSource(allocate, deallocate))

    def __repr__(self) -> str:
        return f"Allocator({str(self.placement)!r}, {self.stats})"

    def allocate(self, nbytes: int) -> MemoryRef:
        """Memory of `nbytes`, given back when the Holding is no longer referred to.

        OutOfMemoryError with the numbers.
        """
        if nbytes < 0:
            raise RangeError(f"cannot allocate {nbytes} bytes of {self.placement} memory")
        if nbytes == 0:
            grant = Grant(0)
        elif nbytes >= 1 << 62:  # beyond any address space; the sources below differ in how they fail at it
            raise self._out_of_memory(nbytes, "no machine has that much")
        else:
            try:
                grant = self._source.allocate(nbytes)
            except (
                MemoryError,
                RuntimeError,
            ) as error:  # torch reports a failed host allocation as a bare RuntimeError
                raise self._out_of_memory(nbytes, error) from error
            if grant.pointer == 0:
                raise self._out_of_memory(nbytes, "its allocate function returned a null address")
            if grant.pointer < 0:
                raise ArgumentError(f"an allocate function returned {grant.pointer}, which is no address")
        with self._lock:
            self._allocated_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
            self._num_live += 1
            self._num_allocations += 1
        release = functools.partial(self._release, grant, nbytes)
        return MemoryRef(grant.pointer, nbytes, self.placement, grant.owner, release, pooled=grant.pooled)

    @property
    def stats(self) -> AllocatorStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return AllocatorStats(self._allocated_bytes, self._peak_bytes, self._num_live, self._num_allocations)

    def trim(self) -> None:
        """Return memory cached for later allocations to the system; live allocations are untouched."""
        self._source.trim()

    def _release(self, grant: Grant, nbytes: int) -> None:
        with self._lock:
            self._allocated_bytes -= nbytes
            self._num_live -= 1
        if nbytes:
            self._source.deallocate(grant, nbytes)

    def _out_of_memory(self, nbytes: int, why: object) -> OutOfMemoryError:
        stats, free = self.stats, self._source.free_bytes()
        return OutOfMemoryError(
            f"could not allocate {nbytes:,} bytes of {self.placement} memory: "
            f"this allocator holds {stats.allocated_bytes:,} bytes "
            f"in {stats.num_live} allocations (peak {stats.peak_bytes:,}), the system reports "
            f"{'an unknown amount' if free is None else f'{free:,} bytes'} free. "
            f"Free buffers, call trim(), or ask for less. ({why})"
        )


class _CallableSource:
    def __init__(self, allocate: Callable[[int], int], deallocate: Callable[[int, int], None]) -> None:
        self._allocate, self._deallocate = allocate, deallocate

    def allocate(self, nbytes: int) -> Grant:
        pointer = self._allocate(nbytes)
        if not isinstance(pointer, int):
            raise ArgumentError(f"an allocate function must return an address as an int, got {type(pointer).__name__}")
        return Grant(pointer)

    def deallocate(self, grant: Grant, nbytes: int) -> None:
        self._deallocate(grant.pointer, nbytes)

    def trim(self) -> None:
        pass  # two callables say nothing of a cache

    def free_bytes(self) -> int | None:
        return None


# Scattered 4 KiB reads over 4 KiB pages miss the TLB every time; large host allocations ask for huge pages.
_HUGE_PAGE_BYTES = 2 << 20


class _HostSource:
    def allocate(self, nbytes: int) -> Grant:
        if nbytes < _HUGE_PAGE_BYTES:
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            return Grant(tensor.data_ptr(), tensor)
        try:
            mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with contextlib.suppress(OSError):  # a kernel built without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        return Grant(tensor.data_ptr(), tensor)

    def deallocate(self, grant: Grant, nbytes: int) -> None:
        pass  # the owner frees itself

    def trim(self) -> None:
        pass  # nothing is cached

    def free_bytes(self) -> int | None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# torch's pinned pool rounds up to a power of two and never shrinks by itself: right for staging, ruinous for a host
# tier of 33 GiB. From here on memory is mapped at its exact size and registered with the driver.
_PINNED_POOL_BYTES = 32 << 20


class _PinnedSource:
    def __init__(self) -> None:
        self._host = _HostSource()

    def allocate(self, nbytes: int) -> Grant:
        if nbytes <= _PINNED_POOL_BYTES:
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return Grant(tensor.data_ptr(), tensor)
        grant = self._host.allocate(nbytes)
        status = torch.cuda.cudart().cudaHostRegister(grant.pointer, nbytes, 0)
        if int(status) != 0:
            raise MemoryError(f"cudaHostRegister refused to pin {nbytes:,} bytes: {status}")
        return grant

    def deallocate(self, grant: Grant, nbytes: int) -> None:
        if nbytes > _PINNED_POOL_BYTES:
            torch.cuda.cudart().cudaHostUnregister(grant.pointer)

    def trim(self) -> None:
        torch._C._host_emptyCache()

    def free_bytes(self) -> int | None:
        return self._host.free_bytes()


class _DeviceSource:
    def __init__(self, placement: Placement) -> None:
        self._device = placement.torch

    def allocate(self, nbytes: int) -> Grant:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Grant(tensor.data_ptr(), tensor, pooled=True)

    def deallocate(self, grant: Grant, nbytes: int) -> None:
        pass  # the owner returns itself to torch's pool

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self._device)[0])


@functools.cache  # one per placement, so that its statistics cover every Buffer that named no allocator
def default_allocator(placement: Placement) -> Allocator:
    """The allocator used where neither the call nor the context names one."""
    placement.require()
    if placement == CPU:
        return Allocator(placement, _HostSource())
    if placement == PINNED:
        return Allocator(placement, _PinnedSource())
    return Allocator(placement, _DeviceSource(placement))
