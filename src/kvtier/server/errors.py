"""Errors in OpenAI's and Anthropic's formats. An error names the invalid field, if known, and contains no prompt.

Importing this module loads neither pydantic nor starlette, because the engine process imports it and needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.errors import ArgumentError, ClosedError, KvtierError, StateError

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {**_KINDS, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_ANTHROPIC_PATH = "/v1/messages"


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

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, "param": self.param}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return a copy of the error with other field names, for a request that was translated from another API."""
        param = self.param
        for name, other in names.items():
            if param == name or (param or "").startswith(f"{name}."):
                param = other + (param or "")[len(name) :]
                break
        words = "|".join(map(re.escape, names))
        message = re.sub(rf"(?<![\w.])({words})(?!\w)", lambda match: names[match[1]], self.message)
        return ApiError(self.status, message, param, self.code, self.retry_after)

    def response(self, path: str = "") -> JSONResponse:
        """Return the response for a request to `path`. The path determines the format."""
        from starlette.responses import JSONResponse

        headers = {"retry-after": str(self.retry_after)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        is_anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
        return JSONResponse(self.anthropic_body if is_anthropic else self.body, self.status, headers)


def from_engine(error: KvtierError) -> ApiError:
    if isinstance(error, ClosedError):
        return ApiError(503, "the engine has ended; the server is shutting down", code="engine_ended")
    if isinstance(error, ArgumentError):
        return ApiError(400, str(error))
    if isinstance(error, StateError):
        return ApiError(409, str(error), code="wrong_state")
    return ApiError(500, str(error), code="engine_error")
