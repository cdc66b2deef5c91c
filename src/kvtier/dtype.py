"""Element types of KV data. This module does not import torch; `kvtier.memory` maps the types to torch types.

Types with fewer than 8 bits are packed, with the first element in the lowest bits of a byte. Sizes in bytes are rounded
up. An offset into packed data must be at a byte boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, DTypeError, RangeError, UnavailableError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `dtype("bf16")` returns a type by name."""

    name: str
    """The name in messages and files."""
    bits: int
    numpy_name: str
    """Name of the numpy or ml_dtypes type of one element."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_packed(self) -> bool:
        """True if several elements share a byte."""
        return self.bits < 8

    @property
    def per_byte(self) -> int:
        """Number of elements in one byte of a packed type. 1 for all other types."""
        return max(1, 8 // self.bits)

    @property
    def item_bytes(self) -> int:
        """Size of the smallest addressable unit: one element, or one byte of packed elements."""
        return max(1, self.bits // 8)

    def nbytes(self, count: int) -> int:
        """Return the size of `count` elements in bytes, rounded up."""
        if count < 0:
            raise RangeError(f"a count of {self} elements cannot be negative, got {count}")
        return (count * self.bits + 7) // 8

    def offset_bytes(self, count: int) -> int:
        """Return the byte offset of element `count`. Raise ArgumentError if the element starts inside a byte."""
        if count * self.bits % 8:
            raise ArgumentError(
                f"element {count} of {self} starts at bit {count * self.bits}, which is inside a byte; "
                f"offsets into {self} data must be multiples of {self.per_byte} elements"
            )
        return self.nbytes(count)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type of one element. For packed types, this is the type of an unpacked element."""
        try:
            return np.dtype(self.numpy_name)
        except TypeError:
            pass  # numpy lacks bf16, fp8 and packed types
        try:
            import ml_dtypes
        except ImportError as error:
            raise UnavailableError(
                f"numpy has no type for {self}; install the ml_dtypes package: pip install 'kvtier[numpy]'"
            ) from error
        element: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.numpy_name))
        return element


null = DType("null", 8, "void")
"""The type of an empty Buffer that was created without a type. No memory has this type."""
bool_ = DType("bool", 8, "bool")
u8, u16, u32, u64 = (DType(f"u{bits}", bits, f"uint{bits}") for bits in (8, 16, 32, 64))
i8, i16, i32, i64 = (DType(f"i{bits}", bits, f"int{bits}") for bits in (8, 16, 32, 64))
f16, f32, f64 = (DType(f"f{bits}", bits, f"float{bits}") for bits in (16, 32, 64))
bf16 = DType("bf16", 16, "bfloat16")
fp8_e4m3 = DType("fp8_e4m3", 8, "float8_e4m3fn")
fp8_e5m2 = DType("fp8_e5m2", 8, "float8_e5m2")
u2 = DType("u2", 2, "uint2")
u4 = DType("u4", 4, "uint4")
fp4 = DType("fp4", 4, "float4_e2m1fn")

ALL: tuple[DType, ...] = (
    *(bool_, u8, u16, u32, u64, i8, i16, i32, i64, f16, f32, f64),
    *(bf16, fp8_e4m3, fp8_e5m2, u2, u4, fp4),
)
_BY_NAME: Mapping[str, DType] = MappingProxyType({name: each for each in ALL for name in (each.name, each.numpy_name)})


def dtype(name: str | DType | np.dtype[Any] | type[Any]) -> DType:
    """Return the element type for a name ("bf16", "bfloat16"), or for a numpy or ml_dtypes type."""
    if isinstance(name, DType):
        return name
    element = _BY_NAME.get(name if isinstance(name, str) else _numpy_name(name))
    if element is None:
        given = repr(name) if isinstance(name, str) else _numpy_name(name)
        raise DTypeError(f"unknown element type {given}; known: {', '.join(each.name for each in ALL)}")
    return element


def _numpy_name(name: object) -> str:
    """Return numpy's name of a type, with its byte order if not native. If `name` is not a type, return its repr."""
    if name is None:
        return "None"  # np.dtype(None) is float64
    try:
        found = np.dtype(name)  # type: ignore[call-overload]
    except TypeError:
        return repr(name)
    return str(found.name) if found.isnative else f"{found.name} in byte order {found.byteorder!r}"
