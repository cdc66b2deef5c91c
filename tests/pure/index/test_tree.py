"""Situations that the state machine of the tree reaches rarely or never."""

from __future__ import annotations

import math

import pytest

from index_cases import BLOCK, begin, chain_of, copy_down, matched, path_of, remove, run, slots, tree_of
from kvtier.errors import ArgumentError, StateError
from kvtier.index import Retention, transitions
from kvtier.index.check import check_tree


def test_release_after_drop_keeps_parent_in_tree():
    """The node of the lease has left the tree and its parent has not: they must not be merged again."""
    tree = tree_of(16)
    run(tree, 1, 2)
    lease = tree.match(chain_of(1, 2))
    assert tree.drop(chain_of(1, 2), first=1) == 1
    run(tree, 1, 9)
    check_tree(tree, [lease])
    tree.release(lease)
    check_tree(tree, [])
    assert (matched(tree, 1, 9), matched(tree, 1, 2)) == (2, 1)
    assert tree.tiers[0].pool.num_used == 2


def test_begin_write_with_slots_of_other_tier_raises():
    tree = tree_of(8, 8)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    with pytest.raises(ArgumentError, match="device"):
        transitions.begin_write(lease, tree.tiers[1], 0, slots("device", 0, 1))
    check_tree(tree, [lease])


def test_refused_begin_write_changes_no_block():
    tree = tree_of(8, 8)
    run(tree, 1)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    (first,) = copy_down(tree, lease, 1, 0, 1)
    given = tree.reserve(tree.tiers[1], 2)
    for _ in range(2):
        with pytest.raises(StateError, match="already"):
            transitions.begin_write(lease, tree.tiers[1], 0, given)
    tree.tiers[1].give_back(given)
    assert path_of(lease).slots.tolist() == lease.table.tolist()
    assert tree.tiers[1].pool.num_used == 1
    tree.release(lease)
    check_tree(tree, [])
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2))
    assert (lease.num_matched, path_of(lease).slots.tolist()) == (1, [first])


def test_extended_request_keeps_own_priority_and_ttl():
    """A request without a TTL used the blocks in between; its retention must not apply to later blocks."""
    tree = tree_of(16)
    lease = begin(tree, 1, now=0, retention=Retention(ttl=10))
    tree.publish(lease, BLOCK, now=0)
    run(tree, 1, now=1, retention=Retention(priority=7))
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, 2 * BLOCK, now=2)
    tree.release(lease, now=3)
    assert matched(tree, 1, 2, now=12.9) == 2
    assert matched(tree, 1, 2, now=13) == 1
    assert tree.expire(math.inf) == 2  # an infinite TTL expires at infinity


def test_long_request_does_not_expire_while_extended():
    tree = tree_of(16)
    lease = begin(tree, 1, now=0, retention=Retention(ttl=10))
    tree.publish(lease, BLOCK, now=0)
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, 2 * BLOCK, now=100)
    tree.release(lease, used=False)
    assert matched(tree, 1, 2, now=101) == 2
    assert matched(tree, 1, 2, now=110) == 0


def test_block_readers_are_limited_to_253():
    tree = tree_of(8, 8)
    lease = begin(tree, 1)
    tree.publish(lease, BLOCK)
    for _ in range(253):
        transitions.begin_read(lease, tree.tiers[0], 0, 1)
    with pytest.raises(StateError, match="253 readers"):
        transitions.begin_read(lease, tree.tiers[0], 0, 1)
    for _ in range(253):
        transitions.end_read(lease, tree.tiers[0], 0, 1)
    with pytest.raises(StateError, match="no reader"):
        transitions.end_read(lease, tree.tiers[0], 0, 1)


def test_block_removed_from_only_tier_leaves_with_last_lease():
    tree = tree_of(8)
    lease = begin(tree, 1, 2, 3)
    tree.publish(lease, 3 * BLOCK)
    remove(tree, lease, tree.tiers[0], 1, 1)
    tree.release(lease)
    check_tree(tree, [])
    assert matched(tree, 1, 2, 3) == 1
    assert tree.tiers[0].pool.num_used == 1


@pytest.mark.parametrize("first", range(7))
def test_drop_from_any_depth(first):
    tree = tree_of(32)
    for end in (1, 3, 5, 4):  # edges [0, 1), [1, 3), [3, 4), [4, 5)
        run(tree, *range(end))
    run(tree, 0, 7)
    assert tree.drop(chain_of(0, 1, 2, 3, 4, 9), first=first) == (max(0, 5 - first) + (first == 0))
    check_tree(tree, [])
    assert matched(tree, *range(6)) == min(first, 5)


def test_use_merges_only_nodes_of_equal_retention():
    """Two nodes of equal age, the lower one with an infinite TTL from a request that was aborted."""
    tree = tree_of(16)
    first = begin(tree, 1, retention=Retention(ttl=10))
    tree.publish(first, BLOCK)
    second = begin(tree, 1, 2)
    tree.publish(second, 2 * BLOCK)
    tree.release(second, used=False)
    tree.release(first)
    run(tree, 1, 2, retention=Retention(ttl=1))
    assert matched(tree, 1, 2, now=9) == 2
    assert matched(tree, 1, 2, now=10) == 0


def test_shared_lease_holds_tree_slots_not_duplicates():
    tree = tree_of(16)
    first, second = begin(tree, 1, 2), begin(tree, 1, 2)
    tree.publish(first, 2 * BLOCK)
    tree.publish(second, 2 * BLOCK)  # duplicates
    shared = tree.share(second)
    tree.release(second)
    check_tree(tree, [first, shared])
    assert path_of(shared).slots.tolist() == first.table.tolist()
    assert not len(shared.table)
    tree.release(first)
    tree.release(shared)
    check_tree(tree, [])
    for call in (tree.share, lambda lease: tree.match_within(lease, 1, max_children=1)):
        with pytest.raises(StateError, match="released already"):
            call(second)


def test_lease_pins_blocks_until_release():
    tree = tree_of(4)
    run(tree, 1, 2)
    pin = tree.match(chain_of(1, 2))
    run(tree, 3, 4)
    run(tree, 5, 6)
    assert matched(tree, 1, 2) == 2
    check_tree(tree, [pin])
    tree.release(pin, used=False)
    run(tree, 7, 8, 9)
    assert matched(tree, 1, 2) < 2
    with pytest.raises(StateError, match="released already"):
        tree.release(pin, used=False)


def test_idle_tenants_are_forgotten():
    tree = tree_of(4)
    for i in range(20):
        run(tree, 1, 2, salt=bytes([i]))
    assert len(tree.tiers[0].used_by) <= 4
    tree.reset()
    assert tree.tiers[0].used_by == {}
