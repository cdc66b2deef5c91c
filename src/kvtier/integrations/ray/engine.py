"""FleetEngine: sends requests and control calls of the front end to the replicas of a fleet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from kvtier.errors import ClosedError, KvtierError
from kvtier.index.chain import Chain, Namespace
from kvtier.integrations.ray.merge import merged
from kvtier.integrations.ray.ticket import RouteTicket
from kvtier.router import hashes_of
from kvtier.server.engine_client import Mailbox
from kvtier.server.errors import ApiError
from kvtier.server.messages import PING, Reply, StepOutputs, Submit, decode_message, encode_message

_log = logging.getLogger("ray.serve")
# Raised if a replica, its node or the deployment fails or refuses a request. Another attempt may succeed.
_LOST = (RayError, RayServeException, BackPressureError, DeploymentUnavailableError, ClosedError, OSError)
_RETRY_SECONDS = 0.2  # pause before another attempt
_GRACE_SECONDS = 5.0  # added to the deadline of the replica, so that the front end reports a timeout first
_LOCAL = (PING, "beat")  # calls that need the reply of only one replica


class FleetEngine:
    """The engines of a fleet, with the methods of EngineClient.

        submit --> routed to a replica --outputs--> mailbox
                        --replica lost before the first output--> routed again, for up to `retry_seconds`
                        --replica lost later--> status 503, because the client may already have a part of the answer

    Control calls in `_LOCAL` go to one replica. Other control calls go to all, and replies without an error are merged.
    """

    pid = 0

    def __init__(self, handle: DeploymentHandle, namespace: Namespace, retry_seconds: float) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._ping = handle.options(method_name="ping")
        self._handle = handle
        self._namespace = namespace
        self._retry_seconds = retry_seconds
        self._jobs: set[asyncio.Task[None]] = set()

    @contextmanager
    def submit(self, submits: Sequence[Submit], mailbox: Mailbox, deadline: float) -> Iterator[None]:
        mailbox.num_left = sum(submit.params.n for submit in submits)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline - time.monotonic(), mailbox.fail, TimeoutError())
        job = loop.create_task(self._run(submits, mailbox, deadline))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            yield
        finally:
            timer.cancel()
            job.cancel()

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        if name in _LOCAL:
            return await self._any_reply()
        try:
            response = self._handle.broadcast("call", name, arguments)
            bodies = await response.results_async(return_exceptions=True)
        except _LOST as error:
            raise ClosedError(f"no replica answered the call {name}: {type(error).__name__}") from error
        replies: list[Reply] = [decode_message(body) for body in bodies if isinstance(body, bytes)]
        values = [reply.value for reply in replies if reply.error is None]
        if not values:
            raise next(
                (reply.error for reply in replies if reply.error is not None), ClosedError("no replica answered")
            )
        return merged(values)

    async def _any_reply(self) -> dict[str, Any]:
        """Wait until one replica replies."""
        while True:
            try:
                await self._ping.remote()
                return {}
            except _LOST:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _run(self, submits: Sequence[Submit], mailbox: Mailbox, deadline: float) -> None:
        """Run the requests. If a replica is lost before the first output, try again for up to `retry_seconds`."""
        ticket = self._ticket(submits)
        give_up = min(deadline, time.monotonic() + self._retry_seconds)
        try:
            while True:
                try:
                    async with asyncio.timeout(None) as routing:
                        routing.reschedule(asyncio.get_running_loop().time() + max(0.0, give_up - time.monotonic()))
                        await self._attempt(ticket, submits, mailbox, deadline, routing)
                    return
                except (*_LOST, TimeoutError) as error:
                    _log.warning("replica %s lost request %s: %r", ticket.replica or "-", submits[0].id, error)
                    has_begun = ticket.replica and mailbox.sent
                    if has_begun or time.monotonic() + _RETRY_SECONDS >= give_up:
                        raise ApiError(503, _why(error, bool(has_begun)), code="replica_lost", retry_after=1) from error
                    ticket.avoid |= {ticket.replica}
                    await asyncio.sleep(_RETRY_SECONDS)
        except (ApiError, KvtierError) as error:
            mailbox.fail(error)
        except Exception as error:  # any other error would leave the client without an answer
            _log.exception("request %s failed", submits[0].id)
            mailbox.fail(ApiError(500, f"the fleet could not run the request: {type(error).__name__}"))
        finally:
            ticket.finish()

    async def _attempt(
        self,
        ticket: RouteTicket,
        submits: Sequence[Submit],
        mailbox: Mailbox,
        deadline: float,
        routing: asyncio.Timeout,
    ) -> None:
        """Run the requests on one replica. When the replica has accepted them, disable the timeout `routing`."""
        ticket.replica = ""
        bodies = [encode_message(submit) for submit in submits]
        num_left = mailbox.num_left
        stream = self._generate.remote(ticket, bodies, deadline - time.monotonic() + _GRACE_SECONDS)
        try:
            async for body in stream:
                if not body:
                    routing.reschedule(None)
                    continue
                message = decode_message(body)
                if isinstance(message, Reply):
                    assert message.error is not None
                    raise message.error
                if not mailbox.sent:
                    ticket.on_first_token()
                num_left -= sum(output.finish_reason is not None for output in message.outputs)
                _deliver(message, mailbox)
        except BaseException:
            stream.cancel()
            raise
        if num_left:
            raise ClosedError("the replica ended the answer early")

    def _ticket(self, submits: Sequence[Submit]) -> RouteTicket:
        chain = Chain(self._namespace, submits[0].tokens, salt=submits[0].salt)
        return RouteTicket(hashes_of(chain.keys()), sum(len(submit.tokens) for submit in submits))


def _deliver(step: StepOutputs, mailbox: Mailbox) -> None:
    for explanation in step.ended:
        mailbox.explanations[explanation.request_id] = explanation
    for output in step.outputs:
        mailbox.put(output, time.monotonic())  # not the time of the replica, whose clock may differ


def _why(error: Exception, has_begun: bool) -> str:
    if has_begun:
        return "the replica that ran the request was lost; send the request again"
    return f"no replica ran the request in time ({type(error).__name__}); send the request again"
