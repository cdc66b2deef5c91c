"""A server publishes the events of its index, so that a router can rebuild the index."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from event_support import MEDIA, Router, free_address

zmq = pytest.importorskip("zmq", reason="pip install 'kvtier[events]'")
msgspec = pytest.importorskip("msgspec", reason="pip install 'kvtier[events]'")

NUM_BLOCKS = 24
NUM_EVENTS = 10_000 if "KVTIER_SOAK" in os.environ else 1_000


@pytest.fixture
def published(start, tmp_path):
    """Start a server with a small cache. Return the server and its addresses for events and for replays."""
    addresses = free_address(), free_address()
    tiers = ("--blocks", str(NUM_BLOCKS), "--host-blocks", "64", "--disk", str(tmp_path / "kv"))
    options = (*tiers, "--events", addresses[0])
    return start(*options, "--events-replay", addresses[1]), addresses


def ask(server, text: str, **options) -> None:
    body = {"model": server.model, "prompt": text, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **options}
    assert server.post("/v1/completions", body).status_code == 200


def blocks_of(state) -> dict[str, int]:
    return {medium: tier["num_used"] for medium, tier in zip(MEDIA.values(), state["tiers"], strict=True)}


def agree_on_device(server, router: Router) -> None:
    """Wait until a router has as many device blocks as the server."""

    def is_equal(state) -> bool:
        router.catch_up()
        return state["tiers"][0]["num_used"] == len(router.blocks.get("GPU", ()))

    server.wait_for(is_equal)


def agree(server, router: Router) -> None:
    """Wait until a router has as many blocks of each medium as the server.

    If saves are in flight when this function is called, the wait lasts until the saves have finished.
    """

    def is_equal(state) -> bool:
        router.catch_up()
        return blocks_of(state) == {medium: len(blocks) for medium, blocks in router.blocks.items()}

    server.wait_for(is_equal)


def test_routers_rebuild_the_index_from_events(published):
    server, addresses = published
    with (
        closing(Router(*addresses)) as first,
        closing(Router(*addresses)) as lossy,
        closing(Router(*addresses)) as late,
    ):
        chance, number = random.Random(0), 0
        # Each prompt has 4 to 8 blocks. All prompts together exceed the device and the host tier.
        while first.num_events < NUM_EVENTS:
            ask(server, f"{number:04}" * (16 + number % 5 * 4), cache_salt=f"salt {number % 2}")
            first.receive()
            lossy.receive(loses=lambda: chance.random() < 0.3)
            number += 1
        for router in (first, lossy, late):
            agree(server, router)
        assert first.blocks == lossy.blocks == late.blocks
        salts = {tuple(extra) for _, _, extra in late.blocks["GPU"].values() if extra is not None}
        assert salts == {("salt 0",), ("salt 1",)}
        assert server.post("/control/reset", {}).status_code == 200
        first.catch_up()
        assert not any(first.blocks.values())


def test_router_detects_restart_of_a_server(start):
    addresses = free_address(), free_address()
    options = ("--events", addresses[0], "--events-replay", addresses[1])
    server = start(*options)
    with closing(Router(*addresses)) as router:
        ask(server, "a prompt of several blocks " * 4)
        agree_on_device(server, router)
        assert router.blocks["GPU"]
        server.stop()
        server = start(*options)
        router.catch_up()
        assert not any(router.blocks.values())  # the new process has an empty cache
        ask(server, "another prompt of several blocks " * 4)
        agree_on_device(server, router)


def test_replay_address_without_events_address_fails(tiny_model):
    command = [sys.executable, "-m", "kvtier", "serve", "--model", str(tiny_model), "--port", "0"]
    done = subprocess.run([*command, "--events-replay", free_address()], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "--events-replay needs --events" in done.stderr


def test_events_address_in_use_fails_with_a_message(tiny_model):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "kvtier", "serve", "--model", str(tiny_model), "--port", "0"]
        done = subprocess.run([*command, "--events", address], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "choose free addresses" in done.stderr
