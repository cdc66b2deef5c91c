"""Loads and launches gather.cu: compiled by NVRTC on first use, per GPU architecture, in a fraction of a second.

CUDA C rather than Triton, because Triton takes no arrays by value: reading descriptors from pinned memory or
uploading them costs 1.7x to 5x torch.index_select on an H200, by-value parameters 1.0x to 1.1x (docs/log.md,
2026-11-15).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from kvtier.errors import CopyError, UnavailableError
from kvtier.memory.copy_plan import I64, any_of
from kvtier.memory.cuda import driver, driver_version, unwrap
from kvtier.memory.placement import Placement
from kvtier.memory.stream import Stream

_SMALL_PARAMETERS, _LARGE_PARAMETERS = 4096, 32764  # bytes; the larger from CUDA 12.1 on
_ROWS_STRUCT = struct.Struct("=3Q4I")  # the head of Rows<N>
_ROWS_HEADER, _PIECES_HEADER = _ROWS_STRUCT.size, 8
_LARGE_VERSION = 12010
_THREADS = 256
# Bytes one block of threads moves before it takes the next part of a piece: 256 threads x 4 loads x 16 bytes.
_PART_BYTES = 16 << 10
# Blocks in flight. Device to device: enough to fill 132 multiprocessors. Over PCIe a few saturate the link, and every
# further one is taken from the model. (H200, 2026-11-15)
_DEVICE_BLOCKS = 132 * 8
_LINK_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class _Kernel:
    function: Any
    capacity: int
    """Pieces that fit its parameters."""


@dataclass(frozen=True, slots=True)
class GatherKernels:
    """The compiled kernels of one GPU, smallest first."""

    rows: tuple[_Kernel, ...]
    pieces: tuple[_Kernel, ...]

    def copy(self, src: I64, dst: I64, nbytes: I64, stream: Stream, *, over_link: bool) -> int:
        """Copy independent pieces the GPU can address.

        `over_link`: one side is host memory. Returns the launches made.
        """
        rows = _as_rows(src, dst, nbytes)
        widest = int(np.maximum.reduce(nbytes)) if rows is None else rows.nbytes
        parts = max(1, min(64, widest // _PART_BYTES))
        threads = max(32, min(_THREADS, -(-widest // 16)))
        most_blocks = _LINK_BLOCKS if over_link else _DEVICE_BLOCKS
        kernels = self.pieces if rows is None else self.rows
        kernel = next((each for each in kernels if len(src) <= each.capacity), kernels[-1])
        starts = range(0, len(src), kernel.capacity)
        for start in starts:
            part = slice(start, start + kernel.capacity)
            if rows is None:
                parameters = _piece_parameters(src[part], dst[part], nbytes[part], parts, kernel.capacity)
            else:
                parameters = _row_parameters(rows, part, parts, kernel.capacity)
            count = min(kernel.capacity, len(src) - start)
            _launch(kernel, min(most_blocks, count * parts), threads, parameters, stream)
        return len(starts)


@dataclass(slots=True)
class _Rows:
    """Pieces of one size, as offsets from two bases that are multiples of 1 << shift."""

    src_base: int
    dst_base: int
    nbytes: int
    shift: int
    src: I64
    dst: I64


def _as_rows(src: I64, dst: I64, nbytes: I64) -> _Rows | None:
    """The compact form, if all sizes are equal and the offsets fit 32 bits."""
    size = nbytes[0]
    if any_of(nbytes != size):
        return None
    src_base, dst_base = np.minimum.reduce(src), np.minimum.reduce(dst)
    src_offset, dst_offset = src - src_base, dst - dst_base
    used = int(np.bitwise_or.reduce(src_offset) | np.bitwise_or.reduce(dst_offset)) | 16  # bits set in any offset
    shift = (used & -used).bit_length() - 1
    if used >> shift >= 1 << 32:
        return None
    return _Rows(int(src_base), int(dst_base), int(size), shift, src_offset, dst_offset)


def _row_parameters(rows: _Rows, part: slice, parts: int, capacity: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    src, dst = rows.src[part], rows.dst[part]
    count, first = len(src), _ROWS_HEADER // 4
    block = np.empty(first + 2 * capacity, np.uint32)
    _ROWS_STRUCT.pack_into(block.data, 0, rows.src_base, rows.dst_base, rows.nbytes, count, parts, rows.shift, 0)
    np.right_shift(src, rows.shift, out=block[first : first + count], casting="unsafe")
    np.right_shift(dst, rows.shift, out=block[first + capacity : first + capacity + count], casting="unsafe")
    return block


def _piece_parameters(src: I64, dst: I64, nbytes: I64, parts: int, capacity: int) -> np.ndarray[Any, Any]:
    block = np.empty(1 + 3 * capacity, np.int64)
    block[:1].view(np.uint32)[:] = (len(src), parts)
    pieces = block[1 : 1 + 3 * len(src)].reshape(-1, 3)
    pieces[:, 0], pieces[:, 1], pieces[:, 2] = src, dst, nbytes
    return block


def _launch(kernel: _Kernel, blocks: int, threads: int, parameters: np.ndarray[Any, Any], stream: Stream) -> None:
    # the driver copies the parameters before it returns; kernelParams is an array of their addresses, here of one
    address = ctypes.c_void_p(parameters.ctypes.data)
    status = driver().cuLaunchKernel(
        kernel.function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, ctypes.addressof(address), 0
    )[0]  # fmt: skip
    if int(status) != 0:
        raise CopyError(f"launching the gather kernel on {blocks} blocks of {threads} threads failed: {status.name}")


@functools.cache
def gather_kernels(placement: Placement) -> GatherKernels:
    """The kernels for a GPU; compiles them on first use. UnavailableError says why it cannot."""
    large = driver_version() >= _LARGE_VERSION and torch.cuda.get_device_capability(placement.torch)[0] >= 7
    limits = [("small", _SMALL_PARAMETERS)] + ([("large", _LARGE_PARAMETERS)] if large else [])
    capacity = {
        **{f"rows_{name}": (limit - _ROWS_HEADER) // 8 for name, limit in limits},
        **{f"pieces_{name}": (limit - _PIECES_HEADER) // 24 for name, limit in limits},
    }
    with torch.cuda.device(placement.torch):
        torch.cuda.current_stream().synchronize()  # makes the context current on this thread
        module = unwrap(driver().cuModuleLoadData(_compile(placement, capacity)))
        kernels = {
            name: _Kernel(unwrap(driver().cuModuleGetFunction(module, name.encode())), count)
            for name, count in capacity.items()
        }
    by_form = {form: tuple(kernels[f"{form}_{name}"] for name, _ in limits) for form in ("rows", "pieces")}
    return GatherKernels(by_form["rows"], by_form["pieces"])


def _compile(placement: Placement, defines: dict[str, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnavailableError("cuda-bindings is not installed: pip install 'kvtier[cuda]'") from error
    source = resources.files("kvtier.memory").joinpath("gather.cu").read_bytes()
    major, minor = torch.cuda.get_device_capability(placement.torch)
    options = [
        f"--gpu-architecture=sm_{major}{minor}",
        "--std=c++17",
        *(f"-D{name.upper()}={value}" for name, value in defines.items()),
    ]
    try:
        _, program = nvrtc.nvrtcCreateProgram(source, b"gather.cu", 0, [], [])
    except RuntimeError as error:  # cuda-bindings raises it when the NVRTC library cannot be loaded
        raise UnavailableError(f"NVRTC, which compiles the gather kernel, cannot be loaded: {error}") from error
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnavailableError(
            f"NVRTC cannot compile the gather kernel for sm_{major}{minor}: {log.decode(errors='replace')}"
        )
    binary = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])  # written in place
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(program)
    return binary
