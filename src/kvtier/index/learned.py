"""Learned: evicts the block with the lowest expected number of hits per block-second (see kvtier.index.reuse).

Candidates are queued by class, oldest first. Within a class, values usually fall with age, so only the oldest candidate
of each class can be the victim. In classes whose values rise with age (a loop over more blocks than the cache holds),
every candidate is considered.

    class 0   [ a d f ]  oldest a: value .2 until t = 31  ─┐
    class 1   [ b c ]    oldest b: value .1 until t = 12  ─┼─> heap of values ─> victim b
    class 2   [ e ]      oldest e: value .3 until t = 15  ─┘   timers: b at 12, e at 15, a at 31

A class is evaluated again when its oldest candidate changes, or when the age of this candidate reaches the next bucket.
A victim takes O(log n) amortised, because a candidate passes at most 28 buckets.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush, heapreplace

from kvtier.index.node import Node
from kvtier.index.tracker import ReuseTracker

_YOUNG = -1  # stamp of an entry for a single candidate of a class whose values rise


class ClassQueue:
    """Candidates of one class in order of their last use. Removed candidates stay in the heap until they come first."""

    __slots__ = ("count", "heap", "oldest", "stamp", "used")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Node]] = []
        self.count = 0
        self.oldest: Node | None = None
        self.used = 0
        """Last use of `oldest`, as a logical time."""
        self.stamp = 0
        """Increased whenever the entry of this class in the heap of values becomes invalid."""


class Learned:
    """Evicts the lowest value first. The order is LRU until the tracker has enough observations."""

    name = "Learned"

    def __init__(self, tracker: ReuseTracker | None = None) -> None:
        self.tracker = ReuseTracker() if tracker is None else tracker
        self._entries: dict[Node, tuple[int, int, float]] = {}
        """Candidate -> number of its entry, class, and time of its last use."""
        self._queues: dict[int, ClassQueue] = {}
        self._next = 0
        self._version = -1
        self._dirty: set[int] = set()
        """Classes whose oldest candidate may have changed."""
        # (value, last use, number, class, stamp, candidate, time at which the value changes)
        self._by_value: list[tuple[float, int, int, int, int, Node, float]] = []
        self._timers: list[tuple[float, int, int]] = []

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def offer(self, node: Node) -> None:
        if node in self._entries:
            return
        tracker, usage = self.tracker, node.usage
        touch = usage.touch
        cell, since = (0, tracker.now) if touch is None else (touch[1], touch[2])
        queue = self._queues.get(cell)
        if queue is None:
            queue = self._queues[cell] = ClassQueue()
        self._next += 1
        used, number = usage.used, self._next
        self._entries[node] = (number, cell, since)
        heappush(queue.heap, (used, number, node))
        queue.count += 1
        if queue.count == 1 or used < queue.used:
            self._dirty.add(cell)
        elif len(queue.heap) > 64 + 2 * queue.count:
            self._tidy_queue(queue)
        if self._version == tracker.version and self._rises(cell):
            value, until = tracker.value(cell, since)
            heappush(self._by_value, (value, used, number, cell, _YOUNG, node, until))

    def withdraw(self, node: Node) -> None:
        entry = self._entries.pop(node, None)
        if entry is None:
            return
        cell = entry[1]
        queue = self._queues[cell]
        queue.count -= 1
        if not queue.count:
            queue.heap.clear()
            queue.stamp += 1
            queue.oldest = None
            self._dirty.discard(cell)
        elif node is queue.oldest:
            queue.stamp += 1
            self._dirty.add(cell)

    def victim(self) -> Node | None:
        tracker = self.tracker
        if self._version != tracker.version:
            self._rebuild()
        now, timers, queues = tracker.now, self._timers, self._queues
        while timers and timers[0][0] <= now:
            _, cell, stamp = heappop(timers)
            if queues[cell].stamp == stamp:
                self._dirty.add(cell)
        if self._dirty:
            for cell in self._dirty:
                self._evaluate(cell)
            self._dirty.clear()
        heap, entries = self._by_value, self._entries
        while heap:
            _, used, number, cell, stamp, node, until = heap[0]
            if stamp != _YOUNG:
                if queues[cell].stamp == stamp:
                    return node
            else:
                entry = entries.get(node)
                if entry is not None and entry[0] == number:
                    if until > now:
                        return node
                    value, until = tracker.value(cell, entry[2])
                    heapreplace(heap, (value, used, number, cell, _YOUNG, node, until))
                    continue
            heappop(heap)
        return None

    def _rises(self, cell: int) -> bool:
        tracker = self.tracker
        return not tracker.is_lru and cell < len(tracker.table.rises) and tracker.table.rises[cell]

    def _evaluate(self, cell: int) -> None:
        """Enter the value of the oldest candidate of a class."""
        queue, entries = self._queues[cell], self._entries
        while True:
            used, number, node = queue.heap[0]
            entry = entries.get(node)
            if entry is not None and entry[0] == number:
                break
            heappop(queue.heap)
        queue.oldest, queue.used = node, used
        queue.stamp += 1
        value, until = self.tracker.value(cell, entry[2])
        heappush(self._by_value, (value, used, number, cell, queue.stamp, node, until))
        if until < math.inf:
            heappush(self._timers, (until, cell, queue.stamp))
        # Limit the invalid entries to about half of the heaps.
        if max(len(self._by_value), len(self._timers)) > 64 + 4 * len(self._queues) + 2 * len(entries):
            self._tidy()

    def _tidy_queue(self, queue: ClassQueue) -> None:
        queue.heap = [item for item in queue.heap if self._entries.get(item[2], (0,))[0] == item[1]]
        heapify(queue.heap)

    def _tidy(self) -> None:
        queues, entries = self._queues, self._entries
        self._by_value = [
            item
            for item in self._by_value
            if (queues[item[3]].stamp == item[4] if item[4] != _YOUNG else entries.get(item[5], (0,))[0] == item[2])
        ]
        heapify(self._by_value)
        self._timers = [item for item in self._timers if queues[item[1]].stamp == item[2]]
        heapify(self._timers)

    def _rebuild(self) -> None:
        """Evaluate everything again, because the values have changed."""
        tracker, entries = self.tracker, self._entries
        self._version = tracker.version
        self._timers, self._by_value = [], []
        for cell, queue in self._queues.items():
            queue.stamp += 1
            if not queue.count:
                continue
            self._dirty.add(cell)
            if self._rises(cell):
                for used, number, node in queue.heap:
                    entry = entries.get(node)
                    if entry is not None and entry[0] == number:
                        value, until = tracker.value(cell, entry[2])
                        self._by_value.append((value, used, number, cell, _YOUNG, node, until))
        heapify(self._by_value)
