"""TransferTracker: the transfers a manager has planned and not heard of yet, and what they hold until then.

    planned: WRITING in the target, READING in the source, a lease  ──every rank's outcome──>  READY or gone, released

A move holds a lease of its own, so neither side of it can be evicted or reused while it runs, whoever finishes, aborts
or resets meanwhile. After a reset its blocks are out of the tree; its slots are freed when it is over, and nothing of
it becomes readable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtier.errors import ArgumentError, StateError
from kvtier.index import Lease, RadixTree, Slots, Tier
from kvtier.index.transitions import begin_read, end_read, end_write
from kvtier.messages import Drop, Plan, Probe, Report, Route, TransferRequest, TransferResult, slot_bytes

Mask = bytes
"""One byte for each block, 1 or 0: find, count and slices of bytes are the cheapest vector operations Python has."""


@dataclass(slots=True)
class RouteStats:
    """What goes for one purpose, of fetches and stores from and to one store, in numbers."""

    route: Route
    store: str
    num_in_flight: int = 0
    """Blocks under way."""
    num_blocks: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class PendingTransfer:
    """One transfer under way: blocks [first, first + count) of a lease's path."""

    transfer: TransferRequest
    stats: RouteStats
    lease: Lease
    first: int
    source: Tier | None
    target: Tier | None
    epoch: int
    waiting_for: set[int]
    """Ranks that have not reported it."""
    arrived: Mask
    """Blocks no rank has reported lost."""
    seconds: float = 0.0
    """Of the slowest rank."""

    @property
    def count(self) -> int:
        """Its blocks."""
        return len(self.arrived)

    @property
    def stop(self) -> int:
        """One past its last block."""
        return self.first + len(self.arrived)


@dataclass(slots=True)
class TransferCounts:
    """What became of moves so far."""

    num_blocks: dict[Route, int] = field(default_factory=lambda: dict.fromkeys(Route, 0))
    num_bytes: dict[Route, int] = field(default_factory=lambda: dict.fromkeys(Route, 0))
    num_failed: dict[Route, int] = field(default_factory=lambda: dict.fromkeys(Route, 0))
    """Blocks that did not arrive."""
    seconds: dict[Route, float] = field(default_factory=lambda: dict.fromkeys(Route, 0.0))


class TransferTracker:
    """Plans transfers and takes their reports, for `num_ranks` ranks that each do every transfer."""

    def __init__(self, tree: RadixTree, num_ranks: int, on_end: Callable[[PendingTransfer, Mask], None]) -> None:
        """`on_end` is told of each move that is over, and which of its blocks are where they should be."""
        self.epoch = 0
        self.num_ranks = num_ranks
        self._tree = tree
        self._tiers = {tier.name: tier for tier in tree.tiers}
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._plan_ids = itertools.count(1)
        self._planned: list[TransferRequest] = []
        self._probes: list[Probe] = []
        self._drops: list[Drop] = []
        self._asked: dict[int, set[int]] = {}
        self._in_flight: dict[int, PendingTransfer] = {}
        self._ways: dict[tuple[Route, str], RouteStats] = {}

    @property
    def leases(self) -> list[Lease]:
        """What moves hold, for checking."""
        return [move.lease for move in self._in_flight.values()]

    @property
    def in_flight(self) -> bool:
        """Whether some report is still to come."""
        return bool(self._in_flight)

    def is_in_flight(self, transfer_id: int) -> bool:
        """Whether some rank has not told what became of a transfer."""
        return transfer_id in self._in_flight

    @property
    def has_plan(self) -> bool:
        """Whether something was planned that no plan has told yet."""
        return bool(self._planned or self._probes or self._drops)

    def num_blocks(self, purpose: Route, store: str = "") -> int:
        """Blocks under way; of fetches and stores, from and to one store."""
        way = self._ways.get((purpose, store))
        return way.num_in_flight if way is not None else 0

    @property
    def counts(self) -> TransferCounts:
        """What became of moves so far, by purpose."""
        counts = TransferCounts()
        for way in self._ways.values():
            counts.num_blocks[way.route] += way.num_blocks
            counts.num_bytes[way.route] += way.num_bytes
            counts.num_failed[way.route] += way.num_failed
            counts.seconds[way.route] += way.seconds
        return counts

    def start(
        self,
        purpose: Route,
        lease: Lease,
        first: int,
        source: Slots | str,
        target: Slots | str,
        keys: bytes = b"",
    ) -> int:
        """Plan to move blocks [first, ..) of a path. The move owns the lease from now on. Returns its id.

        Each end is slots of a tier, or the name of a store. What is written in a tier is WRITING already
        (`begin_write`, or a graft).
        """
        source_tier, source_name, source_slots = self._end(source)
        target_tier, target_name, target_slots = self._end(target)
        number = next(self._ids)
        transfer = TransferRequest(number, purpose, source_name, target_name, source_slots, target_slots, keys)
        count = transfer.num_blocks
        if source_tier is not None:
            begin_read(lease, source_tier, first, count)
        self._planned.append(transfer)
        store = transfer.store
        way = self._ways.get((purpose, store))
        if way is None:
            way = self._ways[purpose, store] = RouteStats(purpose, store)
        way.num_in_flight += count
        waiting, arrived = set(range(self.num_ranks)), b"\1" * count
        self._in_flight[number] = PendingTransfer(
            transfer, way, lease, first, source_tier, target_tier, self.epoch, waiting, arrived
        )
        return number

    def _end(self, end: Slots | str) -> tuple[Tier | None, str, bytes]:
        if isinstance(end, str):
            return None, end, b""
        return self._tiers[end.tier], end.tier, slot_bytes(end.ids)

    def probe(self, store: str, keys: bytes = b"") -> int:
        """Ask a store which of these it has, or for all that it has. Returns the probe's id."""
        self._probes.append(Probe(next(self._ids), store, keys))
        self._asked[self._probes[-1].id] = set(range(self.num_ranks))
        return self._probes[-1].id

    def on_probe_result(self, rank: int, probe_id: int) -> bool:
        """A rank has answered a probe; whether that was the last."""
        waiting_for = self._asked.get(probe_id, set())
        waiting_for.discard(rank)
        return not waiting_for and self._asked.pop(probe_id, None) is not None

    def drop(self, drop: Drop) -> None:
        """Tell a store to forget."""
        self._drops.append(drop)

    def plan(self) -> Plan:
        """What was planned since the last plan."""
        planned, probes, drops = tuple(self._planned), tuple(self._probes), tuple(self._drops)
        self._planned, self._probes, self._drops = [], [], []
        return Plan(next(self._plan_ids), self.epoch, planned, probes, drops)

    def apply(self, report: Report) -> None:
        """Take a rank's outcomes. A move is over when every rank has reported it; a block arrived if all say so."""
        if not 0 <= report.rank < self.num_ranks:
            raise ArgumentError(f"a report of rank {report.rank}, there are {self.num_ranks}")
        for outcome in report.results:
            self._take(report.rank, outcome)

    def reset(self) -> None:
        """What is in flight counts for nothing from now on; its slots come back with its reports."""
        self.epoch += 1

    def _take(self, rank: int, outcome: TransferResult) -> None:
        move = self._in_flight.get(outcome.transfer_id)
        if move is None or rank not in move.waiting_for:
            raise StateError(f"transfer {outcome.transfer_id} was reported by rank {rank}, which had none to report")
        if outcome.arrived and len(outcome.arrived) != move.count:
            raise ArgumentError(
                f"transfer {outcome.transfer_id} has {move.count} blocks, its outcome tells of {len(outcome.arrived)}"
            )
        move.waiting_for.discard(rank)
        if outcome.arrived:
            move.arrived = mask_and(move.arrived, outcome.arrived)
        elif not outcome.ok:
            move.arrived = bytes(move.count)
        move.seconds = max(move.seconds, outcome.seconds)
        move.stats.num_bytes += outcome.num_bytes
        if not move.waiting_for:
            self._finish(move)

    def _finish(self, move: PendingTransfer) -> None:
        way, count, num_arrived = move.stats, move.count, move.arrived.count(1)
        del self._in_flight[move.transfer.id]
        way.num_in_flight -= count
        way.num_blocks += num_arrived
        way.num_failed += count - num_arrived
        way.seconds += move.seconds
        there = move.arrived if move.epoch == self.epoch else bytes(count)
        if move.target is not None and 0 not in there:
            end_write(self._tree, move.lease, move.target, move.first, count, ok=True)
        elif move.target is not None:
            for ok in (True, False):
                for first, stop in mask_runs(there, move.first, value=ok):
                    end_write(self._tree, move.lease, move.target, first, stop - first, ok=ok)
        if move.source is not None:
            end_read(move.lease, move.source, move.first, count)
        self._on_end(move, there)
        self._tree.release(move.lease, used=False)


def mask_runs(mask: Mask, start: int, value: int = 1) -> Iterator[tuple[int, int]]:
    """The stretches [first, stop) where a mask has a value, numbered from `start`: mostly none or one."""
    first = mask.find(value)
    while first >= 0:
        stop = mask.find(1 - value, first)
        stop = len(mask) if stop < 0 else stop
        yield start + first, start + stop
        first = mask.find(value, stop)


def mask_and(one: Mask, other: Mask) -> Mask:
    """Where both masks are 1."""
    if 0 not in other:
        return one
    return (int.from_bytes(one, "little") & int.from_bytes(other, "little")).to_bytes(len(one), "little")
