"""A worker process: prepares large bodies and compiles schemas, one at a time, until its socket closes.

It is meant to be killed: the front end does so when a job is late, and an alarm does so when the front end has ended.
Its memory is bounded and its priority is below that of the engine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import traceback
from dataclasses import dataclass
from typing import Any

from kvtier.engine.tokenizer import load_tokenizer
from kvtier.server.errors import ApiError
from kvtier.server.messages import Channel
from kvtier.server.prepare import CheckSchema, LoadCompiler, ModelInfo, Preparation, PrepareBody, Prepared

# Streams go on while a worker computes. Lower still, a worker would get 2 % of a core that the engine keeps busy.
_NICE = 10
_HEADROOM_BYTES = 1 << 30  # above what it has after its start; a body of 4 MB takes up to 0.4 GB
_ALARM_SECONDS = 2.0  # after the deadline, which the front end enforces if it is there


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a worker."""

    model: ModelInfo
    seconds: float
    """For one job."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's answer to its setup."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A worker's answer to a job."""

    value: Prepared[Any] | None
    error: ApiError | None = None
    why: str = ""
    """For the log, if it is a fault of the server: no text of the request."""


Job = PrepareBody | CheckSchema | LoadCompiler


def main(descriptor: int) -> None:
    """Entry point of the process; `descriptor` is of a connected socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all; the front end says when to end
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    channel = Channel(socket.socket(fileno=descriptor))
    messages = iter(channel)
    setup = next(messages)
    tokenizer = load_tokenizer(setup.model.source)
    assert tokenizer.max_token_bytes != 0  # computed here, not in the time of the first job
    preparation = Preparation(setup.model, tokenizer)
    _bound_memory()
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # the front end has ended
        channel.send(Ready())
        os.dup2(nothing.fileno(), 2)  # panics of native code may quote a prompt, which no log may contain
        for job in messages:
            if not isinstance(job, LoadCompiler):
                signal.setitimer(signal.ITIMER_REAL, setup.seconds + _ALARM_SECONDS)  # SIGALRM ends the process
            channel.send(_run(preparation, job))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _run(preparation: Preparation, job: Job) -> Outcome:
    try:
        match job:
            case PrepareBody():
                return Outcome(preparation.body(job))
            case CheckSchema():
                preparation.check_schema(job)
            case LoadCompiler():
                preparation.load_compiler()
        return Outcome(None)
    except ApiError as error:
        return Outcome(None, error)
    except MemoryError:
        return Outcome(None, ApiError(400, "preparing this request takes too much memory", code="too_complex"))
    except Exception as error:  # whatever it is, it concerns this request only
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__} in {last.name}, {last.filename}:{last.lineno}"
        return Outcome(None, ApiError(500, "the server failed; its log has the details"), why)


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM_BYTES,) * 2)
