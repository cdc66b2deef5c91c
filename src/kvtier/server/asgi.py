"""Between the app and a connection: streams of events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """Nobody is there to answer."""


class EventStream(Response):
    """Server-sent events from an iterator, which is closed when the client goes or does not read for too long."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], headers: dict[str, str], seconds: float) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._seconds = first, rest, seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send all of it; the end of the stream is an empty body."""
        async with aclosing(self._rest):
            try:
                async with asyncio.timeout(self._seconds):
                    await unless_gone(receive, self._send(send))
            except (ClientGone, TimeoutError, OSError):
                return  # a response that is not ended closes its connection

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do this work while the client is there; it is cancelled, and ClientGone raised, when the client is not."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
