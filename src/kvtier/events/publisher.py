"""EventPublisher: an index listener that publishes events over ZMQ.

A message has three frames, as in vLLM's publisher: the topic, the sequence number (8 bytes, big-endian), and [time,
[event, ..], rank] in msgpack. An event is a map with a `type`. Sequence numbers increase by one. The first number is
the start time in microseconds, so a restarted process continues with higher numbers.

A subscriber that has just started or has missed messages can request a replay. It connects a DEALER socket to the
replay endpoint and sends an empty frame and the first missing number (0 if it has just started). The reply consists of
all messages with this or a higher number, and ends with an empty message with the number -1. If the first of these
messages are no longer kept, a snapshot replaces all messages that are not kept. The snapshot has the number of the last
message that it replaces. It contains AllBlocksCleared and the blocks at that point. Example: messages 7 to 9 are kept.

    request 8    reply: message 8, message 9, end (-1)
    request 3    reply: snapshot (6), message 7, message 8, message 9, end (-1)
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import zmq

from kvtier.errors import ClosedError, StateError
from kvtier.events import EventConfig
from kvtier.events.contents import IndexContents
from kvtier.events.wire import as_map
from kvtier.index import Event, IndexCleared

_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000  # longest wait for unsent messages when the sockets are closed


class EventPublisher:
    """Queues events without blocking. A separate thread encodes and sends them. Only one thread may call the publisher.

    `num_dropped` counts the events that were dropped because the queue was full.
    """

    def __init__(self, config: EventConfig) -> None:
        self._config = config
        self._events: deque[Event] = deque()
        self._kept: deque[tuple[int, bytes, list[Event]]] = deque()
        self._before = IndexContents()  # the blocks in the index before the first kept message
        self._sequence = time.time_ns() // 1000
        self.num_dropped = 0
        self._has_dropped = False
        self._context = zmq.Context()
        try:
            self._publish = self._open(zmq.PUB, config.endpoint, connects=config.connects)
            self.endpoint = str(self._publish.getsockopt_string(zmq.LAST_ENDPOINT))
            """Address of the publishing socket, with the actual port if the configured port is a wildcard."""
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint) if config.replay_endpoint else None
            self.replay_endpoint = str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT)) if self._replay else ""
            """Address for replay requests; empty if there is no replay."""
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
            self._has_dropped = True
        else:
            if self._has_dropped:  # subscribers have missed events and must discard their state
                self._events.append(IndexCleared())
                self._has_dropped = False
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
        # A full PUB queue drops messages, and the sequence numbers show the gap. A ROUTER must not drop parts of a
        # replay, so its queue has no limit.
        socket.set_hwm(self._config.max_queued if kind == zmq.PUB else 0)
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
        events = [self._events.popleft() for _ in range(len(self._events))]
        if not events:
            return
        payload = self._encode(events)
        self._publish.send_multipart([self._config.topic.encode(), self._sequence.to_bytes(8, "big"), payload])
        if self._replay is not None:
            self._kept.append((self._sequence, payload, events))
            if len(self._kept) > self._config.num_kept:
                for event in self._kept.popleft()[2]:
                    self._before.apply(event)
        self._sequence += 1

    def _encode(self, events: Iterable[Event]) -> bytes:
        maps = [as_map(event, self._config) for event in events]
        return msgspec.msgpack.encode([time.time(), maps, self._config.rank])

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a replay request. A malformed request is ignored."""
        request = replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        oldest = self._kept[0][0] if self._kept else self._sequence
        messages = [(sequence, payload) for sequence, payload, _ in self._kept if sequence >= first]
        if first < oldest:
            messages.insert(0, (oldest - 1, self._encode(self._before.events())))
        topic = self._config.topic.encode()
        for sequence, payload in messages:
            replay.send_multipart([client, b"", topic, sequence.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", b"", _END, b""])
