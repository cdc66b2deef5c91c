"""The one table between kvtier's element types and torch's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kvtier import dtype as dt
from kvtier.dtype import DType, dtype, null
from kvtier.errors import DTypeError

AnyDType = DType | str | torch.dtype

# Packed types travel as their bytes. torch names fp4 as a pair of elements; its uint2 and uint4 are shells without
# operations.
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
# Integer types that every torch operation supports, by their bytes: filling moves bits, whatever they mean.
BITS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def torch_dtype(element: DType) -> torch.dtype:
    """The torch type of a tensor over data of this type (uint8 for packed integers, whose bytes torch cannot split)."""
    return _TO_TORCH[element]


def element_type(given: AnyDType) -> DType:
    """The element type of this name or torch type."""
    return from_torch(given) if isinstance(given, torch.dtype) else dtype(given)


def memory_type(given: AnyDType) -> DType:
    """The same, but an error for the type that no memory has."""
    element = element_type(given)
    if element == null:
        raise DTypeError("memory needs an element type; null is that of an empty Buffer without one")
    return element


def from_torch(torch_dtype: torch.dtype) -> DType:
    """The element type of a torch tensor's data."""
    found = _FROM_TORCH.get(torch_dtype)
    if found is None:
        raise DTypeError(
            f"kvtier has no element type for {torch_dtype}; view the tensor as bytes: tensor.view(torch.uint8)"
        )
    return found
