"""Moves: the transfers a manager has planned and not heard of yet, and what they hold until then.

    planned: begin_write(target), begin_read(source), a lease  ──every rank's outcome──>  end_write, end_read, release

A move holds a lease of its own, so neither side of it can be evicted or reused while it runs, whoever finishes, aborts
or resets meanwhile. After a reset its blocks are out of the tree; its slots are freed when it is over, and nothing of
it becomes readable.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvtier.cache.plan import Outcome, Plan, Purpose, Report, Transfer, slot_bytes
from kvtier.errors import ArgumentError, StateError
from kvtier.index import Lease, RadixTree, Slots, Tier
from kvtier.index.pool import I32
from kvtier.index.transfers import begin_read, begin_write, end_read, end_write


@dataclass(slots=True)
class Move:
    """One transfer under way: blocks [first, first + count) of a lease's path."""

    transfer: Transfer
    lease: Lease
    source: Tier
    target: Tier
    first: int
    count: int
    epoch: int
    waiting_for: set[int]
    """Ranks that have not reported it."""
    ok: bool = True


@dataclass(slots=True)
class MoveCounts:
    """What became of moves so far."""

    num_blocks: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    num_bytes: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    num_failed: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))


class Moves:
    """Plans transfers and takes their reports, for `num_ranks` ranks that each do every transfer."""

    def __init__(self, tree: RadixTree, num_ranks: int = 1) -> None:
        self.counts = MoveCounts()
        self.epoch = 0
        self._tree = tree
        self._num_ranks = num_ranks
        self._ids = itertools.count(1)
        self._plan_ids = itertools.count(1)
        self._planned: list[Transfer] = []
        self._in_flight: dict[int, Move] = {}

    @property
    def leases(self) -> list[Lease]:
        """What moves hold, for checking."""
        return [move.lease for move in self._in_flight.values()]

    def num_blocks(self, purpose: Purpose) -> int:
        """Blocks under way."""
        return sum(move.count for move in self._in_flight.values() if move.transfer.purpose is purpose)

    def start(
        self, purpose: Purpose, lease: Lease, source: Tier, sources: I32, target: Tier, targets: Slots, first: int
    ) -> int:
        """Plan to move blocks of a path; the move owns the lease from now on. Returns its id."""
        begin_write(lease, target, first, targets)
        begin_read(lease, source, first, len(targets))
        number = next(self._ids)
        slots = slot_bytes(sources), slot_bytes(targets.ids)
        transfer = Transfer(number, purpose, source.name, target.name, *slots)
        self._planned.append(transfer)
        self._in_flight[number] = Move(
            transfer, lease, source, target, first, len(targets), self.epoch, set(range(self._num_ranks))
        )
        return number

    def plan(self) -> Plan:
        """What was planned since the last plan."""
        planned, self._planned = tuple(self._planned), []
        return Plan(next(self._plan_ids), self.epoch, planned)

    def apply(self, report: Report) -> None:
        """Take a rank's outcomes. A move is over when every rank has reported it, and good if all of them say so."""
        if not 0 <= report.rank < self._num_ranks:
            raise ArgumentError(f"a report of rank {report.rank}, there are {self._num_ranks}")
        for outcome in report.outcomes:
            self._take(report.rank, outcome)

    def reset(self) -> None:
        """What is in flight counts for nothing from now on; its slots come back with its reports."""
        self.epoch += 1

    def _take(self, rank: int, outcome: Outcome) -> None:
        move = self._in_flight.get(outcome.transfer_id)
        if move is None or rank not in move.waiting_for:
            raise StateError(f"transfer {outcome.transfer_id} was reported by rank {rank}, which had none to report")
        move.waiting_for.discard(rank)
        move.ok = move.ok and outcome.ok
        self.counts.num_bytes[move.transfer.purpose] += outcome.num_bytes
        if not move.waiting_for:
            self._finish(move)

    def _finish(self, move: Move) -> None:
        purpose, is_current = move.transfer.purpose, move.epoch == self.epoch
        del self._in_flight[move.transfer.id]
        self.counts.num_failed[purpose] += not move.ok
        self.counts.num_blocks[purpose] += move.count if move.ok else 0
        end_write(self._tree, move.lease, move.target, move.first, move.count, ok=move.ok and is_current)
        end_read(move.lease, move.source, move.first, move.count)
        self._tree.release(move.lease, used=False)
