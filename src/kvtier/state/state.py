"""State: per-sequence data that moves to the row order of each batch. RowMap: an index of rows that stay in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvtier.errors import ArgumentError, RangeError
from kvtier.memory import BatchCopy, Buffer, Placement
from kvtier.memory.torch_types import AnyDType
from kvtier.state.permutation import I64, Permutation
from kvtier.state.warp import Added, Rows, append_rows, warp_rows


class State:
    """Two tensors with the same shape. `front` has the rows in the current order, `back` receives the next order.

    There is one row per sequence in the batch. `swap` exchanges front and back without a copy.
    """

    def __init__(self, shape: Sequence[int], dtype: AnyDType, placement: Placement | str | None = None) -> None:
        if not shape or any(extent < 0 for extent in shape):
            raise ArgumentError(f"a State needs rows as its first dimension, got the shape {tuple(shape)}")
        size = int(np.prod(shape, dtype=np.int64))
        buffers = [Buffer(size, dtype, placement) for _ in range(2)]
        # Copies in flight are recorded in Buffer.holding, so the Buffer frees its memory only after they have ended.
        self._front, self._back = (
            Rows("the state", buffer.torch().view(tuple(shape)), buffer.holding) for buffer in buffers
        )

    @property
    def front(self) -> torch.Tensor:
        return self._front.tensor

    @property
    def back(self) -> torch.Tensor:
        return self._back.tensor

    def swap(self) -> None:
        """Exchange front and back. A tensor that the caller obtained from `front` before the call is then the back."""
        self._front, self._back = self._back, self._front

    def warp(self, perm: Permutation, copy: BatchCopy, *, new: torch.Tensor | None = None) -> bool:
        """Bring the rows into a new order: record copies from front to back in `copy`, call `swap` and return True.

        If row i of the new order is new, it is copied from new[i]. Without `new`, its contents are undefined. If `perm`
        is the identity, do nothing and return False.
        """
        if perm.is_identity:
            return False
        warp_rows(self._front, perm, self._back, copy, new=new)
        self.swap()
        return True

    def append(self, perm: Permutation, sizes: Any, added: Added, source: torch.Tensor, copy: BatchCopy) -> bool:
        """Move partly filled rows to the new order, and add elements to some of them.

        Row added.rows[k] of the new order keeps its first added.first[k] elements. The next added.count[k] elements
        come from the same row and indices of `source`. A row i of the new order that is neither new nor in added.rows
        keeps its first sizes[i] elements. If no old row moves, add the elements to the front without using `sizes`, and
        return False. Otherwise copy kept and new elements to the back, call `swap` and return True.
        """
        rows, given = np.array(added, np.int64).reshape(3, -1), Rows("the source", source)
        moves = bool(np.count_nonzero(perm.is_moved))
        append_rows(self._front, perm, sizes, rows, given, self._back if moves else self._front, copy)
        if moves:
            self.swap()
        return moves


class RowMap:
    """Assigns each sequence a stable row, the same in all batches. `rows[i]` is the stable row of batch row i.

    Use State for rows of a few bytes that many kernels read, and RowMap for large rows (on a CPU, a few KiB or more).
    State needs twice the memory, and a copy in each step in which rows change. On a CPU, if a tenth of 256 rows change,
    this copy takes 60 us for rows of 8 bytes, and 1 ms for rows of 64 KiB. RowMap takes 15 us for rows of any size, but
    every kernel must read `rows` (benchmarks/state.py).

    `apply` frees the row of a dropped sequence. Call `apply` only when no batch in flight uses that row.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise RangeError(f"a RowMap cannot have {capacity} rows")
        self.capacity = capacity
        self._rows: I64 = np.empty(0, np.int64)
        self._free: I64 = np.arange(capacity)[::-1].copy()  # a stack with the lowest row on top

    @property
    def rows(self) -> I64:
        """The stable row of each batch row, as a read-only array."""
        view = self._rows.view()
        view.flags.writeable = False
        return view

    @property
    def num_free(self) -> int:
        return len(self._free)

    def apply(self, perm: Permutation) -> I64:
        """Apply the new order. Assign free rows to new sequences, and free the rows of dropped sequences.

        Return the stable rows of new sequences, in the new order. Raise RangeError if too few rows are free. If an
        error is raised, nothing changes.
        """
        if perm.size0 != len(self._rows):
            raise ArgumentError(f"the permutation has {perm.size0} old rows, but the map has {len(self._rows)} rows")
        old = ~perm.is_new
        kept = perm.index[old]
        dropped = np.ones(perm.size0, np.bool_)
        dropped[kept] = False
        if len(kept) + np.count_nonzero(dropped) != perm.size0:
            raise ArgumentError("a RowMap cannot assign one row to two sequences; copy the row of a fork first")
        free, needed = np.concatenate((self._free, self._rows[dropped])), perm.num_new
        if needed > len(free):
            raise RangeError(f"{needed} new sequences need rows, but {len(free)} of {self.capacity} are free")
        given, self._free = free[len(free) - needed :][::-1].copy(), free[: len(free) - needed]
        rows = np.empty(len(perm), np.int64)
        rows[old], rows[perm.is_new] = self._rows[kept], given
        self._rows = rows
        return given
