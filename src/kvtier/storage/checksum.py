"""64-bit checksum of stored bytes: CRC-32 in the lower half, the sum of the 32-bit words in the upper half.

A CRC detects the typical disk errors: one or two wrong bits, and bursts of up to 32 bits. Other errors, such as a
replaced page, are missed with a probability of 2^-64, because both CRC and sum would have to stay the same. native.c
computes CRC and sum in one pass. Without native.c, zlib computes the CRC and numpy the sum. GB/s on one core, for 1 MiB
in the CPU cache: native.c 24, zlib with numpy 4.2, SHA-256 1.5, BLAKE2b 0.8 (Xeon with AVX-512, 2026-11-15).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.errors import UnavailableError
from kvtier.native_code import Native, NativeSource, load
from kvtier.storage.store import Scattered

_FLAGS = ("-O3", "-shared", "-fPIC", "-msse4.1", "-mpclmul", "-pthread")
SOURCE = NativeSource("kvtier.storage", ("native.c",), _FLAGS, is_x86_only=True)


class StorageNative:
    """Functions of native.c. They release the GIL."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.checksum = library.kvtier_checksum
        self.checksum.argtypes, self.checksum.restype = [pointer, size], ctypes.c_uint64
        self.checksums = library.kvtier_checksums
        self.checksums.argtypes, self.checksums.restype = [size, pointer, pointer, pointer], None
        self.copy = library.kvtier_copy
        self.copy.argtypes, self.copy.restype = [pointer, pointer, size], None
        self.checksum_joined = library.kvtier_checksum_joined
        self.checksum_joined.argtypes, self.checksum_joined.restype = [size, pointer, pointer], ctypes.c_uint64
        self.gather_checksum = library.kvtier_gather_checksum
        self.gather_checksum.argtypes, self.gather_checksum.restype = [size, *[pointer] * 3], ctypes.c_uint64
        self.gather, self.scatter = library.kvtier_gather, library.kvtier_scatter
        for function in (self.gather, self.scatter):
            function.argtypes, function.restype = [size, pointer, pointer, pointer], None


@functools.cache  # compile and load once per process
def native() -> Native[StorageNative]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return Native(None, f"native.c needs x86-64, but this machine is {platform.machine()}")
    return load(SOURCE, _tried)


def _tried(path: Path) -> StorageNative:
    """Load the library and test it before use."""
    if "pclmulqdq" not in Path("/proc/cpuinfo").read_text():
        raise UnavailableError("this processor has no carry-less multiplication (PCLMULQDQ)")
    code, sample = StorageNative(path), bytes(range(256))
    if code.checksum(sample, len(sample)) & 0xFFFFFFFF != zlib.crc32(sample):
        raise UnavailableError(f"{path} computes wrong checksums")
    return code


def address_of(data: memoryview | bytes | bytearray) -> int:
    """Return the address of a contiguous buffer; 0 if it is empty."""
    if not len(data):
        return 0
    if isinstance(data, memoryview) and not data.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # five times as fast as numpy
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


_STEP = 64  # bytes per iteration of the C loop
_MASK = 0xFFFFFFFF
_LARGE = 2 << 20  # bytes; from this size on, a second thread saves more than the 50 us that it costs


def checksum(data: memoryview | bytes | bytearray, then: bytes = b"") -> int:
    """Return the checksum of `data` followed by `then`. Releases the GIL."""
    code = native().code
    whole = len(data) - len(data) % _STEP
    if code is None or not whole:
        return checksum_in_python(data, then)
    total = code.checksum(address_of(data), whole)
    return total if whole == len(data) and not then else _extend(total, memoryview(data)[whole:], then)


def piece_table(pieces: Sequence[memoryview]) -> np.ndarray:
    """Return the addresses and the sizes of pieces, as two rows."""
    if isinstance(pieces, Scattered):
        return np.array([pieces.offsets + address_of(pieces.memory), pieces.sizes], np.uint64)
    return np.array([[address_of(piece) for piece in pieces], [len(piece) for piece in pieces]], np.uint64)


def checksum_joined(pieces: Sequence[memoryview], target: memoryview | None = None) -> int:
    """Return the checksum of consecutive pieces. If `target` is given, also copy the pieces to it.

    The address of `target` must be a multiple of 16. native.c reads the pieces in place if all sizes are positive
    multiples of 64 bytes. Otherwise the pieces are first joined in new memory, which is slower.
    """
    code, table = native().code, piece_table(pieces)
    if code is None or (table[1] % _STEP).any() or not table[1].all():
        whole = b"".join(pieces)
        if target is not None:
            target[:] = whole
        return checksum(whole)
    first, row = table.ctypes.data, table.strides[0]
    if target is None:
        total: int = code.checksum_joined(table.shape[1], first, first + row)
    else:
        total = code.gather_checksum(table.shape[1], first, first + row, address_of(target))
    return total


def checksums(pieces: Sequence[memoryview]) -> list[int]:
    """Return the checksum of each piece. native.c uses two threads from `_LARGE` bytes on, if 64 divides each size."""
    code = native().code
    sizes = [len(piece) for piece in pieces]
    if code is None or any(size % _STEP or not size for size in sizes) or sum(sizes) < _LARGE:
        return [checksum(piece) for piece in pieces]
    table = np.array([[address_of(piece) for piece in pieces], sizes, [0] * len(pieces)], np.uint64)
    first, row = table.ctypes.data, table.strides[0]
    code.checksums(len(pieces), first, first + row, first + 2 * row)
    sums: list[int] = table[2].tolist()
    return sums


def checksum_in_python(data: memoryview | bytes | bytearray, then: bytes = b"") -> int:
    """Return the checksum without the compiled library."""
    return _extend(0, memoryview(data), then)


def _extend(total: int, data: memoryview, then: bytes) -> int:
    """Extend the checksum `total` by `data` and `then`. `total` must cover a multiple of four bytes."""
    whole = len(data) & ~3
    rest = bytes(data[whole:]) + then
    crc = zlib.crc32(rest, zlib.crc32(data[:whole], total & _MASK))
    return crc | ((total >> 32) + _sum_words(data[:whole]) + _sum_words(memoryview(rest)) & _MASK) << 32


def _sum_words(data: memoryview) -> int:
    whole = len(data) & ~3
    total = int(np.frombuffer(data[:whole], "<u4").sum(dtype=np.uint32)) if whole else 0
    return (total + int.from_bytes(data[whole:], "little")) & _MASK
