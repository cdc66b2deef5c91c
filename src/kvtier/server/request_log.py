"""RequestLog: metrics and recent requests of the front end. Contains neither prompts nor answers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.engine.params import Explanation
from kvtier.metrics import Registry
from kvtier.server.vllm_metrics import VllmMetrics

_RECENT = 100  # number of requests that GET /state lists
_WINDOW_SECONDS = 300.0  # period that the percentiles of the time to first token cover
_WINDOW_MOST = 10_000  # maximum number of requests in the window


@dataclass(slots=True)
class RequestRecord:
    """One request, updated while it runs. GET /state lists it after its end."""

    id: str
    tenant: str
    endpoint: str
    ended: float = 0.0  # Unix time
    finish: str = "disconnected"  # other values: stop, length, timeout, refused, error
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_seconds: float | None = None  # None before the first token
    seconds: float = 0.0
    tokens_from: dict[str, int] = field(default_factory=dict)  # cached tokens by tier
    client_id: str = ""  # id that the client gave the request
    notes: tuple[str, ...] = ()  # remarks about the prompt
    explanation: str = ""  # why the cache match ended, why blocks were loaded or recomputed, and `notes`


class RequestLog:
    """Metrics for GET /metrics, a window of times to first token, and the latest requests."""

    def __init__(self, model_name: str, block_tokens: int) -> None:
        self.registry = Registry()
        new = self.registry
        self._requests = new.counter("kvtier_requests_total", "Finished requests.", ("endpoint", "finish"))
        self._responses = new.counter("kvtier_http_responses_total", "HTTP responses.", ("route", "status"))
        self._tokens = new.counter("kvtier_tokens_total", "Tokens of finished requests.", ("kind",))
        self._ttft = new.histogram("kvtier_ttft_seconds", "Time from a request to its first token.").of()
        self._seconds = new.histogram("kvtier_request_seconds", "Time from a request to its end.").of()
        self.delivery = new.histogram(
            "kvtier_delivery_seconds", "Time from the engine's message to its handling in the front end."
        ).of()
        self.rows = new.gauge("kvtier_answers", "Answers in the engine, by state.", ("state",))
        self.tasks = new.gauge("kvtier_tasks", "Tasks in the event loop of the front end.").of()
        self._closed = new.counter(
            "kvtier_connections_closed_total", "Connections closed by the server, by reason.", ("reason",)
        )
        self.vllm = VllmMetrics(new, model_name, block_tokens)
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_WINDOW_MOST)

    def http(self, route: str, status: int) -> None:
        self._responses.of(route, str(status)).add()

    def connection_closed(self, reason: str) -> None:
        """Count a connection that the server closed. `reason`: evicted, no_place, slow_headers, idle or stalled."""
        self._closed.of(reason).add()

    def ended(self, record: RequestRecord, explanation: Explanation | None) -> None:
        """Count a finished request. `explanation` is None if the engine did not finish any answer."""
        self.vllm.ended(record, explanation)
        self._requests.of(record.endpoint, record.finish).add()
        self._tokens.of("prompt").add(record.prompt_tokens)
        self._tokens.of("cached").add(record.cached_tokens)
        self._tokens.of("new").add(record.new_tokens)
        self._seconds.observe(record.seconds)
        self._recent.append(record)
        if record.ttft_seconds is not None:
            self._ttft.observe(record.ttft_seconds)
            self._ttfts.append((time.monotonic(), record.ttft_seconds))

    def find(self, name: str) -> str:
        """Return the id of the latest finished request whose `client_id` is `name`, or `name` if there is none."""
        return next((record.id for record in reversed(self._recent) if record.client_id == name), name)

    def notes(self, request_id: str) -> list[str]:
        """Return the remarks about the prompt of a request. Empty if it is not among the latest requests."""
        return next((list(record.notes) for record in self._recent if record.id == request_id), [])

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The latest requests, newest first."""
        return [asdict(record) for record in reversed(self._recent)]

    def ttft(self) -> dict[str, Any]:
        """Return percentiles of the time to first token in the window. They are None if the window is empty."""
        since = time.monotonic() - _WINDOW_SECONDS
        values = sorted(seconds for at, seconds in self._ttfts if at >= since)
        points = {f"p{percent}_seconds": _percentile(values, percent) if values else None for percent in (50, 90, 99)}
        return {"window_seconds": _WINDOW_SECONDS, "count": len(values), **points}


def _percentile(values: list[float], percent: int) -> float:
    """Interpolate between the two nearest sorted values, like numpy.percentile. Importing numpy would take 0.1 s."""
    whole, rest = divmod((len(values) - 1) * percent, 100)
    return values[whole] + (values[min(whole + 1, len(values) - 1)] - values[whole]) * rest / 100
