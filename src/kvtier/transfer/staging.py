"""The staging ring: device memory for blocks of layer-first caches, between the cache and the link.

    D2H   gather cache -> slot (kernel stream)   then   copy slot -> host (copy stream)
    H2D   copy host -> slot (copy stream)        then   scatter slot -> cache (kernel stream)

    slot 0  [gather 0][copy 0      ]         [gather 3]...
    slot 1            [gather 1]  [copy 1      ]
    slot 2                        [gather 2]   [copy 2      ]

A slot is free again after the second operation. The streams wait for each other with events; the host does not wait.

The kernel stream has high priority. While the model runs large matrix products, a gather or scatter can start only
between two products. The high priority makes it start before the next product. All slots share one kernel stream,
because one stream per slot was slower (docs/decisions/0006).

With some kernel streams, copies run at only 0.93 of the link rate while the model is busy. The cause is unknown (H200,
driver 580.159, 2026-11-15; docs/decisions/0006). The ring therefore times its copies, and replaces the kernel stream
when copies are slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

import torch

from kvtier.memory import PINNED, Event, Placement, Stream
from kvtier.memory.copy_paths import CopyContext, PathName, Pieces
from kvtier.memory.copy_plan import DST, I64, SRC
from kvtier.memory.costs import cost_key, saved_costs
from kvtier.transfer.block_view import Direction
from kvtier.transfer.compiled import Slice
from kvtier.transfer.strategy import TransferConfig

Mover = Callable[[PathName, CopyContext, Pieces], PathName]
"""Executes independent copies: copy_paths.run_path, or a replacement in tests."""


# Priority of the kernel stream; lower numbers run first. Copy streams have other priorities, because torch's pool
# can return the same stream twice for one priority. Kernels on a copy stream would wait for its copies.
_FIRST = -2
_SLOW = 0.96  # minimum share of the best rate; copies reach 0.93 with a slow kernel stream, otherwise 0.98 or more
_TIMED_BYTES = 32 << 20  # smaller copies are not timed
_JUDGED = 4  # copies to time for each decision, because other traffic may slow down a single copy


class StagingRing:
    """Device memory for one direction, allocated on first use. Not thread-safe; the Lane holds its lock."""

    def __init__(self, direction: Direction, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self._direction = direction
        self._placement = placement
        self._config = config
        self._mover = mover
        self._memory: torch.Tensor | None = None
        self._free: list[Event] = []
        """For each slot, the event after which the slot may be written again."""
        self._turn = 0
        self._kernels: Stream | None = None
        self._timed: deque[tuple[Event, Event, int]] = deque()
        """Begin, end and size of copies whose rate is not known yet."""
        self._rates: list[float] = []
        """Rates of the copies that finished since the last decision, in GB/s."""
        self._best_gbs = 0.0

    def run(self, part: Slice, host: Placement, path: PathName, copies: Stream, after: Event | None) -> Event:
        """Submit a staged slice that waits for `after`. Return the end event of the slice.

        Slices end in the order of the calls.
        """
        slot = self._take()
        self._check_rate()
        assert self._kernels is not None
        assert self._memory is not None
        kernels, free, end = self._kernels, self._free[slot], Event(timing=True, blocking=True)
        base = self._memory.data_ptr() + slot * self._config.chunk_bytes
        self._free[slot] = end
        try:
            if self._direction is Direction.D2H:
                kernels.wait(free)
                if after is not None:
                    kernels.wait(after)
                self._copy_on_device(part, DST, base, kernels)
                copies.wait(kernels.record())
                self._copy_over_link(part, path, CopyContext(self._placement, host, copies), SRC, base, end)
                return end
            copies.wait(free)
            arrived = Event(timing=True)
            self._copy_over_link(part, path, CopyContext(host, self._placement, copies), DST, base, arrived)
            kernels.wait(arrived)
            self._copy_on_device(part, SRC, base, kernels)
            return kernels.record(end)
        except BaseException:
            copies.wait(kernels.record())  # the slot is free after the work that was submitted
            copies.record(end)
            raise

    def _copy_over_link(
        self, part: Slice, path: PathName, context: CopyContext, row: int, base: int, end: Event
    ) -> None:
        """Copy a slice between the host and the slot at `base`, and record `end` after the copy."""
        assert context.stream is not None
        begin = context.stream.record(Event(timing=True)) if part.nbytes >= _TIMED_BYTES else None
        self._mover(path, context, Pieces(_based(part.tables[0], row, base)))
        context.stream.record(end)
        if begin is not None:
            self._timed.append((begin, end, part.nbytes))

    def _copy_on_device(self, part: Slice, row: int, base: int, kernels: Stream) -> None:
        """Copy the pieces of a slice between the cache and the slot at `base`."""
        pieces = part.tables[1]
        assert pieces is not None
        context = CopyContext(self._placement, self._placement, kernels, blocks=self._config.gather_blocks)
        self._mover("gather", context, Pieces(_based(pieces, row, base)))

    def _check_rate(self) -> None:
        """Replace the kernel stream if copies are slow. A decision needs _JUDGED copies since the previous decision."""
        while self._timed and self._timed[0][1].query():
            begin, end, nbytes = self._timed.popleft()
            self._rates.append(nbytes / begin.elapsed(end) / 1e6)
        if len(self._rates) < _JUDGED:
            return
        self._best_gbs = max(self._best_gbs, *self._rates)
        slow = statistics.median(self._rates) < _SLOW * self._best_gbs
        self._rates.clear()
        if slow:
            assert self._kernels is not None
            before, self._kernels = self._kernels, Stream(self._placement, priority=_FIRST)
            self._kernels.wait(before.record())  # so that slices end in order

    def _take(self) -> int:
        """Return the next slot. Allocates the ring on first use."""
        if not self._free:
            config = self._config
            nbytes = config.chunk_bytes * config.num_chunks
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._placement.torch)
            # Kernels on torch's current stream may still use the memory that torch.empty returned.
            ready = Stream.wrap(torch.cuda.current_stream(self._placement.torch)).record()
            self._kernels = Stream(self._placement, priority=_FIRST)
            self._free = [ready] * config.num_chunks
            costs, sides = saved_costs(self._placement), (self._placement, PINNED)
            if costs is not None:
                link = CopyContext(*(sides if self._direction is Direction.D2H else sides[::-1]), None)
                self._best_gbs = max(self._best_gbs, costs.links.get(cost_key(link), 0.0))
        self._turn += 1
        return self._turn % len(self._free)

    def close(self) -> None:
        """Free the memory. All work that used the memory must be done."""
        if self._kernels is not None:
            self._kernels.synchronize()
        self._memory, self._kernels, self._free = None, None, []
        self._timed.clear()


def _based(table: I64, row: int, base: int) -> I64:
    """Return a copy of the table with `base` added to its row `row`. The sums are addresses in staging memory."""
    placed = table.copy()
    placed[row] += base
    return placed
