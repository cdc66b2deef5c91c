"""A store of your own, a table in SQLite, as the lowest tier of a cache.

A Bucket keeps values by name. RemoteStore implements kvtier.storage.Store over a bucket. It adds checksums, labels,
deadlines, threads, retries, a circuit breaker and encryption, and detects values that the bucket lost or changed.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import tiered_cache

from kvtier.storage import RemoteStore
from kvtier.storage.codec import Scratch
from kvtier.storage.remote.bucket import BucketError, Parts, Put, RequestSize


class SqliteBucket:
    request_size = RequestSize(max_names=500)

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()  # several threads of RemoteStore call the bucket
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._run("CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB)")

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [head is not None for head in self._heads(names, 1)]

    def fetch(self, names: Sequence[str], limits: Sequence[int], scratch: Scratch) -> list[memoryview | None]:  # noqa: ARG002
        return [None if value is None else memoryview(value) for value in self._heads(names, max(limits))]

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:  # noqa: ARG002
        return self._heads(names, nbytes)

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:  # noqa: ARG002
        for name, parts in zip(names, values, strict=True):
            self._run("INSERT OR REPLACE INTO kv VALUES (?, ?)", (name, b"".join(parts)))
        return [Put.STORED] * len(names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        return [bool(self._run("DELETE FROM kv WHERE name = ? RETURNING 1", (name,))) for name in names]

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        rows = self._run("SELECT name FROM kv WHERE name > ? ORDER BY name LIMIT ?", (cursor, limit))
        return [name for (name,) in rows], rows[-1][0] if len(rows) == limit else ""

    def reset(self) -> None:
        """Do nothing. RemoteStore calls this after errors, so that a bucket on a server can drop its connections."""

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        marks = ",".join("?" * len(names))
        rows = self._run(f"SELECT name, substr(value, 1, {nbytes}) FROM kv WHERE name IN ({marks})", names)
        values = dict(rows)
        return [values.get(name) for name in names]

    def _run(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            with self._lock, self._db:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise BucketError(str(error)) from error


def open_sqlite(path: str) -> RemoteStore:
    return RemoteStore(SqliteBucket(path), f"sqlite:{path}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tiered_cache.main(open_sqlite(f"{folder}/kv.db"))
