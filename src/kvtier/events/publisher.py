"""EventPublisher: an index listener that publishes events over ZMQ.

A message has three frames, as in vLLM's publisher: the topic, the sequence number (8 bytes, big-endian), and
[time, [event, ..], rank] in msgpack. An event is a map with a `type`. Sequence numbers increase by one. A subscriber
that finds a gap connects a DEALER socket to the replay endpoint, and sends an empty frame and the first missing number.
The reply consists of all kept messages from this number on, followed by an empty message with the number -1. If the
replay does not fill the gap, the subscriber must discard its state.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import zmq

from kvtier.errors import ClosedError, StateError
from kvtier.events import EventConfig
from kvtier.index import BlocksRemoved, BlocksStored, Event, IndexCleared
from kvtier.messages import KEY_BYTES

_TOKEN_BYTES = 4
_MEDIA = {"device": "GPU", "host": "CPU"}  # every other tier is a store
_STORAGE = "STORAGE"
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000


class EventPublisher:
    """Queues events without blocking. A separate thread encodes and sends them. Call the publisher from one thread.

    `num_dropped` counts the events that were dropped because the queue was full.
    """

    def __init__(self, config: EventConfig) -> None:
        self._config = config
        self._events: deque[Event] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.num_kept)
        self._sequence = 0
        self.num_dropped = self._num_dropped_sent = 0
        self._context = zmq.Context()
        try:
            self._publish = self._open(zmq.PUB, config.endpoint, connects=config.connects)
            self.endpoint = str(self._publish.getsockopt_string(zmq.LAST_ENDPOINT))
            """Address for subscribers."""
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint) if config.replay_endpoint else None
            self.replay_endpoint = str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT)) if self._replay else ""
            """Address for replay requests, or empty."""
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StateError(
                f"cannot publish events at {config.endpoint!r} with replay at {config.replay_endpoint!r}: {error}; "
                f"choose free addresses, such as tcp://127.0.0.1:5557"
            ) from error
        self._bell = os.eventfd(0)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._is_closed:
            raise ClosedError(f"the publisher at {self._config.endpoint} is closed")
        if len(self._events) >= self._config.max_queued:
            self.num_dropped += 1
        else:
            self._events.append(event)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Send the queued events, stop the thread and close the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)

    def _open(self, kind: int, endpoint: str, *, connects: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.max_queued)
        (socket.connect if connects else socket.bind)(endpoint)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_last = False
        while not is_last:
            ready = dict(poller.poll())
            is_last = self._is_closed  # checked before `_send`, so that events queued before `close` are sent
            if self._bell in ready:
                os.eventfd_read(self._bell)
                self._send()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy(linger=_LINGER_MS)

    def _send(self) -> None:
        """Send all queued events as one message."""
        if self.num_dropped != self._num_dropped_sent:
            self._num_dropped_sent = self.num_dropped
            self._sequence += 1  # skip one number, so that subscribers see a gap
        events = [_as_map(self._events.popleft(), self._config) for _ in range(len(self._events))]
        if not events:
            return
        payload = msgspec.msgpack.encode([time.time(), events, self._config.rank])
        self._publish.send_multipart([self._config.topic.encode(), self._sequence.to_bytes(8, "big"), payload])
        self._kept.append((self._sequence, payload))
        self._sequence += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a replay request. A malformed request is ignored."""
        request = replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                topic = self._config.topic.encode()
                replay.send_multipart([client, b"", topic, sequence.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", b"", _END, b""])


def _as_map(event: Event, config: EventConfig) -> dict[str, object]:
    """Return an event in vLLM's format."""
    if isinstance(event, IndexCleared):
        return {"type": "AllBlocksCleared"}
    hashes = list(_hashes(event.keys, config))
    medium = _MEDIA.get(event.tier, _STORAGE)
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    assert isinstance(event, BlocksStored)
    tokens = np.frombuffer(event.token_bytes, "<i4").tolist() if config.token_ids else []
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.is_first else next(_hashes(event.parent, config)),
        "token_ids": tokens,
        "block_size": len(event.token_bytes) // _TOKEN_BYTES // len(hashes),
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def _hashes(keys: bytes, config: EventConfig) -> Iterator[int | bytes]:
    for at in range(0, len(keys), KEY_BYTES):
        key = keys[at : at + KEY_BYTES]
        yield int.from_bytes(key[-8:], "big") if config.int_hashes else key
