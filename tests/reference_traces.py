"""Traces with known hit rates.

One trace is in tests/data. The other is the Mooncake conversation trace. It is used only if the environment variable
KVTIER_TRACE contains its path.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvtier.replay import TraceRequest, read_trace

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class ReferenceTrace:
    path: Path
    num_blocks: int
    capacities: tuple[int, ...]
    hit_rates: dict[str, list[float]]
    """Hit rates by policy, one for each capacity."""
    tolerance: float
    ghost_error: float
    """Limit for the error that the ghost cache reports for its hit rates. The limit is higher for a short trace."""

    @property
    def requests(self) -> tuple[TraceRequest, ...]:
        return _requests(self.path)

    def hit_rate(self, policy: str, capacity: int) -> float:
        return self.hit_rates[policy][self.capacities.index(capacity)]


@cache
def _requests(path: Path) -> tuple[TraceRequest, ...]:
    trace = read_trace(path)
    assert not trace.problems
    return trace.requests


def _committed() -> ReferenceTrace:
    """Return the trace that tests/data/make_trace.py generates."""
    known = json.loads((DATA / "hits.json").read_text())
    rates = {policy: [hits / known["num_blocks"] for hits in row] for policy, row in known["hits"].items()}
    return ReferenceTrace(DATA / "trace.jsonl", known["num_blocks"], tuple(known["capacities"]), rates, 1e-9, 0.1)


def _conversation(path: str) -> ReferenceTrace:
    """Return the conversation trace with the hit rates that an independent simulator computed to four digits.

    "fifo" evicts the oldest leaf of the tree. "optimum" is Belady's policy, which may also refuse to cache a block.
    """
    rates = {
        "lru": [0.0470, 0.1237, 0.2243, 0.3448, 0.3715, 0.3795],
        "fifo": [0.0470, 0.1209, 0.2189, 0.3426, 0.3704, 0.3794],
        "optimum": [0.1870, 0.3541, 0.3819, 0.3819, 0.3819, 0.3819],
    }
    return ReferenceTrace(Path(path), 276_491, (1_000, 5_000, 10_000, 30_000, 50_000, 100_000), rates, 1e-4, 0.06)


COMMITTED = _committed()
TRACES = [COMMITTED, *([_conversation(os.environ["KVTIER_TRACE"])] if "KVTIER_TRACE" in os.environ else [])]
