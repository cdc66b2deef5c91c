"""Load and launch gather.cu. On first use on a GPU, NVRTC compiles the file in a fraction of a second.

The kernel receives the addresses of the pieces by value, in its launch parameters. Triton cannot pass arrays by value,
so the kernel is in CUDA C. On an H200, a copy takes 1.0x to 1.1x the time of torch.index_select. If the addresses are
uploaded first, or read from pinned memory, a copy takes 1.7x to 5x that time (docs/decisions/0007, 2026-11-15).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch

from kvtier.errors import CopyError, UnavailableError
from kvtier.memory.copy_plan import I64, NBYTES, any_of
from kvtier.memory.cuda import current_context, driver, driver_version, launch_kernel, relaxed_capture, unwrap
from kvtier.memory.native import U32, address_of, native
from kvtier.memory.placement import Placement
from kvtier.memory.stream import Stream

_SMALL_PARAMETERS, _LARGE_PARAMETERS = 4096, 32764  # bytes; the large limit exists since CUDA 12.1
_ROWS_HEADER, _PIECES_HEADER = 40, 8  # bytes before the arrays of Rows<N> and Pieces<N> (structs in gather.cu)
_PARTS_AT_ROWS, _PARTS_AT_PIECES = 7, 1  # position of the field `parts` in Rows<N> and Pieces<N>, in 4-byte words
_LARGE_VERSION = 12010  # driver version of CUDA 12.1
_THREADS = 256
# A piece is divided into parts of about this many bytes, but into at most 64 parts. A thread block copies this many
# bytes in one pass: 256 threads x 4 loads x 16 bytes.
_PART_BYTES = 16 << 10
# Maximum numbers of thread blocks. For copies on the device: 8 for each of the 132 multiprocessors of an H200. Over
# PCIe, a few thread blocks saturate the link, and more would take multiprocessors from the model (H200, 2026-11-15).
_DEVICE_BLOCKS = 132 * 8
_LINK_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class _Kernel:
    function: int
    capacity: int
    """Number of pieces that fit into the parameters."""
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class GatherKernels:
    """The compiled kernels of one GPU, by form of the parameters (see gather.cu). Each tuple is sorted by capacity."""

    rows: tuple[_Kernel, ...]
    pieces: tuple[_Kernel, ...]

    def copy(self, table: I64, nbytes: int, stream: Stream, *, over_link: bool, blocks: int | None = None) -> None:
        """Copy the pieces in `table`, one per column (rows SRC, DST, NBYTES). `nbytes` is their total size.

        The GPU must be able to address the pieces. They may be copied in any order. `over_link` is True if one side is
        host memory. `blocks` is the maximum number of thread blocks.
        """
        most_blocks = blocks or (_LINK_BLOCKS if over_link else _DEVICE_BLOCKS)
        count = table.shape[1]
        compact = int(table[NBYTES, 0]) * count == nbytes  # if False, the sizes differ
        code, start = native().code, 0
        fill_compact, fill_general = (code.fill_rows, code.fill_pieces) if code else (fill_rows, fill_pieces)
        while start < count:
            kernels = self.rows if compact else self.pieces
            kernel = kernels[0] if count - start <= kernels[0].capacity else kernels[-1]
            part = table[:, start : start + kernel.capacity]
            block = np.empty(kernel.parameter_bytes // 4, np.uint32)
            widest = (fill_compact if compact else fill_general)(part, kernel.capacity, block)
            if not widest:  # sizes differ, or offsets exceed 32 bits: use `self.pieces` for this and all later parts
                compact = False
                continue
            parts = max(1, min(64, widest // _PART_BYTES))
            block[_PARTS_AT_ROWS if compact else _PARTS_AT_PIECES] = parts
            threads = max(32, min(_THREADS, -(-widest // 16)))
            launch_kernel(kernel.function, min(most_blocks, part.shape[1] * parts), threads, address_of(block), stream)
            start += part.shape[1]


def fill_rows(table: I64, capacity: int, block: U32) -> int:
    """Write pieces of equal size to `block` in the form Rows<capacity> of gather.cu. The field `parts` is not written.

    Return the size of a piece, or 0 if the pieces do not fit this form.
    """
    at, nbytes = table[:NBYTES], table[NBYTES]
    if any_of(nbytes != nbytes[0]):
        return 0
    bases = np.minimum.reduce(at, axis=1)
    offsets = at - bases[:, None]
    # The kernel counts offsets in units of 1 << shift bytes. The unit divides all offsets and is at most 16 bytes.
    used = int(np.bitwise_or.reduce(offsets, axis=None)) | 16
    shift = (used & -used).bit_length() - 1
    if used >> shift >= 1 << 32:
        return 0
    count = len(nbytes)
    block[:6].view(np.int64)[:] = (*bases, nbytes[0])
    block[6], block[8] = count, shift
    rows = block[_ROWS_HEADER // 4 :].reshape(2, capacity)[:, :count]
    np.right_shift(offsets, shift, out=rows, casting="unsafe")
    return int(nbytes[0])


def fill_pieces(table: I64, _capacity: int, block: U32) -> int:
    """Write pieces of any size to `block` in the form Pieces<capacity> of gather.cu. Return the largest size.

    The field `parts` is not written.
    """
    count = table.shape[1]
    block[0] = count
    pieces = block[2 : 2 + 6 * count].view(np.int64).reshape(count, 3)
    pieces[:] = table.T
    return int(np.maximum.reduce(table[NBYTES]))


@functools.cache
def gather_kernels(placement: Placement) -> GatherKernels:
    """Return the kernels for a GPU, compiled on first use. Raise UnavailableError if compiling or loading fails."""
    large = driver_version() >= _LARGE_VERSION and torch.cuda.get_device_capability(placement.torch)[0] >= 7
    limits = {"small": _SMALL_PARAMETERS, **({"large": _LARGE_PARAMETERS} if large else {})}
    forms = {"rows": (_ROWS_HEADER, 8), "pieces": (_PIECES_HEADER, 24)}  # bytes of the header, bytes per piece
    capacity = {
        f"{form}_{size}": (limit - head) // each
        for size, limit in limits.items()
        for form, (head, each) in forms.items()
    }
    binary = _compile(placement, capacity)
    try:
        with current_context(placement), relaxed_capture():  # the first use may be during a capture
            module = unwrap(driver().cuModuleLoadData(binary))
            functions = {name: int(unwrap(driver().cuModuleGetFunction(module, name.encode()))) for name in capacity}
    except CopyError as error:
        raise UnavailableError(f"the driver cannot load the gather kernel: {error}") from error

    def kernels(form: str) -> tuple[_Kernel, ...]:
        head, each = forms[form]
        names = [f"{form}_{size}" for size in limits]
        return tuple(_Kernel(functions[name], capacity[name], head + each * capacity[name]) for name in names)

    return GatherKernels(kernels("rows"), kernels("pieces"))


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
    except RuntimeError as error:  # cuda-bindings raises RuntimeError if the NVRTC library cannot be loaded
        raise UnavailableError(f"NVRTC, which compiles the gather kernel, cannot be loaded: {error}") from error
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnavailableError(
            f"NVRTC cannot compile the gather kernel for sm_{major}{minor}: {log.decode(errors='replace')}"
        )
    binary = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])  # nvrtcGetCUBIN fills it
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(program)
    return binary
