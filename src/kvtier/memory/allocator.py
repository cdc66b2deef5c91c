"""Allocator: allocates and frees memory at one placement with given functions, and counts the allocations."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.errors import ArgumentError, OutOfMemoryError, RangeError
from kvtier.memory.host_pages import map_memory
from kvtier.memory.placement import CPU, PINNED, Placement
from kvtier.memory.region import MemoryRef


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """Counters of an Allocator."""

    allocated_bytes: int
    peak_bytes: int
    num_live: int
    """Number of allocations that are not yet freed."""
    num_allocations: int
    """Number of allocations since the allocator was created."""


def _nothing(*_: object) -> None:
    pass


class Allocator:
    """Allocates uninitialised memory at one placement and counts the allocated bytes. Thread-safe.

    The functions that the constructor takes must be thread-safe. `allocate(nbytes)` returns an address or a tensor that
    owns the memory. It raises MemoryError or RuntimeError if there is no memory. `deallocate(address, nbytes)` frees
    memory, `trim()` returns cached memory to the system, and `free_bytes()` returns the free bytes (None if unknown).
    """

    def __init__(
        self,
        placement: Placement | str,
        allocate: Callable[[int], torch.Tensor | int],
        deallocate: Callable[[int, int], None] = _nothing,
        *,
        trim: Callable[[], None] = _nothing,
        free_bytes: Callable[[], int | None] = _nothing,
    ) -> None:
        self.placement = Placement.parse(placement)
        self.trim = trim
        self._allocate = allocate
        self._deallocate = deallocate
        self._free_bytes = free_bytes
        # re-entrant, because creating `stats` may start a garbage collection that releases a Buffer on the same thread
        self._lock = threading.RLock()
        self._allocated_bytes = self._peak_bytes = self._num_live = self._num_allocations = 0

    def __repr__(self) -> str:
        return f"Allocator({str(self.placement)!r}, {self.stats})"

    def allocate(self, nbytes: int) -> MemoryRef:
        """Allocate `nbytes` bytes. The memory is freed when the last reference to the result is dropped."""
        if nbytes < 0:
            raise RangeError(f"cannot allocate {nbytes} bytes of {self.placement} memory")
        pointer, owner = self._allocate_memory(nbytes) if nbytes else (0, None)
        with self._lock:
            self._allocated_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
            self._num_live += 1
            self._num_allocations += 1
        release = functools.partial(self._release, pointer, nbytes)
        return MemoryRef(pointer, nbytes, self.placement, owner, release, pooled=owner is not None)

    @property
    def stats(self) -> AllocatorStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            return AllocatorStats(self._allocated_bytes, self._peak_bytes, self._num_live, self._num_allocations)

    def _allocate_memory(self, nbytes: int) -> tuple[int, torch.Tensor | None]:
        if nbytes >= 1 << 62:  # allocation functions raise different errors for such sizes
            raise self._out_of_memory(nbytes, "larger than any address space")
        try:
            memory = self._allocate(nbytes)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if a host allocation fails
            raise self._out_of_memory(nbytes, error) from error
        if isinstance(memory, torch.Tensor):
            return memory.data_ptr(), memory
        if not isinstance(memory, int):
            raise ArgumentError(f"an allocate function must return an address as an int, got {type(memory).__name__}")
        if memory == 0:
            raise self._out_of_memory(nbytes, "the allocate function returned a null address")
        if memory < 0:
            raise ArgumentError(f"an allocate function returned {memory}, which is not an address")
        return memory, None

    def _release(self, pointer: int, nbytes: int) -> None:
        with self._lock:
            self._allocated_bytes -= nbytes
            self._num_live -= 1
        if nbytes:
            self._deallocate(pointer, nbytes)

    def _out_of_memory(self, nbytes: int, why: object) -> OutOfMemoryError:
        stats, free = self.stats, self._free_bytes()
        return OutOfMemoryError(
            f"could not allocate {nbytes:,} bytes of {self.placement} memory: "
            f"this allocator holds {stats.allocated_bytes:,} bytes "
            f"in {stats.num_live} allocations (peak {stats.peak_bytes:,}), the system reports "
            f"{'an unknown amount' if free is None else f'{free:,} bytes'} free. "
            f"Free buffers, call trim(), or allocate less. ({why})"
        )


# Scattered 4 KiB reads over 4 KiB pages usually miss the TLB, so large host allocations use huge pages.
_HUGE_PAGE_BYTES = 2 << 20
# torch's pinned pool rounds sizes up to a power of two and never shrinks by itself. To save memory, allocations larger
# than _PINNED_POOL_BYTES are mapped at their exact size and pinned by the driver.
_PINNED_POOL_BYTES = 32 << 20


def _allocate_host(nbytes: int) -> torch.Tensor:
    if nbytes < _HUGE_PAGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(map_memory(nbytes), dtype=torch.uint8)


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allocate_pinned(nbytes: int) -> torch.Tensor:
    if nbytes <= _PINNED_POOL_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    tensor = _allocate_host(nbytes)
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise MemoryError(f"cudaHostRegister refused to pin {nbytes:,} bytes: {status}")
    return tensor


def _free_pinned(pointer: int, nbytes: int) -> None:
    if nbytes > _PINNED_POOL_BYTES:
        torch.cuda.cudart().cudaHostUnregister(pointer)


@functools.cache  # one allocator per placement, so that the counters include every Buffer that uses the default
def default_allocator(placement: Placement) -> Allocator:
    """Return the allocator that is used if neither the caller nor the context specifies one."""
    placement.require()
    if placement == CPU:
        return Allocator(placement, _allocate_host, free_bytes=_free_host_bytes)
    if placement == PINNED:
        trim = torch._C._host_emptyCache
        return Allocator(placement, _allocate_pinned, _free_pinned, trim=trim, free_bytes=_free_host_bytes)
    device = placement.torch
    return Allocator(
        placement,
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
        trim=torch.cuda.empty_cache,
        free_bytes=lambda: int(torch.cuda.mem_get_info(device)[0]),
    )
