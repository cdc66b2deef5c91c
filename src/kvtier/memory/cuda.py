"""The CUDA driver, through cuda-bindings (the `cuda` extra). The only file, with gather.py, that calls it.

Everything raises UnavailableError with the reason where the package, the driver or the entry point is missing.
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
# One submission of 51,828 entries hung a driver 580 (vllm issue 49276); chunks of this size cost nothing measurable.
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
    """The value of a driver call, or an error naming the CUDA status."""
    status, *values = result
    if int(status) != _SUCCESS:
        raise CopyError(f"the CUDA driver answered {status.name} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def entry_point(name: str, *argument_types: Any, version: int = 12000) -> Callable[..., int]:
    """A driver function as this CUDA version has it, which returns its status as an int.

    cuda-bindings finds it; ctypes calls it, at a third of the cost of a wrapper that makes an enum of every status.
    """
    status, address, found = driver().cuGetProcAddress(name.encode(), version, 0)
    if int(status) != _SUCCESS or int(found) != 0 or not int(address):
        raise UnavailableError(f"the driver has no {name} of version {version}")
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(address))
    return function


def driver_release() -> str:
    """The driver's own version, such as 580.159.04; the CUDA version it speaks where it does not say."""
    told = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(?:\.\d+)?", told.read_text()) if told.exists() else None
    return found[0] if found else str(driver_version())


def driver_version() -> int:
    """The CUDA version the driver speaks, as 1000 * major + 10 * minor."""
    return int(unwrap(driver().cuDriverGetVersion()))


@functools.cache
def _primary_context(index: int) -> int:
    """The context torch uses on this GPU, kept for the life of the process."""
    unwrap(driver().cuInit(0))  # nobody may have used the GPU in this process yet; more than once is fine
    device = unwrap(driver().cuDeviceGet(index))
    return int(unwrap(driver().cuDevicePrimaryCtxRetain(device)))


def current_context(placement: Placement) -> AbstractContextManager[None]:
    """Inside the block, driver calls of this thread mean this GPU.

    A new thread has no context, and another GPU's is put aside. Without cuda-bindings nobody calls the driver, and
    torch sees to itself.
    """
    if not has_driver():
        return nullcontext()
    wanted, found = _primary_context(placement.index), ctypes.c_void_p()
    entry_point("cuCtxGetCurrent", ctypes.c_void_p)(ctypes.addressof(found))
    return nullcontext() if found.value == wanted else _pushed_context(wanted)


@contextmanager
def _pushed_context(wanted: int) -> Iterator[None]:
    unwrap(driver().cuCtxPushCurrent(wanted))
    try:
        yield
    finally:
        unwrap(driver().cuCtxPopCurrent())


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside the block, this thread may do what is unsafe while a stream captures; none of it goes into the graph."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = unwrap(driver().cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        unwrap(driver().cuThreadExchangeStreamCaptureMode(before))


def has_driver() -> bool:
    """Whether cuda-bindings is there."""
    try:
        driver()
    except UnavailableError:
        return False
    return True


def is_capturing(stream: Stream) -> bool:
    """Whether work given to `stream` goes into a CUDA graph instead of to the GPU."""
    try:
        ask = entry_point("cuStreamIsCapturing", ctypes.c_void_p, ctypes.c_void_p)
    except UnavailableError:
        with torch.cuda.stream(stream.native):  # ten times the cost, without cuda-bindings
            return torch.cuda.is_current_stream_capturing()
    answer = ctypes.c_int(0)
    status = ask(stream.handle, ctypes.addressof(answer))
    if status != _SUCCESS:
        raise CopyError(f"asking stream {stream.handle:#x} whether it is capturing failed with CUDA status {status}")
    return answer.value != 0


def placement_of(pointer: int) -> Placement:
    """Where an address lives, as the driver knows it; addresses it does not know are plain host memory."""
    if not has_gpu():
        return CPU
    attribute = driver().CUpointer_attribute
    status, kind = driver().cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    if int(status) == _INVALID_CONTEXT:
        with current_context(Placement("cuda")):
            return placement_of(pointer)
    if int(status) in (_INVALID_VALUE, _NOT_INITIALIZED):  # memory the driver does not know, or knows none at all yet
        return CPU
    if int(unwrap((status, kind))) == _MEMORY_TYPE_HOST:
        return PINNED
    if int(kind) != _MEMORY_TYPE_DEVICE:
        return CPU
    return Placement(
        "cuda", int(unwrap(driver().cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)))
    )


def memcpy_async(dst: int, src: int, nbytes: int, stream: Stream) -> int:
    """One asynchronous copy, direction found by the driver. Returns the CUDA status, 0 if it was taken."""
    copy = entry_point("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return copy(dst, src, nbytes, stream.handle)


def launch_kernel(function: int, blocks: int, threads: int, parameters: int, stream: Stream) -> None:
    """Launch a kernel of one parameter, which lies at the address `parameters` and is copied before this returns."""
    addresses = ctypes.c_void_p(parameters)  # an array of one
    status = _launch_function()(
        function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, ctypes.addressof(addresses), None
    )
    if status != _SUCCESS:
        raise CopyError(f"launching a kernel on {blocks} blocks of {threads} threads failed with CUDA status {status}")


@functools.cache
def _launch_function() -> Callable[..., int]:
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    return entry_point("cuLaunchKernel", pointer, *[number] * 7, pointer, pointer, pointer)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class BatchCall:
    """cuMemcpyBatchAsync, in the signature this driver has: 12.8 has one more argument, the entry that failed."""

    call: Callable[..., int]
    reports_failure: bool

    @classmethod
    def of_version(cls, version: int) -> BatchCall:
        """The call as version 12080 or 13000 has it; UnavailableError if the driver does not."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        reports_failure = version < 13000
        tail = (pointer, pointer) if reports_failure else (pointer,)
        types = (pointer, pointer, pointer, size, pointer, pointer, size, *tail)
        return cls(entry_point("cuMemcpyBatchAsync", *types, version=version), reports_failure)

    def submit(self, table: I64, stream: Stream) -> int | None:
        """Submit independent pieces (rows as in Entries). Returns the first piece of the chunk that failed, or None."""
        if stream.handle in LEGACY_DEFAULT_HANDLES:
            # the call refuses the legacy default stream: run beside it, ordered after what it has and before what
            # follows
            beside = _side_stream(stream.placement)
            beside.wait(stream.record())
            failed = self.submit(table, beside)
            stream.wait(beside.record())
            return failed
        attributes = _Attributes(_SRC_ORDER_STREAM, _Location(), _Location(), _PREFER_OVERLAP)
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
    """The batch call for a GPU, looked up by version and tested once on it; UnavailableError says why there is none."""
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
        f"the driver speaks CUDA {version // 1000}.{version % 1000 // 10}; cuMemcpyBatchAsync needs 12.8"
    )


def _self_test(call: BatchCall, placement: Placement) -> None:
    stream = _side_stream(placement)
    with torch.cuda.stream(stream.native):
        source = torch.arange(64, dtype=torch.uint8, device=placement.torch)
        target = torch.zeros_like(source)
    crossed = np.array([[0, 32], [32, 0], [16, 16]])  # two pieces that change places
    bases = np.array([[source.data_ptr()], [target.data_ptr()], [0]])
    failed = call.submit(crossed + bases, stream)
    stream.synchronize()
    expected = [*range(32, 48), *[0] * 16, *range(16), *[0] * 16]
    if failed is not None or target.tolist() != expected:
        raise CopyError("the call was refused" if failed is not None else "the bytes were wrong")
