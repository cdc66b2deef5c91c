"""Runs a server: starts the engine process and listens. On SIGTERM or SIGINT, finishes requests and saves the cache."""

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
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from kvtier.engine.tokenizer import Tokenizer, load_tokenizer
from kvtier.errors import UnavailableError
from kvtier.server.admission import Admission
from kvtier.server.app import make_app
from kvtier.server.config import Limits, ServerConfig, Tenant, salt_of
from kvtier.server.connections import make_table
from kvtier.server.engine_client import EngineClient, EngineLink, Heartbeat
from kvtier.server.http_connection import HttpConnection
from kvtier.server.messages import Started
from kvtier.server.metrics_page import MetricsPage
from kvtier.server.prepare import PrepareConfig
from kvtier.server.request_log import RequestLog
from kvtier.server.worker_pool import WorkerPool

if TYPE_CHECKING:  # needs the extra `otel`
    from kvtier.server.tracing import Tracing

_log = logging.getLogger("kvtier.server")
CLOSE_SECONDS = 60.0  # time for the engine to save the cache
_TICK_SECONDS = 1.0  # interval of updates of the date header
_TRACE_SECONDS = 5.0  # time to send the last traces
_THREAD_SECONDS = 5.0  # time for the executor's threads to end after the engine process has exited
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(config: ServerConfig, *, ready: Callable[[str], object] = lambda _: None) -> int:
    """Serve until SIGTERM, SIGINT or the engine's end. Returns 1 if the engine exited early or with an error, else 0.

    Calls `ready` with the address once the server listens.

    starting --SIGTERM, SIGINT--> exit
    starting -> listening --SIGTERM, SIGINT--> draining --all answered, or drain_seconds--> saving -> exit
                listening, draining --the engine exited--> exit, code 1
                any --second SIGTERM or SIGINT--> exit at once, code 128 + signal, nothing saved
    """
    tracing = open_tracing(config)
    executor = ThreadPoolExecutor(thread_name_prefix="kvtier")
    with (
        contextlib.closing(_bind(config.host, config.port)) as listener,
        _bind_metrics(config) as metrics_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.get_loop().set_default_executor(executor)
        code = runner.run(_run(config, listener, metrics_listener, tracing, ready))
        _end_threads(executor, code)
        return code


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """The application of a server and its parts."""

    app: ASGIApp
    admission: Admission
    pool: WorkerPool
    request_log: RequestLog
    heartbeat: Heartbeat
    """The caller must run `Heartbeat.run`."""
    page: MetricsPage


def make_front_end(
    config: ServerConfig, engine: EngineLink, started: Started, tokenizer: Tokenizer, tracing: Tracing | None
) -> FrontEnd:
    """Start the worker pool and build the application. Needs a running event loop."""
    limits = config.limits
    admission = Admission(started, limits.waiting)
    model = (config.engine.model, config.model_names, started.vocab_size, started.eos_token_ids)
    prepare = PrepareConfig(*model, limits.answers, limits.prepare_seconds, config.keep_billing_line)
    pool = WorkerPool(prepare, limits.prepare_processes, has_tenants=bool(config.tenants))
    pool.start()
    request_log, heartbeat = RequestLog(config.model_name, started.block_tokens), Heartbeat(engine, limits)
    page = MetricsPage(heartbeat, request_log)
    app = make_app(config, started.max_context, tokenizer, pool, admission, request_log, heartbeat, page, tracing)
    return FrontEnd(app, admission, pool, request_log, heartbeat, page)


def _end_threads(executor: ThreadPoolExecutor, code: int) -> None:
    """Join the executor's threads. If a thread hangs, end the process, because the interpreter would wait forever."""
    joining = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    joining.start()
    joining.join(_THREAD_SECONDS)
    if joining.is_alive():
        _log.error("a thread did not end within %g s; exiting without it", _THREAD_SECONDS)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


def _handle_signals(action: Callable[[], object]) -> None:
    """Run `action` on the first SIGTERM or SIGINT, and exit on the second. Calling this again replaces `action`."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _exit_now)  # runs even if the event loop hangs
        _log.info("stopping; another SIGTERM or SIGINT exits at once and saves nothing")
        action()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)


def _exit_now(number: int, _: FrameType | None) -> NoReturn:
    """Kill the engine process and exit. Does not wait for locks, logs or threads, because any of them may hang."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


async def _run(
    config: ServerConfig,
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    tracing: Tracing | None,
    ready: Callable[[str], object],
) -> int:
    task = asyncio.current_task()
    assert task is not None
    _handle_signals(task.cancel)  # until the engine has started, a signal cancels this task
    engine = EngineClient(config.engine)
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.engine.model)
        await asyncio.to_thread(getattr, tokenizer, "max_token_bytes")  # the first access is slow
        started = await engine.start()
        for note in started.notes:
            _log.warning("%s", note)
        await set_quotas(engine, config.tenants)
    except BaseException as error:
        await engine.close(0.0)
        if isinstance(error, asyncio.CancelledError):
            return 0
        raise
    front, limits, address = (
        make_front_end(config, engine, started, tokenizer, tracing),
        config.limits,
        _address(listener),
    )
    heartbeat, request_log = front.heartbeat, front.request_log
    server = _Uvicorn(_uvicorn_config(limits, front.app, request_log), lambda: ready(address))

    def stop() -> None:
        front.admission.closed = "it is shutting down"
        server.stop()

    _handle_signals(stop)
    watches = [asyncio.create_task(work) for work in (_stop_without_engine(engine, stop), heartbeat.run())]
    if metrics_listener is not None:
        listens, metrics_config = asyncio.Event(), _uvicorn_config(limits, front.page, request_log)
        watches.append(asyncio.create_task(_serve_metrics(metrics_listener, metrics_config, listens)))
        await listens.wait()
    _log.info("serving model=%s at %s", config.model_name, address)
    await server.serve(sockets=[listener])
    await front.pool.close()
    failed = engine.ended.is_set()
    for watch in watches:
        watch.cancel()
    _log.info("saving the cache and exiting")
    seconds = CLOSE_SECONDS if await heartbeat.is_responsive() else 0.0
    code = await engine.close(seconds)
    if tracing is not None:
        await _close_tracing(tracing)
    if failed or code:
        _log.error("the engine process exited with code %s", code)
    return 1 if failed or code else 0


def _uvicorn_config(limits: Limits, app: Any, request_log: RequestLog) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, functools.partial(HttpConnection, limits, make_table(limits), request_log)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=cast(int, limits.idle_seconds),
        timeout_graceful_shutdown=round(limits.drain_seconds),
    )


async def _serve_metrics(listener: socket.socket, config: uvicorn.Config, listens: asyncio.Event) -> None:
    """Serve the metrics port until cancelled. Sets `listens` once the port listens.

    The limits on connections are the same as for the main port. The connections are counted separately.
    """
    _log.info("metrics at %s/metrics, without a key", _address(listener))
    server = _Uvicorn(config, listens.set)
    try:
        await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        server.force_exit = True
        await server.shutdown(sockets=[listener])
        raise


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Calls `ready` once it listens. Captures no signals, because uvicorn would end the process without saving."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Update the date header once per second until `stop`.

        uvicorn's loop wakes up ten times per second. At 100 streamed tokens per second, these wake-ups took a tenth of
        the front end's CPU time (EPYC, 2026-11-18).
        """
        while not await self.on_tick(0):  # uvicorn updates the header if the argument is a multiple of 10
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _TICK_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_tracing(config: ServerConfig) -> Tracing | None:
    if not config.otlp_traces_endpoint:
        return None
    try:
        from kvtier.server.tracing import Tracing
    except ImportError as error:
        raise UnavailableError(f"traces need the extra: pip install 'kvtier[otel]' ({error})") from error
    return Tracing(config.otlp_traces_endpoint, config.model_name)


async def _close_tracing(tracing: Tracing) -> None:
    try:
        async with asyncio.timeout(_TRACE_SECONDS):
            await asyncio.to_thread(tracing.close)
    except TimeoutError:
        _log.warning("the last traces were not sent within %g s", _TRACE_SECONDS)


async def set_quotas(engine: EngineLink, tenants: Sequence[Tenant]) -> None:
    for tenant in tenants:
        for tier, num_blocks in (("device", tenant.device_blocks), ("host", tenant.host_blocks)):
            if num_blocks:
                await engine.call("set_quota", tier=tier, salt=salt_of(tenant, None), num_blocks=num_blocks)


async def _stop_without_engine(engine: EngineClient, stop: Callable[[], object]) -> None:
    await engine.ended.wait()
    _log.error("requests are no longer accepted: %s", engine.why)
    stop()


def _bind_metrics(config: ServerConfig) -> contextlib.AbstractContextManager[socket.socket | None]:
    if not config.metrics_port:
        return contextlib.nullcontext()
    return contextlib.closing(_bind(config.host, config.metrics_port, "--metrics-port"))


def _bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Bind without listening, so that connections do not hang but are refused until the engine is ready."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {host}:{port}: {error.strerror}; try another {option}") from error
    return listener
