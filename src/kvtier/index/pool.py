"""BlockPool: which slots of a tier are free. It holds numbers, no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError, StateError

# Below this a Python loop finds runs faster than four numpy calls (x86-64, Python 3.11, 2026-11-15).
_FEW = 64
I32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True)
class Slots:
    """Slots of one tier. The tier's name travels with the numbers, so that no pool takes another's.

    Not frozen, and not to be changed: a frozen dataclass takes three times as long to make, once per allocation.
    """

    tier: str
    ids: I32

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why n slots could not be had. Nothing was changed."""

    tier: str
    wanted: int
    free: int
    evictable: int = 0
    quota: str = ""
    """The tenant whose quota stands in the way, or nothing."""

    def __str__(self) -> str:
        limit = f" within the quota of {self.quota}" if self.quota else ""
        return f"{self.wanted} slots of {self.tier} wanted{limit}, {self.free} free and {self.evictable} evictable"


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool in numbers. `num_runs` is how many contiguous runs the free slots form."""

    num_slots: int
    num_used: int
    num_free: int
    num_reserved: int
    num_runs: int
    num_allocated: int
    num_released: int


class BlockPool:
    """Free slots [0, num_slots) of a tier as runs, the longest that fit handed out whole.

    Runs, not single slots: a request's blocks are freed together and taken together, so one step of Python moves
    hundreds of slots, and neighbours in a pool are one large copy for the transfer.

        slots      0 1 2 3 4 5 6 7 8 9
        used       . . # # . . . # . .          _stop_of  {0: 2, 4: 7, 8: 10}     run start -> one past its end
        runs      [0,2)   [4,7)   [8,10)        _start_of {2: 0, 7: 4, 10: 8}     and back, to join neighbours

    `_bins[b]` holds the starts of runs of 2^(b-1) .. 2^b - 1 slots: any run of a higher bin is long enough, so a fit is
    found without a search. The first `reserved` slots are never handed out.
    """

    def __init__(self, tier: str, num_slots: int, *, reserved: int = 0) -> None:
        if not 0 <= reserved <= num_slots:
            raise RangeError(f"{tier}: {reserved} reserved slots do not fit in a pool of {num_slots}")
        self.tier = tier
        self.reserved = reserved
        self._used = bytearray(num_slots)
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(33)]
        self._filled = 0  # bit b: _bins[b] is not empty
        self._num_free = 0
        self._num_allocated = self._num_released = 0
        if num_slots > reserved:
            self._free_run(reserved, num_slots)

    @property
    def num_slots(self) -> int:
        """Slots there are, used, free and reserved."""
        return len(self._used)

    @property
    def num_free(self) -> int:
        """Slots that can be allocated."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots handed out and not released."""
        return len(self._used) - self.reserved - self._num_free

    @property
    def stats(self) -> PoolStats:
        """The numbers of now."""
        return PoolStats(
            self.num_slots,
            self.num_used,
            self.num_free,
            self.reserved,
            len(self._stop_of),
            self._num_allocated,
            self._num_released,
        )

    def free_slots(self) -> I32:
        """Every free slot, ascending."""
        runs = [np.arange(start, stop, dtype=np.int32) for start, stop in sorted(self._stop_of.items())]
        return np.concatenate(runs) if runs else np.empty(0, np.int32)

    def allocate(self, n: int) -> Slots | Shortage:
        """n slots, or none and the reason. Contiguous where a run is twice as long, most times where one just fits."""
        if n < 0:
            raise RangeError(f"{self.tier}: cannot allocate {n} slots")
        if n > self._num_free:
            return Shortage(self.tier, n, self._num_free)
        runs = []
        for start, stop in self._take_all() if n == self._num_free else self._take_runs(n):
            self._used[start:stop] = b"\1" * (stop - start)
            runs.append(np.arange(start, stop, dtype=np.int32))
        self._num_free -= n
        self._num_allocated += n
        return Slots(self.tier, runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else np.empty(0, np.int32))

    def release(self, slots: Slots) -> None:
        """Give slots back. Slots of another tier, unknown ones and ones that are free raise, and nothing changes."""
        if slots.tier != self.tier:
            raise ArgumentError(f"slots of {slots.tier} were given back to the pool of {self.tier}")
        runs = _runs(slots.ids)
        for done, (start, stop) in enumerate(runs):
            if start < self.reserved or self._used.count(1, start, stop) != stop - start:
                for start, stop in runs[:done]:
                    self._used[start:stop] = b"\1" * (stop - start)
                self._refuse(slots.ids)
            self._used[start:stop] = bytes(stop - start)
        for start, stop in runs:
            self._free_run(start, stop)
        self._num_released += len(slots.ids)

    def resize(self, num_slots: int) -> None:
        """More slots, or fewer. Never strands a used one: shrinking below the highest used slot raises."""
        if num_slots < self.reserved:
            raise RangeError(f"{self.tier}: cannot shrink to {num_slots} slots, {self.reserved} are reserved")
        old = self.num_slots
        if num_slots >= old:
            self._used += bytes(num_slots - old)
            if num_slots > old:
                self._free_run(old, num_slots)
            return
        highest = self._used.rfind(1)
        if highest >= num_slots:
            raise StateError(
                f"{self.tier}: cannot shrink to {num_slots} slots, slot {highest} is in use; free it first"
            )
        start = self._start_of[old]
        self._drop_run(start)
        self._num_free -= old - start
        if start < num_slots:
            self._free_run(start, num_slots)
        del self._used[num_slots:]

    def check(self) -> None:
        """Raise unless runs, bins and the used marks say the same."""
        free = np.zeros(self.num_slots, np.bool_)
        for start, stop in self._stop_of.items():
            if not self.reserved <= start < stop <= self.num_slots or free[start:stop].any():
                raise StateError(f"{self.tier}: free run [{start}, {stop}) overlaps another or leaves the pool")
            if stop in self._stop_of or self._start_of.get(stop) != start:
                raise StateError(f"{self.tier}: free run [{start}, {stop}) is not joined with its neighbour")
            if start not in self._bins[(stop - start).bit_length()]:
                raise StateError(f"{self.tier}: free run [{start}, {stop}) is in the wrong bin")
            free[start:stop] = True
        wanted = np.frombuffer(bytes(self._used), np.uint8) == 0
        wanted[: self.reserved] = False
        num_binned = sum(map(len, self._bins))
        if (free != wanted).any() or int(free.sum()) != self._num_free or num_binned != len(self._stop_of):
            raise StateError(
                f"{self.tier}: {int(free.sum())} slots in free runs, {int(wanted.sum())} unmarked, "
                f"{self._num_free} counted, {num_binned} runs in bins of {len(self._stop_of)}"
            )

    def _refuse(self, ids: I32) -> None:
        """Say which of the slots cannot be given back."""
        seen: set[int] = set()
        for slot in ids.tolist():
            if not self.reserved <= slot < self.num_slots:
                raise RangeError(f"{self.tier}: slot {slot} is not one of [{self.reserved}, {self.num_slots})")
            if not self._used[slot]:
                raise StateError(f"{self.tier}: slot {slot} was given back, but it is free")
            if slot in seen:
                raise StateError(f"{self.tier}: slot {slot} was given back twice at once")
            seen.add(slot)

    def _take_all(self) -> list[tuple[int, int]]:
        """Every free run: the usual case of a full pool, where just enough was evicted."""
        runs = list(self._stop_of.items())
        self._stop_of.clear()
        self._start_of.clear()
        for start, stop in runs:
            self._bins[(stop - start).bit_length()].clear()
        self._filled = 0
        return runs

    def _take_runs(self, n: int) -> Iterator[tuple[int, int]]:
        while n:
            start, stop = self._take_run(n)
            yield start, stop
            n -= stop - start

    def _take_run(self, n: int) -> tuple[int, int]:
        """A free run of n slots cut from a longer one, or else the longest there is of those that are shorter."""
        fits = n.bit_length()
        start = next(iter(self._bins[fits]), None)
        if start is not None and self._stop_of[start] - start >= n:  # one look: the bins above fit for certain
            return self._cut(start, n)
        longer = self._filled >> (fits + 1)
        if longer:
            return self._cut(next(iter(self._bins[fits + (longer & -longer).bit_length()])), n)
        start = next(iter(self._bins[self._filled.bit_length() - 1]))
        return self._cut(start, min(n, self._stop_of[start] - start))

    def _cut(self, start: int, n: int) -> tuple[int, int]:
        """The first n slots of the free run that begins at `start`."""
        stop = self._drop_run(start)
        if start + n < stop:
            self._keep_run(start + n, stop)
        return start, start + n

    def _free_run(self, start: int, stop: int) -> None:
        self._num_free += stop - start
        if start in self._start_of:
            start = self._start_of[start]
            self._drop_run(start)
        if stop in self._stop_of:
            stop = self._drop_run(stop)
        self._keep_run(start, stop)

    def _keep_run(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        size = (stop - start).bit_length()
        self._bins[size][start] = None
        self._filled |= 1 << size

    def _drop_run(self, start: int) -> int:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        size = (stop - start).bit_length()
        del self._bins[size][start]
        if not self._bins[size]:
            self._filled &= ~(1 << size)
        return stop


def _runs(ids: I32) -> list[tuple[int, int]]:
    """The ids as runs [start, stop) that rise by one, in the order they come."""
    if len(ids) > _FEW:
        breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1)
        starts = [int(ids[0]), *ids[breaks + 1].tolist()]
        return list(zip(starts, [*(ids[breaks] + 1).tolist(), int(ids[-1]) + 1], strict=True))
    if not len(ids):
        return []
    start, *others = ids.tolist()
    runs, stop = [], start + 1
    for slot in others:
        if slot != stop:
            runs.append((start, stop))
            start = slot
        stop = slot + 1
    runs.append((start, stop))
    return runs
