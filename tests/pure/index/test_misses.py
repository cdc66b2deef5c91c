"""The reason that `explain` returns for a miss, and the size limit of the miss list."""

from __future__ import annotations

import pytest

from index_cases import BLOCK, NAMESPACE, begin, chain_of, copy_down, remove, run, tokens_of, tree_of
from kvtier.index import Chain, MediaItem, Miss, MissReason, Namespace, RadixTree, Retention, transitions
from kvtier.index.misses import MissList


def explain_miss(tree: RadixTree, *blocks: int, now: float = 0.0, **options) -> Miss:
    lease = tree.match(chain_of(*blocks, **options), now=now)
    miss = tree.explain(lease)
    tree.release(lease, used=False)
    assert miss.block == lease.num_matched
    assert miss.reason.value in str(miss)
    return miss


def test_explain_full_match_has_reason_none():
    tree = tree_of(8)
    run(tree, 1, 2)
    assert explain_miss(tree, 1, 2).reason is MissReason.NONE
    assert explain_miss(tree).reason is MissReason.NONE


def test_explain_unknown_block_has_reason_never_seen():
    tree = tree_of(8)
    run(tree, 1, 2)
    assert explain_miss(tree, 1, 2, 3) == Miss(2, MissReason.NEVER_SEEN)
    assert explain_miss(tree, 1, 3) == Miss(1, MissReason.NEVER_SEEN)
    assert explain_miss(tree, 9) == Miss(0, MissReason.NEVER_SEEN)


@pytest.mark.parametrize(
    ("policy", "name"), [("lru", "LRU"), ("fifo", "FIFO"), ("s3fifo", "S3FIFO"), ("cost", "CostAware")]
)
def test_explain_evicted_block_returns_time_and_policy(policy, name):
    tree = tree_of(8, policy=policy)
    run(tree, 1, 2, 3)
    time = tree.clock
    tree.evict(tree.tiers[0], 2)
    run(tree, 9)
    miss = explain_miss(tree, 1, 2, 3)
    assert miss == Miss(1, MissReason.EVICTED, time, name)
    assert f"at logical time {time} by {name}" in str(miss)


def test_explain_block_evicted_from_last_tier_has_reason_evicted():
    tree = tree_of(8, 8)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    copy_down(tree, lease, 1)
    tree.release(lease)
    tree.evict(tree.tiers[0], 2)
    assert explain_miss(tree, 1, 2).reason is MissReason.NONE
    tree.evict(tree.tiers[1], 1)
    assert explain_miss(tree, 1, 2) == Miss(1, MissReason.EVICTED, tree.clock, "LRU")


def test_explain_recomputed_block_has_reason_none():
    tree = tree_of(8)
    run(tree, 1, 2)
    tree.evict(tree.tiers[0], 2)
    run(tree, 1, 2)
    assert explain_miss(tree, 1, 2).reason is MissReason.NONE


def test_explain_expired_block_has_reason_expired():
    tree = tree_of(8)
    run(tree, 1, retention=Retention(ttl=10))
    run(tree, 1, 2, retention=Retention(ttl=5))
    assert explain_miss(tree, 1, 2, now=7) == Miss(1, MissReason.EXPIRED, tree.clock)
    tree.expire(7)
    assert (explain_miss(tree, 1, 2, now=7).block, explain_miss(tree, 1, 2, now=7).reason) == (1, MissReason.EXPIRED)


def test_explain_dropped_block_has_reason_dropped():
    tree = tree_of(8)
    run(tree, 1, 2)
    tree.drop(chain_of(1, 2), first=1)
    assert (explain_miss(tree, 1, 2).block, explain_miss(tree, 1, 2).reason) == (1, MissReason.DROPPED)
    tree.reset()
    assert explain_miss(tree, 1, 2).reason is MissReason.DROPPED


def test_explain_unreadable_block_has_reason_not_ready():
    tree = tree_of(8, 8)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    copy_down(tree, lease, 1)
    remove(tree, lease, tree.tiers[0], 0, 2)
    remove(tree, lease, tree.tiers[1], 1, 1)  # now no tier holds the second block
    assert (explain_miss(tree, 1, 2).block, explain_miss(tree, 1, 2).reason) == (1, MissReason.NOT_READY)
    transitions.begin_write(lease, tree.tiers[0], 1, tree.reserve(tree.tiers[0], 1))
    assert (explain_miss(tree, 1, 2).block, explain_miss(tree, 1, 2).reason) == (1, MissReason.NOT_READY)
    transitions.end_write(tree, lease, tree.tiers[0], 1, 1, ok=True)
    assert explain_miss(tree, 1, 2).reason is MissReason.NONE


def test_explain_block_of_other_tenant_has_reason_other_salt():
    tree = tree_of(8)
    run(tree, 1, 2, salt=b"a")
    assert explain_miss(tree, 1, 2) == Miss(0, MissReason.OTHER_SALT)
    assert explain_miss(tree, 1, 2, salt=b"b").reason is MissReason.OTHER_SALT
    assert explain_miss(tree, 1, 2, salt=b"a", adapter=b"x").reason is MissReason.OTHER_SALT
    assert explain_miss(tree, 3, salt=b"b").reason is MissReason.NEVER_SEEN
    assert explain_miss(tree, 1, 2, salt=b"a").reason is MissReason.NONE


def test_explain_hides_evictions_of_other_tenants():
    tree = tree_of(8)
    run(tree, 1, 2, salt=b"a")
    tree.evict(tree.tiers[0], 2)
    assert explain_miss(tree, 1, 2, salt=b"a").reason is MissReason.EVICTED
    assert explain_miss(tree, 1, 2, salt=b"b").reason is MissReason.NEVER_SEEN
    assert explain_miss(tree, 1, 2, adapter=b"x").reason is MissReason.NEVER_SEEN


def test_explain_block_with_other_image_has_reason_never_seen():
    tree = tree_of(8)
    run(tree, 1, 2, media=[MediaItem(0, 2, b"x")])
    tree.evict(tree.tiers[0], 2)
    assert explain_miss(tree, 1, 2, media=[MediaItem(0, 2, b"x")]).reason is MissReason.EVICTED
    assert explain_miss(tree, 1, 2, media=[MediaItem(0, 2, b"y")]).reason is MissReason.NEVER_SEEN
    assert explain_miss(tree, 1, 2).reason is MissReason.NEVER_SEEN


def test_explain_after_namespace_change_has_reason_other_layout():
    tree = tree_of(8)
    run(tree, 1, 2)
    other = Namespace("model", "newer", block_tokens=BLOCK)
    tree.reset(other)
    lease = tree.match(Chain(other, tokens_of([1, 2])))
    assert tree.explain(lease).reason is MissReason.OTHER_LAYOUT
    tree.release(lease)
    tree.reset(NAMESPACE)


def test_explain_with_caching_disabled_has_reason_disabled():
    tree = tree_of(8, enabled=False)
    run(tree, 1)
    assert explain_miss(tree, 1).reason is MissReason.DISABLED


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_miss_list_is_bounded_and_discards_oldest_entries(capacity):
    tree = tree_of(64, misses=MissList(capacity))
    for number in range(20):
        run(tree, number)
        tree.evict(tree.tiers[0], 1)
    reasons = [explain_miss(tree, number).reason for number in range(20)]
    assert reasons == [MissReason.NEVER_SEEN] * (20 - capacity) + [MissReason.EVICTED] * capacity


def test_miss_list_forgets_first_block_of_removed_prompts():
    misses = MissList(4)
    tree = tree_of(8, misses=misses)
    for number in range(1000):
        run(tree, number, salt=bytes([number % 7]))
    tree.reset()
    assert (len(misses._removed), misses._heads) == (4, {})


def test_explain_ignores_eviction_after_match():
    """An eviction after the match cannot be the reason for the miss."""
    tree = tree_of(8)
    lease = tree.match(chain_of(1))
    run(tree, 1)
    tree.evict(tree.tiers[0], 1)
    assert tree.explain(lease).reason is MissReason.NEVER_SEEN
    tree.release(lease)
