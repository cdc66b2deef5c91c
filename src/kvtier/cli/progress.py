"""A progress bar on standard error, only where somebody watches."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line that says how far it is; nothing unless standard error is a terminal."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit = total, unit
        self._show = sys.stderr.isatty()
        self._last = 0.0

    def update(self, num_done: int, note: str = "") -> None:
        """Rewrite the line, ten times a second at most."""
        now = time.monotonic()
        if self._show and (now - self._last > 0.1 or num_done >= self._total):
            self._last = now
            filled = 30 * num_done // max(1, self._total)
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {num_done}/{self._total} {self._unit} {note}\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._show:
            sys.stderr.write("\n")
