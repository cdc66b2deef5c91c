"""Cases that the state machine in test_tree_machine.py reaches rarely or never."""

from __future__ import annotations

import math

import pytest

from index_cases import BLOCK, NAMESPACE, begin, chain_of, copy_down, matched, path_of, remove, run, slots, tree_of
from kvtier.errors import ArgumentError, StateError
from kvtier.index import Chain, RadixTree, Retention, transitions
from kvtier.index.check import check_tree


def test_release_after_drop_keeps_parent_in_tree():
    """The drop removes only the leased node of block 2. The release must not merge it with the node of block 1."""
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


def test_begin_write_with_slots_from_other_tier_raises():
    tree = tree_of(8, 8)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    with pytest.raises(ArgumentError, match="device"):
        transitions.begin_write(lease, tree.tiers[1], 0, slots("device", 0, 1))
    check_tree(tree, [lease])


def test_failed_begin_write_changes_no_block():
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


def test_failed_graft_with_empty_table_reports_no_own_slots():
    tree = tree_of(8)
    run(tree, 1, 2)
    (node,) = tree.nodes()
    lease = tree.lease_at(chain_of(1, 2), node)
    given = tree.reserve(tree.tiers[0], 1)
    with pytest.raises(StateError, match="the lease owns 0 slots"):
        tree.graft(lease, tree.tiers[0], given)
    tree.tiers[0].give_back(given)
    tree.release(lease, used=False)
    check_tree(tree, [])


def test_extended_request_keeps_its_own_priority_and_ttl():
    """Another request, with a higher priority and without a TTL, uses the first block.

    Neither the higher priority nor the missing TTL may apply to the second block.
    """
    tree = tree_of(16)
    lease = begin(tree, 1, now=0, retention=Retention(ttl=10))
    tree.publish(lease, BLOCK, now=0)
    run(tree, 1, now=1, retention=Retention(priority=7))
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, 2 * BLOCK, now=2)
    tree.release(lease, now=3)
    assert [node.usage.priority for node in tree.nodes()] == [7, 0]
    assert matched(tree, 1, 2, now=12.9) == 2
    assert matched(tree, 1, 2, now=13) == 1
    assert tree.expire(math.inf) == 2  # at time infinity, blocks without a TTL expire too


def test_publish_of_later_block_renews_ttl_of_earlier_blocks():
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


def test_release_cuts_path_at_block_that_is_in_no_tier():
    tree = tree_of(8)
    lease = begin(tree, 1, 2, 3)
    tree.publish(lease, 3 * BLOCK)
    remove(tree, lease, tree.tiers[0], 1, 1)
    tree.release(lease)
    check_tree(tree, [])
    assert matched(tree, 1, 2, 3) == 1
    assert tree.tiers[0].pool.num_used == 1


@pytest.mark.parametrize("first", range(7))
def test_drop_removes_blocks_from_any_depth(first):
    tree = tree_of(32)
    for end in (1, 3, 5, 4):  # splits the path into nodes for blocks [0, 1), [1, 3), [3, 4) and [4, 5)
        run(tree, *range(end))
    run(tree, 0, 7)
    # blocks 0 to 4 of the chain are cached, and block 7 is another child of block 0
    assert tree.drop(chain_of(0, 1, 2, 3, 4, 9), first=first) == (max(0, 5 - first) + (first == 0))
    check_tree(tree, [])
    assert matched(tree, *range(6)) == min(first, 5)


def test_use_merges_only_nodes_with_equal_retention():
    """The nodes of blocks 1 and 2 have the same creation time, but only the node of block 1 has a TTL."""
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


def test_shared_lease_refers_to_tree_blocks_not_duplicates():
    tree = tree_of(16)
    first, second = begin(tree, 1, 2), begin(tree, 1, 2)
    tree.publish(first, 2 * BLOCK)
    tree.publish(second, 2 * BLOCK)  # the tree keeps the blocks of `first`
    shared = tree.share(second)
    tree.release(second)
    check_tree(tree, [first, shared])
    assert path_of(shared).slots.tolist() == first.table.tolist()
    assert not len(shared.table)
    tree.release(first)
    tree.release(shared)
    check_tree(tree, [])
    for call in (tree.share, lambda lease: tree.match_within(lease, 1, max_children=1)):
        with pytest.raises(StateError, match="already released"):
            call(second)


def test_lease_protects_blocks_until_release():
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
    with pytest.raises(StateError, match="already released"):
        tree.release(pin, used=False)


def test_tier_forgets_tenants_without_blocks():
    tree = tree_of(4)
    for i in range(20):
        run(tree, 1, 2, salt=bytes([i]))
    assert len(tree.tiers[0].used_by) <= 4
    tree.reset()
    assert tree.tiers[0].used_by == {}


def two_tiers_with_copies(*chains: tuple[int, ...]) -> RadixTree:
    """Return a tree with `exclusive=True`, so that a full host evicts duplicates of device blocks first.

    The host holds a copy of every device block.
    """
    tree = tree_of(8, 8, exclusive=True)
    for blocks in chains:
        lease = begin(tree, *blocks)
        tree.publish(lease, lease.chain.num_tokens)
        copy_down(tree, lease, 1)
        tree.release(lease)
    return tree


def test_split_lists_only_node_on_device_as_duplicate():
    tree = two_tiers_with_copies((1, 2, 3))
    tree.evict(tree.tiers[0], 1)  # block 3 is now only on the host
    assert matched(tree, 1, 2) == 2  # splits the node after block 2
    check_tree(tree)
    assert [node.stop for node in tree.tiers[1].everyone.duplicates] == [2]


def test_drop_of_child_does_not_list_next_victim_as_duplicate():
    """The host must keep its copy of a node that the device evicts next."""
    tree = two_tiers_with_copies((1, 2))
    device, host = tree.tiers
    device.look_ahead(8)  # only 6 slots are free, so the node with 2 blocks is chosen as the next victim
    assert host.everyone.duplicates == {}
    lease = begin(tree, 1, 2, 3)
    tree.publish(lease, lease.chain.num_tokens)
    tree.release(lease, used=False)
    check_tree(tree)
    tree.drop(chain_of(1, 2, 3), first=2)
    check_tree(tree)
    assert not host.everyone.duplicates


def test_match_within_skips_exact_child_outside_device():
    """The next block of `exact` is only on the host, so the next block of `near` is matched.

    This block is on the device and begins with the same two tokens.
    """
    tree = tree_of(8, 8)
    exact, near = (Chain(NAMESPACE, [1] * BLOCK + [2, 2, last, last]) for last in (2, 9))
    for chain in (exact, near):
        lease = tree.match(chain)
        tree.allocate(lease, lease.num_missing(chain.num_tokens))
        tree.publish(lease, chain.num_tokens)
        if chain is exact:
            copy_down(tree, lease, 1, 0, 2)
        tree.release(lease)
    assert tree.demote(tree.tiers[0], exact) == 1
    parent = tree.match(exact, max_blocks=1)
    hit = tree.match_within(parent, BLOCK - 1, max_children=9)
    assert hit is not None
    partial, num_tokens = hit
    assert (num_tokens, len(partial.table)) == (2, 2)
    check_tree(tree, [parent, partial])
