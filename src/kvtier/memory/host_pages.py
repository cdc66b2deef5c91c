"""MappedMemory: host memory near a GPU, made resident and pinned piece by piece. node_of_gpu: the GPU's NUMA node.

The memory is one mapping of exactly the requested size (torch's pinned pool rounds up to a power of two):

    [ piece 0 | piece 1 | piece 2 | ... ]      each piece is touched, and then pinned
      ready     ready     pinning   mapped

`bind` sets the preferred NUMA node of pages that are touched later. It changes no affinity or policy of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from kvtier.errors import OutOfMemoryError
from kvtier.memory import cuda
from kvtier.memory.placement import Placement

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call number of mbind
_MPOL_PREFERRED = 1  # use other nodes if the preferred node is full
_ASK_SECONDS = 5.0  # timeout of nvidia-smi
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pci_address(placement: Placement) -> str:
    """Return the PCI address of the GPU, such as 0000:1b:00.0. The address does not depend on CUDA_VISIBLE_DEVICES."""
    properties = torch.cuda.get_device_properties(placement.torch)
    domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of_gpu(
    address: str, ask: Callable[[str], str] | None = None, devices: Path = _PCI_DEVICES
) -> tuple[int | None, str]:
    """Return a GPU's NUMA node and the source of the number (nvidia-smi or sysfs), or None and the reason."""
    # the output is "NUMA IDs of closest CPU: 1", or has a list, a range, or N/A in place of the number
    match = re.search(r":\s*(\d+)", (ask or _ask_nvidia_smi)(address))
    if match:
        return int(match[1]), "nvidia-smi"
    file = devices / address / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None, f"neither nvidia-smi nor {file} reports the NUMA node"
    return (node, "sysfs") if node >= 0 else (None, f"{file} contains {node}, so the NUMA node is unknown")


def _ask_nvidia_smi(address: str) -> str:
    command = ["nvidia-smi", "topo", "--get-numa-id-of-nearby-cpu", "--id", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
# Bytes per system call. During a call, other threads cannot map memory, and new threads cannot start. A thread took up
# to 1.1 s to start with calls for 256 MiB, and up to 0.13 s with 16 MiB (EPYC, virtual machine, 2026-11-19).
_TOUCH_BYTES = 16 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU's context


def map_memory(nbytes: int, *, huge_pages: bool = True) -> mmap.mmap:
    """Map anonymous memory. `huge_pages` requests huge pages. Pages become resident when they are touched."""
    try:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemoryError(f"could not map {nbytes:,} bytes of host memory: {error}") from error
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class MappedMemory:
    """Anonymous memory that becomes usable piece by piece. Not thread-safe."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self._map = map_memory(nbytes, huge_pages=huge_pages)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """All bytes. The tensor keeps the mapping alive."""
        self.nbytes = nbytes
        self._pinned: list[int] = []

    @property
    def pointer(self) -> int:
        return self.tensor.data_ptr()

    def bind(self, node: int) -> str | None:
        """Prefer this NUMA node for pages that are not yet resident. Return None, or the reason for a failure."""
        number = _MBIND.get(platform.machine())
        if number is None or not hasattr(os, "sched_getaffinity"):
            return f"memory binding is not supported on {platform.system()} {platform.machine()}"
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        libc = ctypes.CDLL(None, use_errno=True)
        # the kernel uses one bit less than the given length
        mask_and_length = (ctypes.addressof(mask), 64 * len(mask) + 1)
        arguments = (self.pointer, self.tensor.nbytes, _MPOL_PREFERRED, *mask_and_length, 0)
        if libc.syscall(number, *(ctypes.c_ulong(each) for each in arguments)) != 0:
            return f"the system refused to bind memory to node {node}: {os.strerror(ctypes.get_errno())}"
        return None

    def touch(self, offset: int, nbytes: int) -> None:
        """Make these bytes resident. They must not contain data yet. Releases the GIL."""
        libc = ctypes.CDLL(None, use_errno=True)
        for first in range(offset, offset + nbytes, _TOUCH_BYTES):
            stop = min(first + _TOUCH_BYTES, offset + nbytes)
            address, length = ctypes.c_void_p(self.pointer + first), ctypes.c_size_t(stop - first)
            if libc.madvise(address, length, ctypes.c_int(_POPULATE_WRITE)) != 0:
                self.tensor[first : stop : mmap.PAGESIZE] = 0  # write to each page, because madvise failed

    def pin(self, offset: int, nbytes: int, placement: Placement) -> None:
        pointer = self.pointer + offset
        with cuda.current_context(placement):
            status = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _PORTABLE)
        if int(status) != 0:
            raise OutOfMemoryError(f"cudaHostRegister refused to pin {nbytes:,} bytes: {status}")
        self._pinned.append(pointer)

    def free(self) -> None:
        """Unregister all pieces and return the pages to the system, even if a tensor still refers to them."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())
        self._map.madvise(mmap.MADV_DONTNEED)
