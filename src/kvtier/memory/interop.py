"""Zero-copy ways in and out of a Buffer: numpy, torch, DLPack, the array protocols, memoryview.

In: whatever is found first of torch tensor, `__cuda_array_interface__`, `__array_interface__`, `__dlpack__`, buffer
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from kvtier import dtype as dt
from kvtier.dtype import DType
from kvtier.errors import ArgumentError, DTypeError, PlacementError
from kvtier.memory.context import current_stream
from kvtier.memory.placement import CPU, PINNED, Placement
from kvtier.memory.region import Holding, Region, gpu_of
from kvtier.memory.stream import Stream
from kvtier.memory.torch_types import from_torch


@dataclass(frozen=True, slots=True)
class Adopted:
    """Foreign memory, described as a Buffer describes its own."""

    region: Region
    size: int
    dtype: DType


def adopt(source: Any) -> Adopted:
    """Describe the memory of a foreign array, which stays alive as long as the result. It must be contiguous."""
    if isinstance(source, torch.Tensor):
        return _adopt_tensor(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _adopt_cuda_array(source)
    if isinstance(source, np.ndarray) or hasattr(source, "__array_interface__"):
        return _adopt_ndarray(np.asarray(source))
    if hasattr(source, "__dlpack__"):
        return _adopt_tensor(_from_dlpack(source))
    try:
        view = memoryview(source)
    except TypeError as error:
        raise ArgumentError(
            f"cannot make a Buffer over {type(source).__name__}: it has none of __cuda_array_interface__, "
            "__array_interface__, __dlpack__ or the buffer protocol"
        ) from error
    return _adopt_ndarray(np.asarray(view))


def _adopt_tensor(tensor: torch.Tensor) -> Adopted:
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a Buffer is one flat region, but this tensor of shape {tuple(tensor.shape)} has strides "
            f"{tensor.stride()}; "
            "pass tensor.contiguous(), which copies"
        )
    dtype = from_torch(tensor.dtype)
    if tensor.device.type not in ("cpu", "cuda"):
        raise PlacementError(f"kvtier has no placement for torch device {tensor.device}")
    if tensor.is_cuda:
        where = Placement("cuda", tensor.device.index or 0)
    else:
        where = PINNED if torch.cuda.is_available() and tensor.is_pinned() else CPU
    holding = Holding(tensor.data_ptr(), tensor.nbytes, where, owner=tensor.detach())
    return Adopted(Region(holding), tensor.numel() * dtype.per_byte, dtype)


def _adopt_ndarray(array: np.ndarray[Any, Any]) -> Adopted:
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"a Buffer is one flat region, but this array of shape {array.shape} has strides {array.strides}; "
            "pass np.ascontiguousarray(array), which copies"
        )
    if not array.dtype.isnative:
        raise DTypeError(f"this array has byte order {array.dtype.byteorder!r}; convert it to the machine's own first")
    dtype = dt.dtype(array.dtype)
    if dtype.is_packed:
        raise DTypeError(
            f"ml_dtypes keeps one {dtype} per byte, kvtier packs {dtype.per_byte}: use Buffer.pack(array), which copies"
        )
    holding = Holding(array.ctypes.data, array.nbytes, CPU, owner=array)
    return Adopted(Region(holding, readonly=not array.flags.writeable), array.size, dtype)


def _adopt_cuda_array(source: Any) -> Adopted:
    interface = source.__cuda_array_interface__
    pointer, readonly = interface["data"]
    dtype = dt.dtype(np.dtype(interface["typestr"]))
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    size = int(np.prod(shape, dtype=np.int64))
    dense = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.item_bytes for axis in range(len(shape)))
    if size and strides is not None and tuple(strides) != dense:
        raise ArgumentError(
            f"a Buffer is one flat region, but this array of shape {shape} has strides {tuple(strides)}"
        )
    where = Placement("cuda", gpu_of(pointer) if size else 0).require()
    if interface.get("stream") is not None:  # the producer's pending work comes first
        ours = current_stream(where)
        if ours is not None and ours.handle != interface["stream"]:
            ours.wait(Stream.wrap(int(interface["stream"]), where).record())
    return Adopted(Region(Holding(pointer, dtype.nbytes(size), where, owner=source), readonly=readonly), size, dtype)


def _from_dlpack(source: Any) -> torch.Tensor:
    kind, index = source.__dlpack_device__()
    if int(kind) == 2:  # kDLCUDA: the producer orders its work before torch's current stream, so make that ours
        ours = current_stream(Placement("cuda", int(index)).require())
        if ours is not None:
            with torch.cuda.stream(ours.native):
                return torch.utils.dlpack.from_dlpack(source)
    return torch.utils.dlpack.from_dlpack(source)
