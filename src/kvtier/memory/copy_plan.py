"""Plan a batch of copies: merge entries into pieces, and order pieces that depend on each other. No data is copied.

An entry is one copy that the caller added. A piece is one or more entries merged into one copy. The result is the same
as if the entries ran one after another, and each entry read its whole source before it wrote. Example:

    entry      0        1        2        3
    writes  [100,104)[104,108)[ 40, 44)[100,104)
    reads   [200,204)[204,208)[208,212)[ 40, 44)

    wave 0     entry 2
               entries 0 and 1 as one piece, because entry 1 continues entry 0 in source and destination
    wave 1     entry 3, because it reads bytes that entry 2 writes, and overwrites bytes that entry 0 writes

Pieces of one wave are independent of each other, so they may run in any order. Waves run one after another.

A table has three rows: SRC and DST are addresses, NBYTES are positive sizes. A table is one array instead of three,
because numpy calls dominate the planning time of a batch of a few hundred pieces. For the same reason, `scan` has a
compiled equivalent in native.py. Instances of the dataclasses are never modified. The classes are not frozen, because
creating a frozen instance takes 1.5 us instead of 0.4 us.

Only entries with the same scope can merge. Entries that were added in one `BatchCopy.group()`, or as one array, share a
scope (>= 0). Entries with the scope ALONE never merge. Without scopes, all entries can merge.
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
"""Scope of an entry that never merges."""

# Beyond these limits, entries run one by one in the caller's order. Waves would cost more, because each wave is a
# launch (5-20 us on any path) and every conflicting pair is stored.
MAX_WAVES = 64
MAX_PAIRS_PER_ENTRY = 16


@dataclass(slots=True)
class Scan:
    """Properties of a table of entries, in the given order."""

    disjoint: bool
    """True if destinations ascend and do not overlap."""
    independent: bool
    """True if disjoint, and no source overlaps a destination."""
    nbytes: int
    starts: I64 | None
    """First entry of each piece after merging adjacent entries; None if nothing merges."""


@dataclass(slots=True)
class CopyPlan:
    """Merged pieces, sorted by wave."""

    table: I64
    nbytes: int
    wave_starts: list[int]
    """First piece of each wave, followed by the number of pieces."""
    entries: I64
    """Table of the entries from which the pieces were merged, in the order of the pieces."""
    order: I64 | None
    """The caller's index of each entry; None if the entries are in the caller's order."""
    starts: I64 | None = None
    """First entry of each piece; None if nothing merged, so that piece k is entry k."""
    in_order: bool = False
    """True if pieces have too many dependencies and run one after another. `wave_starts` then has one wave."""
    overlapping: bool = False
    """True if source and destination of some piece overlap."""

    @property
    def num_pieces(self) -> int:
        return len(self.table[0])

    @property
    def num_waves(self) -> int:
        return self.num_pieces if self.in_order else len(self.wave_starts) - 1

    def first_entries(self) -> I64:
        """Return the caller's index of the first entry of each piece."""
        starts = np.arange(self.num_pieces) if self.starts is None else self.starts
        return starts if self.order is None else self.order[starts]

    def parts(self, piece: int) -> range:
        if self.starts is None:
            return range(piece, piece + 1)
        last = piece + 1 == self.num_pieces
        return range(int(self.starts[piece]), self.entries.shape[1] if last else int(self.starts[piece + 1]))

    def caller_entry(self, entry: int) -> int:
        return entry if self.order is None else int(self.order[entry])


def plan_copies(table: I64, scopes: I64 | None = None, scan_with: Callable[..., Scan] | None = None) -> CopyPlan:
    """Find conflicts, split entries into waves, and merge. `scan_with` is `scan` or its compiled equivalent."""
    if not table.shape[1]:
        return CopyPlan(table, 0, [0], table, None)
    scan_with = scan_with or scan
    order: I64 | None = None
    ordered, seen = table, scan_with(table, scopes)
    if not seen.disjoint:  # the destinations are not sorted, or overlap
        order = np.argsort(table[DST])
        ordered = table.take(order, axis=1)
        seen = scan_with(ordered, None if scopes is None else scopes[order])
    if seen.independent:
        return _merge(ordered, seen.nbytes, order, seen.starts, None, overlapping=False)
    src, dst, nbytes = table
    overlapping = any_of(np.abs(src - dst) < nbytes)
    waves = _waves(table)
    if waves is None:
        bounds = [0, table.shape[1]]
        return CopyPlan(table, seen.nbytes, bounds, table, None, in_order=True, overlapping=overlapping)
    order = np.lexsort((dst, waves))
    ordered = table.take(order, axis=1)
    wave_starts = np.flatnonzero(np.diff(waves[order], prepend=-1))
    starts = _piece_starts(ordered, None if scopes is None else scopes[order], wave_starts)
    return _merge(ordered, seen.nbytes, order, starts, wave_starts, overlapping=overlapping)


def scan(table: I64, scopes: I64 | None = None) -> Scan:
    """Scan a table of at least one entry."""
    _, dst, nbytes = table
    disjoint = not any_of(dst[1:] < (dst + nbytes)[:-1])
    independent = disjoint and not _reads_written_bytes(table)
    return Scan(disjoint, independent, int(nbytes.sum()), _piece_starts(table, scopes, None))


def any_of(mask: Bools) -> bool:
    """Return mask.any(), at a third of the cost for short arrays, such as batches of a few hundred pieces."""
    return bool(np.count_nonzero(mask))


def _reads_written_bytes(table: I64) -> bool:
    """True if a source overlaps a destination. The destinations must ascend and be disjoint."""
    src, dst, nbytes = table
    # compare each source with the first destination that ends after the source begins
    following = np.searchsorted(dst + nbytes, src, side="right")
    begins = np.append(dst, np.iinfo(np.int64).max)[following]
    return any_of(begins < src + nbytes)


def _waves(table: I64) -> I64 | None:
    """Assign each entry to a wave after the waves of earlier conflicting entries.

    Return None if there would be more than MAX_WAVES waves or too many conflicting pairs.
    """
    pairs = _conflicts(table)
    if pairs is None:
        return None
    before, after = pairs
    n = table.shape[1]
    waves = np.zeros(n, np.int64)
    if not len(before):
        return waves
    # Kahn's algorithm, one wave per round, over the conflicting pairs sorted by their earlier entry
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


def _conflicts(table: I64) -> tuple[I64, I64] | None:
    """Return all pairs (earlier, later) of conflicting entries: one writes bytes that the other reads or writes.

    Return None if there are more than MAX_PAIRS_PER_ENTRY pairs per entry on average.
    """
    src, dst, nbytes = table
    n = table.shape[1]
    writes, reads = np.argsort(dst), np.argsort(src)
    write_starts, read_starts = dst[writes], src[reads]
    write_ends, read_ends = write_starts + nbytes[writes], read_starts + nbytes[reads]
    find = np.searchsorted
    # Two intervals overlap if one starts inside the other. The sorted starts inside an interval are consecutive.
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
    """Concatenate the ranges [starts[i], stops[i]). There must be at least one range."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    expanded: I64 = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return expanded


def _merge(
    table: I64, nbytes: int, order: I64 | None, starts: I64 | None, wave_starts: I64 | None, *, overlapping: bool
) -> CopyPlan:
    """Return the plan for a table that is sorted by wave, then by destination.

    Entry k of the table is the caller's entry `order[k]` (None: entry k). Pieces begin at the entries `starts` (None:
    nothing merges). Waves begin at the entries `wave_starts` (None: there is one wave).
    """
    if starts is None:
        count = table.shape[1]
        bounds = [0, count] if wave_starts is None else [*wave_starts.tolist(), count]
        return CopyPlan(table, nbytes, bounds, table, order, overlapping=overlapping)
    merged = table.take(starts, axis=1)
    merged[NBYTES] = np.add.reduceat(table[NBYTES], starts)
    waves = [0] if wave_starts is None else starts.searchsorted(wave_starts).tolist()
    return CopyPlan(merged, nbytes, [*waves, len(starts)], table, order, starts, overlapping=overlapping)


def _piece_starts(table: I64, scopes: I64 | None, wave_starts: I64 | None) -> I64 | None:
    """Return the first entry of each piece, or None if nothing merges."""
    src, dst, nbytes = table
    continues: Bools = (src[:-1] + nbytes[:-1] == src[1:]) & (dst[:-1] + nbytes[:-1] == dst[1:])
    if scopes is not None:
        continues &= (scopes[1:] == scopes[:-1]) & (scopes[1:] != ALONE)
    if wave_starts is not None:
        continues[wave_starts[1:] - 1] = False
    if not any_of(continues):
        return None
    return np.flatnonzero(np.concatenate(([True], ~continues)))
