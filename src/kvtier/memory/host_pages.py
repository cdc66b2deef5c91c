"""Host memory by NUMA node, mapped and pinned.

Which NUMA node a GPU hangs on, and memory bound to it.

Pages are bound where they lie, by their address: no thread's affinity or memory policy is touched, so there is nothing
to restore.

Mapped memory, made present and registered with the driver piece by piece.

One mapping of exactly the bytes asked for (torch's pinned pool rounds up to a power of two), none of it present:

    [ piece 0 | piece 1 | piece 2 | ... ]      each: bind to the NUMA node, touch, register as pinned
      ready     ready     at work   mapped
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
from kvtier.memory import cuda, host_pages
from kvtier.memory.placement import Placement

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_PREFERRED = 1  # fall back to other nodes rather than fail when this one is full
_ASK_SECONDS = 5.0
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pci_address(placement: Placement) -> str:
    """The GPU's place on the bus, such as 0000:1b:00.0: the same for nvidia-smi and sysfs, whatever is visible."""
    found = torch.cuda.get_device_properties(placement.torch)
    domain, bus, device = (getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of_gpu(
    address: str, ask: Callable[[str], str] | None = None, devices: Path = _PCI_DEVICES
) -> tuple[int | None, str]:
    """The NUMA node next to the GPU at this PCI address, and who said so: nvidia-smi, else sysfs."""
    told = _first_number((ask or _ask_nvidia_smi)(address))
    if told is not None:
        return told, "nvidia-smi"
    file = devices / address / "numa_node"
    try:
        told = int(file.read_text())
    except (OSError, ValueError):
        return None, f"nvidia-smi does not say, nor does {file}"
    return (told, "sysfs") if told >= 0 else (None, f"{file} says {told}: this machine has one node")


def bind(pointer: int, nbytes: int, node: int) -> str | None:
    """Prefer this node for pages of [pointer, pointer + nbytes) that are not there yet. Returns why not, or None."""
    number = _MBIND.get(platform.machine())
    if number is None or not hasattr(os, "sched_getaffinity"):
        return f"no memory binding known for {platform.system()} {platform.machine()}"
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # the kernel takes one bit less than it is told
    arguments = (pointer, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), 64 * len(mask) + 1, 0)
    if libc.syscall(number, *(ctypes.c_ulong(each) for each in arguments)) != 0:
        return f"the system refused to bind memory to node {node}: {os.strerror(ctypes.get_errno())}"
    return None


def _ask_nvidia_smi(address: str) -> str:
    command = ["nvidia-smi", "topo", "--get-numa-id-of-nearby-cpu", "--id", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _first_number(told: str) -> int | None:
    """ "NUMA IDs of closest CPU: 1" is 1; a list or a range, its first; "N/A" is nothing."""
    found = re.search(r":\s*(\d+)", told)
    return int(found[1]) if found else None


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
        return host_pages.bind(self.pointer, self.tensor.nbytes, node)

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
