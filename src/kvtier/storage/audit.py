"""Inventory and verification of any store, for `kvtier inspect` and `kvtier verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.storage.store import ObjectResult, ObjectStatus, Page, Read, Store, StoredObject

_BATCH_BYTES = 32 << 20  # a read call has objects of at most this size in total, or a single larger object
_MAX_OBJECT_BYTES = 1 << 30
"""Larger objects are not read. A block has at most 128 tokens of 8 MiB each, but a damaged record may claim more."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Number of objects and bytes in a store."""

    usages: dict[bytes, tuple[int, int]]
    """Number of objects and bytes by namespace, in descending order of bytes."""
    num_unreadable: int
    """Number of objects whose records are invalid."""
    seconds: float
    reason: str = ""
    """Reason why the inventory is incomplete; empty if it is complete."""

    @property
    def num_objects(self) -> int:
        return sum(num_objects for num_objects, _ in self.usages.values())

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.usages.values())


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of one read of each object that has at most _MAX_OBJECT_BYTES. Reads quarantine damaged objects."""

    num_sound: int
    nbytes: int
    num_gone: int
    """Number of objects that were listed but missing when read, for example because they were evicted in between."""
    defects: list[tuple[bytes, ObjectResult]]
    """Keys and results of corrupt and failed objects. Objects above _MAX_OBJECT_BYTES count as corrupt."""
    num_unreadable: int
    seconds: float
    reason: str = ""
    """Reason why the verification is incomplete; empty if it is complete."""

    @property
    def ok(self) -> bool:
        """True if the verification is complete and found no defect and no unreadable object."""
        return not (self.defects or self.num_unreadable or self.reason)


def take_inventory(store: Store, *, timeout_s: float | None = None) -> Inventory:
    """Count the objects of a store, page by page. `timeout_s` applies to each page."""
    begin = time.perf_counter()
    counts: dict[bytes, tuple[int, int]] = {}
    num_unreadable, reason = 0, ""
    for page in pages(store, timeout_s):
        num_unreadable, reason = num_unreadable + page.num_unreadable, page.reason
        for stored in page.objects:
            count, nbytes = counts.get(stored.label.namespace, (0, 0))
            counts[stored.label.namespace] = (count + 1, nbytes + stored.nbytes)
    usages = dict(sorted(counts.items(), key=lambda item: (-item[1][1], item[0])))
    return Inventory(usages, num_unreadable, time.perf_counter() - begin, reason)


def verify(
    store: Store, *, timeout_s: float | None = None, progress: Callable[[int, int], object] = lambda *_: None
) -> Verification:
    """Read and check the objects of a store. `timeout_s` applies to each page and each batch.

    `progress` receives the number of objects checked so far, and the number of bytes read.
    """
    begin = time.perf_counter()
    num_sound = total = num_gone = num_unreadable = 0
    defects: list[tuple[bytes, ObjectResult]] = []
    reason = ""
    for page in pages(store, timeout_s):
        num_unreadable, reason = num_unreadable + page.num_unreadable, page.reason
        for stored in page.objects:
            if stored.nbytes > _MAX_OBJECT_BYTES:
                claim = f"the record claims {stored.nbytes} bytes"
                defects.append((stored.key, ObjectResult(ObjectStatus.CORRUPT, reason=claim)))
        for batch in _batches([stored for stored in page.objects if stored.nbytes <= _MAX_OBJECT_BYTES]):
            reads = [Read(stored.key, stored.label, bytearray(stored.nbytes)) for stored in batch]
            results = store.read_into(reads, timeout_s=timeout_s)
            total += results.nbytes
            for stored, outcome in zip(batch, results, strict=True):
                num_sound += outcome.ok
                num_gone += outcome.status is ObjectStatus.MISSING
                if outcome.status in (ObjectStatus.CORRUPT, ObjectStatus.FAILED):
                    defects.append((stored.key, outcome))
            progress(num_sound + num_gone + len(defects), total)
    seconds = time.perf_counter() - begin
    return Verification(num_sound, total, num_gone, defects, num_unreadable, seconds, reason)


def pages(store: Store, timeout_s: float | None = None, limit: int = 1000) -> Iterator[Page]:
    """Yield all pages of an inventory. If the store fails, the last page has a reason."""
    cursor = ""
    while True:
        page = store.scan(cursor, limit, timeout_s=timeout_s)
        yield page
        cursor = page.cursor
        if not cursor or page.reason:
            return


def _batches(objects: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    batch: list[StoredObject] = []
    nbytes = 0
    for stored in objects:
        if batch and nbytes + stored.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(stored)
        nbytes += stored.nbytes
    if batch:
        yield batch
