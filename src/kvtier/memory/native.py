"""Loads host_copy.c: compiled with the machine's C compiler on first use and kept in the cache directory.

The wheel stays pure Python. Without a compiler the reason is recorded and the Python loop does the copying.
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
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvtier.memory.cache_dir import cache_dir
from kvtier.memory.copy_plan import I64

_FLAGS = ("-O3", "-shared", "-fPIC", "-pthread")
# Below this a thread costs more (about 20 us to start and join) than it saves.
_BYTES_PER_THREAD = 512 << 10
# A few cores saturate a socket's memory; more only take them from the model.
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class HostCopier:
    """The compiled copier, or the reason there is none."""

    library: ctypes.CDLL | None
    reason: str
    num_threads: int

    def copy(self, src: I64, dst: I64, nbytes: I64) -> int:
        """Copy independent pieces, all arrays contiguous. Returns the threads used. Releases the GIL."""
        if self.library is None:
            raise RuntimeError(f"no compiled host copier: {self.reason}")
        total = int(nbytes.sum())
        threads = max(1, min(self.num_threads, total // _BYTES_PER_THREAD))
        return int(
            self.library.kvtier_copy_pieces(
                ctypes.c_size_t(len(src)),
                ctypes.c_void_p(src.ctypes.data),
                ctypes.c_void_p(dst.ctypes.data),
                ctypes.c_void_p(nbytes.ctypes.data),
                ctypes.c_int64(total),
                ctypes.c_int(threads),
            )
        )


@functools.cache  # compiling and loading once per process is the point
def host_copier() -> HostCopier:
    """The copier of this machine; compiles it if the cache has none."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    source = resources.files("kvtier.memory").joinpath("host_copy.c").read_text()
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    key = hashlib.sha256("\0".join((source, *_FLAGS, platform.machine(), platform.libc_ver()[1])).encode()).hexdigest()
    try:
        path = cache_dir() / f"host_copy-{key[:16]}.so"
        if not path.exists():
            if compiler is None:
                return HostCopier(None, "no C compiler found (looked for $CC, cc, gcc, clang)", threads)
            _compile(compiler, source, path)
        return HostCopier(ctypes.CDLL(str(path)), f"compiled in {path}", threads)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return HostCopier(None, f"compiling with {compiler} failed: {detail}", threads)


def _compile(compiler: str, source: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, built = Path(folder) / "host_copy.c", Path(folder) / "host_copy.so"
        code.write_text(source)
        command = [*compiler.split(), *_FLAGS, str(code), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        os.replace(built, path)  # atomic: another process sees all of it or nothing
