"""Bodies: reads the bodies of requests within a budget of memory, and prepares them here or in a worker process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from kvtier.server.admission import Admission, Room
from kvtier.server.config import Limits
from kvtier.server.errors import ApiError
from kvtier.server.middleware import ClientGone, unless_gone
from kvtier.server.prepare import Preparation, PrepareBody, Prepared
from kvtier.server.protocol import (
    ChatRequest,
    CompletionRequest,
    NameBody,
    PinBody,
    PromptBody,
    ResetBody,
    ResizeBody,
    TokenizeRequest,
)
from kvtier.server.worker_pool import WorkerPool

Body = TypeVar("Body", bound=BaseModel)
# A body of this size takes 2 to 8 ms of the event loop, most of it to tokenize (SmolLM2, digits are the slowest;
# x86-64, 2 busy cores, 2026-11-16); a worker process takes 1 ms longer.
_INLINE_BYTES = 2048
_FREE_BYTES = 64 << 10  # of each body, which do not count: a budget that is spent must not refuse small requests


class Bodies:
    """Gives endpoints their validated bodies, with prompts as tokens."""

    def __init__(
        self, preparation: Preparation, pool: WorkerPool, limits: Limits, admission: Admission, room: Room
    ) -> None:
        self._preparation = preparation
        self._pool = pool
        self._limits = limits
        self._admission = admission
        self._room = room
        self._num_bytes: Counter[str] = Counter()

    async def read(self, request: Request, model: type[Body]) -> Prepared[Body]:
        """Read and prepare a body. Raises ApiError for what cannot be run, ClientGone if nobody waits for it."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(400, "the body must be JSON: send the header Content-Type: application/json")
        tenant = request.state.tenant
        name = tenant.name if tenant is not None else ""
        data, num_counted = bytearray(), 0
        try:
            async for chunk in request.stream():
                data += chunk
                added = max(0, len(data) - _FREE_BYTES) - num_counted
                num_counted += added
                self._count(name, added, has_tenant=tenant is not None)
            job = PrepareBody(model, data, self._room.of(tenant))
            if len(data) <= _INLINE_BYTES:
                return self._preparation.body(job)
            with self._admission.prepare(tenant):
                prepared: Prepared[Body] = await self._in_worker(request, job, name)
                return prepared
        except ClientDisconnect as error:
            raise ClientGone from error
        finally:
            self._num_bytes[name] -= num_counted
            if not self._num_bytes[name]:
                del self._num_bytes[name]

    async def _in_worker(self, request: Request, job: PrepareBody, tenant: str) -> Any:
        try:
            async with asyncio.timeout(request.state.began + self._limits.request_seconds - time.monotonic()):
                return await unless_gone(request.receive, self._pool.run(job, tenant, "body"))
        except TimeoutError as error:
            seconds = self._limits.request_seconds
            raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout") from error

    def _count(self, name: str, num_bytes: int, *, has_tenant: bool) -> None:
        self._num_bytes[name] += num_bytes
        most = self._limits.buffered_bytes
        if num_bytes and (self._num_bytes.total() > most or (has_tenant and self._num_bytes[name] > most // 2)):
            raise ApiError(
                503, f"the bodies of all requests together have more than {most} bytes", code="buffers", retry_after=5
            )


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of an endpoint's body, which `Bodies.read` reads; `body_schemas` has what it refers to."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"content": content, "required": True}}


def body_schemas() -> dict[str, Any]:
    """OpenAPI's schemas of all bodies."""
    models = (ChatRequest, CompletionRequest, TokenizeRequest, PromptBody, PinBody, NameBody, ResetBody, ResizeBody)
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = made["$defs"]
    return found
