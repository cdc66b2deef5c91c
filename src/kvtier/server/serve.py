"""Run a server: start the engine process, listen, drain and save on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn, cast

import uvicorn
import uvloop

from kvtier.engine.tokenizer import load_tokenizer
from kvtier.errors import UnavailableError
from kvtier.server.admission import Admission
from kvtier.server.app import make_app, model_info
from kvtier.server.auth import salt_of
from kvtier.server.config import ServerConfig, Tenant
from kvtier.server.connections import make_table
from kvtier.server.engine_client import EngineClient
from kvtier.server.heartbeat import Heartbeat
from kvtier.server.http_connection import HttpConnection
from kvtier.server.request_log import RequestLog
from kvtier.server.worker import WorkerSetup
from kvtier.server.worker_pool import WorkerPool

_log = logging.getLogger("kvtier.server")
_CLOSE_SECONDS = 60.0  # for the engine to save the cache
_THREAD_SECONDS = 5.0  # for threads to end after the engine has; nothing waits for their results
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(config: ServerConfig, *, ready: Callable[[str], object] = lambda _: None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 1 if the engine ended by itself or was killed.

    `ready` is called with the address once the server listens.

    starting -> listening --SIGTERM, SIGINT--> draining --all answered, or drain_seconds--> saving -> over
                listening, draining --the engine ended--> over, exit code 1
                any --second SIGTERM or SIGINT--> over at once, exit code 128 + signal, nothing saved
    """
    executor = ThreadPoolExecutor(thread_name_prefix="kvtier")
    with (
        contextlib.closing(_bind(config.host, config.port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.get_loop().set_default_executor(executor)
        code = runner.run(_run(config, listener, ready))
        _end_threads(executor, code)
        return code


def _end_threads(executor: ThreadPoolExecutor, code: int) -> None:
    """Join the executor's threads. If one hangs, exit here: the interpreter would wait for it without end."""
    joining = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    joining.start()
    joining.join(_THREAD_SECONDS)
    if joining.is_alive():
        _log.error("a thread did not end within %g s; exiting without it", _THREAD_SECONDS)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


class _Signals:
    """Handles SIGTERM and SIGINT: the first runs `action`, the second ends the process at once."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, _exit_now)  # runs even if the event loop does not
        _log.info("stopping; another SIGTERM or SIGINT exits at once and saves nothing")
        self.action()


def _exit_now(number: int, _: FrameType | None) -> NoReturn:
    """Kill the child processes and exit. No lock, no log and no thread is waited for: any of them may hang."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


async def _run(config: ServerConfig, listener: socket.socket, ready: Callable[[str], object]) -> int:
    engine = EngineClient(config.engine)
    starting = asyncio.ensure_future(engine.start())
    signals = _Signals(starting.cancel)
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.engine.model)
        await asyncio.to_thread(getattr, tokenizer, "max_token_bytes")  # takes long the first time
        started = await starting
        await _set_quotas(engine, config.tenants)
    except BaseException:
        starting.cancel()
        await engine.close(0.0)
        raise
    admission = Admission(started.max_rows, config.limits.waiting)
    limits = config.limits
    setup = WorkerSetup(model_info(config, started), limits.prepare_seconds)
    pool = WorkerPool(setup, limits.prepare_processes, has_tenants=bool(config.tenants))
    pool.start()
    activity, heartbeat = RequestLog(), Heartbeat(engine, limits)
    app = make_app(config, engine, started, tokenizer, pool, admission, activity, heartbeat)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Uvicorn(_uvicorn_config(config, app, activity), lambda: ready(address))

    def stop() -> None:
        admission.closed = "it is going down"
        server.should_exit = True

    signals.action = stop
    watches = [asyncio.create_task(each) for each in (_stop_without_engine(engine, stop), heartbeat.run())]
    _log.info("serving model=%s at %s", config.model_name, address)
    await server.serve(sockets=[listener])
    await pool.close()
    failed = engine.ended.is_set()
    for watch in watches:
        watch.cancel()
    _log.info("saving and ending")
    seconds = _CLOSE_SECONDS if await heartbeat.is_responsive() else 0.0
    code = await engine.close(seconds)
    if failed or code:
        _log.error("the engine process ended with exit code %s", code)
    return 1 if failed or code else 0


def _uvicorn_config(config: ServerConfig, app: Any, activity: RequestLog) -> uvicorn.Config:
    limits = config.limits
    return uvicorn.Config(
        app,
        http=cast(Any, functools.partial(HttpConnection, limits, make_table(limits), activity)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=cast(int, limits.idle_seconds),
        timeout_graceful_shutdown=round(limits.drain_seconds),
    )


class _Uvicorn(uvicorn.Server):
    """Calls `ready` once it listens. Leaves signals to `_Signals`: it would raise them again before the save."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handler."""
        yield


async def _set_quotas(engine: EngineClient, tenants: Sequence[Tenant]) -> None:
    """Set each tenant's quota of the memory tiers."""
    for tenant in tenants:
        for tier, num_blocks in (("device", tenant.device_blocks), ("host", tenant.host_blocks)):
            if num_blocks:
                await engine.call("set_quota", tier=tier, salt=salt_of(tenant, None), num_blocks=num_blocks)


async def _stop_without_engine(engine: EngineClient, stop: Callable[[], object]) -> None:
    await engine.ended.wait()
    _log.error("no more requests are taken: %s", engine.why)
    stop()


def _bind(host: str, port: int) -> socket.socket:
    """Bind without listening: until the engine is ready, clients are refused and do not hang."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {host}:{port}: {error.strerror}; try another --port") from error
    return listener
