"""Where kvtier keeps what it makes once per machine: compiled code and measured costs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The directory, made if need be: $KVTIER_CACHE_DIR, else $XDG_CACHE_HOME/kvtier, else ~/.cache/kvtier."""
    named = os.environ.get("KVTIER_CACHE_DIR")
    path = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either all there or not there, whoever reads or writes it at the same time."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
