"""Events of an engine that hashes blocks differently from kvtier. After conversion, its blocks match prompts."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index import Chain, Namespace
from kvtier.router import EventBatch, ForeignKeys, PlacementIndex, ReplicaFeed, hashes_of

NAMESPACE = Namespace("model", block_tokens=4)


def foreign_hashes(tokens, salt=""):
    """Return hashes that another engine might use: 32 bytes for each full block."""
    hashes, parent = [], salt.encode()
    for at in range(0, len(tokens) // 4 * 4, 4):
        parent = hashlib.sha256(parent + repr(tokens[at : at + 4]).encode()).digest()
        hashes.append(parent)
    return hashes


def stored(tokens, first=0, salt="", **fields):
    """Return vLLM's event for the blocks of a prompt, starting with block `first`."""
    hashes = foreign_hashes(tokens, salt)
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[4 * first : 4 * len(hashes)],
        "block_size": 4,
        "lora_id": None,
        "lora_name": None,
        "medium": "GPU",
        "extra_keys": [(salt,)] + [None] * (len(hashes) - 1) if salt and not first else None,
        **fields,
    }


def removed(tokens, first=0, **fields):
    return {"type": "BlockRemoved", "block_hashes": foreign_hashes(tokens)[first:], "medium": "GPU", **fields}


class Replica:
    def __init__(self):
        self.keys, self.index, self.number = ForeignKeys(NAMESPACE), PlacementIndex(4, 1), 0
        self.feed = ReplicaFeed(self.index, 0)

    def send(self, *events):
        self.feed.apply(self.keys.convert(EventBatch(self.number, float(self.number), events)))
        self.number += 1

    def matched(self, tokens, salt=b""):
        """Return how many leading blocks of a prompt are in each tier: device, host, store.

        A block in several tiers counts only for the fastest tier.
        """
        return self.index.match(hashes_of(Chain(NAMESPACE, tokens, salt=salt).keys()))[:3, 0].tolist()


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6), st.integers(0, 3))
def test_stored_blocks_match_prompts_with_same_tokens(prompts, cut):
    replica, known = Replica(), set()
    for tokens in prompts:
        num_blocks = len(tokens) // 4
        for first, stop in ((0, min(cut, num_blocks)), (min(cut, num_blocks), num_blocks)):
            if first < stop:
                replica.send(stored(tokens[: 4 * stop], first))
        known |= {tuple(tokens[: 4 * stop]) for stop in range(1, num_blocks + 1)}
    for tokens in prompts:
        assert replica.matched(tokens) == [len(tokens) // 4, 0, 0]
    assert replica.index.num_blocks == len(replica.keys) == len(known)


def test_block_stays_known_until_it_left_every_medium():
    replica, tokens = Replica(), list(range(12))
    replica.send(stored(tokens))
    replica.send(stored(tokens, medium="CPU", token_ids=[]))
    replica.send(removed(tokens, 1))
    assert replica.matched(tokens) == [1, 2, 0]
    replica.send(removed(tokens, medium="CPU"))
    assert replica.matched(tokens) == [1, 0, 0]
    replica.send(removed(tokens))
    assert len(replica.keys) == replica.index.num_blocks == 0


def test_salted_prompt_matches_only_with_its_salt():
    replica, tokens = Replica(), list(range(8))
    replica.send(stored(tokens, salt="mine"))
    assert replica.matched(tokens, b"\0mine") == [2, 0, 0]
    assert replica.matched(tokens) == replica.matched(tokens, b"\0other") == [0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"parent_block_hash": b"\1" * 32},
        {"block_size": 8},
        {"token_ids": [1, 2, 3]},
        {"extra_keys": [(("image", 3),), None]},
        {"block_hashes": [None, None]},
        {"group_idx": 1},
    ],
)
def test_block_that_cannot_be_converted_is_skipped(change):
    replica, tokens = Replica(), list(range(8))
    replica.send({**stored(tokens), **change})
    assert replica.matched(tokens) == [0, 0, 0]
    assert replica.keys.num_skipped > 0 or "group_idx" in change
    replica.send(stored(tokens))
    assert replica.matched(tokens) == [2, 0, 0]


def test_all_blocks_cleared_event_forgets_parent_hashes():
    replica, tokens = Replica(), list(range(8))
    replica.send(stored(tokens))
    replica.send({"type": "AllBlocksCleared"})
    replica.send(stored([*tokens, *tokens], 2))
    assert replica.matched(tokens) == [0, 0, 0]
    assert np.count_nonzero(replica.index._keys) == 0
