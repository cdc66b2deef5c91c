"""GhostCache: what the hit rate would be with another capacity or policy, while the cache runs.

Spatial sampling: of every LOOK_TOKENS tokens of a request one block is looked at, and it is in the sample iff a hash
of its number and its first token or two falls below the rate. So every use of a sampled block is seen, and a small
cache of them behaves like a large one of all. Each capacity and policy asked about is such a small cache, of 64-bit
marks. One of them shadows the real cache, whose hit rate is known: an estimate is the real rate plus the difference of
the two shadows, in which what is particular to the sample cancels.
"""

from __future__ import annotations

import bisect
import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.index.chain import Chain
from kvtier.index.tokens import TOKEN_BYTES

# Looking at few blocks of a request, and playing many requests at once, keeps the cost at 6 us a request for any block
# size, where the index takes 75 (x86-64, Python 3.11, 2026-11-15).
LOOK_TOKENS = 8192
_BATCH = 256
_PARTED = 640 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """A hit rate over full blocks; the truth is within `error` (two standard errors) in about 19 of 20 cases."""

    policy: str
    capacity: int
    hit_rate: float
    error: float


class Shadow(Protocol):
    """Caches of marks, of one policy and several sizes."""

    def access(self, mark: int) -> list[bool]:
        """Use a block; for each size, whether it was there."""


class GhostCache:
    """Fed by the tree with each request it ran; asked for a curve whenever someone looks.

    `policy` and `capacity` are those of the real cache.
    """

    def __init__(
        self,
        block_tokens: int,
        capacity: int,
        policy: str = "lru",
        *,
        capacities: Sequence[int] = (),
        policies: Sequence[str] = (),
        rate: float = 1 / 8,
        seed: int = 0,
    ) -> None:
        if not 0 < rate <= 1:
            raise RangeError(f"the sampling rate must be in (0, 1], got {rate}")
        unknown = {policy, *policies} - set(SHADOWS)
        if unknown:
            raise ArgumentError(f"no shadow of {', '.join(sorted(unknown))}; there are {', '.join(sorted(SHADOWS))}")
        self.stride = max(1, LOOK_TOKENS // block_tokens)
        self.rate = rate
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._look_bytes = min(8, self._block_bytes)
        self._real = policy, capacity
        self._waiting: list[list[bytes]] = []
        self._num_blocks = self._num_hits = self._num_looked = 0
        self._factor = int(np.random.default_rng(seed).integers(2**32, 2**63)) | 1
        sizes = tuple(dict.fromkeys((capacity, *capacities)))
        self._keys = {name: [(name, size) for size in sizes] for name in dict.fromkeys((policy, *policies))}
        self._shadows = {
            name: SHADOWS[name]([max(1, round(size * rate / self.stride)) for size in sizes]) for name in self._keys
        }
        self._ahead = {key: _Lead() for keys in self._keys.values() for key in keys}

    def saw(self, chain: Chain, num_matched: int) -> None:
        """A request with this chain was run, and so many of its blocks were found."""
        self._num_hits += num_matched
        self._num_blocks += chain.num_blocks
        # Which block of every stride is looked at is up to tokens where conversations have parted from the system
        # prompt: equal for all turns of one, and over all of them every place is looked at alike.
        labels, block, size = chain.labels, self._block_bytes, self._look_bytes
        offset = zlib.crc32(labels[_PARTED : _PARTED + 16]) % self.stride
        places = range(offset * block, len(labels) - block + 1, self.stride * block)
        self._waiting.append([labels[at : at + size] for at in places])
        if len(self._waiting) >= _BATCH:
            self._look()

    def curve(self, policy: str | None = None) -> list[Estimate]:
        """The hit rate at each capacity asked about, for a policy; the real cache's own unless told."""
        self._look()
        return [self._estimate(key) for key in self._keys.get(policy or self._real[0], ())]

    def _estimate(self, key: tuple[str, int]) -> Estimate:
        sampled = self._num_looked * self.rate
        if not sampled:
            return Estimate(*key, 0.0, 1.0)
        lead = self._ahead[key]
        hit_rate = self._num_hits / self._num_blocks + lead.total / sampled
        error = 0.0 if key == self._real else 2 * math.sqrt(max(lead.squares, 1)) / sampled
        return Estimate(*key, min(1.0, max(0.0, hit_rate)), min(1.0, error))

    def _look(self) -> None:
        """Play the sampled blocks of the waiting requests to every shadow, a request's last block first."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        lengths = [len(looked) for looked in waiting]
        owners = np.repeat(np.arange(len(waiting)), lengths)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        looked = b"".join(map(b"".join, waiting))
        marks = np.frombuffer(looked, f"<u{self._look_bytes}").astype(np.uint64)
        marks = (marks + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(self._factor)
        marks ^= marks >> np.uint64(29)
        marks *= np.uint64(0xBF58476D1CE4E5B9)
        marks ^= marks >> np.uint64(32)
        self._num_looked += len(marks)
        sampled = np.flatnonzero((marks >> np.uint64(32)) < int(self.rate * 2**32))
        # the tail of a path ages before its head: within a request, uses go from the last block to the first
        for mark in marks[sampled[np.lexsort((-sampled, owners[sampled]))]].tolist():
            hits = {name: shadow.access(mark) for name, shadow in self._shadows.items()}
            was_hit = hits[self._real[0]][0]
            for name, found in hits.items():
                if (not was_hit) in found:
                    for key, hit in zip(self._keys[name], found, strict=True):
                        if hit is not was_hit:
                            self._ahead[key].add(mark, -1 if was_hit else 1)


class _Lead:
    """By how many hits one shadow leads another, and the sum of squares of that by block, which gives its error.

    Blocks are what was sampled, so blocks are what is independent: one used a hundred times is one observation.
    """

    __slots__ = ("_by_mark", "squares", "total")

    def __init__(self) -> None:
        self._by_mark: dict[int, int] = {}
        self.total = self.squares = 0

    def add(self, mark: int, one: int) -> None:
        was = self._by_mark.get(mark, 0)
        self._by_mark[mark] = was + one
        self.total += one
        self.squares += 2 * was * one + 1


class _LRU:
    """All sizes at once: a block is in every cache larger than the number of others used since its last use.

    `_times` has the time of each block's last use, ascending, so that this number is what lies behind it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._time = 0
        self._last: OrderedDict[int, int] = OrderedDict()
        self._times: list[int] = []

    def access(self, mark: int) -> list[bool]:
        self._time += 1
        times, last = self._times, self._last.pop(mark, None)
        behind = len(times)
        if last is not None:
            place = bisect.bisect_left(times, last)
            behind = len(times) - place - 1
            del times[place]
        elif behind > max(self._sizes):
            self._last.popitem(last=False)
            del times[0]
        times.append(self._time)
        self._last[mark] = self._time
        return [last is not None and behind < size for size in self._sizes]


class _Each:
    """One cache for each size."""

    def __init__(self, new: Callable[[int], _OneSize], sizes: Sequence[int]) -> None:
        self._caches = [new(size) for size in sizes]

    def access(self, mark: int) -> list[bool]:
        return [cache.access(mark) for cache in self._caches]


class _OneSize(Protocol):
    def access(self, mark: int) -> bool: ...


class _FIFO:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def access(self, mark: int) -> bool:
        if mark in self._held:
            return True
        self._held[mark] = None
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return False


class _S3FIFO:
    """As policy.S3FIFO, over single blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def access(self, mark: int) -> bool:
        if mark in self._uses:
            self._uses[mark] = min(3, self._uses[mark] + 1)
            return True
        while len(self._uses) >= self._capacity:
            self._evict()
        (self._main if self._ghost.pop(mark, 0) is None else self._small).append(mark)
        self._uses[mark] = 0
        return False

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
    "lru": _LRU,
    "fifo": lambda sizes: _Each(_FIFO, sizes),
    "s3fifo": lambda sizes: _Each(_S3FIFO, sizes),
}
