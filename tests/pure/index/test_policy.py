"""Eviction policies, first alone and then in the tree. Some policies are compared with naive implementations."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from index_cases import BLOCK, begin, chain_of, copy_down, matched, run, tree_of
from kvtier.errors import ArgumentError
from kvtier.index import Retention, Shortage, make_policy
from kvtier.index.check import check_tree
from kvtier.index.node import AccessStats, Node
from kvtier.index.policies import S3FIFO, CandidateHeap, CostAware

POLICIES = ["lru", "fifo", "arc", "s3fifo", "cost", "learned"]


def node(
    name: int, *, created: int = 0, used: int = 0, uses: int = 0, num_blocks: int = 1, start: int = 0, priority: int = 0
) -> Node:
    labels = memoryview(name.to_bytes(4, "little") * num_blocks)
    usage = AccessStats(created, used, uses, priority)
    return Node(None, (b"", b""), bytes(labels[:4]), start, num_blocks, labels, usage, 1)


# ---- the interface ----


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("lru", lambda node: node.usage.used),
        ("fifo", lambda node: node.usage.created),
        ("learned", lambda node: node.usage.used),  # the learned policy equals LRU until its tracker is fitted
    ],
)
@given(actions=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), max_size=120))
@settings(max_examples=150, deadline=None)
def test_victim_is_first_offered_node_of_lowest_rank(name, rank, actions):
    policy, nodes, time = make_policy(name), [node(i, created=i // 2) for i in range(12)], 0
    offered: dict[Node, int] = {}
    for which, action in actions:
        each, time = nodes[which], time + 1
        if action < 2:
            if each not in offered:
                each.usage.used = time // 3
            policy.offer(each)
            offered.setdefault(each, time)
        elif action == 2:
            policy.withdraw(each)
            offered.pop(each, None)
        else:
            expected = min(offered, key=lambda node: (rank(node), offered[node]), default=None)
            assert policy.victim() is expected
            assert policy.victim() is expected, "victim() changed the order"
            if action == 4 and expected is not None:
                policy.withdraw(expected)
                del offered[expected]
        assert [each in policy for each in nodes] == [each in offered for each in nodes]


@pytest.mark.parametrize("name", POLICIES)
@given(
    actions=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 3)), max_size=150),
)
@settings(max_examples=100, deadline=None)
def test_offered_nodes_are_evicted_exactly_once(name, actions):
    policy, nodes = make_policy(name), [node(i, num_blocks=1 + i % 3, created=i) for i in range(12)]
    offered: set[Node] = set()
    for which, action, uses in actions:
        each = nodes[which]
        if action < 2:
            if each not in offered:
                each.usage.uses += uses
            policy.offer(each)
            offered.add(each)
        elif action == 2:
            policy.withdraw(each)
            offered.discard(each)
        else:
            victim = policy.victim()
            assert (victim in offered) if offered else (victim is None)
            if victim is not None:
                policy.withdraw(victim)
                offered.remove(victim)
        assert [each in policy for each in nodes] == [each in offered for each in nodes]
    for _ in range(len(offered)):
        victim = policy.victim()
        offered.remove(victim)
        policy.withdraw(victim)
    assert not offered
    assert policy.victim() is None


def test_make_policy_creates_policy_by_name():
    assert [make_policy(name).name for name in POLICIES] == ["LRU", "FIFO", "ARC", "S3FIFO", "CostAware", "Learned"]
    with pytest.raises(ArgumentError, match="'mru'; known policies: arc, cost, fifo, learned, lru, s3fifo"):
        make_policy("mru")


@pytest.mark.parametrize("name", POLICIES[:-1])
def test_policy_heap_stays_small_under_repeated_use(name):
    policy, nodes = make_policy(name), [node(i) for i in range(10)]
    for time in range(5_000):
        each = nodes[time % 10]
        policy.withdraw(each)
        each.usage.used, each.usage.uses = time, each.usage.uses + 1
        policy.offer(each)
    heaps = [heap for heap in vars(policy).values() if isinstance(heap, CandidateHeap)]
    assert heaps
    assert all(len(heap._heap) <= 64 + 2 * 10 for heap in heaps)  # the limit in CandidateHeap, for 10 nodes


def test_candidate_heap_discards_nodes_and_updates_ranks():
    heap = CandidateHeap()
    a, b = node(1), node(2)
    heap.push(a, 1)
    heap.push(b, 2)
    heap.discard(a)
    heap.push(a, 3)
    assert (len(heap), heap.num_blocks, heap.first()) == (2, a.num_blocks + b.num_blocks, (2, b))
    heap.discard(b)
    assert heap.first() == (3, a)
    heap.discard(a)
    heap.discard(a)
    assert (len(heap), heap.first()) == (0, None)


# ---- S3-FIFO ----


class PlainS3FIFO:
    """A simple S3-FIFO for single blocks, with two queues, a ghost queue and use counters up to 3."""

    def __init__(self) -> None:
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.count: dict[int, int] = {}
        self.ghost: OrderedDict[int, None] = OrderedDict()

    def add(self, name: int) -> None:
        self.count[name] = 0
        if name in self.ghost:
            del self.ghost[name]
            self.main.append(name)
        else:
            self.small.append(name)

    def use(self, name: int) -> None:
        self.count[name] = min(3, self.count[name] + 1)

    def evict(self) -> int:
        while True:
            if self.small and (len(self.small) > 0.1 * len(self.count) or not self.main):
                name = self.small.popleft()
                if self.count[name]:
                    self.main.append(name)
                    continue
                self.ghost[name] = None
                while len(self.ghost) > 64 + len(self.main):  # the same limit as in S3FIFO
                    self.ghost.popitem(last=False)
            else:
                name = self.main.popleft()
                if self.count[name]:
                    self.count[name] -= 1
                    self.main.append(name)
                    continue
            del self.count[name]
            return name


@example(  # a node evicted from the main queue counts as new when it returns
    accesses=[(2, 1), (1, 1), (1, 1), (2, 1), (0, 1), (2, 1), (2, 1), (0, 1)], capacity=2
)
@given(st.lists(st.tuples(st.integers(0, 29), st.integers(1, 6)), max_size=200), st.integers(1, 16))
@settings(max_examples=150, deadline=None)
def test_s3fifo_evicts_like_reference(accesses, capacity):
    policy, plain, time = S3FIFO(), PlainS3FIFO(), 0
    offered: dict[int, Node] = {}
    for name, uses in accesses:
        time += 1
        if name in offered:
            each = offered[name]
            policy.withdraw(each)  # as if a request had leased, used and released the node
            for _ in range(uses):
                plain.use(name)
            each.usage.uses += uses
            policy.offer(each)
            continue
        if len(offered) == capacity:
            victim = policy.victim()
            evicted = next(name for name, each in offered.items() if each is victim)
            assert evicted == plain.evict()
            policy.withdraw(offered.pop(evicted))
        offered[name] = node(name, created=time)
        policy.offer(offered[name])
        plain.add(name)


def test_s3fifo_keeps_reused_nodes_during_scan():
    """The scan offers many new nodes that are not used again. The policy must evict these and keep the reused nodes."""
    policy = S3FIFO()
    hot = [node(i, created=i, uses=1) for i in range(8)]
    for each in hot:
        policy.offer(each)
    for time in range(100, 200):
        policy.offer(node(time, created=time))
        victim = policy.victim()
        assert victim not in hot
        policy.withdraw(victim)


def test_s3fifo_use_count_is_capped_at_three():
    policy = S3FIFO()
    once_hot, others = node(0, created=0, uses=1000), [node(i, created=i, uses=1) for i in range(1, 5)]
    for each in [once_hot, *others]:
        policy.offer(each)
    rounds = 0
    while once_hot in policy:
        victim = policy.victim()
        policy.withdraw(victim)
        if victim is not once_hot:  # all nodes except `once_hot` are used again
            victim.usage.uses += 1
            policy.offer(victim)
        rounds += 1
        assert rounds < 30


# ---- cost ----


def test_cost_policy_evicts_cheap_and_rarely_used_nodes_first():
    policy = CostAware(half_tokens=4)
    shallow, deep, used = node(1), node(2, start=9), node(3, uses=5)
    for each in (used, deep, shallow):
        policy.offer(each)
    order = []
    for _ in range(3):
        order.append(policy.victim())
        policy.withdraw(order[-1])
    assert order == [shallow, deep, used]


def test_cost_policy_eventually_evicts_unused_nodes():
    """An eviction raises the ranks of nodes offered later, so a valuable node without further uses is evicted too."""
    policy = CostAware()
    once_hot = node(0, uses=9)
    policy.offer(once_hot)
    for name in range(1, 40):
        policy.offer(node(name))
        victim = policy.victim()
        policy.withdraw(victim)
        if victim is once_hot:
            break
    assert victim is once_hot
    assert name < 20


# ---- in the tree ----


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_fifo_evicts_leaves_by_creation_time(requests):
    """A request publishes all its blocks at once, so all its new blocks have the same creation time."""
    tree, created = tree_of(8, policy="fifo"), {}
    for time, request in enumerate(requests):
        blocks = [request[0], *([request[1]] if request[2] else []), *([request[2]] if request[2] > 1 else [])]
        prefixes = [tuple(blocks[:stop]) for stop in range(1, len(blocks) + 1)]
        new = [prefix for prefix in prefixes if prefix not in created]
        while len(created) + len(new) > 8:
            leaves = [
                each
                for each in created
                if each not in prefixes and not any(other[: len(each)] == each for other in created if other != each)
            ]
            assert leaves
            del created[min(leaves, key=created.__getitem__)]
        run(tree, *blocks)
        created.update(dict.fromkeys(new, time))
        lengths = {prefix: matched(tree, *prefix) for prefix in created}
        assert lengths == {prefix: len(prefix) for prefix in created}
        assert tree.tiers[0].pool.num_used == len(created)


@pytest.mark.parametrize("policy", POLICIES)
def test_block_with_higher_priority_is_evicted_later(policy):
    tree = tree_of(6, policy=policy)
    run(tree, 1, 2, retention=Retention(priority=1))
    run(tree, 3, retention=Retention(priority=-1))
    run(tree, 4, 5)
    run(tree, 4, 5)
    for n, left in enumerate([(2, 0, 2), (2, 0, 1), (2, 0, 0), (1, 0, 0), (0, 0, 0)]):
        assert tree.evict(tree.tiers[0], 1) is None, n
        assert (matched(tree, 1, 2), matched(tree, 3), matched(tree, 4, 5)) == left


def test_block_keeps_priority_after_use_with_lower_priority():
    tree = tree_of(4)
    run(tree, 1, retention=Retention(priority=3))
    run(tree, 1)
    run(tree, 2)
    tree.evict(tree.tiers[0], 1)
    assert (matched(tree, 1), matched(tree, 2)) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_leased_blocks_are_not_evicted(policy):
    tree = tree_of(6, policy=policy)
    pin = begin(tree, 1, 2, 3)
    tree.publish(pin, 3 * BLOCK)
    run(tree, 4, 5)
    found = tree.evict(tree.tiers[0], 3)
    assert found == Shortage("device", 3, 1, 2)
    assert tree.evict(tree.tiers[0], 2) is None
    assert (matched(tree, 1, 2, 3), matched(tree, 4, 5)) == (3, 0)
    tree.release(pin)
    assert tree.evict(tree.tiers[0], 3) is None
    assert tree.tiers[0].pool.num_used == 0


def test_block_expires_at_latest_deadline_of_its_uses():
    tree = tree_of(8)
    run(tree, 1, now=0, retention=Retention(ttl=10))
    run(tree, 1, now=5, retention=Retention(ttl=10))
    run(tree, 1, now=6, retention=Retention(ttl=1))
    assert (matched(tree, 1, now=14.9), matched(tree, 1, now=15)) == (1, 0)
    assert tree.expire(14.9) == 0
    assert tree.expire(15) == 1
    assert tree.tiers[0].pool.num_used == 0


def test_leased_blocks_do_not_expire():
    tree = tree_of(8)
    run(tree, 1, now=0, retention=Retention(ttl=1))
    lease = tree.match(chain_of(1), now=0)
    assert tree.expire(100) == 0
    assert matched(tree, 1, now=100) == 1
    tree.release(lease, used=False)
    assert tree.expire(100) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_tenant_over_quota_evicts_its_own_blocks(policy):
    tree = tree_of(8, policy=policy)
    tree.tiers[0].set_quota(b"a", 3, tree.nodes())
    run(tree, 1, 2)
    run(tree, 1, 2, salt=b"a")
    run(tree, 3, 4, salt=b"a")
    assert matched(tree, 1, 2) == 2
    assert matched(tree, 1, 2, salt=b"a") == 1
    assert matched(tree, 3, 4, salt=b"a") == 2
    assert tree.tiers[0].used_by[b"a"] == 3


def test_quota_covers_all_salts_of_tenant():
    """The part of a salt before the first NUL byte names the tenant."""
    tree = tree_of(8)
    tree.tiers[0].set_quota(b"a\0whatever", 3, tree.nodes())
    run(tree, 1, 2, salt=b"ab")
    run(tree, 1, 2, salt=b"a\0x")
    run(tree, 1, 2, salt=b"a\0y")
    run(tree, 1, salt=b"a")
    assert tree.tiers[0].used_by == {b"a": 3, b"ab": 2}
    assert tree.tiers[0].quota(b"a\0z") == 3
    assert [matched(tree, 1, 2, salt=salt) for salt in (b"a\0x", b"a\0y", b"ab")] == [0, 2, 2]
    check_tree(tree, [])


def test_allocate_beyond_tenant_quota_returns_shortage():
    tree = tree_of(8)
    tree.tiers[0].set_quota(b"a", 2, tree.nodes())
    lease = begin(tree, 1, salt=b"a")
    found = tree.allocate(lease, 2)
    assert found == Shortage("device", 2, 1, 0, quota=b"a".hex())
    assert "within the quota of 61" in str(found)  # the tenant in hexadecimal
    tree.tiers[0].set_quota(b"a", None, tree.nodes())
    assert len(tree.allocate(lease, 2)) == 2


def test_new_quota_counts_existing_blocks():
    tree = tree_of(8)
    run(tree, 1, 2, 3, salt=b"a")
    run(tree, 4, 5, 6)
    tree.tiers[0].set_quota(b"a", 2, tree.nodes())
    run(tree, 7, salt=b"a")
    assert tree.tiers[0].used_by[b"a"] == 2
    assert matched(tree, 4, 5, 6) == 3
    assert tree.evict(tree.tiers[0], 3, salt=b"a") == Shortage("device", 3, 3, 2)
    check_tree(tree, [])


def test_evict_for_tenant_without_quota_raises():
    with pytest.raises(ArgumentError, match="no quota"):
        tree_of(4).evict(tree_of(4).tiers[0], 1, salt=b"nobody")


@pytest.mark.parametrize("policy", POLICIES)
def test_host_tier_evicts_independently_of_device_tier(policy):
    tree = tree_of(4, 2, policy=policy)
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    copy_down(tree, lease, 1)
    tree.release(lease)
    assert tree.evict(tree.tiers[1], 1) is None
    assert tree.evict(tree.tiers[0], 2) is None
    assert matched(tree, 1, 2) == 1  # the first block is still in host memory
    check_tree(tree, [])
    assert tree.evict(tree.tiers[1], 1) is None
    assert matched(tree, 1, 2) == 0
    check_tree(tree, [])


def test_block_without_ttl_never_expires():
    tree = tree_of(4)
    run(tree, 1, now=3)
    assert matched(tree, 1, now=1e300) == 1
    assert math.isinf(Retention().ttl)
