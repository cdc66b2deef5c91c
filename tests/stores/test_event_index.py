"""A subscriber rebuilds the index of a tree from events alone, even if it joins late or loses messages."""

from __future__ import annotations

import contextlib
import os
import random
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from event_support import Router, contents_of, replayed, without_empty
from index_cases import begin, copy_down, run, tree_of
from kvtier.events import EventConfig, publish_events
from kvtier.index import Event, RadixTree
from kvtier.router import EventBatch, FeedState, PlacementIndex, ReplicaFeed
from kvtier.router.placement import as_hashes

pytest.importorskip("zmq", reason="pip install 'kvtier[events]'")
msgspec = pytest.importorskip("msgspec", reason="pip install 'kvtier[events]'")

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
CONFIG = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
SALTS = (b"", b"\0pepper", b"shop\0")


@contextlib.contextmanager
def published(*sizes: int, int_hashes: bool = False, **options):
    """Yield a tree whose events are published, a function that starts a router, and the list of published events."""
    with contextlib.ExitStack() as opened:
        config = EventConfig(**CONFIG, int_hashes=int_hashes, **options)
        publisher = opened.enter_context(contextlib.closing(publish_events(config)))

        def start() -> Router:
            return opened.enter_context(contextlib.closing(Router(publisher.endpoint, publisher.replay_endpoint)))

        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            publisher(event)

        yield tree_of(*sizes, listener=listen), start, events


def save(tree: RadixTree, blocks: list[int], salt: bytes) -> None:
    """Compute a prompt. Copy its blocks to the host if a single node holds all of them and none is on the host."""
    lease = begin(tree, *blocks, salt=salt)
    tree.publish(lease, lease.chain.num_tokens, now=0.0)
    held = lease.node.held[1]
    if held is None and lease.node.num_blocks == lease.num_blocks:
        copy_down(tree, lease, 1)
    tree.release(lease, now=0.0)


def agree(tree: RadixTree, router: Router) -> None:
    """Wait until the router has the same blocks as the tree. The publisher's thread may still be sending events."""
    expected, deadline = contents_of(tree), time.monotonic() + 60
    while without_empty(router.blocks) != expected:
        assert time.monotonic() < deadline, (router.blocks, expected)
        router.catch_up()


prompts = st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.sampled_from(SALTS))
steps = st.one_of(
    st.tuples(st.just("run"), prompts),
    st.tuples(st.just("save"), prompts),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("receive"), st.integers(0, 2**16)),
    st.tuples(st.just("join"), st.none()),
)


@given(st.lists(steps, max_size=40), st.integers(1, 6))
@settings(max_examples=40 * SOAK, deadline=None)
def test_routers_that_lose_messages_rebuild_the_index(todo, num_kept):
    with published(8, 16, num_kept=num_kept) as (tree, start, _):
        routers = [start()]
        for name, argument in todo:
            match name:
                case "run":
                    run(tree, *argument[0], salt=argument[1])
                case "save":
                    save(tree, *argument)
                case "reset":
                    tree.reset()
                case "receive":
                    chance = random.Random(argument)
                    for router in routers:
                        router.receive(loses=lambda chance=chance: chance.random() < 0.5)
                case "join":
                    routers.append(start())
        for router in (*routers, start()):
            agree(tree, router)


def test_replica_feed_follows_a_publisher_across_gaps():
    """After a gap, the reply to a replay request updates the feed.

    If the publisher no longer keeps the missing messages, the reply begins with a snapshot.
    """
    chance = random.Random(2)
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    with published(48, num_kept=10, int_hashes=True) as (tree, start, _):
        address = start().replay_endpoint
        seen: set[bytes] = set()
        for _ in range(8):
            for _ in range(chance.choice((1, 100))):
                run(tree, *[chance.randrange(1, 5) for _ in range(chance.randrange(1, 9))])
            held = contents_of(tree)["GPU"]
            seen |= held.keys()
            keys, deadline = list(seen), time.monotonic() + 60
            hashes = as_hashes([int.from_bytes(key[-8:], "big") for key in keys])
            while index.holds(0, 0, hashes).tolist() != [key in held for key in keys]:
                assert time.monotonic() < deadline, feed.state
                for number, payload in replayed(address, feed.next_number):
                    sent, events, _ = msgspec.msgpack.decode(payload)
                    feed.apply(EventBatch(number, sent, events))
                assert feed.state is FeedState.LIVE


def test_routers_rebuild_the_index_after_10000_events():
    """One router receives all messages, one loses about 33 % of the messages, and one joins at the end."""
    chance = random.Random(1)
    with published(48, 96, num_kept=200) as (tree, start, events):
        whole, lossy = start(), start()
        while len(events) < 10_000:
            blocks = [chance.randrange(1, 5) for _ in range(chance.randrange(1, 9))]
            salt = chance.choice(SALTS)
            if chance.random() < 0.5:
                run(tree, *blocks, salt=salt)
            else:
                save(tree, blocks, salt)
            whole.receive()
            lossy.receive(loses=lambda: chance.random() < 0.33)
        late = start()
        for router in (whole, lossy, late):
            agree(tree, router)
        assert late.num_events < 10_000, "the late router received all events instead of a snapshot"
        assert {medium for medium, blocks in late.blocks.items() if blocks} == {"GPU", "CPU"}
