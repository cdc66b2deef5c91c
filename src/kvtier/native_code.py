"""Load kvtier's C code: prebuilt libraries, or libraries compiled on first use and kept in the cache directory.

The wheel is pure Python. `kvtier build-native DIR` compiles the libraries into a folder, for example one in a container
image. Set KVTIER_NATIVE_DIR to this folder at run time. If a library uses optional processor instructions, the folder
contains several variants, and `load` uses the best one for the processor. If there is neither a library nor a compiler,
or if the library does not work, `load` returns the reason, and callers use Python equivalents.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

from kvtier.errors import UnavailableError
from kvtier.files import cache_dir, distrust

Code = TypeVar("Code")
_SECONDS = 120  # compiler timeout
_NO_COMPILER = "no C compiler found (looked for $CC, cc, gcc, clang)"


@dataclass(frozen=True, slots=True)
class Native(Generic[Code]):
    """The compiled functions, or None if there are none."""

    code: Code | None
    reason: str
    """The library that contains the functions, or the reason why there are none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A build of a library: its compiler flags, and the processor features that it needs."""

    name: str = "any"
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    """Features that the processor must have, with their names in /proc/cpuinfo."""


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
X86_VARIANTS = (
    Variant(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    Variant("v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Variant("v4", ("-march=x86-64-v4",), _V4),
    Variant("v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Variant("v3", ("-march=x86-64-v3",), _V3),
    Variant("v1", ("-march=x86-64",)),
)
"""Levels of the x86-64 instruction set, best first. VNNI multiplies vectors of 8-bit integers, AMX multiplies
matrices. The last level runs on every x86-64 processor."""


@dataclass(frozen=True, slots=True)
class NativeSource:
    """C code in a package. The first of `files` is compiled, the others are included."""

    package: str
    files: tuple[str, ...]
    flags: tuple[str, ...]
    local_flags: tuple[str, ...] = ()
    """Flags that make the code depend on this processor. They are used for compilation on first use, not by `build`."""
    x86_variants: tuple[Variant, ...] = (Variant(),)
    is_x86_only: bool = False

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Variants for this architecture, best first."""
        if platform.machine() in ("x86_64", "AMD64"):
            return self.x86_variants
        return () if self.is_x86_only else (Variant(),)

    def with_only(self, name: str) -> NativeSource:
        """Return a copy with only the variant `name`. The `local_flags` of the copy are the flags of this variant."""
        [variant] = (each for each in self.x86_variants if each.name == name)
        return replace(self, local_flags=variant.flags, x86_variants=(variant,), is_x86_only=True)

    def texts(self) -> dict[str, str]:
        return {name: resources.files(self.package).joinpath(name).read_text() for name in self.files}

    def file_name(self, texts: dict[str, str], flags: Sequence[str], *built_for: str) -> str:
        """Return a file name that contains a digest of the source, the flags, the system and `built_for`."""
        system = (platform.machine(), *platform.libc_ver()[:1])
        key = hashlib.sha256("\0".join((*texts.values(), *flags, *system, *built_for)).encode()).hexdigest()
        return f"{self.name}-{key[:16]}.so"


def load(source: NativeSource, make: Callable[[Path], Code], only: str | None = None) -> Native[Code]:
    """Load the library of a source and return the object that `make` creates from the library's path.

    `only` is the name of a variant; other variants are then ignored. `make` must raise UnavailableError if this machine
    cannot run the library. If `make` raises OSError or AttributeError for a cached library, the file is assumed to be
    incomplete, and the library is compiled again. A library that another user could have written is not loaded but
    compiled again, because its code would have all rights of this process. If the cache directory is read-only, or
    writable by another user, the new library is private to this process.
    """
    if only is not None:
        source = source.with_only(only)
    texts, folder = source.texts(), os.environ.get("KVTIER_NATIVE_DIR")
    if not folder:
        return _load_or_compile(source, texts, make)
    prebuilt = _load_prebuilt(source, texts, Path(folder), make)
    if prebuilt.code is not None:
        return prebuilt
    compiled = _load_or_compile(source, texts, make)
    return compiled if compiled.code is not None else Native(None, f"{prebuilt.reason}; {compiled.reason}")


def build(source: NativeSource, folder: Path) -> Iterator[tuple[Variant, Path, str]]:
    """Compile the variants that `folder` lacks. Yield every variant, its path, and an error or an empty string."""
    compiler, texts = _compiler(), source.texts()
    for variant in source.variants:
        flags = (*source.flags, *variant.flags)
        path = folder / source.file_name(texts, flags, variant.name)
        error = _NO_COMPILER if compiler is None else ""
        if compiler is not None and not path.exists():
            try:
                _compile(compiler, texts, flags, path)
            except (OSError, subprocess.SubprocessError) as failure:
                error = f"compiling with {compiler} failed: {getattr(failure, 'stderr', None) or failure}"
        yield variant, path, error


def features() -> frozenset[str]:
    """Return the features of the processor. Empty if they are unknown."""
    return frozenset(_processor("flags", "Features").split())


def vendor() -> str:
    """Return the vendor of the processor, for example GenuineIntel or AuthenticAMD. Empty if it is unknown."""
    return _processor("vendor_id")


def _processor(*names: str) -> str:
    """Return the value of the first line of /proc/cpuinfo that begins with one of the names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "").partition(":")[2].strip()


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by its CPU affinity and its cgroups (version 2).

    The result is at least 1. A process with more threads than this number may exceed the CPU quota of its cgroup. The
    kernel then pauses all threads of the process. `root` is the folder that contains proc and sys.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return cores
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if group is None:  # cgroup version 1
        return cores
    top = root / "sys/fs/cgroup"
    for folder in (top / group, *(top / parent for parent in Path(group).parents)):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):  # the root group has no limit, and a container sees no groups above its own
            continue
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _load_prebuilt(
    source: NativeSource, texts: dict[str, str], folder: Path, make: Callable[[Path], Code]
) -> Native[Code]:
    """Load the best variant that the folder has and the processor supports."""
    present = features()
    for variant in source.variants:
        path = folder / source.file_name(texts, (*source.flags, *variant.flags), variant.name)
        if not variant.needs <= present or not path.exists():
            continue
        try:
            if refusal := distrust(path.resolve()):
                return Native(None, refusal)
            return Native(make(path), f"prebuilt in {path} ({variant.name})")
        except (UnavailableError, OSError, AttributeError) as error:
            return Native(None, f"{path} cannot be used: {error}")
    return Native(
        None,
        f"{folder} has no library of {source.package} for this version of kvtier and this processor; run kvtier "
        f"build-native {folder}",
    )


def _load_or_compile(source: NativeSource, texts: dict[str, str], make: Callable[[Path], Code]) -> Native[Code]:
    compiler = _compiler()
    flags = (*source.flags, *source.local_flags)
    # Machines may share a cache directory, so the file name depends on the libc and, with `local_flags`, the processor.
    built_on = (platform.libc_ver()[1], " ".join(sorted(features())) if source.local_flags else "")
    try:
        folder = cache_dir().resolve()
        path = folder / source.file_name(texts, flags, *built_on)
        refusal = distrust(folder)
        code = None if refusal else _load_cached(path, make)
        if code is not None:
            return Native(code, f"compiled in {path}")
        if compiler is None:
            return Native(None, _NO_COMPILER)
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


def _compiler() -> str | None:
    return os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


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
        return Native(make(path), f"compiled for this process only: {refusal}")


def _compile(compiler: str, texts: dict[str, str], flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text)
        built = Path(folder) / "built.so"
        command = [*compiler.split(), str(Path(folder) / next(iter(texts))), *flags, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        built.chmod(0o755)  # independent of the umask, because a group-writable library would not be loaded again
        os.replace(built, path)  # atomic for other processes
