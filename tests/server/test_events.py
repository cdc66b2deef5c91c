"""A server publishes the events of its index, so that a router can rebuild the index."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

zmq = pytest.importorskip("zmq", reason="pip install 'kvtier[events]'")
msgspec = pytest.importorskip("msgspec", reason="pip install 'kvtier[events]'")

NUM_BLOCKS = 24


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


class Router:
    """Receives events over ZMQ and rebuilds the blocks of each tier from them."""

    def __init__(self, address: str, replay: str) -> None:
        self._context = zmq.Context()
        self._replay = replay
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.subscribe(b"")
        self.blocks: dict[str, set[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.next = 0

    def receive(self) -> None:
        """Apply all messages that have arrived. Request missed messages."""
        while self._socket.poll(500):
            _, number, payload = self._socket.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            self._apply(number, payload)

    def catch_up(self) -> None:
        """Request all messages from the next number on."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._replay)
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert dealer.poll(10_000), "no reply"
            _, _, number, payload = dealer.recv_multipart()
            if not payload:
                break
            self._apply(number, payload)
        dealer.close()

    def _apply(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") != self.next:
            assert int.from_bytes(number, "big") < self.next, "a message is missing"
            return
        self.next += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                case "BlockRemoved":
                    self.blocks[event["medium"]] -= set(event["block_hashes"])
                case "BlockStored":
                    tier = self.blocks.setdefault(event["medium"], set())
                    parent = event["parent_block_hash"]
                    assert parent is None or parent in self.tokens
                    size = event["block_size"]
                    for place, name in enumerate(event["block_hashes"]):
                        tier.add(name)
                        self.tokens[name] = event["token_ids"][place * size : (place + 1) * size]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def published(start):
    """Start a server with a small cache that publishes events. Yield the server and its two addresses."""
    addresses = free_address(), free_address()
    options = ("--blocks", str(NUM_BLOCKS), "--host-blocks", "64", "--events", addresses[0])
    return start(*options, "--events-replay", addresses[1]), addresses


def ask(server, text: str) -> None:
    body = {"model": server.model, "prompt": text, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200


def test_router_rebuilds_the_index_from_events(published):
    server, addresses = published
    first, late = Router(*addresses), Router(*addresses)
    for number in range(30):  # 30 prompts of 4 to 9 blocks: more than both tiers hold
        ask(server, f"{number:02}" * (32 + number % 5 * 8))
    first.receive()

    def agrees(state) -> bool:  # saves to the host may still be in flight
        first.catch_up()
        used = {"GPU": state["tiers"][0]["num_used"], "CPU": state["tiers"][1]["num_used"]}
        return used == {name: len(found) for name, found in first.blocks.items()}

    server.wait_for(agrees)
    late.catch_up()
    assert first.blocks == late.blocks
    assert len(first.tokens) > NUM_BLOCKS  # blocks were evicted
    assert server.post("/control/reset", {}).status_code == 200
    first.catch_up()
    assert not any(first.blocks.values())
    first.close()
    late.close()


def test_replay_address_without_events_is_refused(tiny_model):
    command = [sys.executable, "-m", "kvtier", "serve", "--model", str(tiny_model), "--port", "0"]
    done = subprocess.run([*command, "--events-replay", free_address()], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "--events-replay needs --events" in done.stderr


def test_events_address_in_use_is_reported(tiny_model):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "kvtier", "serve", "--model", str(tiny_model), "--port", "0"]
        done = subprocess.run([*command, "--events", address], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "choose free addresses" in done.stderr
