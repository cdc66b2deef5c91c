"""The CUDA driver, through cuda-bindings (the `cuda` extra). Only this file and gather.py call the driver.

Functions that need the driver raise UnavailableError if the package, a GPU or an entry point is missing.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.errors import CopyError, UnavailableError
from kvtier.memory.copy_plan import I64
from kvtier.memory.native import row_addresses
from kvtier.memory.placement import CPU, PINNED, Placement, has_gpu
from kvtier.memory.stream import LEGACY_DEFAULT_HANDLES, Stream

_SUCCESS, _INVALID_VALUE, _NOT_INITIALIZED, _INVALID_CONTEXT = 0, 1, 3, 201
_SRC_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
# A submission of 51,828 entries hung driver 580 (vllm issue 49276). Chunks of 4,096 entries add no measurable cost.
_MAX_BATCH = 4096
_MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE = 1, 2


@functools.cache
def driver() -> Any:
    """Return the driver module of cuda-bindings. Raises UnavailableError without the package or without a GPU."""
    if not torch.cuda.is_available():
        raise UnavailableError("torch finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise UnavailableError("cuda-bindings is not installed: pip install 'kvtier[cuda]'") from error
    return module


def unwrap(result: Any) -> Any:
    """Return the result of a driver call. If the call failed, raise CopyError with the CUDA status."""
    status, *values = result
    if int(status) != _SUCCESS:
        raise CopyError(f"the CUDA driver returned {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def entry_point(name: str, *argument_types: Any, version: int = 12000) -> Callable[..., int]:
    """Return the driver function with this name and CUDA version. The function returns its status as an int.

    cuda-bindings finds the function, and ctypes calls it. A call takes a third of the time of a cuda-bindings wrapper.
    """
    status, address, found = driver().cuGetProcAddress(name.encode(), version, 0)
    if int(status) != _SUCCESS or int(found) != 0 or not int(address):
        raise UnavailableError(f"the driver has no {name} of version {version}")
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(address))
    return function


def driver_release() -> str:
    """Return the driver's release, such as 580.159.04, or the driver's CUDA version if the release is unknown."""
    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+(?:\.\d+)?", file.read_text()) if file.exists() else None
    return match[0] if match else str(driver_version())


def driver_version() -> int:
    """Return the CUDA version of the driver, as 1000 * major + 10 * minor."""
    return int(unwrap(driver().cuDriverGetVersion()))


@functools.cache
def _primary_context(index: int) -> int:
    """Return torch's context on this GPU. The context is kept until the process ends."""
    unwrap(driver().cuInit(0))  # may be the first use of the GPU in this process; repeated calls are allowed
    device = unwrap(driver().cuDeviceGet(index))
    return int(unwrap(driver().cuDevicePrimaryCtxRetain(device)))


def current_context(placement: Placement) -> AbstractContextManager[None]:
    """Make driver calls of this thread use this GPU in the `with` body.

    A new thread has no context. After the body, the previous context is current again. Without cuda-bindings, this
    function does nothing, because only torch then calls the driver.
    """
    if not has_driver():
        return nullcontext()
    wanted, current = _primary_context(placement.index), ctypes.c_void_p()
    entry_point("cuCtxGetCurrent", ctypes.c_void_p)(ctypes.addressof(current))
    return nullcontext() if current.value == wanted else _pushed_context(wanted)


@contextmanager
def _pushed_context(wanted: int) -> Iterator[None]:
    unwrap(driver().cuCtxPushCurrent(wanted))
    try:
        yield
    finally:
        unwrap(driver().cuCtxPopCurrent())


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Permit driver calls that a capture forbids, for the `with` body. The calls are not captured."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = unwrap(driver().cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        unwrap(driver().cuThreadExchangeStreamCaptureMode(before))


def has_driver() -> bool:
    """True if there are cuda-bindings and a GPU."""
    try:
        driver()
    except UnavailableError:
        return False
    return True


def is_capturing(stream: Stream) -> bool:
    """True if work on `stream` is captured in a CUDA graph."""
    try:
        query = entry_point("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)
    except UnavailableError:
        with torch.cuda.stream(stream.native):  # without cuda-bindings, at ten times the cost
            return torch.cuda.is_current_stream_capturing()
    capturing = ctypes.c_int(0)
    status = query(stream.handle, ctypes.addressof(capturing))
    if status != _SUCCESS:
        raise CopyError(f"cuStreamIsCapturing for stream {stream.handle:#x} failed with CUDA status {status}")
    return capturing.value != 0


def placement_of(pointer: int) -> Placement:
    """Return the placement of an address according to the driver; unknown addresses are plain host memory."""
    if not has_gpu():
        return CPU
    attribute = driver().CUpointer_attribute
    status, kind = driver().cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    if int(status) == _INVALID_CONTEXT:
        with current_context(Placement("cuda")):
            return placement_of(pointer)
    if int(status) in (_INVALID_VALUE, _NOT_INITIALIZED):  # unknown to the driver, or the driver is not initialised
        return CPU
    if int(unwrap((status, kind))) == _MEMORY_TYPE_HOST:
        return PINNED
    if int(kind) != _MEMORY_TYPE_DEVICE:
        return CPU
    return Placement(
        "cuda", int(unwrap(driver().cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)))
    )


def memcpy_async(dst: int, src: int, nbytes: int, stream: Stream) -> int:
    """Submit one copy. The driver derives the direction from the addresses. Return the CUDA status, 0 on success."""
    copy = entry_point("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return copy(dst, src, nbytes, stream.handle)


def launch_kernel(function: int, blocks: int, threads: int, parameters: int, stream: Stream) -> None:
    """Launch a kernel with one parameter, stored at the address `parameters`. The launch copies the parameter."""
    addresses = ctypes.c_void_p(parameters)  # an array of one address
    status = _launch_function()(
        function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, ctypes.addressof(addresses), None
    )
    if status != _SUCCESS:
        raise CopyError(f"launching a kernel on {blocks} blocks of {threads} threads failed with CUDA status {status}")


@functools.cache
def _launch_function() -> Callable[..., int]:
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    return entry_point("cuLaunchKernel", pointer, *[number] * 7, pointer, pointer, pointer)


# CUmemcpyAttributes: source access order; source and destination location hints (type and id each, unused); flags
_ATTRIBUTES = (_SRC_ORDER_STREAM, 0, 0, 0, 0, _PREFER_OVERLAP)


@dataclass(frozen=True, slots=True)
class BatchCall:
    """cuMemcpyBatchAsync of one CUDA version. Version 12.8 has an extra argument that returns the failed entry."""

    call: Callable[..., int]
    reports_failure: bool

    @classmethod
    def of_version(cls, version: int) -> BatchCall:
        """Return the call of version 12080 or 13000. Raise UnavailableError if the driver lacks this version."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        reports_failure = version < 13000
        tail = (pointer, pointer) if reports_failure else (pointer,)
        types = (pointer, pointer, pointer, size, pointer, pointer, size, *tail)
        return cls(entry_point("cuMemcpyBatchAsync", *types, version=version), reports_failure)

    def submit(self, table: I64, stream: Stream) -> int | None:
        """Submit independent pieces in chunks until a chunk fails. Return the start of the failed chunk, or None."""
        if stream.handle in LEGACY_DEFAULT_HANDLES:
            # The call refuses the legacy default stream, so a side stream copies. The side stream waits for earlier
            # work on `stream`, and later work on `stream` waits for the side stream.
            side = _side_stream(stream.placement)
            side.wait(stream.record())
            failed = self.submit(table, side)
            stream.wait(side.record())
            return failed
        attributes = (ctypes.c_uint * len(_ATTRIBUTES))(*_ATTRIBUTES)
        first_index, fail_index = ctypes.c_size_t(0), ctypes.c_size_t(0)
        tail = (ctypes.byref(fail_index), stream.handle) if self.reports_failure else (stream.handle,)
        src, dst, nbytes = row_addresses(table)
        for start in range(0, table.shape[1], _MAX_BATCH):
            count = min(_MAX_BATCH, table.shape[1] - start)
            arrays = (dst + 8 * start, src + 8 * start, nbytes + 8 * start)
            if self.call(*arrays, count, ctypes.byref(attributes), ctypes.byref(first_index), 1, *tail) != _SUCCESS:
                return start
        return None


@functools.cache
def _side_stream(placement: Placement) -> Stream:
    return Stream(placement)


@functools.cache
def batch_call(placement: Placement) -> BatchCall:
    """Return the batch call for a GPU, after one self-test. Raise UnavailableError if no call is usable."""
    version = driver_version()
    if torch.cuda.get_device_capability(placement.torch)[0] >= 10:
        raise UnavailableError("cuMemcpyBatchAsync is reported to crash on compute capability 10 and above")
    for wanted in (13000, 12080):
        if version >= wanted:
            call = BatchCall.of_version(wanted)
            try:
                with current_context(placement):
                    _self_test(call, placement)
            except (CopyError, RuntimeError) as error:
                raise UnavailableError(f"cuMemcpyBatchAsync failed its self-test on {placement}: {error}") from error
            return call
    raise UnavailableError(
        f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}; cuMemcpyBatchAsync needs 12.8"
    )


def _self_test(call: BatchCall, placement: Placement) -> None:
    stream = _side_stream(placement)
    with torch.cuda.stream(stream.native):
        source = torch.arange(64, dtype=torch.uint8, device=placement.torch)
        target = torch.zeros_like(source)
    crossed = np.array([[0, 32], [32, 0], [16, 16]])  # 16 bytes from offset 0 to 32, 16 bytes from 32 to 0
    bases = np.array([[source.data_ptr()], [target.data_ptr()], [0]])
    failed = call.submit(crossed + bases, stream)
    stream.synchronize()
    expected = [*range(32, 48), *[0] * 16, *range(16), *[0] * 16]
    if failed is not None or target.tolist() != expected:
        raise CopyError("the call was refused" if failed is not None else "the bytes were wrong")
