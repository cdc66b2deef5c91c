"""Files: the operations on segment and key files. Tests can record, delay and replay them, and make them fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Sequence

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_MAX_BUFFERS = 1024  # maximum number of buffers in one call: IOV_MAX of Linux
_LOCK = struct.Struct("hhqqi4x")  # struct flock of Linux


class Files:
    """File operations. All methods raise OSError on failure. Partial reads and writes are completed."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """Open a file, or `create` a new one. `direct` bypasses the page cache; not every filesystem supports it."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        return os.open(path, flags, FILE_MODE)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Read until the buffer is full or the file ends. Return the number of bytes read."""
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            count = os.pwritev(descriptor, left[:_MAX_BUFFERS], offset)
            if not count:
                raise OSError(errno.ENOSPC, "the filesystem wrote no byte")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Set the length of a file, and reserve the space if the filesystem supports that."""
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, nbytes)  # without a reservation, writing a slot may fail on a full disk

    def lock(self, descriptor: int, start: int, nbytes: int) -> None:
        """Lock bytes of a file until the descriptor is closed. Raise OSError if another open file has locked them."""
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))

    def is_locked(self, descriptor: int, start: int, nbytes: int) -> bool:
        """True if another open file has locked some of these bytes."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0)
        kind: int = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name. Raise FileExistsError if the name is in use."""
        os.link(old, new)

    def stamp(self, path: str) -> tuple[int, int] | None:
        """Return numbers that change if the file is modified or replaced, or None if there is no such file."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def list(self, folder: str) -> dict[str, int]:
        """Return names and sizes of the regular files in a folder."""
        sizes = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def free_bytes(self, folder: str) -> int:
        """Return the bytes of the filesystem that are free for unprivileged users."""
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize
