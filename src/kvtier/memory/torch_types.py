"""Conversion to and from torch types, and packing of sub-byte types (the first element is in the lowest bits)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvtier import dtype as dt
from kvtier.dtype import DType, dtype, null
from kvtier.errors import DTypeError, RangeError

# e2m1: one sign, two exponent and one mantissa bit
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_CODES = {repr(value): code for code, value in enumerate(_FP4_VALUES)}  # repr keeps 0.0 and -0.0 apart

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def encode(dtype: DType, value: float) -> int:
    """Return the bits of one element of a packed type. Raise RangeError if the type cannot hold the exact value."""
    if dtype == dt.fp4:
        code = _FP4_CODES.get(repr(float(value)))
        if code is None:
            raise RangeError(
                f"fp4 cannot hold {value!r} exactly; its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives"
            )
        return code
    return whole_number(dtype, value, 0, (1 << dtype.bits) - 1)


def whole_number(dtype: DType, value: float, low: int, high: int) -> int:
    """Return `value` as an int. Raise RangeError if it is not a whole number from `low` to `high`."""
    if not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise RangeError(f"{dtype} holds whole numbers from {low} to {high}, got {value!r}")
    return int(value)


def decode(dtype: DType, codes: Bytes) -> list[Any]:
    """Return the value of each code. A code is the bits of one element of a packed type, in a byte of its own."""
    values: list[Any] = codes.tolist()
    return [_FP4_VALUES[code] for code in values] if dtype == dt.fp4 else values


def tail_mask(dtype: DType, size: int) -> int:
    """Return a mask of the bits that `size` elements use in the last byte; 0xFF if they end on a byte boundary."""
    used = size * dtype.bits % 8
    return (1 << used) - 1 if used else 0xFF


def unpack_codes(dtype: DType, packed: Bytes, size: int) -> Bytes:
    """Return the bits of each of `size` elements, one element per byte."""
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    return ((packed[:, None] >> shifts) & ((1 << dtype.bits) - 1)).reshape(-1)[:size].astype(np.uint8)


def pack_codes(dtype: DType, codes: Bytes) -> Bytes:
    """Pack codes, which have one element per byte, into bytes. Unused bits of the last byte are zero."""
    padded = np.zeros(dtype.nbytes(codes.size) * dtype.per_byte, np.uint8)
    padded[: codes.size] = codes & ((1 << dtype.bits) - 1)
    shifts = np.arange(0, 8, dtype.bits, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(padded.reshape(-1, dtype.per_byte) << shifts, axis=1).astype(np.uint8)
    return packed


AnyDType = DType | str | torch.dtype

# Packed integers become uint8, because torch's uint2 and uint4 have no operations. One element of torch's
# float4_e2m1fn_x2 holds two fp4 elements.
_TO_TORCH: Mapping[DType, torch.dtype] = MappingProxyType(
    {
        **{each: getattr(torch, each.numpy_name) for each in dt.ALL if not each.is_packed},
        dt.u2: torch.uint8,
        dt.u4: torch.uint8,
        dt.fp4: torch.float4_e2m1fn_x2,
    }
)
_FROM_TORCH: Mapping[torch.dtype, DType] = MappingProxyType(
    {torch_dtype: each for each, torch_dtype in _TO_TORCH.items() if each not in (dt.u2, dt.u4)}
)
# Integer types by size in bytes. Memory of any type is filled through them, because torch cannot fill all types.
BITS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def torch_dtype(element: DType) -> torch.dtype:
    """Return the torch type for data of this type: uint8 for packed integers."""
    return _TO_TORCH[element]


def element_type(given: AnyDType) -> DType:
    return from_torch(given) if isinstance(given, torch.dtype) else dtype(given)


def memory_type(given: AnyDType) -> DType:
    """Return the element type of a name or torch type. Raise DTypeError for null."""
    element = element_type(given)
    if element == null:
        raise DTypeError("memory needs an element type; only an empty Buffer can have the type null")
    return element


def from_torch(torch_dtype: torch.dtype) -> DType:
    element = _FROM_TORCH.get(torch_dtype)
    if element is None:
        raise DTypeError(
            f"kvtier has no element type for {torch_dtype}; view the tensor as bytes: tensor.view(torch.uint8)"
        )
    return element
