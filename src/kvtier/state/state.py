"""State: per-sequence data that is permuted with the rows of each batch. RowMap: the same without moving data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.errors import ArgumentError, RangeError
from kvtier.memory import Allocator, BatchCopy, Buffer, Placement
from kvtier.memory.torch_types import AnyDType
from kvtier.state.permutation import I64, Permutation
from kvtier.state.warp import Rows, warp_rows


class State:
    """Two tensors of one layout: `front` is read, `back` is written, `swap` exchanges their roles in constant time.

    The first dimension is rows, one per sequence of the batch. `warp` reorders front for the next batch.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: AnyDType,
        placement: Placement | str | None = None,
        *,
        allocator: Allocator | None = None,
    ) -> None:
        if not shape or any(extent < 0 for extent in shape):
            raise ArgumentError(f"a State needs rows: a shape of at least one dimension, got {tuple(shape)}")
        size = int(np.prod(shape, dtype=np.int64))
        buffers = [Buffer(size, dtype, placement, allocator=allocator) for _ in range(2)]
        # pass the references of the Buffers: references to their tensors would not record the copies in flight
        self._front, self._back = (
            Rows("the state", buffer.torch().view(tuple(shape)), buffer.holding) for buffer in buffers
        )

    @property
    def front(self) -> torch.Tensor:
        """The tensor in the current order."""
        return self._front.tensor

    @property
    def back(self) -> torch.Tensor:
        """The tensor that receives the next order."""
        return self._back.tensor

    def swap(self) -> None:
        """Exchange front and back. A tensor obtained before keeps its memory, so its role changes."""
        self._front, self._back = self._back, self._front

    def warp(self, perm: Permutation, copy: BatchCopy, *, new: torch.Tensor | None = None) -> bool:
        """Copy front to back in the new order and swap. Front is valid after `copy` has run. False if nothing moves."""
        if perm.is_identity:
            return False
        warp_rows(self._front, perm, self._back, copy, new=new)
        self.swap()
        return True


class RowMap:
    """Stable rows and an index: sequences keep their row, and `rows[i]` is the stable row of batch row i.

    Comparison (benchmarks/state.py, 256 rows of which a tenth changes): State keeps rows dense for every kernel. It
    needs twice the memory, and a launch in each step in which rows change. This takes 50 us on an H200, for rows of 8
    bytes and of 64 KiB; on a CPU 60 us for 8 bytes and 1 ms for 64 KiB. RowMap moves nothing and takes 15 us for any
    size, but uploads an index vector and adds an indirection to every kernel. Use State for rows of a few bytes that
    many kernels read. Use RowMap for large rows, on a CPU from a few KiB on. A row is freed when its sequence leaves.
    With batches in flight, apply the permutation after the last batch that uses the row.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise RangeError(f"a RowMap cannot have {capacity} rows")
        self.capacity = capacity
        self._rows: I64 = np.empty(0, np.int64)
        self._free: I64 = np.arange(capacity)[::-1].copy()  # a stack: the lowest rows are taken first

    @property
    def rows(self) -> I64:
        """The stable row of each batch row, in the current order; read-only."""
        view = self._rows.view()
        view.flags.writeable = False
        return view

    @property
    def num_free(self) -> int:
        return len(self._free)

    def apply(self, perm: Permutation) -> I64:
        """Apply the new order: new sequences get free rows, and the rows of dropped sequences are freed.

        Returns the stable rows of new sequences, in the new order. If there are too few, raise and change nothing.
        """
        if perm.size0 != len(self._rows):
            raise ArgumentError(f"this permutation is of {perm.size0} rows, the map has {len(self._rows)}")
        old = ~perm.is_new
        kept = perm.index[old]
        dropped = np.ones(perm.size0, np.bool_)
        dropped[kept] = False
        if len(kept) + np.count_nonzero(dropped) != perm.size0:
            raise ArgumentError("a RowMap cannot give one row to two sequences: copy the row of a fork first")
        free, needed = np.concatenate((self._free, self._rows[dropped])), perm.num_new
        if needed > len(free):
            raise RangeError(f"{needed} new sequences need rows, {len(free)} of {self.capacity} are free")
        given, self._free = free[len(free) - needed :][::-1].copy(), free[: len(free) - needed]
        rows = np.empty(len(perm), np.int64)
        rows[old], rows[perm.is_new] = self._rows[kept], given
        self._rows = rows
        return given
