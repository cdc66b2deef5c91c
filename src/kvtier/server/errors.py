"""Errors as clients see them: OpenAI's shape, the field named, no prompt and no inner detail in it.

No fastapi: worker processes import this module.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

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


def of_validation(error: ValidationError) -> ApiError:
    """The first of pydantic's findings. What was sent is not repeated: it may be a prompt."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = [str(part) for part in found["loc"]]
    where = ".".join(place) or None
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        near = difflib.get_close_matches(place[-1], known, 1)
        message = "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
    return ApiError(400, f"{where or 'the body'}: {message}", where, str(found["type"]))
