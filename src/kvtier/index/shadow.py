"""Shadows: small caches of marks, one for each policy, that tell what every capacity would have hit."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Hits = np.ndarray[Any, np.dtype[np.bool_]]


class Shadow(Protocol):
    """Caches of one policy and several sizes."""

    ignores_repeats: bool
    """Whether a request for the newest mark alone changes nothing, and is a hit in every size."""

    def play(self, requests: Sequence[list[int]], grew: Sequence[bool]) -> Hits:
        """Use the marks of requests, each from its head on: of each and for each size, was it there before its request.

        `grew` says whether a request brought blocks that the real cache did not have.
        """


class Stack:
    """LRU and FIFO, all sizes at once: a mark is in every cache larger than the number of others used after it.

    `_times` has the time of each mark's last use, ascending, so that this number is what lies behind it. The tail of a
    path ages before its head. Eviction takes leaves first, so FIFO ages a path by its newest block: it differs from LRU
    only where a request brings nothing new.
    """

    def __init__(self, sizes: Sequence[int], *, fifo: bool = False) -> None:
        self._sizes = np.array(sizes)
        self._most = max(sizes)
        self._fifo = fifo
        self.ignores_repeats = not fifo
        self._clock = 0
        self._last: OrderedDict[int, int] = OrderedDict()
        self._times: list[int] = []

    def play(self, requests: Sequence[list[int]], grew: Sequence[bool]) -> Hits:
        """See Shadow."""
        last, times, clock = self._last, self._times, self._clock
        behind: list[int] = []
        before: list[int] = []
        for marks, has_grown in zip(requests, grew, strict=True):
            if self._fifo and not has_grown:
                behind += self._behind(marks)
                continue
            if marks == before:  # those of a prefix that all share: they lie on top, in this order
                behind += range(len(marks))
                continue
            before = marks
            if len(marks) > 1:
                behind += self._behind(marks)
            for mark in reversed(marks):
                used, place = last.pop(mark, None), len(times)
                if used is not None:
                    place = bisect.bisect_left(times, used)
                    del times[place]
                if len(marks) == 1:  # most have one
                    behind.append(self._most if used is None else len(times) - place)
                clock += 1
                times.append(clock)
                last[mark] = clock
            while len(times) > self._most:
                last.popitem(last=False)
                del times[0]
        self._clock = clock
        return np.array(behind)[:, None] < self._sizes

    def _behind(self, marks: list[int]) -> list[int]:
        """How many others were used after each."""
        times, last, top = self._times, self._last, len(self._times) - 1
        return [top - bisect.bisect_left(times, last[mark]) if mark in last else self._most for mark in marks]


class Each:
    """One cache for each size."""

    def __init__(self, new: Callable[[int], S3FIFOMarks], sizes: Sequence[int]) -> None:
        self.ignores_repeats = False  # uses are counted
        self._caches = [new(size) for size in sizes]

    def play(self, requests: Sequence[list[int]], grew: Sequence[bool]) -> Hits:  # noqa: ARG002
        """See Shadow."""
        columns = [[hit for marks in requests for hit in cache.use(marks)] for cache in self._caches]
        return np.array(columns, np.bool_).T


class S3FIFOMarks:
    """As policy.S3FIFO, over single marks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, marks: list[int]) -> list[bool]:
        """Whether each was there; then all of them are, the last one the first to go."""
        uses = self._uses
        found = [mark in uses for mark in marks]
        for mark, hit in zip(reversed(marks), reversed(found), strict=True):
            if hit and mark in uses:
                uses[mark] = min(3, uses[mark] + 1)
                continue
            while len(uses) >= self._capacity:
                self._evict()
            (self._main if self._ghost.pop(mark, 0) is None else self._small).append(mark)
            uses[mark] = 0
        return found

    def _evict(self) -> None:
        if self._small and (len(self._small) * 10 >= self._capacity or not self._main):
            mark = self._small.popleft()
            if self._uses[mark]:
                self._uses[mark] = 0
                self._main.append(mark)
                return
            self._ghost[mark] = None
            if len(self._ghost) > self._capacity:
                self._ghost.popitem(last=False)
        else:
            mark = self._main.popleft()
            if self._uses[mark]:
                self._uses[mark] -= 1
                self._main.append(mark)
                return
        del self._uses[mark]


SHADOWS: dict[str, Callable[[Sequence[int]], Shadow]] = {
    "lru": Stack,
    "fifo": lambda sizes: Stack(sizes, fifo=True),
    "s3fifo": lambda sizes: Each(S3FIFOMarks, sizes),
}
