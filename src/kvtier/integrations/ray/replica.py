"""EngineReplica: the engine process of `kvtier serve` as a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import ray

from kvtier.errors import KvtierError, StateError
from kvtier.integrations.ray.merge import labelled
from kvtier.integrations.ray.ticket import RouteTicket
from kvtier.server.config import ServerConfig
from kvtier.server.engine_client import EngineClient, Heartbeat, Mailbox
from kvtier.server.messages import PING, Reply, StepOutputs, decode_message, encode_message
from kvtier.server.serve import CLOSE_SECONDS, set_quotas

_log = logging.getLogger("ray.serve")


class EngineReplica:
    """Runs requests and control calls on one engine. Ray Serve calls all methods on one event loop."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc] # Ray Serve allows async here
        address = f"tcp://{ray.util.get_node_ip_address()}:*"
        options = replace(config.engine, events=address, events_replay=address, events_token_ids=False)
        self._engine = EngineClient(options)
        try:
            self._started = await self._engine.start()
            for note in self._started.notes:
                _log.warning("%s", note)
            await set_quotas(self._engine, config.tenants)
        except BaseException:
            await self._engine.close(0.0)
            raise
        self._heartbeat = Heartbeat(self._engine, config.limits)
        self._watch = asyncio.create_task(self._heartbeat.run())

    async def generate(self, ticket: RouteTicket, submits: Sequence[bytes], seconds: float) -> AsyncGenerator[bytes]:
        """Run the encoded requests. Yield b"", then encoded outputs, and after a KvtierError the encoded error."""
        mailbox = Mailbox()
        decoded = [decode_message(submit) for submit in submits]
        yield b""  # the replica has accepted the request
        try:
            with self._engine.submit(decoded, mailbox, time.monotonic() + seconds):
                while mailbox.num_left:
                    outputs = await mailbox.take()
                    ended = tuple(mailbox.explanations.values())
                    mailbox.explanations.clear()
                    yield encode_message(StepOutputs(tuple(outputs), ended, mailbox.sent))
        except KvtierError as error:
            yield encode_message(Reply(0, error=error))

    async def call(self, name: str, arguments: dict[str, Any]) -> bytes:
        """Call a control function of the engine. Return the encoded reply."""
        try:
            value = await self._heartbeat.call(name, **arguments)
            if name == "metrics":
                value = {"metrics": labelled(value["metrics"], _replica_name())}
            return encode_message(Reply(0, value))
        except KvtierError as error:
            return encode_message(Reply(0, error=error))

    async def ping(self) -> None:
        await self._engine.call(PING)

    async def describe(self) -> tuple[bytes, dict[str, Any]]:
        """Return the encoded description of the engine, and the fields of its namespace."""
        routing = await self._engine.call("routing")
        return encode_message(Reply(0, self._started)), routing["namespace"]

    async def info(self) -> dict[str, Any]:
        """Return the name, node and process id of this replica, and the process id of its engine."""
        return {
            "replica": _replica_name(),
            "pid": os.getpid(),
            "engine_pid": self._engine.pid,
            "node": ray.util.get_node_ip_address(),
        }

    # ---- called by Ray Serve ----

    async def check_health(self) -> None:
        """Raise an error if the engine does not reply. Ray Serve then replaces the replica."""
        if self._heartbeat.failure:
            raise StateError(self._heartbeat.failure)

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"events": self._started.events, "replay": self._started.events_replay}

    async def record_routing_stats(self) -> dict[str, Any]:
        costs: dict[str, Any] = (await self._heartbeat.call("routing"))["costs"]
        return costs

    async def record_autoscaling_stats(self) -> dict[str, float]:
        routing = await self._heartbeat.call("routing")
        return {
            "load": (routing["running"] + routing["waiting"]) / routing["max_rows"],
            "pressure": routing["pressure"],
        }

    async def __del__(self) -> None:
        """Save the cache and end the engine process. Ray Serve calls this after it has drained the replica."""
        with contextlib.suppress(AttributeError):  # there is no `_watch` if the constructor failed
            self._watch.cancel()
            await self._engine.close(CLOSE_SECONDS)


def _replica_name() -> str:
    name: str = ray.serve.get_replica_context().replica_id.to_full_id_str()
    return name
