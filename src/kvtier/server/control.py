"""Admin endpoints: state, metrics, and what changes the cache."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from kvtier.errors import ArgumentError
from kvtier.metrics import CONTENT_TYPE
from kvtier.server.activity import Activity
from kvtier.server.admission import Admission
from kvtier.server.completions import Completions
from kvtier.server.engine_client import EngineClient
from kvtier.server.failures import ApiError


def make_router(engine: EngineClient, completions: Completions, activity: Activity, admission: Admission) -> APIRouter:
    """All of them."""
    router = APIRouter()
    began = time.time()

    @router.get("/state")
    async def state() -> dict[str, Any]:
        """Everything the dashboard shows; docs/api.md describes it."""
        return {
            "time": time.time(),
            "started": began,
            "model": completions.model,
            "status": "ok" if admission.is_open else "draining",
            **await engine.call("snapshot"),
            "ttft": activity.ttft(),
            "in_flight": admission.num_answers,
            "recent": activity.recent,
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text format."""
        return PlainTextResponse(activity.registry.render(), media_type=CONTENT_TYPE)

    @router.get("/control/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """What became of a request and why its prompt was found or not."""
        try:
            found: dict[str, Any] = await engine.call("explain", request_id=request_id)
        except ArgumentError as error:
            raise ApiError(404, str(error), "request_id") from error
        return found

    return router
