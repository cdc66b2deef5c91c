"""warp and append: copy rows from the order of one batch to the order of the next batch.

The names are from LMDeploy's engine TurboMind. The suffix 0 stands for the old order, the suffix 1 for the new order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.errors import ArgumentError, DTypeError, RangeError
from kvtier.memory import BatchCopy, Buffer, empty_like
from kvtier.memory.interop import hold_tensor
from kvtier.memory.native import native
from kvtier.memory.region import MemoryRef
from kvtier.state.permutation import I64, Permutation, find_runs


class Added(NamedTuple):
    """Elements to add: indices of the rows, index of the first new element in each row, and number of new elements."""

    rows: Any
    first: Any
    count: Any


class Rows:
    """A tensor as rows of memory. Error messages use `name`. The reference `holding` keeps the memory alive."""

    __slots__ = ("address", "end", "holding", "name", "num_rows", "placement", "row_bytes", "row_kind", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor, holding: MemoryRef | None = None) -> None:
        shape = tensor.shape
        if not shape:
            raise ArgumentError(f"{name} must have rows, got a tensor without dimensions")
        self.name = name
        self.tensor = tensor
        self.holding = hold_tensor(tensor) if holding is None else holding
        self.placement = self.holding.placement
        self.address = self.holding.pointer
        self.num_rows = shape[0]
        self.row_bytes = self.holding.nbytes // self.num_rows if self.num_rows else 0
        self.end = self.address + self.num_rows * self.row_bytes  # address after the last row
        self.row_kind = tensor.dtype, shape[1:]

    def must_match(self, other: Rows) -> None:
        """Raise if the rows of both tensors differ in type or shape."""
        if self.row_kind == other.row_kind:
            return
        (mine, my_shape), (theirs, their_shape) = self.row_kind, other.row_kind
        if mine != theirs:
            raise DTypeError(f"{self.name} has the type {mine}, but {other.name} has {theirs}")
        raise ArgumentError(f"rows of {self.name} are {tuple(my_shape)}, rows of {other.name} are {tuple(their_shape)}")

    def must_be_apart(self, other: Rows) -> None:
        """Raise if both tensors overlap in memory, because a row could then be overwritten before it is read."""
        if self.address < other.end and other.address < self.end:
            raise ArgumentError(f"{self.name} and {other.name} overlap in memory; use another tensor")

    def must_hold(self, count: int, what: str) -> None:
        if self.num_rows < count:
            raise RangeError(f"{self.name} has {self.num_rows} rows, but {what} needs {count}")


def warp(
    a0: torch.Tensor,
    perm: Permutation,
    b1: torch.Tensor,
    copy: BatchCopy,
    *,
    new: torch.Tensor | None = None,
    in_place: bool = False,
) -> None:
    """Add to `copy` the copies that set b1[i] to a0[perm.index[i]] if row i is old, and to new[i] if it is new.

    Without `new`, new rows of b1 are not changed. With `in_place`, a0 and b1 must be the same tensor, and rows that
    keep their place are not copied. Otherwise a0 and b1 must not overlap.
    """
    if (a0.data_ptr() == b1.data_ptr()) != in_place and a0.numel() and b1.numel():
        raise ArgumentError("in_place must be True if a0 and b1 are the same tensor, and False otherwise")
    old, out = Rows("a0", a0), Rows("b1", b1)
    if not in_place:
        old.must_be_apart(out)
    warp_rows(old, perm, out, copy, new=new, in_place=in_place)


def warp_rows(
    old: Rows, perm: Permutation, out: Rows, copy: BatchCopy, *, new: torch.Tensor | None = None, in_place: bool = False
) -> None:
    old.must_match(out)
    old.must_hold(perm.size0, "the old order")
    out.must_hold(len(perm), "the new order")
    fresh = None if new is None else Rows("new", new)
    if fresh is not None:
        fresh.must_match(out)
        fresh.must_be_apart(out)
        fresh.must_hold(len(perm) if perm.num_new else 0, "the new order")
    if in_place:
        _warp_in_place(old, perm, fresh, copy)
    elif fresh is None or fresh.placement == old.placement:
        _add_warp(perm, old, fresh, out, copy)
    else:
        _add_warp(perm, old, None, out, copy)
        _add_warp(perm, None, fresh, out, copy)


def warp_ragged(
    a0: torch.Tensor,
    offset0: Any,
    perm: Permutation,
    out: torch.Tensor,
    copy: BatchCopy,
    *,
    new: torch.Tensor,
    new_offset: Any,
) -> I64:
    """Warp packed rows of different lengths into `out`. Return the offset of each row in `out`, and the end offset.

    Row j of a0 is a0[offset0[j]:offset0[j+1]], and row i of `new` is new[new_offset[i]:new_offset[i+1]].
    """
    old, fresh, packed = Rows("a0", a0), Rows("new", new), Rows("out", out)
    for rows_in in (old, fresh):
        rows_in.must_match(packed)
        rows_in.must_be_apart(packed)
    starts0 = _offsets("offset0", offset0, perm.size0, old.num_rows)
    starts1 = _offsets("new_offset", new_offset, len(perm), fresh.num_rows)
    kept, source = ~perm.is_new, perm.index[~perm.is_new]
    begin, sizes = starts1[:-1].copy(), np.diff(starts1)
    begin[kept], sizes[kept] = starts0[source], np.diff(starts0)[source]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    packed.must_hold(int(offsets[-1]), "the new order")
    for source_rows, chosen in ((old, kept), (fresh, perm.is_new)):
        _add_rows(copy, source_rows, begin[chosen], sizes[chosen], packed, offsets[:-1][chosen])
    return offsets


def append(
    a0: torch.Tensor,
    a0_size: Any,
    b0: torch.Tensor,
    c1: torch.Tensor,
    c1_offset: Any,
    perm: Permutation,
    d1: torch.Tensor,
    copy: BatchCopy,
) -> I64:
    """Append one element to each old row, and copy each new row. Return the sizes of the rows in d1.

    The rows of a0 and d1 have a fixed capacity and are partly filled. If row i was the old row j, d1[i] becomes
    a0[j][:a0_size[j]] followed by b0[j]. If row i is new, d1[i] becomes c1[c1_offset[i]:c1_offset[i+1]].
    """
    if a0.dim() < 2 or d1.dim() < 2 or a0.shape[1:] != d1.shape[1:]:
        raise ArgumentError(f"a0 and d1 must have equal row capacities, got {tuple(a0.shape)} and {tuple(d1.shape)}")
    last, fresh = Rows("b0", b0), Rows("c1", c1)
    for rows_in in (Rows("a0", a0), last):
        rows_in.must_hold(perm.size0, "the old order")
    Rows("d1", d1).must_hold(len(perm), "the new order")
    capacity = a0.shape[1]
    # View the same memory with rows and elements as one dimension, to address single elements.
    olds, outs = Rows("a0", a0.flatten(0, 1)), Rows("d1", d1.flatten(0, 1))
    for rows_in in (olds, last, fresh):
        rows_in.must_match(outs)
        rows_in.must_be_apart(outs)
    sizes0 = _whole_numbers("a0_size", a0_size, perm.size0)
    starts1 = _offsets("c1_offset", c1_offset, len(perm), fresh.num_rows)
    kept, new = np.flatnonzero(~perm.is_new), np.flatnonzero(perm.is_new)
    source = perm.index[kept]
    sizes = np.empty(len(perm), np.int64)
    sizes[kept], sizes[new] = sizes0[source] + 1, starts1[new + 1] - starts1[new]
    if len(sizes) and int(sizes.max()) > capacity:
        row = int(np.argmax(sizes))
        raise RangeError(f"row {row} would have {sizes[row]} elements, but its capacity is {capacity}")
    _add_rows(copy, olds, source * capacity, sizes0[source], outs, kept * capacity)
    _add_rows(copy, last, source, np.ones(len(kept), np.int64), outs, kept * capacity + sizes0[source])
    _add_rows(copy, fresh, starts1[new], sizes[new], outs, new * capacity)
    return sizes


def append_rows(old: Rows, perm: Permutation, sizes: Any, added: I64, source: Rows, out: Rows, copy: BatchCopy) -> None:
    """Append elements to partly filled rows, see State.append. `out` is `old` if no row moves."""
    source.must_match(out)
    old.must_hold(perm.size0, "the old order")
    for rows in (source, out):
        rows.must_hold(len(perm), "the new order")
    capacity = math.prod(out.row_kind[1])
    element = out.row_bytes // max(1, capacity)
    row, first, count = added
    if len(row) and (added.min() < 0 or row.max() >= len(perm) or (first + count).max() > capacity):
        raise RangeError(
            f"cannot append {count.tolist()} elements at indices {first.tolist()} of rows {row.tolist()}: there are "
            f"{len(perm)} rows of {capacity} elements"
        )
    if out is not old:
        kept = _whole_numbers("sizes", sizes, len(perm))
        kept[row] = first
        kept[perm.is_new] = 0
        if len(kept) and int(kept.max()) > capacity:
            raise RangeError(f"row {kept.argmax()} has {kept.max()} elements, but its capacity is {capacity}")
        _add_parts(copy, old, np.where(perm.is_new, 0, perm.index), out, np.arange(len(perm)), 0, kept * element)
    _add_parts(copy, source, row, out, row, first * element, count * element)


def _add_parts(copy: BatchCopy, src: Rows, src_row: I64, dst: Rows, dst_row: I64, offset: Any, num_bytes: I64) -> None:
    """For each k, copy num_bytes[k] bytes from offset[k] in row src_row[k] to offset[k] in row dst_row[k]."""
    addresses = (each.address + rows * each.row_bytes + offset for each, rows in ((src, src_row), (dst, dst_row)))
    copy.table(
        np.stack((*addresses, num_bytes)),
        src_placement=src.placement,
        dst_placement=dst.placement,
        keep=[src.holding, dst.holding],
    )


def _add_rows(copy: BatchCopy, src: Rows, src_row: I64, num_rows: I64, dst: Rows, dst_row: I64) -> None:
    """For each k, copy num_rows[k] rows: row src_row[k] + i of `src` becomes row dst_row[k] + i of `dst`."""
    _add_parts(copy, src, src_row, dst, dst_row, 0, num_rows * src.row_bytes)


def _add_warp(perm: Permutation, old: Rows | None, new: Rows | None, out: Rows, copy: BatchCopy) -> None:
    """Add the copies of rows from `old` and `new` as one table. If both are given, their placements must be equal."""
    code, sources = native().code, [rows for rows in (old, new) if rows is not None]
    num_new = perm.num_new
    num_rows = (0 if old is None else len(perm) - num_new) + (0 if new is None else num_new)
    copy.table(
        (row_copies if code is None else code.row_copies)(
            perm.index, perm.size0, old.address if old else 0, new.address if new else 0, out.address, out.row_bytes
        ),
        src_placement=sources[0].placement,
        dst_placement=out.placement,
        keep=[rows.holding for rows in (*sources, out)],
        nbytes=num_rows * out.row_bytes or None,  # the copies are sorted and independent, as `nbytes` requires
    )


def row_copies(index: I64, size0: int, old: int, new: int, out: int, row_bytes: int) -> I64:
    """Return the table of copies from the addresses `old` and `new` to `out`. If an address is 0, skip its rows."""
    is_new, rows = index >= size0, np.arange(len(index))
    # Give new rows numbers above size0, so that no run contains both old and new rows.
    at, source, length = find_runs(np.where(is_new, new != 0, old != 0), np.where(is_new, size0 + 1 + rows, index))
    src = np.where(source < size0, old + source * row_bytes, new + at * row_bytes)
    return np.stack((src, out + at * row_bytes, length * row_bytes))


def _warp_in_place(rows: Rows, perm: Permutation, new: Rows | None, copy: BatchCopy) -> None:
    """Copy moved rows to scratch memory and back, so that all rows are read before a row is written.

    rows     A B C D      perm [0, 2, 1, 3]      scratch  C B      rows  A C B D
    """
    moved, added = np.flatnonzero(perm.is_moved), np.flatnonzero(perm.is_new)
    if len(moved):
        like = rows.tensor[: len(moved)]
        buffer = empty_like(Buffer.wrap(like))
        scratch = Rows("scratch", buffer.torch().view(like.shape), buffer.holding)
        at, each = np.arange(len(moved)), np.ones_like(moved)
        _add_rows(copy, rows, perm.index[moved], each, scratch, at)
        _add_rows(copy, scratch, at, each, rows, moved)
    if new is not None:
        _add_rows(copy, new, added, np.ones_like(added), rows, added)


def _whole_numbers(name: str, values: Any, count: int) -> I64:
    array = np.asarray(values)
    if array.ndim != 1 or len(array) < count or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{name} must contain at least {count} integers, got {array.dtype} of shape {array.shape}")
    numbers = array[:count].astype(np.int64)
    if count and int(numbers.min()) < 0:
        raise RangeError(f"{name}[{int(np.argmax(numbers < 0))}] is negative: {int(numbers.min())}")
    return numbers


def _offsets(name: str, values: Any, count: int, limit: int) -> I64:
    offsets = _whole_numbers(name, values, count + 1)
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if len(falling):
        at = int(falling[0])
        raise ArgumentError(f"{name} must not decrease, but {offsets[at + 1]} follows {offsets[at]} at index {at}")
    if int(offsets[-1]) > limit:
        raise RangeError(f"{name} ends at {offsets[-1]}, but there are {limit} elements")
    return offsets
