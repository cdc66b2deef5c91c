"""Timeline: records the times of all ops and copies and writes a trace file for chrome://tracing or Perfetto."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.memory import CopyResult, Event, Placement, Stream


@dataclass(slots=True)
class TimelineSpan:
    """One op or copy. `start` and `end` are in seconds of time.perf_counter."""

    name: str
    track: str
    """Thread or stream of the op: "engine", "executor", "engine stream" or "executor stream"."""
    phase: int
    """Phase of the op's batch. ADD and REMOVE belong to no batch: their `phase` and `step` are -1."""
    step: int
    num_rows: int
    start: float = 0.0
    end: float = 0.0
    copied_bytes: int = 0
    num_pieces: int = 0
    """Number of copies after merging adjacent copies."""

    def copied(self, result: CopyResult) -> None:
        self.copied_bytes, self.num_pieces = result.nbytes, result.num_entries


class Timeline:
    """Records spans from any thread.

    `spans` contains the times of ops and copies on the host, where device work is only enqueued. `stream_spans` returns
    the times at which streams ran this work, measured with events. The clock of a GPU is aligned with the clock of the
    host once, with an accuracy of about 10 us.
    """

    def __init__(self) -> None:
        self._spans: list[TimelineSpan] = []
        # The span, a reference event, the host time of the reference event, and the events before and after the span.
        self._on_streams: list[tuple[TimelineSpan, Event, float, Event, Event]] = []
        self._origins: dict[Placement, tuple[Event, float]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(
        self, name: str, *, track: str, phase: int, step: int, num_rows: int, stream: Stream | None = None
    ) -> Iterator[TimelineSpan]:
        """Record the times of the `with` body and of the work that it enqueues on `stream`, even if the body raises."""
        origin, begin = self._origin(stream), _mark(stream)
        span = TimelineSpan(name, track, phase, step, num_rows, time.perf_counter())
        try:
            yield span
        finally:
            span.end = time.perf_counter()
            end = _mark(stream)
            with self._lock:
                self._spans.append(span)
                if origin is not None and begin is not None and end is not None:
                    self._on_streams.append((span, *origin, begin, end))

    @property
    def spans(self) -> tuple[TimelineSpan, ...]:
        """Finished spans with host times, ordered by end time."""
        with self._lock:
            return tuple(self._spans)

    def stream_spans(self) -> tuple[TimelineSpan, ...]:
        """Wait for the work on streams and return the spans of successful work, in the order of `spans`."""
        with self._lock:
            recorded = tuple(self._on_streams)
        spans = []
        for span, origin, origin_time, begin, end in recorded:
            with contextlib.suppress(Exception):  # skip failed work; Stream.synchronize raises the error
                start, stop = (origin_time + origin.elapsed(place) / 1e3 for place in (begin, end))
                spans.append(replace(span, track=f"{span.track} stream", start=start, end=stop))
        return tuple(spans)

    def save(self, path: str | Path) -> int:
        """Write the trace file. Return the number of spans in the file."""
        spans = (*self.spans, *self.stream_spans())
        zero = min((span.start for span in spans), default=0.0)
        tracks = {track: number for number, track in enumerate(sorted({span.track for span in spans}))}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events += (_event(span, tracks[span.track], zero) for span in spans)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return len(spans)

    def _origin(self, stream: Stream | None) -> tuple[Event, float] | None:
        """Return the reference event of a stream's placement and its host time. Without a stream, return None."""
        if stream is None:
            return None
        with self._lock:
            if stream.placement not in self._origins:
                origin = stream.record(Event(timing=True))
                origin.settle()
                self._origins[stream.placement] = (origin, time.perf_counter())
            return self._origins[stream.placement]


def _mark(stream: Stream | None) -> Event | None:
    return None if stream is None else stream.record(Event(timing=True))


def _event(span: TimelineSpan, track: int, zero: float) -> dict[str, object]:
    args = {"phase": span.phase, "step": span.step, "rows": span.num_rows, "bytes": span.copied_bytes}
    if span.num_pieces:
        args["pieces"] = span.num_pieces
    times = {"ts": (span.start - zero) * 1e6, "dur": (span.end - span.start) * 1e6}
    return {"name": span.name, "cat": "batch", "ph": "X", **times, "pid": 0, "tid": track, "args": args}
