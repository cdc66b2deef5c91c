"""The FastAPI application: endpoints, and the dashboard page built from the files in static/."""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

import kvtier
from kvtier.engine.tokenizer import Tokenizer
from kvtier.server import error_handlers
from kvtier.server.admission import Admission, Room
from kvtier.server.auth import ApiKeys
from kvtier.server.bodies import Bodies, body_schemas, takes
from kvtier.server.completions import Completions
from kvtier.server.config import ServerConfig
from kvtier.server.control import AdminApi, add_control, add_state
from kvtier.server.engine_client import EngineClient
from kvtier.server.errors import ApiError
from kvtier.server.heartbeat import Heartbeat
from kvtier.server.messages import Started
from kvtier.server.middleware import App, ClientGone, GuardMiddleware
from kvtier.server.prepare import ModelInfo, Preparation
from kvtier.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from kvtier.server.request_log import RequestLog
from kvtier.server.responses import to_json
from kvtier.server.schema_checks import SchemaChecks
from kvtier.server.worker_pool import WorkerPool

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("format.js", "history.js", "charts.js", "panels.js", "page.js")


def load_page() -> Response:
    """The page and its headers, to be given as often as it is asked for.

    The policy names the hash of the one script and the one style there is: what found its way into the page otherwise
    does not run, and the page talks to this server only.
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
        400: "what was sent cannot be run; `error.param` names the field",
        401: "no such API key",
        403: "not allowed with this key, or from there",
        404: "no such model, or request",
        408: "the body came too slowly",
        409: "not possible in this state",
        413: "the body is too large",
        414: "the URL is too long",
        431: "the headers are too large",
        429: "too much at once; see Retry-After",
        503: "the server starts, sleeps or ends; see Retry-After",
        504: "the request took too long",
    }.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer, or events if stream is true", "content": {"text/event-stream": {}}}
}


_TOKENIZED = 10  # tokens of /tokenize cost a tenant as much as one of a completion


def make_app(
    config: ServerConfig,
    engine: EngineClient,
    started: Started,
    tokenizer: Tokenizer,
    pool: WorkerPool,
    admission: Admission,
    activity: RequestLog,
    heartbeat: Heartbeat,
) -> App:
    """Make the app with its gate."""
    app = FastAPI(
        title="kvtier",
        version=kvtier.__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,  # a redirect would name the client's Host header
    )
    error_handlers.install(app)

    @app.exception_handler(ClientGone)
    async def _(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)  # not sent: the gate counts it

    room = Room(started.max_context, started.block_tokens, started.num_blocks)
    limits, name = config.limits, config.model_name
    bodies = Bodies(Preparation(model_info(config, started), tokenizer), pool, limits, admission, room)
    completions = Completions(engine, SchemaChecks(pool), tokenizer, name, limits, admission, room, activity)
    _add_completions(app, completions, bodies)
    _add_tokenize(app, bodies, started.max_context, admission)
    _add_plain(app, completions, started, heartbeat, admission)
    router = APIRouter()
    add_state(router, heartbeat, completions.model, activity, admission)
    add_control(router, AdminApi(heartbeat, room, admission, {each.name: each for each in config.tenants}), bodies)
    app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return GuardMiddleware(app, ApiKeys(config.tenants), config.limits, activity, local_only=not config.tenants)


def model_info(config: ServerConfig, started: Started) -> ModelInfo:
    """What preparing requests needs of the model."""
    limits = config.limits
    return ModelInfo(config.engine.model, config.model_name, started.vocab_size, started.eos_token_ids, limits.answers)


def _add_completions(app: FastAPI, completions: Completions, bodies: Bodies) -> None:
    @app.post("/v1/chat/completions", responses=_STREAM, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        job = await completions.chat(await bodies.read(request, ChatRequest), request)
        return await completions.answer(job, request)

    @app.post("/v1/completions", responses=_STREAM, openapi_extra=takes(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        """Continue a text, or several."""
        job = await completions.completion(await bodies.read(request, CompletionRequest), request)
        return await completions.answer(job, request)


def _add_tokenize(app: FastAPI, bodies: Bodies, max_context: int, admission: Admission) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation as the model reads it."""
        with admission.admit(1, request.state.tenant):
            (tokens,) = (await bodies.read(request, TokenizeRequest)).prompts
        admission.spend(request.state.tenant, math.ceil(len(tokens) / _TOKENIZED))
        body = {"tokens": tokens, "count": len(tokens), "max_model_len": max_context}
        return Response(to_json(body), media_type="application/json")


def _add_plain(
    app: FastAPI, completions: Completions, started: Started, heartbeat: Heartbeat, admission: Admission
) -> None:
    model = {
        "id": completions.model,
        "object": "model",
        "created": 0,
        "owned_by": "kvtier",
        "max_model_len": started.max_context,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same by its name."""
        if name != completions.model:
            raise ApiError(404, f"there is no model {name!r} here; this server has {completions.model!r}", "model")
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 if the server takes requests and its engine replies, 503 otherwise."""
        if why := admission.closed or heartbeat.failure:
            raise ApiError(503, f"the server takes no requests: {why}", code="not_ready", retry_after=5)
        return {"status": "ok"}

    page = load_page()

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return page


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, less the 422 that this server never gives."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        made.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
    assert app.openapi_schema is not None
    return app.openapi_schema
