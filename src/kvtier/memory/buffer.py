"""Buffer: a flat, typed region of host, pinned or GPU memory."""

from __future__ import annotations

import builtins
import numbers
import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from kvtier import dtype as dt
from kvtier.dtype import DType
from kvtier.errors import ArgumentError, DTypeError, RangeError, StateError
from kvtier.memory import interop, torch_types
from kvtier.memory.allocator import Allocator
from kvtier.memory.context import allocate, choose_stream, launch
from kvtier.memory.placement import CPU, Placement
from kvtier.memory.region import MemoryRef, Region, array_interface
from kvtier.memory.stream import Stream
from kvtier.memory.torch_types import BITS, AnyDType, element_type, memory_type, torch_dtype

Scalar = int | float | bool


class Buffer:
    """A flat array of one element type. Slices, views and exports share the memory and keep it alive.

        Buffer()                              empty, without a type            falsy
        Buffer(dtype="bf16")                  empty, typed                     falsy
        Buffer(1024, "bf16", "pinned")        memory at this placement, from the current allocator
        Buffer(1024, "bf16", allocator=a)     memory from this allocator
        Buffer.from_pointer(p, 1024, "bf16")  memory at an address; owner=... keeps the memory alive
        Buffer.wrap(array)                    memory of a numpy, torch, DLPack or CUDA array, or bytes, without a copy

    New memory is uninitialised. Sizes and offsets count elements; `nbytes` counts bytes. Two Buffers are equal if they
    cover the same memory with the same element type; contents are never compared.
    """

    __slots__ = ("__weakref__", "_exported", "_offset_bytes", "_region", "dtype", "placement", "size")

    def __init__(
        self,
        size: int | None = None,
        dtype: AnyDType = dt.null,
        placement: Placement | str | None = None,
        *,
        allocator: Allocator | None = None,
    ) -> None:
        element = element_type(dtype)
        where = Placement.parse(placement) if placement is not None else allocator.placement if allocator else CPU
        region: Region | None = None
        if size is not None:
            count = operator.index(size)
            if element == dt.null:
                raise DTypeError(
                    f"a Buffer of {count} elements needs an element type, for example Buffer({count}, 'bf16')"
                )
            if allocator is not None and allocator.placement != where:
                raise ArgumentError(f"an allocator of {allocator.placement} memory cannot allocate {where} memory")
            region = Region(allocate(element.nbytes(count), where, allocator))
        self._set(region, 0, 0 if size is None else count, element, where)

    def _set(self, region: Region | None, offset_bytes: int, size: int, dtype: DType, placement: Placement) -> None:
        self._region = region
        self._offset_bytes = offset_bytes
        self.size = size
        self.dtype = dtype
        self.placement = placement
        self._exported: MemoryRef | None = None

    @classmethod
    def _make(cls, region: Region | None, offset_bytes: int, size: int, dtype: DType, placement: Placement) -> Buffer:
        made = cls.__new__(cls)
        made._set(region, offset_bytes, size, dtype, placement)
        return made

    @classmethod
    def from_pointer(
        cls, pointer: int, size: int, dtype: AnyDType, placement: Placement | str = CPU, *, owner: object = None
    ) -> Buffer:
        """Return a Buffer at an address.

        The Buffer keeps `owner` alive. Without an owner, the caller must keep the memory alive.
        """
        element, where = memory_type(dtype), Placement.parse(placement).require()
        size = operator.index(size)
        nbytes = element.nbytes(size)
        if pointer <= 0 and nbytes:
            raise ArgumentError(f"address {pointer:#x} cannot hold {nbytes} bytes")
        if pointer % element.item_bytes:
            raise ArgumentError(
                f"address {pointer:#x} is not a multiple of {element.item_bytes}, the size of one {element}"
            )
        return cls._make(Region(MemoryRef(pointer, nbytes, where, owner)), 0, size, element, where)

    @classmethod
    def wrap(cls, source: Any) -> Buffer:
        """Use the memory of a numpy array, torch tensor, DLPack or CUDA array, or bytes-like object, without copying.

        The source must be contiguous and is kept alive. Read-only sources make read-only Buffers. On CUDA, the
        current stream waits for the pending work that the array protocol reports. A torch tensor reports none.
        """
        if isinstance(source, Buffer):  # with its own Region, so that the two Buffers are closed separately
            region = Region(source.holding, readonly=source.readonly)
            return cls._make(region, source._offset_bytes, source.size, source.dtype, source.placement)
        region, size, dtype = interop.adopt(source)
        return cls._make(region, 0, size, dtype, region.holding.placement)

    @classmethod
    def pack(cls, values: Any, dtype: AnyDType | None = None) -> Buffer:
        """Make a host Buffer of a packed type, such as fp4.

        `values` are either ml_dtypes elements or codes. A code is a uint8 with the bits of one element.
        """
        array = np.ascontiguousarray(values).reshape(-1)
        element = dt.dtype(array.dtype) if dtype is None else element_type(dtype)
        if not element.is_packed:
            raise DTypeError(f"{element} is not packed; wrap an array of it with Buffer.wrap(array)")
        if array.dtype != np.uint8 and dt.dtype(array.dtype) != element:
            raise DTypeError(f"pack() needs {element} elements of ml_dtypes or their codes as uint8, got {array.dtype}")
        codes = array.view(np.uint8)
        if array.dtype == np.uint8 and codes.size and int(codes.max()) >> element.bits:
            raise RangeError(f"codes of {element} must be 0 to {(1 << element.bits) - 1}, got {int(codes.max())}")
        packed = torch_types.pack_codes(element, codes)
        return cls._make(interop.adopt(packed)[0], 0, codes.size, element, CPU)

    # ---- properties ----

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes, rounded up."""
        return self.dtype.nbytes(self.size)

    @property
    def base(self) -> int:
        """Offset of the first element from the start of the memory, in elements."""
        return self._offset_bytes * 8 // self.dtype.bits

    @property
    def readonly(self) -> bool:
        return self._region is not None and self._region.readonly

    @property
    def holding(self) -> MemoryRef:
        """The reference that keeps the memory alive, for code that submits its own copies."""
        return self._open().holding

    def __bool__(self) -> bool:
        return self._region is not None and self._region.is_open

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Buffer):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        address = self._region.pointer + self._offset_bytes if self._region else 0
        return (address, self.size, self.dtype, self.placement)

    def __repr__(self) -> str:
        state = "empty" if self._region is None else "" if self else "closed"
        return f"Buffer({self.size}, {self.dtype.name!r}, {str(self.placement)!r}{', ' + state if state else ''})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Buffer cannot be pickled; use kvtier.memory.save and kvtier.memory.load")

    def close(self) -> None:
        """Close all Buffers that share this memory as slices or views. Exports and copies in flight stay valid."""
        if self._region is not None:
            self._region.close()

    # ---- addresses ----

    def data(self, dtype: AnyDType | None = None) -> int:
        """Return the address of the first element. Raise DTypeError if `dtype` is given and is not the element type."""
        if dtype is not None:
            self.typed(dtype)
        return self.raw_data()

    def raw_data(self, offset: int = 0) -> int:
        """Return the address of element `offset` in [0, size]. A packed element must start on a byte boundary."""
        region = self._open()
        if not 0 <= offset <= self.size:
            raise RangeError(f"offset {offset} is outside 0..{self.size}")
        return region.holding.pointer + self._offset_bytes + self.dtype.offset_bytes(offset)

    def data_or(self, default: int) -> int:
        """Return the address of the first element, or `default` if the Buffer is empty."""
        return default if self._region is None else self.raw_data()

    # ---- slices and views ----

    def slice(self, base: int, size: int | None = None) -> Buffer:
        """Return elements [base, base + size), or all elements from `base` on, as a Buffer over the same memory."""
        base = operator.index(base)
        count = self.size - base if size is None else operator.index(size)
        if base < 0 or count < 0 or base + count > self.size:
            part = f"{count} elements from {base}" if size is not None else f"all elements from {base}"
            raise RangeError(f"cannot take {part} of a Buffer of {self.size}")
        if self._region is None:
            return self
        self._region.holding  # noqa: B018 - raises if closed
        offset = self._offset_bytes + self.dtype.offset_bytes(base)
        return Buffer._make(self._region, offset, count, self.dtype, self.placement)

    def view(self, dtype: AnyDType) -> Buffer:
        """Return the same bytes as elements of another type. Raise if the size or alignment does not fit the type."""
        element = element_type(dtype)
        if self._region is None:
            return Buffer(dtype=element, placement=self.placement)
        address = self.raw_data()
        if memory_type(element) == self.dtype:
            return self
        bits = self.size * self.dtype.bits
        if bits % max(8, element.bits):
            raise ArgumentError(
                f"{self.size} elements of {self.dtype} ({bits} bits) are not whole bytes or not a whole number of "
                f"{element} ({element.bits} bits)"
            )
        if address % element.item_bytes:
            raise ArgumentError(
                f"address {address:#x} is not a multiple of {element.item_bytes}, the size of one {element}"
            )
        return Buffer._make(self._region, self._offset_bytes, bits // element.bits, element, self.placement)

    def borrow(self) -> Buffer:
        """Return a Buffer that shares the memory without keeping it alive. Use of freed memory raises ClosedError."""
        if self._region is None:
            return self
        return Buffer._make(self._region.borrow(), self._offset_bytes, self.size, self.dtype, self.placement)

    def typed(self, dtype: AnyDType) -> Buffer:
        """Return this Buffer if its elements have the type `dtype`, otherwise raise DTypeError."""
        wanted = element_type(dtype)
        if wanted != self.dtype:
            raise DTypeError(
                f"this Buffer holds {self.dtype}, not {wanted}; view({wanted.name!r}) reads its bytes as {wanted}"
            )
        return self

    # ---- elements ----

    def at(self, index: int) -> Scalar:
        """Return element `index` in [0, size). Waits for the current stream and for copies in flight."""
        position = operator.index(index)
        if not 0 <= position < self.size:
            raise RangeError(f"index {position} is outside 0..{self.size - 1} of a Buffer of {self.size}")
        value: Scalar = self._values(position - position % self.dtype.per_byte, position + 1)[-1]
        return value

    def __getitem__(self, key: int | builtins.slice[Any, Any, Any]) -> Any:
        if isinstance(key, builtins.slice):
            start, stop, step = key.indices(self.size)
            if step != 1:
                raise ArgumentError(f"a Buffer slice must have step 1, got {step}")
            return self.slice(start, max(0, stop - start))
        return self.at(self._position(key))

    def __setitem__(self, key: int, value: Scalar) -> None:
        index = self._position(key)
        if not self.dtype.is_packed:
            return self.slice(index, 1).fill(value)
        first = index - index % self.dtype.per_byte
        shift = (index - first) * self.dtype.bits
        code = torch_types.encode(self.dtype, value) << shift
        self.slice(first, index - first + 1)._write_byte(0, code, ((1 << self.dtype.bits) - 1) << shift, None)

    def _position(self, key: int) -> int:
        index = operator.index(key)
        if not -self.size <= index < self.size:
            raise RangeError(f"index {index} is outside a Buffer of {self.size}")
        return index + self.size if index < 0 else index

    def __iter__(self) -> Iterator[Scalar]:
        return iter(self.tolist())

    def tolist(self) -> list[Scalar]:
        return self._values(0, self.size)

    def fill(self, value: Scalar, stream: Stream | None = None) -> None:
        """Write `value` into every element, in the order of `stream` (default: the current stream)."""
        self._open()
        if not isinstance(value, numbers.Real | np.generic):
            raise ArgumentError(f"a Buffer of {self.dtype} must be filled with a number, got {type(value).__name__}")
        if self.dtype.is_packed:
            return self._fill_packed(torch_types.encode(self.dtype, float(value)), stream)
        if self.dtype.numpy_name.startswith(("int", "uint")):
            limits = np.iinfo(self.dtype.numpy)
            value = torch_types.whole_number(self.dtype, value, int(limits.min), int(limits.max))
        width = BITS[self.dtype.item_bytes]
        encoded = torch.tensor([value], dtype=torch_dtype(self.dtype))
        bits, target = encoded.view(width).item(), self.bytes_tensor(write=True).view(width)
        self._launch(lambda: target.fill_(bits), stream)

    def _fill_packed(self, code: int, stream: Stream | None) -> None:
        byte = code * (0xFF // ((1 << self.dtype.bits) - 1))  # the same bits for every element
        mask = torch_types.tail_mask(self.dtype, self.size)
        whole = self.size // self.dtype.per_byte
        target = self.bytes_tensor(write=True)[:whole]
        self._launch(lambda: target.fill_(byte), stream)
        if mask != 0xFF:
            self._write_byte(whole, byte, mask, stream)

    def _write_byte(self, index: int, bits: int, mask: int, stream: Stream | None) -> None:
        """Set the masked bits of one byte to `bits`. The unmasked bits belong to other elements and do not change."""
        target = self.bytes_tensor(write=True)[index : index + 1]
        self._launch(lambda: target.bitwise_and_(0xFF ^ mask).bitwise_or_(bits & mask), stream)

    def _launch(self, task: Any, stream: Stream | None) -> None:
        launch(task, choose_stream(stream, self.placement), on_device=self.placement.is_device, holdings=[self.holding])

    def _values(self, start: int, stop: int) -> list[Any]:
        """Wait for pending work on this memory and return elements [start, stop). `start` is on a byte boundary."""
        if self._region is None:
            return []
        part = self.slice(start, stop - start)
        stream = choose_stream(None, self.placement)
        if stream is not None:
            stream.synchronize()
        part.holding.wait()
        host = part.bytes_tensor().cpu()
        if self.dtype.is_packed:
            return torch_types.decode(self.dtype, torch_types.unpack_codes(self.dtype, host.numpy(), part.size))
        return host.view(torch_dtype(self.dtype)).tolist()

    # ---- exports ----

    def bytes_tensor(self, *, write: bool = False) -> torch.Tensor:
        """Return a uint8 torch tensor that shares this memory. With `write`, raise if the Buffer is read-only."""
        region = self._open()
        if write and region.readonly:
            raise ArgumentError("this Buffer wraps read-only memory; to write, copy the Buffer into a new one")
        return region.tensor()[self._offset_bytes : self._offset_bytes + self.nbytes]

    def torch(self) -> torch.Tensor:
        """Return a torch tensor over this memory, which must not be read-only.

        Elements of u2 and u4 appear as bytes, and elements of fp4 as torch.float4_e2m1fn_x2.
        """
        return self.bytes_tensor(write=True).view(torch_dtype(self.dtype))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return this host memory as a numpy array, read-only for a read-only Buffer. Packed types appear as bytes."""
        array = self._host_bytes("numpy()")
        return array if self.dtype.is_packed else array.view(self.dtype.numpy)

    def unpack(self) -> np.ndarray[Any, Any]:
        """Return a numpy copy of a packed host Buffer, with one ml_dtypes element per byte."""
        if not self.dtype.is_packed:
            raise DTypeError(f"{self.dtype} is not packed; numpy() returns the elements without copying")
        codes = torch_types.unpack_codes(self.dtype, self._host_bytes("unpack()"), self.size)
        return codes.view(self.dtype.numpy)

    def memoryview(self) -> builtins.memoryview:
        """Return the bytes of this host memory. A read-only Buffer yields a read-only view."""
        return builtins.memoryview(self._host_bytes("memoryview()").data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface(on_device=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self._interface(on_device=True)
        stream = choose_stream(None, self.placement)
        handle = stream.handle if stream is not None else 0
        return {**interface, "stream": handle or 1}  # 0 is not allowed; 1 is the legacy default stream

    def _interface(self, *, on_device: bool) -> dict[str, Any]:
        if self.placement.is_device != on_device:
            raise AttributeError(f"{self.placement} memory is not supported by this array protocol")
        if not self.dtype.is_packed and self.dtype.numpy.isbuiltin != 1:
            raise AttributeError(f"the array protocols have no name for {self.dtype}; use numpy(), torch() or DLPack")
        region = self._open()
        # the consumer keeps only the Buffer alive, so the Buffer must keep the memory alive, even when closed
        self._exported = region.holding
        count, typestr = (self.nbytes, "|u1") if self.dtype.is_packed else (self.size, self.dtype.numpy.str)
        return array_interface(self.raw_data(), count, typestr, readonly=region.readonly)

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, **options: Any
    ) -> Any:
        tensor = self.torch()
        ours = choose_stream(None, self.placement) if self.placement.is_device else None
        if ours is None:
            return tensor.__dlpack__(stream=stream, max_version=max_version, **options)
        with torch.cuda.stream(ours.native):  # the consumer's stream waits for ours
            return tensor.__dlpack__(stream=stream, max_version=max_version, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.bytes_tensor().__dlpack_device__()
        return int(kind), int(index)

    # ---- checks ----

    def _open(self) -> Region:
        if self._region is None:
            raise StateError(f"this Buffer is empty (no memory, {self.dtype}); allocate one with Buffer(size, dtype)")
        self._region.holding  # noqa: B018 - raises if closed
        return self._region

    def _host_bytes(self, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.placement.is_device:
            raise ArgumentError(
                f"{what} reads host memory, but this Buffer is on {self.placement}; "
                "copy it to a 'cpu' Buffer, or use torch()"
            )
        array: np.ndarray[Any, np.dtype[np.uint8]] = self.bytes_tensor().numpy()
        if self.readonly:
            array.flags.writeable = False
        return array
