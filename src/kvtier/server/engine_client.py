"""EngineClient: the front end's end of the channel. For one event loop."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import pickle
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from kvtier.engine.params import Explanation, Output
from kvtier.errors import ClosedError, StateError
from kvtier.server.config import EngineOptions
from kvtier.server.messages import (
    LENGTH,
    Abort,
    Call,
    Command,
    ControlResult,
    EngineFailed,
    Event,
    Ping,
    Refused,
    Shutdown,
    Started,
    StepOutputs,
    Submit,
    frame,
)


def _run_engine(options: EngineOptions, connection: socket.socket) -> None:
    """In the engine process, which needs torch; the front end does not, and is up seconds earlier without."""
    from kvtier.server import engine_process

    engine_process.main(options, connection)


class Mailbox:
    """Outputs of one or several requests that nobody has taken yet. One taker at a time.

    A bare future, and one timer for the whole request: an asyncio.Event and an asyncio.timeout for every step take
    10.6 us of CPU instead of 2.0 (x86-64, uvloop, 2026-11-15).
    """

    __slots__ = ("_error", "_outputs", "_waiter", "explanations", "sent")

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.explanations: dict[str, Explanation] = {}
        """Of the requests that are over."""
        self.sent = 0.0
        """When the engine process sent what was put in last."""

    def put(self, output: Output, sent: float) -> None:
        """One more."""
        self._outputs.append(output)
        self.sent = sent
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more comes."""
        self._error = error
        self._wake()

    async def take(self) -> list[Output]:
        """All there are, at least one: who is slow gets several at once. Raises what it failed with after the last."""
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._outputs and self._error is not None:
            raise self._error
        taken, self._outputs = self._outputs, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Starts the engine process, sends it requests and calls, and hands out what comes back.

    When the process ends without being asked to, whoever waits gets ClosedError and `ended` is set.
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
        self._started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self.why = "the engine process ended"
        """Why it ended, once it has."""
        self.ended = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> Started:
        """Wait until the engine is ready. Raises StateError with the reason if it does not get there."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        self._reading = asyncio.create_task(self._read(reader))
        return await asyncio.shield(self._started)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def num_streams(self) -> int:
        """Requests somebody listens to."""
        return len(self._boxes)

    async def stream(
        self, submits: Sequence[Submit], mailbox: Mailbox, deadline: float
    ) -> AsyncGenerator[list[Output]]:
        """Outputs of requests that belong together. Closing the iterator before the end cancels them at once.

        Raises TimeoutError after `deadline` (time.monotonic).
        """
        num_left = {submit.id: submit.params.n for submit in submits}
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), mailbox.fail, TimeoutError())
        try:
            for submit in submits:
                self._boxes[submit.id] = mailbox
                self._send(submit)
            while num_left:
                outputs = await mailbox.take()
                for output in outputs:
                    if output.finish_reason is not None:
                        num_left[output.request_id] -= 1
                        if not num_left[output.request_id]:
                            del num_left[output.request_id]
                yield outputs
        finally:
            timer.cancel()
            for submit in submits:
                self._boxes.pop(submit.id, None)
            if not self.ended.is_set():
                for name in num_left:
                    self._send(Abort(name))

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a control in the engine process, between two steps."""
        return await self._answer(Call(next(self._numbers), name, arguments))

    async def ping(self) -> None:
        """Wait for a reply of the engine process, which does not wait for a step."""
        await self._answer(Ping(next(self._numbers)))

    async def _answer(self, command: Call | Ping) -> Any:
        number = command.id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(command)
        self._calls[number] = future
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    async def close(self, seconds: float) -> int | None:
        """Let the engine keep what it can and end; kill it if that takes longer. Returns its exit code."""
        if self._writer is not None and not self.ended.is_set():
            self._send(Shutdown())
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

    def _send(self, command: Command) -> None:
        if self.ended.is_set() or self._writer is None:
            raise ClosedError(self.why)
        self._writer.write(frame(command))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._handle(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.ended.set()
        error = ClosedError(self.why)
        for box in self._boxes.values():
            box.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        if not self._started.done():
            self._started.set_exception(StateError(self.why))

    def _handle(self, event: Event) -> None:
        match event:
            case StepOutputs():
                self._deliver(event)
            case ControlResult():
                call = self._calls.get(event.id)
                if call is not None and not call.done():
                    call.set_exception(event.error) if event.error is not None else call.set_result(event.value)
            case Refused():
                if (box := self._boxes.get(event.id)) is not None:
                    box.fail(event.error)
            case Started():
                self._started.set_result(event)
            case EngineFailed():
                self.why = event.why

    def _deliver(self, progress: StepOutputs) -> None:
        for explanation in progress.ended:  # before the output that says it is over
            if (box := self._boxes.get(explanation.request_id)) is not None:
                box.explanations[explanation.request_id] = explanation
        for output in progress.outputs:
            if (box := self._boxes.get(output.request_id)) is not None:
                box.put(output, progress.sent)
