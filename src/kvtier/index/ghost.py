"""GhostCache: what the hit rate would be with another capacity or policy, while the cache runs.

Spatial sampling: of every LOOK_TOKENS tokens of a request one block is looked at, and it is in the sample iff a hash
of its number and its first token or two falls below the rate. So every use of a sampled block is seen, and a small
cache of them behaves like a large one of all. Each capacity and policy asked about is such a small cache, of 64-bit
marks. One of them shadows the real cache, whose hit rate is known: an estimate is the real rate plus the difference of
the two shadows, in which what is particular to the sample cancels.
"""

from __future__ import annotations

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

# Looking at few blocks, and at many requests together, keeps the cost low whatever the block size: 5 us a request where
# the index takes 80 (x86-64, Python 3.11, 2026-11-15). Half as many looks cost half, and err 1.4 times as much.
LOOK_TOKENS = 2048
_BATCH = 64
_PARTED = 640 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """A hit rate over full blocks; the truth is within `error` (two standard errors) in about 19 of 20 cases."""

    policy: str
    capacity: int
    hit_rate: float
    error: float


class Shadow(Protocol):
    """A cache of marks."""

    def access(self, mark: int) -> bool:
        """Use a block; whether it was there."""


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
        rate: float = 1 / 16,
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
        self._real = (policy, capacity)
        self._waiting: list[bytes] = []
        self._num_blocks = self._num_hits = self._num_looked = 0
        self._factor = int(np.random.default_rng(seed).integers(2**32, 2**63)) | 1
        asked = [(name, size) for name in (policies or (policy,)) for size in (capacities or (capacity,))]
        self._shadows = {
            key: SHADOWS[key[0]](max(1, round(key[1] * rate / self.stride)))
            for key in dict.fromkeys((self._real, *asked))
        }
        self._ahead = {key: _Lead() for key in self._shadows}

    def saw(self, chain: Chain, num_matched: int) -> None:
        """A request with this chain was run, and so many of its blocks were found."""
        self._num_hits += num_matched
        self._num_blocks += chain.num_blocks
        self._waiting.append(chain.labels)
        if len(self._waiting) >= _BATCH:
            self._look()

    def curve(self, policy: str | None = None) -> list[Estimate]:
        """The hit rate at each capacity asked about, for a policy; the real cache's own unless told."""
        self._look()
        return [self._estimate(key) for key in self._shadows if key[0] == (policy or self._real[0])]

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
        block, size, stride = self._block_bytes, self._look_bytes, self.stride
        looked, lengths = [], []
        for labels in waiting:
            # Which block of every stride is looked at is up to a token where conversations have parted from the system
            # prompt: equal for all turns of one, and over all of them every place is looked at alike.
            offset = zlib.crc32(labels[_PARTED : _PARTED + 16]) % stride
            places = range(offset * block, len(labels) - block + 1, stride * block)
            looked += [labels[at : at + size] for at in places]
            lengths.append(len(places))
        owners = np.repeat(np.arange(len(waiting)), lengths)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        marks = np.frombuffer(b"".join(looked), f"<u{size}").astype(np.uint64)
        marks = (marks + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(self._factor)
        marks ^= marks >> np.uint64(29)
        marks *= np.uint64(0xBF58476D1CE4E5B9)
        marks ^= marks >> np.uint64(32)
        self._num_looked += len(marks)
        sampled = np.flatnonzero((marks >> np.uint64(32)) < int(self.rate * 2**32))
        # the tail of a path ages before its head: within a request, uses go from the last block to the first
        for mark in marks[sampled[np.lexsort((-sampled, owners[sampled]))]].tolist():
            was_hit = self._shadows[self._real].access(mark)
            for key, shadow in self._shadows.items():
                if key != self._real and shadow.access(mark) != was_hit:
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
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def access(self, mark: int) -> bool:
        if mark in self._held:
            self._held.move_to_end(mark)
            return True
        self._held[mark] = None
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return False


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


SHADOWS: dict[str, Callable[[int], Shadow]] = {"lru": _LRU, "fifo": _FIFO, "s3fifo": _S3FIFO}
