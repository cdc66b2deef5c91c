"""Learned: evicts the block with the lowest expected number of hits per block-second (see kvtier.index.reuse).

Blocks with equal features, such as the number of uses, form a class. Each class queues its candidates for eviction,
oldest (least recently used) first. If the values of a class fall with age, only its oldest candidate can be the victim.
This is the usual case. Values can also rise with age, for example if blocks are used in a cycle that is longer than the
cache. While values rise, the youngest candidate of the class is considered too.

    class 0   [ a d f ]  oldest a: value .2 until t = 31  ─┐
    class 1   [ b c ]    oldest b: value .1 until t = 12  ─┼─> heap of values ─> victim b
    class 2   [ e ]      oldest e: value .3 until t = 15  ─┘   timers: b at 12, e at 15, a at 31

Each fit of the ReuseTable computes one value per class and age bucket. A class is evaluated again when its oldest
candidate changes or reaches the next age bucket, and after each fit. Choosing a victim takes amortised O(log n) time,
because there are only 28 age buckets.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np

from kvtier.index.native import IndexNative
from kvtier.index.node import Node
from kvtier.index.reuse import ENDS, LIMITS
from kvtier.index.tracker import ReuseTracker

# [logical time of the last use (for the LRU order), sequence number, node, class, time of the last use on the caller's
# clock (for the age)]. `withdraw` sets the node to None: a withdrawn candidate may stay in the heaps, but must not keep
# the node alive.
_Candidate = list[Any]
# (value, logical time of the last use, sequence number, candidate, time at which the value changes, class). The heap of
# values has three kinds of entries:
# - for the oldest candidate of a class
# - for all young candidates of a class (see ClassQueue.young); the candidate is None
# - for the youngest candidate of a class; instead of the class, the entry contains _SINGLE
_Item = tuple[float, int, int, _Candidate | None, float, int]
_SINGLE = -1


class ClassQueue:
    """Candidates of one class in order of their last use. The heap may still contain withdrawn candidates."""

    __slots__ = ("count", "floor", "heap", "item", "timer", "young")

    def __init__(self) -> None:
        self.heap: list[_Candidate] = []
        self.count = 0  # candidates that are not withdrawn
        self.item: _Item | None = None
        """Entry in the heap of values for the oldest candidate. This candidate may have been withdrawn since."""
        self.timer = math.inf
        """Time of the earliest timer of this class."""
        self.young: list[_Candidate] = []
        """Candidates whose values may still rise with age. The last candidate not withdrawn counts as the youngest."""
        self.floor: _Item | None = None
        """Common entry of all young candidates, with the lowest value that any of them can have."""


class Learned:
    """Evicts the node with the lowest value. Uses LRU before the first fit and for a while after an LRUGuard alarm."""

    name = "Learned"

    def __init__(self, tracker: ReuseTracker | None = None) -> None:
        self.tracker = ReuseTracker() if tracker is None else tracker
        self._candidates: dict[Node, _Candidate] = {}
        self._queues: dict[int, ClassQueue] = {}
        self._next = 0
        self._version = -1
        self._dirty: set[int] = set()
        """Classes that `victim` must evaluate again."""
        self._by_value: list[_Item] = []
        self._timers: list[tuple[float, int]] = []

    def __contains__(self, node: Node) -> bool:
        return node in self._candidates

    def offer(self, node: Node) -> None:
        if node in self._candidates:
            return
        tracker, usage = self.tracker, node.usage
        touch = usage.touch
        cell, since = (0, tracker.state.now) if touch is None else (touch[1], touch[2])
        queue = self._queues.get(cell)
        if queue is None:
            queue = self._queues[cell] = ClassQueue()
            tracker.table.row(cell)
        self._next += 1
        new = self._candidates[node] = [usage.used, self._next, node, cell, since]
        heap = queue.heap
        heappush(heap, new)
        queue.count += 1
        if heap[0] is new:
            self._dirty.add(cell)
        if len(heap) > 64 + 2 * queue.count:
            queue.heap = [candidate for candidate in heap if candidate[2] is not None]
            heapify(queue.heap)
        if not tracker.state.is_lru:
            queue.young.append(new)
            if len(queue.young) > 64 + 2 * queue.count:
                queue.young = [candidate for candidate in queue.young if candidate[2] is not None]
            if queue.floor is None and self._version == tracker.state.version:
                self._add_floor(cell, queue)

    def withdraw(self, node: Node) -> None:
        candidate = self._candidates.pop(node, None)
        if candidate is None:
            return
        candidate[2] = None
        queue = self._queues[candidate[3]]
        queue.count -= 1
        if not queue.count:
            queue.heap.clear()
            queue.young.clear()

    def victim(self) -> Node | None:
        tracker = self.tracker
        if self._version != tracker.state.version:
            self._rebuild()
        now, timers = tracker.state.now, self._timers
        while timers and timers[0][0] <= now:
            cell = heappop(timers)[1]
            self._queues[cell].timer = math.inf
            self._dirty.add(cell)
        if self._dirty:
            for cell in self._dirty:
                self._evaluate(cell)
            self._dirty.clear()
        # Remove unneeded entries when they may be about half of a heap.
        if max(len(self._by_value), len(timers)) > 64 + 4 * len(self._queues) + 2 * len(self._candidates):
            self._tidy()
        heap, queues = self._by_value, self._queues
        while heap:
            item = heap[0]
            candidate, cell = item[3], item[5]
            if candidate is None:
                self._replace_floor(item)
                continue
            if cell == _SINGLE:
                if candidate[2] is None:
                    heappop(heap)
                    self._add_floor(candidate[3], queues[candidate[3]])
                    continue
                if item[4] <= now:
                    heapreplace(heap, self._item(candidate, _SINGLE))
                    continue
            else:
                queue = queues[cell]
                if queue.item is not item:
                    heappop(heap)
                    continue
                if candidate[2] is None:
                    self._replace_oldest(queue)
                    continue
            tracker.state.lowest = item[0]
            node: Node = candidate[2]
            return node
        return None

    def _item(self, candidate: _Candidate, cell: int) -> _Item:
        """Return an entry for the heap of values.

        `cell` is the class if the candidate is the oldest of the class, and _SINGLE for the youngest candidate.
        """
        tracker, since = self.tracker, candidate[4]
        if tracker.state.is_lru:
            return 0.0, candidate[0], candidate[1], candidate, math.inf, cell
        bucket = bisect_right(LIMITS, tracker.state.now - since)
        value = tracker.table.values[candidate[3]][bucket]
        return value, candidate[0], candidate[1], candidate, since + ENDS[bucket], cell

    def _replace_oldest(self, queue: ClassQueue) -> None:
        """Remove the lowest entry, whose candidate was withdrawn. Add an entry for the now oldest candidate, if any."""
        oldest = _oldest(queue)
        if oldest is None:
            queue.item = None
            heappop(self._by_value)
            return
        queue.item = item = self._item(oldest, oldest[3])
        heapreplace(self._by_value, item)
        if item[4] < queue.timer:
            self._set_timer(oldest[3], queue, item[4])

    def _add_floor(self, cell: int, queue: ClassQueue) -> None:
        """If the values of a class rise with age, add the common entry of its young candidates."""
        if queue.floor is None and queue.young:
            floor = self.tracker.floor(cell)
            if floor == math.inf:
                queue.young.clear()
                return
            self._next += 1
            queue.floor = (floor, 0, self._next, None, math.inf, cell)
            heappush(self._by_value, queue.floor)

    def _replace_floor(self, item: _Item) -> None:
        """Replace the lowest entry, which is the common entry of the young candidates of a class.

        The new entry has the value of the youngest candidate. There is no new entry if the old one is outdated, if the
        class has no young candidates left, or if the value of the youngest candidate no longer rises with age.
        """
        heappop(self._by_value)
        queue = self._queues[item[5]]
        if queue.floor is not item:
            return
        queue.floor, young = None, queue.young
        while young and young[-1][2] is None:
            young.pop()
        if not young:
            return
        if self.tracker.state.now - young[-1][4] >= self.tracker.table.rises_until[item[5]]:
            young.clear()  # no candidate is young, so the oldest candidate of the class has the lowest value
        else:
            heappush(self._by_value, self._item(young[-1], _SINGLE))

    def _evaluate(self, cell: int) -> None:
        """Add an entry for the oldest candidate of a class, unless the candidate has an entry with the same value."""
        queue = self._queues[cell]
        oldest = _oldest(queue)
        if oldest is None:
            return
        item, old = self._item(oldest, cell), queue.item
        if old is None or old[3] is not oldest or old[0] != item[0]:
            queue.item = item
            heappush(self._by_value, item)
        if item[4] < queue.timer:
            self._set_timer(cell, queue, item[4])

    def _set_timer(self, cell: int, queue: ClassQueue, time: float) -> None:
        queue.timer = time
        heappush(self._timers, (time, cell))

    def _tidy(self) -> None:
        """Drop entries that `victim` does not need.

        Of the entries with _SINGLE, keep the lowest of each candidate. All withdrawn candidates of a class count as one
        candidate: when `victim` removes their entry, it adds the common entry of the young candidates again.
        """
        queues = self._queues
        entries = [item for queue in queues.values() for item in (queue.item, queue.floor) if item is not None]
        singles = sorted((item for item in self._by_value if item[5] == _SINGLE), reverse=True)
        lowest = {(each[3], each[2]): item for item in singles if (each := item[3]) is not None}
        self._by_value = [*entries, *lowest.values()]
        heapify(self._by_value)
        self._timers = [(queue.timer, cell) for cell, queue in queues.items() if queue.timer < math.inf]
        heapify(self._timers)

    def _rebuild(self) -> None:
        """Discard all entries, because the values have changed. `victim` then evaluates the classes again."""
        self._version = self.tracker.state.version
        self._timers, self._by_value = [], []
        for cell, queue in self._queues.items():
            queue.item, queue.floor, queue.timer = None, None, math.inf
            if queue.count:
                self._dirty.add(cell)
                queue.young = [candidate for candidate in sorted(queue.heap) if candidate[2] is not None]
                self._add_floor(cell, queue)


class NativeLearned:
    """The class Learned in native code (native_policy.h), which chooses the same victims."""

    name = "Learned"

    def __init__(self, tracker: ReuseTracker, code: IndexNative) -> None:
        self.tracker = tracker
        self.offer, self.withdraw, self.victim, self._contains, self._sizes = code.policy(tracker, tracker.state)

    def __contains__(self, node: Node) -> bool:
        return bool(self._contains(node))

    def sizes(self) -> list[int]:
        """Return four lengths: longest queue, longest list of young candidates, heap of values, heap of timers."""
        sizes: list[int] = np.frombuffer(self._sizes(), np.int64).tolist()
        return sizes


def learned(tracker: ReuseTracker) -> Learned | NativeLearned:
    """Return a new policy. Policies that share a tracker learn from each other."""
    return Learned(tracker) if tracker.code is None else NativeLearned(tracker, tracker.code)


def _oldest(queue: ClassQueue) -> _Candidate | None:
    """Return the oldest candidate of a class. Drop withdrawn candidates that come before it."""
    heap = queue.heap
    while heap and heap[0][2] is None:
        heappop(heap)
    return heap[0] if heap else None
