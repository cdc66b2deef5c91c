"""Files kvtier writes: whole or not at all, and where it keeps what it makes once per machine."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvtier.errors import UnavailableError

BytesLike = bytes | bytearray | memoryview


def cache_dir() -> Path:
    """Where compiled code and measured costs are kept; made if need be.

    $KVTIER_CACHE_DIR, else $XDG_CACHE_HOME/kvtier, else ~/.cache/kvtier. UnavailableError if it cannot be made.
    """
    named = os.environ.get("KVTIER_CACHE_DIR")
    try:
        path = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        raise UnavailableError(
            f"no directory to keep what is made once per machine: {error}; set KVTIER_CACHE_DIR"
        ) from error
    return path


def write_atomically(path: Path, *parts: BytesLike) -> None:
    """Write a file that is on disk, whole, when this returns, and not there at all before or if it fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)
