"""Sharing memory with numpy, torch, DLPack and CUDA arrays without copies, in both directions."""

from __future__ import annotations

import array as array_module
import gc
import mmap
import re
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import ArgumentError, DTypeError, UnavailableError
from kvtier.memory import CPU, PINNED, Buffer, Placement, Stream, context

names = [dtype.name for dtype in dt.ALL]
packed = [dtype.name for dtype in dt.ALL if dtype.is_packed]
unpacked = [name for name in names if name not in packed]
numpy_dlpack_names = [name for name in unpacked if name not in ("bf16", "fp8_e4m3", "fp8_e5m2")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA GPU")


class OnlyDLPack:
    """A foreign array that supports only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.options: dict[str, Any] = {}

    def __dlpack__(self, **options: Any) -> Any:
        self.options = options
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class LegacyDLPack(OnlyDLPack):
    """A DLPack producer without versioned capsules. `__dlpack__` accepts only the argument `stream`."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.array.__dlpack__(stream=stream)


class OnlyArrayInterface:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class OnlyCudaArrayInterface:
    def __init__(self, tensor: Any, **changed: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, **changed}


def array_of(name: str, count: int = 6) -> np.ndarray:
    return np.arange(count).astype(dt.dtype(name).numpy)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def capsule_name(capsule: Any) -> str:
    return re.search(r'"(.*?)"', repr(capsule))[1]


# ---- wrap ----


@pytest.mark.parametrize("name", unpacked)
def test_wrap_numpy_array_does_not_copy(name):
    array = array_of(name)
    buffer = Buffer.wrap(array)
    assert (buffer.data(), buffer.size, buffer.dtype, buffer.placement) == (address(array), 6, dt.dtype(name), CPU)
    assert buffer.tolist() == array.tolist()
    array[4] = 1
    assert buffer[4] == 1
    buffer[5] = 0
    assert array[5] == 0


@pytest.mark.parametrize("name", unpacked)
def test_wrap_torch_tensor_does_not_copy(name, placement, make):
    tensor = make(placement, array_of(name)).torch()
    buffer = Buffer.wrap(tensor)
    assert (buffer.data(), buffer.size) == (tensor.data_ptr(), 6)
    assert (buffer.dtype, buffer.placement) == (dt.dtype(name), placement)
    assert buffer.tolist() == array_of(name).tolist()
    buffer.fill(1)
    assert tensor.to(torch.float64).tolist() == [1.0] * 6


@pytest.mark.parametrize("name", unpacked)
@pytest.mark.parametrize("producer", [OnlyDLPack, LegacyDLPack])
def test_wrap_torch_dlpack_does_not_copy(name, producer, placement, make):
    tensor = make(placement, array_of(name)).torch()
    buffer = Buffer.wrap(producer(tensor))
    assert (buffer.data(), buffer.dtype, buffer.placement) == (tensor.data_ptr(), dt.dtype(name), placement)
    assert buffer.tolist() == array_of(name).tolist()


@pytest.mark.parametrize("name", numpy_dlpack_names)
@pytest.mark.parametrize("producer", [OnlyDLPack, LegacyDLPack])
def test_wrap_numpy_dlpack_does_not_copy(name, producer):
    array = array_of(name)
    buffer = Buffer.wrap(producer(array))
    assert (buffer.data(), buffer.dtype, buffer.placement) == (address(array), dt.dtype(name), CPU)
    buffer.fill(1)
    assert array.tolist() == [1] * 6


@pytest.mark.parametrize("name", numpy_dlpack_names)
def test_wrap_array_interface_does_not_copy(name):
    array = array_of(name)
    buffer = Buffer.wrap(OnlyArrayInterface(array))
    assert (buffer.data(), buffer.dtype, buffer.tolist()) == (address(array), dt.dtype(name), array.tolist())


@pytest.mark.parametrize(
    ("source", "name", "values"),
    [
        (bytearray(b"abc"), "u8", [97, 98, 99]),
        (memoryview(bytearray(b"abc"))[1:], "u8", [98, 99]),
        (memoryview(bytearray(8)).cast("i"), "i32", [0, 0]),
        (array_module.array("d", [1.5, 2.5]), "f64", [1.5, 2.5]),
        (array_module.array("H", [7, 65535]), "u16", [7, 65535]),
        (mmap.mmap(-1, 4), "u8", [0, 0, 0, 0]),
    ],
    ids=lambda case: type(case).__name__,
)
def test_wrap_bytes_like_object_does_not_copy(source, name, values):
    buffer = Buffer.wrap(source)
    assert (buffer.dtype.name, buffer.tolist(), buffer.readonly) == (name, values, False)
    buffer[0] = 5
    assert memoryview(source)[0] == 5


def test_wrap_flattens_any_shape():
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    assert Buffer.wrap(array).tolist() == list(range(24))
    assert Buffer.wrap(torch.from_numpy(array)).tolist() == list(range(24))
    assert Buffer.wrap(np.array(3.5)).tolist() == [3.5]
    assert Buffer.wrap(np.empty((3, 0), np.float32)).tolist() == []


def test_wrap_buffer_shares_its_memory(placement, make):
    buffer = make(placement, array_of("f32"))
    again = Buffer.wrap(buffer)
    assert (again.data(), again.dtype, again.placement) == (buffer.data(), dt.f32, placement)
    buffer.close()
    assert again.tolist() == array_of("f32").tolist()


@pytest.mark.parametrize("name", packed)
def test_wrap_buffer_keeps_packed_dtype(name):
    assert Buffer.wrap(Buffer(8, name)).dtype.name == name


def test_wrap_of_torch_fp4_pairs_has_fp4_elements(placement, make):
    pairs = make(placement, b"\x10\x32").torch().view(torch.float4_e2m1fn_x2)
    buffer = Buffer.wrap(pairs)
    assert (buffer.size, buffer.dtype, buffer.tolist()) == (4, dt.fp4, [0.0, 0.5, 1.0, 1.5])


def test_wrap_accepts_tensor_that_requires_grad():
    tensor = torch.ones(3, requires_grad=True)
    assert Buffer.wrap(tensor).data() == tensor.data_ptr()


def test_wrap_lazily_negated_tensor_raises_or_negates():
    lazy = torch.tensor([1 + 2j]).conj().imag
    assert lazy.is_neg()
    assert lazy.is_contiguous()
    try:
        buffer = Buffer.wrap(lazy)
    except ArgumentError:
        return  # an error is also allowed
    assert buffer.tolist() == lazy.tolist()


# ---- wrap: unsupported sources ----


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((3, 4))[:, :2],
        np.zeros((3, 4)).T,
        np.zeros(8)[::2],
        np.zeros(8)[::-1],
        np.broadcast_to(np.zeros(1), (4,)),
        memoryview(bytes(8))[::2],
        torch.zeros(3, 4).T,
        torch.zeros(8)[::2],
        torch.zeros(1).expand(4),
        OnlyDLPack(torch.zeros(3, 4).T),
        OnlyArrayInterface(np.zeros(8)[::2]),
    ],
    ids=["columns", "transposed", "step", "reversed", "broadcast", "memoryview", *["torch"] * 3, "dlpack", "interface"],
)
def test_wrap_non_contiguous_raises_with_shape_and_strides(source):
    with pytest.raises(ArgumentError, match=r"one flat region.*shape \(\d.*strides \(-?\d"):
        Buffer.wrap(source)


@pytest.mark.parametrize("name", ["i16", "f32", "u64"])
def test_wrap_big_endian_array_raises(name):
    array = array_of(name)
    with pytest.raises(DTypeError, match="byte order '>'"):
        Buffer.wrap(array.astype(array.dtype.newbyteorder(">")))


@pytest.mark.parametrize("foreign", [ml_dtypes.uint2, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn])
def test_wrap_unpacked_ml_dtypes_raises_and_names_buffer_pack(foreign):
    array = np.zeros(4, foreign)
    with pytest.raises(DTypeError, match=r"1 \w+ per byte, but kvtier has \d per byte; copy with Buffer\.pack"):
        Buffer.wrap(array)
    assert Buffer.pack(array, foreign.__name__).size == 4


@pytest.mark.parametrize(
    ("source", "type_name"),
    [
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, object), "object"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, "S1"), "bytes8"),
        (np.zeros(2, [("a", "i4")]), "void32"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
        (np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), "float8_e4m3b11fnuz"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(2).to(torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_wrap_unsupported_dtype_raises_with_name(source, type_name):
    with pytest.raises(DTypeError, match=type_name):
        Buffer.wrap(source)


@pytest.mark.parametrize("source", [None, 3, "text", [1, 2], object()], ids=lambda case: type(case).__name__)
def test_wrap_object_without_memory_raises(source):
    with pytest.raises(ArgumentError, match=rf"over {type(source).__name__}: .*__dlpack__ or the buffer protocol"):
        Buffer.wrap(source)


def test_wrap_misaligned_array_raises():
    storage = np.zeros(17, np.uint8)
    odd = storage[1:] if address(storage) % 8 == 0 else storage[:-1]
    with pytest.raises(ArgumentError, match=r"8 bytes|multiple of 8"):
        Buffer.wrap(odd.view(np.int64))


def test_wrap_tensor_on_unsupported_device_raises():
    with pytest.raises(ArgumentError, match="meta"):
        Buffer.wrap(torch.empty(3, device="meta"))


@needs_no_gpu
def test_wrap_cuda_array_without_gpu_raises():
    class CudaArray:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012

    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU"):
        Buffer.wrap(CudaArray())


@needs_no_gpu
def test_wrap_cuda_dlpack_without_gpu_raises():
    class CudaArray:
        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("must not be called without a GPU")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU"):
        Buffer.wrap(CudaArray())


# ---- wrap: read-only sources ----


def readonly(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "source",
    [
        b"\x00\x01\x02\x03",
        memoryview(b"\x00\x01\x02\x03"),
        readonly(np.arange(4, dtype=np.uint8)),
        OnlyArrayInterface(readonly(np.arange(4, dtype=np.uint8))),
        OnlyDLPack(readonly(np.arange(4, dtype=np.uint8))),
    ],
    ids=["bytes", "memoryview", "numpy", "array interface", "dlpack"],
)
def test_wrap_read_only_source_returns_read_only_buffer(source):
    buffer = Buffer.wrap(source)
    assert buffer.tolist() == [0, 1, 2, 3]
    assert buffer.readonly
    with pytest.raises(ArgumentError, match="read-only"):
        buffer.fill(9)
    assert buffer.tolist() == [0, 1, 2, 3]


def test_read_only_buffer_exports_are_read_only():
    buffer = Buffer.wrap(bytes(range(8)))[2:6]
    assert buffer.memoryview().readonly
    assert not buffer.numpy().flags.writeable
    assert not np.asarray(buffer).flags.writeable
    assert buffer.__array_interface__["data"] == (buffer.data(), True)
    assert buffer.memoryview().tobytes() == bytes([2, 3, 4, 5])


def test_torch_and_dlpack_export_of_read_only_buffer_raise():
    buffer = Buffer.wrap(bytes(4))
    with pytest.raises(ArgumentError, match="read-only"):
        buffer.torch()
    with pytest.raises(ArgumentError, match="read-only"):
        buffer.__dlpack__()


def test_read_only_buffer_has_dlpack_device():
    assert Buffer.wrap(bytes(4)).__dlpack_device__() == (1, 0)


# ---- export ----


@pytest.mark.parametrize("name", unpacked)
def test_numpy_export_shares_memory(name, make):
    buffer = make(CPU, array_of(name))[2:]
    array = buffer.numpy()
    assert (address(array), array.dtype, array.tolist()) == (
        buffer.data(),
        dt.dtype(name).numpy,
        array_of(name).tolist()[2:],
    )
    array[0] = 1
    assert buffer[0] == 1


@pytest.mark.parametrize("name", packed)
def test_numpy_export_of_packed_dtype_is_bytes(name, make):
    array = make(CPU, b"\x01\x02\x03", name).numpy()
    assert (array.dtype, array.tolist()) == (np.uint8, [1, 2, 3])


@pytest.mark.parametrize("name", names)
def test_asarray_matches_numpy_export(name):
    buffer = Buffer(8, name)
    buffer.fill(1)
    array = np.asarray(buffer)
    assert (address(array), array.dtype) == (buffer.data(), buffer.numpy().dtype)
    assert array.tobytes() == buffer.memoryview().tobytes()


def test_asarray_converts_and_copies_on_request(make):
    buffer = make(CPU, array_of("bf16"))
    converted = np.asarray(buffer, dtype=np.float64)
    assert converted.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert address(np.array(buffer)) != buffer.data()
    assert address(np.array(buffer, copy=False)) == buffer.data()


@pytest.mark.parametrize("name", names)
def test_torch_export_shares_memory(name, placement, make):
    raw = bytes(range(1, 17)) if name != "bool" else bytes([0, 1] * 8)
    buffer = make(placement, raw, name)
    tensor = buffer.torch()
    assert (tensor.data_ptr(), tensor.device) == (buffer.data(), placement.torch)
    assert tensor.view(torch.uint8).tolist() == list(raw)
    if name in unpacked:
        assert str(tensor.dtype) == f"torch.{dt.dtype(name).numpy.name}"
        assert tensor.numel() == buffer.size


def test_torch_export_of_packed_dtype_is_uint8_except_for_fp4():
    assert Buffer(4, "fp4").torch().dtype == torch.float4_e2m1fn_x2
    assert Buffer(4, "u4").torch().dtype == Buffer(8, "u2").torch().dtype == torch.uint8


def test_write_to_torch_export_changes_buffer(placement, make):
    buffer = make(placement, array_of("i32"))
    buffer[2:4].torch().fill_(-1)
    assert buffer.tolist() == [0, 1, -1, -1, 4, 5]


@pytest.mark.parametrize("name", names)
def test_memoryview_export_shares_bytes(name, make):
    raw = bytearray(range(16)) if name != "bool" else bytearray([0, 1] * 8)
    buffer = make(CPU, raw, name)
    view = buffer.memoryview()
    assert (view.format, view.contiguous, view.readonly, view.tobytes()) == ("B", True, False, bytes(raw))
    view[3] = 1
    raw[3] = 1
    assert buffer.view("u8").tolist() == list(raw)


@pytest.mark.parametrize("name", numpy_dlpack_names)
def test_array_interface_describes_memory(name, make):
    buffer = make(CPU, array_of(name))[1:]
    exported, expected = buffer.__array_interface__, array_of(name).__array_interface__
    assert (exported["typestr"], exported["shape"], exported["data"]) == (
        expected["typestr"],
        (5,),
        (buffer.data(), False),
    )
    assert exported["version"] == 3
    assert exported["strides"] is None


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_array_interface_is_absent_for_dtypes_without_typestr(name):
    assert not hasattr(Buffer(4, name), "__array_interface__")


def test_array_interface_of_packed_dtype_is_bytes():
    exported = Buffer(5, "u4").__array_interface__
    assert (exported["typestr"], exported["shape"]) == ("|u1", (3,))


@pytest.mark.parametrize("name", names)
def test_dlpack_export_is_read_by_torch(name, placement):
    buffer = Buffer(8, name, placement)
    buffer.fill(1)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tensor.device, tensor.dtype) == (buffer.data(), placement.torch, buffer.torch().dtype)
    assert torch.equal(tensor.view(torch.uint8), buffer.bytes_tensor())


@pytest.mark.parametrize("name", numpy_dlpack_names)
def test_dlpack_export_is_read_by_numpy(name, make):
    buffer = make(CPU, array_of(name))[1:4]
    array = np.from_dlpack(buffer)
    assert (address(array), array.dtype, array.tolist()) == (
        buffer.data(),
        dt.dtype(name).numpy,
        array_of(name).tolist()[1:4],
    )


def test_dlpack_capsule_version_follows_max_version(placement):
    buffer = Buffer(4, "f32", placement)
    assert capsule_name(buffer.__dlpack__(max_version=(1, 0))) == "dltensor_versioned"
    assert capsule_name(buffer.__dlpack__(max_version=(2, 0))) == "dltensor_versioned"
    assert capsule_name(buffer.__dlpack__(max_version=(0, 8))) == "dltensor"
    assert capsule_name(buffer.__dlpack__()) == "dltensor"


def test_dlpack_device_matches_placement(placement):
    kind, index = Buffer(4, "f32", placement).__dlpack_device__()
    assert type(kind) is type(index) is int
    assert (kind, index) == ({"cpu": 1, "pinned": 3, "cuda": 2}[placement.kind], 0)


def test_dlpack_with_copy_returns_a_copy(placement, make):
    buffer = make(placement, array_of("i32"))
    twin = torch.from_dlpack(buffer.__dlpack__(max_version=(1, 0), copy=True))
    assert twin.data_ptr() != buffer.data()
    assert twin.tolist() == buffer.tolist()


def test_host_export_of_gpu_memory_raises(placement):
    buffer = Buffer(8, "u4", placement)
    for export in (Buffer.numpy, Buffer.memoryview, Buffer.unpack, np.asarray):
        if placement.is_device:
            with pytest.raises(ArgumentError, match=rf"on {placement}; copy it to a 'cpu' Buffer"):
                export(buffer)
        else:
            assert export(buffer) is not None
    assert hasattr(buffer, "__array_interface__") == (not placement.is_device)
    assert hasattr(buffer, "__cuda_array_interface__") == placement.is_device


@given(st.binary(max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_all_exports_return_identical_bytes(raw, start, stop):
    buffer, expected = Buffer.wrap(bytearray(raw))[start:stop], raw[start:stop]
    assert buffer.memoryview().tobytes() == expected
    assert buffer.numpy().tobytes() == expected
    assert np.asarray(buffer).tobytes() == expected
    assert bytes(buffer.torch().tolist()) == expected
    assert bytes(torch.from_dlpack(buffer).tolist()) == expected
    assert np.from_dlpack(buffer).tobytes() == expected
    assert Buffer.wrap(buffer).tolist() == list(expected)


# ---- lifetime ----


def test_wrapped_array_lives_as_long_as_any_derived_object():
    array = np.arange(8, dtype=np.int32)
    alive = weakref.ref(array)
    held: Any = Buffer.wrap(array)
    del array
    for derive in (lambda b: b[2:], lambda b: b.view("u8"), lambda b: b.slice(4), lambda b: b.numpy()):
        held = derive(held)
        gc.collect()
        assert alive() is not None
    assert held.view(np.int32).tolist() == [3, 4, 5, 6, 7]
    del held
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda array: Buffer.wrap(torch.from_numpy(array)),
        lambda array: Buffer.wrap(OnlyDLPack(array)),
        lambda array: Buffer.wrap(LegacyDLPack(torch.from_numpy(array))),
        lambda array: Buffer.wrap(OnlyArrayInterface(array)),
        lambda array: Buffer.wrap(memoryview(array)),
        lambda array: Buffer.wrap(Buffer.wrap(array)),
    ],
    ids=["torch", "dlpack", "legacy dlpack", "array interface", "memoryview", "buffer"],
)
def test_wrap_keeps_source_alive_until_buffer_is_freed(wrap):
    array = np.arange(8, dtype=np.int32)
    alive = weakref.ref(array)
    buffer = wrap(array)
    del array
    gc.collect()
    assert alive() is not None
    assert buffer.tolist() == list(range(8))
    del buffer
    gc.collect()
    assert alive() is None


def test_buffer_close_releases_wrapped_source():
    array = np.arange(8, dtype=np.int32)
    alive = weakref.ref(array)
    buffer = Buffer.wrap(array)
    del array
    buffer.close()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "export",
    [
        lambda b: b.torch(),
        lambda b: torch.from_dlpack(b),
        lambda b: torch.from_dlpack(b.__dlpack__()),
        lambda b: torch.from_dlpack(b.__dlpack__(max_version=(1, 0))),
        lambda b: Buffer.wrap(b).torch(),
    ],
    ids=["torch", "from_dlpack", "legacy capsule", "versioned capsule", "wrap"],
)
def test_torch_export_keeps_memory_alive_after_buffer_close(export, placement, make):
    buffer = make(placement, array_of("i32"))
    memory = weakref.ref(buffer.holding)
    exported = export(buffer)
    part = exported[2:]
    buffer.close()
    del buffer, exported
    gc.collect()
    assert memory() is not None
    assert part.tolist() == [2, 3, 4, 5]
    del part
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    "export",
    [
        lambda b: b.numpy(),
        lambda b: np.asarray(b.memoryview()).view(np.int32),
        np.asarray,
        np.from_dlpack,
        lambda b: np.asarray(OnlyInterfaceOf(b)),
    ],
    ids=["numpy", "memoryview", "asarray", "from_dlpack", "array interface"],
)
def test_host_export_keeps_memory_alive_after_buffer_close(export, make):
    buffer = make(CPU, array_of("i32"))
    memory = weakref.ref(buffer.holding)
    part = export(buffer)[2:]
    buffer.close()
    del buffer
    gc.collect()
    assert memory() is not None
    assert part.tolist() == [2, 3, 4, 5]
    del part
    gc.collect()
    assert memory() is None


class OnlyInterfaceOf:
    """Exposes the `__array_interface__` of a Buffer, and no other protocol."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.buffer.__array_interface__


def test_unused_dlpack_capsule_releases_memory(placement):
    buffer = Buffer(4, "f32", placement)
    memory = weakref.ref(buffer.holding)
    capsules = [buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 0))]
    del buffer
    gc.collect()
    assert memory() is not None
    capsules.clear()
    gc.collect()
    assert memory() is None


# ---- synchronization with CUDA streams ----


def delayed_fill(tensor: torch.Tensor, value: int, stream: torch.cuda.Stream) -> None:
    """Enqueue a fill that completes long after this function returns."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(value)


@needs_gpu
@pytest.mark.parametrize("name", ["u8", "i32", "f16", "f64"])
def test_wrap_cuda_array_does_not_copy(name):
    tensor = torch.arange(6, device="cuda").to(getattr(torch, dt.dtype(name).numpy_name)).reshape(2, 3)
    buffer = Buffer.wrap(OnlyCudaArrayInterface(tensor))
    assert (buffer.data(), buffer.size, str(buffer.placement)) == (tensor.data_ptr(), 6, "cuda:0")
    assert (buffer.dtype.name, buffer.tolist(), buffer.readonly) == (name, [0, 1, 2, 3, 4, 5], False)


@needs_gpu
def test_wrap_read_only_cuda_array_returns_read_only_buffer():
    tensor = torch.zeros(4, device="cuda")
    buffer = Buffer.wrap(OnlyCudaArrayInterface(tensor, data=(tensor.data_ptr(), True)))
    assert buffer.readonly
    with pytest.raises(ArgumentError, match="read-only"):
        buffer.fill(1)


@needs_gpu
def test_wrap_strided_or_big_endian_cuda_array_raises():
    tensor = torch.zeros(4, 4, device="cuda")
    with pytest.raises(ArgumentError, match=r"shape \(4, 4\) has strides \(4, 16\)"):
        Buffer.wrap(OnlyCudaArrayInterface(tensor.T))
    with pytest.raises(DTypeError, match="byte order"):
        Buffer.wrap(OnlyCudaArrayInterface(tensor, typestr=">f4"))


@needs_gpu
def test_wrap_cuda_array_keeps_owner_alive():
    owner = OnlyCudaArrayInterface(torch.arange(4, device="cuda"))
    alive = weakref.ref(owner)
    buffer = Buffer.wrap(owner)[1:]
    del owner
    gc.collect()
    assert alive() is not None
    assert buffer.tolist() == [1, 2, 3]
    del buffer
    gc.collect()
    assert alive() is None


@needs_gpu
@pytest.mark.parametrize("in_context", [False, True], ids=["current stream of torch", "stream of the context"])
def test_wrap_cuda_array_waits_for_producer_stream(in_context):
    producer, tensor = torch.cuda.Stream(), torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    delayed_fill(tensor, 7, producer)
    with context(stream=Stream("cuda:0") if in_context else None):
        buffer = Buffer.wrap(OnlyCudaArrayInterface(tensor, stream=producer.cuda_stream))
        assert buffer[-1] == 7


@needs_gpu
@pytest.mark.parametrize("stream", [None, 1, 2], ids=["none", "legacy default", "per-thread default"])
def test_wrap_cuda_array_accepts_special_stream_numbers(stream):
    tensor = torch.arange(4, device="cuda")
    for ours in (None, Stream("cuda:0")):
        with context(stream=ours):
            assert Buffer.wrap(OnlyCudaArrayInterface(tensor, stream=stream)).tolist() == [0, 1, 2, 3]


@needs_gpu
@pytest.mark.parametrize("stream", [None, 1, -1], ids=["none", "legacy default", "do not wait"])
def test_dlpack_export_accepts_special_stream_numbers(stream, make):
    buffer = make(Placement("cuda", 0), array_of("i32"))
    for ours in (None, Stream("cuda:0")):
        with context(stream=ours):
            capsule = buffer.__dlpack__(stream=stream, max_version=(1, 0))
        assert torch.from_dlpack(capsule).tolist() == [0, 1, 2, 3, 4, 5]


@needs_gpu
@pytest.mark.parametrize("name", ["u8", "i32", "f16", "f64"])
def test_cuda_array_interface_describes_memory(name):
    buffer = Buffer(8, name, "cuda:0")
    buffer.fill(3)
    part = buffer[2:]
    tensor = torch.as_tensor(OnlyCudaInterfaceOf(part), device="cuda")
    assert (tensor.data_ptr(), tensor.tolist()) == (part.data(), [3] * 6)
    assert part.__cuda_array_interface__["typestr"] == dt.dtype(name).numpy.str
    assert part.__cuda_array_interface__["version"] == 3


class OnlyCudaInterfaceOf:
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.buffer.__cuda_array_interface__


@needs_gpu
def test_cuda_array_interface_has_handle_of_context_stream():
    buffer, stream = Buffer(8, "f32", "cuda:0"), Stream("cuda:0")
    with context(stream=stream):
        assert buffer.__cuda_array_interface__["stream"] == stream.handle
    assert buffer.__cuda_array_interface__["stream"] == 1, "the legacy default stream must be 1, not 0"
    with torch.cuda.stream(torch.cuda.Stream()):
        assert buffer.__cuda_array_interface__["stream"] == torch.cuda.current_stream().cuda_stream


@needs_gpu
def test_dlpack_consumer_stream_waits_for_pending_work():
    buffer, ours, consumer = Buffer(1 << 20, "i32", "cuda:0"), Stream("cuda:0"), torch.cuda.Stream()
    buffer.fill(0)
    torch.cuda.synchronize()
    delayed_fill(buffer.torch(), 7, ours.native)
    with context(stream=ours):
        capsule = buffer.__dlpack__(stream=consumer.cuda_stream, max_version=(1, 0))
    with torch.cuda.stream(consumer):
        assert torch.from_dlpack(capsule)[-1].item() == 7


@needs_gpu
def test_from_dlpack_waits_for_context_stream():
    buffer, ours = Buffer(1 << 20, "i32", "cuda:0"), Stream("cuda:0")
    buffer.fill(0)
    torch.cuda.synchronize()
    delayed_fill(buffer.torch(), 7, ours.native)
    with context(stream=ours):
        tensor = torch.from_dlpack(buffer)
    assert tensor[-1].item() == 7


@needs_gpu
def test_wrap_dlpack_passes_context_stream_to_producer():
    source, ours = OnlyDLPack(torch.arange(4, device="cuda")), Stream("cuda:0")
    with context(stream=ours):
        assert Buffer.wrap(source).tolist() == [0, 1, 2, 3]
    assert source.options["stream"] == ours.handle


@needs_gpu
def test_wrap_dlpack_waits_for_producer_stream():
    producer, ours = torch.cuda.Stream(), Stream("cuda:0")
    tensor = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    class BusyProducer(OnlyDLPack):
        def __dlpack__(self, **options: Any) -> Any:
            with torch.cuda.stream(producer):
                return super().__dlpack__(**options)

    delayed_fill(tensor, 7, producer)
    with context(stream=ours):
        assert Buffer.wrap(BusyProducer(tensor))[-1] == 7


@needs_gpu
def test_wrap_pinned_array_returns_pinned_buffer():
    tensor = torch.arange(4).pin_memory()
    assert Buffer.wrap(tensor).placement == PINNED
    assert Buffer.wrap(OnlyDLPack(tensor)).placement == PINNED
    assert Buffer.wrap(tensor.numpy()).placement == PINNED
    assert Buffer.wrap(torch.arange(4)).placement == CPU
