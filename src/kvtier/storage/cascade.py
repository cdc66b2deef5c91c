"""Cascade: several stores combined into one, the nearest first."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvtier.errors import ArgumentError
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
    MISSING,
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
)

StoreCall = Callable[[Store], Callable[..., Results]]
"""Function that returns the method to call on a store."""
_WORSE = (ObjectStatus.MISSING, ObjectStatus.CORRUPT, ObjectStatus.FAILED)
"""Statuses from best to worst. If no store finds an object, the worst status is reported. For example, if one store
misses the object and another store fails, the result is FAILED, because the failed store might contain the object."""


class Cascade:
    """Lookups and reads try one store after another. Writes and removals go to all writable stores in parallel.

    `writable` has one bool per store; a store with False is only read. The deadline applies to the whole call. Lookups
    and reads divide the remaining time equally among the untried stores, so that a hanging store leaves time for the
    next stores.
    """

    def __init__(
        self, stores: Sequence[Store], writable: Sequence[bool] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        writable = [True] * len(stores) if writable is None else list(writable)
        if not stores or len(stores) != len(writable) or timeout_s <= 0:
            raise ArgumentError(
                f"a Cascade needs at least one store, one value of `writable` per store and a positive timeout_s, got "
                f"{len(stores)} stores, {len(writable)} values and {timeout_s=}"
            )
        self._stores, self._timeout_s = tuple(stores), timeout_s
        self._writable = tuple(store for store, is_writable in zip(stores, writable, strict=True) if is_writable)
        self._meter = Meter("this Cascade")

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin(keys)
        outcomes = self._in_turn(lambda store: store.contains, keys, timeout_s)
        return self._meter.end("lookups", outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([read.key for read in reads])
        outcomes = self._in_turn(lambda store: store.read_into, reads, timeout_s)
        return self._meter.end("reads", outcomes, begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Write to all writable stores. STORED means that at least one store has the object.

        The `reason` of a STORED object lists the errors of the other stores, if any.
        """
        begin = self._meter.begin([write.key for write in writes])
        results = self._in_parallel(lambda store: store.write, writes, timeout_s)
        outcomes = [_any_stored([one[index] for one in results]) for index in range(len(writes))]
        is_durable = any(one.is_durable and one.ok for one in results)
        return self._meter.end("writes", outcomes, begin, is_durable=is_durable)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin(keys)
        results = self._in_parallel(lambda store: store.remove, keys, timeout_s)
        outcomes = [_all_removed([one[index] for one in results]) for index in range(len(keys))]
        is_durable = bool(results) and all(one.is_durable for one in results)
        return self._meter.end("removals", outcomes, begin, is_durable=is_durable)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """Return a page of the inventory. Stores are listed one after another; an object in two stores occurs twice."""
        begin = self._meter.begin()
        number, _, inner = (cursor or "0|").partition("|")
        if not number.isdecimal() or int(number) >= len(self._stores):
            raise ArgumentError(f"{cursor!r} is not a cursor of a Cascade of {len(self._stores)} stores")
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        page = self._stores[int(number)].scan(inner, limit, timeout_s=wait_s)
        if page.reason or page.cursor:
            following = f"{number}|{page.cursor}"
        else:
            following = f"{int(number) + 1}|" if int(number) + 1 < len(self._stores) else ""
        return replace(page, cursor=following, seconds=time.perf_counter() - begin)

    def register(self, memory: memoryview) -> None:
        for_each([store.register for store in self._stores if isinstance(store, UsesMemory)], memory)

    def unregister(self, memory: memoryview) -> None:
        for_each([store.unregister for store in self._stores if isinstance(store, UsesMemory)], memory)

    def close(self) -> None:
        self._meter.is_closed = True
        for_each([store.close for store in self._stores])

    @property
    def stats(self) -> StoreStats:
        parts = [store.stats for store in self._stores]
        names = (
            *("num_objects", "used_bytes", "max_bytes", "num_evicted", "num_quarantined", "num_refused"),
            *("written_bytes", "day_bytes", "max_day_bytes"),
        )
        return replace(self._meter.stats, **{name: sum(getattr(part, name) for part in parts) for name in names})

    def _in_turn(self, call: StoreCall, items: Sequence[Any], timeout_s: float | None) -> Sequence[ObjectResult]:
        give_up = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        outcomes = [MISSING] * len(items)
        left: Sequence[int] = range(len(items))
        for number, store in enumerate(self._stores):
            if not left:
                break
            share_s = max(0.0, give_up - time.monotonic()) / (len(self._stores) - number)
            results = call(store)([items[index] for index in left], timeout_s=share_s)
            for index, outcome in zip(left, results, strict=True):
                outcomes[index] = _better(outcomes[index], outcome)
            left = [index for index in left if not outcomes[index].ok]
        return outcomes

    def _in_parallel(self, call: StoreCall, items: Sequence[Any], timeout_s: float | None) -> list[Results]:
        """Call all writable stores at the same time, because each call may last until the deadline."""
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        calls = [functools.partial(call(store), items, timeout_s=wait_s) for store in self._writable]
        if len(calls) < 2:
            return [call() for call in calls]
        with ThreadPoolExecutor(len(calls), "kvtier-cascade") as threads:
            return [future.result() for future in [threads.submit(call) for call in calls]]


def _better(one: ObjectResult, other: ObjectResult) -> ObjectResult:
    if other.ok:
        return other
    return max(other, one, key=lambda outcome: (_WORSE.index(outcome.status), bool(outcome.reason)))


def _any_stored(outcomes: Sequence[ObjectResult]) -> ObjectResult:
    if not outcomes:
        return ObjectResult(ObjectStatus.FAILED, reason="no store is writable")
    reasons = "; ".join(outcome.reason for outcome in outcomes if not outcome.ok)
    stored = [outcome for outcome in outcomes if outcome.ok]
    if not stored:
        return ObjectResult(ObjectStatus.FAILED, reason=reasons)
    return ObjectResult(ObjectStatus.STORED, max(outcome.nbytes for outcome in stored), reasons or stored[0].reason)


def _all_removed(outcomes: Sequence[ObjectResult]) -> ObjectResult:
    failed = [outcome for outcome in outcomes if outcome.status is ObjectStatus.FAILED]
    if failed:
        return failed[0]
    return next((outcome for outcome in outcomes if outcome.ok), MISSING)


def for_each(functions: Sequence[Callable[..., None]], *args: memoryview) -> None:
    """Call all functions, the last one first. If some of them raise, raise the latest error after all calls."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.callback(function, *args)
