"""Small endpoints for probes, routers and trainers, most of them with the names that vLLM uses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

import kvtier
from kvtier.server.admission import Admission
from kvtier.server.bodies import Bodies, takes
from kvtier.server.completion_format import to_json
from kvtier.server.control import is_asleep, sleep, wake
from kvtier.server.engine_client import Heartbeat
from kvtier.server.errors import ApiError
from kvtier.server.prompt_bodies import DetokenizeRequest

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_LEVELS = ("1", "2")


def add_probes(app: FastAPI, heartbeat: Heartbeat, admission: Admission) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 if the server accepts requests and its engine replies, 503 otherwise."""
        if why := admission.closed or heartbeat.failure:
            raise ApiError(503, f"the server does not accept requests: {why}", code="not_ready")
        return {"status": "ok"}

    @app.get("/ping")
    async def ping() -> dict[str, str]:
        """Return the same as /health. SageMaker calls this path."""
        return await health()

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """Return 200 while the engine replies, even if the server is asleep or draining. Otherwise return 503."""
        if why := heartbeat.failure:
            raise ApiError(503, why, code="engine_unresponsive")
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of kvtier."""
        return {"version": kvtier.__version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of answers that are running or waiting."""
        return {"server_load": admission.num_answers}


def add_aliases(app: FastAPI, engine: Heartbeat, admission: Admission) -> None:
    """Add control endpoints with vLLM's names and with arguments in the URL."""

    @app.post("/sleep", name="vllm_sleep", openapi_extra=_query("level", *_LEVELS))
    async def vllm_sleep(request: Request) -> dict[str, Any]:
        """Free device memory, like /control/sleep. The levels 1 and 2 have the same effect: both keep the weights."""
        level = request.query_params.get("level", "1")
        if level not in _LEVELS:
            raise ApiError(400, f"level must be {' or '.join(_LEVELS)}", "level")
        return await sleep(engine, admission)

    @app.post("/wake_up")
    async def wake_up() -> dict[str, Any]:
        """Allocate device memory and accept requests again, like /control/wake."""
        return await wake(engine, admission)

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": is_asleep(admission)}

    @app.post("/reset_prefix_cache", openapi_extra=_query("reset_external", "true", "false"))
    async def reset_prefix_cache(request: Request) -> dict[str, Any]:
        """Unpin all prompts and clear the memory tiers. Also clear the stores if `reset_external` is true."""
        value = request.query_params.get("reset_external", "false").lower()
        if value not in _BOOLEANS:
            raise ApiError(400, "reset_external must be true or false", "reset_external")
        return await engine.call("reset", clear_stores=_BOOLEANS[value])


def add_detokenize(app: FastAPI, bodies: Bodies, admission: Admission) -> None:
    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        with admission.admit(1, request.state.tenant):
            prepared = await bodies.read(request, DetokenizeRequest, is_counted=True)
        return Response(to_json({"prompt": prepared.text}), media_type="application/json")


def _query(name: str, *values: str) -> dict[str, Any]:
    """Return the OpenAPI description of an argument in the URL."""
    return {"parameters": [{"name": name, "in": "query", "required": False, "schema": {"enum": list(values)}}]}
