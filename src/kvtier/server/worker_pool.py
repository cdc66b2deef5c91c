"""WorkerPool: runs calls in worker processes, each with a deadline. For one event loop.

run -> waiting, by tenant and name --in turn--> a process --in time--> result
                                                          --late-----> killed and replaced; the call fails
                                                          --died-----> replaced; the call is retried once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.server.errors import ApiError
from kvtier.server.messages import Call, Reply, frame, read_message
from kvtier.server.prepare import PrepareConfig

_log = logging.getLogger("kvtier.server")
_START_SECONDS = 60.0
_RESTART_SECONDS = 1.0  # between two starts that fail
_ABANDONED_SECONDS = 1.0  # more for a call whose client left: about the start time of a new process
_END_SECONDS = 1.0  # for a killed process to exit; if the kernel takes longer, the server does not wait for it
_MAX_WAITING = 64  # calls of one tenant
_DIED = (OSError, asyncio.IncompleteReadError)


@dataclass(slots=True, eq=False)
class _Task:
    """A call and the future of its result."""

    call: Call
    tenant: str
    future: asyncio.Future[Any]
    is_retry: bool = False
    clock: asyncio.Timeout | None = None  # set while it runs

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.call.name

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Process:
    """One worker process and the socket to it."""

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
        self._writer.write(frame(message))
        await self._writer.drain()
        reply: Reply = await read_message(self._reader)
        return reply

    def kill(self) -> None:
        self.process.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._socket.close()


@dataclass(slots=True)
class _Slot:
    """A position in the pool, and the task that keeps a process in it."""

    task: asyncio.Task[None] | None = None
    process: _Process | None = None
    is_free: bool = True  # while the process starts or waits for a call
    dead: list[subprocess.Popen[bytes]] = field(default_factory=list)  # killed, and perhaps not exited yet


class WorkerPool:
    """Up to `size` processes, started on demand.

    One tenant never uses the last process; in a server without tenants, one kind of call never does. Waiting calls are
    taken in turn, one of each tenant and name.
    """

    def __init__(self, config: PrepareConfig, size: int, *, has_tenants: bool) -> None:
        self._config = config
        self._size = size
        self._most_running = max(1, size - 1)
        self._has_tenants = has_tenants
        self._waiting: OrderedDict[tuple[str, str], deque[_Task]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._slots: list[_Slot] = []
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [slot.process.process.pid for slot in self._slots if slot.process is not None]

    @property
    def num_running(self) -> int:
        """Number of calls that a process is working on."""
        return self._running.total()

    def start(self) -> None:
        """Start one process ahead of the first call."""
        if not self._slots:
            self._add_slot()

    async def run(self, name: str, tenant: str, /, **arguments: Any) -> Any:
        """Run a call. Raises ApiError: that of the call, 400 if it is late, 429 or 503 if it cannot run now.

        Cancelling removes it from the queue; if it is running, its process may be replaced.
        """
        if self._closed:
            raise _shutting_down()
        if sum(len(tasks) for (other, _), tasks in self._waiting.items() if other == tenant) >= _MAX_WAITING:
            message = f"{_MAX_WAITING} large requests are already waiting to be prepared; retry later"
            raise ApiError(429, message, code="overloaded", retry_after=5)
        task = _Task(Call(0, name, arguments), tenant, asyncio.get_running_loop().create_future())
        self._put(task)
        if self._size > len(self._slots) and not any(slot.is_free for slot in self._slots) and self._may_run(task):
            self._add_slot()
        self._changed.set()
        try:
            return await task.future
        finally:
            self._leave(task)

    async def close(self) -> None:
        """Kill the processes and fail waiting calls with 503. Does not wait for any call."""
        self._closed = True
        self._fail_waiting(_shutting_down())
        serving = [slot.task for slot in self._slots if slot.task is not None]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for process in [process for slot in self._slots for process in slot.dead]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        self._slots.clear()

    # ---- queue ----

    def _put(self, task: _Task, *, first: bool = False) -> None:
        tasks = self._waiting.setdefault(task.key, deque())
        tasks.appendleft(task) if first else tasks.append(task)

    def _group(self, task: _Task) -> str:
        return task.tenant if self._has_tenants else task.call.name

    def _may_run(self, task: _Task) -> bool:
        return self._running[self._group(task)] < self._most_running

    def _take(self) -> _Task | None:
        for key, tasks in self._waiting.items():
            if self._may_run(tasks[0]):
                task = tasks.popleft()
                self._waiting.move_to_end(key)
                if not tasks:
                    del self._waiting[key]
                return task
        return None

    def _leave(self, task: _Task) -> None:
        """Remove a task that has its result or was cancelled."""
        tasks = self._waiting.get(task.key, deque())
        if task in tasks:
            tasks.remove(task)
            if not tasks:
                del self._waiting[task.key]
        elif task.clock is not None and not task.clock.expired():
            soon = asyncio.get_running_loop().time() + _ABANDONED_SECONDS
            task.clock.reschedule(min(soon, task.clock.when() or soon))

    # ---- processes ----

    def _add_slot(self) -> None:
        slot = _Slot()
        self._slots.append(slot)
        slot.task = asyncio.create_task(self._serve(slot))

    async def _serve(self, slot: _Slot) -> None:
        """Keep a process in this slot and give it calls."""
        while True:
            slot.is_free = True
            try:
                slot.process = _Process()
                async with asyncio.timeout(_START_SECONDS):
                    await slot.process.call(self._config)
                slot.dead = [process for process in slot.dead if process.poll() is None]
                while await self._next(slot, slot.process):
                    pass
            except (*_DIED, TimeoutError) as error:
                _log.error("a worker process did not start: %s", type(error).__name__)
                message = "no worker process starts; see the server's log"
                self._fail_waiting(ApiError(503, message, code="worker", retry_after=5))
                await asyncio.sleep(_RESTART_SECONDS)
            finally:
                if slot.process is not None:
                    slot.process.kill()
                    slot.dead.append(slot.process.process)
                    slot.process = None

    def _fail_waiting(self, error: ApiError) -> None:
        for tasks in self._waiting.values():
            for task in tasks:
                task.fail(replace(error))  # each raises its own copy
        self._waiting.clear()

    async def _next(self, slot: _Slot, process: _Process) -> bool:
        """Run the next task. Returns False if the process must be replaced."""
        slot.is_free = True
        while (task := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        slot.is_free = False
        group = self._group(task)
        self._running[group] += 1
        try:
            return await self._do(task, process)
        finally:
            task.clock = None
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]
            self._changed.set()

    async def _do(self, task: _Task, process: _Process) -> bool:
        try:
            if task.call.name == "check_schema" and not process.has_compiler:
                async with asyncio.timeout(_START_SECONDS) as task.clock:
                    await process.call(Call(0, "load_compiler", {}))  # the check would fail with the same error
                process.has_compiler = True
                if task.future.done():  # its client left
                    return True
            async with asyncio.timeout(self._config.seconds) as task.clock:
                reply = await process.call(task.call)
        except TimeoutError:
            seconds = self._config.seconds
            message = f"preparing the request took longer than {seconds:g} s; send a shorter or simpler one"
            task.fail(ApiError(400, message, code="too_complex"))
            _log.warning("replacing a worker process: its job is late, or the client of the job left")
            return False
        except _DIED:
            _log.warning("a worker process died during a job")
            if task.is_retry or task.future.done():
                task.fail(ApiError(503, "two worker processes died of this request", code="worker", retry_after=5))
            else:
                task.is_retry = True
                self._put(task, first=True)
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
    return ApiError(503, "the server is shutting down", code="not_ready", retry_after=5)
