"""Copy paths: four ways to copy pieces (byte ranges), and functions that find the usable paths for a set of pieces.

host     compiled copier, several threads           from host to host
loop     one copy after another                     any memory; the only path that keeps the order of pieces
driver   cuMemcpyBatchAsync                         to or from a GPU; not during the capture of a CUDA graph
gather   a kernel that reads and writes all pieces  within a GPU, or between a GPU and pinned host memory
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from kvtier.errors import CopyError, UnavailableError
from kvtier.memory import cuda
from kvtier.memory.copy_plan import I64, NBYTES, CopyPlan
from kvtier.memory.gather import gather_kernels
from kvtier.memory.native import native
from kvtier.memory.placement import Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Stream

PathName = Literal["host", "loop", "driver", "gather"]
PATH_NAMES: tuple[PathName, ...] = get_args(PathName)
Direction = tuple[Placement, Placement]


@dataclass(slots=True)
class CopyContext:
    """Source, destination and stream of a set of pieces. Without a stream, the host copies the pieces immediately."""

    src: Placement
    dst: Placement
    stream: Stream | None
    capturing: bool = False
    """True while the stream is captured in a CUDA graph."""
    blocks: int | None = None
    """Maximum number of thread blocks of the gather kernel. If None, gather.py chooses the number by direction."""

    @property
    def on_device(self) -> bool:
        return self.src.is_device or self.dst.is_device

    @property
    def over_link(self) -> bool:
        """True if at least one side is host memory."""
        return not (self.src.is_device and self.dst.is_device)

    def __str__(self) -> str:
        return f"{self.src} to {self.dst}"


@dataclass(slots=True)
class Pieces:
    """A table of copies to run (rows SRC, DST, NBYTES), and the plan that contains these copies."""

    table: I64
    plan: CopyPlan | None = None
    ids: I64 | None = None
    """The index of each piece in `plan`; None if the table contains all pieces of the plan, in order."""

    def __len__(self) -> int:
        return len(self.table[0])

    @property
    def nbytes(self) -> int:
        if self.plan is None or self.ids is not None:
            return int(np.add.reduce(self.table[NBYTES]))
        return self.plan.nbytes

    def part(self, chosen: slice | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Pieces:
        ids = np.arange(len(self)) if self.ids is None else self.ids
        # native code needs contiguous rows, but indexing with a mask would make the columns contiguous instead
        table = self.table[:, chosen] if isinstance(chosen, slice) else self.table.compress(chosen, axis=1)
        return Pieces(table, self.plan, ids[chosen])


def why_not(path: PathName, job: CopyContext) -> str | None:
    """Return the reason why `path` cannot run `job`, or None if `path` is usable."""
    if not job.on_device:
        if path == "host":
            return None if native().code is not None else native().reason
        return None if path == "loop" else f"{path} needs GPU memory on one side"
    if path == "host":
        return "the host copier cannot reach GPU memory"
    if path == "loop":
        return None  # the driver copies; if cuda-bindings is missing, torch copies
    try:
        cuda.driver()
        if path == "driver":
            if job.capturing:
                return "cuMemcpyBatchAsync cannot be captured in a CUDA graph"
            cuda.batch_call(_device(job))
        elif path == "gather":
            if "cpu" in (job.src.kind, job.dst.kind):
                return "a kernel cannot reach host memory that is not pinned"
            if not job.over_link and job.src != job.dst:
                return "a kernel cannot be assumed to reach another GPU's memory"
            gather_kernels(_device(job))
    except UnavailableError as error:
        return str(error)
    return None


def usable_paths(job: CopyContext) -> tuple[list[PathName], str]:
    """Return the usable paths for `job`, in order of preference, and the reasons that exclude other paths."""
    candidates: tuple[PathName, ...] = ("gather", "driver", "loop") if job.on_device else ("host", "loop")
    refusals = {path: why_not(path, job) for path in candidates}
    usable = [path for path, refusal in refusals.items() if refusal is None]
    return usable, "".join(f"no {path}: {refusal}; " for path, refusal in refusals.items() if refusal is not None)


def run_path(path: PathName, job: CopyContext, pieces: Pieces) -> PathName:
    """Copy pieces, and return the path used. Only "loop" allows dependent pieces. Raise CopyError if a copy fails."""
    if path == "loop":
        run_in_order(job, pieces)
    elif path == "host":
        code = native().code
        assert code is not None
        code.copy(pieces.table, pieces.nbytes)
    elif path == "gather":
        assert job.stream is not None
        kernels = gather_kernels(_device(job))
        kernels.copy(pieces.table, pieces.nbytes, job.stream, over_link=job.over_link, blocks=job.blocks)
    else:
        return _run_driver(job, pieces)
    return path


def run_in_order(job: CopyContext, pieces: Pieces) -> None:
    """Copy one piece after another. Pieces may depend on each other or overlap. Slow for many pieces."""
    columns = zip(*pieces.table.tolist(), strict=True)
    if not job.on_device:
        for src, dst, nbytes in columns:
            ctypes.memmove(dst, src, nbytes)
        return
    assert job.stream is not None
    if not cuda.has_driver():
        return _run_with_torch(job, pieces)
    for k, (src, dst, nbytes) in enumerate(columns):
        if _copy_one(job, src, dst, nbytes):
            _retry_parts(job, pieces, k)


def _copy_one(job: CopyContext, src: int, dst: int, nbytes: int) -> int:
    """Submit one copy and return its CUDA status."""
    assert job.stream is not None
    if abs(src - dst) >= nbytes:
        return cuda.memcpy_async(dst, src, nbytes, job.stream)
    # the driver does not support copies whose source overlaps the destination, so copy through scratch memory
    with torch.cuda.stream(job.stream.native):  # torch's pool reuses the scratch only after these copies
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=job.src.torch).data_ptr()
    return cuda.memcpy_async(scratch, src, nbytes, job.stream) or cuda.memcpy_async(dst, scratch, nbytes, job.stream)


def _retry_parts(job: CopyContext, pieces: Pieces, k: int) -> None:
    """Copy the entries of piece k one by one, because the driver refused the piece. Raise CopyError if an entry fails.

    Entries are the copies that were merged into a piece. The driver refuses a copy that spans two adjacent allocations.
    If each entry of such a piece lies in one allocation, the entries succeed.
    """
    plan = pieces.plan
    if plan is None:
        src, dst, nbytes = pieces.table[:, k].tolist()
        raise CopyError(f"copying {nbytes} bytes from {src:#x} to {dst:#x} failed")
    parts = plan.parts(k if pieces.ids is None else int(pieces.ids[k]))
    for entry in parts:
        src, dst, nbytes = plan.entries[:, entry].tolist()
        status = _copy_one(job, src, dst, nbytes)
        if status:
            index = plan.caller_entry(entry)
            raise CopyError(
                f"entry {index}: copying {nbytes} bytes from {src:#x} ({job.src}) to {dst:#x} ({job.dst}) failed "
                f"with CUDA status {status}; check that both addresses are valid for that many bytes",
                index=index,
            )


def _run_driver(job: CopyContext, pieces: Pieces) -> PathName:
    assert job.stream is not None
    failed = cuda.batch_call(_device(job)).submit(pieces.table, job.stream)
    if failed is not None:
        # `failed` is the first piece of the failed chunk. The pieces are independent, so it is safe to copy this
        # piece and all later ones one by one. This finds the invalid piece, or succeeds if merging caused the failure.
        run_in_order(job, pieces.part(slice(failed, None)))
        return "loop"
    return "driver"


def _run_with_torch(job: CopyContext, pieces: Pieces) -> None:
    """Copy with torch, at a higher cost per call. Used if cuda-bindings is missing."""
    assert job.stream is not None
    with torch.cuda.stream(job.stream.native):
        for src, dst, nbytes in zip(*pieces.table.tolist(), strict=True):
            source, target = MemoryRef(src, nbytes, job.src).tensor(), MemoryRef(dst, nbytes, job.dst).tensor()
            target.copy_(source.clone() if abs(src - dst) < nbytes else source, non_blocking=True)


def _device(job: CopyContext) -> Placement:
    return job.dst if job.dst.is_device else job.src
