"""Counts calls of a store."""

from __future__ import annotations

import threading
from enum import Enum

from kvtier.storage.store import Results, StoreStats, Traffic


class Kind(Enum):
    """The calls that are counted."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"
    REMOVAL = "removal"


class Meter:
    """Traffic by kind, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = {kind: Traffic() for kind in Kind}

    def count(self, kind: Kind, results: Results) -> Results:
        """Add a call; returns its results."""
        with self._lock:
            self._traffic[kind] = self._traffic[kind].plus(results)
        return results

    @property
    def stats(self) -> StoreStats:
        """The traffic; what the store holds is for the store to fill in."""
        with self._lock:
            of = self._traffic
            return StoreStats(of[Kind.LOOKUP], of[Kind.READ], of[Kind.WRITE], of[Kind.REMOVAL])
