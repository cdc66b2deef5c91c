"""Admin endpoints: state, metrics, and control of the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from kvtier.errors import ArgumentError
from kvtier.server.admission import Admission
from kvtier.server.bodies import Bodies, takes
from kvtier.server.config import Tenant, salt_of
from kvtier.server.engine_client import Heartbeat
from kvtier.server.errors import ApiError
from kvtier.server.metrics_page import MetricsPage
from kvtier.server.prompt_bodies import NameBody, PinBody, PromptBody, ResetBody, ResizeBody
from kvtier.server.request_log import RequestLog

_ASLEEP = "it is asleep until POST /control/wake"
_ON_PROMPT = {
    "pin": "Keep the cached blocks of a prompt until the prompt is unpinned.",
    "prefetch": "Fetch the blocks of a prompt from stores into host memory, unless computing them is faster.",
    "demote": "Copy the blocks of a prompt to lower tiers, and free its device blocks that are not in use.",
    "drop": "Remove a prompt and its continuations from all tiers, except the blocks that other prompts share.",
}


def add_state(
    app: FastAPI, engine: Heartbeat, model: str, request_log: RequestLog, admission: Admission, page: MetricsPage
) -> None:
    began = time.time()

    @app.get("/state")
    async def state() -> dict[str, Any]:
        """Return the data of the dashboard (docs/api.md)."""
        snapshot = await engine.call("snapshot")
        status = "sleeping" if snapshot.pop("asleep") else "draining" if admission.closed else "ok"
        return {
            "time": time.time(),
            "started": began,
            "model": model,
            "status": status,
            **snapshot,
            "ttft": request_log.ttft(),
            "in_flight": admission.num_answers,
            "recent": request_log.recent,
        }

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the metrics in Prometheus' text format, or in OpenMetrics if the header Accept contains it."""
        return await page.response(request.headers.get("accept", ""))


def add_control(
    app: FastAPI,
    engine: Heartbeat,
    admission: Admission,
    tenants: Mapping[str, Tenant],
    bodies: Bodies,
    request_log: RequestLog,
) -> None:
    """Add the endpoints below /control. They call functions of the engine process (engine_controls)."""
    for name, text in _ON_PROMPT.items():
        _add_prompt_control(app, name, text, engine, tenants, bodies)

    @app.get("/control/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """Explain how a request ended, and which part of its prompt was cached."""
        request_id = request_log.find(request_id)
        try:
            explanation = await engine.call("explain", request_id=request_id)
        except ArgumentError as error:
            raise ApiError(404, str(error), "request_id") from error
        return {**explanation, "notes": request_log.notes(request_id)}

    @app.get("/control/tiers")
    async def tiers() -> dict[str, Any]:
        """Return the tiers and their contents."""
        return {"tiers": (await engine.call("snapshot"))["tiers"]}

    @app.post("/control/unpin", openapi_extra=takes(NameBody))
    async def unpin(request: Request) -> dict[str, Any]:
        """Allow eviction of the blocks of a pinned prompt."""
        name = (await bodies.read(request, NameBody)).body.name
        return await _call_by_name(engine, "unpin", name=name)

    @app.post("/control/reset", openapi_extra=takes(ResetBody))
    async def reset(request: Request) -> dict[str, Any]:
        """Unpin all prompts and clear the memory tiers. Also clear the stores if `clear_stores` is true."""
        return await engine.call("reset", clear_stores=(await bodies.read(request, ResetBody)).body.clear_stores)

    @app.post("/control/sleep", name="sleep")
    async def control_sleep() -> dict[str, Any]:
        """Free device memory. Requests get 503 until the server is woken."""
        return await sleep(engine, admission)

    @app.post("/control/wake", name="wake")
    async def control_wake() -> dict[str, Any]:
        """Allocate device memory and accept requests again."""
        return await wake(engine, admission)

    @app.post("/control/resize", openapi_extra=takes(ResizeBody))
    async def resize(request: Request) -> dict[str, Any]:
        """Change the number of blocks in a memory tier."""
        body = (await bodies.read(request, ResizeBody)).body
        try:
            result = await engine.call("resize", tier=body.tier, num_blocks=body.num_blocks)
        except ArgumentError as error:
            raise ApiError(400, f"num_blocks: {error}", "num_blocks") from error
        if body.tier == "device":
            admission.num_device_blocks = body.num_blocks
        return result


async def sleep(engine: Heartbeat, admission: Admission) -> dict[str, Any]:
    """Reject requests and free device memory."""
    admission.closed = admission.closed or _ASLEEP
    return await engine.call("sleep")


async def wake(engine: Heartbeat, admission: Admission) -> dict[str, Any]:
    """Allocate device memory. Accept requests again, unless the server is shutting down."""
    result = await engine.call("wake")
    if is_asleep(admission):
        admission.closed = ""
    return result


def is_asleep(admission: Admission) -> bool:
    return admission.closed == _ASLEEP


async def _call_by_name(engine: Heartbeat, function: str, /, **arguments: Any) -> dict[str, Any]:
    """Call `pin` or `unpin`. Raises 400 if the name is taken (pin) or unknown (unpin)."""
    try:
        return await engine.call(function, **arguments)
    except ArgumentError as error:
        raise ApiError(400, f"name: {error}", "name") from error


def _add_prompt_control(
    app: FastAPI, name: str, text: str, engine: Heartbeat, tenants: Mapping[str, Tenant], bodies: Bodies
) -> None:
    model = PinBody if name == "pin" else PromptBody

    @app.post(f"/control/{name}", name=name, description=text, openapi_extra=takes(model))
    async def run(request: Request) -> dict[str, Any]:
        prepared = await bodies.read(request, model)
        body = prepared.body
        if body.tenant is not None and body.tenant not in tenants:
            known = ", ".join(tenants) or "none"
            raise ApiError(400, f"unknown tenant {body.tenant!r}; known: {known}", "tenant")
        salt = salt_of(tenants[body.tenant] if body.tenant is not None else None, body.cache_salt)
        prompt = {"tokens": tuple(prepared.prompts[0]), "salt": salt}
        if isinstance(body, PinBody):
            return await _call_by_name(engine, name, name=body.name, **prompt)
        return await engine.call(name, **prompt)
