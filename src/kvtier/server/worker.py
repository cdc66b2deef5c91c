"""A worker process: prepares large bodies and compiles schemas, one at a time, until its socket closes.

It can be killed at any time. The front end kills it when a job is late; an alarm does so if the front end has exited.
Its memory is bounded, and its priority is below that of the engine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import traceback

from kvtier.engine.tokenizer import load_tokenizer
from kvtier.server.errors import ApiError
from kvtier.server.messages import Call, Channel, Reply
from kvtier.server.prepare import Preparation, PrepareConfig

# Streams continue while a worker computes. Lower still, a worker would get 2 % of a core that the engine keeps busy.
_NICE = 10
_HEADROOM_BYTES = 1 << 30  # on top of its size after the start; a body of 4 MB takes up to 0.4 GB
_ALARM_SECONDS = 2.0  # after the deadline, which the front end enforces if it is alive


def main(descriptor: int) -> None:
    """Entry point of the process. `descriptor` is a connected socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all processes; the front end ends this one
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    channel = Channel(socket.socket(fileno=descriptor))
    messages = iter(channel)
    config: PrepareConfig = next(messages)
    tokenizer = load_tokenizer(config.source)
    assert tokenizer.max_token_bytes != 0  # computed here, not in the time of the first job
    preparation = Preparation(config, tokenizer)
    _bound_memory()
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # OSError: the front end has exited
        channel.send(Reply(0))
        os.dup2(null.fileno(), 2)  # panics of native code may quote a prompt, which no log may contain
        for call in messages:
            if call.name != "load_compiler":
                signal.setitimer(signal.ITIMER_REAL, config.seconds + _ALARM_SECONDS)  # SIGALRM ends the process
            channel.send(_run(preparation, call))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _run(preparation: Preparation, call: Call) -> Reply:
    try:
        result = getattr(preparation, call.name)(**call.arguments)
        return Reply(call.id, result if call.name == "prepare" else None)  # a compiler cannot be sent
    except ApiError as error:
        return Reply(call.id, error=error)
    except MemoryError:
        message = "preparing the request takes too much memory; send a shorter or simpler one"
        return Reply(call.id, error=ApiError(400, message, code="too_complex"))
    except Exception as error:  # of any kind: only this request fails. Its text is not logged: it may quote the prompt
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Reply(
            call.id, error=RuntimeError(f"{type(error).__name__} in {last.name}, {last.filename}:{last.lineno}")
        )


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM_BYTES,) * 2)
