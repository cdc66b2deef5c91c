"""The index does not have the defects of FastDeploy's Cache Manager V1.

tests/ancestors.toml lists every defect.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle

import numpy as np
import pytest

import kvtier.index
from index_cases import (
    BLOCK,
    NAMESPACE,
    begin,
    chain_of,
    copy_down,
    matched,
    path_of,
    remove,
    run,
    slots,
    tokens_of,
    tree_of,
)
from kvtier.errors import ArgumentError, KvtierError, RangeError, StateError
from kvtier.index import BlockPool, Chain, MediaItem, MissReason, Namespace, Shortage, Slots, transitions
from kvtier.index.check import check_tree
from kvtier.index.node import BlockState


def run_and_copy_to_host(tree, *blocks):
    """Run a request and copy all its blocks to host memory."""
    run(tree, *blocks)
    lease = tree.match(chain_of(*blocks))
    copy_down(tree, lease, 1)
    tree.release(lease)


def num_candidates(tree, number: int) -> int:
    tier = tree.tiers[number]
    return sum(node in tier.everyone for node in tree.nodes())


# ---- defects that FastDeploy fixed ----


def test_block_copied_back_to_device_is_evictable():
    tree = tree_of(4, 4)
    run_and_copy_to_host(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2))
    new_slots = tree.reserve(tree.tiers[0], 2)
    transitions.begin_write(lease, tree.tiers[0], 0, new_slots)
    transitions.end_write(tree, lease, tree.tiers[0], 0, 2, ok=True)
    assert (tree.tiers[0].num_evictable, num_candidates(tree, 0)) == (0, 0)
    tree.release(lease)
    assert (tree.tiers[0].num_evictable, num_candidates(tree, 0)) == (2, 1)
    assert tree.evict(tree.tiers[0], 2) is None
    check_tree(tree, [])


def test_different_image_changes_keys_from_its_first_block_on():
    chains = [chain_of(1, 2, 3, media=[MediaItem(BLOCK + 1, 2, digest)]) for digest in (b"cat", b"dog")]
    cat, dog = (chain.keys() for chain in chains)
    assert cat[:32] == dog[:32]
    assert cat[32:64] != dog[32:64]
    assert cat[64:] != dog[64:]
    tree = tree_of(8)
    run(tree, 1, 2, 3, media=[MediaItem(BLOCK + 1, 2, b"cat")])
    assert matched(tree, 1, 2, 3, media=[MediaItem(BLOCK + 1, 2, b"dog")]) == 1
    assert matched(tree, 1, 2, 3) == 1


@pytest.mark.parametrize(
    ("start", "num_tokens", "blocks"), [(0, BLOCK, {0}), (BLOCK, BLOCK, {1}), (BLOCK - 1, 2, {0, 1})]
)
def test_media_item_range_is_half_open(start, num_tokens, blocks):
    assert set(chain_of(1, 2, 3, media=[MediaItem(start, num_tokens, b"x")]).extras) == blocks


def test_match_does_not_change_its_arguments():
    tree = tree_of(4)
    namespace, policy = copy.copy(tree.namespace), tree.tiers[0].policy_name
    tokens = tokens_of([1, 2])
    before = list(tokens)
    lease = tree.match(Chain(tree.namespace, tokens))
    tree.release(lease)
    assert (tree.namespace, tree.tiers[0].policy_name, tokens) == (namespace, policy, before)
    with pytest.raises(AttributeError):
        tree.namespace.model = "other"


def test_pickled_index_values_do_not_contain_tree():
    """Keys, slots, shortages and misses are sent to other processes. Leases are not."""
    tree = tree_of(2000)
    run(tree, *range(1000))
    lease = tree.match(chain_of(*range(1000)))
    path = path_of(lease)
    for each in (lease.chain.keys(), path, Slots("device", lease.table), tree.explain(lease), Shortage("device", 1, 0)):
        assert len(pickle.dumps(each)) < 40_000
    assert pickle.loads(pickle.dumps(tree.explain(lease))) == tree.explain(lease)


def test_free_slots_returns_all_unused_slots():
    pool = BlockPool("device", 8)
    taken = set(pool.allocate(3).ids.tolist())
    assert isinstance(pool.free_slots(), np.ndarray)
    assert set(pool.free_slots().tolist()) == set(range(8)) - taken


def test_reset_frees_all_slots_without_lease():
    tree = tree_of(8, 8)
    run_and_copy_to_host(tree, 1, 2)
    old = begin(tree, 1, 2, 3)
    tree.reset()
    assert [tier.pool.num_used for tier in tree.tiers] == [3, 2]
    assert matched(tree, 1, 2) == 0
    run(tree, 1, 2)
    assert tree.publish(old, 3 * BLOCK) == 0
    tree.release(old)
    check_tree(tree, [])
    assert [tier.pool.num_used for tier in tree.tiers] == [2, 0]
    assert matched(tree, 1, 2) == 2
    tree.reset()
    assert [tier.pool.num_free for tier in tree.tiers] == [8, 8]


def test_each_match_holds_one_reference():
    tree = tree_of(8)
    run(tree, 1, 2)
    leases = [tree.match(chain_of(1, 2)) for _ in range(3)]
    (node,) = tree.nodes()
    assert node.leases == 3
    for number, lease in enumerate(leases):
        assert node.leases == 3 - number
        tree.release(lease, used=bool(number))
    assert node.leases == 0
    assert tree.tiers[0].num_evictable == 2


def test_second_release_of_slots_raises():
    tree = tree_of(4)
    lease = begin(tree, 1)
    new_slots = Slots("device", lease.table)
    tree.release(lease)
    with pytest.raises(StateError, match="already free"):
        tree.tiers[0].give_back(new_slots)


def test_allocated_slots_are_distinct():
    pool, taken = BlockPool("device", 64), set()
    for n in (1, 2, 3, 5, 8, 13, 21):
        ids = pool.allocate(n).ids.tolist()
        assert len(set(ids)) == n
        assert not taken & set(ids)
        taken |= set(ids)
        pool.release(slots("device", *ids[::2]))
        taken -= set(ids[::2])


def test_match_with_caching_disabled_returns_lease():
    tree = tree_of(4, enabled=False)
    run(tree, 1, 2)
    assert tree.tiers[0].pool.num_used == 0
    lease = begin(tree, 1, 2)
    assert (lease.num_matched, len(lease.table), lease.stopped) == (0, 2, MissReason.DISABLED)
    assert tree.publish(lease, 2 * BLOCK) == 0
    tree.release(lease)
    check_tree(tree, [])


def test_failed_match_creates_no_lease():
    tree = tree_of(4)
    with pytest.raises(ArgumentError):
        tree.match(Chain(Namespace("another", block_tokens=BLOCK), tokens_of([1])))
    assert tree.num_leases == 0
    check_tree(tree, [])


def test_block_state_is_enum_and_tier_numbers_are_checked():
    assert {type(state).__name__ for state in BlockState} == {"BlockState"}
    with pytest.raises(ArgumentError, match="numbered"):
        type(tree_of(4))(NAMESPACE, [tree_of(4, 4).tiers[1]])


def test_index_logs_nothing(caplog):
    caplog.set_level(logging.DEBUG)
    tree = tree_of(2)
    for number in range(20):
        run(tree, number)
    assert caplog.records == []


@pytest.mark.parametrize("n", range(10))
def test_allocate_keeps_all_other_slots_free(n):
    pool = BlockPool("device", 8)
    found = pool.allocate(n)
    assert pool.num_free == (8 - n if n <= 8 else 8)
    assert isinstance(found, Slots if n <= 8 else Shortage)
    if n == 0:
        assert found.ids.tolist() == []
        assert pool.free_slots().tolist() == list(range(8))


# ---- defects that FastDeploy still has ----


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "cost"])
def test_path_is_evicted_from_its_end(policy):
    tree = tree_of(6, policy=policy)
    run(tree, 1, 2, 3, 4)
    run(tree, 1, 2, 8, 9)
    for num_left in range(5, -1, -1):
        tree.evict(tree.tiers[0], 1)
        check_tree(tree, [])
        found = matched(tree, 1, 2, 3, 4) + max(0, matched(tree, 1, 2, 8, 9) - 2)
        assert found == num_left == tree.tiers[0].pool.num_used, "every held block must be matched"


def test_path_over_several_tiers_is_in_block_order():
    """The first and third blocks are only on the host. The second and fourth blocks are on the device and the host."""
    tree = tree_of(8, 8)
    lease = begin(tree, 1, 2, 3, 4)
    tree.publish(lease, 4 * BLOCK)
    on_device = lease.table.tolist()
    on_host = copy_down(tree, lease, 1)
    for block in (0, 2):
        remove(tree, lease, tree.tiers[0], block, 1)
    second = tree.match(chain_of(1, 2, 3, 4))
    assert second.num_matched == 4
    assert second.table.tolist() == [-1, on_device[1], -1, on_device[3]]
    path = path_of(second)
    assert path.tiers.tolist() == [1, 0, 1, 0]
    assert path.slots.tolist() == [on_host[0], on_device[1], on_host[2], on_device[3]]
    tree.release(second)
    tree.release(lease)
    check_tree(tree, [])


def test_release_of_unused_host_match_drops_reference():
    tree = tree_of(4, 4)
    run_and_copy_to_host(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    for _ in range(5):
        lease = tree.match(chain_of(1, 2))
        assert lease.num_matched == 2
        tree.release(lease, used=False)
    assert sum(node.leases for node in tree.nodes()) == 0
    assert tree.tiers[1].num_evictable == 2
    assert tree.evict(tree.tiers[1], 2) is None


def test_unused_match_does_not_count_as_use():
    tree = tree_of(4)
    run(tree, 1)
    run(tree, 2)
    for _ in range(9):
        tree.release(tree.match(chain_of(1)), used=False)
    assert [node.usage.uses for node in tree.nodes()] == [0, 0]
    tree.evict(tree.tiers[0], 1)
    assert (matched(tree, 1), matched(tree, 2)) == (0, 1)


def test_repeated_commit_counts_as_one_use():
    tree = tree_of(4)
    run(tree, 1)
    lease = tree.match(chain_of(1))
    for _ in range(3):
        tree.commit(lease)
    tree.release(lease)
    assert [node.usage.uses for node in tree.nodes()] == [1]


def test_slots_are_not_reused_while_they_are_read():
    tree = tree_of(2, 2)
    run_and_copy_to_host(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2))
    transitions.begin_read(lease, tree.tiers[1], 0, 2)
    on_host = transitions.block_slots(lease, tree.tiers[1], 0, 2)
    assert tree.invalidate(tree.tiers[1], on_host) == 0
    assert isinstance(tree.reserve(tree.tiers[1], 1), Shortage)
    transitions.end_read(lease, tree.tiers[1], 0, 2)
    assert isinstance(tree.reserve(tree.tiers[1], 1), Shortage)
    assert tree.invalidate(tree.tiers[1], on_host) == 2
    assert isinstance(tree.reserve(tree.tiers[1], 2), Slots)


def test_block_is_matched_only_after_all_its_tokens_are_computed():
    """The first chunk ends inside the second block. After this chunk, another request matches only the first block."""
    tree = tree_of(8)
    lease = begin(tree, 1, 2)
    assert matched(tree, 1, 2) == 0
    tree.publish(lease, 2 * BLOCK - 1)
    assert matched(tree, 1, 2) == 1
    tree.publish(lease, 2 * BLOCK)
    assert matched(tree, 1, 2) == 2
    tree.release(lease)


def test_unpublished_blocks_of_released_lease_are_freed():
    tree = tree_of(8)
    lease = begin(tree, 1, 2)
    tree.release(lease)
    assert matched(tree, 1, 2) == 0
    assert tree.tiers[0].pool.num_used == 0
    lease = begin(tree, 1, 2)
    tree.publish(lease, BLOCK)
    tree.release(lease)
    assert (matched(tree, 1, 2), tree.tiers[0].pool.num_used) == (1, 1)


def test_block_with_uncomputed_last_token_is_not_published():
    tree = tree_of(8)
    lease = begin(tree, 1)
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, lease.chain.num_tokens - 1)
    tree.release(lease)
    assert matched(tree, 1, 2) == 1
    with pytest.raises(RangeError, match="9 tokens computed, but the chain has 8"):
        tree.publish(begin(tree, 1, 2), 2 * BLOCK + 1)


def test_copy_is_readable_only_after_successful_write():
    tree = tree_of(4, 4)
    run(tree, 1)
    lease = tree.match(chain_of(1))
    host = tree.tiers[1]
    for ok in (False, True):
        transitions.begin_write(lease, host, 0, tree.reserve(host, 1))
        with pytest.raises(StateError, match="cannot be read"):
            transitions.begin_read(lease, host, 0, 1)
        transitions.end_write(tree, lease, host, 0, 1, ok=ok)
        assert host.pool.num_used == int(ok)
    transitions.begin_read(lease, host, 0, 1)
    transitions.end_read(lease, host, 0, 1)
    tree.release(lease)
    check_tree(tree, [])


def test_equal_slot_numbers_in_two_tiers_do_not_collide():
    """A block in host slot 0 is recomputed into device slot 0. Evictions must free both slots."""
    tree = tree_of(1, 1)
    run_and_copy_to_host(tree, 1)
    tree.evict(tree.tiers[0], 1)
    lease = tree.match(chain_of(1), max_blocks=0)
    tree.allocate(lease, 1)
    assert tree.publish(lease, BLOCK) == 1
    tree.release(lease)
    check_tree(tree, [])
    (node,) = tree.nodes()
    assert [held.slots.tolist() for held in node.held] == [[0], [0]]
    with pytest.raises(ArgumentError, match="slots of host"):
        tree.tiers[0].pool.release(slots("host", 0))
    assert [tree.evict(tier, 1) for tier in tree.tiers] == [None, None]
    assert [tier.pool.num_used for tier in tree.tiers] == [0, 0]


def test_recomputed_host_block_is_matched_on_device():
    tree = tree_of(4, 4)
    run_and_copy_to_host(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2), max_blocks=0)
    tree.allocate(lease, 2)
    assert tree.publish(lease, 2 * BLOCK) == 2
    second = tree.match(chain_of(1, 2))
    assert path_of(second).tiers.tolist() == [0, 0]
    assert second.table.tolist() == lease.table.tolist()


def test_shortage_is_not_a_sequence():
    tree = tree_of(2)
    lease = begin(tree, 1, 2)
    found = tree.allocate(lease, 1)
    assert isinstance(found, Shortage)
    assert not hasattr(found, "__iter__")
    assert not hasattr(found, "ids")
    assert len(lease.table) == 2
    assert str(found) == "1 slots of device wanted, 0 free and 0 evictable"


def test_copy_range_outside_path_raises():
    tree = tree_of(4, 4)
    run(tree, 1, 2)
    lease = tree.match(chain_of(1, 2))
    three = tree.reserve(tree.tiers[1], 3)
    with pytest.raises(RangeError, match=r"blocks \[0, 3\) are not in a path of 2"):
        transitions.begin_write(lease, tree.tiers[1], 0, three)
    with pytest.raises(RangeError, match=r"blocks \[1, 3\) are not in a path of 2"):
        transitions.begin_read(lease, tree.tiers[0], 1, 2)
    tree.tiers[1].give_back(three)
    check_tree(tree, [lease])


def test_pool_shrink_below_used_slot_raises():
    pool = BlockPool("device", 8)
    pool.allocate(8)
    pool.release(slots("device", *range(7)))
    with pytest.raises(StateError, match="slot 7 is in use"):
        pool.resize(4)
    pool.release(slots("device", 7))
    pool.resize(4)
    assert pool.free_slots().tolist() == [0, 1, 2, 3]


def test_second_release_of_lease_raises():
    tree = tree_of(4)
    first = begin(tree, 1)
    tree.publish(first, BLOCK)
    second = tree.match(chain_of(1))
    tree.release(first)
    with pytest.raises(StateError, match="already released"):
        tree.release(first)
    check_tree(tree, [second])
    assert isinstance(tree.evict(tree.tiers[0], 1), Shortage), "the second lease must hold the block"
    tree.release(second)


def test_namespace_salt_and_adapter_change_keys():
    chains = [Chain(Namespace("m", *fields), range(16)) for fields in ([], ["r"], ["", "d"], ["", "", "l"])]
    chains += [Chain(Namespace("m"), range(16), salt=b"s"), Chain(Namespace("m"), range(16), adapter=b"s")]
    assert len({chain.keys() for chain in chains}) == len(chains)


def test_block_being_loaded_is_read_from_host():
    tree = tree_of(4, 4)
    run_and_copy_to_host(tree, 1, 2)
    tree.evict(tree.tiers[0], 1)
    lease = tree.match(chain_of(1, 2))
    transitions.begin_write(lease, tree.tiers[0], 1, tree.reserve(tree.tiers[0], 1))
    other = tree.match(chain_of(1, 2))
    assert path_of(other).tiers.tolist() == [0, 1], "the device copy was readable before its write ended"
    transitions.end_write(tree, lease, tree.tiers[0], 1, 1, ok=True)
    assert path_of(other).tiers.tolist() == [0, 0]
    tree.release(lease)
    tree.release(other, used=False)
    assert tree.tiers[0].num_evictable == tree.tiers[1].num_evictable == 2


# ---- hashing and costs ----


def test_equal_contents_in_different_objects_have_equal_keys():
    """A digest of pickled objects would also depend on object identity and on the integer type."""
    digest = bytes(bytearray(b"picture"))
    twice = [MediaItem(0, 1, digest), MediaItem(2, 1, digest)]
    apart = [MediaItem(0, 1, bytes(bytearray(b"picture"))), MediaItem(2, 1, bytes(bytearray(b"picture")))]
    keys = chain_of(1, media=twice).keys()
    assert keys == chain_of(1, media=apart).keys()
    assert keys == Chain(NAMESPACE, [np.int64(1)] * BLOCK, media=twice).keys()


def test_index_does_not_read_a_clock():
    """Callers pass the time as `now`."""
    for name, module in vars(kvtier.index).items():
        if inspect.ismodule(module) and module.__name__.startswith("kvtier.index"):
            assert "import time" not in inspect.getsource(module), name


def test_host_copy_remains_after_second_device_eviction():
    tree = tree_of(2, 2)
    run_and_copy_to_host(tree, 1)
    free_on_host = tree.tiers[1].pool.free_slots().tolist()
    for _ in range(2):
        tree.evict(tree.tiers[0], tree.tiers[0].num_evictable)
        lease = tree.match(chain_of(1))
        transitions.begin_read(lease, tree.tiers[1], 0, 1)
        transitions.begin_write(lease, tree.tiers[0], 0, tree.reserve(tree.tiers[0], 1))
        transitions.end_read(lease, tree.tiers[1], 0, 1)
        transitions.end_write(tree, lease, tree.tiers[0], 0, 1, ok=True)
        tree.release(lease)
        assert tree.tiers[1].pool.free_slots().tolist() == free_on_host


def test_preempted_request_matches_its_published_blocks():
    tree = tree_of(8)
    lease = begin(tree, 1, 2, 3)
    tree.publish(lease, 2 * BLOCK + 1)
    tree.release(lease)
    assert tree.match(lease.chain).num_matched == 2


def test_blocks_computed_by_two_requests_are_stored_once():
    tree = tree_of(8)
    first, second = begin(tree, 1, 2), begin(tree, 1, 2)
    assert tree.publish(first, 2 * BLOCK) == 2
    assert tree.publish(second, 2 * BLOCK) == 0
    assert sum(map(len, second.duplicate_slots)) == 2
    assert not set(first.table.tolist()) & set(second.table.tolist())
    tree.release(second)
    tree.release(first)
    assert tree.tiers[0].pool.num_used == 2


def test_eviction_of_too_many_blocks_evicts_none():
    tree = tree_of(4)
    run(tree, 1, 2)
    before = [node.num_blocks for node in tree.nodes()]
    found = tree.evict(tree.tiers[0], 3)
    assert (found.wanted, found.evictable, [node.num_blocks for node in tree.nodes()]) == (3, 2, before)
    lease = tree.match(chain_of(5))
    with pytest.raises(KvtierError):
        tree.allocate(lease, -1)
    assert sum(node.num_blocks for node in tree.nodes()) == 2
