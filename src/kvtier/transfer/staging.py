"""The staging ring: device memory through which blocks of layer-first caches cross the link.

D2H   gather cache -> slot (kernel stream)   then   copy slot -> host (copy stream)
H2D   copy host -> slot (copy stream)        then   scatter slot -> cache (kernel stream)

slot 0  [gather 0][copy 0      ]         [gather 3]...          a slot is free again when the second of the two is
slot 1            [gather 1]  [copy 1      ]                    done; streams wait for each other, nobody on the host
slot 2                        [gather 2]   [copy 2      ]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier.memory import Event, Placement, Stream
from kvtier.memory.copy_paths import Job, PathName, Pieces
from kvtier.memory.copy_plan import DST, I64, SRC
from kvtier.transfer.compiled import Slice
from kvtier.transfer.config import TransferConfig
from kvtier.transfer.plane import Direction

Mover = Callable[[PathName, Job, Pieces], PathName]
"""Carries out independent copies: copy_paths.run_path, or what a test puts in its place."""


class StagingRing:
    """Device memory for one direction, made on first use. Not thread-safe: its lane locks."""

    def __init__(self, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self._placement = placement
        self._config = config
        self._mover = mover
        self._memory: torch.Tensor | None = None
        self._free: list[Event] = []
        self._turn = 0

    def run(
        self, part: Slice, direction: Direction, host: Placement, path: PathName, copies: Stream, kernels: Stream
    ) -> Event:
        """Submit a staged slice. Returns the event at its end."""
        base, free, end = self._take()
        try:
            if direction is Direction.D2H:
                kernels.wait(free)
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
            kernels.wait(copies.record())  # the slot is free when what was submitted of this is done
            kernels.record(end)
            raise

    def _inside(self, part: Slice, row: int, base: int, kernels: Stream) -> None:
        assert part.inside is not None
        job = Job(self._placement, self._placement, kernels, blocks=self._config.gather_blocks)
        self._mover("gather", job, Pieces(_based(part.inside, row, base)))

    def _take(self) -> tuple[int, Event, Event]:
        """The next slot, the event behind which it is free, and the one to record at the end of its use."""
        if self._memory is None:
            nbytes = self._config.chunk_bytes * self._config.num_chunks
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._placement.torch)
            # the pool may have given memory that work on torch's current stream still uses
            ready = Event()
            ready.record(Stream.wrap(torch.cuda.current_stream(self._placement.torch)))
            self._free = [ready] * self._config.num_chunks
        slot = self._turn % self._config.num_chunks
        self._turn += 1
        free, self._free[slot] = self._free[slot], Event(timing=True, blocking=True)
        return self._memory.data_ptr() + slot * self._config.chunk_bytes, free, self._free[slot]

    def close(self) -> None:
        """Give the memory up; everything that used it must be done."""
        self._memory, self._free = None, []


def _based(table: I64, row: int, base: int) -> I64:
    """The table with the staging side's offsets as addresses."""
    placed = table.copy()
    placed[row] += base
    return placed
