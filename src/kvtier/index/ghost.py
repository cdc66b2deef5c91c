"""GhostCache: estimates the hit rates that caches with other sizes and policies would have for the same requests.

A prompt has one mark per LOOK_BYTES bytes. A mark is a hash of the prompt up to a position, computed from one byte in
every STEP_BYTES. Prompts with a common prefix therefore have common marks. Only marks below a limit are sampled: of
each mark, either all uses or no uses are recorded.

A shadow is a small simulated cache of sampled marks. It behaves like a large cache of all blocks. There is one shadow
for each capacity and policy. One of them simulates the real cache. The estimated hit rate of a capacity and policy is:

    estimate = measured hit rate of the real cache + hit rate of the shadow - hit rate of the real cache's shadow

The subtraction cancels the sampling error that the two shadows share.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError
from kvtier.index.chain import TOKEN_BYTES, Chain
from kvtier.index.learned_shadow import LearnedShadow, Use
from kvtier.index.native import native

Hits = np.ndarray[Any, np.dtype[np.bool_]]


class Stack:
    """Shadows for LRU or FIFO, of all sizes at once. The size of a shadow is a number of marks.

    A shadow of size n contains the n newest marks. With LRU, each request moves its marks to the newest end. With FIFO,
    only requests that added a block to the real cache move their marks. After a move, the first mark of the request is
    the newest, because leaves are evicted first.

        newest   | top: marks of the latest move, in order | times: last move of all other marks |   oldest

    If a request begins with the same marks as `top`, for example a system prompt, these marks need no update.
    """

    def __init__(self, sizes: Sequence[int], *, fifo: bool = False) -> None:
        self._sizes = np.array(sizes)
        self._most = max(sizes)
        self._fifo = fifo
        self.ignores_repeats = not fifo
        """True if a request with only the newest mark changes nothing. Such a request is a hit for every size."""
        self._clock = 0
        self._top: list[int] = []
        self._last: OrderedDict[int, int] = OrderedDict()
        self._times: list[int] = []

    def play(self, requests: Sequence[list[int]], uses: Sequence[Use]) -> Hits:
        """Use the marks of all requests in order. Return the hits: a row for each mark, a column for each size."""
        top, last, times, clock, most = self._top, self._last, self._times, self._clock, self._most
        behind: list[int] = []
        for marks, use in zip(requests, uses, strict=True):
            shared = 0
            for mark, above in zip(marks, top, strict=False):
                if mark != above:
                    break
                behind.append(shared)
                shared += 1
            if shared == len(marks):
                continue
            if self._fifo and not use.new_tokens:
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
        """Count the marks that are newer than this mark. Return `_most` for an unknown mark."""
        used = self._last.get(mark)
        if used is not None:
            return len(top) + len(self._times) - 1 - bisect.bisect_left(self._times, used)
        return top.index(mark) if mark in top else self._most


class S3FIFOMarks:
    """Similar to policies.S3FIFO, but for marks instead of nodes. Remembers up to `capacity` evicted marks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def use(self, marks: list[int]) -> list[bool]:
        """Use marks from last to first, so that leaves are evicted first. Return one bool per mark: True for a hit."""
        uses = self._uses
        hits = [mark in uses for mark in marks]
        for mark, hit in zip(reversed(marks), reversed(hits), strict=True):
            if hit and mark in uses:
                uses[mark] = min(3, uses[mark] + 1)
                continue
            while len(uses) >= self._capacity:
                self._evict()
            (self._main if self._ghost.pop(mark, 0) is None else self._small).append(mark)
            uses[mark] = 0
        return hits

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


class S3FIFOShadow:
    """Shadows for S3-FIFO, with a separate cache for each size."""

    ignores_repeats = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._caches = [S3FIFOMarks(size) for size in sizes]

    def play(self, requests: Sequence[list[int]], uses: Sequence[Use]) -> Hits:  # noqa: ARG002
        columns = [[hit for marks in requests for hit in cache.use(marks)] for cache in self._caches]
        return np.array(columns, np.bool_).T


SHADOWS: dict[str, Callable[[Sequence[int]], Stack | S3FIFOShadow | LearnedShadow]] = {
    "lru": Stack,
    "fifo": lambda sizes: Stack(sizes, fifo=True),
    "s3fifo": S3FIFOShadow,
    "learned": lambda sizes: LearnedShadow(sizes, native().code),
}


# `record` only copies one byte in every STEP_BYTES, called a look. `_play` later processes up to 4096 requests at once.
# Processing each request separately took three to five times as long (measured on 2026-11-15). Four looks form a word,
# but the first word (w0) has three. A mark is a hash of all words up to its position.
#
#   prompt  |look . look . look . look . look . look . look ..
#   words   |       w0         |           w1              |
#           0            LOOK_BYTES / 2            3 LOOK_BYTES / 2
STEP_BYTES = 1021  # odd, so that looks fall on each of the four bytes of a token in turn
LOOK_BYTES = 4 * STEP_BYTES
_ROUND = LOOK_BYTES // 2 - 1  # rounds the number of marks: a mark counts only if its last look is in a full block
_FIELDS = 3  # numbers per request in GhostCache._waiting
_FULL = 4096 * _FIELDS  # length of GhostCache._waiting at which the requests are processed
_GROUPS = 256  # groups of marks; their leads give the variance of an estimate (see `GhostCache.curve`)
_RATE, _MIN_MARKS = 1 / 64, 64  # see `rate` of GhostCache

# Error that remains even if all marks are sampled, because looks have fixed positions in the prompt. Two shadows are
# also simplified: the one of S3-FIFO evicts single marks instead of nodes, the one of "learned" has fewer classes.
MODEL_ERROR = {"lru": 0.01, "fifo": 0.01, "s3fifo": 0.02, "learned": 0.02}

_U64 = np.uint64
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated hit rate: the share of the prompts' full blocks that are found in the cache.

    In about 19 of 20 cases, the true hit rate differs from the estimate by at most `error`. For S3-FIFO, whose shadow
    evicts marks instead of nodes, only 13 of 16 estimates on a generated trace were as accurate.
    """

    policy: str
    capacity: int
    hit_rate: float
    error: float


class GhostCache:
    """Estimates hit rates from the requests that are passed to `record`.

    `policy` and `capacity` describe the real cache. `rate` is the share of marks that are sampled. The default is 1/64,
    or more if the real cache's shadow would otherwise hold fewer than 64 marks. The memory is limited to the looks of
    4096 prompts (see STEP_BYTES), and to a number of marks that is proportional to the capacities.

    `sparse` is a second GhostCache with a lower rate, for policies with slow shadows. `record` also records each
    request in `sparse`.
    """

    def __init__(
        self,
        block_tokens: int,
        capacity: int,
        policy: str = "lru",
        *,
        capacities: Sequence[int] = (),
        policies: Sequence[str] = (),
        rate: float | None = None,
        seed: int = 0,
        sparse: GhostCache | None = None,
    ) -> None:
        num_marks = capacity * block_tokens * TOKEN_BYTES / LOOK_BYTES
        rate = min(1.0, max(_RATE, _MIN_MARKS / num_marks)) if rate is None else rate
        if not 0 < rate <= 1:
            raise RangeError(f"the sampling rate must be in (0, 1], got {rate}")
        unknown = {policy, *policies} - set(SHADOWS)
        if unknown:
            raise ArgumentError(f"no shadow for {', '.join(sorted(unknown))}; known: {', '.join(sorted(SHADOWS))}")
        self.rate = rate
        self._sparse = sparse
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._real = policy
        self._sizes = tuple(dict.fromkeys((capacity, *capacities)))
        self._scaled = [max(1, round(size * self._block_bytes / LOOK_BYTES * rate)) for size in self._sizes]
        self._shadows = {name: SHADOWS[name](self._scaled) for name in dict.fromkeys((policy, *policies))}
        # policy -> hits of its shadow minus hits of the real cache's shadow, by group of marks and by size
        self._leads = {name: np.zeros((_GROUPS, len(self._sizes)), np.int64) for name in self._shadows}
        self._factors = np.random.default_rng(seed).integers(2**62, 2**63, 4, dtype=_U64) | _U64(1)
        self._looks = bytearray()
        self._waiting: list[float] = []  # number of bytes, number of matched blocks, and time of each request
        self._domains: dict[int, tuple[bytes, bytes, dict[int, bytes]]] = {}
        self._num_blocks = self._num_hits = self._num_marks = self._num_unseen = 0

    def record(self, chain: Chain, num_matched: int, now: float = 0.0) -> None:
        """Record a request and its number of matched blocks."""
        labels, waiting = chain.labels, self._waiting
        if chain.salt or chain.adapter or chain.extras:
            self._domains[len(waiting) // _FIELDS] = chain.salt, chain.adapter, chain.extras
        self._looks += labels[::STEP_BYTES]
        waiting.append(len(labels))
        waiting.append(num_matched)
        waiting.append(now)
        if self._sparse is not None:
            self._sparse.record(chain, num_matched, now)
        if len(waiting) >= _FULL:
            self._play()

    def curve(self, policy: str | None = None) -> list[Estimate]:
        """Return the estimated hit rate of a policy at each capacity. The default is the policy of the real cache.

        The lead of a shadow is its number of hits minus that of the real cache's shadow. An estimate is the real hit
        rate, plus the lead divided by the expected number of sampled marks. The error is the sum of: twice the standard
        error, the model error, the error of rounding sizes to marks, and the error of prompts too short for a mark. For
        the real cache itself, the estimate is the measured hit rate, and the error is 0. Before the first mark, all
        estimates are 0, and all errors are 1.

        The standard error has two sources. First, leads vary between marks. This source is measured by the variance of
        the leads of random groups of marks. Second, the share of marks that are sampled deviates from `rate`. This has
        the same effect as a slightly wrong capacity of both shadows, so the deviation is multiplied by the steepness of
        the curve.

        A policy without a shadow is passed to `sparse`. Without `sparse`, the result is empty.
        """
        name = policy or self._real
        if name not in self._shadows:
            return [] if self._sparse is None else self._sparse.curve(name)
        if self._waiting:
            self._play()
        sampled = self._num_marks * self.rate
        if not sampled:
            return [Estimate(name, size, 0.0, 1.0) for size in self._sizes]
        leads = self._leads[name]
        rates = self._num_hits / self._num_blocks + leads.sum(0) / sampled
        spread = np.sqrt(np.maximum(leads.var(0, ddof=1) * _GROUPS, 1.0)) / sampled
        passed = np.maximum(self._scaled, sampled * (1 - rates))
        by_capacity = _steepness(np.log(self._scaled), rates) / np.sqrt(passed)
        # The larger of the two policies' model errors, plus the errors of rounding and of short prompts.
        model = max(MODEL_ERROR[name], MODEL_ERROR[self._real])
        left = model + 0.5 / np.minimum(self._scaled, self._scaled[0]) + self._num_unseen / self._num_blocks
        errors = 2 * np.sqrt(spread**2 + by_capacity**2 + by_capacity[0] ** 2) + left
        if name == self._real:
            errors[0] = 0.0
        return [
            Estimate(name, size, float(np.clip(rate, 0, 1)), min(1.0, float(error)))
            for size, rate, error in zip(self._sizes, rates, errors, strict=True)
        ]

    def _play(self) -> None:
        """Apply the sampled marks of the recorded requests to every shadow."""
        waiting, self._waiting = self._waiting, []
        looks, self._looks = self._looks, bytearray()
        num_bytes, num_hits = np.array(waiting[::_FIELDS], np.int64), np.array(waiting[1::_FIELDS], np.int64)
        num_blocks = num_bytes // self._block_bytes
        counts = (num_blocks * self._block_bytes + _ROUND) // LOOK_BYTES
        stops = np.cumsum(counts)
        self._num_hits += int(num_hits.sum())
        self._num_blocks += int(num_blocks.sum())
        self._num_unseen += int(num_blocks[counts == 0].sum())
        self._num_marks += int(stops[-1])
        marks = self._marks(_words(looks, num_bytes, counts, stops - counts), counts, stops - counts)
        sampled = np.flatnonzero(marks <= _U64(min(int(self.rate * 2**64), 2**64 - 1)))
        marks, owners = marks[sampled], np.searchsorted(stops, sampled, "right")
        if all(shadow.ignores_repeats for shadow in self._shadows.values()):
            marks, owners = _without_repeats(marks, owners)
        requests: list[list[int]] = []
        uses: list[Use] = []
        new_tokens, last = ((num_blocks - num_hits) * (self._block_bytes // TOKEN_BYTES)).tolist(), -1
        for owner, mark in zip(owners.tolist(), marks.tolist(), strict=True):
            if owner == last:
                requests[-1].append(mark)
            else:
                requests.append([mark])
                uses.append(Use(waiting[owner * _FIELDS + 2], new_tokens[owner]))
                last = owner
        if not requests:
            return
        groups = marks >> _U64(20) & _U64(_GROUPS - 1)
        hits = {name: shadow.play(requests, uses) for name, shadow in self._shadows.items()}
        real = hits[self._real][:, :1].astype(np.int64)
        for name, own in hits.items():  # +1: only this shadow hits; -1: only the real cache's shadow hits
            np.add.at(self._leads[name], groups, own - real)

    def _marks(self, words: _Words, counts: _Ints, starts: _Ints) -> _Words:
        """Return a mark per word: a hash of the prompt's words up to and including this word. Overwrites `words`."""
        self._mix_in_domains(words, counts, starts)
        one, two, three, four = self._factors
        words *= one
        words ^= words >> _U64(32)
        words *= two
        sums = np.cumsum(words)
        sums += np.arange(len(sums), dtype=_U64)
        has_marks = counts > 0
        first = starts[has_marks]
        sums -= np.repeat(sums[first] - words[first], counts[has_marks])
        sums *= three
        sums ^= sums >> _U64(32)
        sums *= four
        return sums

    def _mix_in_domains(self, words: _Words, counts: _Ints, starts: _Ints) -> None:
        """Mix salt and adapter into word 0, and extras into the first word that ends after the start of their block."""
        domains, self._domains = self._domains, {}
        for owner, (salt, adapter, extras) in domains.items():
            start, count = int(starts[owner]), int(counts[owner])
            if count and (salt or adapter):
                words[start] ^= _digest(len(salt).to_bytes(8, "little") + salt + adapter)
            for block, extra in extras.items():
                mark = (block * self._block_bytes + _ROUND) // LOOK_BYTES
                if mark < count:
                    words[start + mark] ^= _digest(extra)


def _words(looks: bytearray, num_bytes: _Ints, counts: _Ints, starts: _Ints) -> _Words:
    """Return `counts[i]` words for prompt i. The first word of a prompt has three looks. All other words have four."""
    num_looks = -(-num_bytes // STEP_BYTES)
    begins = np.cumsum(num_looks) - num_looks
    padded = b"\0" + looks + b"\0\0\0"
    anywhere = np.ndarray(len(looks) + 1, "<u4", padded, strides=(1,))
    words = anywhere[np.repeat(begins - 4 * starts, counts) + np.arange(0, 4 * int(counts.sum()), 4)].astype(_U64)
    words[starts[counts > 0]] &= ~_U64(0xFF)
    return words


def _without_repeats(marks: _Words, owners: _Ints) -> tuple[_Words, _Ints]:
    """Drop requests whose only mark is the first mark of the previous request. This mark is already the newest."""
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    sizes, heads = np.diff(begins, append=len(owners)), marks[begins]
    is_repeat = (sizes == 1) & (heads == np.roll(heads, 1))
    is_repeat[:1] = False
    kept = np.repeat(~is_repeat, sizes)
    return marks[kept], owners[kept]


def _steepness(positions: Any, rates: Any) -> Any:
    """Return the steepness of a curve at each point: the larger of the slopes to the two neighbours."""
    order = np.argsort(positions)
    across = np.diff(np.asarray(positions)[order])
    sides = np.abs(np.diff(np.asarray(rates)[order])) / np.maximum(across, 1e-9) * (across > 0)
    steepness = np.zeros(len(order))
    steepness[order] = np.maximum(np.append(sides, 0.0), np.append(0.0, sides))
    return steepness


def _digest(data: bytes) -> np.uint64:
    return _U64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))
