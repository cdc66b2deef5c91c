"""The FastAPI application: endpoints, error handlers, and the dashboard page built from the files in static/."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import kvtier
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import KvtierError
from kvtier.server.admission import Admission
from kvtier.server.bodies import Bodies, body_schemas, takes
from kvtier.server.completion_format import to_json
from kvtier.server.completions import Completions
from kvtier.server.config import ServerConfig, salt_of
from kvtier.server.control import add_control, add_state
from kvtier.server.engine_client import Heartbeat
from kvtier.server.errors import ApiError, from_engine
from kvtier.server.fields import HEADER
from kvtier.server.messages_api import CountTokensRequest, MessagesRequest
from kvtier.server.metrics_page import MetricsPage
from kvtier.server.middleware import ClientGone, GuardMiddleware
from kvtier.server.prepare import Body, Preparation, Prepared, unknown_model
from kvtier.server.prompt_bodies import SessionBody, TokenizeRequest
from kvtier.server.protocol import ChatRequest, CompletionRequest
from kvtier.server.request_log import RequestLog
from kvtier.server.responses_api import ResponsesRequest
from kvtier.server.schema_cache import SchemaChecks
from kvtier.server.small_endpoints import add_aliases, add_detokenize, add_probes
from kvtier.server.worker_pool import WorkerPool

if TYPE_CHECKING:  # needs the extra `otel`
    from kvtier.server.tracing import Tracing

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("format.js", "history.js", "charts.js", "panels.js", "page.js")


def load_page() -> Response:
    """Return the dashboard page.

    The content security policy lists the hashes of the page's script and style. The browser blocks other scripts and
    styles, and connections to other servers.
    """
    style = (_STATIC / "dashboard.css").read_text()
    script = "\n".join((_STATIC / name).read_text() for name in _SCRIPTS)
    page = (_STATIC / "dashboard.html").read_text().replace("@STYLE@", style).replace("@SCRIPT@", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html", headers=headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "invalid request; `error.param` names the field",
        401: "missing or unknown API key",
        403: "not allowed with this key or from this origin",
        404: "unknown model or request",
        408: "the body did not arrive in time",
        409: "not possible in the current state",
        413: "the body is too large",
        414: "the URL is too long",
        431: "the headers are too large",
        429: "too many requests; see Retry-After",
        503: "the server is overloaded, asleep, shutting down or failing; see Retry-After",
        504: "the request took too long",
    }.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "the response; a stream of events if stream is true", "content": {"text/event-stream": {}}}
}
_TOKENIZED = 10  # if a request only tokenizes, this many tokens cost its tenant one token of the quota


def make_app(
    config: ServerConfig,
    max_context: int,
    tokenizer: Tokenizer,
    pool: WorkerPool,
    admission: Admission,
    request_log: RequestLog,
    heartbeat: Heartbeat,
    page: MetricsPage,
    tracing: Tracing | None,
) -> ASGIApp:
    app = FastAPI(
        title="kvtier",
        version=kvtier.__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,  # a redirect would repeat the client's Host header, which may be forged
    )
    _add_error_handlers(app)
    limits, model = config.limits, config.model_name
    bodies = Bodies(Preparation(pool.config, tokenizer), pool, limits, admission)
    checks, engine = SchemaChecks(pool), heartbeat.engine
    completions = Completions(engine, checks, tokenizer, limits, admission, request_log, tracing)
    _add_generation(app, completions, bodies, admission)
    _add_model(app, config.model_names, max_context, bodies, admission)
    add_detokenize(app, bodies, admission)
    add_probes(app, heartbeat, admission)
    add_aliases(app, heartbeat, admission)
    _add_page(app)
    add_state(app, heartbeat, model, request_log, admission, page)
    add_control(app, heartbeat, admission, {tenant.name: tenant for tenant in config.tenants}, bodies, request_log)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    guarded = GuardMiddleware(app, config.tenants, limits, request_log, config.allow_origin)
    if not config.allow_origin:
        return guarded
    exposed, methods = ("x-request-id", HEADER), ("GET", "POST")
    return CORSMiddleware(guarded, config.allow_origin, methods, ("*",), expose_headers=exposed)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(KvtierError)
    async def _(request: Request, error: KvtierError) -> JSONResponse:
        return from_engine(error).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(error.status_code, message).response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def _(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)  # never sent; the status appears only in logs and metrics

    @app.exception_handler(Exception)
    async def _(request: Request, _: Exception) -> JSONResponse:  # starlette also logs the error
        return ApiError(500, "internal error; see the server's log").response(request.url.path)


def _add_generation(app: FastAPI, completions: Completions, bodies: Bodies, admission: Admission) -> None:
    @app.post("/v1/chat/completions", responses=_STREAM, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await completions.answer(await bodies.read(request, ChatRequest), request)

    @app.post("/v1/completions", responses=_STREAM, openapi_extra=takes(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        """Continue one or several texts."""
        return await completions.answer(await bodies.read(request, CompletionRequest), request)

    @app.post("/v1/responses", responses=_STREAM, openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Generate a response, which is not stored."""
        with _renamed_fields(ResponsesRequest.names):
            return await completions.answer(await bodies.read_as_chat(request, ResponsesRequest), request)

    @app.post("/v1/sessions/close", openapi_extra=takes(SessionBody))
    async def close_session(request: Request) -> dict[str, Any]:
        """End a session. Its cached blocks can be evicted early, because no further request is expected."""
        with admission.admit(1, request.state.tenant):
            body = (await bodies.read(request, SessionBody, is_counted=True)).body
            salt = salt_of(request.state.tenant, None)
            return await completions.engine.call("close_session", session_id=body.session_id, salt=salt)

    @app.post("/v1/messages", responses=_STREAM, openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Generate the next message of a conversation, in Anthropic's format."""
        with _renamed_fields(MessagesRequest.names):
            return await completions.answer(await bodies.read_as_chat(request, MessagesRequest), request)

    @app.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        """Return the number of tokens of a conversation in Anthropic's format."""
        with _renamed_fields(CountTokensRequest.names):
            prepared = await _tokenized(request, CountTokensRequest, bodies, admission)
            return {"input_tokens": len(prepared.prompts[0])}


@contextmanager
def _renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of chat fields in errors by the field names of the API that the client uses."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


async def _tokenized(request: Request, model: type[Body], bodies: Bodies, admission: Admission) -> Prepared[Body]:
    """Prepare a request that generates nothing, and charge its tenant."""
    with admission.admit(1, request.state.tenant):
        prepared = await bodies.read(request, model, is_counted=True)
    admission.spend(request.state.tenant, math.ceil(len(prepared.prompts[0]) / _TOKENIZED))
    return prepared


def _add_model(app: FastAPI, names: Sequence[str], max_context: int, bodies: Bodies, admission: Admission) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        prepared = await _tokenized(request, TokenizeRequest, bodies, admission)
        (tokens,) = prepared.prompts
        body: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": max_context}
        if prepared.body.return_token_strs:
            body["token_strs"] = prepared.token_texts
        return Response(to_json(body), media_type="application/json")

    common = {"object": "model", "created": 0, "owned_by": "kvtier", "max_model_len": max_context}
    all_models = {name: {"id": name, **common} for name in names}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the names of the served model."""
        return {"object": "list", "data": [*all_models.values()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """Return the model with this name."""
        if name not in all_models:
            raise unknown_model(name, names)
        return all_models[name]


def _add_page(app: FastAPI) -> None:
    page = load_page()

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return page


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with JSON schemas of the bodies, and without status 422 (never sent)."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
    assert app.openapi_schema is not None
    return app.openapi_schema
