"""The functions of native.c. Each has a twin in Python, for other processors and machines without a compiler."""

from __future__ import annotations

import ctypes
import functools
import platform
import zlib
from pathlib import Path

import numpy as np

from kvtier.errors import UnavailableError
from kvtier.native_code import Native, Source, load

_FLAGS = ("-O3", "-shared", "-fPIC", "-msse4.1", "-mpclmul", "-pthread")


class NativeCode:
    """The compiled functions. They release the GIL."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.checksum = library.kvtier_checksum
        self.checksum.argtypes, self.checksum.restype = [pointer, size], ctypes.c_uint64
        self.checksums = library.kvtier_checksums
        self.checksums.argtypes, self.checksums.restype = [size, pointer, pointer, pointer], None
        self.copy = library.kvtier_copy
        self.copy.argtypes, self.copy.restype = [pointer, pointer, size], None


@functools.cache  # compiling and loading once per process is the point
def native() -> Native[NativeCode]:
    """The native code of this machine."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return Native(None, f"native.c is for x86-64, this is {platform.machine()}")
    return load(Source("kvtier.storage", ["native.c"], _FLAGS), _tried)


def _tried(path: Path) -> NativeCode:
    """What decides over wrong bytes is tried before use."""
    if "pclmulqdq" not in Path("/proc/cpuinfo").read_text():
        raise UnavailableError("this processor has no carry-less multiplication (PCLMULQDQ)")
    code, sample = NativeCode(path), bytes(range(256))
    if code.checksum(sample, len(sample)) & 0xFFFFFFFF != zlib.crc32(sample):
        raise UnavailableError(f"{path} computes something else")
    return code


def address_of(data: memoryview | bytes | bytearray) -> int:
    """Where the bytes of a contiguous buffer begin; 0 for none."""
    if not len(data):
        return 0
    if isinstance(data, memoryview) and not data.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # at a fifth of the cost
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address
