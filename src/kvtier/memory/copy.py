"""Copying, clearing and matching whole Buffers, at once or on a stream. Many small pieces are BatchCopy's work."""

from __future__ import annotations

import ctypes
from typing import overload

import torch

from kvtier.errors import ArgumentError, DTypeError, RangeError
from kvtier.memory import packing
from kvtier.memory.buffer import Buffer
from kvtier.memory.launch import choose_stream, launch
from kvtier.memory.placement import Placement
from kvtier.memory.stream import Stream
from kvtier.memory.torch_types import AnyDType


@overload
def copy(src: Buffer, n: Buffer, dst: None = None, stream: Stream | None = None) -> Buffer: ...
@overload
def copy(src: Buffer, n: int, dst: Buffer, stream: Stream | None = None) -> Buffer: ...
def copy(src: Buffer, n: int | Buffer, dst: Buffer | None = None, stream: Stream | None = None) -> Buffer:
    """`copy(src, dst)` copies everything, `copy(src, n, dst)` the first n elements. Returns the rest of dst.

    Runs in the order of `stream`, else of the current one; host memory without a stream is copied before this returns.
    Overlapping ranges of one memory come out as if the source had been read first. Same shape of call as BatchCopy.
    """
    if isinstance(n, Buffer):
        if dst is not None:
            raise ArgumentError("copy() was given two destinations; use copy(src, dst) or copy(src, n, dst)")
        if src.size != n.size:
            raise RangeError(
                f"copy(src, dst) needs equal sizes, got {src.size} and {n.size}; copy(src, n, dst) copies a part"
            )
        return _copy(src, src.size, n, stream)
    if dst is None:
        raise ArgumentError("copy(src, n, dst) needs a destination")
    return _copy(src, n, dst, stream)


def _copy(src: Buffer, n: int, dst: Buffer, stream: Stream | None) -> Buffer:
    check_copy(src, n, dst)
    if n == 0:
        return rest(dst, 0)
    chosen = choose_stream(stream, src.placement, dst.placement)
    on_device = src.placement.is_device or dst.placement.is_device
    mask = packing.tail_mask(src.dtype, n)
    a, b = src.slice(0, n).bytes_tensor(), dst.slice(0, n).bytes_tensor(write=True)

    def work() -> None:
        if mask == 0xFF:
            _copy_bytes(a, b, on_device)
            return
        # the last byte also holds elements past n, which stay as they are
        last = (a[-1:].to(b.device) & mask) | (b[-1:] & (0xFF ^ mask))
        _copy_bytes(a[:-1], b[:-1], on_device)
        b[-1:].copy_(last)

    launch(work, chosen, on_device=on_device, holdings=[src.holding, dst.holding])
    return rest(dst, n)


def rest(dst: Buffer, n: int) -> Buffer:
    """The elements of `dst` from `n` on.

    Those of a packed type that start inside a byte have no address: none, then.
    """
    if n * dst.dtype.bits % 8:
        return Buffer(dtype=dst.dtype, placement=dst.placement)
    return dst.slice(n)


def check_copy(src: Buffer, n: int, dst: Buffer) -> None:
    """Raise unless the first `n` elements of `src` can be copied over the first `n` of `dst`."""
    if src.dtype != dst.dtype:
        raise DTypeError(f"cannot copy {src.dtype} elements into a Buffer of {dst.dtype}; view() one of them first")
    src.data_or(0)  # raises if closed
    if not 0 <= n <= min(src.size, dst.size):
        raise RangeError(f"cannot copy {n} elements from a Buffer of {src.size} into one of {dst.size}")


def clear(buffer: Buffer, stream: Stream | None = None) -> None:
    """Write zero into every element, in the order of `stream` (or the current one)."""
    if buffer.size:
        buffer.fill(0, stream)


def empty_like(buffer: Buffer, dtype: AnyDType | None = None, placement: Placement | str | None = None) -> Buffer:
    """An uninitialised Buffer of the same size; other element type, other placement, or both, on request."""
    return Buffer(
        buffer.size,
        buffer.dtype if dtype is None else dtype,
        buffer.placement if placement is None else placement,
    )


def _copy_bytes(a: torch.Tensor, b: torch.Tensor, on_device: bool) -> None:
    nbytes = a.numel()
    overlap = a.data_ptr() < b.data_ptr() + nbytes and b.data_ptr() < a.data_ptr() + nbytes
    if not overlap:
        b.copy_(a, non_blocking=True)
    elif on_device:
        b.copy_(a.clone(), non_blocking=True)
    else:
        ctypes.memmove(b.data_ptr(), a.data_ptr(), nbytes)
