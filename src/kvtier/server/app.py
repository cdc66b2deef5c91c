"""The HTTP interface: which path does what."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

import kvtier
from kvtier.engine.tokenizer import Tokenizer
from kvtier.server import failures
from kvtier.server.activity import Activity
from kvtier.server.admission import Admission
from kvtier.server.asgi import App
from kvtier.server.auth import Keys
from kvtier.server.completions import Completions
from kvtier.server.config import ServerConfig
from kvtier.server.control import Control, add_control, add_state
from kvtier.server.dashboard import load_page
from kvtier.server.engine_client import EngineClient
from kvtier.server.failures import ApiError
from kvtier.server.gate import Gate
from kvtier.server.messages import Started
from kvtier.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest

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
        429: "too much at once; see Retry-After",
        503: "the server starts, sleeps or ends; see Retry-After",
        504: "the request took too long",
    }.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer, or events if stream is true", "content": {"text/event-stream": {}}}
}


def make_app(
    config: ServerConfig,
    engine: EngineClient,
    started: Started,
    tokenizer: Tokenizer,
    admission: Admission,
    activity: Activity,
) -> App:
    """The app with its gate."""
    app = FastAPI(
        title="kvtier", version=kvtier.__version__, docs_url=None, redoc_url=None, responses=_ERRORS, debug=False
    )
    failures.install(app)
    completions = Completions(engine, started, tokenizer, config.model_name, config.limits, admission, activity)
    _add_completions(app, completions)
    _add_plain(app, completions, started, engine, admission)
    router = APIRouter()
    add_state(router, engine, completions.model, activity, admission)
    add_control(router, Control(engine, completions, admission, {each.name: each for each in config.tenants}))
    app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return Gate(app, Keys(config.tenants), config.limits, activity, local_only=not config.tenants)


def _add_completions(app: FastAPI, completions: Completions) -> None:
    @app.post("/v1/chat/completions", responses=_STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await completions.answer(await completions.chat(body, request.state.tenant), request)

    @app.post("/v1/completions", responses=_STREAM)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        return await completions.answer(await completions.completion(body, request.state.tenant), request)


def _add_plain(
    app: FastAPI, completions: Completions, started: Started, engine: EngineClient, admission: Admission
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

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text, or of a conversation as the model reads it."""
        if body.messages is not None:
            tokens = await completions.chat_tokens(body.messages)
        else:
            tokens = await completions.encode(body.prompt or "", "prompt", add_special=body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": started.max_context}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are taken: 200, or 503."""
        if engine.ended.is_set() or admission.closed:
            why = admission.closed or "the engine has ended"
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
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
    assert app.openapi_schema is not None
    return app.openapi_schema
