"""Bucket: what a RemoteStore asks of a server: named strings of bytes, in batches.

One file per server implements it (redis.py, s3.py, mooncake.py). A bucket knows nothing of blocks, records, checksums
or deadlines; it may lose, change or mix up what it keeps, and RemoteStore finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtier.storage.workers import Scratch

Parts = Sequence[memoryview]
"""A value in pieces, so that what lies in different memory need not be joined before it is sent."""


class BucketError(Exception):
    """A server did not do what it was asked to. It never leaves the storage package: stores answer with outcomes."""

    def __init__(self, message: str, *, is_transient: bool = True) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """Whether asking again may help."""


class Put(Enum):
    """What became of one value that was to be kept."""

    STORED = "stored"
    EXISTS = "exists"
    """There is one of this name already, and it was not to be replaced."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """How a batch is best cut into requests, which run on threads at the same time."""

    max_names: int
    min_bytes: int = 1 << 20
    """Less than this is not worth another request, be there ever so many threads."""
    max_bytes: int = 4 << 20
    """What one request brings at most: what came is still in the cache when it is verified, threads hold little, and
    late ones stop soon; and it is enough for a round trip not to matter."""
    max_put_bytes: int = 4 << 20
    """What one request takes at most."""
    num_puts: int | None = None
    """Requests into which a batch to be put is cut, unless they were too large; None: as many as there are threads."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Some of the names in a bucket, and where the next ones begin; an empty cursor after the last."""

    names: tuple[str, ...]
    cursor: str


class Bucket(Protocol):
    """Every method may raise a BucketError, and be called from any thread."""

    request_size: RequestSize

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there."""
        ...

    def fetch(self, names: Sequence[str], rooms: Sequence[int], scratch: Scratch) -> list[memoryview | None]:
        """Their values, of one that is longer than its room the first bytes. None: not there.

        No more than the room is read, however long the stored value is. What is no string of bytes counts as an empty
        value, and does not fail the others.
        They may lie in the scratch memory, and hold until it is taken again.
        """
        ...

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:
        """The first bytes of their values. None: not there."""
        ...

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        """Keep these values. Without `replace` a bucket may leave one alone that is there already.

        A value is made when it is asked for, which may raise a BucketError.
        """
        ...

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Forget them; which of them were there."""
        ...

    def list_names(self, cursor: str, limit: int) -> Listing:
        """About so many of all names."""
        ...

    def reset(self) -> None:
        """Drop connections: what they would say next cannot be trusted."""
        ...

    def close(self) -> None:
        """Give everything back. Calls that hang may still do so."""
        ...


def join(parts: Parts, room: memoryview) -> memoryview:
    """The parts one after another in this room."""
    at = 0
    for part in parts:
        room[at : at + len(part)] = part
        at += len(part)
    return room[:at]
