"""Messages between the front end and its child processes, and the framing of messages.

    front end --Submit, Abort, Call--> engine process
    front end <--Reply(0, Started), then StepOutputs, Reply; EngineFailed at any time-- engine process
    front end --PrepareConfig, then Call--> worker process
    front end <--Reply(0), then Reply-- worker process

A frame is a length (four bytes, big-endian) and a body. To and from the engine process, a body is one byte for the type
of the message, followed by MessagePack. This body can contain only the types declared here, so neither process can make
the other process run code. The receiver skips an invalid body. To and from worker processes, a body is a pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from kvtier import errors
from kvtier.engine.params import Explanation, Output, SamplingParams
from kvtier.engine.schemas import Grammar
from kvtier.index.labels import NO_HINTS, Hints

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 30  # a longer frame means that the stream is corrupt


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. Its outputs arrive in `StepOutputs`. A `Reply` with this id means that the request was rejected."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: bytes = b""
    schema: Grammar | None = None
    """Grammar that the answers must follow; None if any text is allowed."""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel a request. No reply follows."""

    id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function of the child process by name. A `Reply` with this id follows.

    The engine process runs the functions in `engine_controls.CONTROLS` between two steps. It answers PING at once, even
    during a step. After SHUTDOWN, which has no reply, it saves the cache, cancels all requests and exits.
    """

    id: int
    name: str
    arguments: Mapping[str, Any]


PING, SHUTDOWN = "ping", "shutdown"


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a `Call`, or rejection of a `Submit`. The first reply means that the child process is ready."""

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
    """Features that are missing on this machine. The front end logs them."""
    events: str = ""
    """Address of the KV events; empty if the engine does not publish them."""
    events_replay: str = ""
    """Address for the replay of missed KV events; empty if there is none."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine failed to start, or cannot continue."""

    why: str


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All outputs of one engine step."""

    outputs: tuple[Output, ...]
    ended: tuple[Explanation, ...]
    """For each output that is the last of its answer, the explanation of the request."""
    sent: float
    """Value of time.monotonic() when the engine process sent this message. Both processes share this clock."""


Command = Submit | Abort | Call
Event = EngineFailed | StepOutputs | Reply


class WireReply(NamedTuple):
    """A `Reply` on the wire. `kind` and `text` are the class name and text of the error; empty if there is no error."""

    id: int | str
    value: dict[str, Any] | None
    started: Started | None
    kind: str
    text: str


_TYPES: tuple[type[Any], ...] = (Submit, Abort, Call, EngineFailed, StepOutputs, WireReply)
_NUMBERS = MappingProxyType({kind: bytes([number]) for number, kind in enumerate(_TYPES)})
_DECODERS = tuple(msgspec.msgpack.Decoder(kind) for kind in _TYPES)
_ERRORS = MappingProxyType(
    {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
)


def _plain(value: Any) -> Any:
    """Convert a numpy number to a Python number."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")
    return item()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode_message(message: Command | Event) -> bytes:
    """Return the body of a frame to or from the engine process. Raises TypeError if a type cannot be sent."""
    wire = _to_wire(message) if isinstance(message, Reply) else message
    number = _NUMBERS.get(type(wire))
    if number is None:
        raise TypeError(f"{type(message).__name__} is not a message")
    return number + _ENCODER.encode(wire)


def decode_message(body: bytes) -> Any:
    """Return the message in a body. Raises FormatError if the body is not a valid message."""
    if not body or body[0] >= len(_DECODERS):
        raise errors.FormatError(f"a frame of {len(body)} bytes has no known type of message")
    try:
        message = _DECODERS[body[0]].decode(memoryview(body)[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        name = _TYPES[body[0]].__name__
        raise errors.FormatError(f"a {name} of {len(body)} bytes is invalid: {type(error).__name__}") from error
    return _from_wire(message) if isinstance(message, WireReply) else message


def _to_wire(reply: Reply) -> WireReply:
    started = reply.value if isinstance(reply.value, Started) else None
    value = None if started is not None else reply.value
    if reply.error is None:
        return WireReply(reply.id, value, started, "", "")
    return WireReply(reply.id, value, started, type(reply.error).__name__, str(reply.error))


def _from_wire(wire: WireReply) -> Reply:
    """Return a reply. An error of a class that kvtier.errors lacks becomes a KvtierError with the class in its text."""
    value = wire.value if wire.started is None else wire.started
    if not wire.kind:
        return Reply(wire.id, value)
    kind = _ERRORS.get(wire.kind)
    if kind is None:
        return Reply(wire.id, value, errors.KvtierError(f"{wire.kind}: {wire.text}"))
    return Reply(wire.id, value, kind(wire.text))


class Codec(NamedTuple):
    """Converts messages to the bodies of frames and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


ENGINE_CODEC = Codec(encode_message, decode_message)
WORKER_CODEC = Codec(lambda message: pickle.dumps(message, pickle.HIGHEST_PROTOCOL), pickle.loads)
"""Pickle, because workers return pydantic models. This is safe: no other process can open a worker's socket pair."""


def frame(message: object, codec: Codec) -> bytes:
    body = codec.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader, codec: Codec) -> Any:
    """Read one message. Raises OSError or IncompleteReadError if the child process dies, FormatError for a bad body."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    _check_size(size)
    return codec.decode(await reader.readexactly(size))


def _check_size(size: int) -> None:
    if size > _MAX_FRAME_BYTES:
        raise ConnectionAbortedError(f"a frame announces {size} bytes; the limit is {_MAX_FRAME_BYTES}")


class Channel:
    """The child process's end of a socket pair, with blocking calls. One thread reads; any thread may send."""

    def __init__(self, connection: socket.socket, codec: Codec) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._codec = codec
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises OSError if the front end has exited."""
        data = frame(message, self._codec)
        with self._sending:
            self._connection.sendall(data)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()

    def end(self) -> None:
        """Shut down the connection, which ends the iteration in the reading thread."""
        with contextlib.suppress(OSError):  # the front end closed the connection first
            self._connection.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Any]:
        """Yield messages until the front end closes the connection or dies. Yields a FormatError for a bad body."""
        while len(head := self._stream.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            _check_size(size)
            body = self._stream.read(size)
            if len(body) < size:
                return
            try:
                message = self._codec.decode(body)
            except errors.FormatError as error:
                message = error
            yield message
