"""Messages between the front end and its child processes, and the framing of messages.

    front end --Submit, Abort, Call--> engine process
    front end <--Reply(0, Started) | EngineFailed, StepOutputs, Reply-- engine process
    front end --PrepareConfig, then Call--> worker process
    front end <--Reply(0), then Reply-- worker process

A frame is a length (four bytes, big-endian) and a pickle. Pickles are safe here, because no other process can open the
socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.engine.params import Explanation, Output, SamplingParams
from kvtier.engine.schemas import Grammar
from kvtier.index.labels import NO_HINTS, Hints

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. Its outputs arrive in `StepOutputs`. A `Reply` with this id means that the request was rejected."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    schema: Grammar | None = None
    """Grammar of the answers."""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel a request. No reply follows."""

    id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a function of the child process by name. A `Reply` with this id follows.

    The engine process runs the functions in `engine_controls.CONTROLS` between two steps. It answers PING at once, even
    during a step. After SHUTDOWN, which has no reply, it cancels all requests, saves the cache and exits.
    """

    id: int
    name: str
    arguments: Mapping[str, Any]


PING, SHUTDOWN = "ping", "shutdown"


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a `Call`, or rejection of a `Submit`."""

    id: int | str
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is ready. The fields describe its model and cache."""

    max_context: int
    vocab_size: int
    block_tokens: int
    num_blocks: int
    max_rows: int
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """What is missing on this machine. The front end logs it."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine failed to start, or cannot continue."""

    why: str


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All outputs of one engine step."""

    outputs: tuple[Output, ...]
    ended: tuple[Explanation, ...]
    """One explanation per finished request."""
    sent: float
    """Value of time.monotonic() when the engine process sent this message. Both processes share this clock."""


Command = Submit | Abort | Call
Event = EngineFailed | StepOutputs | Reply


def frame(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read one message. Raises OSError or IncompleteReadError if the child process dies."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


class Channel:
    """The child process's end of a socket pair, with blocking calls. One thread reads; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises OSError if the front end has exited."""
        data = frame(message)
        with self._sending:
            self._connection.sendall(data)

    def end(self) -> None:
        """Shut down the connection, which ends the iteration in the reading thread."""
        with contextlib.suppress(OSError):  # the front end closed the connection first
            self._connection.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Any]:
        """Yield messages until the front end closes the connection or dies."""
        while len(head := self._stream.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            body = self._stream.read(size)
            if len(body) < size:
                return
            yield pickle.loads(body)
