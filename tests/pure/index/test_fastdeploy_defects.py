"""Defects of FastDeploy's Cache Manager V1 in the index; tests/ancestors.toml lists every defect.

fix_N is fix N of its commit message, C N a defect that was left; both lists are in our notes.
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


def store(tree, *blocks):
    """Compute a request and keep a copy of all of it on the host."""
    run(tree, *blocks)
    lease = tree.match(chain_of(*blocks))
    copy_down(tree, lease, 1)
    tree.release(lease)


def candidates(tree, number: int) -> int:
    tier = tree.tiers[number]
    return sum(node in tier.candidates() for node in tree.nodes())


# ---- fixes that must stay ----


def test_fix_1_what_came_back_to_the_device_can_be_evicted_again():
    tree = tree_of(4, 4)
    store(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2))
    given = tree.reserve(tree.tiers[0], 2)
    transitions.begin_write(lease, tree.tiers[0], 0, given)
    transitions.end_write(tree, lease, tree.tiers[0], 0, 2, ok=True)
    assert (tree.tiers[0].num_evictable, candidates(tree, 0)) == (0, 0)
    tree.release(lease)
    assert (tree.tiers[0].num_evictable, candidates(tree, 0)) == (2, 1)
    assert tree.evict(tree.tiers[0], 2) is None
    check_tree(tree, [])


def test_fix_7_another_image_is_another_key_from_its_first_block_on():
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
def test_fix_11_an_item_is_half_open_on_both_sides(start, num_tokens, blocks):
    assert set(chain_of(1, 2, 3, media=[MediaItem(start, num_tokens, b"x")]).extras) == blocks


def test_fix_14_nothing_handed_over_is_changed():
    tree = tree_of(4)
    namespace, policy = copy.copy(tree.namespace), tree.tiers[0].policy_name
    tokens = tokens_of([1, 2])
    before = list(tokens)
    lease = tree.match(Chain(tree.namespace, tokens))
    tree.release(lease)
    assert (tree.namespace, tree.tiers[0].policy_name, tokens) == (namespace, policy, before)
    with pytest.raises(AttributeError):
        tree.namespace.model = "other"


def test_fix_19_what_travels_between_processes_has_no_way_into_the_tree():
    """Keys, slots, shortages and misses do; a lease stays where it is."""
    tree = tree_of(2000)
    run(tree, *range(1000))
    lease = tree.match(chain_of(*range(1000)))
    path = path_of(lease)
    for each in (lease.chain.keys(), path, Slots("device", lease.table), tree.explain(lease), Shortage("device", 1, 0)):
        assert len(pickle.dumps(each)) < 40_000
    assert pickle.loads(pickle.dumps(tree.explain(lease))) == tree.explain(lease)


def test_fix_20_the_free_slots_are_the_free_slots():
    pool = BlockPool("device", 8)
    taken = set(pool.allocate(3).ids.tolist())
    assert isinstance(pool.free_slots(), np.ndarray)
    assert set(pool.free_slots().tolist()) == set(range(8)) - taken


def test_fix_21_after_a_reset_everything_is_free_and_old_leases_give_back_only_what_is_theirs():
    tree = tree_of(8, 8)
    store(tree, 1, 2)
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


def test_fix_22_one_match_is_one_reference():
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


def test_fix_23_slots_are_freed_once():
    tree = tree_of(4)
    lease = begin(tree, 1)
    given = Slots("device", lease.table)
    tree.release(lease)
    with pytest.raises(StateError, match="it is free"):
        tree.tiers[0].give_back(given)


def test_fix_24_slots_are_distinct_and_nobody_elses():
    pool, taken = BlockPool("device", 64), set()
    for n in (1, 2, 3, 5, 8, 13, 21):
        ids = pool.allocate(n).ids.tolist()
        assert len(set(ids)) == n
        assert not taken & set(ids)
        taken |= set(ids)
        pool.release(slots("device", *ids[::2]))
        taken -= set(ids[::2])


def test_fix_25_match_gives_a_lease_also_when_caching_is_off():
    tree = tree_of(4, enabled=False)
    run(tree, 1, 2)
    assert tree.tiers[0].pool.num_used == 0
    lease = begin(tree, 1, 2)
    assert (lease.num_matched, len(lease.table), lease.stopped) == (0, 2, MissReason.DISABLED)
    assert tree.publish(lease, 2 * BLOCK) == 0
    tree.release(lease)
    check_tree(tree, [])


def test_fix_25_a_match_that_raises_leaves_nothing_behind():
    tree = tree_of(4)
    with pytest.raises(ArgumentError):
        tree.match(Chain(Namespace("another", block_tokens=BLOCK), tokens_of([1])))
    assert tree.num_leases == 0
    check_tree(tree, [])


def test_fix_27_tiers_are_objects_and_states_are_numbers():
    assert {type(state).__name__ for state in transitions.BlockState} == {"BlockState"}
    with pytest.raises(ArgumentError, match="numbered"):
        type(tree_of(4))(NAMESPACE, [tree_of(4, 4).tiers[1]])


def test_fix_28_the_index_logs_nothing(caplog):
    caplog.set_level(logging.DEBUG)
    tree = tree_of(2)
    for number in range(20):
        run(tree, number)
    assert caplog.records == []


@pytest.mark.parametrize("n", range(10))
def test_fix_29_allocating_any_number_leaves_the_rest(n):
    pool = BlockPool("device", 8)
    found = pool.allocate(n)
    assert pool.num_free == (8 - n if n <= 8 else 8)
    assert isinstance(found, Slots if n <= 8 else Shortage)
    if n == 0:
        assert found.ids.tolist() == []
        assert pool.free_slots().tolist() == list(range(8))


# ---- defects that were left ----


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "cost"])
def test_c1_the_end_of_a_path_goes_before_its_beginning(policy):
    tree = tree_of(6, policy=policy)
    run(tree, 1, 2, 3, 4)
    run(tree, 1, 2, 8, 9)
    for num_left in range(5, -1, -1):
        tree.evict(tree.tiers[0], 1)
        check_tree(tree, [])
        found = matched(tree, 1, 2, 3, 4) + max(0, matched(tree, 1, 2, 8, 9) - 2)
        assert found == num_left == tree.tiers[0].pool.num_used, "every block that is held can be matched"


def test_c2_a_path_is_in_order_whatever_tier_each_block_is_in():
    """HOST, DEVICE, HOST, both: the table and the path have one place for each block."""
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


def test_c3_a_match_on_the_host_that_is_not_scheduled_leaves_no_reference():
    tree = tree_of(4, 4)
    store(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    for _ in range(5):
        lease = tree.match(chain_of(1, 2))
        assert lease.num_matched == 2
        tree.release(lease, used=False)
    assert sum(node.leases for node in tree.nodes()) == 0
    assert tree.tiers[1].num_evictable == 2
    assert tree.evict(tree.tiers[1], 2) is None


def test_c4_a_failed_attempt_is_no_use():
    tree = tree_of(4)
    run(tree, 1)
    run(tree, 2)
    for _ in range(9):
        tree.release(tree.match(chain_of(1)), used=False)
    assert [node.usage.uses for node in tree.nodes()] == [0, 0]
    tree.evict(tree.tiers[0], 1)
    assert (matched(tree, 1), matched(tree, 2)) == (0, 1)


def test_c4_a_request_is_one_use_however_often_it_says_so():
    tree = tree_of(4)
    run(tree, 1)
    lease = tree.match(chain_of(1))
    for _ in range(3):
        tree.commit(lease)
    tree.release(lease)
    assert [node.usage.uses for node in tree.nodes()] == [1]


def test_c5_a_slot_that_is_read_is_nobody_elses_until_the_copy_is_done():
    tree = tree_of(2, 2)
    store(tree, 1, 2)
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


def test_c6a_a_block_is_matched_when_all_its_tokens_are_computed():
    """The chunk ends inside block 1: another request of the same step finds block 0."""
    tree = tree_of(8)
    lease = begin(tree, 1, 2)
    assert matched(tree, 1, 2) == 0
    tree.publish(lease, 2 * BLOCK - 1)
    assert matched(tree, 1, 2) == 1
    tree.publish(lease, 2 * BLOCK)
    assert matched(tree, 1, 2) == 2
    tree.release(lease)


def test_c6b_a_request_given_up_before_it_was_computed_leaves_nothing_to_match():
    tree = tree_of(8)
    lease = begin(tree, 1, 2)
    tree.release(lease)
    assert matched(tree, 1, 2) == 0
    assert tree.tiers[0].pool.num_used == 0
    lease = begin(tree, 1, 2)
    tree.publish(lease, BLOCK)
    tree.release(lease)
    assert (matched(tree, 1, 2), tree.tiers[0].pool.num_used) == (1, 1)


def test_c6c_the_last_sampled_token_has_no_kv_and_its_block_is_not_published():
    tree = tree_of(8)
    lease = begin(tree, 1)
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, lease.chain.num_tokens - 1)
    tree.release(lease)
    assert matched(tree, 1, 2) == 1
    with pytest.raises(RangeError, match="9 tokens computed, the chain has 8"):
        tree.publish(begin(tree, 1, 2), 2 * BLOCK + 1)


def test_c7_a_copy_can_be_read_when_it_is_reported_done_and_a_failed_one_never():
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


def test_c8_equal_numbers_of_two_tiers_are_not_the_same_slot():
    """A host copy has slot 0; a request computes the block anew into device slot 0: nothing leaks."""
    tree = tree_of(1, 1)
    store(tree, 1)
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


def test_c9_what_was_on_the_host_only_is_on_the_device_once_it_is_computed_again():
    tree = tree_of(4, 4)
    store(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    lease = tree.match(chain_of(1, 2), max_blocks=0)
    tree.allocate(lease, 2)
    assert tree.publish(lease, 2 * BLOCK) == 2
    second = tree.match(chain_of(1, 2))
    assert path_of(second).tiers.tolist() == [0, 0]
    assert second.table.tolist() == lease.table.tolist()


def test_c10_a_shortage_is_no_empty_list():
    tree = tree_of(2)
    lease = begin(tree, 1, 2)
    found = tree.allocate(lease, 1)
    assert isinstance(found, Shortage)
    assert not hasattr(found, "__iter__")
    assert not hasattr(found, "ids")
    assert len(lease.table) == 2
    assert str(found) == "1 slots of device wanted, 0 free and 0 evictable"


def test_c11_ranges_that_do_not_fit_the_path_are_refused():
    tree = tree_of(4, 4)
    run(tree, 1, 2)
    lease = tree.match(chain_of(1, 2))
    three = tree.reserve(tree.tiers[1], 3)
    with pytest.raises(RangeError, match=r"blocks \[0, 3\) of a path of 2"):
        transitions.begin_write(lease, tree.tiers[1], 0, three)
    with pytest.raises(RangeError, match=r"blocks \[1, 3\) of a path of 2"):
        transitions.begin_read(lease, tree.tiers[0], 1, 2)
    tree.tiers[1].give_back(three)
    check_tree(tree, [lease])


def test_c12_a_pool_does_not_shrink_below_a_used_slot_though_few_are_used():
    pool = BlockPool("device", 8)
    pool.allocate(8)
    pool.release(slots("device", *range(7)))
    with pytest.raises(StateError, match="slot 7 is in use"):
        pool.resize(4)
    pool.release(slots("device", 7))
    pool.resize(4)
    assert pool.free_slots().tolist() == [0, 1, 2, 3]


def test_c14_a_lease_ends_once():
    tree = tree_of(4)
    first = begin(tree, 1)
    tree.publish(first, BLOCK)
    second = tree.match(chain_of(1))
    tree.release(first)
    with pytest.raises(StateError, match="released already"):
        tree.release(first)
    check_tree(tree, [second])
    assert isinstance(tree.evict(tree.tiers[0], 1), Shortage), "the other lease still holds it"
    tree.release(second)


def test_c15_model_weights_type_layout_salt_and_adapter_are_in_every_key():
    chains = [Chain(Namespace("m", *fields), range(16)) for fields in ([], ["r"], ["", "d"], ["", "", "l"])]
    chains += [Chain(Namespace("m"), range(16), salt=b"s"), Chain(Namespace("m"), range(16), adapter=b"s")]
    assert len({chain.keys() for chain in chains}) == len(chains)


def test_c16_a_block_that_is_loading_ends_a_match_and_holds_nothing_after():
    tree = tree_of(4, 4)
    store(tree, 1, 2)
    tree.evict(tree.tiers[0], 1)
    lease = tree.match(chain_of(1, 2))
    transitions.begin_write(lease, tree.tiers[0], 1, tree.reserve(tree.tiers[0], 1))
    other = tree.match(chain_of(1, 2))
    assert path_of(other).tiers.tolist() == [0, 1], "not yet from the device"
    transitions.end_write(tree, lease, tree.tiers[0], 1, 1, ok=True)
    assert path_of(other).tiers.tolist() == [0, 0]
    tree.release(lease)
    tree.release(other, used=False)
    assert tree.tiers[0].num_evictable == tree.tiers[1].num_evictable == 2


# ---- its hashing, its costs ----


def test_s3_the_same_content_is_the_same_key_whatever_objects_it_is_made_of():
    """Pickle gave other digests for one string object twice and for numpy integers."""
    digest = bytes(bytearray(b"picture"))
    twice = [MediaItem(0, 1, digest), MediaItem(2, 1, digest)]
    apart = [MediaItem(0, 1, bytes(bytearray(b"picture"))), MediaItem(2, 1, bytes(bytearray(b"picture")))]
    keys = chain_of(1, media=twice).keys()
    assert keys == chain_of(1, media=apart).keys()
    assert keys == Chain(NAMESPACE, [np.int64(1)] * BLOCK, media=twice).keys()


def test_p7_times_are_counted_and_never_read_from_a_clock():
    """Nothing in the index knows the time of day; the caller tells it."""
    for name, module in vars(kvtier.index).items():
        if inspect.ismodule(module) and module.__name__.startswith("kvtier.index"):
            assert "import time" not in inspect.getsource(module), name


def test_g2_a_copy_is_kept_so_a_second_eviction_moves_nothing():
    tree = tree_of(2, 2)
    store(tree, 1)
    on_host = tree.tiers[1].pool.free_slots().tolist()
    for _ in range(2):
        tree.evict(tree.tiers[0], tree.tiers[0].num_evictable)
        lease = tree.match(chain_of(1))
        transitions.begin_read(lease, tree.tiers[1], 0, 1)
        transitions.begin_write(lease, tree.tiers[0], 0, tree.reserve(tree.tiers[0], 1))
        transitions.end_read(lease, tree.tiers[1], 0, 1)
        transitions.end_write(tree, lease, tree.tiers[0], 0, 1, ok=True)
        tree.release(lease)
        assert tree.tiers[1].pool.free_slots().tolist() == on_host


def test_g3_a_preempted_request_finds_what_it_had_computed():
    tree = tree_of(8)
    lease = begin(tree, 1, 2, 3)
    tree.publish(lease, 2 * BLOCK + 1)
    tree.release(lease)
    assert tree.match(lease.chain).num_matched == 2


def test_g4_what_two_requests_computed_is_kept_once():
    tree = tree_of(8)
    first, second = begin(tree, 1, 2), begin(tree, 1, 2)
    assert tree.publish(first, 2 * BLOCK) == 2
    assert tree.publish(second, 2 * BLOCK) == 0
    assert sum(map(len, second.duplicate_slots)) == 2
    assert not set(first.table.tolist()) & set(second.table.tolist())
    tree.release(second)
    tree.release(first)
    assert tree.tiers[0].pool.num_used == 2


def test_g7_eviction_is_all_or_nothing_with_the_reason():
    tree = tree_of(4)
    run(tree, 1, 2)
    before = [node.num_blocks for node in tree.nodes()]
    found = tree.evict(tree.tiers[0], 3)
    assert (found.wanted, found.evictable, [node.num_blocks for node in tree.nodes()]) == (3, 2, before)
    lease = tree.match(chain_of(5))
    with pytest.raises(KvtierError):
        tree.allocate(lease, -1)
    assert sum(node.num_blocks for node in tree.nodes()) == 2
