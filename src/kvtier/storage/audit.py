"""What is in a store, and whether it can still be read: `kvtier inspect` and `kvtier verify`, for any store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.storage.store import ObjectStatus, Page, Read, Store, StoredObject

_BATCH_BYTES = 32 << 20
_MAX_OBJECT_BYTES = 1 << 30
"""No block is that large: 128 tokens of a model with 8 MiB per token. A record can claim any size."""


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """Objects and bytes of one namespace."""

    namespace: bytes
    num_objects: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a store holds."""

    usages: tuple[NamespaceUsage, ...]
    """By namespace, the largest first."""
    num_unreadable: int
    """Objects nobody can tell what they are."""
    seconds: float
    reason: str = ""
    """Why it is not complete; nothing if it is."""

    @property
    def num_objects(self) -> int:
        """All readable objects."""
        return sum(usage.num_objects for usage in self.usages)

    @property
    def nbytes(self) -> int:
        """Bytes of all readable objects, as their readers want them."""
        return sum(usage.nbytes for usage in self.usages)


@dataclass(frozen=True, slots=True)
class Defect:
    """An object that could not be read."""

    key: bytes
    status: ObjectStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What reading everything once came to. Damaged objects are quarantined by it."""

    num_sound: int
    nbytes: int
    num_gone: int
    """In the inventory, and no longer there when read: evicted, removed or replaced."""
    defects: tuple[Defect, ...]
    num_unreadable: int
    seconds: float
    reason: str = ""
    """Why it is not complete; nothing if it is."""

    @property
    def ok(self) -> bool:
        """Whether everything was read and nothing is damaged."""
        return not (self.defects or self.num_unreadable or self.reason)


def take_inventory(store: Store, *, timeout_s: float | None = None) -> Inventory:
    """Count what is in a store, page by page; `timeout_s` is for each page."""
    begin = time.perf_counter()
    counts: dict[bytes, tuple[int, int]] = {}
    num_unreadable, reason = 0, ""
    for page in pages(store, timeout_s):
        num_unreadable, reason = num_unreadable + page.num_unreadable, page.reason
        for each in page.objects:
            count, nbytes = counts.get(each.label.namespace, (0, 0))
            counts[each.label.namespace] = (count + 1, nbytes + each.nbytes)
    usages = [NamespaceUsage(namespace, *totals) for namespace, totals in counts.items()]
    usages.sort(key=lambda usage: (-usage.nbytes, usage.namespace))
    return Inventory(tuple(usages), num_unreadable, time.perf_counter() - begin, reason)


def verify(
    store: Store, *, timeout_s: float | None = None, progress: Callable[[int, int], object] = lambda *_: None
) -> Verification:
    """Read every object of a store and check it; `timeout_s` is for each page and each batch.

    `progress` is told the objects and bytes read so far.
    """
    begin = time.perf_counter()
    num_sound = total = num_gone = num_unreadable = 0
    defects: list[Defect] = []
    reason = ""
    for page in pages(store, timeout_s):
        num_unreadable, reason = num_unreadable + page.num_unreadable, page.reason
        oversized = [each for each in page.objects if each.nbytes > _MAX_OBJECT_BYTES]
        defects += [
            Defect(each.key, ObjectStatus.CORRUPT, f"its record claims {each.nbytes} bytes") for each in oversized
        ]
        for batch in _batches([each for each in page.objects if each.nbytes <= _MAX_OBJECT_BYTES]):
            reads = [Read(each.key, each.label, bytearray(each.nbytes)) for each in batch]
            results = store.read_into(reads, timeout_s=timeout_s)
            total += results.nbytes
            for each, outcome in zip(batch, results, strict=True):
                num_sound += outcome.ok
                num_gone += outcome.status is ObjectStatus.MISSING
                if outcome.status in (ObjectStatus.CORRUPT, ObjectStatus.FAILED):
                    defects.append(Defect(each.key, outcome.status, outcome.reason))
            progress(num_sound + num_gone + len(defects), total)
    seconds = time.perf_counter() - begin
    return Verification(num_sound, total, num_gone, tuple(defects), num_unreadable, seconds, reason)


def pages(store: Store, timeout_s: float | None = None) -> Iterator[Page]:
    """All pages of an inventory; the last one has a reason if the store failed."""
    cursor = ""
    while True:
        page = store.scan(cursor, timeout_s=timeout_s)
        yield page
        cursor = page.cursor
        if not cursor or page.reason:
            return


def _batches(objects: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    batch: list[StoredObject] = []
    nbytes = 0
    for each in objects:
        if batch and nbytes + each.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += each.nbytes
    if batch:
        yield batch
