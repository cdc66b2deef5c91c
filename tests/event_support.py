"""A subscriber to KV events. It rebuilds the index, as a router does."""

from __future__ import annotations

import socket

import numpy as np

from kvtier.index import RadixTree
from kvtier.index.events import last_key
from kvtier.index.node import WRITING
from kvtier.messages import KEY_BYTES

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
Contents = dict[str, dict[bytes | int, tuple]]


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def replayed(endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """Request all messages whose number is at least `first`. Return their numbers and payloads."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert dealer.poll(30_000), "no reply"
            _, _, number, payload = dealer.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            found.append((int.from_bytes(number, "big"), payload))


class Router:
    """Receives events over ZMQ, rebuilds the blocks of each medium, and requests missed messages."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        import zmq

        self._context = zmq.Context()
        self.replay_endpoint = replay_endpoint
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self.next = 0
        """Sequence number of the next message to apply."""
        self.num_events = 0
        self.blocks: Contents = {}
        """Parent, tokens and extra keys of each block, by medium and hash."""

    def receive(self, *, milliseconds: int = 0, loses=lambda: False) -> None:
        """Apply messages until none arrives within `milliseconds`.

        Skip a message if it was applied before. `loses` is called once per message, and True means that the message is
        lost. If a message has a higher number than `next`, request and apply all messages that follow the last applied
        message.
        """
        while self._socket.poll(milliseconds):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if loses():
                continue
            if sequence == self.next:
                self._apply(sequence, payload)
            elif sequence > self.next:
                self.catch_up()

    def catch_up(self) -> None:
        """Request and apply all messages that follow the last applied message."""
        for number, payload in replayed(self.replay_endpoint, self.next):
            self._apply(number, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        import msgspec

        assert sequence >= self.next
        self.next = sequence + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self.num_events += 1
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        del self.blocks[event["medium"]][name]
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict) -> None:
        above, size = event["parent_block_hash"], event["block_size"]
        extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
        blocks = self.blocks.setdefault(event["medium"], {})
        for place, (name, keys) in enumerate(zip(event["block_hashes"], extra, strict=True)):
            assert name not in blocks, "the block was stored twice"
            blocks[name] = above, tuple(event["token_ids"][place * size : (place + 1) * size]), keys
            above = name

    def close(self) -> None:
        self._context.destroy(linger=0)


def contents_of(tree: RadixTree) -> Contents:
    """Return the readable blocks of a tree in the form of `Router.blocks`.

    The result can equal `Router.blocks` only if the block hashes in the events are full keys (`int_hashes=False`).
    """
    found: Contents = {}
    for node in tree.nodes():
        above = last_key(node.parent, tree.namespace) if node.parent.keys else None
        salt = node.domain[0].removeprefix(b"\0").decode()
        for number in range(node.num_blocks):
            key = node.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            label = bytes(node.labels[number * node.label_bytes : (number + 1) * node.label_bytes])
            block = above, tuple(np.frombuffer(label, "<i4").tolist()), [salt] if above is None and salt else None
            for tier, held in zip(tree.tiers, node.held, strict=True):
                if held is not None and held.states[number] > WRITING:
                    found.setdefault(MEDIA[tier.name], {})[key] = block
            above = key
    return found


def without_empty(contents: Contents) -> Contents:
    return {medium: blocks for medium, blocks in contents.items() if blocks}
