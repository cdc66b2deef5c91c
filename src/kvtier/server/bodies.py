"""Bodies: reads request bodies within limits, and prepares (validates and tokenizes) them with prepare.py.

Small bodies are prepared in the event loop, and large bodies in a worker process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from kvtier.server.admission import Admission
from kvtier.server.config import Limits, tenant_name
from kvtier.server.errors import ApiError
from kvtier.server.messages_api import CountTokensRequest, MessagesRequest
from kvtier.server.middleware import ClientGone, before_deadline, body_too_large
from kvtier.server.prepare import AgentRequest, Body, Preparation, Prepared
from kvtier.server.prompt_bodies import (
    DetokenizeRequest,
    NameBody,
    PinBody,
    PromptBody,
    ResetBody,
    ResizeBody,
    SessionBody,
    TokenizeRequest,
)
from kvtier.server.protocol import ChatRequest, CompletionRequest
from kvtier.server.responses_api import ResponsesRequest
from kvtier.server.worker_pool import WorkerPool

# Bodies up to this size are prepared in the event loop. A body of this size takes 2 to 8 ms, mostly for tokenizing. A
# worker process takes 1 ms more (SmolLM2, digits as the slowest text, 2 busy x86-64 cores, 2026-11-16).
_INLINE_BYTES = 2048
# The limit on buffered bytes ignores this many bytes of each body, so that large bodies cannot block small requests.
_FREE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Bodies:
    preparation: Preparation
    pool: WorkerPool
    limits: Limits
    admission: Admission
    _num_bytes: Counter[str] = field(default_factory=Counter)  # by tenant, without the first _FREE_BYTES of each body

    async def read(self, request: Request, model: type[Body], *, is_counted: bool = False) -> Prepared[Body]:
        """Read and prepare a body. Raises ApiError if the body is rejected, ClientGone if the client disconnects.

        `is_counted` is True if the caller has already admitted the request.
        """
        prepared: Prepared[Body] = await self._read(request, model, is_counted)
        return prepared

    async def read_as_chat(self, request: Request, model: type[AgentRequest]) -> Prepared[ChatRequest]:
        """Read a body of another API, translate it and prepare the chat request. Errors may name chat fields."""
        prepared: Prepared[ChatRequest] = await self._read(request, model, is_counted=False)
        return prepared

    async def _read(self, request: Request, model: type[BaseModel], is_counted: bool) -> Prepared[Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(400, "the body must be JSON: send the header Content-Type: application/json")
        tenant = request.state.tenant
        name = tenant_name(tenant)
        data = bytearray()
        try:
            await self._receive(request, name, data)
            job: dict[str, Any] = {"model": model, "data": data, "max_tokens": self.admission.max_tokens(tenant)}
            if len(data) <= _INLINE_BYTES:
                return self.preparation.prepare(**job)
            with contextlib.nullcontext() if is_counted else self.admission.prepare(tenant):
                work = self.pool.run("prepare", name, **job)
                prepared: Prepared[Any] = await before_deadline(request, self.limits, work)
                return prepared
        finally:
            self._num_bytes[name] -= _num_counted(data)

    async def _receive(self, request: Request, name: str, data: bytearray) -> None:
        limits = self.limits
        most = limits.buffered_bytes
        try:
            async with asyncio.timeout(request.state.began + limits.body_seconds - time.monotonic()):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > limits.body_bytes:
                        raise body_too_large(f"more than {limits.body_bytes} bytes", limits)
                    num_before = _num_counted(data)
                    data += chunk
                    num_added = _num_counted(data) - num_before
                    self._num_bytes[name] += num_added
                    is_above_share = request.state.tenant is not None and self._num_bytes[name] > most // 2
                    if num_added and (self._num_bytes.total() > most or is_above_share):
                        message = f"buffered bodies exceed {most} bytes, or {most // 2} for one tenant; retry later"
                        raise ApiError(503, message, code="buffers")
        except TimeoutError as error:
            message = f"the body did not arrive within {limits.body_seconds:g} s"
            raise ApiError(408, message, code="body_timeout") from error
        except ClientDisconnect as error:
            raise ClientGone from error


def _num_counted(data: bytearray) -> int:
    return max(0, len(data) - _FREE_BYTES)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that `Bodies.read` reads."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"content": content, "required": True}}


def body_schemas() -> dict[str, Any]:
    completions = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    prompts = (CountTokensRequest, TokenizeRequest, DetokenizeRequest, PromptBody, PinBody)
    models = (*completions, *prompts, NameBody, SessionBody, ResetBody, ResizeBody)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions
