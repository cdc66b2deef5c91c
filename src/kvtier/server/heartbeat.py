"""Heartbeat: detects an engine process that is stopped or hangs. For one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kvtier.errors import ClosedError
from kvtier.server.config import Limits
from kvtier.server.engine_client import EngineClient
from kvtier.server.errors import ApiError

_log = logging.getLogger("kvtier.server")
_INTERVAL_SECONDS = 1.0  # a hang is detected after at most this time plus the reply limit


class Heartbeat:
    """Sends two messages again and again and waits for their replies.

    The process's command thread replies to one at once; the engine's thread replies to the other between two steps.
    They have different deadlines, since a step may compute for long.
    """

    def __init__(self, engine: EngineClient, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits
        self._failures: dict[str, str] = {}
        self._failed = asyncio.Event()

    @property
    def failure(self) -> str:
        """Description of the overdue reply; empty if there is none."""
        return next(iter(self._failures.values()), "")

    async def run(self) -> None:
        """Watch the engine until it ends."""
        limits = self._limits
        try:
            await asyncio.gather(
                self._watch("the engine process", self._engine.ping, limits.engine_reply_seconds),
                self._watch("the engine's thread", lambda: self._engine.call("beat"), limits.engine_step_seconds),
            )
        except ClosedError:
            self._failures["end"] = "the engine has ended"
            self._failed.set()

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a control in the engine. Raises 503 while the engine does not reply, 504 after `control_seconds`."""
        work = asyncio.ensure_future(self._engine.call(name, **arguments))
        failed = asyncio.ensure_future(self._failed.wait())
        seconds = self._limits.control_seconds
        try:
            await asyncio.wait((work, failed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if self.failure:
                raise ApiError(503, self.failure, code="engine_unresponsive", retry_after=5)
            message = f"the engine did not complete the call within {seconds:g} s; it may still do so"
            raise ApiError(504, message, code="timeout")
        finally:
            for each in (work, failed):
                each.cancel()
            await asyncio.gather(work, failed, return_exceptions=True)

    async def is_responsive(self) -> bool:
        """True if the engine process replies in time now."""
        try:
            async with asyncio.timeout(self._limits.engine_reply_seconds):
                await self._engine.ping()
        except (TimeoutError, ClosedError):
            return False
        return True

    async def _watch(self, what: str, send: Callable[[], Awaitable[Any]], seconds: float) -> None:
        while True:
            reply = asyncio.ensure_future(send())
            try:
                await asyncio.wait((reply,), timeout=seconds)
                if not reply.done():
                    self._failures[what] = f"{what} has not replied for {seconds:g} s"
                    self._failed.set()
                    _log.error("%s; /health is 503", self._failures[what])
                await reply
            finally:
                reply.cancel()
            if self._failures.pop(what, ""):
                _log.info("%s replies again", what)
            if not self._failures:
                self._failed.clear()
            await asyncio.sleep(_INTERVAL_SECONDS)
