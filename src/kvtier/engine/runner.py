from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtier.engine.engine import Engine
from kvtier.engine.params import Output, SamplingParams
from kvtier.errors import ClosedError

T = TypeVar("T")
_Call = tuple[Callable[[Engine], Any], Future[Any]]


class EngineRunner:
    """Runs an Engine on its own thread, for callers on other threads. The thread runs steps while there is work."""

    def __init__(self, engine: Engine, on_breakdown: Callable[[Exception], object] | None = None) -> None:
        """`on_breakdown` is called on the engine thread with the error that ended the engine."""
        self._engine = engine
        self._on_breakdown = on_breakdown
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._listeners: dict[str, tuple[Callable[[Output | None], object], int]] = {}
        self._closed = threading.Event()
        self.error: Exception | None = None
        """The error that ended the engine. None while the engine runs, and after a normal `close`."""
        self._thread = threading.Thread(target=self._loop, name="kvtier-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call `function(engine)` on the engine thread, between two steps."""
        if self._closed.is_set():
            raise ClosedError("this engine was closed") from self.error
        future: Future[T] = Future()
        self._calls.put((function, future))
        if self._closed.is_set():  # closed since the check above, so the thread may have stopped reading the queue
            self._refuse_calls()
        return future

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Output]:
        """Yield the outputs of a request as they arrive. Closing the iterator early cancels the request."""
        outputs: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        name = self.submit(prompt, params, outputs.put, **options).result()
        try:
            while (output := outputs.get()) is not None:
                yield output
            if self.error is not None:
                raise ClosedError("the engine failed") from self.error
        finally:
            self.leave(name)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        deliver: Callable[[Output | None], object],
        **options: Any,
    ) -> Future[str]:
        """Add a request. The engine thread calls `deliver` with each output, and with None at the end."""

        def add(engine: Engine) -> str:
            name = engine.add(prompt, params, **options)
            self._listeners[name] = (deliver, (params or SamplingParams()).n)
            return name

        return self.call(add)

    def leave(self, name: str) -> None:
        """Cancel a request and stop its calls of `deliver`."""
        if not self._closed.is_set():
            self.call(lambda engine: (self._listeners.pop(name, None), engine.abort(name)))

    def close(self) -> None:
        """Cancel all requests, end their streams and stop the thread. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._calls.put(None)
        self._thread.join()

    def _loop(self) -> None:
        try:
            while self._run_calls(wait=not self._engine.has_work()):
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:  # the engine itself failed; errors of single requests are not raised here
            self.error = error
        self._closed.set()
        self._refuse_calls()
        for deliver, _ in self._listeners.values():
            deliver(None)
        if self.error is not None and self._on_breakdown is not None:
            self._on_breakdown(self.error)
        self._engine.close()

    def _refuse_calls(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is not None:
                error = ClosedError("this engine was closed")
                error.__cause__ = self.error
                _, future = call
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._calls.put(None)  # put it back: the thread ends when it reads None

    def _run_calls(self, *, wait: bool) -> bool:
        """Run queued calls. While the engine has no work, wait for calls. Return False if the runner was closed."""
        while wait or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            function, future = call
            if future.set_running_or_notify_cancel():  # False if the caller has cancelled the call
                try:
                    future.set_result(function(self._engine))
                except Exception as error:
                    future.set_exception(error)
            wait = not self._engine.has_work() and self._calls.empty()
        return True

    def _deliver(self, output: Output) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is None:
            return
        deliver, num_left = listener
        deliver(output)
        num_left -= output.finish_reason is not None
        self._listeners[output.request_id] = (deliver, num_left)
        if not num_left:
            del self._listeners[output.request_id]
            deliver(None)
