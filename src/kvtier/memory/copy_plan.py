"""Planning a batch of copies: which pieces merge, and which must wait for others. numpy only, no memory is touched.

The result of a plan equals running its entries one after another, each reading its source before writing:

    entry      0        1        2        3         sorted by destination, checked for conflicts, then
    writes  [100,104)[104,108)[ 40, 44)[100,104)    wave 0: entries 0+1 merged (source and destination both continue), 2
    reads   [200,204)[204,208)[208,212)[ 40, 44)    wave 1: entry 3 (reads what 2 wrote, overwrites what 0 wrote)

Pieces of one wave are independent, so any path may run them in any order; waves run one after another.

The records here and in the modules that run the plan are not frozen, though nobody changes them: freezing makes each three
times as dear to create (0.4 -> 1.5 us), and a batch of a few hundred pieces creates a dozen within its 60 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

I64 = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

ALONE = -1
"""The scope of an entry that merges with no other."""

# Past these the waves have lost their point, and entries run one by one in their order instead: a wave is a launch of
# its own (5-20 us on any path), and conflicting pairs are listed one by one.
MAX_WAVES = 64
MAX_PAIRS_PER_ENTRY = 16


@dataclass(slots=True)
class Entries:
    """Copies as asked for, in order. Addresses and sizes in bytes; sizes are positive."""

    src: I64
    dst: I64
    nbytes: I64
    scope: I64 | None = None
    """Entries of one scope >= 0 (a group, an array) may merge with each other; ALONE stays alone.

    None: all are of one scope.
    """

    def __len__(self) -> int:
        return len(self.src)

    def take(self, index: I64) -> Entries:
        """These entries, in this order."""
        scope = None if self.scope is None else self.scope[index]
        # equal sizes, as blocks have, stay what they are in any order: one gather of 100,000 saved
        equal = len(self) > 0 and not any_of(self.nbytes != self.nbytes[0])
        nbytes = self.nbytes[: len(index)] if equal else self.nbytes[index]
        return Entries(self.src[index], self.dst[index], nbytes, scope)


@dataclass(slots=True)
class CopyPlan:
    """Merged pieces, sorted by wave."""

    src: I64
    dst: I64
    nbytes: I64
    wave_starts: I64
    """First piece of each wave, and the number of pieces at the end."""
    entries: Entries
    """What the pieces are made of, sorted as they are."""
    order: I64 | None
    """The caller's number of each of `entries`; None: they are in the caller's order."""
    starts: I64 | None = None
    """Where in `entries` each piece begins; None: nothing merged, piece k is entry k of them."""
    in_order: bool = False
    """Every piece must wait for the one before it (too entangled for waves); wave_starts then is one wave."""
    overlapping: bool = False
    """Some piece overlaps itself: source and destination share bytes."""

    @property
    def num_pieces(self) -> int:
        """Copies left after merging."""
        return len(self.src)

    @property
    def num_waves(self) -> int:
        """Groups of pieces that run one after another."""
        return len(self.wave_starts) - 1

    def first_entries(self) -> I64:
        """The caller's number of the entry each piece begins with."""
        starts = np.arange(self.num_pieces) if self.starts is None else self.starts
        return starts if self.order is None else self.order[starts]

    def parts(self, piece: int) -> range:
        """Which of `entries` make up a piece."""
        if self.starts is None:
            return range(piece, piece + 1)
        last = piece + 1 == self.num_pieces
        return range(int(self.starts[piece]), len(self.entries) if last else int(self.starts[piece + 1]))

    def caller_entry(self, entry: int) -> int:
        """The caller's number of one of `entries`."""
        return entry if self.order is None else int(self.order[entry])


def plan_copies(entries: Entries) -> CopyPlan:
    """Find conflicts, split into waves, merge inside each wave."""
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    by_dst = _sort_order(dst)
    ordered = entries if by_dst is None else entries.take(by_dst)
    if _independent(ordered):
        return _merge(ordered, by_dst, None, overlapping=False)
    overlapping = any_of(np.abs(src - dst) < nbytes)
    waves = _waves(entries)
    if waves is None:
        ends = np.array([0, len(src)])
        return CopyPlan(src, dst, nbytes, ends, entries, None, in_order=True, overlapping=overlapping)
    order = np.lexsort((dst, waves))
    starts = np.flatnonzero(np.diff(waves[order], prepend=-1))
    return _merge(entries.take(order), order, starts, overlapping=overlapping)


def any_of(mask: Bools) -> bool:
    """mask.any() at a third of its cost on short arrays, where a batch of a few hundred spends its time."""
    return bool(np.count_nonzero(mask))


def _sort_order(values: I64) -> I64 | None:
    """An order that sorts `values`, or None if they are sorted: block tables often are, and checking costs little."""
    return np.argsort(values) if any_of(values[1:] < values[:-1]) else None


def _independent(entries: Entries) -> bool:
    """Whether no byte is written twice, or both written and read. `entries` are sorted by destination."""
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    if not len(src):
        return True
    ends = dst + nbytes
    if any_of(dst[1:] < ends[:-1]):  # sorted by start: if any two overlap, two neighbours do
        return False
    src_ends = src + nbytes
    if np.minimum.reduce(src) >= ends[-1] or np.maximum.reduce(src_ends) <= dst[0]:
        return True  # the usual case: two buffers
    # the first destination that ends after a source starts must not begin before that source ends
    following = np.searchsorted(ends, src, side="right")
    begins = np.append(dst, np.iinfo(np.int64).max)[following]
    return not any_of(begins < src_ends)


def _waves(entries: Entries) -> I64 | None:
    """The wave of each entry: one more than the last earlier entry it conflicts with. None if too entangled."""
    pairs = _conflicts(entries)
    if pairs is None:
        return None
    before, after = pairs
    n = len(entries)
    waves = np.zeros(n, np.int64)
    if not len(before):
        return waves
    # Kahn's algorithm, a whole wave at a time, over edges sorted by their first entry
    by_before = np.argsort(before, kind="stable")
    after = after[by_before]
    edge_starts = np.searchsorted(before[by_before], np.arange(n + 1))
    waiting_for = np.bincount(after, minlength=n)
    ready = np.flatnonzero(waiting_for == 0)
    wave = 0
    while len(ready):
        if wave == MAX_WAVES:
            return None
        waves[ready] = wave
        reached = after[_expand(edge_starts[ready], edge_starts[ready + 1])]
        waiting_for -= np.bincount(reached, minlength=n)
        waiting_for[ready] = -1
        ready = np.flatnonzero(waiting_for == 0)
        wave += 1
    return waves


def _conflicts(entries: Entries) -> tuple[I64, I64] | None:
    """Pairs (earlier, later) of entries that may not be swapped: two writes, or a write and a read, share a byte."""
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    n = len(entries)
    writes, reads = np.argsort(dst), np.argsort(src)
    write_starts, read_starts = dst[writes], src[reads]
    write_ends, read_ends = write_starts + nbytes[writes], read_starts + nbytes[reads]
    find = np.searchsorted
    # intervals overlap when one starts inside the other; each way is a range of the sorted starts
    ranges = (
        (writes, writes, np.arange(n) + 1, find(write_starts, write_ends)),
        (writes, reads, find(read_starts, write_starts), find(read_starts, write_ends)),
        (reads, writes, find(write_starts, read_starts, side="right"), find(write_starts, read_ends)),
    )
    if sum(int(np.maximum(stop - start, 0).sum()) for _, _, start, stop in ranges) > MAX_PAIRS_PER_ENTRY * n:
        return None
    firsts, seconds = [], []
    for owners, others, start, stop in ranges:
        stop = np.maximum(start, stop)
        firsts.append(np.repeat(owners, stop - start))
        seconds.append(others[_expand(start, stop)])
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    apart = first != second
    first, second = first[apart], second[apart]
    return np.minimum(first, second), np.maximum(first, second)


def _expand(starts: I64, stops: I64) -> I64:
    """The concatenation of the ranges starts[i]..stops[i]."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    expanded: I64 = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return expanded


def _merge(entries: Entries, order: I64 | None, wave_starts: I64 | None, *, overlapping: bool) -> CopyPlan:
    """Join neighbours whose source and destination both continue.

    `entries` are sorted by wave, then destination; the k-th is the caller's entry `order[k]`. None: in the same order,
    one wave.
    """
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    n = len(src)
    if wave_starts is None:
        wave_starts = np.zeros(1, np.int64)
    joins = _joins(entries, wave_starts)
    if joins is None:
        ends = np.append(wave_starts, n) if len(wave_starts) > 1 else np.array([0, n])
        return CopyPlan(src, dst, nbytes, ends, entries, order, overlapping=overlapping)
    first = np.flatnonzero(~joins)
    ends = np.append(np.searchsorted(first, wave_starts), len(first))
    merged = np.add.reduceat(nbytes, first)
    return CopyPlan(src[first], dst[first], merged, ends, entries, order, first, overlapping=overlapping)


def _joins(entries: Entries, wave_starts: I64) -> Bools | None:
    """For each entry, whether it continues the one before it; None if none does."""
    src, dst, nbytes, scope = entries.src, entries.dst, entries.nbytes, entries.scope
    lengths = nbytes[:-1]
    continues: Bools = dst[:-1] + lengths == dst[1:]
    if not any_of(continues):
        return None
    continues &= src[:-1] + lengths == src[1:]
    if scope is not None:
        continues &= (scope[1:] == scope[:-1]) & (scope[1:] != ALONE)
    if not any_of(continues):
        return None
    joins: Bools = np.zeros(len(src), np.bool_)
    joins[1:] = continues
    joins[wave_starts] = False
    return joins
