"""Store: the batched interface to blocks on a disk or a server.

Every call accepts a batch and returns one result per object: found, stored, removed, missing, corrupt or failed, with a
reason. A miss is not an exception; exceptions are for invalid calls. Every call returns by its deadline. Objects that
are not done by then are reported as FAILED, and memory passed to `read_into` is not written after the call returned.
"""

from __future__ import annotations

import hashlib
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np

from kvtier.errors import ArgumentError, ClosedError

KEY_BYTES = 32
NAMESPACE_BYTES = 32
DIGEST_BYTES = 16
DEFAULT_TIMEOUT_S = 10.0  # time limit of one call; objects that are not done by then are FAILED

Buffer = bytes | bytearray | memoryview
"""Contiguous memory; writable for `read_into`."""


class Scattered(Sequence[memoryview]):
    """Many pieces of one buffer, which hold the bytes of an object. Faster to process than a list of pieces."""

    def __init__(self, memory: memoryview, offsets: np.ndarray, sizes: np.ndarray) -> None:
        """Piece i is `sizes[i]` bytes of `memory` at `offsets[i]`. Raise ArgumentError for a piece outside `memory`."""
        self.memory = view_of(memory)
        self.offsets, self.sizes = offsets.astype(np.int64, copy=False), sizes.astype(np.int64, copy=False)
        is_inside = self.offsets.shape == self.sizes.shape and self.offsets.ndim == 1 and len(self.offsets)
        if not is_inside or min(self.offsets.min(), self.sizes.min()) < 0 or self._stop > len(self.memory):
            raise ArgumentError(
                f"{len(offsets)} offsets and {len(sizes)} sizes do not fit a buffer of {len(self.memory)} bytes"
            )

    @property
    def _stop(self) -> int:
        return int((self.offsets + self.sizes).max())

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def is_aligned(self, alignment: int, address: int) -> bool:
        """True if the addresses and sizes of all pieces are multiples of `alignment`. `memory` is at `address`."""
        return not (((self.offsets + address) | self.sizes) & (alignment - 1)).any()

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return list(self)[index]
        return self.memory[self.offsets[index] : self.offsets[index] + self.sizes[index]]

    def __iter__(self) -> Iterator[memoryview]:
        for offset, size in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            yield self.memory[offset : offset + size]


Pieces = Buffer | Sequence[Buffer]
"""Memory of one object: a buffer, a list or tuple of buffers, or a Scattered. Several buffers hold the bytes of the
object one after another."""
CallKind = Literal["lookups", "reads", "writes", "removals"]


class ObjectStatus(Enum):
    """Result for one object of a batch."""

    FOUND = "found"
    """For `contains`, the object is present. For `read_into`, its verified bytes are in the caller's memory."""
    STORED = "stored"
    REMOVED = "removed"
    MISSING = "missing"
    """The object is absent, has expired, or is not the expected object (another namespace, other tokens or length). It
    is also MISSING if its encryption key was deleted or its format is too new. See `reason`."""
    CORRUPT = "corrupt"
    """The object's bytes have changed since they were stored. The store quarantines or deletes the object."""
    FAILED = "failed"
    """Caused by an error, a missed deadline, a full store, or an open circuit breaker."""


_OK = frozenset((ObjectStatus.FOUND, ObjectStatus.STORED, ObjectStatus.REMOVED))


@dataclass(frozen=True, slots=True)
class ObjectResult:
    """Status of one object, the bytes moved, and the reason for the status if there is one."""

    status: ObjectStatus
    nbytes: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status in _OK


MISSING = ObjectResult(ObjectStatus.MISSING)


@dataclass(frozen=True, slots=True)
class Results:
    """Results in the order of the batch, and the duration of the call in seconds."""

    outcomes: tuple[ObjectResult, ...]
    seconds: float
    is_durable: bool = False
    """True if the successful changes of this call survive a power failure."""

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, index: int) -> ObjectResult:
        return self.outcomes[index]

    def __iter__(self) -> Iterator[ObjectResult]:
        return iter(self.outcomes)

    @property
    def nbytes(self) -> int:
        return sum(outcome.nbytes for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Label:
    """Identity of an object in addition to its key. A read that expects another label is a miss."""

    namespace: bytes
    """Fingerprint of model, weights, dtype, layout and block size (index.Namespace.fingerprint)."""
    token_digest: bytes = bytes(DIGEST_BYTES)
    token_ids: bytes = b""
    """The tokens (little-endian int32), if the store is configured to keep them. Only the digest is compared."""

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES or len(self.token_digest) != DIGEST_BYTES:
            raise ArgumentError(
                f"a label needs a namespace of {NAMESPACE_BYTES} bytes and a token digest of {DIGEST_BYTES}, "
                f"got {len(self.namespace)} and {len(self.token_digest)}"
            )

    @classmethod
    def of(cls, namespace: bytes, token_ids: bytes, *, secret: bytes = b"", keep_ids: bool = False) -> Label:
        """Return the label of a block. With a `secret`, others cannot compute the token digests of guessed prompts."""
        return cls(namespace, digest_tokens(token_ids, secret), bytes(token_ids) if keep_ids else b"")

    def difference(self, expected: Label) -> str:
        """Return the reason why this is not the expected label, or an empty string."""
        if self.namespace != expected.namespace:
            return f"stored for another namespace, {self.namespace.hex()[:12]}"
        return "stored for other tokens" if self.token_digest != expected.token_digest else ""


def digest_tokens(token_ids: bytes, secret: bytes = b"") -> bytes:
    """Return the digest of a block's tokens for the label of the block."""
    return hashlib.blake2b(token_ids, digest_size=DIGEST_BYTES, key=secret, person=b"kvtier tokens").digest()


@dataclass(frozen=True, slots=True)
class Read:
    """Fill `into` with the object of this key, if the object's label and length match."""

    key: bytes
    label: Label
    into: Pieces


@dataclass(frozen=True, slots=True)
class Write:
    """Store `payload` under this key. The payload must not change until the call returns."""

    key: bytes
    label: Label
    payload: Pieces
    tenant: bytes = b""
    """Owner of the object. An encrypted disk store has one key per tenant; other stores ignore the tenant."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of an inventory."""

    key: bytes
    label: Label
    """The label has the digest of the tokens, but no token ids."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """Part of an inventory, and the cursor of the next part."""

    objects: tuple[StoredObject, ...]
    cursor: str
    """Cursor for the next call; empty after the last page. If the call failed, the cursor that was passed to it."""
    seconds: float
    reason: str = ""
    """Reason of a failure; empty if the call succeeded. A failed page contains no objects."""
    num_unreadable: int = 0
    """Number of objects that this page omits because their records are invalid."""


class CallStats(NamedTuple):
    """Totals of one kind of call. `num_calls` counts calls, all other `num_` fields count objects."""

    num_done: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    num_calls: int = 0

    def plus(self, results: Results) -> CallStats:
        statuses = [outcome.status for outcome in results]
        errors = [statuses.count(s) for s in (ObjectStatus.MISSING, ObjectStatus.CORRUPT, ObjectStatus.FAILED)]
        new = (len(statuses) - sum(errors), *errors, results.nbytes, results.seconds, 1)
        return CallStats(*map(operator.add, self, new))


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store."""

    lookups: CallStats = field(default_factory=CallStats)
    reads: CallStats = field(default_factory=CallStats)
    writes: CallStats = field(default_factory=CallStats)
    removals: CallStats = field(default_factory=CallStats)
    num_objects: int = 0
    """If a server keeps the objects, `num_objects`, `used_bytes` and `max_bytes` are 0. Use `scan` instead."""
    used_bytes: int = 0
    """Bytes that the store occupies, including metadata and allocated slots without an object."""
    max_bytes: int = 0
    num_evicted: int = 0
    num_quarantined: int = 0
    """Objects found corrupt since the store was opened, plus records and files that were unreadable at opening."""
    num_refused: int = 0
    """Calls refused by an open breaker."""
    written_bytes: int = 0
    """Bytes that a disk store has written since it was opened: records, and objects rounded up to whole pages."""
    day_bytes: int = 0
    """Bytes written in the current hour and the 24 hours before it. The limit is `max_day_bytes`."""
    max_day_bytes: int = 0
    """Limit for `day_bytes`; 0 for no limit."""


class Store(Protocol):
    """Keeps blocks by key. Thread-safe. If `timeout_s` is None, the store's own deadline applies."""

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Look up objects, without reading their bytes."""
        ...

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        """Fill the memory of each read. Memory stays unchanged if the result is not FOUND."""
        ...

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store or replace objects. If space is short, the store may evict other objects."""
        ...

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Delete objects. The result is MISSING for an object that does not exist."""
        ...

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """Return one page of about `limit` objects. Objects that change during a scan can be missing or repeated."""
        ...

    def close(self) -> None:
        """Stop threads and release resources. Later calls raise ClosedError. Closing twice is allowed."""
        ...

    @property
    def stats(self) -> StoreStats: ...


@runtime_checkable
class UsesMemory(Protocol):
    """Optional interface of stores and buckets (remote/bucket.py) that prepare memory for copies of blocks.

    If the preparation fails, a store raises StoreError and a bucket raises BucketError, but later calls are not
    affected. There is no deadline, because a call may pin gigabytes.
    """

    def register(self, memory: memoryview) -> None:
        """Prepare `memory` for copies of blocks into it and out of it, until `unregister`. Idempotent."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """Undo `register`. Memory that is not registered is ignored."""
        ...


def view_of(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """Return the bytes of a buffer. Raise ArgumentError if it is not contiguous or (with `writable`) is read-only."""
    view = memoryview(buffer)
    if not view.c_contiguous or (writable and view.readonly):
        raise ArgumentError(f"need contiguous {'writable ' if writable else ''}memory, got {view.format} {view.shape}")
    if view.format == "B" and view.ndim == 1 and view.nbytes:
        return view
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def views_of(memory: Pieces, *, writable: bool = False) -> Sequence[memoryview]:
    """Return a view of each non-empty piece of an object (see `view_of`). If all are empty, return one empty view."""
    if isinstance(memory, Scattered) and memory.sizes.all():
        view_of(memory.memory, writable=writable)
        return memory
    memory = list(memory) if isinstance(memory, Scattered) else memory
    if not isinstance(memory, list | tuple):
        return (view_of(memory, writable=writable),)  # type: ignore[arg-type]
    views = [view_of(piece, writable=writable) for piece in memory]
    return tuple(view for view in views if len(view)) or (memoryview(bytearray()),)


def num_bytes(views: Sequence[memoryview]) -> int:
    return views.nbytes if isinstance(views, Scattered) else sum(map(len, views))


def last_writes(writes: Sequence[Write]) -> dict[bytes, int]:
    """Return the index of the last write to each key. Earlier writes to the same key are not executed."""
    return {write.key: index for index, write in enumerate(writes)}


def outcomes_of(writes: Sequence[Write], last: dict[bytes, int], results: Sequence[ObjectResult]) -> list[ObjectResult]:
    """Return one result per write. `results` has one result per key, for the last write to the key.

    Earlier writes to a key have the same result, but count 0 bytes.
    """
    by_key = dict(zip(last, results, strict=True))
    return [by_key[w.key] if last[w.key] == i else replace(by_key[w.key], nbytes=0) for i, w in enumerate(writes)]


class Meter:
    """Checks and counts the calls of one store. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self.stats = StoreStats()
        """Counts of calls. The store adds the numbers about its contents."""
        self.is_closed = False

    def begin(self, keys: Sequence[bytes] = ()) -> float:
        """Check a call and return its start time, which `end` needs."""
        if self.is_closed:
            raise ClosedError(f"{self._name} is closed")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ArgumentError(f"a block key has {KEY_BYTES} bytes, got {len(key)}")
        return time.perf_counter()

    def end(
        self, kind: CallKind, outcomes: Sequence[ObjectResult], begin: float, *, is_durable: bool = False
    ) -> Results:
        results = Results(tuple(outcomes), time.perf_counter() - begin, is_durable)
        with self._lock:
            self.stats = replace(self.stats, **{kind: getattr(self.stats, kind).plus(results)})
        return results
