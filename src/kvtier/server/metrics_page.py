"""MetricsPage: the response of GET /metrics, and the app of the port for metrics (--metrics-port)."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from kvtier.errors import KvtierError
from kvtier.metrics import CONTENT_TYPE
from kvtier.server.engine_client import Heartbeat
from kvtier.server.errors import ApiError, from_engine
from kvtier.server.request_log import RequestLog

# Requests within this time share one rendering, so that clients without a key cannot load the engine.
_FRESH_SECONDS = 1.0


class MetricsPage:
    """Renders the metrics of front end and engine. As an ASGI app, serves GET /metrics and nothing else."""

    def __init__(self, engine: Heartbeat, request_log: RequestLog) -> None:
        self._engine = engine
        self._request_log = request_log
        self._lock = asyncio.Lock()
        self._shared = ""
        self._expires = 0.0

    async def render(self) -> str:
        """Return the current metrics. Raises ApiError while the engine does not reply."""
        snapshot = await self._engine.call("snapshot")
        for state in ("running", "waiting"):
            self._request_log.rows.of(state).set(snapshot[state])
        self._request_log.vllm.update(snapshot)
        text: str = (await self._engine.call("metrics"))["text"]
        return self._request_log.registry.render() + text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._response(scope))(scope, receive, send)

    async def _response(self, scope: Scope) -> Response:
        if scope["path"] != "/metrics":
            return ApiError(404, "this port serves only GET /metrics").response()
        if scope["method"] not in ("GET", "HEAD"):
            return ApiError(405, "this port serves only GET /metrics").response()
        try:
            async with self._lock:
                if time.monotonic() >= self._expires:
                    self._shared = await self.render()
                    self._expires = time.monotonic() + _FRESH_SECONDS
            return PlainTextResponse(self._shared, media_type=CONTENT_TYPE)
        except ApiError as error:
            return error.response()
        except KvtierError as error:
            return from_engine(error).response()
