"""The Store interface: batched calls, one outcome per object, traffic counters.

Store: one small batched interface, behind which a disk, a server or a bucket keeps blocks.

Every call takes a batch and answers each object of it: found, stored, removed, missing, corrupt or failed, with the
reason in words. A miss is never an exception; exceptions are for calls no store could carry out. Every call ends by its
deadline: what did not finish by then is failed, and memory given to `read_into` is not touched after it returned.

Counts calls of a store.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from kvtier.errors import ArgumentError

KEY_BYTES = 32
NAMESPACE_BYTES = 32
DIGEST_BYTES = 16
DEFAULT_TIMEOUT_S = 10.0

Buffer = bytes | bytearray | memoryview
"""Memory of any kind that shows itself as a contiguous buffer; for `read_into` a writable one."""


class ObjectStatus(Enum):
    """What became of one object of a batch."""

    FOUND = "found"
    """contains: it is there. read_into: its bytes, verified, are in the caller's memory."""
    STORED = "stored"
    REMOVED = "removed"
    MISSING = "missing"
    """Not there, or there for another namespace, other tokens or another length: the reason says which."""
    CORRUPT = "corrupt"
    """Its bytes are not those that were stored; it is quarantined, and missing from now on."""
    FAILED = "failed"
    """The store could not say: an error, a deadline, no room, or a breaker that is open."""


_OK = frozenset((ObjectStatus.FOUND, ObjectStatus.STORED, ObjectStatus.REMOVED))


@dataclass(frozen=True, slots=True)
class ObjectResult:
    """What became of one object, how many bytes of it moved, and why it is not better than that."""

    status: ObjectStatus
    nbytes: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether what was asked for is done."""
        return self.status in _OK


@dataclass(frozen=True, slots=True)
class Results:
    """The outcomes of a batch in its order, and the seconds the call took."""

    outcomes: tuple[ObjectResult, ...]
    seconds: float
    is_durable: bool = False
    """Whether what was stored or removed is so after a power failure, too, and not only after the process is killed."""

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, index: int) -> ObjectResult:
        return self.outcomes[index]

    def __iter__(self) -> Iterator[ObjectResult]:
        return iter(self.outcomes)

    @property
    def nbytes(self) -> int:
        """Bytes moved for all objects together."""
        return sum(outcome.nbytes for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether all is done that was asked for."""
        return all(outcome.ok for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Label:
    """What an object says about itself beside its key. A read that expects another label is a miss."""

    namespace: bytes
    """Fingerprint of model, weights, dtype, layout and block size: index.Namespace.fingerprint."""
    token_digest: bytes = bytes(DIGEST_BYTES)
    token_ids: bytes = b""
    """The tokens themselves (little-endian int32), only where the operator wants them in the store. Not compared:
    the digest is."""

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES or len(self.token_digest) != DIGEST_BYTES:
            raise ArgumentError(
                f"a label needs a namespace of {NAMESPACE_BYTES} bytes and a token digest of {DIGEST_BYTES}, "
                f"got {len(self.namespace)} and {len(self.token_digest)}"
            )

    @classmethod
    def of(cls, namespace: bytes, token_ids: bytes, *, secret: bytes = b"", keep_ids: bool = False) -> Label:
        """The label of a block of these tokens; `secret` keeps whoever reads the store from guessing prompts."""
        return cls(namespace, digest_tokens(token_ids, secret), bytes(token_ids) if keep_ids else b"")

    def difference(self, expected: Label) -> str:
        """Why this is not the label that was expected; nothing if it is."""
        if self.namespace != expected.namespace:
            return f"stored for another namespace, {self.namespace.hex()[:12]}"
        if self.token_digest != expected.token_digest:
            return "stored for other tokens"
        return ""


def digest_tokens(token_ids: bytes, secret: bytes = b"") -> bytes:
    """The digest of a block's tokens that its label carries."""
    return hashlib.blake2b(token_ids, digest_size=DIGEST_BYTES, key=secret, person=b"kvtier tokens").digest()


@dataclass(frozen=True, slots=True)
class Read:
    """Fill `into` with the object of this key, if it is the one expected and exactly as long."""

    key: bytes
    label: Label
    into: Buffer


@dataclass(frozen=True, slots=True)
class Write:
    """Store these bytes. They must stay as they are until the call returns."""

    key: bytes
    label: Label
    payload: Buffer


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of an inventory."""

    key: bytes
    label: Label
    """Without token ids, which are not in memory."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """A part of an inventory, and where the next one begins."""

    objects: tuple[StoredObject, ...]
    cursor: str
    """For the next call; empty after the last page."""
    seconds: float
    reason: str = ""
    """Why the page is empty though there may be objects: the store failed."""
    num_unreadable: int = 0
    """Objects of this page that are left out because nobody can tell what they are."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """What one kind of call has done so far."""

    num_done: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    num_calls: int = 0

    def plus(self, results: Results) -> CallStats:
        """With one more call."""
        statuses = [outcome.status for outcome in results]
        missing, corrupt, failed = (
            statuses.count(s) for s in (ObjectStatus.MISSING, ObjectStatus.CORRUPT, ObjectStatus.FAILED)
        )
        return CallStats(
            self.num_done + len(statuses) - missing - corrupt - failed,
            self.num_missing + missing,
            self.num_corrupt + corrupt,
            self.num_failed + failed,
            self.nbytes + results.nbytes,
            self.seconds + results.seconds,
            self.num_calls + 1,
        )


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store."""

    lookups: CallStats = field(default_factory=CallStats)
    reads: CallStats = field(default_factory=CallStats)
    writes: CallStats = field(default_factory=CallStats)
    removals: CallStats = field(default_factory=CallStats)
    num_objects: int = 0
    """0, as the next two, where a server keeps the objects: `scan` tells what is there."""
    used_bytes: int = 0
    """What the store takes, its own bookkeeping and free slots included."""
    max_bytes: int = 0
    num_evicted: int = 0
    num_quarantined: int = 0
    """Objects found corrupt since the store was opened, and files found unreadable when it was."""
    num_refused: int = 0
    """Calls turned away by an open breaker."""


class Store(Protocol):
    """Where blocks are kept. Thread-safe; `timeout_s` None is the store's own deadline."""

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Which of these objects are there. Their bytes are not looked at."""
        ...

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        """Fill the given memory. Where the outcome is not FOUND, memory holds what it held before."""
        ...

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store objects, replacing others of their keys, evicting the least recently used as need be."""
        ...

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Forget objects."""
        ...

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """The inventory, about `limit` objects a page. What changes meanwhile may be in it or not, or twice."""
        ...

    def close(self) -> None:
        """End what the store runs and give back what it holds. Again: nothing. Calls after it are ClosedErrors."""
        ...

    @property
    def stats(self) -> StoreStats:
        """What it did and holds."""
        ...


@runtime_checkable
class UsesMemory(Protocol):
    """What can make memory ready before blocks come from it: some stores, some buckets. Optional; a refusal is a
    StoreError (of a bucket a BucketError), after which everything works as before. No deadline: it may pin gigabytes.
    """

    def register(self, memory: memoryview) -> None:
        """Blocks are read from and written to this memory from now on, until it is unregistered. Again: nothing."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """This memory, all that was registered with it, is about to be given back. Unknown memory: nothing."""
        ...


def check_keys(keys: Sequence[bytes]) -> None:
    """An ArgumentError unless every key has the length of one."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ArgumentError(f"a block key has {KEY_BYTES} bytes, got {len(key)}")


def view_of(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """The bytes of a buffer; an ArgumentError if it is not contiguous, or read-only where it must not be."""
    view = memoryview(buffer)
    if not view.c_contiguous or (writable and view.readonly):
        raise ArgumentError(f"need contiguous {'writable ' if writable else ''}memory, got {view.format} {view.shape}")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class Kind(Enum):
    """The calls that are counted."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    REMOVAL = "removal"


class Meter:
    """Traffic by kind, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = {kind: CallStats() for kind in Kind}

    def count(self, kind: Kind, results: Results) -> Results:
        """Add a call; returns its results."""
        with self._lock:
            self._traffic[kind] = self._traffic[kind].plus(results)
        return results

    @property
    def stats(self) -> StoreStats:
        """The traffic; what the store holds is for the store to fill in."""
        with self._lock:
            of = self._traffic
            return StoreStats(of[Kind.LOOKUP], of[Kind.READ], of[Kind.WRITE], of[Kind.REMOVAL])
