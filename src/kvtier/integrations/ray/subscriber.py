"""Receives the KV events of a replica over ZMQ and applies them to a ReplicaFeed. Requests missed events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvtier.router import EventBatch, FeedState, ForeignKeys, ReplicaFeed

_log = logging.getLogger("ray.serve")
_END = (-1).to_bytes(8, "big", signed=True)  # number of the message that ends a replay
_REPLAY_SECONDS = 10.0  # longest wait for the next message of a replay
_CHECK_SECONDS = 1.0  # longest time between two checks for missing events


async def follow(feed: ReplicaFeed, events: str, replay: str, keys: ForeignKeys | None = None) -> None:
    """Receive and apply events until cancelled.

    `events` and `replay` are ZMQ addresses. If `replay` is empty, missed events cannot be requested: after a gap, the
    feed drops the replica's blocks and continues. `keys` converts the events of other engines, such as vLLM.
    """
    with ExitStack() as opened:
        context = opened.enter_context(zmq.asyncio.Context())
        socket = opened.enter_context(context.socket(zmq.SUB))
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(events)
        while True:
            if feed.state is not FeedState.LIVE:
                if replay:
                    await _replay(context, feed, replay, keys)
                elif feed.next_number:
                    feed.restart()
            if await socket.poll(_CHECK_SECONDS * 1e3):
                _, number, payload = await socket.recv_multipart()
                _apply(feed, number, payload, keys)


async def _replay(context: zmq.asyncio.Context, feed: ReplicaFeed, address: str, keys: ForeignKeys | None) -> None:
    """Request all batches from the first missing one to the newest, and apply them."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.connect(address)
        await socket.send_multipart([b"", feed.next_number.to_bytes(8, "big")])
        try:
            while True:
                async with asyncio.timeout(_REPLAY_SECONDS):
                    frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == _END:
                    return
                # Index from the end, because vLLM sends no topic frame in a replay.
                _apply(feed, frames[-2], frames[-1], keys)
        except TimeoutError:
            _log.warning("no replay of KV events from %s within %g s", address, _REPLAY_SECONDS)


def _apply(feed: ReplicaFeed, number: bytes, payload: bytes, keys: ForeignKeys | None) -> None:
    """Apply one message. Skip a message that cannot be decoded; its events count as missing."""
    try:
        fields: Any = msgspec.msgpack.decode(payload)
        batch = EventBatch(int.from_bytes(number, "big"), float(fields[0]), fields[1])
        feed.apply(batch if keys is None else keys.convert(batch))
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("skipped a KV event message that cannot be decoded: %s", type(error).__name__)
