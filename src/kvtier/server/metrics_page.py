"""MetricsPage: the response of GET /metrics on the main port, and the ASGI app of the metrics port (--metrics-port)."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier.errors import KvtierError
from kvtier.metrics import CollectedMetric
from kvtier.server.engine_client import Heartbeat
from kvtier.server.errors import ApiError, from_engine
from kvtier.server.exposition import Exposition
from kvtier.server.request_log import RequestLog

# On the metrics port, a request within this time after a collection gets the metrics of that collection. Clients of
# this port need no key, and must not be able to slow down the engine.
_FRESH_SECONDS = 1.0


class MetricsPage:
    """Collects the metrics of front end and engine. An instance is also an ASGI app that serves only GET /metrics."""

    def __init__(self, engine: Heartbeat, request_log: RequestLog) -> None:
        self._engine = engine
        self._request_log = request_log
        self._exposition = Exposition(lambda: engine.engine.pid)
        self._lock = asyncio.Lock()
        self._expires = 0.0

    async def response(self, accept: str) -> Response:
        """Return metrics in the format that `accept` requests. Raises ApiError while the engine does not reply."""
        snapshot = await self._engine.call("snapshot")
        for state in ("running", "waiting"):
            self._request_log.rows.of(state).set(snapshot[state])
        self._request_log.vllm.update(snapshot)
        self._request_log.tasks.set(len(asyncio.all_tasks()))
        reply = await self._engine.call("metrics")
        in_engine = msgspec.convert(reply["metrics"], tuple[CollectedMetric, ...])
        self._exposition.update([*self._request_log.registry.collect(), *in_engine])
        return self._encoded(accept)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._shared(scope))(scope, receive, send)

    async def _shared(self, scope: Scope) -> Response:
        """Return the response of the metrics port, whose clients need no key."""
        if scope["path"] != "/metrics":
            return ApiError(404, "this port serves only GET /metrics").response()
        if scope["method"] not in ("GET", "HEAD"):
            return ApiError(405, "this port serves only GET /metrics").response()
        accept = Headers(scope=scope).get("accept", "")
        try:
            async with self._lock:
                if time.monotonic() < self._expires:
                    return self._encoded(accept)
                response = await self.response(accept)
                self._expires = time.monotonic() + _FRESH_SECONDS
                return response
        except ApiError as error:
            return error.response()
        except KvtierError as error:
            return from_engine(error).response()

    def _encoded(self, accept: str) -> Response:
        page, content_type = self._exposition.encode(accept)
        return Response(page, headers={"content-type": content_type})
