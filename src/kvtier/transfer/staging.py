"""The staging ring: device memory through which blocks of layer-first caches cross the link.

    D2H   gather cache -> slot (kernel stream)   then   copy slot -> host (copy stream)
    H2D   copy host -> slot (copy stream)        then   scatter slot -> cache (kernel stream)

    slot 0  [gather 0][copy 0      ]         [gather 3]...         a slot is free again when the second of the two is
    slot 1            [gather 1]  [copy 1      ]                   done; streams wait for each other, not the host
    slot 2                        [gather 2]   [copy 2      ]

The kernel stream is of high priority: beside large matrix products a kernel gets its turn only when one of them ends,
and then it must be first. One stream for all slots: a stream for each, all enqueued ahead, was slower (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.memory import Event, Placement, Stream
from kvtier.memory.copy_paths import Job, PathName, Pieces
from kvtier.memory.copy_plan import DST, I64, SRC
from kvtier.transfer.compiled import Slice
from kvtier.transfer.config import TransferConfig
from kvtier.transfer.plane import Direction

Mover = Callable[[PathName, Job, Pieces], PathName]
"""Carries out independent copies: copy_paths.run_path, or what a test puts in its place."""


_FIRST = -1  # stream priority: lower numbers go first


@dataclass(slots=True)
class _Slot:
    pointer: int
    free: Event
    """Behind it the slot may be written again."""


class StagingRing:
    """Device memory for one direction, made on first use. Not thread-safe: its lane locks."""

    def __init__(self, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self._placement = placement
        self._config = config
        self._mover = mover
        self._memory: torch.Tensor | None = None
        self._slots: list[_Slot] = []
        self._turn = 0
        self._kernels: Stream | None = None

    def run(
        self, part: Slice, direction: Direction, host: Placement, path: PathName, copies: Stream, after: Event | None
    ) -> Event:
        """Submit a staged slice, behind `after`. Returns the event at its end; ends come in order."""
        slot = self._take()
        assert self._kernels is not None
        kernels, base, free, end = self._kernels, slot.pointer, slot.free, Event(timing=True, blocking=True)
        slot.free = end
        try:
            if direction is Direction.D2H:
                kernels.wait(free)
                if after is not None:
                    kernels.wait(after)
                self._inside(part, DST, base, kernels)
                copies.wait(kernels.record())
                self._mover(path, Job(self._placement, host, copies), Pieces(_based(part.copies, SRC, base)))
                return copies.record(end)
            copies.wait(free)
            self._mover(path, Job(host, self._placement, copies), Pieces(_based(part.copies, DST, base)))
            kernels.wait(copies.record())
            self._inside(part, SRC, base, kernels)
            return kernels.record(end)
        except BaseException:
            copies.wait(kernels.record())  # the slot is free when what was submitted of this is done
            copies.record(end)
            raise

    def _inside(self, part: Slice, row: int, base: int, kernels: Stream) -> None:
        assert part.inside is not None
        job = Job(self._placement, self._placement, kernels, blocks=self._config.gather_blocks)
        self._mover("gather", job, Pieces(_based(part.inside, row, base)))

    def _take(self) -> _Slot:
        """The next slot; the ring is made on first use."""
        if not self._slots:
            config = self._config
            nbytes = config.chunk_bytes * config.num_chunks
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._placement.torch)
            # the pool may have given memory that work on torch's current stream still uses
            ready = Stream.wrap(torch.cuda.current_stream(self._placement.torch)).record()
            first = self._memory.data_ptr()
            self._kernels = Stream(self._placement, priority=_FIRST)
            self._slots = [_Slot(first + k * config.chunk_bytes, ready) for k in range(config.num_chunks)]
        self._turn += 1
        return self._slots[self._turn % len(self._slots)]

    def close(self) -> None:
        """Give the memory up; everything that used it must be done."""
        if self._kernels is not None:
            self._kernels.synchronize()
        self._memory, self._kernels, self._slots = None, None, []


def _based(table: I64, row: int, base: int) -> I64:
    """The table with the staging side's offsets as addresses."""
    placed = table.copy()
    placed[row] += base
    return placed
