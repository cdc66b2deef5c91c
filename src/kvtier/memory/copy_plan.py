"""Planning a batch of copies: which pieces merge, and which must wait for others. numpy only, no memory is touched.

The result of a plan equals running its entries one after another, each reading its source before writing:

    entry      0        1        2        3         sorted by destination, checked for conflicts, then
    writes  [100,104)[104,108)[ 40, 44)[100,104)    wave 0: entries 0+1 merged (source and destination both continue), 2
    reads   [200,204)[204,208)[208,212)[ 40, 44)    wave 1: entry 3 (reads what 2 wrote, overwrites what 0 wrote)

Pieces of one wave are independent, so any path may run them in any order; waves run one after another.
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


@dataclass(frozen=True, slots=True)
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
        equal = len(self) > 0 and bool((self.nbytes == self.nbytes[0]).all())
        return Entries(self.src[index], self.dst[index], self.nbytes if equal else self.nbytes[index], scope)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Merged pieces in waves.

    Piece k, of wave `wave_starts.searchsorted(k)`, consists of entries `order[parts[k]:parts[k+1]]`.
    """

    src: I64
    dst: I64
    nbytes: I64
    wave_starts: I64
    """First piece of each wave, and the number of pieces at the end."""
    order: I64
    parts: I64
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


def plan_copies(entries: Entries) -> CopyPlan:
    """Find conflicts, split into waves, merge inside each wave."""
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    n = len(src)
    by_dst = _sort_order(dst)
    sorted_entries = entries if by_dst is None else entries.take(by_dst)
    touching = _reads_what_is_written(sorted_entries)
    if not touching and not _overlaps_neighbour(sorted_entries):
        order = np.arange(n) if by_dst is None else by_dst
        return _merge(sorted_entries, order, np.zeros(1, np.int64), overlapping=False)
    overlapping = bool((np.abs(src - dst) < nbytes).any())
    waves = _waves(entries)
    if waves is None:
        whole = np.arange(n + 1)
        return CopyPlan(src, dst, nbytes, np.array([0, n]), whole[:-1], whole, in_order=True, overlapping=overlapping)
    order = np.lexsort((dst, waves))
    starts = np.flatnonzero(np.diff(waves[order], prepend=-1))
    return _merge(entries.take(order), order, starts, overlapping=overlapping)


def _sort_order(values: I64) -> I64 | None:
    """An order that sorts `values`, or None if they are sorted: block tables often are, and checking costs little."""
    if len(values) < 2 or bool((values[1:] >= values[:-1]).all()):
        return None
    return np.argsort(values)


def _overlaps_neighbour(entries: Entries) -> bool:
    """Whether any two destinations overlap; sorted by start, two neighbours then do."""
    dst = entries.dst
    return bool((dst[1:] < dst[:-1] + entries.nbytes[:-1]).any())


def _reads_what_is_written(entries: Entries) -> bool:
    """Whether some source may overlap some destination. `entries` are sorted by destination."""
    src, dst, nbytes = entries.src, entries.dst, entries.nbytes
    if not len(src):
        return False
    ends = dst + nbytes
    highest = int(ends.max())
    src_ends = src + nbytes
    if int(src.min()) >= highest or int(src_ends.max()) <= int(dst[0]):
        return False  # the usual case: two buffers
    # the first destination that ends after this source starts, if it begins before the source ends
    reach = np.maximum.accumulate(ends)
    first = np.searchsorted(reach, src, side="right")
    first[first == len(dst)] = len(dst) - 1
    return bool(((dst[first] < src_ends) & (reach[first] > src)).any())


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


def _merge(entries: Entries, order: I64, wave_starts: I64, *, overlapping: bool) -> CopyPlan:
    """Join neighbours whose source and destination both continue. `entries` are sorted by wave, then destination."""
    src, dst, nbytes, scope = entries.src, entries.dst, entries.nbytes, entries.scope
    n = len(src)
    joins: Bools = np.zeros(n, np.bool_)  # whether a piece is joined to the one before it
    if n > 1:
        np.equal(dst[1:] - nbytes[:-1], dst[:-1], out=joins[1:])
        if joins.any():
            joins[1:] &= src[1:] - nbytes[:-1] == src[:-1]
            if scope is not None:
                joins[1:] &= (scope[1:] == scope[:-1]) & (scope[1:] != ALONE)
            joins[wave_starts] = False
    if not joins.any():
        pieces = np.arange(n + 1)
        return CopyPlan(src, dst, nbytes, np.append(wave_starts, n), order, pieces, overlapping=overlapping)
    first = np.flatnonzero(~joins)
    merged = np.add.reduceat(nbytes, first)
    return CopyPlan(
        src[first],
        dst[first],
        merged,
        np.append(np.searchsorted(first, wave_starts), len(first)),
        order,
        np.append(first, n),
        overlapping=overlapping,
    )
