"""The staging ring: device memory through which blocks of layer-first caches cross the link.

    D2H   gather cache -> slot (kernel stream)   then   copy slot -> host (copy stream)
    H2D   copy host -> slot (copy stream)        then   scatter slot -> cache (kernel stream)

    slot 0  [gather 0][copy 0      ]         [gather 3]...         a slot is free again when the second of the two is
    slot 1            [gather 1]  [copy 1      ]                   done; streams wait for each other, not the host
    slot 2                        [gather 2]   [copy 2      ]

The kernel stream is of high priority: beside large matrix products a kernel gets its turn only when one of them ends,
and then it must be first. One stream for all slots: a stream for each, all enqueued ahead, was slower (docs/log.md).

Some pairs of a copy stream and a kernel stream get in each other's way in the driver or the GPU: while the kernel
stream has anything pending beside a busy model, copies run at 0.93 of the link, whatever their size. The pair stays
so; another kernel stream ends it (H200, driver 580.159, 2026-11-15; docs/log.md). Nothing tells which pairs, so copies
are timed, and when they were slow, the ring goes on with another kernel stream.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.memory import PINNED, Event, Placement, Stream
from kvtier.memory.copy_paths import CopyContext, PathName, Pieces
from kvtier.memory.copy_plan import DST, I64, SRC
from kvtier.memory.costs import cost_key, saved_costs
from kvtier.transfer.compiled import Slice
from kvtier.transfer.plane import Direction
from kvtier.transfer.strategy import TransferConfig

Mover = Callable[[PathName, CopyContext, Pieces], PathName]
"""Carries out independent copies: copy_paths.run_path, or what a test puts in its place."""


# Stream priority: lower numbers go first. Not that of a lane's streams: torch keeps a pool for each, and hands the same
# stream out twice; kernels on a stream that copies would wait for them.
_FIRST = -2
_SLOW = 0.96  # of the best rate known; pairs in each other's way have 0.93, others 0.98 and more
_TIMED_BYTES = 32 << 20  # copies at least so large tell the rate
_JUDGED = 4  # of them together: one may have met other traffic


@dataclass(slots=True)
class _StagingSlot:
    pointer: int
    free: Event
    """Behind it the slot may be written again."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A copy whose rate will be looked at when it is done."""

    begin: Event
    end: Event
    nbytes: int


class StagingRing:
    """Device memory for one direction, made on first use. Not thread-safe: its lane locks."""

    def __init__(self, direction: Direction, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self._direction = direction
        self._placement = placement
        self._config = config
        self._mover = mover
        self._memory: torch.Tensor | None = None
        self._slots: list[_StagingSlot] = []
        self._turn = 0
        self._kernels: Stream | None = None
        self._timed: deque[_Timed] = deque()
        self._rates: list[float] = []
        """GB/s of those that are done."""
        self._best_gbs = 0.0

    def run(self, part: Slice, host: Placement, path: PathName, copies: Stream, after: Event | None) -> Event:
        """Submit a staged slice, behind `after`. Returns the event at its end; ends come in order."""
        slot = self._take()
        self._look_at_the_rate()
        assert self._kernels is not None
        kernels, base, free, end = self._kernels, slot.pointer, slot.free, Event(timing=True, blocking=True)
        slot.free = end
        try:
            if self._direction is Direction.D2H:
                kernels.wait(free)
                if after is not None:
                    kernels.wait(after)
                self._inside(part, DST, base, kernels)
                copies.wait(kernels.record())
                self._copy(part, path, CopyContext(self._placement, host, copies), SRC, base, end)
                return end
            copies.wait(free)
            arrived = Event(timing=True)
            self._copy(part, path, CopyContext(host, self._placement, copies), DST, base, arrived)
            kernels.wait(arrived)
            self._inside(part, SRC, base, kernels)
            return kernels.record(end)
        except BaseException:
            copies.wait(kernels.record())  # the slot is free when what was submitted of this is done
            copies.record(end)
            raise

    def _copy(self, part: Slice, path: PathName, job: CopyContext, row: int, base: int, end: Event) -> None:
        """Over the link; `end` is recorded behind it."""
        assert job.stream is not None
        begin = job.stream.record(Event(timing=True)) if part.nbytes >= _TIMED_BYTES else None
        self._mover(path, job, Pieces(_based(part.tables.copies, row, base)))
        job.stream.record(end)
        if begin is not None:
            self._timed.append(_Timed(begin, end, part.nbytes))

    def _inside(self, part: Slice, row: int, base: int, kernels: Stream) -> None:
        inside = part.tables.inside
        assert inside is not None
        job = CopyContext(self._placement, self._placement, kernels, blocks=self._config.gather_blocks)
        self._mover("gather", job, Pieces(_based(inside, row, base)))

    def _look_at_the_rate(self) -> None:
        """Take another kernel stream if most of the copies that are done since the last judgement were slow."""
        while self._timed and self._timed[0].end.query():
            timed = self._timed.popleft()
            self._rates.append(timed.nbytes / timed.begin.elapsed(timed.end) / 1e6)
        if len(self._rates) < _JUDGED:
            return
        self._best_gbs = max(self._best_gbs, *self._rates)
        slow = statistics.median(self._rates) < _SLOW * self._best_gbs
        self._rates.clear()
        if slow:
            assert self._kernels is not None
            before, self._kernels = self._kernels, Stream(self._placement, priority=_FIRST)
            self._kernels.wait(before.record())  # ends come in order

    def _take(self) -> _StagingSlot:
        """The next slot; the ring is made on first use."""
        if not self._slots:
            config = self._config
            nbytes = config.chunk_bytes * config.num_chunks
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._placement.torch)
            # the pool may have given memory that work on torch's current stream still uses
            ready = Stream.wrap(torch.cuda.current_stream(self._placement.torch)).record()
            first = self._memory.data_ptr()
            self._kernels = Stream(self._placement, priority=_FIRST)
            self._slots = [_StagingSlot(first + k * config.chunk_bytes, ready) for k in range(config.num_chunks)]
            costs, sides = saved_costs(self._placement), (self._placement, PINNED)
            if costs is not None:
                link = CopyContext(*(sides if self._direction is Direction.D2H else sides[::-1]), None)
                self._best_gbs = max(self._best_gbs, costs.links.get(cost_key(link), 0.0))
        self._turn += 1
        return self._slots[self._turn % len(self._slots)]

    def close(self) -> None:
        """Give the memory up; everything that used it must be done."""
        if self._kernels is not None:
            self._kernels.synchronize()
        self._memory, self._kernels, self._slots = None, None, []
        self._timed.clear()


def _based(table: I64, row: int, base: int) -> I64:
    """The table with the staging side's offsets as addresses."""
    placed = table.copy()
    placed[row] += base
    return placed
