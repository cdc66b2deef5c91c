"""The learned policy evicts like LRU before its first fit. Then it evicts the block with the lowest value.

After each alarm of LRUGuard, the policy evicts like LRU for some time.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from index_cases import begin, chain_of, run, tree_of
from kvtier.errors import RangeError, StateError
from kvtier.index import Hints, Outcome, make_policy
from kvtier.index.check import check_tree
from kvtier.index.labels import MAX_CELLS, NUM_GROUPS, Busiest, Cells
from kvtier.index.learned import Learned
from kvtier.index.native import TrackerState
from kvtier.index.node import AccessStats, Node
from kvtier.index.reuse import EDGES, NUM_BUCKETS, gittins
from kvtier.index.tracker import NUM_TOUCHES, LRUGuard, ReuseTracker, TouchLog
from kvtier.replay import SyntheticTrace, generate

OUTCOMES = [
    Outcome(),
    Outcome(40, "stop", Hints("one")),
    Outcome(400, "length", Hints(session_over=True)),
    Outcome(3, hints=Hints("two", expects_return_seconds=20.0)),
]


def blocks_of(tree):
    """Yield the domain, position and path of each block. The split of the tree into nodes does not matter."""
    for node in tree.nodes():
        path = b"".join(bytes(above.labels) for above in [*node.upwards()][::-1])
        for block in range(node.start, node.stop):
            yield node.domain, block, path[: (block + 1) * node.label_bytes]


def drive(tree, rng, num_requests, *, check_every=0):
    """Run random prompts with random outcomes. Return the blocks of the tree after each request."""
    contents, now = [], 0.0
    for number in range(num_requests):
        now += rng.random() * 20
        blocks = [rng.randrange(3), *(rng.randrange(4) for _ in range(rng.randrange(6)))]
        salt = rng.choice([b"", b"a", b"b\0x"])
        lease = begin(tree, *blocks, now=now, salt=salt)
        if rng.random() < 0.5:
            tree.commit(lease, now=now)
        tree.publish(lease, lease.chain.num_tokens, now=now)
        tree.release(lease, used=rng.random() < 0.9, now=now, outcome=rng.choice(OUTCOMES))
        contents.append(sorted(blocks_of(tree)))
        if check_every and number % check_every == 0:
            check_tree(tree)
    return contents


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_learned_before_first_fit_equals_lru(seed):
    trees = [tree_of(12, policy=policy) for policy in ("lru", "learned")]
    first, second = (drive(tree, random.Random(seed), 60) for tree in trees)
    assert first == second


@pytest.mark.parametrize("sizes", [(12,), (8, 16)])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_learned_with_random_hints_keeps_invariants(sizes, seed):
    tree = tree_of(*sizes, policy="learned")
    tree.tracker.first_fit = tree.tracker.state.until_fit = 8
    drive(tree, random.Random(seed), 300, check_every=1)
    assert tree.tracker.table.is_fitted


def test_learned_with_same_requests_evicts_same_blocks():
    trees = [tree_of(12, policy="learned") for _ in range(2)]
    first, second = (drive(tree, random.Random(5), 600) for tree in trees)
    assert first == second
    assert trees[0].tracker.table.values == trees[1].tracker.table.values


def fitted_tracker(rng) -> ReuseTracker:
    """Return a tracker with eight block classes. In four classes, values fall with age. In the others, values rise."""
    tracker = ReuseTracker(100)
    values = np.array([[rng.random() for _ in range(NUM_BUCKETS)] for _ in range(8)])
    values[:4] = -np.sort(-values[:4], 1)
    values[4:].sort(1)
    tracker.table.set(values, np.concatenate((np.full(4, np.inf), values[4:, 0])), np.repeat([0.0, math.inf], 4))
    tracker.state.is_lru = False
    return tracker


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_victim_after_fit_has_lowest_value(seed):
    rng = random.Random(seed)
    tracker = fitted_tracker(rng)
    policy, offered = Learned(tracker), set()
    for time in range(200):
        tracker.see(tracker.state.now + rng.random() * 30)
        if rng.random() < 0.6 or not offered:
            touch = (time, rng.randrange(8), tracker.state.now, 0)
            usage = AccessStats(time, time, touch=touch)
            node = Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), usage, 1)
            policy.offer(node)
            offered.add(node)
        elif rng.random() < 0.5:
            node = rng.choice(sorted(offered, key=lambda node: node.usage.used))
            policy.withdraw(node)
            offered.remove(node)
        if offered:
            values = {node: tracker.value(node.usage.touch[1], node.usage.touch[2])[0] for node in offered}
            victim = policy.victim()
            assert values[victim] == min(values.values())
            assert policy.victim() is victim
        if rng.random() < 0.02:
            tracker.state.version += 1
    assert all(node in policy for node in offered)


def test_learned_heaps_stay_small_under_repeated_use():
    policy = make_policy("learned")
    nodes = [
        Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), AccessStats(0, 0, touch=(0, i % 3, 0.0, 0)), 1)
        for i in range(10)
    ]
    for time in range(5_000):
        each = nodes[time % 10]
        policy.withdraw(each)
        each.usage.used = time
        policy.offer(each)
        policy.victim()
    # the limits in learned.py for 10 candidates in 3 classes; one entry may be added after a limit is checked
    assert all(len(queue.heap) <= 64 + 2 * 10 + 1 for queue in policy._queues.values())
    assert max(len(policy._by_value), len(policy._timers)) <= 64 + 4 * 3 + 2 * 10 + 1
    assert all(len(queue.young) <= 64 + 2 * 10 + 1 for queue in policy._queues.values())


@pytest.mark.parametrize(
    ("cell", "value", "age"),
    [(1, 0.1, 0.0), (0, 0.3, 600.0), (0, 0.05, 0.0)],
    ids=["victim in class 1", "class 0, above lowest value of class 1", "class 0, below all values of class 1"],
)
def test_learned_heaps_stay_small_while_victim_stays(cell, value, age):
    """Two nodes stay offered as candidates, while other nodes of class 1 are offered and withdrawn one by one.

    After each withdrawal, the victim is the second of the two nodes. Its class is `cell`. The values of class 1 rise
    with age. Class 0 has the constant value `value`. `age` is the age of each other node when it is offered.
    """
    tracker = ReuseTracker(100)
    values = np.array([np.full(NUM_BUCKETS, value), np.linspace(0.1, 0.9, NUM_BUCKETS)])
    tracker.table.set(values, np.array([math.inf, 0.1]), np.array([0.0, math.inf]))
    tracker.state.is_lru = False
    policy = Learned(tracker)

    def offer(used, cell, since):
        usage = AccessStats(used, used, touch=(used, cell, since, 0))
        policy.offer(node := Node(None, (b"", b""), b"abcd", 0, 1, memoryview(b"abcd"), usage, 1))
        return node

    offer(1, 1, -600.0)
    victim = offer(0, cell, 0.0)
    for time in range(2, 2_000):
        tracker.see(float(time))
        younger = offer(time, 1, time - age)
        if cell == 0:
            assert policy.victim() is victim
        policy.withdraw(younger)
        assert policy.victim() is victim
    # the limit in `Learned.victim` for 2 classes and 2 candidates
    assert max(len(policy._by_value), len(policy._timers)) <= 64 + 4 * 2 + 2 * 2
    # the limit in `Learned.offer` for 3 candidates
    assert all(len(queue.young) <= 64 + 2 * 3 for queue in policy._queues.values())


def test_learned_policy_beats_lru_on_loop_larger_than_cache():
    hits = {}
    for policy in ("lru", "learned"):
        tree, hits[policy] = tree_of(60, policy=policy), 0
        for number in range(3_000):
            lease = begin(tree, *([number % 40] * 3), now=float(number))
            hits[policy] += lease.num_matched
            tree.publish(lease, lease.chain.num_tokens, now=float(number))
            tree.release(lease, now=float(number))
        check_tree(tree)
    assert hits["lru"] == 0
    assert hits["learned"] > 0.25 * 3_000 * 3


def test_explain_after_fit_names_class_and_value():
    tree = tree_of(8, policy="learned")
    tree.tracker.first_fit = tree.tracker.state.until_fit = 8
    for number in range(200):
        run(tree, number % 2, 7, now=float(number))
        run(tree, 100 + number, 1, now=float(number))
    lease = tree.match(chain_of(250, 1), now=200.0)
    text = str(tree.explain(lease))
    assert "class: uses 0, new < 512, output < 32; value: " in text
    assert "hits per block-second" in text
    tree.release(lease, used=False)


# ---- parts ----


def test_gittins_of_constant_hazard_equals_hazard():
    assert gittins(np.full((1, NUM_BUCKETS), 1e-5)) == pytest.approx(np.full((1, NUM_BUCKETS), 1e-5), rel=1e-6)


def test_gittins_equals_best_ratio_over_all_stops():
    hazard = np.random.default_rng(1).random((1, 6)) * 1e-2
    widths = np.diff(EDGES)[:6]
    padded = np.concatenate((hazard, np.full((1, NUM_BUCKETS - 6), 1e-12)), 1)
    for start in range(6):
        best, alive, hits, seconds = 0.0, 1.0, 0.0, 0.0
        for rate, width in zip(hazard[0, start:], widths[start:], strict=True):
            dies = 1 - math.exp(-rate * width)
            hits, seconds, alive = hits + alive * dies, seconds + alive * dies / rate, alive * (1 - dies)
            best = max(best, hits / seconds)
        assert gittins(padded)[0, start] == pytest.approx(best)


def test_guard_lengthens_time_in_lru_after_each_alarm():
    guard, lengths = LRUGuard(), []

    def changes() -> bool:
        return guard.record(lru_hits=10, hits=0, num_blocks=10, num_requests=1, capacity=1000)

    for _ in range(3):
        while not changes():
            pass
        assert guard.is_lru
        length = 1
        while not changes():
            length += 1
        lengths.append(length)
    assert lengths == [200, 800, 3200]  # requests; their blocks are 2, 8 and 32 times the capacity


def test_busiest_assigns_numbers_only_to_frequent_keys():
    busiest = Busiest()
    for _ in range(Busiest.ENOUGH):
        assert busiest.number("a") == busiest.known("a")
    assert busiest.known("a") == 1
    assert busiest.number("b") == 0
    assert len({busiest.number(key) for _ in range(99) for key in range(20)}) == NUM_GROUPS - 1
    for other in range(3 * Busiest.PERIOD):
        busiest.number(("other", other))
    assert busiest.known("a") == 0


def test_key_whose_count_triggers_halving_can_lose_its_number():
    busiest = Busiest()
    for _ in range(Busiest.ENOUGH):
        busiest.number("a")
    for other in range(Busiest.PERIOD - Busiest.ENOUGH - 1):
        busiest.number(other)
    assert busiest.known("a") == 1
    assert busiest.number("a") == 0  # the count of "a" is 33 before the halving and 16 afterwards
    assert busiest.known("a") == 0


def test_classes_beyond_the_limit_map_to_plain_classes():
    cells = Cells()
    numbers = {cells.number(uses, (new, 0, f, a, 0, 0)) for uses in range(5) for new in range(4) for f in range(4)
               for a in range(8)}  # fmt: skip
    assert cells.count == MAX_CELLS > max(numbers)
    assert cells.number(1, (2, 0, 3, 7, 5, 0)) == cells.number(1, (2, 0, 0, 0, 0, 0))
    assert cells.describe(cells.number(1, cells.labels(b"", b"head", 5000, Outcome(100)))) == (
        "uses 1, new < 8192, output < 256"
    )


def test_check_with_wrong_count_of_lru_blocks_raises():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2)
    tree.tracker.state.num_in_lru += 1
    with pytest.raises(StateError, match="blocks counted for LRU"):
        check_tree(tree)


def test_evicted_blocks_count_as_hits_of_simulated_lru():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, 3, now=1.0)
    tree.evict(tree.tiers[0], 1)
    run(tree, 1, 2, 3, now=2.0)
    state = tree.tracker.state
    assert (state.num_requests, state.num_blocks, state.num_hits, state.num_lru_hits) == (2, 6, 2, 3)
    check_tree(tree)


def test_age_of_forgotten_touch_ends_at_its_replacement():
    """A touch is one use of a run of blocks. The log keeps NUM_TOUCHES touches and forgets the oldest for a new one.

    The age of the forgotten touch ends at the start of the new touch.
    """
    log = TouchLog(TrackerState(capacity=10**9))
    for number in range(NUM_TOUCHES + 2):
        first, log.state.now = len(log.started), float(number)
        log.started += 7, 4  # class 7, four blocks
        log.add(first, float(number))
        if number % 1000 == 0:
            log.sync()
    log.sync()
    observed = log.take_observed()
    # the weight of a touch is the square root of its number of blocks: 2 for four blocks
    cells, ages, weights = (np.concatenate(parts) for parts in list(zip(*observed, strict=True))[:3])
    assert (cells.tolist(), ages.tolist(), weights.tolist()) == ([7] * 2, [float(NUM_TOUCHES)] * 2, [2.0] * 2)
    assert not any(each[3] for each in observed)
    assert log.state.num_in_lru == 4 * NUM_TOUCHES


# ---- sessions and hints ----


def leaf_of(tree, *blocks, salt=b"", now=0.0):
    lease = tree.match(chain_of(*blocks, salt=salt), now=now)
    tree.release(lease, used=False)
    return lease.node


def test_closing_a_session_gives_its_blocks_the_hint_over():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, now=1.0, outcome=Outcome(hints=Hints("s")))
    assert tree.close(b"", "s", now=61.0) == 2
    touch = leaf_of(tree, 1, 2).usage.touch
    assert touch[2] == 61.0
    assert tree.tracker.cells.describe(touch[1]).endswith("over")
    assert tree.close(b"", "s", now=62.0) == 0
    check_tree(tree)


def test_close_of_unknown_session_or_tenant_returns_zero():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, salt=b"a\0x", outcome=Outcome(hints=Hints("s")))
    assert tree.close(b"a", "other") == tree.close(b"b", "s") == 0
    assert tree_of(8).close(b"a", "s") == 0


def test_close_ignores_blocks_last_used_by_another_session():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, outcome=Outcome(hints=Hints("s")))
    run(tree, 1, 2, 3, outcome=Outcome(hints=Hints("t")))
    assert tree.close(b"", "s") == 0
    assert tree.close(b"", "t") == 3


def test_close_after_eviction_changes_remaining_blocks():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, now=1.0)
    run(tree, 1, 2, 3, 4, now=2.0, outcome=Outcome(hints=Hints("s")))
    tree.evict(tree.tiers[0], 2)
    assert tree.close(b"", "s", now=3.0) == 2
    check_tree(tree)


def test_sessions_of_dropped_blocks_are_forgotten():
    tree = tree_of(8, policy="learned")
    run(tree, 1, 2, outcome=Outcome(hints=Hints("s")))
    tree.drop(chain_of(1))
    assert tree.close(b"", "s") == 0
    assert not tree.tracker._ends


def test_hints_with_negative_or_infinite_seconds_raise():
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(RangeError, match="expects_return_seconds"):
            Hints(expects_return_seconds=seconds)


def hits_of_tenants(hint_of_second) -> list[int]:
    """Serve the conversations of two tenants from one cache. Return the number of hits of each tenant.

    Only the second tenant sends hints. `hint_of_second[True]` is the probability of the hint session_over in the last
    request of a session. `hint_of_second[False]` is this probability for each earlier request.
    """
    chats = [list(generate(SyntheticTrace(sessions=600, agent_share=0.0, seed=seed))) for seed in (1, 2)]
    merged = sorted((each.timestamp_ms, who, number) for who in (0, 1) for number, each in enumerate(chats[who]))
    remaining = [Counter(id for request in chat for id in request.prompt_ids) for chat in chats]
    tree, hits = tree_of(400, policy="learned"), [0, 0]
    for time, who, number in merged:
        request = chats[who][number]
        ids = request.prompt_ids
        remaining[who].subtract(ids)
        if not ids:
            continue
        lease = begin(tree, *ids, now=time / 1000, salt=(b"first", b"second")[who])
        hits[who] += lease.num_matched
        tree.publish(lease, lease.chain.num_tokens, now=time / 1000)
        is_over = remaining[who][ids[-1]] == 0
        hints = Hints(session_over=hint_of_second[is_over] > random.random()) if who else Hints()
        tree.release(lease, now=time / 1000, outcome=Outcome(request.output_tokens, hints=hints))
    return hits


def test_false_hints_of_a_tenant_hardly_affect_another():
    random.seed(3)
    silent, right, inverted, noise, always = (
        hits_of_tenants(shares) for shares in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (1.0, 1.0))
    )
    assert always == silent
    assert inverted == right, "the policy must learn as much from inverted hints as from correct hints"
    assert sum(right) > sum(silent)
    assert noise[0] > 0.98 * silent[0]


def test_hints_of_tenants_without_a_number_are_ignored():
    cells = Cells()
    over = Outcome(hints=Hints(session_over=True))
    first = cells.number(0, cells.labels(b"rare", b"", 0, over))
    assert cells.describe(first).endswith("other tenant")
    assert cells.when_over(first) == first
    for _ in range(Busiest.ENOUGH):
        labels = cells.labels(b"busy", b"", 0, over)
    assert cells.describe(cells.number(0, labels)).endswith("tenant 1, over")
