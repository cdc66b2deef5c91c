"""FleetIngress: the front end of `kvtier serve` as a deployment of Ray Serve."""

from __future__ import annotations

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.engine.tokenizer import load_tokenizer
from kvtier.index.chain import Namespace
from kvtier.integrations.ray.engine import FleetEngine
from kvtier.server.config import ServerConfig
from kvtier.server.messages import Started, decode_message
from kvtier.server.serve import make_front_end, open_tracing


class FleetApp:
    """The server's application without lifespan events and x-request-id headers. Ray Serve adds such headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [each for each in message["headers"] if each[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, without_id)


@serve.ingress()
class FleetIngress:
    """Runs requests on the replicas. It keeps running while the number of replicas changes."""

    async def __init__(self, server: ServerConfig, retry_seconds: float, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        body, namespace = await replicas.describe.remote()
        started: Started = decode_message(body).value
        self._engine = FleetEngine(replicas, Namespace(**namespace), retry_seconds)
        self._rows_per_replica = started.max_rows
        tokenizer = await asyncio.to_thread(load_tokenizer, server.engine.model)
        await asyncio.to_thread(getattr, tokenizer, "max_token_bytes")  # the first access is slow
        self._tracing = open_tracing(server)
        self._front = make_front_end(server, self._engine, started, tokenizer, self._tracing)
        self._watch = asyncio.create_task(self._front.heartbeat.run())

    def reconfigure(self, config: dict[str, int]) -> None:
        """Set how many answers may run at once, over all replicas. Ray Serve calls this with each new configuration."""
        self._front.admission.num_rows = self._rows_per_replica * config["most_replicas"]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return FleetApp(self._front.app)
