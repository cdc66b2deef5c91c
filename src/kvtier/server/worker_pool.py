"""WorkerPool: runs jobs in worker processes, with a deadline for each. For one event loop.

run -> waiting, by tenant and kind --in turn--> a process --in time--> result
                                                          --late-----> killed and replaced; the job fails
                                                          --died-----> replaced; the job is tried once more
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from kvtier.server.errors import ApiError
from kvtier.server.messages import LENGTH, frame
from kvtier.server.prepare import CheckSchema, LoadCompiler
from kvtier.server.worker import Job, Outcome, WorkerSetup

_log = logging.getLogger("kvtier.server")
_START_SECONDS = 60.0
_RESTART_SECONDS = 1.0  # between two starts that fail
_ABANDONED_SECONDS = 1.0  # more for a job whose client has gone: about what a new process takes to start
_END_SECONDS = 1.0  # for a killed process to end; if the kernel takes longer, the server does not wait for it
_MAX_WAITING = 64  # jobs of one tenant
_DIED = (OSError, asyncio.IncompleteReadError)


class _Late(Exception):
    """A job took too long, and its process is killed."""


@dataclass(slots=True)
class _Task:
    """A job, and who waits for its result."""

    job: Job
    tenant: str
    kind: str
    future: asyncio.Future[Any]
    was_tried: bool = False
    clock: asyncio.Timeout | None = None
    """While it runs."""

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

    async def call(self, message: object) -> Any:
        """Send a message and read the answer. Raises OSError or IncompleteReadError if the process dies."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        self._writer.write(frame(message))
        await self._writer.drain()
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(size))

    def kill(self) -> None:
        self.process.kill()
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._socket.close()


@dataclass(slots=True)
class _Slot:
    """A place for a process, and the task that keeps one there."""

    task: asyncio.Task[None] | None = None
    process: _Process | None = None
    is_free: bool = True
    """True while it starts, or waits for a job."""
    dead: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Killed, and perhaps not ended yet."""


class WorkerPool:
    """Up to `size` processes. They start when they are needed.

    With tenants, one tenant never uses the last process; without, one kind of job never does. Jobs that wait are taken
    in turn, one of each tenant and kind.
    """

    def __init__(self, setup: WorkerSetup, size: int, *, has_tenants: bool) -> None:
        self._setup = setup
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
        """Of the processes."""
        return [slot.process.process.pid for slot in self._slots if slot.process is not None]

    @property
    def num_running(self) -> int:
        """Jobs that processes work on."""
        return self._running.total()

    def start(self) -> None:
        """Start one process ahead of the first job."""
        if not self._slots:
            self._add_slot()

    async def run(self, job: Job, tenant: str, kind: str) -> Any:
        """Run a job. Raises ApiError: the job's own, 400 if it is late, 429 or 503 if it cannot be run now.

        Cancelling removes it from the queue; if it runs already, its process may be replaced.
        """
        if self._closed:
            raise ApiError(503, "the server is going down", code="not_ready", retry_after=5)
        if sum(len(tasks) for (name, _), tasks in self._waiting.items() if name == tenant) >= _MAX_WAITING:
            raise ApiError(
                429, f"{_MAX_WAITING} large requests wait to be prepared already", code="overloaded", retry_after=5
            )
        task = _Task(job, tenant, kind, asyncio.get_running_loop().create_future())
        self._put(task)
        if self._size > len(self._slots) and not any(slot.is_free for slot in self._slots) and self._may_run(task):
            self._add_slot()
        self._changed.set()
        try:
            return await task.future
        finally:
            self._leave(task)

    async def close(self) -> None:
        """Kill the processes; what waits gets 503. Does not wait for any job."""
        self._closed = True
        for tasks in self._waiting.values():
            for task in tasks:
                task.fail(ApiError(503, "the server is going down", code="not_ready", retry_after=5))
        self._waiting.clear()
        ended = [slot.task for slot in self._slots if slot.task is not None]
        for each in ended:
            each.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for process in [process for slot in self._slots for process in slot.dead]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        self._slots.clear()

    # ---- queue ----

    def _put(self, task: _Task, *, first: bool = False) -> None:
        tasks = self._waiting.setdefault((task.tenant, task.kind), deque())
        tasks.appendleft(task) if first else tasks.append(task)

    def _group(self, task: _Task) -> str:
        return task.tenant if self._has_tenants else task.kind

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
        """After its result is there, or its client has gone."""
        tasks = self._waiting.get((task.tenant, task.kind), ())
        if task in tasks:
            self._waiting[task.tenant, task.kind].remove(task)
            if not self._waiting[task.tenant, task.kind]:
                del self._waiting[task.tenant, task.kind]
        elif task.clock is not None and not task.clock.expired():
            soon = asyncio.get_running_loop().time() + _ABANDONED_SECONDS
            task.clock.reschedule(min(soon, task.clock.when() or soon))

    # ---- processes ----

    def _add_slot(self) -> None:
        slot = _Slot()
        self._slots.append(slot)
        slot.task = asyncio.create_task(self._serve(slot))

    async def _serve(self, slot: _Slot) -> None:
        """Keep a process in this slot, and give it jobs."""
        while True:
            slot.is_free = True
            try:
                slot.process = _Process()
                async with asyncio.timeout(_START_SECONDS):
                    await slot.process.call(self._setup)
                slot.dead = [each for each in slot.dead if each.poll() is None]
                with contextlib.suppress(_Late, *_DIED):
                    while True:
                        await self._next(slot, slot.process)
            except (*_DIED, TimeoutError) as error:
                _log.error("a worker process did not start: %s", type(error).__name__)
                self._fail_waiting()
                await asyncio.sleep(_RESTART_SECONDS)
            finally:
                if slot.process is not None:
                    slot.process.kill()
                    slot.dead.append(slot.process.process)
                    slot.process = None

    def _fail_waiting(self) -> None:
        for tasks in self._waiting.values():
            for task in tasks:
                task.fail(ApiError(503, "no worker process starts; see the server's log", code="worker", retry_after=5))
        self._waiting.clear()

    async def _next(self, slot: _Slot, process: _Process) -> None:
        """Run the next job. Raises if the process must be replaced."""
        slot.is_free = True
        while (task := self._take()) is None:
            self._changed.clear()
            await self._changed.wait()
        slot.is_free = False
        group = self._group(task)
        self._running[group] += 1
        try:
            await self._do(task, process)
        finally:
            task.clock = None
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]
            self._changed.set()

    async def _do(self, task: _Task, process: _Process) -> None:
        try:
            if isinstance(task.job, CheckSchema) and not process.has_compiler:
                async with asyncio.timeout(_START_SECONDS) as task.clock:
                    await process.call(LoadCompiler())  # an error is the next call's, too
                process.has_compiler = True
                if task.future.done():  # its client has gone
                    return
            async with asyncio.timeout(self._setup.seconds) as task.clock:
                outcome: Outcome = await process.call(task.job)
        except TimeoutError as error:
            seconds = self._setup.seconds
            message = f"preparing this request took longer than {seconds:g} s; send a shorter or a simpler one"
            task.fail(ApiError(400, message, code="too_complex"))
            _log.warning("a worker process was late with a job, or its client has gone: it is replaced")
            raise _Late from error
        except _DIED:
            _log.warning("a worker process died in a job")
            if task.was_tried or task.future.done():
                task.fail(ApiError(503, "two worker processes died of this request", code="worker", retry_after=5))
            else:
                task.was_tried = True
                self._put(task, first=True)
            raise
        except asyncio.CancelledError:
            task.fail(ApiError(503, "the server is going down", code="not_ready", retry_after=5))
            raise
        if outcome.why:
            _log.error("a worker process failed in a job: %s", outcome.why)
        if outcome.error is not None:
            task.fail(outcome.error)
        elif not task.future.done():
            task.future.set_result(outcome.value)
