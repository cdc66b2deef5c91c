"""Permutation: the mapping from the rows of one batch to the rows of the next batch."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError

I64 = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Permutation:
    """The old index of each row of the new order. There are `size0` old rows. Indices of `size0` or more are new rows.

        Permutation([2, 0, 5], size0=3)     row 0 was row 2, row 1 was row 0, row 2 is new; old row 1 is dropped

    If a sequence forks, its old row becomes several rows. A permutation is immutable.
    """

    __slots__ = ("index", "is_new", "size0")

    def __init__(self, index: Any, size0: int) -> None:
        rows = np.array(index, copy=True)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ArgumentError(f"a permutation must be a list of row numbers, got {rows.dtype} of shape {rows.shape}")
        self.size0 = operator.index(size0)
        if size0 < 0:
            raise RangeError(f"the old order cannot have {size0} rows")
        self.index: I64 = rows.astype(np.int64)
        if rows.size and int(self.index.min()) < 0:
            at = int(np.argmax(self.index < 0))
            raise RangeError(f"row {at} has the index {self.index[at]}; old rows start at 0 and new rows at {size0}")
        self.is_new: Bools = self.index >= size0
        self.index.flags.writeable = self.is_new.flags.writeable = False

    @classmethod
    def identity(cls, size: int) -> Permutation:
        return cls(np.arange(size), size)

    def __len__(self) -> int:
        return len(self.index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation):
            return NotImplemented
        if self.size0 != other.size0 or not np.array_equal(self.is_new, other.is_new):
            return False
        return bool(np.array_equal(self.index[~self.is_new], other.index[~other.is_new]))

    def __hash__(self) -> int:
        return hash((self.size0, self.index[~self.is_new].tobytes(), self.is_new.tobytes()))

    def __repr__(self) -> str:
        shown = ", ".join("new" if new else str(row) for row, new in zip(self.index, self.is_new, strict=True))
        return f"Permutation([{shown}], size0={self.size0})"

    @property
    def is_identity(self) -> bool:
        """True if every row keeps its place and no row is new or dropped."""
        return len(self) == self.size0 and not np.count_nonzero(self.index != np.arange(self.size0))

    @property
    def is_moved(self) -> Bools:
        """For each row of the new order, True if it is an old row at another place."""
        moved: Bools = ~self.is_new & (self.index != np.arange(len(self)))
        return moved

    @property
    def num_new(self) -> int:
        return int(np.count_nonzero(self.is_new))


def find_runs(wanted: Bools, source: I64) -> tuple[I64, I64, I64]:
    """Return the first row, its source and the length of each run of wanted rows whose sources increase by one.

    wanted  1 1 1 0 1        begins  1 0 1 0 1
    source  4 5 0 . 1        ends    0 1 1 0 1
    """
    begins, ends = wanted.copy(), wanted.copy()
    continues = (source[1:] == source[:-1] + 1) & wanted[1:] & wanted[:-1]
    begins[1:] &= ~continues
    ends[:-1] &= ~continues
    first = np.flatnonzero(begins)
    return first, source[first], np.flatnonzero(ends) - first + 1
