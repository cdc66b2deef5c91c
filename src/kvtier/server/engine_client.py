"""EngineClient: starts and calls the engine process. Heartbeat: checks that the process replies. Not thread-safe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.engine.params import Explanation, Output
from kvtier.errors import ClosedError, FormatError
from kvtier.server.config import EngineOptions, Limits
from kvtier.server.errors import ApiError
from kvtier.server.messages import (
    ENGINE_CODEC,
    PING,
    SHUTDOWN,
    Abort,
    Call,
    Command,
    EngineFailed,
    Event,
    Reply,
    Started,
    StepOutputs,
    Submit,
    frame,
    read_message,
)

_log = logging.getLogger("kvtier.server")
_HEARTBEAT_SECONDS = 1.0  # pause between calls; a hang is detected within this pause plus the time limit of a call


def _run_engine(options: EngineOptions, connection: socket.socket) -> None:
    """Run the engine process. Only this process imports torch, so that the front end starts seconds earlier."""
    from kvtier.server import engine_process

    engine_process.main(options, connection)


@dataclass(slots=True, eq=False)
class Mailbox:
    """Queue for the outputs of one HTTP job, which may consist of several requests. Supports a single consumer.

    A future per step and a timer per job take 2.0 us of CPU per step. An asyncio.Event and an asyncio.timeout in each
    step would take 10.6 us (x86-64, uvloop, 2026-11-15).
    """

    explanations: dict[str, Explanation] = field(default_factory=dict)  # of finished requests, by request id
    num_left: int = 0  # number of answers whose last output `take` has not returned yet
    sent: float = 0.0  # time at which the engine process sent the newest output
    _outputs: list[Output] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _error: Exception | None = None

    def put(self, output: Output, sent: float) -> None:
        self._outputs.append(output)
        self.sent = sent
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make `take` raise this error after it has returned all outputs that arrived earlier."""
        self._error = error
        self._wake()

    async def take(self) -> list[Output]:
        """Wait for at least one output, and return all outputs that have arrived."""
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._outputs and self._error is not None:
            raise self._error
        taken, self._outputs = self._outputs, []
        self.num_left -= sum(output.finish_reason is not None for output in taken)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink(Protocol):
    """Sends requests and calls to one engine, or to the engines of a fleet."""

    @property
    def pid(self) -> int:
        """Process id of the engine on this machine; 0 if there is none."""
        ...

    def submit(
        self, submits: Sequence[Submit], mailbox: Mailbox, deadline: float
    ) -> contextlib.AbstractContextManager[None]:
        """Run a job's requests and put their outputs into `mailbox`.

        At the end of the with statement, requests that have not finished are cancelled. After `deadline`, a value of
        time.monotonic(), `mailbox.take` raises TimeoutError.
        """
        ...

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call a control function of the engine, or PING."""
        ...


class EngineClient:
    """Starts the engine process, sends requests and calls to it, and delivers its events.

    When the process exits, pending requests and calls raise ClosedError and `ended` is set.
    """

    def __init__(self, options: EngineOptions) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_engine, args=(options, theirs), name="kvtier-engine"
        )
        self._process.start()
        theirs.close()
        self._boxes: dict[str, Mailbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.ended = asyncio.Event()
        self.why = "the engine process ended"  # reason why the process ended; valid once `ended` is set
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # the constructor started the process
        return self._process.pid

    async def start(self) -> Started:
        """Wait until the engine is ready. Raises ClosedError with the reason if the engine fails to start."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        self._reading = asyncio.create_task(self._read(reader))
        started: Started = await self._reply(next(self._numbers))  # number 0: the process sends Reply(0, Started)
        return started

    @contextmanager
    def submit(self, submits: Sequence[Submit], mailbox: Mailbox, deadline: float) -> Iterator[None]:
        mailbox.num_left = sum(submit.params.n for submit in submits)
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), mailbox.fail, TimeoutError())
        try:
            for submit in submits:
                self._boxes[submit.id] = mailbox
                self._send(submit)
            yield
        finally:
            timer.cancel()
            for submit in submits:
                self._boxes.pop(submit.id, None)
                if mailbox.num_left and not self.ended.is_set():
                    self._send(Abort(submit.id))

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        call = Call(next(self._numbers), name, arguments)
        self._send(call)
        result: dict[str, Any] = await self._reply(call.id)
        return result

    async def close(self, seconds: float) -> int | None:
        """Let the engine process save the cache and exit. Kills the process after `seconds`. Returns its exit code."""
        if self._writer is not None and not self.ended.is_set():
            self._send(Call(next(self._numbers), SHUTDOWN, {}))
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            self._process.kill()
        await asyncio.to_thread(self._process.join)
        if self._reading is not None:
            await self._reading
        if self._writer is not None:
            self._writer.close()
        return self._process.exitcode

    async def _reply(self, number: int) -> Any:
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[number]
        finally:
            del self._calls[number]

    def _send(self, command: Command) -> None:
        if self.ended.is_set() or self._writer is None:
            raise ClosedError(self.why)
        self._writer.write(frame(command, ENGINE_CODEC))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                try:
                    event = await read_message(reader, ENGINE_CODEC)
                except FormatError as invalid:
                    _log.error("the engine process sent an invalid message, which is skipped: %s", invalid)
                    continue
                self._handle(event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.ended.set()
        error = ClosedError(self.why)
        for box in self._boxes.values():
            box.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def _handle(self, event: Event) -> None:
        match event:
            case StepOutputs():
                self._deliver(event)
            case Reply(id=str(name), error=Exception() as error):
                if (box := self._boxes.get(name)) is not None:
                    box.fail(error)
            case Reply(id=int(number)):
                call = self._calls.get(number)
                if call is not None and not call.done():
                    call.set_exception(event.error) if event.error is not None else call.set_result(event.value)
            case EngineFailed():
                self.why = event.why

    def _deliver(self, step: StepOutputs) -> None:
        for explanation in step.ended:  # before outputs, because a consumer reads the explanation after the last output
            if (box := self._boxes.get(explanation.request_id)) is not None:
                box.explanations[explanation.request_id] = explanation
        for output in step.outputs:
            if (box := self._boxes.get(output.request_id)) is not None:
                box.put(output, step.sent)


@dataclass(frozen=True, slots=True, eq=False)
class Heartbeat:
    """Detects an engine process that is stopped or hangs, by sending two calls periodically.

    The thread that reads commands answers PING at once. The engine's thread answers "beat" between two steps, so "beat"
    has a longer time limit.
    """

    engine: EngineLink
    limits: Limits
    _failures: dict[str, str] = field(default_factory=dict)  # reasons, by part of the engine
    _failed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failure(self) -> str:
        """Reason why the engine is unresponsive; empty if the engine replies in time."""
        return next(iter(self._failures.values()), "")

    async def run(self) -> None:
        limits = self.limits
        try:
            await asyncio.gather(
                self._watch("the engine process", PING, limits.engine_reply_seconds),
                self._watch("the engine's thread", "beat", limits.engine_step_seconds),
            )
        except ClosedError:
            self._failures["end"] = "the engine has ended"
            self._failed.set()

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call a control function. Raises 503 while the engine does not reply, 504 after `control_seconds`."""
        work = asyncio.ensure_future(self.engine.call(name, **arguments))
        failed = asyncio.ensure_future(self._failed.wait())
        seconds = self.limits.control_seconds
        try:
            await asyncio.wait((work, failed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if self.failure:
                raise ApiError(503, self.failure, code="engine_unresponsive")
            message = f"the engine did not complete the call within {seconds:g} s; the call may still complete later"
            raise ApiError(504, message, code="timeout")
        finally:
            for future in (work, failed):
                future.cancel()
            await asyncio.gather(work, failed, return_exceptions=True)

    async def is_responsive(self) -> bool:
        """Return True if the engine process answers a PING in time."""
        try:
            async with asyncio.timeout(self.limits.engine_reply_seconds):
                await self.engine.call(PING)
        except (TimeoutError, ClosedError):
            return False
        return True

    async def _watch(self, part: str, call: str, seconds: float) -> None:
        while True:
            reply = asyncio.ensure_future(self.engine.call(call))
            try:
                await asyncio.wait((reply,), timeout=seconds)
                if not reply.done():
                    self._failures[part] = f"{part} has not replied for {seconds:g} s"
                    self._failed.set()
                    _log.error("%s; /health returns 503", self._failures[part])
                await reply
            finally:
                reply.cancel()
            if self._failures.pop(part, ""):
                _log.info("%s replies again", part)
            if not self._failures:
                self._failed.clear()
            await asyncio.sleep(_HEARTBEAT_SECONDS)
