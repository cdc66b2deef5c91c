"""EngineRunner: an Engine on a thread of its own, for callers on other threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.engine.engine import Engine
from kvtier.engine.params import Output, SamplingParams
from kvtier.errors import ClosedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the engine's thread."""

    function: Callable[[Engine], Any]
    future: Future[Any]

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            self.future.set_result(self.function(engine))
        except Exception as error:  # whatever it raises is the caller's
            self.future.set_exception(error)


class EngineRunner:
    """Steps the engine while there is work. Everything that touches the engine happens on its thread.

    `stream` and `astream` give a request's outputs as they come; leaving one early cancels the request.
    """

    def __init__(self, engine: Engine, on_breakdown: Callable[[Exception], object] | None = None) -> None:
        """`on_breakdown` is told, on the engine's thread, what ended it, if it was not `close`."""
        self._engine = engine
        self._on_breakdown = on_breakdown
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._listeners: dict[str, tuple[Callable[[Output | None], object], int]] = {}
        self._closed = threading.Event()
        self.error: Exception | None = None
        """What ended the engine, if it was not `close`."""
        self._thread = threading.Thread(target=self._loop, name="kvtier-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function of the engine on its thread, between two steps."""
        if self._closed.is_set():
            raise ClosedError("this engine was closed") from self.error
        future: Future[T] = Future()
        self._calls.put(_Call(function, future))
        if self._closed.is_set():  # meanwhile: the thread may have looked for the last time
            self._refuse_calls()
        return future

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Output]:
        """Outputs of a request, on the caller's thread."""
        outputs: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        name = self.submit(prompt, params, outputs.put, **options).result()
        try:
            while (output := outputs.get()) is not None:
                yield output
            if self.error is not None:
                raise ClosedError("the engine broke down") from self.error
        finally:
            self.leave(name)

    async def astream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Output]:
        """Outputs of a request, on the caller's event loop."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Output | None]()
        deliver = outputs.put_nowait
        added = self.submit(prompt, params, lambda output: loop.call_soon_threadsafe(deliver, output), **options)
        try:
            name = await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            added.add_done_callback(self._leave_added)  # it may be on its way in already
            raise
        try:
            while (output := await outputs.get()) is not None:
                yield output
            if self.error is not None:
                raise ClosedError("the engine broke down") from self.error
        finally:
            self.leave(name)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        deliver: Callable[[Output | None], object],
        **options: Any,
    ) -> Future[str]:
        """Add a request whose outputs go to `deliver`, on the engine's thread; None follows the last one."""

        def add(engine: Engine) -> str:
            name = engine.add(prompt, params, **options)
            self._listeners[name] = (deliver, (params or SamplingParams()).n)
            return name

        return self.call(add)

    def leave(self, name: str) -> None:
        """Nobody listens any more: cancel the request if it runs."""
        if not self._closed.is_set():
            self.call(lambda engine: (self._listeners.pop(name, None), engine.abort(name)))

    def _leave_added(self, added: Future[str]) -> None:
        if not added.cancelled() and added.exception() is None:
            self.leave(added.result())

    def close(self) -> None:
        """Cancel what runs, tell whoever waits, end the thread. Closing twice is fine."""
        if not self._closed.is_set():
            self._closed.set()
            self._calls.put(None)
        self._thread.join()

    def _loop(self) -> None:
        try:
            while self._run_calls(wait=not self._engine.has_work()):
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:  # what fails a request does not come here: the engine itself is broken
            self.error = error
        self._closed.set()
        self._refuse_calls()
        for deliver, _ in self._listeners.values():
            deliver(None)
        if self.error is not None and self._on_breakdown is not None:
            self._on_breakdown(self.error)
        self._engine.close()

    def _refuse_calls(self) -> None:
        """Nobody will run them."""
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                error = ClosedError("this engine was closed")
                error.__cause__ = self.error
                if call.future.set_running_or_notify_cancel():
                    call.future.set_exception(error)
            self._calls.put(None)  # it is the thread's

    def _run_calls(self, *, wait: bool) -> bool:
        """Run what was asked for; False once closed."""
        while wait or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call.run(self._engine)
            wait = not self._engine.has_work() and self._calls.empty()
        return True

    def _deliver(self, output: Output) -> None:
        found = self._listeners.get(output.request_id)
        if found is None:
            return
        deliver, num_left = found
        deliver(output)
        if output.finish_reason is not None:
            if num_left == 1:
                del self._listeners[output.request_id]
                deliver(None)
            else:
                self._listeners[output.request_id] = (deliver, num_left - 1)
