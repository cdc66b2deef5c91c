"""The native code of the learned policy makes the same decisions and keeps the same state as its Python equivalent."""

from __future__ import annotations

import ctypes
import gc
import math
import random
import sys
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from index_cases import BLOCK, begin, chain_of, run, tree_of
from kvtier.index import Hints, Outcome, Slots
from kvtier.index import tree as tree_module
from kvtier.index.check import check_tree
from kvtier.index.learned import Learned, NativeLearned
from kvtier.index.learned_shadow import LearnedShadow, Use
from kvtier.index.native import SOURCE, TrackerState, native
from kvtier.index.node import AccessStats, Node
from kvtier.index.reuse import NUM_BUCKETS
from kvtier.index.tracker import ReuseTracker
from kvtier.native_code import Native, _compile, _compiler

pytestmark = pytest.mark.skipif(native().code is None, reason=native().reason)
SHARED = [name for name, kind in TrackerState._fields_[:14]]  # all other fields are constants and addresses
OUTCOMES = [
    Outcome(),
    Outcome(40, "stop", Hints("one")),
    Outcome(400, "length", Hints(session_over=True)),
    Outcome(3, hints=Hints("two", expects_return_seconds=20.0)),
]


def both_trees(*sizes: int, exclusive: bool):
    """Return two trees with the learned policy: the first uses native code, the second Python code."""
    fast = tree_of(*sizes, policy="learned", exclusive=exclusive)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_module, "native", lambda: Native(None, "off"))
        slow = tree_of(*sizes, policy="learned", exclusive=exclusive)
    assert isinstance(fast.tiers[0].everyone._new_policy(), NativeLearned)
    assert isinstance(slow.tiers[0].everyone._new_policy(), Learned)
    return fast, slow


def act(tree, rng, held, now):
    """Perform a random operation and return its result. In some cases, set a quota before the operation."""
    kind = rng.random()
    blocks = [rng.randrange(3), *(rng.randrange(4) for _ in range(rng.randrange(6)))]
    salt, outcome = rng.choice([b"", b"a", b"b\0x"]), rng.choice(OUTCOMES)
    if kind < 0.05:
        return tree.close(salt, rng.choice(["one", "two"]), now=now)
    if kind < 0.08:
        return tree.drop(chain_of(*blocks[:2], salt=salt))
    if kind < 0.12:
        return tree.evict(tree.tiers[0], rng.randrange(4)) is None
    if kind < 0.14:
        tree.tiers[0].set_quota(b"a", rng.choice([None, 4]), list(tree.nodes()))
    if held and (kind < 0.5 or len(held) > 2):
        lease = held.pop(rng.randrange(len(held)))
        tree.publish(lease, lease.chain.num_tokens, now=now)
        tree.release(lease, used=rng.random() < 0.9, now=now, outcome=outcome)
        return lease.table.tolist()
    lease = tree.match(chain_of(*blocks, salt=salt), now=now)
    if not isinstance(tree.allocate(lease, lease.num_missing(lease.chain.num_tokens)), Slots):
        tree.release(lease, used=False)
        return -1
    if rng.random() < 0.5:
        tree.commit(lease, now=now)
    held.append(lease)
    return lease.num_matched


def state_of(tree):
    tracker = tree.tracker
    log = tracker.log
    log.sync()
    nodes = sorted(
        (node.domain, node.start, bytes(node.labels), node.usage.touch or (), node.usage.lost) for node in tree.nodes()
    )
    arrays = [bytes(array) for array in (log.left, log.times, log.cells, log.blocks)]
    table = tracker.table.values, tracker.table.floors, tracker.cells.numbers
    shared = [getattr(tracker.state, name) for name in SHARED]
    return nodes, shared, arrays, table, tracker._ghosts, tracker.guard.num_alarms


@pytest.mark.parametrize(("sizes", "exclusive"), [((14,), False), ((12, 16), True), ((40,), False)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_native_tree_equals_python_tree(sizes, exclusive, seed):
    trees = both_trees(*sizes, exclusive=exclusive)
    rngs, held, now = [random.Random(seed) for _ in trees], [[], []], 0.0
    for tree in trees:
        tree.tracker.first_fit = tree.tracker.state.until_fit = 8
    for number in range(400):
        # Draw the time step from both generators, so that they stay in the same state.
        seconds, _ = (rng.choice([0.0, 1.0, 30.0]) for rng in rngs)
        now += seconds
        first, second = (act(*each, now) for each in zip(trees, rngs, held, strict=True))
        assert first == second
        if number % 100 == 0:
            assert state_of(trees[0]) == state_of(trees[1])
            check_tree(trees[0], held[0])
    assert state_of(trees[0]) == state_of(trees[1])
    assert trees[0].tracker.table.is_fitted


def fitted_tracker(rng, code) -> ReuseTracker:
    """Return a tracker with random values. With age, the values of classes 0 to 3 fall and those of 4 to 7 rise."""
    tracker = ReuseTracker(100, code=code)
    values = np.array([[rng.random() for _ in range(NUM_BUCKETS)] for _ in range(8)])
    values[:4] = -np.sort(-values[:4], 1)
    values[4:].sort(1)
    floors = np.concatenate((np.full(4, np.inf), values[4:, 0]))
    tracker.table.set(np.round(values, 1), np.round(floors, 1), np.repeat([0.0, math.inf], 4))
    tracker.state.is_lru = False
    return tracker


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_native_policy_chooses_same_victims(seed):
    rng = random.Random(seed)
    state = rng.getstate()
    trackers = []
    for code in (native().code, None):
        rng.setstate(state)
        trackers.append(fitted_tracker(rng, code))
    policies = NativeLearned(trackers[0], native().code), Learned(trackers[1])
    offered: list[Node] = []
    for time in range(400):
        now = trackers[0].state.now + rng.random() * 30
        for tracker in trackers:
            tracker.see(now)
        if rng.random() < 0.6 or not offered:
            touch = (time, rng.randrange(8), now - rng.random() * 100, 0)
            usage = AccessStats(time, time // 4, touch=rng.choice([touch, None]))
            offered.append(Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), usage, 1))
            for policy in policies:
                policy.offer(offered[-1])
                policy.offer(offered[-1])  # the second offer has no effect, like the second `withdraw` below
        elif rng.random() < 0.8:
            victims = [policy.victim() for policy in policies]
            node = victims[0] if rng.random() < 0.5 else rng.choice(offered)
            offered.remove(node)
            for policy in policies:
                policy.withdraw(node)
                policy.withdraw(node)
        assert policies[0].victim() is policies[1].victim()
        assert trackers[0].state.lowest == trackers[1].state.lowest
        if rng.random() < 0.05:
            is_lru = rng.random() < 0.3
            for tracker in trackers:
                tracker.state.version += 1
                tracker.state.is_lru = is_lru
    for node in offered:
        assert node in policies[0]
        policies[0].withdraw(node)
        assert node not in policies[0]
    assert policies[0].victim() is None


def test_native_policy_stays_small_under_repeated_use():
    tracker = ReuseTracker(100, code=native().code)
    policy = NativeLearned(tracker, native().code)
    nodes = [
        Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), AccessStats(0, 0, touch=(0, i % 8, 0.0, 0)), 1)
        for i in range(10)
    ]
    for time in range(5_000):
        each = nodes[time % 10]
        policy.withdraw(each)
        each.usage.used, each.usage.touch = time, (0, each.usage.touch[1], float(time), 0)
        tracker.see(float(time))
        policy.offer(each)
        policy.victim()
    # the higher of the two limits in Learned, for 8 classes and 10 candidates
    assert max(policy.sizes()) <= 64 + 4 * 8 + 2 * 10


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_native_policy_under_churn_stays_small(seed):
    """The native policy and the Python policy have heaps of the same sizes, and the sizes are within the limits.

    A third policy, whose `_tidy` does nothing, chooses the same victims.
    """
    rng = random.Random(seed)
    state = rng.getstate()
    trackers = []
    for code in (native().code, None, None):
        rng.setstate(state)
        trackers.append(fitted_tracker(rng, code))
    fast, slow, whole = NativeLearned(trackers[0], native().code), Learned(trackers[1]), Learned(trackers[2])
    whole._tidy = lambda: None
    offered: list[Node] = []
    most, seconds = rng.choice([3, 6, 12]), rng.choice([3, 30, 300])
    for time in range(1_500):
        now = trackers[0].state.now + rng.random() * seconds
        for tracker in trackers:
            tracker.see(now)
        if len(offered) < most and (rng.random() < 0.5 or not offered):
            usage = AccessStats(time, time, touch=(time, rng.randrange(8), now, 0))
            offered.append(Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), usage, 1))
            for policy in (fast, slow, whole):
                policy.offer(offered[-1])
        else:
            node = offered.pop(rng.randrange(len(offered)) if rng.random() < 0.5 else -1)
            for policy in (fast, slow, whole):
                policy.withdraw(node)
        if rng.random() < 0.6:
            assert fast.victim() is slow.victim() is whole.victim()
            lists = [[len(queue.heap), len(queue.young)] for queue in slow._queues.values()]
            assert fast.sizes() == [*map(max, zip(*lists, strict=True)), len(slow._by_value), len(slow._timers)]
            assert max(fast.sizes()[2:]) <= 64 + 4 * len(lists) + 2 * len(offered)
        assert max(fast.sizes()[:2]) <= 64 + 2 * most


def test_native_tree_is_freed_with_its_nodes():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2)
    parts = [weakref.ref(each) for each in (tree.tracker, tree)]
    usage = next(node.usage for node in tree.nodes())
    assert len(gc.get_referrers(usage)) == 1  # only the node refers to its `usage`
    del tree
    gc.collect()
    assert [part() for part in parts] == [None, None]
    assert gc.get_referrers(usage) == [], "the policy still keeps a node alive"


@pytest.mark.parametrize("sizes", [(1, 2, 5), (3, 40)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_native_shadow_has_same_hits_and_values(sizes, seed):
    rng, now = random.Random(seed), 0.0
    fast, slow = LearnedShadow(sizes, native().code), LearnedShadow(sizes)
    for _ in range(4):
        requests, uses = [], []
        for _ in range(rng.randrange(1, 120)):
            now += rng.choice([0.0, 1.0, 40.0, -0.5])
            path = [rng.randrange(6)]
            path += [path[0] * 100 + 7 * depth for depth in range(1, rng.choice([1, 2, 4, 200]))]
            requests.append([mark * 2**40 for mark in path])
            uses.append(Use(now, rng.choice([0, 600, 9000])))
        assert (fast.play(requests, uses) == slow.play(requests, uses)).all()
        assert fast._table.is_fitted == slow._table.is_fitted
        assert fast._table.values == slow._table.values or not fast._table.is_fitted
        assert fast.num_held() == slow.num_held()
    for first, second in zip(fast._take(now), slow._take(now), strict=True):
        assert first.tolist() == second.tolist()


def test_native_errors_reach_the_caller():
    tree = tree_of(8, policy="learned")
    lease = begin(tree, 1, 2)
    tree.publish(lease, lease.chain.num_tokens)
    lease.chain = object()
    lease.began = 0.0, 2  # as `commit` sets it: the time, and the number of blocks
    with pytest.raises(AttributeError, match="salt"):
        tree.tracker._enter(tree.tracker, BLOCK, lease, None, Outcome())


FULL_LIST = """
#define PyList_Append append_to_full_list
#include "native.c"
static PyObject *item;
int append_to_full_list(PyObject *list, PyObject *appended) {
    (void)list, Py_IncRef(item = appended);
    return -1;
}
PyObject *item_of_failed_append(PyObject *list) { return append_pair(list, 1LL << 40, 1) ? NULL : item; }
"""


@pytest.mark.skipif(_compiler() is None, reason="needs a C compiler")
def test_native_item_that_cannot_be_appended_is_freed(tmp_path):
    _compile(_compiler(), {"full_list.c": FULL_LIST, **SOURCE.texts()}, SOURCE.flags, tmp_path / "full_list.so")
    function = ctypes.PyDLL(str(tmp_path / "full_list.so")).item_of_failed_append
    function.restype, function.argtypes = ctypes.py_object, [ctypes.py_object]
    item = function([])
    assert item == 1 << 40
    assert sys.getrefcount(item) == 2  # `item` and the argument of getrefcount
