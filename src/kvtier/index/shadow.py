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

    The tail of a path ages before its head. Eviction takes leaves first, so FIFO ages a path by its newest block: it
    differs from LRU only where a request brings nothing new.

        newest   | top: the newest path, its head first | times: of the others' last use, descending |   oldest

    What a request shares with the newest path, such as a system prompt, stays where it is.
    """

    def __init__(self, sizes: Sequence[int], *, fifo: bool = False) -> None:
        self._sizes = np.array(sizes)
        self._most = max(sizes)
        self._fifo = fifo
        self.ignores_repeats = not fifo
        self._clock = 0
        self._top: list[int] = []
        self._last: OrderedDict[int, int] = OrderedDict()
        self._times: list[int] = []

    def play(self, requests: Sequence[list[int]], grew: Sequence[bool]) -> Hits:
        """See Shadow."""
        top, last, times, clock, most = self._top, self._last, self._times, self._clock, self._most
        behind: list[int] = []
        for marks, has_grown in zip(requests, grew, strict=True):
            shared = 0
            for mark, above in zip(marks, top, strict=False):
                if mark != above:
                    break
                behind.append(shared)
                shared += 1
            if shared == len(marks):
                continue
            if self._fifo and not has_grown:
                behind += [self._behind(mark, top) for mark in marks[shared:]]
                continue
            for mark in reversed(top[shared:]):
                clock += 1
                times.append(clock)
                last[mark] = clock
            places = []
            for mark in marks[shared:] if shared else marks:
                used = last.pop(mark, None)
                if used is None:
                    behind.append(most)
                else:
                    places.append(bisect.bisect_left(times, used))
                    behind.append(shared + len(times) - 1 - places[-1])
            for place in places if len(places) < 2 else sorted(places, reverse=True):
                del times[place]
            top = marks
            while times and len(times) + len(top) > most:
                last.popitem(last=False)
                del times[0]
        self._top, self._clock = top, clock
        return np.array(behind)[:, None] < self._sizes

    def _behind(self, mark: int, top: list[int]) -> int:
        """How many others were used after it."""
        used = self._last.get(mark)
        if used is not None:
            return len(top) + len(self._times) - 1 - bisect.bisect_left(self._times, used)
        return top.index(mark) if mark in top else self._most


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
