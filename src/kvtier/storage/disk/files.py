"""Everything the disk store does to files, in one thin place: tests record it, delay it, fail it and replay it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Protocol

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Files(Protocol):
    """File operations by descriptor. All raise OSError; reads and writes are whole or an error."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """A descriptor for reading and writing; `direct` bypasses the page cache or is an error."""
        ...

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""
        ...

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer; fewer bytes than it has only at the end of the file."""
        ...

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write buffers behind each other."""
        ...

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Make a file this long, its space reserved where the filesystem can."""
        ...

    def sync(self, descriptor: int) -> None:
        """Have the file's bytes on the disk."""
        ...

    def sync_folder(self, path: str) -> None:
        """Have the names in a folder on the disk."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, at once."""
        ...

    def unlink(self, path: str) -> None:
        """Delete a file."""
        ...

    def list(self, folder: str) -> dict[str, int]:
        """Names and bytes of the plain files in a folder."""
        ...

    def free_bytes(self, folder: str) -> int:
        """Bytes that are free where the folder is."""
        ...


class OsFiles:
    """The operating system's."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """A descriptor for reading and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        if direct:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EINVAL, "this system has no O_DIRECT")
            flags |= os.O_DIRECT
        return os.open(path, flags, FILE_MODE)

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""
        os.close(descriptor)

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer."""
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write buffers behind each other."""
        left = [memoryview(each) for each in buffers if len(each)]
        while left:
            count = os.pwritev(descriptor, left, offset)
            if not count:
                raise OSError(errno.ENOSPC, "the filesystem took no byte")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Make a file this long."""
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, nbytes)  # space is then found, or not, when a slot is written

    def sync(self, descriptor: int) -> None:
        """Have the file's bytes on the disk."""
        os.fdatasync(descriptor)

    def sync_folder(self, path: str) -> None:
        """Have the names in a folder on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name."""
        os.replace(old, new)

    def unlink(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)

    def list(self, folder: str) -> dict[str, int]:
        """Names and bytes of the plain files in a folder."""
        found = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def free_bytes(self, folder: str) -> int:
        """Bytes that are free where the folder is, for us."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
