"""TransferMeter: how many bytes went from which tier to which, and how fast lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.messages import Plan, Report

WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """One direction."""

    source: str
    target: str
    num_bytes: int
    """Since the start."""
    bytes_per_second: float
    """Over the last WINDOW_SECONDS."""


@dataclass(slots=True)
class _Direction:
    num_bytes: int = 0
    lately: deque[tuple[float, int]] = field(default_factory=deque)


class TransferMeter:
    """Looks at plans as they begin and at reports as they come. For the engine's thread."""

    def __init__(self, clock: Callable[[], float], num_ranks: int = 1) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._under_way: dict[int, tuple[str, str]] = {}
        self._num_told: Counter[int] = Counter()
        self._directions: dict[tuple[str, str], _Direction] = {}

    def began(self, plan: Plan) -> None:
        """Its transfers are under way."""
        for transfer in plan.transfers:
            self._under_way[transfer.id] = (transfer.source, transfer.target)

    def done(self, report: Report) -> None:
        """Some of them are over."""
        now = self._clock()
        for outcome in report.results:
            ends = self._ends_of(outcome.transfer_id)
            if ends is not None and outcome.num_bytes:
                direction = self._directions.setdefault(ends, _Direction())
                direction.num_bytes += outcome.num_bytes
                direction.lately.append((now, outcome.num_bytes))
                _forget(direction, now)

    def _ends_of(self, transfer_id: int) -> tuple[str, str] | None:
        """Forgotten when every rank has told of it."""
        self._num_told[transfer_id] += 1
        if self._num_told[transfer_id] < self._num_ranks:
            return self._under_way.get(transfer_id)
        del self._num_told[transfer_id]
        return self._under_way.pop(transfer_id, None)

    def traffic(self) -> list[TierTraffic]:
        """Every direction that was ever used."""
        now = self._clock()
        told = []
        for (source, target), direction in self._directions.items():
            _forget(direction, now)
            lately = sum(num_bytes for _, num_bytes in direction.lately)
            told.append(TierTraffic(source, target, direction.num_bytes, lately / WINDOW_SECONDS))
        return told


def _forget(direction: _Direction, now: float) -> None:
    while direction.lately and direction.lately[0][0] < now - WINDOW_SECONDS:
        direction.lately.popleft()
