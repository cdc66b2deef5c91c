"""What the front end and the engine process tell each other, and how it travels.

    front end --Submit, Abort, Call, Ping, Close--> engine process
    front end <--Started | Broken, Progress, Refused, Answer-- engine process

A frame is a length (four bytes, big-endian) and a pickle. Both ends are ours and joined by a socket pair that nobody
else can open, so pickles are safe here.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.engine.params import Explanation, Output, SamplingParams

LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Submit:
    """A request; its outputs come in `Progress`."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    schema: str | None = None
    """A JSON schema the answers follow."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run a control (engine_controls.CONTROLS) between two steps; an `Answer` with this id follows."""

    id: int
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered with an empty `Answer` at once, also during a step."""

    id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Cancel what runs, keep what is cached if there is a place for it, and end."""


Command = Submit | Abort | Call | Ping | Shutdown


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is ready."""

    max_context: int
    vocab_size: int
    block_tokens: int
    num_blocks: int
    max_rows: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not start, or cannot go on."""

    why: str


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All that one step added, in one message."""

    outputs: tuple[Output, ...]
    ended: tuple[Explanation, ...]
    """Of the requests that got their last token."""
    sent: float
    """time.monotonic of the engine process; the same clock as the front end's."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine did not take a request."""

    id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ControlResult:
    """What a call gave."""

    id: int
    value: Any
    error: Exception | None = None


Event = Started | EngineFailed | StepOutputs | Refused | ControlResult


def frame(message: object) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Channel:
    """The other process's end of a socket pair: blocking; one thread reads, any may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError if the front end is gone."""
        data = frame(message)
        with self._sending:
            self._connection.sendall(data)

    def end(self) -> None:
        """Nothing is sent any more, and whoever reads sees the end."""
        with contextlib.suppress(OSError):  # the front end was quicker
            self._connection.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Any]:
        """Messages as they come, until the other end closes or dies."""
        while len(head := self._stream.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            body = self._stream.read(size)
            if len(body) < size:
                return
            yield pickle.loads(body)
