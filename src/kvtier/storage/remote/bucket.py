"""Bucket: the interface of a RemoteStore to a server: named values of bytes, in batches.

One file per server implements it (redis.py, s3.py, mooncake.py). A bucket has no records, checksums or deadlines. It
may lose, change or swap values: RemoteStore detects that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtier.storage.codec import Scratch

Parts = Sequence[memoryview]
"""A value in pieces, which may be in different memory."""


class BucketError(Exception):
    """A request to a server failed. Internal to the storage package: stores return outcomes."""

    def __init__(self, message: str, *, is_transient: bool = True) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """True if a retry may help."""


class Put(Enum):
    """Result of writing one value."""

    STORED = "stored"
    EXISTS = "exists"
    """The name exists, and `replace` was False."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """How to split a batch into requests, which run in parallel on threads."""

    max_names: int
    max_put_bytes: int = 4 << 20
    """Of one write."""
    num_puts: int | None = None
    """Requests per batch of writes, more if they would be too large; None: one per thread."""


class Bucket(Protocol):
    """Thread-safe. Every method may raise a BucketError."""

    request_size: RequestSize

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def fetch(self, names: Sequence[str], rooms: Sequence[int], scratch: Scratch) -> list[memoryview | None]:
        """Return values, at most as many bytes as their rooms; longer values are not read beyond. None: missing.

        Entries of another type count as empty values and do not fail the others. Values may be in the scratch memory,
        and are valid until it is taken again.
        """
        ...

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:
        """Return the first bytes of values. None: missing."""
        ...

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        """Write values. Without `replace` a bucket may skip existing names.

        `values[i]` computes the value, which may raise a BucketError.
        """
        ...

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete values; return which of them existed."""
        ...

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        """Return about `limit` names and the next cursor, which is empty after the last names."""
        ...

    def reset(self) -> None:
        """Drop idle connections, whose next reply may belong to another request."""
        ...

    def close(self) -> None:
        """Release resources. Hanging calls may continue to hang."""
        ...


def join(parts: Parts, room: memoryview) -> memoryview:
    at = 0
    for part in parts:
        room[at : at + len(part)] = part
        at += len(part)
    return room[:at]
