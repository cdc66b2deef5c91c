"""RequestLog: what the front end counts and remembers of the requests it served. No text of any of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvtier.metrics import Registry

_RECENT = 100
_WINDOW_SECONDS = 300.0
_WINDOW_MOST = 10_000


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that is over."""

    id: str
    tenant: str
    endpoint: str
    ended: float
    """Unix time."""
    finish: str
    """stop, length, or why it ended otherwise: disconnected, timeout, refused, error."""
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_seconds: float | None
    seconds: float
    tokens_from: dict[str, int]
    """Of the cached tokens, where they were found."""
    explanation: str
    """Why the match with the cache ended where it did, and whether blocks were loaded or computed again."""


class RequestLog:
    """Counters for /metrics, a window of times to first token, and the last requests."""

    def __init__(self) -> None:
        self.registry = Registry()
        new = self.registry
        self._requests = new.counter("kvtier_requests_total", "Requests that are over.", ("endpoint", "finish"))
        self._answers = new.counter("kvtier_http_responses_total", "HTTP answers.", ("route", "status"))
        self._tokens = new.counter("kvtier_tokens_total", "Tokens of requests that are over.", ("kind",))
        self._ttft = new.histogram("kvtier_ttft_seconds", "From a request to its first token.").of()
        self._seconds = new.histogram("kvtier_request_seconds", "From a request to its end.").of()
        self._delivery = new.histogram(
            "kvtier_delivery_seconds", "From the engine's step to the event for a client, in the front end."
        ).of()
        self._rows = new.gauge("kvtier_answers", "Answers in the engine, by state.", ("state",))
        self._closed = new.counter(
            "kvtier_connections_closed_total", "Connections closed by the server, by reason.", ("reason",)
        )
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_WINDOW_MOST)

    def http(self, route: str, status: int) -> None:
        """An HTTP answer was given."""
        self._answers.of(route, str(status)).add()

    def connection_closed(self, reason: str) -> None:
        """Count a connection that the server closed: evicted, no_place, slow_headers, idle or stalled."""
        self._closed.of(reason).add()

    def delivered(self, seconds: float) -> None:
        """What a step gave is on its way to a client."""
        self._delivery.observe(seconds)

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        self._requests.of(record.endpoint, record.finish).add()
        self._tokens.of("prompt").add(record.prompt_tokens)
        self._tokens.of("cached").add(record.cached_tokens)
        self._tokens.of("new").add(record.new_tokens)
        self._seconds.observe(record.seconds)
        self._recent.append(record)
        if record.ttft_seconds is not None:
            self._ttft.observe(record.ttft_seconds)
            self._ttfts.append((time.monotonic(), record.ttft_seconds))

    def take(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what the engine is doing (engine_controls.snapshot); its cache has metrics of its own."""
        for state in ("running", "waiting"):
            self._rows.of(state).set(snapshot[state])

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The last requests, the newest first."""
        return [asdict(record) for record in reversed(self._recent)]

    def ttft(self) -> dict[str, Any]:
        """Percentiles over the last minutes; null before there was a request."""
        since = time.monotonic() - _WINDOW_SECONDS
        return _percentiles([seconds for at, seconds in self._ttfts if at >= since])


def _percentiles(values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    points = np.percentile(found, (50, 90, 99)).tolist() if found else (None, None, None)
    names = ("p50_seconds", "p90_seconds", "p99_seconds")
    return {"window_seconds": _WINDOW_SECONDS, "count": len(found), **dict(zip(names, points, strict=True))}
