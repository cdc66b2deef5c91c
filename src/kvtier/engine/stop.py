"""Stop texts in a stream: nothing that may turn out to be the beginning of one is let out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """What may be shown now."""

    text: str
    stopped: str | None
    """The stop text that was found; the output ends before it."""


class StopChecker:
    """Feed it a text piece by piece; it gives back what can no longer be part of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def feed(self, piece: str) -> Released:
        """Add a piece. Once a stop text was found, feed nothing more."""
        if not self._stops:
            return Released(piece, None)
        text = self._held + piece
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            self._held = ""
            return Released(text[: found[0]], found[1])
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return Released(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The rest, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
