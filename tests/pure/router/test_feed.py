"""The event feed of a replica: lost, late, repeated and unknown events, and restarts of the replica."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index import BlockPool, Chain, IndexCleared, Namespace, RadixTree, Shortage, Tier, make_policy
from kvtier.index.events import BlocksStored
from kvtier.messages import KEY_BYTES
from kvtier.router import EventBatch, FeedState, PlacementIndex, ReplicaFeed

NAMESPACE = Namespace("model", block_tokens=2)


def as_map(event):
    """Return an event in vLLM's format, as the publisher sends it."""
    if isinstance(event, IndexCleared):
        return {"type": "AllBlocksCleared"}
    keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
    kind = "BlockStored" if isinstance(event, BlocksStored) else "BlockRemoved"
    hashes = [int.from_bytes(key[-8:], "big") for key in keys]
    return {"type": kind, "block_hashes": hashes, "medium": {"device": "GPU", "host": "CPU"}[event.tier]}


def served(num_requests, seed):
    """Serve random prompts from a small tree.

    Return the batches of events, and the hashes of the blocks that the tree holds at the end.
    """
    rng, batches, events = random.Random(seed), [], []
    pool = BlockPool("device", 40)
    tree = RadixTree(NAMESPACE, [Tier(0, pool, lambda: make_policy("lru"))], listener=events.append)
    for number in range(num_requests):
        if rng.random() < 0.01:
            tree.reset()
        tokens = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 12))]
        lease = tree.match(Chain(NAMESPACE, tokens))
        num_new = len(tokens) // 2 - lease.num_blocks
        if not isinstance(tree.allocate(lease, num_new), Shortage):
            tree.publish(lease, len(tokens))
        tree.release(lease)
        if events:
            batches.append(EventBatch(len(batches), float(number), [as_map(event) for event in events]))
            events.clear()
    held, todo = set(), list(tree.roots.values())
    while todo:
        node = todo.pop()
        todo += node.children.values()
        held |= {node.keys[at : at + KEY_BYTES] for at in range(0, len(node.keys), KEY_BYTES)}
    return batches, {int.from_bytes(key[-8:], "big") for key in held}


def blocks_of(index, replica=0):
    keys = index._keys.reshape(-1)
    keys = keys[keys != 0]
    return set(keys[index.holds(replica, 0, keys)].tolist())


@pytest.mark.parametrize("seed", range(5))
def test_feed_with_all_events_records_blocks_of_replica(seed):
    batches, held = served(300, seed)
    index = PlacementIndex(4, 3)
    feed = ReplicaFeed(index, 2)
    assert {feed.apply(batch) for batch in batches} == {FeedState.LIVE}
    assert blocks_of(index, 2) == held
    index.check()


@pytest.mark.parametrize("seed", range(10))
def test_feed_after_lost_batches_and_replay_records_blocks(seed):
    """Lose some batches and deliver others twice. At random times, replay from the first missing batch."""
    batches, held = served(400, seed)
    rng = random.Random(seed)
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    for batch in batches[rng.randrange(50) :]:
        if rng.random() < 0.2:
            continue
        state = feed.apply(batch)
        assert (state is FeedState.LIVE) == (feed.next_number == batch.number + 1)
        if state is not FeedState.LIVE and rng.random() < 0.1:
            for replayed in batches[feed.next_number : batch.number + 1]:
                feed.apply(replayed)
            assert feed.state is FeedState.LIVE
        if rng.random() < 0.1:
            feed.apply(batches[rng.randrange(feed.next_number)] if feed.next_number else batch)
    for replayed in batches[feed.next_number :]:
        feed.apply(replayed)
    assert feed.state is FeedState.LIVE
    assert blocks_of(index) == held


def test_feed_without_replay_forgets_blocks_of_replica():
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    stored = [{"type": "BlockStored", "block_hashes": [number], "medium": "GPU"} for number in range(1, 6)]
    feed.apply(EventBatch(0, 0.0, [stored[0]]))
    assert feed.apply(EventBatch(2, 2.0, [stored[2]])) is FeedState.GAP
    assert (feed.next_number, blocks_of(index)) == (1, {1, 3})
    assert feed.restart() is FeedState.LIVE
    assert (feed.next_number, blocks_of(index)) == (3, set())
    assert feed.apply(EventBatch(3, 3.0, [stored[3]])) is FeedState.LIVE
    assert blocks_of(index) == {4}


def test_feed_of_restarted_replica_starts_again():
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    for number in range(3):
        event = {"type": "BlockStored", "block_hashes": [10 + number], "medium": "GPU"}
        feed.apply(EventBatch(number, 100.0 + number, [event]))
    state = feed.apply(EventBatch(0, 200.0, [{"type": "BlockStored", "block_hashes": [7], "medium": None}]))
    assert (state, feed.next_number, blocks_of(index)) == (FeedState.LIVE, 1, {7})
    feed.apply(EventBatch(0, 200.0, [{"type": "AllBlocksCleared"}]))  # ignored: a batch with this number was applied
    assert blocks_of(index) == {7}


@given(
    st.lists(
        st.one_of(
            st.just({}),
            st.just({"type": "BlockStored"}),
            st.just({"type": "Other", "block_hashes": [1]}),
            st.just({"type": "BlockStored", "block_hashes": [None]}),
            st.just({"type": "BlockRemoved", "block_hashes": [b"short"]}),
            st.just({"type": "BlockStored", "block_hashes": 7}),
        )
    )
)
def test_feed_counts_malformed_events_and_skips_them(events):
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)
    good = {"type": "BlockStored", "block_hashes": [b"\0" * 31 + b"\5", -1], "medium": "DISK"}
    assert feed.apply(EventBatch(0, 0.0, [*events, good])) is FeedState.LIVE
    assert feed.num_malformed == len(events)
    assert index.holds(0, 2, np.array([5, 2**64 - 1], np.uint64)).all()


def test_replayed_batch_that_clears_index_closes_gap():
    index = PlacementIndex(4, 1)
    feed = ReplicaFeed(index, 0)

    def stored(*hashes):
        return {"type": "BlockStored", "block_hashes": hashes, "medium": "GPU"}

    assert feed.apply(EventBatch(1_000, 1.0, [stored(1)])) is FeedState.LATE  # the batches before 1,000 are unknown
    assert feed.apply(EventBatch(999, 2.0, [{"type": "AllBlocksCleared"}, stored(2)])) is FeedState.GAP
    assert feed.apply(EventBatch(1_000, 1.0, [stored(1)])) is FeedState.LIVE  # repeated by the replay
    assert blocks_of(index) == {1, 2}
    assert feed.apply(EventBatch(1_010, 3.0, [stored(3)])) is FeedState.GAP
    assert feed.next_number == 1_001
    assert feed.apply(EventBatch(1_005, 4.0, [{"type": "AllBlocksCleared"}, stored(4)])) is FeedState.GAP
    for number in range(1_006, 1_010):
        feed.apply(EventBatch(number, 4.0, []))
    assert (feed.state, feed.next_number) == (FeedState.GAP, 1_010)
    feed.apply(EventBatch(1_010, 3.0, [stored(3)]))
    assert (feed.state, blocks_of(index)) == (FeedState.LIVE, {3, 4})


def test_block_in_shared_store_is_found_by_all_replicas():
    index = PlacementIndex(4, 3)
    feeds = [ReplicaFeed(index, replica) for replica in range(3)]
    shared = {"type": "BlockStored", "block_hashes": [5, 6], "medium": "STORAGE", "locality": "REMOTE"}
    local = {"type": "BlockStored", "block_hashes": [7], "medium": "STORAGE", "locality": "LOCAL"}
    feeds[0].apply(EventBatch(0, 0.0, [shared, local]))
    feeds[1].apply(EventBatch(0, 0.0, [{"type": "AllBlocksCleared"}]))
    assert index.match(np.array([5, 6, 7], np.uint64)).tolist() == [[0] * 3, [0] * 3, [3, 2, 2], [0] * 3]
    feeds[2].apply(EventBatch(0, 0.0, [{**shared, "type": "BlockRemoved", "block_hashes": [5]}]))
    assert not index.match(np.array([5], np.uint64)).any()
    index.check()
