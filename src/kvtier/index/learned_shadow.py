"""LearnedShadow: simulates the learned policy (see learned.py) at several cache sizes.

The simulated caches hold marks instead of blocks. A mark is a hash of a prompt up to a position (see ghost.py). The
value of a mark depends on its class and its age, but not on the size of the cache, so one ReuseTable serves all sizes.
The class of a mark consists only of the features `uses` and `new` (see labels.py), because the others are not recorded.
In a real cache, `uses` has most of the effect.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from kvtier.index.labels import Cells, new_label
from kvtier.index.native import IndexNative
from kvtier.index.reuse import F64, LIMITS, NATIVE_ENDS, NATIVE_USES, ReuseTable

# The ReuseTable is fitted after 32, 64, 128, .. requests with marks, and later after every 1024 requests.
_FIRST_FIT, _LAST_FIT = 32, 1024
_MEMORY = 8  # marks that are remembered, as a multiple of the largest cache
_MAX_USES = 4


class Use(NamedTuple):
    """Time of a request, and number of tokens that it added to the real cache."""

    time: float
    new_tokens: int


class Mark(NamedTuple):
    """Last use of a mark: time, place in the order of all uses, number of the class, number of earlier uses, weight."""

    time: float
    place: int
    cell: int
    uses: int
    weight: float


class LearnedShadow:
    """Simulated caches with the learned policy, one for each size."""

    ignores_repeats = True
    """True if GhostCache may skip a request whose only mark is the first mark of the previous request. The mark would
    almost always be a hit at every size."""

    def __init__(self, sizes: Sequence[int], code: IndexNative | None = None) -> None:
        self._cells = Cells()
        self._table = ReuseTable(self._cells, code)
        self._caches = [MarkCache(size) for size in sizes]
        self._max_marks = _MEMORY * max(sizes) + 64
        self._native: tuple[Callable[..., Any], ...] = ()
        if code is not None:
            self._native = code.shadow(np.array(sizes, np.int64), self._max_marks, _FIRST_FIT, NATIVE_ENDS, NATIVE_USES)
        self._marks: OrderedDict[int, Mark] = OrderedDict()
        """Recent mark -> its last use, oldest first. Marks that no cache holds are included."""
        self._ended: list[tuple[int, float, float, bool]] = []
        """(class, age, weight, True if used again) of each mark that was used again or forgotten since the last fit."""
        self._num_requests = 0
        self._until_fit = self._place = _FIRST_FIT  # places may start at any number >= 0

    def play(self, requests: Sequence[list[int]], uses: Sequence[Use]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Use the marks of all requests in order. Return the hits: a row for each mark, a column for each size."""
        if self._native:
            return self._play_native(requests, uses)
        hits: list[list[bool]] = []
        for marks, use in zip(requests, uses, strict=True):
            found = [cache.num_leading(marks) for cache in self._caches]
            hits += [[number < count for count in found] for number in range(len(marks))]
            self._use(marks, use)
            for cache in self._caches:
                cache.use(marks, self._marks, self._table, use.time)
            self._count(1, use.time)
        return np.array(hits, np.bool_)

    def _play_native(self, requests: Sequence[list[int]], uses: Sequence[Use]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        stops = np.cumsum([len(marks) for marks in requests])
        marks = np.array([mark for marks in requests for mark in marks], np.uint64)
        times = np.array([use.time for use in uses], np.float64)
        labels = np.array([new_label(use.new_tokens) for use in uses], np.int64)
        hits = np.empty((len(marks), len(self._caches)), np.bool_)
        inputs = [array.ctypes.data for array in (stops, marks, times, labels)]
        played = 0
        while played < len(requests):
            values = self._table.all_values.ctypes.data if self._table.is_fitted else 0
            before = played
            played = self._native[0](before, len(requests), *inputs, values, hits.ctypes.data, self._until_fit)
            self._count(played - before, uses[played - 1].time)
        return hits

    def _count(self, num_requests: int, now: float) -> None:
        self._num_requests += num_requests
        self._until_fit -= num_requests
        if not self._until_fit:
            self._until_fit = min(self._num_requests, _LAST_FIT)
            self._fit(now)

    def num_held(self) -> list[int]:
        """Return the number of marks in each cache."""
        if self._native:
            held: list[int] = np.frombuffer(self._native[2](), np.int64).tolist()
            return held
        return [cache.num_held for cache in self._caches]

    def _use(self, marks: list[int], use: Use) -> None:
        """Record the use of a request's marks. The last mark gets the earliest place, so that it is evicted first."""
        labels = new_label(use.new_tokens), 0, 0, 0, 0, 0
        self._place += len(marks)
        weight = len(marks) ** -0.5  # together, n marks weigh sqrt(n), as in TouchLog
        for depth in range(len(marks) - 1, -1, -1):
            mark = marks[depth]
            old = self._marks.pop(mark, None)
            num_uses = 0
            if old is not None:
                self._ended.append((old.cell, max(0.0, use.time - old.time), old.weight, True))
                num_uses = min(old.uses + 1, _MAX_USES)
            cell = self._cells.number(num_uses, labels)
            self._marks[mark] = Mark(use.time, self._place - depth, cell, num_uses, weight)
        while len(self._marks) > max(self._max_marks, len(marks)):
            _, old = self._marks.popitem(last=False)
            self._ended.append((old.cell, max(0.0, use.time - old.time), old.weight, False))

    def _take(self, now: float) -> list[F64]:
        """Return three arrays of observations (class, age, weight): ended by a use, ended by forgetting, not ended."""
        if self._native:
            return [np.frombuffer(part).reshape(-1, 3) for part in self._native[1](now)]
        ended, self._ended = self._ended, []
        parts = [[each[:3] for each in ended if each[3] == wanted] for wanted in (True, False)]
        still_open = [(mark.cell, max(0.0, now - mark.time), mark.weight) for mark in self._marks.values()]
        return [np.array(part, np.float64).reshape(-1, 3) for part in (*parts, still_open)]

    def _fit(self, now: float) -> None:
        used, forgotten, still_open = (
            (part[:, 0].astype(np.int64), part[:, 1], part[:, 2]) for part in self._take(now)
        )
        self._table.add(*used, is_use=True)
        self._table.add(*forgotten, is_use=False)
        self._table.fit(*still_open)
        self._table.decay(self._until_fit)


class MarkCache:
    """A cache of at most `size` marks. The marks of each class form a heap, which may also contain evicted marks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[int, int] = {}
        """Mark -> place of its last use."""
        self._queues: dict[int, list[tuple[int, float, int]]] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def num_leading(self, marks: list[int]) -> int:
        """Return the number of leading marks that the cache holds."""
        held = self._held
        for number, mark in enumerate(marks):
            if mark not in held:
                return number
        return len(marks)

    def use(self, marks: list[int], states: OrderedDict[int, Mark], table: ReuseTable, now: float) -> None:
        """Add marks to the cache, or update their places. If the cache is too full, evict the marks of lowest value."""
        for mark in marks:
            state = states[mark]
            self._held[mark] = state.place
            queue = self._queues.get(state.cell)
            if queue is None:
                queue = self._queues[state.cell] = []
                table.row(state.cell)
            heappush(queue, (state.place, state.time, mark))
            if len(queue) > 64 + 2 * self._size:
                queue[:] = [entry for entry in queue if self._held.get(entry[2]) == entry[0]]
                heapify(queue)
        while len(self._held) > self._size:
            self._evict(table, now)

    def _evict(self, table: ReuseTable, now: float) -> None:
        lowest: tuple[float, int] | None = None
        held, values, is_fitted, victim = self._held, table.values, table.is_fitted, -1
        for cell, queue in self._queues.items():
            while queue and held.get(queue[0][2]) != queue[0][0]:
                heappop(queue)
            if queue:
                place, time, _ = queue[0]
                value = (values[cell][bisect_right(LIMITS, now - time)] if is_fitted else 0.0), place
                if lowest is None or value < lowest:
                    lowest, victim = value, cell
        del held[heappop(self._queues[victim])[2]]
