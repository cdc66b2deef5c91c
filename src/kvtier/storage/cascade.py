"""Cascade: several stores as one, the nearest first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier.errors import ArgumentError, ClosedError, StoreError
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
    Kind,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    Store,
    StoreStats,
    UsesMemory,
    Write,
    check_keys,
    view_of,
)

_WORSE = (ObjectStatus.MISSING, ObjectStatus.CORRUPT, ObjectStatus.FAILED)
"""Of several bad answers the last of these is told: where one store could not say, nobody knows that it is missing."""


class Cascade:
    """Reads ask one store after the other for what is not found yet; writes and removals go to all, at the same time.

    A store that is not `writable` is only read. One deadline is for the whole call: of the time that is left a reader
    gives each store its share, so that one that hangs does not take the others' turn.
    """

    def __init__(
        self, stores: Sequence[Store], writable: Sequence[bool] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        writable = [True] * len(stores) if writable is None else list(writable)
        if not stores or len(stores) != len(writable) or timeout_s <= 0:
            raise ArgumentError(f"a Cascade needs stores, got {len(stores)}, {len(writable)=} alike, and {timeout_s=}")
        self._stores, self._timeout_s = tuple(stores), timeout_s
        self._takers = tuple(store for store, is_writable in zip(stores, writable, strict=True) if is_writable)
        self._meter = Meter()
        self._is_closed = False

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Which of these objects are in any of the stores."""
        begin = self._begin(keys)

        def ask(store: Store, left: Sequence[int], wait_s: float) -> Results:
            return store.contains([keys[index] for index in left], timeout_s=wait_s)

        return self._end(Kind.LOOKUP, self._in_turn(len(keys), ask, timeout_s), begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        """Fill the given memory from the first store that has it."""
        begin = self._begin([read.key for read in reads])
        for read in reads:
            view_of(read.into, writable=True)

        def ask(store: Store, left: Sequence[int], wait_s: float) -> Results:
            return store.read_into([reads[index] for index in left], timeout_s=wait_s)

        return self._end(Kind.READ, self._in_turn(len(reads), ask, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store objects everywhere. STORED: at least one store has it, and the reason tells of the others."""
        begin = self._begin([write.key for write in writes])
        for write in writes:
            view_of(write.payload)
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        answers = _at_once([lambda s=store: s.write(writes, timeout_s=wait_s) for store in self._takers])  # type: ignore[misc]
        outcomes = [_stored_somewhere([answer[index] for answer in answers]) for index in range(len(writes))]
        is_durable = any(answer.is_durable and answer.ok for answer in answers)
        return replace(self._end(Kind.WRITE, outcomes, begin), is_durable=is_durable)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Forget objects everywhere but in stores that are only read."""
        begin = self._begin(keys)
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        answers = _at_once([lambda s=store: s.remove(keys, timeout_s=wait_s) for store in self._takers])  # type: ignore[misc]
        outcomes = [_removed_everywhere([answer[index] for answer in answers]) for index in range(len(keys))]
        is_durable = bool(answers) and all(answer.is_durable for answer in answers)
        return replace(self._end(Kind.REMOVAL, outcomes, begin), is_durable=is_durable)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """The inventories one after the other; what is in two stores comes twice."""
        begin = self._begin([])
        number, _, inner = (cursor or "0|").partition("|")
        if not number.isdecimal() or int(number) >= len(self._stores):
            raise ArgumentError(f"{cursor!r} is no cursor of a Cascade of {len(self._stores)} stores")
        page = self._stores[int(number)].scan(
            inner, limit, timeout_s=self._timeout_s if timeout_s is None else timeout_s
        )
        if page.reason or page.cursor:
            following = f"{number}|{page.cursor}"
        else:
            following = f"{int(number) + 1}|" if int(number) + 1 < len(self._stores) else ""
        return replace(page, cursor=following, seconds=time.perf_counter() - begin)

    def register(self, memory: memoryview) -> None:
        """With those of the stores that use it, also if one refuses."""
        with contextlib.ExitStack() as asking:
            for store in self._stores:
                if isinstance(store, UsesMemory):
                    asking.callback(store.register, memory)

    def unregister(self, memory: memoryview) -> None:
        """From those of the stores that use it, also if one cannot."""
        with contextlib.ExitStack() as asking:
            for store in self._stores:
                if isinstance(store, UsesMemory):
                    asking.callback(store.unregister, memory)

    def close(self) -> None:
        """Close all of them; the first StoreError is raised when all are."""
        self._is_closed = True
        errors: list[StoreError] = []
        for store in self._stores:
            try:
                store.close()
            except StoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def stats(self) -> StoreStats:
        """Its own calls, and what the stores hold together."""
        parts = [store.stats for store in self._stores]
        return replace(
            self._meter.stats,
            num_objects=sum(part.num_objects for part in parts),
            used_bytes=sum(part.used_bytes for part in parts),
            max_bytes=sum(part.max_bytes for part in parts),
            num_evicted=sum(part.num_evicted for part in parts),
            num_quarantined=sum(part.num_quarantined for part in parts),
            num_refused=sum(part.num_refused for part in parts),
        )

    def _begin(self, keys: Sequence[bytes]) -> float:
        if self._is_closed:
            raise ClosedError("this Cascade is closed")
        check_keys(keys)
        return time.perf_counter()

    def _end(self, kind: Kind, outcomes: Sequence[ObjectResult], begin: float) -> Results:
        return self._meter.count(kind, Results(tuple(outcomes), time.perf_counter() - begin))

    def _in_turn(
        self, count: int, ask: Callable[[Store, Sequence[int], float], Results], timeout_s: float | None
    ) -> Sequence[ObjectResult]:
        give_up = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        outcomes = [ObjectResult(ObjectStatus.MISSING)] * count
        left: Sequence[int] = range(count)
        for number, store in enumerate(self._stores):
            if not left:
                break
            share_s = max(0.0, give_up - time.monotonic()) / (len(self._stores) - number)
            for index, outcome in zip(left, ask(store, left, share_s), strict=True):
                outcomes[index] = _better(outcomes[index], outcome)
            left = [index for index in left if not outcomes[index].ok]
        return outcomes


def _better(one: ObjectResult, other: ObjectResult) -> ObjectResult:
    """The answer of two stores, neither of them asked after the other had the object."""
    if other.ok:
        return other
    return max(other, one, key=lambda outcome: (_WORSE.index(outcome.status), bool(outcome.reason)))


def _stored_somewhere(outcomes: Sequence[ObjectResult]) -> ObjectResult:
    if not outcomes:
        return ObjectResult(ObjectStatus.FAILED, reason="no store takes writes")
    reasons = "; ".join(outcome.reason for outcome in outcomes if not outcome.ok)
    stored = [outcome for outcome in outcomes if outcome.ok]
    if not stored:
        return ObjectResult(ObjectStatus.FAILED, reason=reasons)
    return ObjectResult(ObjectStatus.STORED, max(outcome.nbytes for outcome in stored), reasons or stored[0].reason)


def _removed_everywhere(outcomes: Sequence[ObjectResult]) -> ObjectResult:
    failed = [outcome for outcome in outcomes if outcome.status is ObjectStatus.FAILED]
    if failed:
        return failed[0]
    return next((outcome for outcome in outcomes if outcome.ok), ObjectResult(ObjectStatus.MISSING))


def _at_once(calls: Sequence[Callable[[], Results]]) -> list[Results]:
    """What the calls return; each on a thread of its own, since each may take the whole deadline."""
    answers: list[Results | None] = [None] * len(calls)

    def run(number: int) -> None:
        answers[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(n,), name="kvtier-cascade") for n in range(1, len(calls))]
    for thread in threads:
        thread.start()
    if calls:
        run(0)
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]
