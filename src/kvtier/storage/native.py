"""Loads native.c: compiled with the machine's C compiler on first use and kept in the cache directory.

The third loader of its kind, because those of kvtier.memory and kvtier.engine cannot be imported without torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Native:
    """The compiled functions, or the reason there are none."""

    code: NativeCode | None
    reason: str


@functools.cache  # compiling and loading once per process is the point
def native() -> Native:
    """The native code of this machine; compiles it if the cache directory has none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return Native(None, f"native.c is for x86-64, this is {platform.machine()}")
    source = resources.files("kvtier.storage").joinpath("native.c").read_text()
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    key = hashlib.sha256("\0".join((source, *_FLAGS, platform.libc_ver()[1])).encode()).hexdigest()
    try:
        folder = _cache_folder()
        path = folder / f"storage-{key[:16]}.so"
        if not path.exists():
            if compiler is None:
                return Native(None, "no C compiler found (looked for $CC, cc, gcc, clang)")
            _compile(compiler, source, path)
        return _load(path)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return Native(None, f"compiling with {compiler} failed: {getattr(error, 'stderr', None) or error}")


def _load(path: Path) -> Native:
    if "pclmulqdq" not in Path("/proc/cpuinfo").read_text():
        return Native(None, "this processor has no carry-less multiplication (PCLMULQDQ)")
    code, sample = NativeCode(path), bytes(range(256))
    if code.checksum(sample, len(sample)) & 0xFFFFFFFF != zlib.crc32(sample):
        return Native(None, f"{path} computes something else")  # what decides over wrong bytes is tried before use
    return Native(code, f"compiled in {path}")


def address_of(data: memoryview | bytes | bytearray) -> int:
    """Where the bytes of a contiguous buffer begin; 0 for none."""
    if not len(data):
        return 0
    if isinstance(data, memoryview) and not data.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # at a fifth of the cost
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _cache_folder() -> Path:
    """As kvtier.memory.files.cache_dir, which cannot be imported without torch."""
    named = os.environ.get("KVTIER_CACHE_DIR")
    path = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _compile(compiler: str, source: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, built = Path(folder) / "native.c", Path(folder) / "native.so"
        code.write_text(source)
        command = [*compiler.split(), *_FLAGS, str(code), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        os.replace(built, path)  # atomic: another process sees all of it or nothing
