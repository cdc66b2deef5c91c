"""Run a server: start the engine process, listen, drain when told to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn
import uvloop

from kvtier.engine.tokenizer import load_tokenizer
from kvtier.errors import UnavailableError
from kvtier.server.activity import Activity
from kvtier.server.admission import Admission
from kvtier.server.app import make_app, model_info
from kvtier.server.auth import salt_of
from kvtier.server.config import ServerConfig, Tenant
from kvtier.server.connections import make_table
from kvtier.server.engine_client import EngineClient
from kvtier.server.http_connection import HttpConnection
from kvtier.server.worker import WorkerSetup
from kvtier.server.worker_pool import WorkerPool

_log = logging.getLogger("kvtier.server")
_CLOSE_SECONDS = 60.0  # for the engine to save what is cached


def serve(config: ServerConfig, *, ready: Callable[[str], object] = lambda _: None) -> int:
    """Serve until SIGTERM or SIGINT: 0 then, 1 if the engine ended by itself. `ready` is told the address.

    starting -> listening --SIGTERM, SIGINT--> draining --all answered, or drain_seconds--> saving -> over
                listening, draining --the engine ended--> over, exit code 1
    """
    with (
        contextlib.closing(_bind(config.host, config.port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(config, listener, ready))


async def _run(config: ServerConfig, listener: socket.socket, ready: Callable[[str], object]) -> int:
    engine = EngineClient(config.engine)
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(engine.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, config.engine.model)
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
    activity = Activity()
    app = make_app(config, engine, started, tokenizer, pool, admission, activity)
    protocol = functools.partial(HttpConnection, limits, make_table(limits), activity)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Uvicorn(
        uvicorn.Config(
            app,
            http=cast(Any, protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=cast(int, config.limits.idle_seconds),
            timeout_graceful_shutdown=round(config.limits.drain_seconds),
        ),
        lambda: ready(address),
    )

    def stop() -> None:
        server.force_exit = server.should_exit  # asked twice: do not wait
        admission.closed = "it is going down"
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watch = asyncio.create_task(_stop_without_engine(engine, stop))
    _log.info("serving model=%s at %s", config.model_name, address)
    await server.serve(sockets=[listener])
    await pool.close()
    failed = engine.ended.is_set()
    watch.cancel()
    _log.info("saving and ending")
    code = await engine.close(_CLOSE_SECONDS)
    if failed or code:
        _log.error("the engine process ended with exit code %s", code)
    return 1 if failed or code else 0


class _Uvicorn(uvicorn.Server):
    """Tells when it listens. Leaves the signals to us: it would raise them again, and then nothing could be saved."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


async def _set_quotas(engine: EngineClient, tenants: Sequence[Tenant]) -> None:
    """What each tenant may have of the memory tiers."""
    for tenant in tenants:
        for tier, num_blocks in (("device", tenant.device_blocks), ("host", tenant.host_blocks)):
            if num_blocks:
                await engine.call("set_quota", tier=tier, salt=salt_of(tenant, None), num_blocks=num_blocks)


async def _stop_without_engine(engine: EngineClient, stop: Callable[[], object]) -> None:
    await engine.ended.wait()
    _log.error("no more requests are taken: %s", engine.why)
    stop()


def _bind(host: str, port: int) -> socket.socket:
    """Bound, not listening: until the engine is ready, clients are refused and do not hang."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {host}:{port}: {error.strerror}; try another --port") from error
    return listener
