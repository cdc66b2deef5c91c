"""Files kvtier writes: whole or not at all, and where it keeps what it makes once per machine."""

from __future__ import annotations

import os
import secrets
import stat
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


def distrust(path: Path) -> str:
    """Say why a user other than this one and root could have put something else here; empty if none could.

    The path and all folders above it must belong to this user or root, and no one else may write to them. Folders above
    that have the sticky bit, such as /tmp, may be writable: entries of others cannot be replaced there. A symbolic link
    is refused; `Path.resolve` the folder first.
    """
    trusted = (0, os.geteuid())
    for each in (path, *path.parents):
        found = os.lstat(each)
        if stat.S_ISLNK(found.st_mode):
            return f"{each} is a symbolic link"
        if found.st_uid not in trusted:
            return f"{each} belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        is_sticky = each != path and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            return f"{each} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


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
