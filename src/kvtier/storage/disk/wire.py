"""Messages between the owner of a folder and the other processes that use it, over a Unix socket in the folder.

    message   size of the JSON, 4 bytes | size of the data, 4 bytes | JSON | data
    request   JSON: [method, argument, ..]
    reply     JSON: [null, result, ..], or [errno, text] after an error. The method "release" has no reply.

The data of a message are concatenated keys or records. The reply to "contains" has one byte per key as data: 0 or 1.
The path of a Unix socket can have at most 107 bytes, but folders can have longer paths. Both sides therefore use the
path /proc/self/fd/N/SOCKET, where N is a descriptor of the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvtier.errors import FormatError

SOCKET = "SOCKET"
VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20  # a longer message is rejected before memory is allocated for it
_HEAD = struct.Struct("<II")

Values = Sequence[Any]


def send(connection: socket.socket, values: Values, data: bytes = b"") -> None:
    text = json.dumps(values).encode()
    connection.sendall(b"".join((_HEAD.pack(len(text), len(data)), text, data)))


def receive(connection: socket.socket) -> tuple[list[Any], bytes]:
    """Return the next message. Raise ConnectionError if the other side has closed the connection."""
    text_bytes, data_bytes = _HEAD.unpack(_receive_bytes(connection, _HEAD.size))
    if text_bytes + data_bytes > MAX_MESSAGE_BYTES:
        raise FormatError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {text_bytes + data_bytes}")
    body = _receive_bytes(connection, text_bytes + data_bytes)
    return json.loads(body[:text_bytes]), bytes(body[text_bytes:])


def _receive_bytes(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        received = connection.recv_into(view[done:])
        if not received:
            raise ConnectionResetError("the other process has closed the connection")
        done += received
    return data


def split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@contextlib.contextmanager
def short_path(folder: str) -> Iterator[str]:
    """Yield a short path that leads to the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def socket_stamp(folder: str) -> list[int]:
    """Return numbers that are different for each owner of the folder, or an empty list if there is no socket."""
    try:
        status = os.lstat(os.path.join(folder, SOCKET))
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_ctime_ns]
