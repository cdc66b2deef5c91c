"""Mapped memory, made present and registered with the driver piece by piece.

One mapping of exactly the bytes asked for (torch's pinned pool rounds up to a power of two), none of it present:

    [ piece 0 | piece 1 | piece 2 | ... ]      each: bind to the NUMA node, touch, register as pinned
      ready     ready     at work   mapped
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from kvtier.errors import OutOfMemoryError
from kvtier.memory import cuda, numa
from kvtier.memory.placement import Placement

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU's context


class MappedMemory:
    """Anonymous memory that becomes usable piece by piece. Not thread-safe; `free` may come at any time after."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        try:
            self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"could not map {nbytes:,} bytes of host memory: {error}") from error
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """All bytes; keeps the mapping alive."""
        self.nbytes = nbytes
        self._pinned: list[int] = []

    @property
    def pointer(self) -> int:
        """The address of the first byte."""
        return self.tensor.data_ptr()

    def bind(self, node: int) -> str | None:
        """Prefer this NUMA node. Returns why it cannot be, or None."""
        return numa.bind(self.pointer, self.tensor.nbytes, node)

    def touch(self, offset: int, nbytes: int) -> None:
        """Make these bytes present, in huge pages where they are to be had. Other threads of Python go on."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.pointer + offset)
        if libc.madvise(address, ctypes.c_size_t(nbytes), ctypes.c_int(_POPULATE_WRITE)) != 0:
            self.tensor[offset : offset + nbytes : mmap.PAGESIZE] = 0  # an older kernel

    def pin(self, offset: int, nbytes: int, placement: Placement) -> None:
        """Register these bytes with the driver."""
        pointer = self.pointer + offset
        with cuda.current_context(placement):
            status = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _PORTABLE)
        if int(status) != 0:
            raise OutOfMemoryError(f"cudaHostRegister refused to pin {nbytes:,} bytes: {status}")
        self._pinned.append(pointer)

    def free(self) -> None:
        """Unregister everything and give the pages back to the system, also where a tensor still shows them."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())
        self._map.madvise(mmap.MADV_DONTNEED)
