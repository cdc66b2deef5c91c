"""Which NUMA node a GPU hangs on, and memory bound to it.

Pages are bound where they lie, by their address: no thread's affinity or memory policy is touched, so there is nothing
to restore.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

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
