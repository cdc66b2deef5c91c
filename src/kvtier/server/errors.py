"""Errors in OpenAI's format. They name the invalid field, and contain neither prompts nor internal details.

This module imports neither pydantic nor starlette, because the engine and the worker processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import ArgumentError, ClosedError, KvtierError, StateError

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass
class ApiError(Exception):
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 5  # seconds, for statuses 429 and 503

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        from starlette.responses import JSONResponse

        headers = {"retry-after": str(self.retry_after)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def from_engine(error: KvtierError) -> ApiError:
    if isinstance(error, ClosedError):
        return ApiError(503, "the engine has ended; the server is shutting down", code="engine_ended")
    if isinstance(error, ArgumentError):
        return ApiError(400, str(error))
    if isinstance(error, StateError):
        return ApiError(409, str(error), code="wrong_state")
    return ApiError(500, str(error), code="engine_error")
