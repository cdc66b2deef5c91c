"""Planning a batch of copies: which pieces merge, and which must wait for others. numpy only, no memory is touched.

The result of a plan equals running its entries one after another, each reading its source before writing:

    entry      0        1        2        3         sorted by destination, checked for conflicts, then
    writes  [100,104)[104,108)[ 40, 44)[100,104)    wave 0: entries 0+1 merged (source and destination both continue), 2
    reads   [200,204)[204,208)[208,212)[ 40, 44)    wave 1: entry 3 (reads what 2 wrote, overwrites what 0 wrote)

Pieces of one wave are independent, so any path may run them in any order; waves run one after another.

Sources, destinations and sizes are the rows of one array, so that one call serves all: a batch of a few hundred pieces
spends its time on calls, not on elements. For the same reason the records here are not frozen, though nobody changes
them (0.4 us to create one, 1.5 frozen), and the first look at the entries may be a compiled one (native.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

I64 = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
SRC, DST, NBYTES = 0, 1, 2

ALONE = -1
"""The scope of an entry that merges with no other."""

# Past these the waves have lost their point, and entries run one by one in their order instead: a wave is a launch of
# its own (5-20 us on any path), and conflicting pairs are listed one by one.
MAX_WAVES = 64
MAX_PAIRS_PER_ENTRY = 16


@dataclass(slots=True)
class Entries:
    """Copies as asked for, in order. Addresses and sizes in bytes; sizes are positive."""

    table: I64
    """Row SRC: source addresses, row DST: destination addresses, row NBYTES: sizes."""
    scope: I64 | None = None
    """Entries of one scope >= 0 (a group, an array) may merge with each other; ALONE stays alone.

    None: all are of one scope.
    """

    def __len__(self) -> int:
        return len(self.table[0])

    def take(self, index: I64) -> Entries:
        """These entries, in this order."""
        return Entries(self.table.take(index, axis=1), None if self.scope is None else self.scope[index])


@dataclass(slots=True)
class Scan:
    """What one look at sorted entries shows."""

    disjoint: bool
    """The destinations ascend and do not overlap."""
    independent: bool
    """Nor does any source overlap a destination."""
    nbytes: int
    """Of all entries together."""
    starts: I64 | None
    """Where each piece begins once neighbours that continue each other are merged; None: none do."""


@dataclass(slots=True)
class CopyPlan:
    """Merged pieces, sorted by wave."""

    table: I64
    """Rows as in Entries."""
    nbytes: int
    """Of all pieces together."""
    wave_starts: list[int]
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
        return len(self.table[0])

    @property
    def num_waves(self) -> int:
        """Groups of independent pieces, which run one after another."""
        return self.num_pieces if self.in_order else len(self.wave_starts) - 1

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


def plan_copies(entries: Entries, look: Callable[[Entries], Scan] | None = None) -> CopyPlan:
    """Find conflicts, split into waves, merge inside each wave. `look` is `scan` or its compiled twin."""
    if not len(entries):
        return CopyPlan(entries.table, 0, [0], entries, None)
    look = look or scan
    order: I64 | None = None
    ordered, found = entries, look(entries)
    if not found.disjoint:  # not sorted, or overlapping
        order = np.argsort(entries.table[DST])
        ordered = entries.take(order)
        found = look(ordered)
    if found.independent:
        return _merge(ordered, found.nbytes, order, found.starts, None, overlapping=False)
    src, dst, nbytes = entries.table
    overlapping = any_of(np.abs(src - dst) < nbytes)
    waves = _waves(entries)
    if waves is None:
        bounds = [0, len(entries)]
        return CopyPlan(entries.table, found.nbytes, bounds, entries, None, in_order=True, overlapping=overlapping)
    order = np.lexsort((dst, waves))
    ordered = entries.take(order)
    wave_starts = np.flatnonzero(np.diff(waves[order], prepend=-1))
    starts = _piece_starts(ordered, wave_starts)
    return _merge(ordered, found.nbytes, order, starts, wave_starts, overlapping=overlapping)


def scan(entries: Entries) -> Scan:
    """Look at entries (at least one)."""
    _, dst, nbytes = entries.table
    disjoint = not any_of(dst[1:] < (dst + nbytes)[:-1])
    independent = disjoint and not _reads_what_is_written(entries)
    return Scan(disjoint, independent, int(nbytes.sum()), _piece_starts(entries, None))


def any_of(mask: Bools) -> bool:
    """mask.any() at a third of its cost on short arrays, where a batch of a few hundred spends its time."""
    return bool(np.count_nonzero(mask))


def _reads_what_is_written(entries: Entries) -> bool:
    """Whether a source overlaps a destination. `entries` are sorted by destination, which are disjoint."""
    src, dst, nbytes = entries.table
    # the first destination that ends after a source starts must not begin before that source ends
    following = np.searchsorted(dst + nbytes, src, side="right")
    begins = np.append(dst, np.iinfo(np.int64).max)[following]
    return any_of(begins < src + nbytes)


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
    src, dst, nbytes = entries.table
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
    """The concatenation of the ranges starts[i]..stops[i], of which there is at least one."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    expanded: I64 = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return expanded


def _merge(
    entries: Entries, nbytes: int, order: I64 | None, starts: I64 | None, wave_starts: I64 | None, *, overlapping: bool
) -> CopyPlan:
    """The plan of entries sorted by wave, then destination, whose pieces begin at `starts`.

    The k-th entry is the caller's `order[k]`. None for `order`, `starts`, `wave_starts`: as the caller had them;
    nothing merges; one wave.
    """
    if starts is None:
        bounds = [0, len(entries)] if wave_starts is None else [*wave_starts.tolist(), len(entries)]
        return CopyPlan(entries.table, nbytes, bounds, entries, order, overlapping=overlapping)
    table = entries.table.take(starts, axis=1)
    table[NBYTES] = np.add.reduceat(entries.table[NBYTES], starts)
    waves = [0] if wave_starts is None else starts.searchsorted(wave_starts).tolist()
    return CopyPlan(table, nbytes, [*waves, len(starts)], entries, order, starts, overlapping=overlapping)


def _piece_starts(entries: Entries, wave_starts: I64 | None) -> I64 | None:
    """The entries that do not continue the one before them in source and destination; None if none does."""
    src, dst, nbytes = entries.table
    continues: Bools = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    scope = entries.scope
    if scope is not None:
        continues &= (scope[1:] == scope[:-1]) & (scope[1:] != ALONE)
    if wave_starts is not None:
        continues[wave_starts[1:] - 1] = False
    if not any_of(continues):
        return None
    return np.flatnonzero(np.concatenate(([True], ~continues)))
