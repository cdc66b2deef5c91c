"""Packed elements: several to a byte, the first in the lowest bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvtier import dtype as dt
from kvtier.dtype import DType
from kvtier.errors import RangeError

# e2m1: one sign, two exponent and one mantissa bit
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_CODES = {repr(value): code for code, value in enumerate(_FP4_VALUES)}  # repr keeps 0.0 and -0.0 apart

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def encode(dtype: DType, value: float) -> int:
    """The bits of one element of a packed type; an error if the type cannot hold the value exactly."""
    if dtype == dt.fp4:
        code = _FP4_CODES.get(repr(float(value)))
        if code is None:
            raise RangeError(
                f"fp4 cannot hold {value!r} exactly; its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives"
            )
        return code
    return whole_number(dtype, value, 0, (1 << dtype.bits) - 1)


def whole_number(dtype: DType, value: float, low: int, high: int) -> int:
    """`value` as an int; an error if it is not a whole number from `low` to `high`."""
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise RangeError(f"{dtype} holds whole numbers from {low} to {high}, got {value!r}")
    return int(value)


def decode(dtype: DType, code: int) -> int | float:
    """The value of one element of a packed type."""
    return _FP4_VALUES[code] if dtype == dt.fp4 else code


def repeat(dtype: DType, code: int) -> int:
    """A byte in which every element has these bits."""
    return sum(code << (dtype.bits * place) for place in range(dtype.per_byte))


def tail_mask(dtype: DType, size: int) -> int:
    """The bits of the last byte that `size` elements use; 0xFF when they end on a byte boundary."""
    used = size * dtype.bits % 8
    return (1 << used) - 1 if used else 0xFF


def unpack_codes(dtype: DType, packed: Bytes, size: int) -> Bytes:
    """The bits of each of `size` elements, one per byte."""
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    return ((packed[:, None] >> shifts) & ((1 << dtype.bits) - 1)).reshape(-1)[:size].astype(np.uint8)


def pack_codes(dtype: DType, codes: Bytes) -> Bytes:
    """The inverse of `unpack_codes`; unused bits of the last byte are zero."""
    padded = np.zeros(dtype.nbytes(codes.size) * dtype.per_byte, np.uint8)
    padded[: codes.size] = codes & ((1 << dtype.bits) - 1)
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(padded.reshape(-1, dtype.per_byte) << shifts, axis=1).astype(np.uint8)
    return packed
