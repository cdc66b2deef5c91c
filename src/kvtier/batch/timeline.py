"""Timeline: when each op of each batch ran, as a trace file for Chrome (chrome://tracing) or Perfetto."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Span:
    """One thing that took time. `copied_bytes` are those of its BatchCopy, filled before it ends."""

    name: str
    track: str
    phase: int
    step: int
    num_rows: int
    start: float
    end: float = 0.0
    copied_bytes: int = 0


class Timeline:
    """Spans as they happen, from any thread. Host time: device work shows when it is enqueued, not when it runs."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, *, track: str, phase: int, step: int, num_rows: int) -> Iterator[Span]:
        """Record what the block takes, also if it raises."""
        span = Span(name, track, phase, step, num_rows, time.perf_counter())
        try:
            yield span
        finally:
            span.end = time.perf_counter()
            with self._lock:
                self._spans.append(span)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans that have ended, in the order of their ends."""
        with self._lock:
            return tuple(self._spans)

    def save(self, path: str | Path) -> int:
        """Write the trace file. Returns the number of spans in it."""
        spans = self.spans
        zero = min((span.start for span in spans), default=0.0)
        events: list[dict[str, object]] = [
            {
                "name": span.name,
                "cat": "batch",
                "ph": "X",
                "ts": (span.start - zero) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "pid": 0,
                "tid": span.track,
                "args": {"phase": span.phase, "step": span.step, "rows": span.num_rows, "bytes": span.copied_bytes},
            }
            for span in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return len(events)
