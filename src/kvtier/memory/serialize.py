"""Save and load Buffers as self-describing little-endian records with checksums, without pickle.

    at    bytes  field
       0      8  magic
       8      2  format version
      10      2  number of dimensions
      12      4  reserved, zero
      16     16  element type, ASCII, zero-padded
      32      8  number of elements
      40      8  payload bytes
      48      8  offset of the payload: 4096
      56      4  CRC-32 of the payload
      60      4  CRC-32 of the 4096 bytes before the payload, with this field zero
      64     64  shape, eight dimensions of 8 bytes
     128         zeros
    4096         payload

The header CRC includes the padding, so that any flipped bit of the header is found. The payload starts at a page
boundary, so that it can be memory-mapped. zlib computes CRC-32 at 1.6 to 3.5 GB/s per core (2026-11-15).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvtier import dtype as dt
from kvtier.dtype import DType
from kvtier.errors import ArgumentError, DTypeError, FormatError, RangeError, VersionError
from kvtier.files import write_atomically
from kvtier.memory.batch_copy import copy, empty_like
from kvtier.memory.buffer import Buffer
from kvtier.memory.context import choose_stream
from kvtier.memory.placement import CPU, Placement

MAGIC = b"\x89KVBUF\r\n"  # not valid UTF-8; a text-mode transfer changes "\r\n", so `load` then fails
VERSION = 1
HEADER_BYTES = 4096
MAX_DIMS = 8
_FIXED = struct.Struct("<8sHHI16sQQQII8Q")
_HEADER_CRC_AT = 60

Writable = str | os.PathLike[str] | BinaryIO | bytearray | memoryview
Readable = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded Buffer and its saved shape."""

    buffer: Buffer
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Header:
    dtype: DType
    size: int
    payload_crc: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.size)

    def pack(self) -> bytes:
        kind = (MAGIC, VERSION, len(self.shape), 0, self.dtype.name.encode())
        payload = (self.size, self.nbytes, HEADER_BYTES, self.payload_crc)
        dims = (*self.shape, *[0] * (MAX_DIMS - len(self.shape)))
        block = bytearray(_FIXED.pack(*kind, *payload, 0, *dims).ljust(HEADER_BYTES, b"\0"))
        struct.pack_into("<I", block, _HEADER_CRC_AT, zlib.crc32(block))
        return bytes(block)

    @classmethod
    def unpack(cls, block: bytes) -> _Header:
        if block[: len(MAGIC)] != MAGIC[: len(block)] or not block:
            raise FormatError(f"not a kvtier buffer: starts with {block[:8]!r} instead of {MAGIC!r}")
        if len(block) < HEADER_BYTES:
            raise FormatError(f"the header has {HEADER_BYTES} bytes, got {len(block)}")
        _, version, ndim, _, name, size, nbytes, offset, payload_crc, header_crc, *dims = _FIXED.unpack_from(block)
        if version == 0:
            raise FormatError("this record has format version 0, which does not exist")
        if version > VERSION:
            raise VersionError(
                f"this record has format version {version}, but this kvtier reads up to {VERSION}; upgrade kvtier"
            )
        blanked = bytearray(block)
        struct.pack_into("<I", blanked, _HEADER_CRC_AT, 0)
        if zlib.crc32(blanked) != header_crc:
            raise FormatError(f"the header is damaged: CRC {zlib.crc32(blanked):#010x}, saved as {header_crc:#010x}")
        try:
            header = cls(dt.dtype(name.rstrip(b"\0").decode()), size, payload_crc, tuple(dims[:ndim]))
        except (DTypeError, UnicodeDecodeError) as error:
            raise FormatError(f"unknown element type {name!r} in the record") from error
        if ndim > MAX_DIMS or header.nbytes != nbytes or math.prod(header.shape) != size or offset != HEADER_BYTES:
            raise FormatError(
                f"the header contradicts itself: {size} {header.dtype} of shape {header.shape} "
                f"in {nbytes} bytes at {offset}"
            )
        return header


def saved_nbytes(buffer: Buffer) -> int:
    """Return the number of bytes that `save` writes for this Buffer."""
    return HEADER_BYTES + buffer.nbytes


def save(buffer: Buffer, target: Writable, shape: Sequence[int] | None = None) -> int:
    """Write a Buffer of any placement to a path, an open binary file, or writable memory. Return the number of bytes.

    A file at a path is written atomically, and is on disk when this function returns. `load` returns the saved `shape`.
    Waits for the current stream and for copies in flight, so that the saved data includes earlier work.
    """
    dims = (buffer.size,) if shape is None else tuple(int(extent) for extent in shape)
    if len(dims) > MAX_DIMS or any(extent < 0 for extent in dims) or math.prod(dims) != buffer.size:
        raise ArgumentError(f"shape {dims} does not describe {buffer.size} elements in at most {MAX_DIMS} dimensions")
    payload = _host_bytes(buffer)
    header = _Header(buffer.dtype, buffer.size, zlib.crc32(payload), dims).pack()
    if isinstance(target, bytearray | memoryview):
        space = memoryview(target).cast("B")
        if space.readonly:
            raise ArgumentError("cannot save into read-only memory; pass a bytearray or a writable memoryview")
        if len(space) < len(header) + len(payload):
            raise RangeError(f"saving needs {len(header) + len(payload)} bytes, but the target has {len(space)}")
        space[: len(header)] = header
        space[len(header) : len(header) + len(payload)] = payload
    elif isinstance(target, str | os.PathLike):
        write_atomically(Path(target), header, payload)
    else:
        _write_all(target, memoryview(header))
        _write_all(target, payload)
    return len(header) + len(payload)


def load(source: Readable, placement: Placement | str = CPU, *, map_file: bool = False) -> Loaded:
    """Read a Buffer into memory of `placement`. Raise FormatError if the record is damaged or invalid.

    An open file is read from its current position; a path or memory must contain exactly one record. With `map_file`,
    the result is a read-only host Buffer over the mapped file, whose pages the operating system can drop and reload.
    """
    where = Placement.parse(placement).require()
    if map_file and not isinstance(source, str | os.PathLike):
        raise ArgumentError(f"map_file needs a path, got {type(source).__name__}")
    if map_file and where != CPU:
        raise ArgumentError(f"a mapped file is plain host memory, not {where}; load it without map_file")
    if isinstance(source, bytes | bytearray | memoryview):
        return _load_memory(memoryview(source).cast("B"), where, borrow=False)
    if not isinstance(source, str | os.PathLike):
        return _load_file(source, where)
    with open(source, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if map_file and file_bytes >= HEADER_BYTES:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return _load_memory(memoryview(mapped), where, borrow=True)
        loaded = _load_file(file, where, file_bytes)
        if file.read(1):
            raise FormatError(f"{os.fspath(source)!r} has extra bytes after its record")
        return loaded


def _host_bytes(buffer: Buffer) -> memoryview:
    buffer.data_or(0)  # raises if closed
    if not buffer:
        if buffer.size == 0 and buffer.dtype != dt.null:
            return memoryview(b"")
        buffer.holding  # noqa: B018 - raises, because the Buffer has no memory
    stream = choose_stream(None, buffer.placement)
    if buffer.placement.is_device:
        host = empty_like(buffer, placement=CPU)
        copy(buffer, host)
        buffer = host
    if stream is not None:
        stream.synchronize()
    buffer.holding.wait()
    return buffer.memoryview()


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) or 0 :]  # a raw file may write only a part


def _load_file(file: BinaryIO, where: Placement, file_bytes: int | None = None) -> Loaded:
    block = b""
    while len(block) < HEADER_BYTES and (more := file.read(HEADER_BYTES - len(block))):  # a raw file may read a part
        block += more
    header = _Header.unpack(block)
    if file_bytes is not None and file_bytes < HEADER_BYTES + header.nbytes:  # checked before memory is allocated
        raise FormatError(
            f"the record has {header.nbytes} bytes after its header, but the file has {file_bytes - HEADER_BYTES}"
        )
    host = Buffer(header.size, header.dtype, CPU if where.is_device else where)
    target, got = host.memoryview(), 0
    while got < len(target):
        count = file.readinto(target[got:])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"the record has {header.nbytes} bytes after its header, but the file has {got}")
        got += count
    return _finish(header, host, where)


def _load_memory(memory: memoryview, where: Placement, *, borrow: bool) -> Loaded:
    header = _Header.unpack(bytes(memory[:HEADER_BYTES]))
    payload = memory[HEADER_BYTES:]
    if len(payload) != header.nbytes:
        raise FormatError(f"the record has {header.nbytes} bytes after its header, but the memory has {len(payload)}")
    if borrow:
        view = Buffer.wrap(payload).view(header.dtype).slice(0, header.size) if header.size else Buffer(0, header.dtype)
        return _finish(header, view, where)
    host = Buffer(header.size, header.dtype, CPU if where.is_device else where)
    host.memoryview()[:] = payload
    return _finish(header, host, where)


def _finish(header: _Header, host: Buffer, where: Placement) -> Loaded:
    checksum = zlib.crc32(host.memoryview())
    if checksum != header.payload_crc:
        raise FormatError(
            f"the data is damaged: CRC {checksum:#010x} over {header.nbytes} bytes, saved as {header.payload_crc:#010x}"
        )
    if not where.is_device:
        return Loaded(host, header.shape)
    buffer = empty_like(host, placement=where)
    copy(host, buffer)
    return Loaded(buffer, header.shape)
