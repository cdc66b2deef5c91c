"""WriteBudget: counts the bytes that a disk store writes, and limits them per day, because SSDs wear out.

A day is the current hour and the 24 hours before it, so the limit holds in every window of 24 hours. If there is a
limit, the counts are saved in the file WRITTEN, so that restarts do not reset them. The file is updated after each
hundredth of the limit, so a crash loses at most this amount.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.files import write_atomically

WRITTEN = "WRITTEN"
_HOUR_S = 3600
_HOURS = 25  # the current hour and the 24 hours before it


class WriteBudget:
    """Counts the bytes written in each hour. `max_day_bytes` of 0 means no limit. Thread-safe."""

    def __init__(self, folder: str, max_day_bytes: int, clock: Callable[[], float]) -> None:
        self._path, self.max_day_bytes, self._clock = Path(folder) / WRITTEN, max_day_bytes, clock
        self._lock = threading.Lock()
        self._hours: dict[int, int] = {}
        self._unsaved_bytes = 0
        self.written_bytes = 0
        """Bytes written since the store was opened."""

    def load(self) -> None:
        """Read the counts of earlier processes. An unreadable file counts as empty."""
        if self.max_day_bytes:
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                saved = json.loads(self._path.read_text())
                self._hours = {int(hour): int(count) for hour, count in saved["hours"].items() if int(count) >= 0}

    @property
    def day_bytes(self) -> int:
        """Bytes written in the current hour and the 24 hours before it."""
        with self._lock:
            return self._sum()

    def take(self, nbytes: int) -> str:
        """Count bytes that are about to be written. If they would exceed the limit, only return an error message."""
        with self._lock:
            used = self._sum()
            if self.max_day_bytes and used + nbytes > self.max_day_bytes:
                return (
                    f"the limit bytes_per_day is reached: {used} of {self.max_day_bytes} bytes written in 24 hours, "
                    f"{nbytes} more requested"
                )
            hour = int(self._clock() // _HOUR_S)
            self._hours[hour] = self._hours.get(hour, 0) + nbytes
            self.written_bytes += nbytes
            self._unsaved_bytes += nbytes
            if self.max_day_bytes and self._unsaved_bytes * 100 >= self.max_day_bytes:
                self._save()
            return ""

    def save(self) -> None:
        """Write the file, if there is a limit and bytes were counted since the last write of the file."""
        with self._lock:
            if self.max_day_bytes and self._unsaved_bytes:
                self._save()

    def _sum(self) -> int:
        first = int(self._clock() // _HOUR_S) - _HOURS + 1
        for hour in [hour for hour in self._hours if hour < first]:
            del self._hours[hour]
        return sum(self._hours.values())

    def _save(self) -> None:
        """Write the file. A failure is ignored, because this process uses the counts in memory."""
        self._unsaved_bytes = 0
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps({"hours": self._hours}).encode())
