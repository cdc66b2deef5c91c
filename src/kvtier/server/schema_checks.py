"""SchemaChecks: is a JSON schema one that the engine may compile? Asked once for each, in a worker process."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, replace

from kvtier.server.errors import ApiError
from kvtier.server.lru import TenantLru
from kvtier.server.prepare import CheckSchema
from kvtier.server.worker_pool import WorkerPool

_REMEMBERED = 64  # of each tenant
_LATE_SECONDS = 300.0  # a schema that took too long may have met a busy machine: it may be tried again after this
_PARAM = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True)
class _Known:
    """Result of a check."""

    refusal: ApiError | None


class SchemaChecks:
    """Remembers, by digest, what can be compiled in time and what cannot."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._known: TenantLru[str, _Known] = TenantLru(_REMEMBERED)
        self._tasks: dict[tuple[str, bytes], asyncio.Task[_Known]] = {}
        self._num_waiting: Counter[tuple[str, bytes]] = Counter()

    async def check(self, schema: str, tenant: str) -> None:
        """Raise ApiError if answers cannot follow this schema. Callers with the same schema share one check."""
        digest = hashlib.sha256(schema.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(tenant, digest)
        if known is None:
            known = await self._share((tenant, digest), schema)
        if known.refusal is not None:
            raise replace(known.refusal)

    async def _share(self, key: tuple[str, bytes], schema: str) -> _Known:
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._run(key, schema))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps all have gone
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key], self._tasks[key]
                task.cancel()  # without effect if it is done

    async def _run(self, key: tuple[str, bytes], schema: str) -> _Known:
        known = _Known(None)
        try:
            await self._pool.run(CheckSchema(schema), key[0], "schema")
        except ApiError as error:
            if error.status != 400:  # it says nothing about the schema
                raise
            known = _Known(error.with_traceback(None))
            if error.code == "too_complex":
                message = "response_format: this schema is too complex to be compiled in time; use a simpler one"
                known = _Known(ApiError(400, message, _PARAM, error.code))
                asyncio.get_running_loop().call_later(_LATE_SECONDS, self._known.discard, *key)
        self._known.put(*key, known)
        return known
