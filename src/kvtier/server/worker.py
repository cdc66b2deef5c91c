"""A worker process: prepares large request bodies and compiles schemas, one job at a time, until its socket closes.

If a job exceeds its deadline, the front end kills the process. If the front end has exited, SIGALRM ends the process
instead. The worker's memory is limited, and its priority is lower than that of the engine process.
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
from kvtier.server.messages import WORKER_CODEC, Call, Channel, Reply
from kvtier.server.prepare import Preparation, PrepareConfig

# At this priority, streams continue while a worker computes. At nice 19, a worker would get only 2 % of a busy core.
_NICE = 10
_HEADROOM_BYTES = 1 << 30  # memory for jobs, beyond the process's size at start; a body of 4 MB takes up to 0.4 GB
_ALARM_SECONDS = 2.0  # delay of SIGALRM after the deadline; a running front end kills this process earlier


def main(descriptor: int) -> None:
    """Entry point of the process. `descriptor` is the file descriptor of a connected socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches this process, but the front end must end it
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    channel = Channel(socket.socket(fileno=descriptor), WORKER_CODEC)
    messages = iter(channel)
    config: PrepareConfig = next(messages)
    tokenizer = load_tokenizer(config.source)
    assert tokenizer.max_token_bytes != 0  # computed at start, because the first access is slow
    preparation = Preparation(config, tokenizer)
    _bound_memory()
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:  # OSError: the front end has exited
        channel.send(Reply(0))
        os.dup2(null.fileno(), 2)  # panics in native code may print a prompt, and logs must not contain prompts
        for call in messages:
            if call.name != "load_compiler":  # loading a compiler may take longer than a job
                signal.setitimer(signal.ITIMER_REAL, config.seconds + _ALARM_SECONDS)  # SIGALRM ends the process
            channel.send(_run(preparation, call))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _run(preparation: Preparation, call: Call) -> Reply:
    try:
        result = getattr(preparation, call.name)(**call.arguments)
        return Reply(call.id, result if call.name == "prepare" else None)  # a compiler cannot be pickled
    except ApiError as error:
        return Reply(call.id, error=error)
    except MemoryError:
        message = "preparing the request takes too much memory; send a shorter or simpler one"
        return Reply(call.id, error=ApiError(400, message, code="too_complex"))
    except Exception as error:  # only this request fails; the text of the error may quote the prompt and is not logged
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Reply(
            call.id, error=RuntimeError(f"{type(error).__name__} in {last.name}, {last.filename}:{last.lineno}")
        )


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM_BYTES,) * 2)
