"""BlockPool: allocates the slots of a tier. A slot is the number of a place for one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.messages import I32

# Up to this number of ids, a Python loop finds runs faster than numpy (measured on x86-64, Python 3.11, 2026-11-15).
_FEW = 64


@dataclass(slots=True)
class Slots:
    """Slots in one tier. The name of the tier allows a pool to reject slots of another tier.

    Do not modify an instance. The class is not frozen, because creating frozen instances takes three times as long.
    """

    tier: str
    ids: I32

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Result of a failed allocation. A failed allocation changes nothing."""

    tier: str
    wanted: int
    free: int
    evictable: int = 0
    quota: str = ""
    """The tenant (in hex digits, or "no salt") whose quota would be exceeded. Empty if the reason is not a quota."""

    def __str__(self) -> str:
        limit = f" within the quota of {self.quota}" if self.quota else ""
        return f"{self.wanted} slots of {self.tier} wanted{limit}, {self.free} free and {self.evictable} evictable"


class BlockPool:
    """Manages the free slots of a tier as contiguous runs. Slots are numbered [0, num_slots).

    A request's blocks are allocated and freed together. With runs, one operation handles hundreds of slots, and a
    transfer copies adjacent slots in one piece.

        slots      0 1 2 3 4 5 6 7 8 9
        used       . . # # . . . # . .          _stop_of  {0: 2, 4: 7, 8: 10}     start of run -> end of run
        free runs [0,2)   [4,7)   [8,10)        _start_of {2: 0, 7: 4, 10: 8}     end of run -> start of run

    `_bins[b]` contains the starts of runs with 2^(b-1) to 2^b - 1 slots. To allocate n slots without a search, take any
    run from a bin with b > n.bit_length(). All runs in these bins have at least n slots.
    """

    def __init__(self, tier: str, num_slots: int) -> None:
        self.tier = tier
        self.num_free = 0
        self._used = bytearray()
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(33)]
        self._filled = 0  # bit b is 1 if _bins[b] is not empty
        self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        return len(self._used)

    @property
    def num_used(self) -> int:
        return len(self._used) - self.num_free

    def free_slots(self) -> I32:
        """Return all free slots in ascending order."""
        runs = [np.arange(start, stop, dtype=np.int32) for start, stop in sorted(self._stop_of.items())]
        return np.concatenate(runs) if runs else np.empty(0, np.int32)

    def allocate(self, n: int) -> Slots | Shortage:
        """Allocate n slots, or return a Shortage. If there is a free run of 2n slots, the result is contiguous."""
        if n < 0:
            raise RangeError(f"{self.tier}: cannot allocate {n} slots")
        if n > self.num_free:
            return Shortage(self.tier, n, self.num_free)
        runs = []
        for start, stop in self._take_all() if n == self.num_free else self._take_runs(n):
            self._used[start:stop] = b"\1" * (stop - start)
            runs.append(np.arange(start, stop, dtype=np.int32))
        self.num_free -= n
        return Slots(self.tier, runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else np.empty(0, np.int32))

    def release(self, slots: Slots) -> None:
        """Free slots. If a slot belongs to another tier, does not exist or is already free, raise and free nothing."""
        if slots.tier != self.tier:
            raise ArgumentError(f"slots of {slots.tier} were released to the pool of {self.tier}")
        runs = _runs(slots.ids)
        for done, (start, stop) in enumerate(runs):
            if start < 0 or self._used.count(1, start, stop) != stop - start:
                for start, stop in runs[:done]:
                    self._used[start:stop] = b"\1" * (stop - start)
                self._refuse(slots.ids)
            self._used[start:stop] = bytes(stop - start)
        for start, stop in runs:
            self._free_run(start, stop)

    def resize(self, num_slots: int) -> None:
        """Change the number of slots. Raise StateError if a removed slot is in use."""
        if num_slots < 0:
            raise RangeError(f"{self.tier}: a pool cannot have {num_slots} slots")
        old = self.num_slots
        if num_slots >= old:
            self._used += bytes(num_slots - old)
            if num_slots > old:
                self._free_run(old, num_slots)
            return
        highest = self._used.rfind(1)
        if highest >= num_slots:
            raise StateError(
                f"{self.tier}: cannot shrink to {num_slots} slots, because slot {highest} is in use; free it first"
            )
        start = self._start_of[old]
        self._drop_run(start)
        self.num_free -= old - start
        if start < num_slots:
            self._free_run(start, num_slots)
        del self._used[num_slots:]

    def check(self) -> None:
        """Raise StateError if the runs, the bins and the marks of used slots are inconsistent."""
        free = np.zeros(self.num_slots, np.bool_)
        for start, stop in self._stop_of.items():
            if not 0 <= start < stop <= self.num_slots or free[start:stop].any():
                raise StateError(f"{self.tier}: free run [{start}, {stop}) overlaps another run or exceeds the pool")
            if stop in self._stop_of or self._start_of.get(stop) != start:
                raise StateError(f"{self.tier}: free run [{start}, {stop}) is not joined with its neighbour")
            if start not in self._bins[(stop - start).bit_length()]:
                raise StateError(f"{self.tier}: free run [{start}, {stop}) is in the wrong bin")
            free[start:stop] = True
        wanted = np.frombuffer(bytes(self._used), np.uint8) == 0
        num_binned = sum(map(len, self._bins))
        if (free != wanted).any() or int(free.sum()) != self.num_free or num_binned != len(self._stop_of):
            raise StateError(
                f"{self.tier}: {int(free.sum())} slots in free runs, {int(wanted.sum())} not marked as used, "
                f"{self.num_free} counted as free; {num_binned} of {len(self._stop_of)} runs in bins"
            )

    def _refuse(self, ids: I32) -> None:
        """Raise an error that names the first slot that cannot be freed."""
        seen: set[int] = set()
        for slot in ids.tolist():
            if not 0 <= slot < self.num_slots:
                raise RangeError(f"{self.tier}: slot {slot} is not in [0, {self.num_slots})")
            if not self._used[slot]:
                raise StateError(f"{self.tier}: slot {slot} was released, but is already free")
            if slot in seen:
                raise StateError(f"{self.tier}: slot {slot} was released twice in one call")
            seen.add(slot)

    def _take_all(self) -> list[tuple[int, int]]:
        """Allocate all free runs. In a nearly full pool, most allocations need all of the few free slots."""
        runs = list(self._stop_of.items())
        self._stop_of.clear()
        self._start_of.clear()
        for start, stop in runs:
            self._bins[(stop - start).bit_length()].clear()
        self._filled = 0
        return runs

    def _take_runs(self, n: int) -> Iterator[tuple[int, int]]:
        """Allocate n slots from one run if a long enough run is found without a search, otherwise from several runs."""
        while n:
            fits = n.bit_length()
            start = next(iter(self._bins[fits]), None)
            if start is None or self._stop_of[start] - start < n:  # all runs in higher bins are long enough
                longer = self._filled >> (fits + 1)
                size = fits + (longer & -longer).bit_length() if longer else self._filled.bit_length() - 1
                start = next(iter(self._bins[size]))
            stop = self._drop_run(start)
            if start + n < stop:
                self._keep_run(start + n, stop)
                stop = start + n
            yield start, stop
            n -= stop - start

    def _free_run(self, start: int, stop: int) -> None:
        self.num_free += stop - start
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
    """Split the ids into runs [start, stop) of consecutive slots. The order of the ids is kept."""
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
