"""Atomic files, and the cache directory for compiled code and measured costs."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from kvtier.errors import UnavailableError

BytesLike = bytes | bytearray | memoryview


def cache_dir() -> Path:
    """Return the cache directory: $KVTIER_CACHE_DIR if set, else $XDG_CACHE_HOME/kvtier if set, else ~/.cache/kvtier.

    Create the directory if it does not exist. Raise UnavailableError if that fails.
    """
    named = os.environ.get("KVTIER_CACHE_DIR")
    try:
        path = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # Path.home raises RuntimeError without a home directory
        raise UnavailableError(f"cannot create the cache directory: {error}; set KVTIER_CACHE_DIR") from error
    return path


def distrust(path: Path) -> str:
    """Return the reason why another user could have changed a path, or an empty string if no other user could.

    The path and all parent folders must belong to this user or root, and only the owner may have write permission. A
    parent folder with the sticky bit, such as /tmp, may be writable by all users, because they cannot replace each
    other's entries there. A symbolic link is rejected, so callers must resolve the path first.
    """
    trusted = (0, os.geteuid())
    for each in (path, *path.parents):
        status = os.lstat(each)
        if stat.S_ISLNK(status.st_mode):
            return f"{each} is a symbolic link"
        if status.st_uid not in trusted:
            return f"{each} belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}"
        is_sticky = each != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            return f"{each} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def write_atomically(path: Path, *parts: BytesLike) -> None:
    """Write a file atomically and wait until it is on disk. If writing the data fails, the old file is unchanged."""
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
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)
