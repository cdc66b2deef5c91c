"""Compile kvtier's C code with the local compiler on first use, and keep the library in the cache directory.

The wheel is pure Python. If there is no compiler, or if the library does not work, `load` returns the reason, and
callers use Python equivalents.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

from kvtier.errors import UnavailableError
from kvtier.files import cache_dir, distrust

Code = TypeVar("Code")
_SECONDS = 120  # compiler timeout


@dataclass(frozen=True, slots=True)
class Native(Generic[Code]):
    """The compiled functions, or None and the reason why there are none."""

    code: Code | None
    reason: str


def load(
    package: str, files: Sequence[str], flags: Sequence[str], make: Callable[[Path], Code], *, made_for: str = ""
) -> Native[Code]:
    """Compile the first of `files` in a package, and return the object that `make` creates from the library.

    `made_for` names other dependencies of the library, such as processor features, because several machines may share a
    cache directory. `make` raises UnavailableError if this machine cannot run the library. If `make` raises OSError or
    AttributeError, the cached library is incomplete and is compiled again. A library that another user could have
    written is not loaded, because it would have all rights of this process. A private copy is compiled instead.
    """
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    texts = {name: resources.files(package).joinpath(name).read_text() for name in files}
    built_on = (platform.machine(), *platform.libc_ver(), made_for)
    key = hashlib.sha256("\0".join((*texts.values(), *flags, *built_on)).encode()).hexdigest()
    try:
        folder = cache_dir().resolve()
        path = folder / f"{package.rpartition('.')[2]}-{key[:16]}.so"
        refusal = distrust(folder)
        code = None if refusal else _load_cached(path, make)
        if code is not None:
            return Native(code, f"compiled in {path}")
        if compiler is None:
            return Native(None, "no C compiler found (looked for $CC, cc, gcc, clang)")
        if not refusal and not os.access(folder, os.W_OK):
            refusal = f"{folder} cannot be written"
        if refusal:
            return _load_privately(compiler, texts, flags, make, refusal)
        _compile(compiler, texts, flags, path)
        return Native(make(path), f"compiled in {path}")
    except UnavailableError as error:
        return Native(None, str(error))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Native(None, f"compiling with {compiler} failed: {getattr(error, 'stderr', None) or error}")


def _load_cached(path: Path, make: Callable[[Path], Code]) -> Code | None:
    """Load the library from the cache. Return None if it does not exist, is not trusted or is incomplete."""
    if not path.exists() or distrust(path):
        return None
    try:
        return make(path)
    except (OSError, AttributeError):  # the file was truncated by a full disk or a crash
        return None


def _load_privately(
    compiler: str, texts: dict[str, str], flags: Sequence[str], make: Callable[[Path], Code], refusal: str
) -> Native[Code]:
    """Compile in a temporary folder, which is deleted after loading."""
    warnings.warn(
        f"compiled code is not cached: {refusal}; to avoid a compilation in every process, set KVTIER_CACHE_DIR to a "
        f"folder that belongs to this user or root and that only its owner can write (chmod 700)",
        RuntimeWarning,
        stacklevel=2,
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        path = Path(folder) / "private.so"
        _compile(compiler, texts, flags, path)
        return Native(make(path), f"compiled for this process alone: {refusal}")


def _compile(compiler: str, texts: dict[str, str], flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        built = Path(folder) / "built.so"
        command = [*compiler.split(), str(Path(folder) / next(iter(texts))), *flags, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        built.chmod(0o755)  # independent of the umask, because a group-writable library would not be loaded again
        os.replace(built, path)  # atomic for other processes
