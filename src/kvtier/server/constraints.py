"""Constraints: compiles JSON schemas in the engine process, on a thread of low priority beside the engine's."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvtier.engine.grammar import Grammars, JsonConstraint
from kvtier.errors import KvtierError, UnavailableError
from kvtier.server.lru import TenantLru

MakeConstraint = Callable[[], JsonConstraint]
_REMEMBERED = 16  # of each tenant; a compiled schema takes up to some megabytes
_NICE = 19  # a large schema takes seconds, and the engine's own threads need the cores


class Constraints:
    """Keeps compiled schemas, by tenant and digest. The thread is a daemon: it never holds up the process's end."""

    def __init__(self, make_grammars: Callable[[], Grammars]) -> None:
        self._make_grammars = make_grammars
        self._jobs: queue.SimpleQueue[tuple[str, bytes, bytes, Future[MakeConstraint]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._compiled: TenantLru[bytes, Future[MakeConstraint]] = TenantLru(_REMEMBERED)
        self._thread: threading.Thread | None = None

    def get(self, schema: str, tenant: bytes) -> Future[MakeConstraint]:
        """Compile a schema, or find it compiled, or being compiled. Callbacks run on the compiling thread."""
        digest = hashlib.sha256(schema.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._compiled.get(tenant, digest)
            if found is not None:
                return found
            future: Future[MakeConstraint] = Future()
            self._compiled.put(tenant, digest, future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="kvtier-constraints", daemon=True)
            self._thread.start()
        self._jobs.put((schema, tenant, digest, future))
        return future

    def _loop(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        grammars: Grammars | None = None
        while True:
            schema, tenant, digest, future = self._jobs.get()
            try:
                grammars = grammars or self._make_grammars()
                made = grammars.json(schema)
            except (
                Exception
            ) as error:  # llguidance's, of a tokenizer that it cannot read: it concerns this request only
                with self._lock:
                    self._compiled.discard(tenant, digest)
                future.set_exception(error if isinstance(error, KvtierError) else _unavailable(error))
            else:
                future.set_result(made)


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(f"answers after a schema are not possible with this model: {type(error).__name__}: {error}")
