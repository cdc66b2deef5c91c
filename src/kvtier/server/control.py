"""Admin endpoints: state, metrics, and what changes the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from kvtier.errors import ArgumentError
from kvtier.metrics import CONTENT_TYPE
from kvtier.server.admission import Admission, Room
from kvtier.server.auth import salt_of
from kvtier.server.bodies import Bodies, takes
from kvtier.server.config import Tenant
from kvtier.server.errors import ApiError
from kvtier.server.heartbeat import Heartbeat
from kvtier.server.prepare import Prepared
from kvtier.server.protocol import NameBody, PinBody, PromptBody, ResetBody, ResizeBody
from kvtier.server.request_log import RequestLog

ASLEEP = "it is asleep (POST /control/wake)"


class AdminApi:
    """Carries out what an operator asks for, in the engine process."""

    def __init__(self, engine: Heartbeat, room: Room, admission: Admission, tenants: Mapping[str, Tenant]) -> None:
        self._engine = engine
        self._room = room
        self._admission = admission
        self._tenants = tenants

    async def on_prompt(self, name: str, prepared: Prepared[Any], /, **more: Any) -> dict[str, Any]:
        """A control that takes a prompt."""
        body: PromptBody = prepared.body
        if body.tenant is not None and body.tenant not in self._tenants:
            known = ", ".join(self._tenants) or "none"
            raise ApiError(400, f"there is no tenant {body.tenant!r}; there are {known}", "tenant")
        tenant = self._tenants[body.tenant] if body.tenant is not None else None
        salt = salt_of(tenant, body.cache_salt)
        return await self.call(name, tokens=tuple(prepared.prompts[0]), salt=salt, **more)

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """A control by its name."""
        found: dict[str, Any] = await self._engine.call(name, **arguments)
        return found

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Of one request."""
        try:
            return await self.call("explain", request_id=request_id)
        except ArgumentError as error:
            raise ApiError(404, str(error), "request_id") from error

    async def sleep(self) -> dict[str, Any]:
        """No new requests from now on."""
        if not self._admission.closed:
            self._admission.closed = ASLEEP
        return await self.call("sleep")

    async def wake(self) -> dict[str, Any]:
        """And again."""
        told = await self.call("wake")
        if self._admission.closed == ASLEEP:
            self._admission.closed = ""
        return told

    async def resize(self, body: ResizeBody) -> dict[str, Any]:
        """A tier; of the device's size depends how long a request may be."""
        told = await self.call("resize", tier=body.tier, num_blocks=body.num_blocks)
        if body.tier == "device":
            self._room.num_blocks = body.num_blocks
        return told


def add_state(router: APIRouter, engine: Heartbeat, model: str, activity: RequestLog, admission: Admission) -> None:
    """GET /state and GET /metrics."""
    began = time.time()

    @router.get("/state")
    async def state() -> dict[str, Any]:
        """Everything the dashboard shows; docs/api.md describes it."""
        told = await engine.call("snapshot")
        status = "sleeping" if told.pop("asleep") else "draining" if admission.closed else "ok"
        return {
            "time": time.time(),
            "started": began,
            "model": model,
            "status": status,
            **told,
            "ttft": activity.ttft(),
            "in_flight": admission.num_answers,
            "recent": activity.recent,
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text format."""
        activity.take(await engine.call("snapshot"))
        text = activity.registry.render() + await engine.call("metrics")
        return PlainTextResponse(text, media_type=CONTENT_TYPE)


def add_control(router: APIRouter, control: AdminApi, bodies: Bodies) -> None:
    """Everything below /control."""

    @router.get("/control/explain/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """What became of a request and why its prompt was found or not."""
        return await control.explain(request_id)

    @router.get("/control/tiers")
    async def tiers() -> dict[str, Any]:
        """The tiers and what is in them."""
        return {"tiers": (await control.call("snapshot"))["tiers"]}

    @router.post("/control/pin", openapi_extra=takes(PinBody))
    async def pin(request: Request) -> dict[str, Any]:
        """Keep what is cached of a prompt until it is unpinned."""
        return await control.on_prompt("pin", prepared := await bodies.read(request, PinBody), name=prepared.body.name)

    @router.post("/control/unpin", openapi_extra=takes(NameBody))
    async def unpin(request: Request) -> dict[str, Any]:
        """Let a pinned prompt be evicted again."""
        return await control.call("unpin", name=(await bodies.read(request, NameBody)).body.name)

    @router.post("/control/prefetch", openapi_extra=takes(PromptBody))
    async def prefetch(request: Request) -> dict[str, Any]:
        """Bring a prompt's blocks from stores to host memory."""
        return await control.on_prompt("prefetch", await bodies.read(request, PromptBody))

    @router.post("/control/demote", openapi_extra=takes(PromptBody))
    async def demote(request: Request) -> dict[str, Any]:
        """Keep a prompt's blocks below the device only."""
        return await control.on_prompt("demote", await bodies.read(request, PromptBody))

    @router.post("/control/drop", openapi_extra=takes(PromptBody))
    async def drop(request: Request) -> dict[str, Any]:
        """Forget a prompt in every tier."""
        return await control.on_prompt("drop", await bodies.read(request, PromptBody))

    @router.post("/control/reset", openapi_extra=takes(ResetBody))
    async def reset(request: Request) -> dict[str, Any]:
        """Forget everything in memory, and in the stores if asked to."""
        return await control.call("reset", clear_stores=(await bodies.read(request, ResetBody)).body.clear_stores)

    @router.post("/control/sleep")
    async def sleep() -> dict[str, Any]:
        """Free the device's memory; requests get 503 until the server is woken."""
        return await control.sleep()

    @router.post("/control/wake")
    async def wake() -> dict[str, Any]:
        """Have device memory again, and take requests."""
        return await control.wake()

    @router.post("/control/resize", openapi_extra=takes(ResizeBody))
    async def resize(request: Request) -> dict[str, Any]:
        """Give a memory tier another number of blocks."""
        return await control.resize((await bodies.read(request, ResizeBody)).body)
