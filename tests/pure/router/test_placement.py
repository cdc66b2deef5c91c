"""Compare PlacementIndex with a dict of sets under random operations."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.errors import ArgumentError, RangeError
from kvtier.index import Chain, Namespace
from kvtier.router import PlacementIndex, hashes_of

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))

TIERS = 3
HASHES = st.lists(st.integers(0, 40), max_size=30)


def as_array(hashes):
    return np.array(hashes, np.uint64)


def leading(held, hashes, replica):
    """Find the longest prefix that a replica holds. Return the number of its blocks in each tier.

    A block in several tiers counts only for the fastest tier.
    The index stores hash 0 as 1, because 0 marks a free place.
    """
    counts = [0] * TIERS
    for each in hashes:
        tiers = [tier for tier in range(TIERS) if max(each, 1) in held[replica, tier]]
        if not tiers:
            break
        counts[tiers[0]] += 1
    return counts


class PlacementMachine(RuleBasedStateMachine):
    @initialize(num_replicas=st.sampled_from([1, 3, 64, 65, 130]))
    def begin(self, num_replicas):
        self.num_replicas = num_replicas
        self.index = PlacementIndex(TIERS, num_replicas)
        self.held = defaultdict(set)
        self.shared = defaultdict(set)
        self.found = []

    @rule(replica=st.integers(0, 129), tier=st.integers(0, TIERS - 1), hashes=HASHES, keep=st.booleans())
    def store(self, replica, tier, hashes, keep):
        replica %= self.num_replicas
        found = self.index.store(replica, tier, as_array(hashes))
        self.held[replica, tier] |= {max(each, 1) for each in hashes}
        if keep:
            self.found.append(found)

    @rule(tier=st.integers(0, TIERS - 1), hashes=HASHES)
    def share(self, tier, hashes):
        self.index.share(tier, as_array(hashes))
        self.shared[tier] |= {max(each, 1) for each in hashes}
        for replica in range(self.num_replicas):
            self.held[replica, tier] |= self.shared[tier]

    @rule(tier=st.integers(0, TIERS - 1), hashes=HASHES)
    def unshare(self, tier, hashes):
        """Remove blocks from the shared store. No replica then has these blocks in this tier."""
        self.index.unshare(tier, as_array(hashes))
        gone = {max(each, 1) for each in hashes}
        self.shared[tier] -= gone
        for replica in range(self.num_replicas):
            self.held[replica, tier] -= gone

    @rule(replica=st.integers(0, 129), tier=st.integers(0, TIERS - 1), hashes=HASHES)
    def remove(self, replica, tier, hashes):
        replica %= self.num_replicas
        self.index.remove(replica, tier, as_array(hashes))
        self.held[replica, tier] -= {max(each, 1) for each in hashes} - self.shared[tier]

    @rule(replica=st.integers(0, 129), tier=st.sampled_from([None, *range(TIERS)]))
    def clear(self, replica, tier):
        replica %= self.num_replicas
        self.index.clear(replica, tier)
        for each in range(TIERS) if tier is None else [tier]:
            self.held[replica, each] &= self.shared[each]

    @rule(size=st.integers(100, 1500), seed=st.integers(0, 99))
    def grow(self, size, seed):
        hashes = np.random.default_rng(seed).integers(1 << 41, 1 << 63, size, np.uint64)
        self.index.store(0, 0, hashes)
        self.held[0, 0] |= set(hashes.tolist())

    @rule(hashes=HASHES)
    def match(self, hashes):
        counts = self.index.match(as_array(hashes))
        assert counts.shape == (TIERS, self.num_replicas)
        for replica in range(self.num_replicas):
            assert counts[:, replica].tolist() == leading(self.held, hashes, replica)

    @rule(data=st.data(), replica=st.integers(0, 129), tier=st.integers(0, TIERS - 1))
    def store_earlier_result(self, data, replica, tier):
        """Store the blocks of an earlier result again. Its slots may be outdated after removals and rebuilds.

        The call must not change other blocks.
        """
        if self.found:
            replica %= self.num_replicas
            found = data.draw(st.sampled_from(self.found))
            self.index.store(replica, tier, found)
            self.held[replica, tier] |= set(found.hashes.tolist())

    @invariant()
    def check(self):
        self.index.check()
        for (replica, tier), held in self.held.items():
            some = sorted(held)[:20]
            assert self.index.holds(replica, tier, as_array(some)).all()
        assert self.index.num_blocks == len(set().union(*self.held.values()))


def test_placement_index_equals_sets_after_random_calls():
    run_state_machine_as_test(
        PlacementMachine, settings=settings(max_examples=40 * SOAK, stateful_step_count=30, deadline=None)
    )


@given(st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=64))
def test_hashes_of_keys_equal_hashes_in_events(tokens):
    chain = Chain(Namespace("model", block_tokens=4), tokens)
    keys = chain.keys()
    expected = [int.from_bytes(keys[at + 24 : at + 32], "big") for at in range(0, len(keys), 32)]
    assert hashes_of(keys).tolist() == expected


def test_second_removal_of_block_keeps_block_that_took_its_slot():
    index = PlacementIndex(1, 2)
    buckets = index._buckets(as_array(range(1000)))
    other = int(np.flatnonzero(buckets == buckets[5])[-1])
    found = index.store(0, 0, as_array([5]))
    index.remove(0, 0, as_array([5]))
    assert index.store(0, 0, as_array([other])).slots == found.slots
    index.remove(0, 0, found)
    assert index.holds(0, 0, as_array([other, 5])).tolist() == [True, False]
    index.check()


def test_store_with_an_outdated_lookup_adds_a_block_once():
    """`found` is outdated: block 5 was removed, another block took its slot, and block 5 was stored in another slot."""
    index = PlacementIndex(1, 1)
    buckets = index._buckets(as_array(range(1000)))
    other = int(np.flatnonzero(buckets == buckets[5])[-1])
    found = index.store(0, 0, as_array([5]))
    index.remove(0, 0, as_array([5]))
    index.store(0, 0, as_array([other]))
    index.store(0, 0, as_array([5]))
    index.store(0, 0, found)
    index.check()
    assert index.num_blocks == 2
    index.remove(0, 0, found)
    assert index.holds(0, 0, as_array([other, 5])).tolist() == [True, False]


def test_blocks_of_full_bucket_move_to_next_bucket():
    index = PlacementIndex(1, 1)
    many = np.arange(1, 100_000, dtype=np.uint64)
    # All 30 hashes belong to bucket 127, the last one. A bucket has 8 places, so 22 hashes move to the first buckets.
    hashes = many[index._buckets(many) == 127][:30]
    index.store(0, 0, hashes)
    index.check()
    index.remove(0, 0, hashes[:8])
    assert index.match(hashes[8:]).tolist() == [[22]]
    index.store(0, 0, hashes[:3])
    index.check()
    assert index.holds(0, 0, hashes).sum() == 25


def test_placement_takes_at_most_100_bytes_per_block():
    index = PlacementIndex(4, 64)
    rng = np.random.default_rng(0)
    for number in range(200):
        index.store(number % 64, 0, rng.integers(1, 1 << 63, 500, np.uint64))
        assert index.num_bytes / index.num_blocks <= 100


def test_placement_with_bad_arguments_raises():
    with pytest.raises(RangeError, match="at least one tier"):
        PlacementIndex(0, 1)
    index = PlacementIndex(2, 3)
    for replica, tier in ((3, 0), (-1, 0), (0, 2)):
        with pytest.raises(RangeError, match=r"replica must be 0\.\.2 and the tier 0\.\.1"):
            index.store(replica, tier, as_array([1]))
    with pytest.raises(ArgumentError, match="33 bytes"):
        hashes_of(b"x" * 33)
