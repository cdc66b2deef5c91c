"""Errors as clients see them: OpenAI's shape, the field named, no prompt and no inner detail in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvtier.errors import ArgumentError, ClosedError, KvtierError, StateError
from kvtier.server.protocol import ChatRequest, CompletionRequest

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    """Seconds."""

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's form of it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an HTTP answer."""
        headers = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def of_engine(error: KvtierError) -> ApiError:
    """What the engine refused, or that there is no engine any more."""
    if isinstance(error, ClosedError):
        return ApiError(503, "the engine has ended; the server is going down", code="engine_ended", retry_after=5)
    if isinstance(error, ArgumentError):
        return ApiError(400, str(error))
    if isinstance(error, StateError):
        return ApiError(409, str(error), code="wrong_state")
    return ApiError(500, str(error), code="engine_error")


def install(app: FastAPI) -> None:
    """Let the app answer errors in this form."""

    @app.exception_handler(ApiError)
    async def _(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(KvtierError)
    async def _(_: Request, error: KvtierError) -> JSONResponse:
        return of_engine(error).response()

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return _of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _(_: Request, __: Exception) -> JSONResponse:  # starlette raises it again for the log
        return ApiError(500, "the server failed; its log has the details").response()


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first of pydantic's findings. What was sent is not repeated: it may be a prompt."""
    found: Mapping[str, Any] = error.errors()[0]
    place = [str(part) for part in found["loc"][1:]]  # the first says which part of the request: body, query, path
    if found["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {found['ctx']['error']} at {found['loc'][-1]}", code="invalid_json"
        )
    where = ".".join(place) or None
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        near = difflib.get_close_matches(place[-1], known, 1)
        message = "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
    return ApiError(400, f"{where or 'the body'}: {message}", where, str(found["type"]))
