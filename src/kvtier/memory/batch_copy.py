"""copy(), clear() and empty_like() for single Buffers, and BatchCopy, which collects, merges and runs many copies."""

from __future__ import annotations

import ctypes
import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import torch

from kvtier.errors import ArgumentError, DTypeError, RangeError, StateError
from kvtier.memory import cuda, torch_types
from kvtier.memory.buffer import Buffer
from kvtier.memory.context import choose_stream, launch
from kvtier.memory.copy_paths import PATH_NAMES, Direction, PathName
from kvtier.memory.copy_plan import ALONE, DST, I64, NBYTES, SRC, any_of
from kvtier.memory.copy_steps import Chunk, CopyStep, plan_chunks, plan_steps, run_steps
from kvtier.memory.placement import Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Stream
from kvtier.memory.torch_types import AnyDType


@overload
def copy(src: Buffer, n: Buffer, dst: None = None, stream: Stream | None = None) -> Buffer: ...
@overload
def copy(src: Buffer, n: int, dst: Buffer, stream: Stream | None = None) -> Buffer: ...
def copy(src: Buffer, n: int | Buffer, dst: Buffer | None = None, stream: Stream | None = None) -> Buffer:
    """Copy all elements with `copy(src, dst)`, or the first n with `copy(src, n, dst)`. Return the rest of `dst`.

    The copy runs in the order of `stream` (default: the current stream). If there is no stream, host memory is copied
    before this function returns. Overlapping ranges are copied as if the whole source were read first.
    """
    if isinstance(n, Buffer):
        if dst is not None:
            raise ArgumentError("copy() was given two destinations; use copy(src, dst) or copy(src, n, dst)")
        if src.size != n.size:
            raise RangeError(
                f"copy(src, dst) needs equal sizes, got {src.size} and {n.size}; copy(src, n, dst) copies a part"
            )
        dst, n = n, src.size
    elif dst is None:
        raise ArgumentError("copy(src, n, dst) needs a destination")
    check_copy(src, n, dst)
    if n == 0:
        return rest(dst, 0)
    chosen = choose_stream(stream, src.placement, dst.placement)
    on_device = src.placement.is_device or dst.placement.is_device
    mask = torch_types.tail_mask(src.dtype, n)
    a, b = src.slice(0, n).bytes_tensor(), dst.slice(0, n).bytes_tensor(write=True)

    def work() -> None:
        if mask == 0xFF:
            _copy_bytes(a, b, on_device)
            return
        # the last byte also holds elements past n, which must not change
        last = (a[-1:].to(b.device) & mask) | (b[-1:] & (0xFF ^ mask))
        _copy_bytes(a[:-1], b[:-1], on_device)
        b[-1:].copy_(last)

    launch(work, chosen, on_device=on_device, holdings=[src.holding, dst.holding])
    return rest(dst, n)


def rest(dst: Buffer, n: int) -> Buffer:
    """Return `dst` without its first `n` elements, or an empty Buffer if element `n` starts inside a byte."""
    if n * dst.dtype.bits % 8:
        return Buffer(dtype=dst.dtype, placement=dst.placement)
    return dst.slice(n)


def check_copy(src: Buffer, n: int, dst: Buffer) -> None:
    """Raise if the first `n` elements of `src` cannot be copied to the first `n` elements of `dst`."""
    if src.dtype != dst.dtype:
        raise DTypeError(f"cannot copy {src.dtype} elements into a Buffer of {dst.dtype}; view() one of them first")
    src.data_or(0)  # raises if closed
    if not 0 <= n <= min(src.size, dst.size):
        raise RangeError(f"cannot copy {n} elements from a Buffer of {src.size} into a Buffer of {dst.size}")


def clear(buffer: Buffer, stream: Stream | None = None) -> None:
    """Set every element to zero, in the order of `stream` (default: the current stream)."""
    if buffer.size:
        buffer.fill(0, stream)


def empty_like(buffer: Buffer, dtype: AnyDType | None = None, placement: Placement | str | None = None) -> Buffer:
    """Return an uninitialised Buffer of the same size, optionally with another element type or placement."""
    return Buffer(buffer.size, dtype or buffer.dtype, placement or buffer.placement)


def _copy_bytes(a: torch.Tensor, b: torch.Tensor, on_device: bool) -> None:
    nbytes = a.numel()
    overlap = a.data_ptr() < b.data_ptr() + nbytes and b.data_ptr() < a.data_ptr() + nbytes
    if not overlap:
        b.copy_(a, non_blocking=True)
    elif on_device:
        b.copy_(a.clone(), non_blocking=True)
    else:
        ctypes.memmove(b.data_ptr(), a.data_ptr(), nbytes)


@dataclass(slots=True)  # not frozen: every batch creates one, and a frozen instance takes four times as long to create
class CopyResult:
    """Result of `BatchCopy.run()`."""

    num_calls: int
    """Number of copies added, including copies of zero bytes."""
    num_entries: int
    """Number of copies after merging, without copies of zero bytes."""
    nbytes: int
    num_waves: int
    """Number of waves. A wave is a group of independent copies, and waves run one after another."""
    steps: tuple[CopyStep, ...]
    """The steps in which the copies ran. Each step has a path and the reason for the path."""

    @property
    def merge_ratio(self) -> float:
        """`num_calls` divided by `num_entries`, or 1.0 if `num_entries` is 0."""
        return self.num_calls / self.num_entries if self.num_entries else 1.0

    @property
    def path(self) -> str:
        """Names of the paths that were used, joined by '+'."""
        return "+".join(dict.fromkeys(step.path for step in self.steps))

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(step.reason for step in self.steps))


class BatchCopy:
    """A batch of copies that are collected, merged and run together.

        with BatchCopy() as copy:              # runs the copies at the end, or discards them on an error
            with copy.group():                 # adjacent pieces become one copy
                end = copy(a, 4, dst)
                end = copy(b, 2, end)
            copy.pieces(src, src_at, 64, dst, dst_at)       # many copies, from arrays of element offsets
        print(copy.result.path, copy.result.merge_ratio)

    The result is the same as if the copies ran one after another. `path` forces a path ("host", "loop", "driver",
    "gather") where that path is usable. Without `path`, GPU copies use the fastest path in the cost table (costs.py).
    If the forced path is not usable, or there is no cost table, GPU copies use the first usable path of "gather",
    "driver" and "loop". Copies whose source overlaps their destination, and copies with too many dependencies, always
    use "loop". Buffers are kept alive until their copies are done. For memory that is given by address, and for copies
    that are captured in a CUDA graph, the caller must keep the memory alive. Not thread-safe.
    """

    def __init__(self, *, path: PathName | None = None) -> None:
        if path is not None and path not in PATH_NAMES:
            raise ArgumentError(f"unknown copy path {path!r}; choose one of {', '.join(PATH_NAMES)}")
        self.result: CopyResult | None = None
        """Result of the last `run()`."""
        self._forced = path
        self._scope = ALONE
        self._scopes = itertools.count()
        self._clear()

    def _clear(self) -> None:
        self._chunks: list[Chunk] = []
        self._single: list[tuple[int, int, int]] = []  # copies that are not yet in a chunk
        self._single_key: tuple[Direction, int] | None = None
        self._holdings: dict[int, MemoryRef] = {}

    # ---- collecting ----

    @overload
    def __call__(self, src: Buffer, n: int, dst: Buffer) -> Buffer: ...
    @overload
    def __call__(self, src: int, n: int, dst: int) -> int: ...
    def __call__(self, src: Buffer | int, n: int, dst: Buffer | int) -> Buffer | int:
        """Add a copy of n elements (of Buffers) or n bytes (at addresses). Returns the rest of the destination."""
        n = operator.index(n)
        if isinstance(src, Buffer) and isinstance(dst, Buffer):
            check_copy(src, n, dst)
            if n:
                self._check_tail(src, n, dst)
                self._keep(src, dst)
                self._add(src.data(), dst.data(), src.dtype.nbytes(n), (src.placement, dst.placement))
            else:
                self._add(0, 0, 0, (src.placement, dst.placement))
            return rest(dst, n)
        if isinstance(src, int | np.integer) and isinstance(dst, int | np.integer):
            src, dst = int(src), int(dst)
            if n < 0 or (n and min(src, dst) <= 0):
                raise RangeError(f"cannot copy {n} bytes from address {src:#x} to address {dst:#x}")
            self._add(src, dst, n, (cuda.placement_of(src), cuda.placement_of(dst)))
            return dst + n
        raise ArgumentError(
            "source and destination must both be Buffers or both addresses, "
            f"got {type(src).__name__} and {type(dst).__name__}"
        )

    def pieces(self, src: Buffer, src_at: Any, n: Any, dst: Buffer, dst_at: Any) -> None:
        """Add many copies of n elements each, from offsets `src_at` in `src` to offsets `dst_at` in `dst`.

        `src_at` and `dst_at` are arrays or lists of element offsets. n is a number or an array. Adjacent pieces merge.
        """
        check_copy(src, 0, dst)
        table = _table(src_at, n, dst_at, "src_at", "n", "dst_at")
        if not table.shape[1]:
            return
        _check_bounds(table, src.size, dst.size)
        _writable(dst)
        element = src.dtype
        if element.is_packed:
            if int(np.bitwise_or.reduce(table, axis=None)) % element.per_byte:
                raise ArgumentError(
                    f"offsets and counts of {element} pieces must be multiples of {element.per_byte}, "
                    "so that each piece consists of whole bytes"
                )
            table //= element.per_byte
        elif element.item_bytes > 1:
            table *= element.item_bytes
        if src and dst:
            self._keep(src, dst)
        table[SRC] += src.data_or(0)  # an empty Buffer allows copies of zero elements
        table[DST] += dst.data_or(0)
        has_empty = bool(np.count_nonzero(table[NBYTES]) < table.shape[1])
        self._add_chunk(table, (src.placement, dst.placement), has_empty=has_empty)

    def pointers(
        self,
        src: Any,
        nbytes: Any,
        dst: Any,
        *,
        src_placement: Placement | str | None = None,
        dst_placement: Placement | str | None = None,
        keep: Iterable[Buffer] = (),
    ) -> None:
        """Add many copies, given as arrays of addresses. `nbytes` is one number or an array.

        All sources must have the same placement. All destinations must have the same placement. The defaults are the
        placements that the driver reports for the first addresses. Bounds are not checked. Buffers in `keep` are kept
        alive until the copies are done.
        """
        table = _table(src, nbytes, dst, "src", "nbytes", "dst")
        if not table.shape[1]:
            return
        lowest = int(np.minimum.reduce(table, axis=None))
        if lowest <= 0:
            _check_addresses(table)
        places = (
            cuda.placement_of(int(table[SRC, 0])) if src_placement is None else Placement.parse(src_placement),
            cuda.placement_of(int(table[DST, 0])) if dst_placement is None else Placement.parse(dst_placement),
        )
        self._keep(*keep)
        self._add_chunk(table, places, has_empty=lowest <= 0)

    def table(
        self,
        table: I64,
        *,
        src_placement: Placement,
        dst_placement: Placement,
        keep: Iterable[MemoryRef] = (),
        nbytes: int | None = None,
    ) -> None:
        """Add many copies as one array of three rows: source addresses, destination addresses, byte counts.

        Nothing is checked, and the array is not copied. `nbytes` is the total size. A batch that consists of one table
        with `nbytes` runs without planning. Pass `nbytes` only if the copies are independent, not empty, sorted by
        destination and not mergeable.
        """
        count = table.shape[1]
        if count:
            for holding in keep:
                self._holdings[id(holding)] = holding
            has_empty = nbytes is None and bool(np.count_nonzero(table[NBYTES]) < count)
            self._add_chunk(table, (src_placement, dst_placement), has_empty=has_empty, nbytes=nbytes)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Merge copies that are added inside the `with` statement and are adjacent in source and destination.

        The order of addition does not matter if the copies are independent.
        """
        if self._scope != ALONE:
            raise StateError("groups do not nest: leave the open group() first")
        self._scope = next(self._scopes)
        try:
            yield
        finally:
            self._scope = ALONE

    # ---- running ----

    def run(self) -> CopyResult:
        """Run all copies in the order of the current stream, and clear the batch.

        On a stream, copies may still be in flight when this method returns. Raises StateError inside an open `group`.
        Any other exception discards the batch.
        """
        if self._scope != ALONE:
            raise StateError("run() was called inside an open group(); leave the group first")
        if self._single:
            self._flush_singles()
        chunks, holdings = self._chunks, list(self._holdings.values())
        self._clear()
        if not chunks:
            self.result = CopyResult(0, 0, 0, 0, ())
            return self.result
        plan, directions = plan_chunks(chunks)
        stream = choose_stream(None, *itertools.chain.from_iterable(directions[0]))
        if stream is None or not stream.placement.is_device:
            steps = plan_steps(plan, directions, stream, self._forced)
            run_steps(steps, stream, holdings)
        else:
            with cuda.current_context(stream.placement):
                steps = plan_steps(plan, directions, stream, self._forced)
                run_steps(steps, stream, holdings)
        num_calls = sum([chunk.table.shape[1] for chunk in chunks])
        self.result = CopyResult(num_calls, plan.num_pieces, plan.nbytes, plan.num_waves, steps)
        return self.result

    def discard(self) -> None:
        """Drop all copies that were added and have not run. An open group stays open."""
        self._clear()

    def __len__(self) -> int:
        return len(self._single) + sum(len(chunk.table[0]) for chunk in self._chunks)

    def __bool__(self) -> bool:
        return True  # otherwise `__len__` would make an empty batch falsy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if error is None:
            self.run()
        else:
            self.discard()

    def __del__(self) -> None:
        if getattr(self, "_chunks", None) or getattr(self, "_single", None):
            warnings.warn(
                f"a BatchCopy with {len(self)} copies was dropped without run() or discard()",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- helpers ----

    def _add(self, src: int, dst: int, nbytes: int, direction: Direction) -> None:
        key = (direction, self._scope)
        if key != self._single_key:
            self._flush_singles()
            self._single_key = key
        self._single.append((src, dst, nbytes))

    def _flush_singles(self) -> None:
        if self._single and self._single_key is not None:
            table = np.array(self._single, np.int64)
            direction, scope = self._single_key
            has_empty = bool(np.count_nonzero(table[:, NBYTES]) < len(table))
            self._chunks.append(Chunk(np.ascontiguousarray(table.T), direction, scope, has_empty))
        self._single, self._single_key = [], None

    def _add_chunk(self, table: I64, direction: Direction, *, has_empty: bool, nbytes: int | None = None) -> None:
        self._flush_singles()
        scope = next(self._scopes) if self._scope == ALONE else self._scope
        self._chunks.append(Chunk(table, direction, scope, has_empty, nbytes))

    def _keep(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            self._holdings[id(buffer.holding)] = buffer.holding

    def _check_tail(self, src: Buffer, n: int, dst: Buffer) -> None:
        _writable(dst)
        # no other element can share the last byte of the Buffer if the Buffer ends at the end of its memory
        at_the_end = n == dst.size and dst.raw_data() + dst.nbytes == dst.holding.pointer + dst.holding.nbytes
        if n * src.dtype.bits % 8 and not at_the_end:
            raise ArgumentError(
                f"{n} elements of {src.dtype} end inside a byte that other elements may share; "
                f"copy a multiple of {src.dtype.per_byte}, or use kvtier.memory.copy()"
            )


def _integers(name: str, values: Any) -> I64:
    """Return an array argument as int64. Tensors and arrays are never converted element by element."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return np.ascontiguousarray(values)
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{name} must be whole numbers, got {array.dtype}")
    if array.ndim != 1:
        raise ArgumentError(f"{name} must be one-dimensional, got shape {array.shape}")
    return np.ascontiguousarray(array, np.int64)


def _table(src: Any, n: Any, dst: Any, src_name: str, n_name: str, dst_name: str) -> I64:
    """Return a new table (rows SRC, DST, NBYTES). `n` is one size for all pieces, or one size per piece."""
    sources, targets = _integers(src_name, src), _integers(dst_name, dst)
    sizes = int(n) if isinstance(n, int | np.integer) else _integers(n_name, n)
    count = len(sources)
    if len(targets) != count or not (isinstance(sizes, int) or len(sizes) == count):
        num_sizes = 1 if isinstance(sizes, int) else len(sizes)
        raise ArgumentError(
            f"each piece needs a source, a destination and a size, got {count}, {len(targets)} and {num_sizes} of them"
        )
    table = np.empty((3, count), np.int64)
    table[SRC], table[DST], table[NBYTES] = sources, targets, sizes
    return table


def _check_addresses(table: I64) -> None:
    src, dst, nbytes = table
    wrong = (nbytes < 0) | ((nbytes > 0) & ((src <= 0) | (dst <= 0)))
    bad = int(np.argmax(wrong))
    if wrong[bad]:
        raise RangeError(f"piece {bad}: cannot copy {nbytes[bad]} bytes from {src[bad]:#x} to {dst[bad]:#x}")


def _check_bounds(table: I64, src_size: int, dst_size: int) -> None:
    src, dst, counts = table
    if (
        np.minimum.reduce(table, axis=None) < 0
        or any_of(src > src_size - counts)  # not src + counts, which may overflow
        or any_of(dst > dst_size - counts)
    ):
        wrong = (src < 0) | (dst < 0) | (counts < 0) | (src > src_size - counts) | (dst > dst_size - counts)
        bad = int(np.argmax(wrong))
        raise RangeError(
            f"piece {bad}: cannot copy {counts[bad]} elements from offset {src[bad]} in a Buffer of {src_size} "
            f"to offset {dst[bad]} in a Buffer of {dst_size}"
        )


def _writable(dst: Buffer) -> None:
    if dst.readonly:
        raise ArgumentError("the destination Buffer wraps read-only memory; copy into a new Buffer")
