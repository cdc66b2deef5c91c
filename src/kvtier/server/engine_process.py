"""The engine process. It reads commands and sends events until SHUTDOWN, a failure, or the exit of the front end."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import torch

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WritebackConfig, WritePolicy
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.llm import LLM
from kvtier.engine.params import Explanation, Output, SamplingParams
from kvtier.engine.runner import EngineRunner
from kvtier.engine.schemas import GrammarConstraint, SchemaCompiler
from kvtier.engine.speculate import NgramProposer
from kvtier.errors import ArgumentError, ClosedError, FormatError
from kvtier.events import EventConfig, publish_events
from kvtier.index import IndexCleared, Listener
from kvtier.metrics import Registry
from kvtier.native_code import num_usable_cores
from kvtier.replay import Recorder
from kvtier.scheduler import SchedulerConfig
from kvtier.server.config import EngineOptions
from kvtier.server.engine_controls import CONTROLS
from kvtier.server.messages import (
    ENGINE_CODEC,
    PING,
    SHUTDOWN,
    Abort,
    Call,
    Channel,
    EngineFailed,
    Reply,
    Started,
    StepOutputs,
    Submit,
)
from kvtier.server.schema_cache import SchemaCompilations

if TYPE_CHECKING:  # needs the extra `events`
    from kvtier.events.publisher import EventPublisher

_log = logging.getLogger("kvtier.server")
_GHOST_SCALES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)  # simulated cache sizes, relative to the larger memory tier


def main(options: EngineOptions, connection: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes; only the front end ends this process
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(connection, ENGINE_CODEC)
    torch.set_num_threads(options.threads or max(1, num_usable_cores() - 1))
    with contextlib.ExitStack() as opened:
        try:
            listener = _publish(options, opened)
            engine = make_llm(options, listener).engine
            opened.enter_context(_record(engine, options.record))
            _add_metrics(engine.tiers.metrics, listener)
        except Exception as error:  # the front end reports any error and exits
            channel.send(EngineFailed(f"{type(error).__name__}: {error}"))
            return
        exclude_from_collections()
        EngineServer(engine, channel, listener).run()


def exclude_from_collections() -> None:
    """Exclude all present objects, such as modules and weights, from later garbage collections.

    A full collection of these objects stops the engine for 100 to 160 ms (EPYC, 2 cores, measured on 2026-11-20).
    """
    gc.collect()
    gc.freeze()


def _publish(options: EngineOptions, opened: contextlib.ExitStack) -> EventPublisher | None:
    """Open the publisher of KV events, if enabled. Its first event makes routers forget an earlier process's blocks."""
    if not options.events:
        if options.events_replay:
            raise ArgumentError("--events-replay needs --events")
        return None
    config = EventConfig(options.events, options.events_replay, token_ids=options.events_token_ids)
    publisher = publish_events(config)
    opened.enter_context(contextlib.closing(publisher))
    publisher(IndexCleared())
    return publisher


def _add_metrics(registry: Registry, publisher: EventPublisher | None) -> None:
    """Declare metrics for dropped KV events and for garbage collections, which delay the engine's steps."""
    counter = registry.counter("kvtier_engine_gc_collections_total", "Garbage collections.", ("generation",))
    dropped = registry.counter("kvtier_events_dropped_total", "KV events that did not fit into the queue.").of()

    def update() -> None:
        for generation, stats in enumerate(gc.get_stats()):
            counter.of(str(generation)).raise_to(stats["collections"])
        if publisher is not None:
            dropped.raise_to(publisher.num_dropped)

    registry.before_collect(update)


def missing_native_code() -> list[str]:
    """Return a note for each library of native code that is not in use."""
    from kvtier.engine import native as engine
    from kvtier.index import native as index
    from kvtier.memory import native as memory
    from kvtier.storage import checksum

    libraries = (
        ("CPU kernels", engine.native().code, engine.native().reason, "torch"),
        ("host copies", memory.native().code, memory.native().reason, "numpy"),
        ("learned eviction", index.native().code, index.native().reason, "Python"),
        ("checksums", checksum.native().code, checksum.native().reason, "zlib and numpy"),
    )
    return [f"{name} use {twin}, which is slower: {why}" for name, code, why, twin in libraries if code is None]


def _record(engine: Engine, path: str) -> contextlib.AbstractContextManager[object]:
    if not path:
        return contextlib.nullcontext()
    if Path(path).exists():
        raise ArgumentError(f"--record {path}: the file exists and is not overwritten; choose another name")
    recorder = Recorder(path)
    recorder.attach(engine.scheduler, now=time.monotonic())
    return contextlib.closing(recorder)


def make_llm(options: EngineOptions, listener: Listener | None = None) -> LLM:
    tiers = options.tiers
    below: list[tuple[StoreConfig, str | tuple[str, ...]]] = []
    saving, waits = WritebackConfig(WritePolicy(tiers.write)), tiers.wait_seconds
    if tiers.disk:
        disk = StoreConfig("disk", saving, wait_seconds=waits)
        more = {"bytes_per_day": tiers.disk_bytes_per_day, "secret": tiers.disk_secret}
        query = urlencode({"bytes": tiers.disk_bytes, **{name: value for name, value in more.items() if value}})
        below.append((disk, f"disk:{quote(tiers.disk)}?{query}"))
    if tiers.shared:
        below.append((StoreConfig("shared", saving, wait_seconds=waits, is_shared=True), tiers.shared))
    host_blocks = tiers.host_blocks or (tiers.blocks if below else 0)  # stores are read through host memory
    config = EngineConfig(
        tiers.block_tokens,
        CacheConfig(
            tiers.blocks,
            policy=tiers.policy,
            host=HostConfig(host_blocks, tiers.policy, saving, exclusive=not tiers.inclusive) if host_blocks else None,
            stores=tuple(store for store, _ in below),
            always_load=tiers.always_load,
        ),
        SchedulerConfig(options.max_rows, options.step_tokens),
        ghost_scales=_GHOST_SCALES,
        tensor_parallel=options.tensor_parallel,
        kv_shards=tiers.kv_shards,
        phases=options.phases,
    )
    return LLM(
        options.model,
        config,
        dtype=options.dtype,
        device=options.device,
        invariant=options.invariant,
        products=options.products,
        proposer=NgramProposer(options.draft_tokens) if options.draft_tokens else None,
        stores={store.name: urls for store, urls in below},
        listener=listener,
    )


class EngineServer:
    """Passes commands to an EngineRunner, and sends the outputs of each step in one message.

    The main thread reads commands. A low-priority thread compiles schemas. The runner's thread runs the engine.
    """

    def __init__(self, engine: Engine, channel: Channel, publisher: EventPublisher | None = None) -> None:
        self._engine = engine
        self._channel = channel
        self._addresses = ("", "") if publisher is None else (publisher.endpoint, publisher.replay_endpoint)
        self._runner = EngineRunner(engine, self._fail)
        self._outputs: list[Output] = []
        self._ended: list[Explanation] = []
        self._compilations = SchemaCompilations(self._make_compiler)
        self._compiling: set[str] = set()  # ids of requests that wait for their compiled schema
        self._lock = threading.Lock()  # prevents `_abort` while `_add_constrained` adds the same request

    def run(self) -> None:
        """Serve until SHUTDOWN, or until the front end exits or the engine fails."""
        config = self._engine.config
        started = Started(
            config.scheduler.max_context,
            self._engine.model.config.vocab_size,
            config.block_tokens,
            config.cache.num_blocks,
            config.scheduler.max_rows,
            tuple(self._engine.model.config.eos_token_ids),
            tuple(missing_native_code()),
            *self._addresses,
        )
        with contextlib.suppress(OSError, ClosedError):  # the front end died, or the engine failed
            self._channel.send(Reply(0, started))
            for command in self._channel:
                match command:
                    case FormatError():
                        _log.error("the front end sent an invalid message, which is skipped: %s", command)
                    case Submit():
                        self._submit(command)
                    case Abort():
                        self._abort(command.id)
                    case Call(name=name) if name == SHUTDOWN:
                        break
                    case Call(name=name) if name == PING:
                        self._channel.send(Reply(command.id, {}))
                    case Call():
                        self._call(command)
        if self._runner.error is None and config.cache.stores:  # save the cache for the next start
            self._runner.call(lambda engine: engine.tiers.save_all()).result()
        self._runner.close()

    def _call(self, command: Call) -> None:
        function = CONTROLS.get(command.name)
        if function is None:
            error = ArgumentError(f"the engine process has no function {command.name!r}")
            self._channel.send(Reply(command.id, error=error))
            return
        future = self._runner.call(partial(function, **command.arguments))
        future.add_done_callback(partial(self._reply, command.id))

    def _fail(self, error: Exception) -> None:
        """Report that the engine cannot continue, and end `run`, which ends the process."""
        with contextlib.suppress(OSError):  # the front end died
            self._channel.send(EngineFailed(f"{type(error).__name__}: {error}"))
        self._channel.end()

    def _submit(self, command: Submit) -> None:
        if command.schema is None:
            self._add(command, command.params)
            return
        with self._lock:
            self._compiling.add(command.id)
        # Each tenant has its own cache of compiled schemas: compile times must not reveal schemas of other tenants.
        tenant = command.salt.partition(b"\0")[0]
        self._compilations.get(command.schema, tenant).add_done_callback(partial(self._add_constrained, command))

    def _add_constrained(self, command: Submit, compiled: Future[Callable[[], GrammarConstraint]]) -> None:
        """Add a request after its schema was compiled, or report the error. Do nothing if the request was aborted."""
        with self._lock, contextlib.suppress(OSError, ClosedError):  # raised if the process is exiting
            if command.id not in self._compiling:
                return
            self._compiling.remove(command.id)
            if compiled.exception() is None:
                self._add(command, replace(command.params, constraint=compiled.result()))
            else:
                self._reply(command.id, compiled)

    def _abort(self, name: str) -> None:
        with self._lock:
            self._compiling.discard(name)
            self._runner.leave(name)

    def _add(self, command: Submit, params: SamplingParams) -> None:
        future = self._runner.submit(
            command.tokens,
            params,
            self._take,
            request_id=command.id,
            priority=command.priority,
            salt=command.salt,
            hints=command.hints,
        )
        future.add_done_callback(partial(self._reply, command.id))

    def _make_compiler(self) -> SchemaCompiler:
        assert self._engine.tokenizer is not None
        config = self._engine.model.config
        return SchemaCompiler(self._engine.tokenizer.to_json(), config.vocab_size, config.eos_token_ids)

    def _reply(self, id: int | str, future: Future[Any]) -> None:
        """Send the result of a Call, or the error of a Call or Submit."""
        error = future.exception()
        if isinstance(error, Exception):
            self._channel.send(Reply(id, error=error))
        elif isinstance(id, int):
            try:
                self._channel.send(Reply(id, future.result()))
            except TypeError as failure:  # the result has a type that cannot be sent
                self._channel.send(Reply(id, error=failure))

    def _take(self, output: Output | None) -> None:
        """Collect an output, on the engine thread. The first output of a step schedules `_flush` for the step's end."""
        if output is None:  # the request finished, or the engine failed
            return
        if not self._outputs:
            self._runner.call(lambda _: self._flush())
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._ended.append(self._engine.explain(output.request_id))

    def _flush(self) -> None:
        self._channel.send(StepOutputs(tuple(self._outputs), tuple(self._ended), time.monotonic()))
        self._outputs, self._ended = [], []
