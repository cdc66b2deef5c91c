"""TransferMeter: bytes and recent rate of transfers between tiers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.messages import Plan, Report

WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes moved from one tier to another."""

    source: str
    target: str
    num_bytes: int
    """Since the start."""
    bytes_per_second: float
    """Over the last WINDOW_SECONDS."""


class TransferMeter:
    """Measures transfers from their plans and reports. For the engine thread."""

    def __init__(self, clock: Callable[[], float], num_ranks: int = 1) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._in_flight: dict[int, tuple[str, str]] = {}
        self._num_reports: Counter[int] = Counter()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._recent: dict[tuple[str, str], deque[tuple[float, int]]] = defaultdict(deque)

    def began(self, plan: Plan) -> None:
        """Record the transfers of a plan."""
        for transfer in plan.transfers:
            self._in_flight[transfer.id] = (transfer.source, transfer.target)

    def done(self, report: Report) -> None:
        """Count the bytes of a report."""
        now = self._clock()
        for result in report.results:
            direction = self._direction(result.transfer_id)
            if direction is not None and result.num_bytes:
                self._totals[direction] += result.num_bytes
                self._recent[direction].append((now, result.num_bytes))
                _expire(self._recent[direction], now)

    def _direction(self, transfer_id: int) -> tuple[str, str] | None:
        """Return source and target of a transfer; forget it after the report of the last rank."""
        self._num_reports[transfer_id] += 1
        if self._num_reports[transfer_id] < self._num_ranks:
            return self._in_flight.get(transfer_id)
        del self._num_reports[transfer_id]
        return self._in_flight.pop(transfer_id, None)

    def traffic(self) -> list[TierTraffic]:
        """Return the traffic of every direction used so far."""
        now = self._clock()
        rows = []
        for direction, num_bytes in self._totals.items():
            recent = self._recent[direction]
            _expire(recent, now)
            rows.append(TierTraffic(*direction, num_bytes, sum(size for _, size in recent) / WINDOW_SECONDS))
        return rows


def _expire(recent: deque[tuple[float, int]], now: float) -> None:
    while recent and recent[0][0] < now - WINDOW_SECONDS:
        recent.popleft()
