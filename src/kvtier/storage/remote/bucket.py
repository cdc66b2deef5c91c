"""Bucket: reads and writes named values on a server, in batches. RemoteStore uses this interface.

One file per kind of server implements the interface (redis.py, objects.py, mooncake.py). A bucket has no records,
checksums or deadlines. RemoteStore detects values that a server has lost, changed or swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvtier.storage.codec import Scratch

Parts = Sequence[memoryview]
"""The pieces of a value, which need not be contiguous in memory."""


class BucketError(Exception):
    """A request to a server failed. Callers of a store get a FAILED result instead of this error."""

    def __init__(self, message: str, *, is_transient: bool = True) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """True if a retry could succeed."""


class Put(Enum):
    """Result of writing one value."""

    STORED = "stored"
    EXISTS = "exists"
    """The name exists, and `replace` was False."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Limits for splitting a batch into requests, which run in parallel on threads."""

    max_names: int
    max_put_bytes: int = 4 << 20
    """Maximum bytes of one write request."""
    num_puts: int | None = None
    """Number of write requests per large batch; `max_put_bytes` may require more. None means one request per thread."""


class Bucket(Protocol):
    """Thread-safe. Every method may raise a BucketError."""

    request_size: RequestSize

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def fetch(self, names: Sequence[str], limits: Sequence[int], scratch: Scratch) -> list[memoryview | None]:
        """Return at most the first `limits[i]` bytes of value i, or None if the value is missing.

        If a name belongs to data of another type, such as a Redis list, its value counts as empty. Values may be in the
        scratch memory, so they are valid only until the next `scratch.take`.
        """
        ...

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:
        """Return the first `nbytes` bytes of each value, or None if the value is missing."""
        ...

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        """Write values. Without `replace` a bucket may skip existing names.

        Value i is computed when `values[i]` is accessed. This access may raise a BucketError.
        """
        ...

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete values. Return one bool per name: True if the value existed."""
        ...

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        """Return about `limit` names and the next cursor, which is empty after the last names."""
        ...

    def reset(self) -> None:
        """Drop idle connections, because the next reply on such a connection could belong to an earlier request."""
        ...

    def close(self) -> None:
        """Release resources. Hanging calls may continue to hang."""
        ...


def join(parts: Parts, target: memoryview) -> memoryview:
    at = 0
    for part in parts:
        target[at : at + len(part)] = part
        at += len(part)
    return target[:at]
