"""WorkerPool: runs calls in worker processes, each with a deadline. Not thread-safe.

run -> queue of the tenant and function --in turn--> process --replies in time--> result
                                                             --is late----------> killed and replaced; the call fails
                                                             --dies-------------> replaced; the call may be retried
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from kvtier.server.errors import ApiError
from kvtier.server.messages import WORKER_CODEC, Call, Reply, frame, read_message
from kvtier.server.prepare import PrepareConfig

_log = logging.getLogger("kvtier.server")
_START_SECONDS = 60.0  # longest time to start a process, or to load its schema compiler
_RESTART_SECONDS = 1.0  # wait after the second and each later failed start in a row
# Longest time that a call may continue after its client disconnects: about the time to kill and replace a process.
_ABANDONED_SECONDS = 1.0
_END_SECONDS = 1.0  # longest wait for a killed process to exit
_MAX_WAITING = 64  # waiting calls per tenant
_DIED = (OSError, asyncio.IncompleteReadError)  # errors of the connection to a process that has died


@dataclass(slots=True, eq=False)
class _Task:
    call: Call
    tenant: str
    future: asyncio.Future[Any]
    num_deaths: int = 0  # processes that died during this call
    clock: asyncio.Timeout | None = None  # set while the call runs

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.call.name

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        self.has_compiler = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            start = f"from kvtier.server.worker import main; main({theirs.fileno()})"
            code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )
            undo.pop_all()

    async def call(self, message: Call | PrepareConfig) -> Reply:
        """Send a message and read the reply. Raises OSError or IncompleteReadError if the process dies."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        self._writer.write(frame(message, WORKER_CODEC))
        await self._writer.drain()
        reply: Reply = await read_message(self._reader, WORKER_CODEC)
        return reply

    def kill(self) -> None:
        self.process.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._socket.close()


class WorkerPool:
    """Up to `size` processes, started on demand.

    If `size` is above 1, calls of one tenant use at most `size` - 1 processes. In a server without tenants, this limit
    applies per function. Each pair of tenant and function name has a queue. The queues take turns, one call per turn.
    """

    def __init__(self, config: PrepareConfig, size: int, *, has_tenants: bool) -> None:
        self.config = config
        self._size = size
        self._most_running = max(1, size - 1)
        self._has_tenants = has_tenants
        self._waiting: list[_Task] = []
        self._turns: Counter[tuple[str, str]] = Counter()  # number of the latest turn of each queue
        self._running: Counter[str] = Counter()
        self._serving: list[asyncio.Task[None]] = []  # each task keeps one process running
        self._processes: list[_Process] = []
        self._dead: list[subprocess.Popen[bytes]] = []  # killed, and perhaps not exited yet
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    @property
    def num_running(self) -> int:
        return self._running.total()

    def start(self) -> None:
        """Start one more process. The pool starts processes on demand; an early start makes the first call faster."""
        self._serving.append(asyncio.create_task(self._serve()))

    async def run(self, name: str, tenant: str, /, **arguments: Any) -> Any:
        """Call a function in a worker and return its result. If the caller is cancelled, the process may be replaced.

        Raises the ApiError of the function. Also raises ApiError 400 at the deadline, 429 if too many calls of the
        tenant wait, 503 if the pool is closed, and 500 or 503 if workers fail.
        """
        if self._closed:
            raise _shutting_down()
        if sum(task.tenant == tenant for task in self._waiting) >= _MAX_WAITING:
            message = f"{_MAX_WAITING} large requests are already waiting to be prepared; retry later"
            raise ApiError(429, message, code="overloaded")
        task = _Task(Call(0, name, arguments), tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(task)
        if self._size > len(self._serving) == self.num_running and self._may_run(task):  # all processes are busy
            self.start()
        self._changed.set()
        try:
            return await task.future
        finally:
            self._leave(task)

    async def close(self) -> None:
        """Kill the processes and fail all calls with 503."""
        self._closed = True
        self._fail_waiting(_shutting_down())
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for process in self._dead:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)

    # ---- queue ----

    def _group(self, task: _Task) -> str:
        return task.tenant if self._has_tenants else task.call.name

    def _may_run(self, task: _Task) -> bool:
        return self._running[self._group(task)] < self._most_running

    def _take(self) -> _Task | None:
        """Remove and return the next task that may run, from the queue whose last turn was longest ago."""
        task = min(filter(self._may_run, self._waiting), key=lambda task: self._turns[task.key], default=None)
        if task is not None:
            self._waiting.remove(task)
            self._turns[task.key] = max(self._turns.values(), default=0) + 1
        return task

    def _leave(self, task: _Task) -> None:
        """Remove a finished or cancelled task. A call that still runs has at most `_ABANDONED_SECONDS` to finish."""
        if task in self._waiting:
            self._waiting.remove(task)
        elif task.clock is not None and not task.clock.expired():
            soon = asyncio.get_running_loop().time() + _ABANDONED_SECONDS
            task.clock.reschedule(min(soon, task.clock.when() or soon))

    def _fail_waiting(self, error: ApiError) -> None:
        for task in self._waiting:
            task.fail(replace(error))  # each caller raises its own copy
        self._waiting.clear()

    # ---- processes ----

    async def _serve(self) -> None:
        """Run a process and send calls to it. Replaces the process if it fails.

        A failed start is repeated, because the process may have been killed. All waiting calls fail after the second
        failed start in a row, and after each further one.
        """
        num_failed = 0
        while True:
            process = None
            try:
                process = _Process()
                self._processes.append(process)
                async with asyncio.timeout(_START_SECONDS):
                    await process.call(self.config)
                num_failed = 0
                while await self._next(process):
                    pass
            except (*_DIED, TimeoutError) as error:
                _log.error("a worker process did not start: %s", type(error).__name__)
                num_failed += 1
                if num_failed > 1:
                    self._fail_waiting(ApiError(503, "a worker cannot start; see the server's log", code="worker"))
                    await asyncio.sleep(_RESTART_SECONDS)
            finally:
                if process is not None:
                    process.kill()
                    self._processes.remove(process)
                    self._dead.append(process.process)

    async def _next(self, process: _Process) -> bool:
        """Run the next task. Returns False if the process must be replaced."""
        while (task := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        self._dead = [dead for dead in self._dead if dead.poll() is None]  # poll() also reaps
        group = self._group(task)
        self._running[group] += 1
        try:
            return await self._do(task, process)
        finally:
            task.clock = None
            self._running[group] -= 1
            self._changed.set()

    async def _do(self, task: _Task, process: _Process) -> bool:
        try:
            if task.call.name == "check_schema" and not process.has_compiler:
                async with asyncio.timeout(_START_SECONDS) as task.clock:
                    await process.call(Call(0, "load_compiler", {}))  # ignore errors, which the check raises again
                process.has_compiler = True
                if task.future.done():  # the client disconnected
                    return True
            async with asyncio.timeout(self.config.seconds) as task.clock:
                reply = await process.call(task.call)
        except TimeoutError:
            _log.warning("replacing a worker process: its job took too long, or the client disconnected")
            if task.call.name == "check_schema" and not process.has_compiler:
                message = f"loading the schema compiler took longer than {_START_SECONDS:g} s; retry later"
                task.fail(ApiError(503, message, code="worker"))
                return False
            message = f"preparing the request took longer than {self.config.seconds:g} s; send a shorter or simpler one"
            task.fail(ApiError(400, message, code="too_complex"))
            return False
        except _DIED:
            _log.warning("a worker process died during a job")
            task.num_deaths += 1
            # Each process of the pool may have died before the call was sent to it. If more processes died during the
            # call than the pool has, the call must be the cause.
            if task.num_deaths > self._size or task.future.done():
                message = f"{task.num_deaths} worker processes died while they prepared this request"
                task.fail(ApiError(503, message, code="worker"))
            else:
                self._waiting.insert(0, task)
            return False
        except asyncio.CancelledError:
            task.fail(_shutting_down())
            raise
        if reply.error is None:
            if not task.future.done():
                task.future.set_result(reply.value)
        elif isinstance(reply.error, ApiError):
            task.fail(reply.error)
        else:
            _log.error("a worker process failed in a job: %s", reply.error)
            task.fail(ApiError(500, "internal error; see the server's log"))
        return True


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="not_ready")
