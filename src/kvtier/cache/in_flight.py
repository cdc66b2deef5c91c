"""TransferTracker: the transfers in flight and their leases.

    start ──> blocks are READING in the source and WRITING in the target ──(results of all ranks)──> READY or removed

Each transfer holds a lease until the transfer ends. The lease keeps the source and target slots from being evicted or
reused, even if the request ends or the cache is reset. A reset removes all blocks from the tree. Transfers in flight
continue, but their blocks do not become readable. Their target slots are freed when the transfers end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.errors import ArgumentError, StateError
from kvtier.index import Lease, RadixTree, Slots, Tier
from kvtier.index.node import mask_and
from kvtier.index.tier import tenant_of
from kvtier.index.transitions import begin_read, end_read, end_write
from kvtier.messages import KEY_BYTES, Drop, Plan, Probe, Route, TransferRequest, TransferResult, slot_bytes

Mask = bytes
"""One byte per block, 1 or 0. The type is bytes, because Python searches, counts and slices bytes fast."""


@dataclass(slots=True)
class RouteStats:
    """Statistics of one route, or of one store on this route."""

    route: Route
    store: str
    num_in_flight: int = 0  # blocks
    num_blocks: int = 0  # blocks that arrived
    num_bytes: int = 0
    num_failed: int = 0  # blocks
    seconds: float = 0.0  # sum of the durations of all transfers that have ended


@dataclass(slots=True)
class PendingTransfer:
    """A transfer in flight: blocks [first, stop) of a lease's path."""

    transfer: TransferRequest
    stats: RouteStats
    lease: Lease
    first: int
    source: Tier | None  # None for a store, or for the device of another engine
    target: Tier | None  # None for a store, or for the device of another engine
    epoch: int  # TransferTracker.epoch at the start of the transfer
    waiting_for: set[int]
    """Ranks that have not reported a result."""
    arrived: Mask
    """1 for each block that no rank reported as failed, otherwise 0. After the last result, blocks with 1 become
    readable in the target tier. If the cache was reset during the transfer, the last result sets all bytes to 0."""
    seconds: float = 0.0
    """Duration on the slowest rank."""
    num_bytes: int = 0
    """Sum over all ranks."""

    @property
    def count(self) -> int:
        return len(self.arrived)

    @property
    def stop(self) -> int:
        return self.first + len(self.arrived)


class TransferTracker:
    """Plans transfers and applies their results. Each of the `num_ranks` ranks executes every transfer."""

    def __init__(self, tree: RadixTree, num_ranks: int) -> None:
        self.epoch = 0
        """Incrementing the epoch invalidates all transfers in flight. Their slots are freed when the results arrive."""
        self.num_ranks = num_ranks
        self._tree = tree
        self._tiers = {tier.name: tier for tier in tree.tiers}
        self._ids = itertools.count(1)
        self._plan_ids = itertools.count(1)
        self._planned: list[TransferRequest] = []
        self._probes: list[Probe] = []
        self._drops: list[Drop] = []
        self._unanswered: dict[int, set[int]] = {}
        """Probe id -> ranks that have not answered the probe."""
        self.in_flight: dict[int, PendingTransfer] = {}
        self._stats: dict[tuple[Route, str], RouteStats] = {}

    @property
    def leases(self) -> list[Lease]:
        return [pending.lease for pending in self.in_flight.values()]

    @property
    def has_plan(self) -> bool:
        """True if the next plan is not empty."""
        return bool(self._planned or self._probes or self._drops)

    def num_blocks(self, route: Route, store: str = "") -> int:
        """Count the blocks in flight on a route. `store` is empty for the routes between device and host."""
        stats = self._stats.get((route, store))
        return stats.num_in_flight if stats is not None else 0

    @property
    def counts(self) -> dict[Route, RouteStats]:
        """Statistics of each route, summed over all stores."""
        counts = {route: RouteStats(route, "") for route in Route}
        for stats in self._stats.values():
            total = counts[stats.route]
            total.num_in_flight += stats.num_in_flight
            total.num_blocks += stats.num_blocks
            total.num_bytes += stats.num_bytes
            total.num_failed += stats.num_failed
            total.seconds += stats.seconds
        return counts

    def start(
        self,
        route: Route,
        lease: Lease,
        first: int,
        source: Tier | Slots | str,
        target: Slots | str,
        keys: bytes = b"",
    ) -> int:
        """Plan a transfer of consecutive blocks on a lease's path, starting at block `first`. Return the transfer id.

        `source` is a tier, the name of a store, or slots on the device of another engine (cache/foreign.py). `target`
        is the name of a store, or slots in a tier or on the device of another engine. In a target tier, the blocks must
        already be WRITING (see `begin_write` and `graft`). The transfer becomes the owner of the lease.
        """
        target_name, target_slots = _endpoint(target)
        count = len(target) if isinstance(target, Slots) else len(keys) // KEY_BYTES
        if isinstance(source, Tier):
            source_tier, source_name = source, source.name
            source_slots = slot_bytes(begin_read(lease, source, first, count))
        else:
            source_tier, (source_name, source_slots) = None, _endpoint(source)
        number = next(self._ids)
        tenant = tenant_of(lease.chain.salt) if route is Route.HOST_TO_STORE else b""
        transfer = TransferRequest(number, route, source_name, target_name, source_slots, target_slots, keys, tenant)
        self._planned.append(transfer)
        link = route, transfer.store
        stats = self._stats.get(link)
        if stats is None:
            stats = self._stats[link] = RouteStats(*link)
        stats.num_in_flight += count
        target_tier, waiting, arrived = self._tiers.get(target_name), set(range(self.num_ranks)), b"\1" * count
        self.in_flight[number] = PendingTransfer(
            transfer, stats, lease, first, source_tier, target_tier, self.epoch, waiting, arrived
        )
        return number

    def probe(self, store: str, keys: bytes = b"") -> int:
        """Plan a lookup of `keys` in a store, or of all keys if `keys` is empty. Return the probe's id."""
        self._probes.append(Probe(next(self._ids), store, keys))
        self._unanswered[self._probes[-1].id] = set(range(self.num_ranks))
        return self._probes[-1].id

    def on_probe_result(self, rank: int, probe_id: int) -> bool:
        """Record a rank's answer to a probe. Return True if this was the last missing answer."""
        waiting_for = self._unanswered.get(probe_id, set())
        waiting_for.discard(rank)
        return not waiting_for and self._unanswered.pop(probe_id, None) is not None

    def drop(self, drop: Drop) -> None:
        self._drops.append(drop)

    def plan(self) -> Plan:
        """Return the transfers, probes and drops that were added since the last plan."""
        planned, probes, drops = tuple(self._planned), tuple(self._probes), tuple(self._drops)
        self._planned, self._probes, self._drops = [], [], []
        return Plan(next(self._plan_ids), self.epoch, planned, probes, drops)

    def apply(self, rank: int, result: TransferResult) -> PendingTransfer | None:
        """Apply a rank's result. Return the transfer if every rank has reported a result, otherwise None.

        A block counts as arrived if it arrived on every rank. The caller must release the lease of a returned transfer.
        """
        pending = self.in_flight.get(result.transfer_id)
        if pending is None or rank not in pending.waiting_for:
            raise StateError(f"rank {rank} reported transfer {result.transfer_id}, which is not in flight on this rank")
        if result.arrived and len(result.arrived) != pending.count:
            raise ArgumentError(
                f"transfer {result.transfer_id} has {pending.count} blocks, but its result has {len(result.arrived)}"
            )
        pending.waiting_for.discard(rank)
        if result.arrived:
            pending.arrived = mask_and(pending.arrived, result.arrived)
        elif not result.ok:
            pending.arrived = bytes(pending.count)
        pending.seconds = max(pending.seconds, result.seconds)
        pending.num_bytes += result.num_bytes
        pending.stats.num_bytes += result.num_bytes
        if pending.waiting_for:
            return None
        self._finish(pending)
        return pending

    def _finish(self, pending: PendingTransfer) -> None:
        stats, count, num_arrived = pending.stats, pending.count, pending.arrived.count(1)
        del self.in_flight[pending.transfer.id]
        stats.num_in_flight -= count
        stats.num_blocks += num_arrived
        stats.num_failed += count - num_arrived
        stats.seconds += pending.seconds
        if pending.epoch != self.epoch:
            pending.arrived = bytes(count)
        arrived, target = pending.arrived, pending.target
        if target is not None and 0 not in arrived:
            end_write(self._tree, pending.lease, target, pending.first, count, ok=True)
        elif target is not None:
            for ok in (True, False):
                for first, stop in mask_runs(arrived, pending.first, value=ok):
                    end_write(self._tree, pending.lease, target, first, stop - first, ok=ok)
        if pending.source is not None:
            end_read(pending.lease, pending.source, pending.first, count)


def _endpoint(end: Slots | str) -> tuple[str, bytes]:
    return (end, b"") if isinstance(end, str) else (end.tier, slot_bytes(end.ids))


def mask_runs(mask: Mask, start: int, value: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the runs [first, stop) of `value` in a mask. The first byte of the mask has the index `start`."""
    first = mask.find(value)
    while first >= 0:
        stop = mask.find(1 - value, first)
        stop = len(mask) if stop < 0 else stop
        yield start + first, start + stop
        first = mask.find(value, stop)
