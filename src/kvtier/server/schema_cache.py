"""Checks and compiles the grammars of structured answers. Most are JSON schemas; here, all are called schemas.

    front end: SchemaChecks --Call--> worker process, which compiles the schema with a time limit
    engine process: SchemaCompilations --thread of low priority--> constraint

Each tenant has its own caches, so that a tenant cannot evict or detect the schemas of other tenants.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from kvtier.errors import KvtierError, UnavailableError
from kvtier.server.errors import ApiError

if TYPE_CHECKING:
    from kvtier.engine.schemas import Grammar, GrammarConstraint, SchemaCompiler
    from kvtier.server.worker_pool import WorkerPool

    Compilation = Future[Callable[[], GrammarConstraint]]

TenantKey = TypeVar("TenantKey")
Value = TypeVar("Value")

_MAX_CHECKS = 64  # per tenant
_MAX_COMPILED = 16  # per tenant; a compiled schema takes up to several megabytes
# The result of a check that ran out of time or memory is kept for this time only. The machine may have been busy.
_RETRY_SECONDS = 300.0
_NICE = 19  # because a large schema takes seconds to compile and the engine's own threads need the cores


class TenantLru(Generic[TenantKey, Value]):
    """Keeps the `size` most recently used values of each tenant, by digest of the schema."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[TenantKey, OrderedDict[bytes, Value]] = {}

    def get(self, tenant: TenantKey, digest: bytes) -> Value | None:
        values = self._values.get(tenant, OrderedDict())
        if digest in values:
            values.move_to_end(digest)
        return values.get(digest)

    def put(self, tenant: TenantKey, digest: bytes, value: Value) -> None:
        values = self._values.setdefault(tenant, OrderedDict())
        values[digest] = value
        values.move_to_end(digest)
        if len(values) > self._size:
            values.popitem(last=False)

    def discard(self, tenant: TenantKey, digest: bytes, value: Value) -> None:
        """Remove `value`, unless it was evicted. Keep a newer value."""
        values = self._values.get(tenant, OrderedDict())
        if values.get(digest) is value:
            del values[digest]


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256("\0".join(grammar).encode("utf-8", "surrogatepass")).digest()


class SchemaChecks:
    """Checks in worker processes that schemas compile in time. Caches the results. Not thread-safe."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._results: TenantLru[str, ApiError | Literal["valid"]] = TenantLru(_MAX_CHECKS)
        self._tasks: dict[tuple[str, bytes], asyncio.Task[ApiError | Literal["valid"]]] = {}
        self._num_waiting: Counter[tuple[str, bytes]] = Counter()

    async def check(self, schema: Grammar, tenant: str) -> None:
        """Raise ApiError if the schema is invalid or the check fails. Equal concurrent calls share one check."""
        digest = _digest(schema)
        result = self._results.get(tenant, digest) or await self._share((tenant, digest), schema)
        if isinstance(result, ApiError):
            raise replace(result)

    async def _share(self, key: tuple[str, bytes], schema: Grammar) -> ApiError | Literal["valid"]:
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._run(key, schema))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks the error as retrieved
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key], self._tasks[key]
                task.cancel()  # no effect if the task is done

    async def _run(self, key: tuple[str, bytes], schema: Grammar) -> ApiError | Literal["valid"]:
        result: ApiError | Literal["valid"] = "valid"
        try:
            await self._pool.run("check_schema", key[0], schema=schema)
        except ApiError as error:
            if error.status != 400:  # the schema is not the cause
                raise
            result = error.with_traceback(None)
            if error.code == "too_complex":
                message = "the schema is too complex to compile; use a simpler one"
                result = ApiError(400, message, code=error.code)
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._results.discard, *key, result)
        self._results.put(*key, result)
        return result


class SchemaCompilations:
    """Compiles schemas on a thread of the engine process. The thread is a daemon, so that it never delays the exit."""

    def __init__(self, make_compiler: Callable[[], SchemaCompiler]) -> None:
        self._make_compiler = make_compiler
        self._jobs: queue.SimpleQueue[tuple[Grammar, bytes, bytes, Compilation]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._compiled: TenantLru[bytes, Compilation] = TenantLru(_MAX_COMPILED)
        self._thread: threading.Thread | None = None

    def get(self, schema: Grammar, tenant: bytes) -> Compilation:
        """Return the future of a compiled schema, cached or new. Its callbacks may run on the compiling thread."""
        digest = _digest(schema)
        with self._lock:
            cached = self._compiled.get(tenant, digest)
            if cached is not None:
                return cached
            future: Compilation = Future()
            self._compiled.put(tenant, digest, future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="kvtier-constraints", daemon=True)
                self._thread.start()
        self._jobs.put((schema, tenant, digest, future))
        return future

    def _loop(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        compiler: SchemaCompiler | None = None
        while True:
            schema, tenant, digest, future = self._jobs.get()
            try:
                compiler = compiler or self._make_compiler()
                compiled = compiler.constraint(schema)
            except Exception as error:  # llguidance rejects some tokenizers; only this request fails
                with self._lock:
                    self._compiled.discard(tenant, digest, future)
                if not isinstance(error, KvtierError):
                    why = f"this model does not support structured answers: {type(error).__name__}: {error}"
                    error = UnavailableError(why)
                future.set_exception(error)
            else:
                future.set_result(compiled)
