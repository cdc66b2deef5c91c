"""Use foreign arrays without copying. If an array supports several of these protocols, the first one is used:

torch tensor, `__cuda_array_interface__`, `__array_interface__`, `__dlpack__`, buffer protocol.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from kvtier import dtype as dt
from kvtier.dtype import DType
from kvtier.errors import ArgumentError, DTypeError
from kvtier.memory.context import current_stream
from kvtier.memory.placement import CPU, PINNED, Placement, gpu, has_gpu
from kvtier.memory.region import MemoryRef, Region, gpu_of
from kvtier.memory.stream import Stream
from kvtier.memory.torch_types import from_torch

_DLPACK_CUDA = 2  # kDLCUDA

Adopted = tuple[Region, int, DType]
"""Foreign memory, the number of elements in it, and the element type."""


def adopt(source: Any) -> Adopted:
    """Return memory, size and type of a contiguous foreign array, without copying. The memory keeps the array alive."""
    if isinstance(source, torch.Tensor):
        return _adopt_tensor(source, readonly=False, pooled=True)
    if isinstance(source, np.generic):
        raise ArgumentError(f"a numpy scalar ({type(source).__name__}) has no memory to share; pass an array")
    if hasattr(source, "__cuda_array_interface__"):
        return _adopt_cuda_array(source)
    if isinstance(source, np.ndarray) or hasattr(source, "__array_interface__"):
        return _adopt_ndarray(np.asarray(source))
    if hasattr(source, "__dlpack__"):
        return _adopt_dlpack(source)
    try:
        view = memoryview(source)
    except TypeError as error:
        raise ArgumentError(
            f"cannot make a Buffer over {type(source).__name__}: it supports none of __cuda_array_interface__, "
            "__array_interface__, __dlpack__ or the buffer protocol"
        ) from error
    return _adopt_ndarray(np.asarray(view))


def _adopt_tensor(tensor: torch.Tensor, *, readonly: bool, pooled: bool) -> Adopted:
    dtype = from_torch(tensor.dtype)
    region = Region(hold_tensor(tensor, pooled=pooled), readonly=readonly)
    return region, tensor.numel() * dtype.per_byte, dtype


def hold_tensor(tensor: torch.Tensor, *, pooled: bool = True) -> MemoryRef:
    """Return a reference to a contiguous tensor. `pooled` is True for GPU memory from torch's caching allocator."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"a Buffer is one flat region, but this tensor of shape {tuple(tensor.shape)} has strides "
            f"{tensor.stride()}; pass tensor.contiguous(), which copies"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError("this tensor is a lazy negation or conjugate; pass tensor.resolve_neg().resolve_conj()")
    return MemoryRef(tensor.data_ptr(), tensor.nbytes, placement_of(tensor), owner=tensor.detach(), pooled=pooled)


def placement_of(tensor: torch.Tensor) -> Placement:
    if tensor.is_cuda:
        return gpu(tensor.device.index or 0)
    if not tensor.is_cpu:
        raise ArgumentError(f"kvtier has no placement for torch device {tensor.device}")
    return PINNED if has_gpu() and tensor.numel() and tensor.is_pinned() else CPU


def _adopt_ndarray(array: np.ndarray[Any, Any]) -> Adopted:
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"a Buffer is one flat region, but this array of shape {array.shape} has strides {array.strides}; "
            "pass np.ascontiguousarray(array), which copies"
        )
    dtype = dt.dtype(array.dtype)
    if array.ctypes.data % dtype.item_bytes:
        raise ArgumentError(
            f"address {array.ctypes.data:#x} is not a multiple of {dtype.item_bytes}, the size of one {dtype}"
        )
    if dtype.is_packed:
        raise DTypeError(
            f"ml_dtypes has 1 {dtype} per byte, but kvtier has {dtype.per_byte} per byte; copy with Buffer.pack(array)"
        )
    holding = MemoryRef(array.ctypes.data, array.nbytes, CPU, owner=array)
    if has_gpu():  # numpy does not record whether memory is pinned
        holding.placement = placement_of(holding.tensor())
    return Region(holding, readonly=not array.flags.writeable), array.size, dtype


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
    Placement("cuda").require()
    where = Placement("cuda", gpu_of(pointer) if size else 0)
    if interface.get("stream") is not None:  # our stream waits for the producer's pending work
        ours = current_stream(where)
        if ours is not None and ours.handle != interface["stream"]:
            ours.wait(Stream.wrap(int(interface["stream"]), where).record())
    return Region(MemoryRef(pointer, dtype.nbytes(size), where, owner=source), readonly=readonly), size, dtype


def _adopt_dlpack(source: Any) -> Adopted:
    kind, index = source.__dlpack_device__()
    stream: int | None = None
    if int(kind) == _DLPACK_CUDA:
        # __dlpack__ makes the given stream wait for the producer's pending work (1 is the legacy default stream)
        ours = current_stream(Placement("cuda", int(index)).require())
        stream = (ours.handle or 1) if ours is not None else 1
    try:
        capsule = source.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # producers before DLPack 1.0 have no max_version
        capsule = source.__dlpack__(stream=stream)
    readonly = _is_readonly(capsule)  # read here, because torch ignores the flag
    return _adopt_tensor(torch.utils.dlpack.from_dlpack(capsule), readonly=readonly, pooled=False)


def _is_readonly(capsule: object) -> bool:
    """Return the read-only flag of a DLPack capsule: bit 0 of the field after version, context and deleter."""
    if '"dltensor_versioned"' not in repr(capsule):
        return False  # capsules of the format before DLPack 1.0 have no flag
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get_pointer(capsule, b"dltensor_versioned")
    return bool(ctypes.c_uint64.from_address(address + 24).value & 1)
