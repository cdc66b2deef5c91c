"""Exception handlers of the app: every error is answered in the form of `failures`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvtier.errors import KvtierError
from kvtier.server.errors import ApiError, of_engine


def install(app: FastAPI) -> None:
    """Add the handlers."""

    @app.exception_handler(ApiError)
    async def _(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(KvtierError)
    async def _(_: Request, error: KvtierError) -> JSONResponse:
        return of_engine(error).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _(_: Request, __: Exception) -> JSONResponse:  # starlette raises it again for the log
        return ApiError(500, "the server failed; its log has the details").response()
