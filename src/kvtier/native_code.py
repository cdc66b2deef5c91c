"""C code of this package: compiled with the machine's compiler on first use and kept in the cache directory.

The wheel stays pure Python. Where there is no compiler, or what it made does not work, there is a reason instead of
code, and a twin in Python does the work.
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
_SECONDS = 120  # more than any compiler took here


@dataclass(frozen=True, slots=True)
class Native(Generic[Code]):
    """The compiled functions, or the reason there are none."""

    code: Code | None
    reason: str


@dataclass(frozen=True, slots=True)
class NativeSource:
    """Files of a package of ours, the first of which is compiled."""

    package: str
    files: Sequence[str]
    flags: Sequence[str]
    made_for: str = ""
    """What else the result depends on, such as what the processor can do: one home directory serves many machines."""

    def texts(self) -> dict[str, str]:
        """What is in them."""
        return {name: resources.files(self.package).joinpath(name).read_text() for name in self.files}


def load(source: NativeSource, make: Callable[[Path], Code]) -> Native[Code]:
    """What `make` makes of the compiled library. It raises OSError or AttributeError for one that is not whole, which
    is then compiled anew; UnavailableError if this machine cannot run it.

    A library runs with all rights of this process. One that another user could have put there is not loaded: the code
    is compiled for this process alone.
    """
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    texts, built_on = source.texts(), (platform.machine(), *platform.libc_ver(), source.made_for)
    key = hashlib.sha256("\0".join((*texts.values(), *source.flags, *built_on)).encode()).hexdigest()
    try:
        folder = cache_dir().resolve()
        path = folder / f"{source.package.rpartition('.')[2]}-{key[:16]}.so"
        refusal = distrust(folder)
        found = None if refusal else _made_before(path, make)
        if found is not None:
            return Native(found, f"compiled in {path}")
        if compiler is None:
            return Native(None, "no C compiler found (looked for $CC, cc, gcc, clang)")
        if not refusal and not os.access(folder, os.W_OK):
            refusal = f"{folder} cannot be written"
        if refusal:
            return _load_privately(compiler, texts, source.flags, make, refusal)
        _compile(compiler, texts, source.flags, path)
        return Native(make(path), f"compiled in {path}")
    except UnavailableError as error:
        return Native(None, str(error))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Native(None, f"compiling with {compiler} failed: {getattr(error, 'stderr', None) or error}")


def _made_before(path: Path, make: Callable[[Path], Code]) -> Code | None:
    """What an earlier process compiled, if it is there, ours and whole."""
    if not path.exists() or distrust(path):
        return None
    try:
        return make(path)
    except (OSError, AttributeError):  # cut short by a full disk or a lost machine
        return None


def _load_privately(
    compiler: str, texts: dict[str, str], flags: Sequence[str], make: Callable[[Path], Code], refusal: str
) -> Native[Code]:
    """Compile in a folder of this process, which is deleted when the library is loaded."""
    warnings.warn(
        f"compiled code is not cached: {refusal}; every process compiles anew until KVTIER_CACHE_DIR names a folder "
        f"that belongs to this user or root and that only its owner can write (chmod 700)",
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
        built.chmod(0o755)  # whatever the umask is: one that a group can write would not be loaded again
        os.replace(built, path)  # atomic: another process sees all of it or nothing
