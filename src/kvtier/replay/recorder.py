"""Recorder: writes a request log for `kvtier replay`. The log contains hashes, lengths and times, but no text.

Each line is a JSON object. `read_trace` uses two kinds of lines. A request's line is written when the request ends:

    {"event": "request", "id": "request-3#0", "arrival": 12.5, "block_tokens": 16, "prompt_tokens": 130,
     "answer_tokens": 40, "keys": ["9f86d081884c7d65", ..], "tokens_from": {"device": 64, "host": 32}, "ttft": 0.21}

The line also has `state` (see RequestState) and, if known, `finish_reason` and the client's hints (`session_id`,
`session_over`, `expects_return_seconds`). The other kind of line marks the end of a session:

    {"event": "close", "time": 80.2, "session_id": ".."}

`keys` contains one name per full block of prompt and answer. If two blocks have the same name, their tokens and all
tokens before them are equal. A name is a digest of the block's key and the log's secret, so that a reader of the log
cannot test guessed prompts. Logs that are replayed together must have the same secret.

benchmarks/step_recorder.py also logs each call of a scheduler method and each report of a worker.
benchmarks/follow.py replays such a log step by step.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from kvtier.errors import ArgumentError, StateError
from kvtier.index.tier import tenant_of
from kvtier.messages import split_keys
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, Step

LOG_VERSION = 1
NAME_BYTES = 8
_WRAPPED = ("schedule", "update", "fail", "cancel", "close_session")


class Recorder:
    """Wraps the methods of one scheduler and logs the scheduler's requests.

    Use a Recorder only on the scheduler's thread. Requests that have not ended when the log is closed are not logged.
    If a write to the log fails, recording ends with a warning, and serving continues.
    """

    def __init__(self, path: str | Path, *, secret: bytes | None = None) -> None:
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8", opener=_create)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise ArgumentError(f"cannot create the log {os.fspath(path)}: {error.strerror}") from error
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._first_tokens: dict[str, float] = {}
        self._begin = 0.0
        self._scheduler: Scheduler | None = None

    def attach(self, scheduler: Scheduler, *, now: float) -> None:
        """Start recording; `now` is time 0 of the log."""
        if self._scheduler is not None or self._file.closed:
            raise StateError("the recorder is already attached or closed; create a recorder for each scheduler")
        self._begin, self._scheduler = now, scheduler
        slots = {tier.name: tier.pool.num_slots for tier in scheduler.manager.tree.tiers}
        block_tokens = scheduler.manager.namespace.block_tokens
        ranks = scheduler.manager.transfers.num_ranks
        for name in _WRAPPED:
            setattr(scheduler, name, functools.partial(getattr(self, f"_{name}"), getattr(scheduler, name)))
        self.write(event="start", version=LOG_VERSION, block_tokens=block_tokens, slots=slots, ranks=ranks)

    def close(self) -> None:
        """Detach from the scheduler and close the file. Idempotent."""
        self._stop()

    # ---- wrapped methods -------------------------------------------------------------------------------------------

    def _schedule(self, inner: Callable[..., Step], now: float) -> Step:
        step = inner(now)
        for request in step.refused:
            self._end(request)
        return step

    def _update(self, inner: Callable[..., None], step: Step, results: Sequence[RowResult], now: float) -> None:
        inner(step, results, now)
        for row in step.rows:
            if row.request.num_new_tokens:
                self._first_tokens.setdefault(row.request.id, now)
            if row.request.state.is_over:
                self._end(row.request)

    def _fail(self, inner: Callable[..., tuple[Request, ...]], step: Step, now: float) -> tuple[Request, ...]:
        failed = inner(step, now)
        for request in failed:
            self._end(request)
        return failed

    def _cancel(self, inner: Callable[..., bool], request: Request, now: float) -> bool:
        was_live = inner(request, now)
        if was_live:
            self._end(request)
        return was_live

    def _close_session(self, inner: Callable[..., int], session_id: str, salt: bytes, now: float) -> int:
        num_blocks = inner(session_id, salt, now)
        self.write(event="close", time=now - self._begin, session_id=self._session(session_id, salt))
        return num_blocks

    def _end(self, request: Request) -> None:
        chain, first = request.chain, self._first_tokens.pop(request.id, None)
        self.write(
            event="request",
            id=request.id,
            arrival=request.arrival - self._begin,
            block_tokens=chain.namespace.block_tokens,
            prompt_tokens=request.num_prompt_tokens,
            answer_tokens=request.num_new_tokens,
            keys=self.names(chain.keys()),
            tokens_from=request.tokens_from,
            ttft=None if first is None else first - request.arrival,
            state=request.state.value,
            **self._hints(request),
        )

    def _hints(self, request: Request) -> dict[str, Any]:
        """Return the finish reason of a request and the hints of its client, as fields of a log line."""
        hints = request.hints
        record: dict[str, Any] = {}
        if request.state is RequestState.FINISHED:
            record["finish_reason"] = "length" if request.num_new_tokens >= request.max_new_tokens else "stop"
        if hints.session_id:
            record["session_id"] = self._session(hints.session_id, request.chain.salt)
        if hints.session_over:
            record["session_over"] = True
        if hints.expects_return_seconds is not None:
            record["expects_return_seconds"] = hints.expects_return_seconds
        return record

    def _session(self, session_id: str, salt: bytes) -> str:
        """Return the name that represents a session of a tenant in this log."""
        session = tenant_of(salt) + b"\0" + session_id.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(session, digest_size=NAME_BYTES, key=self._secret).hexdigest()

    def names(self, keys: bytes) -> list[str]:
        """Return the names that represent block keys in this log."""
        return [hashlib.blake2b(key, digest_size=NAME_BYTES, key=self._secret).hexdigest() for key in split_keys(keys)]

    def write(self, **record: Any) -> None:
        """Write a line. Does nothing after an error or after `close`."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._stop(error)

    def _stop(self, failure: OSError | None = None) -> None:
        for name in _WRAPPED if self._scheduler is not None else ():
            delattr(self._scheduler, name)
        self._scheduler = None
        try:
            self._file.close()
        except OSError as error:  # buffered lines could not be written
            failure = failure or error
        if failure is not None:
            warnings.warn(f"stopped writing the log {self._file.name}: {failure}", RuntimeWarning, stacklevel=3)


def _create(path: str, _: int) -> int:
    """Create a file with mode 0600, because the log shows times and lengths of all tenants' requests.
    Refuse links and existing files, but accept devices and pipes."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = 0
    is_device = stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
    create = 0 if is_device else os.O_CREAT | os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o600)
