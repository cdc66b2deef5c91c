"""Hit-rate curves agree with the index, with an exhaustive search for the optimum, and with reference hit rates."""

from __future__ import annotations

import os

import numpy as np
import pytest
from benchmarks.hits import replay_hits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index.policies import POLICIES
from kvtier.replay import OPTIMUM, SyntheticTrace, TraceRequest, generate, sweep
from kvtier.replay.curves import Accesses, count_above, optimum_hits
from kvtier.replay.processes import spread
from reference_traces import TRACES

REQUESTS = st.lists(
    st.builds(
        lambda ids, tail: TraceRequest(0, len(ids) * 512 - tail, 1, tuple(ids)),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(0, 511),
    ),
    max_size=25,
)


@given(requests=REQUESTS, capacities=st.lists(st.integers(1, 30), min_size=1, max_size=4))
@settings(deadline=None)
def test_lru_sweep_hits_equal_index_hits_at_every_capacity(requests, capacities):
    for point in sweep(requests, capacities, ["lru"]):
        truth = replay_hits(requests, block_tokens=512, num_slots=point.capacity)
        assert (point.num_hits, point.num_blocks) == (truth.num_hits, truth.num_blocks)


@given(
    values=st.lists(st.integers(0, 40), max_size=30),
    queries=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=10),
)
def test_count_above_equals_naive_count(values, queries):
    queries = [(min(count, len(values)), limit) for count, limit in queries]
    counts, limits = (np.array([query[i] for query in queries], np.int64) for i in (0, 1))
    found = count_above(np.array(values, np.int64), counts, limits)
    assert found.tolist() == [sum(value > limit for value in values[:count]) for count, limit in queries]


def exhaustive_optimum(requests: list[tuple[int, ...]], capacity: int) -> int:
    """Return the maximum number of hits over all choices of the blocks to keep after each request."""
    states = {frozenset(): 0}
    for ids in requests:
        own = [ids[: i + 1] for i in range(len(ids))]
        new: dict[frozenset, int] = {}
        for held, hits in states.items():
            hits += next((i for i, path in enumerate(own) if path not in held), len(own))
            if len(own) > capacity:
                reachable = [held]  # a request that does not fit is not cached
            else:
                # A running request holds its own blocks. Other blocks can fill the remaining capacity.
                others = sorted(held - set(own))
                room = capacity - len(own)
                reachable = [frozenset(some) | set(own) for some in subsets(others, room)]
            for state in reachable:
                for kept in subsets(sorted(state), capacity):
                    new[frozenset(kept)] = max(new.get(frozenset(kept), -1), hits)
        states = new
    return max(states.values())


def subsets(items: list, max_items: int):
    for bits in range(1 << len(items)):
        chosen = [item for i, item in enumerate(items) if bits >> i & 1]
        if len(chosen) <= max_items:
            yield chosen


@given(
    ids=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple), max_size=7),
    capacity=st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_optimum_equals_exhaustive_search(ids, capacity):
    requests = [TraceRequest(0, 512 * len(each), 1, each) for each in ids]
    assert optimum_hits(Accesses(requests), capacity) == exhaustive_optimum(ids, capacity)


@given(requests=REQUESTS, capacity=st.integers(1, 30))
@settings(deadline=None)
def test_no_policy_has_more_hits_than_optimum(requests, capacity):
    points = {point.policy: point.num_hits for point in sweep(requests, [capacity], [OPTIMUM, *POLICIES])}
    assert max(points.values()) == points[OPTIMUM]


def test_sweep_in_several_processes_equals_sweep_in_one_process():
    requests, progress = list(generate(SyntheticTrace(sessions=150))), []
    capacities, policies = [100, 300, 900], ["lru", "fifo", "arc", OPTIMUM]
    alone = sweep(requests, capacities, policies)
    assert sweep(requests, capacities, policies, jobs=3, progress=progress.append) == alone
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    rates = [point.hit_rate for point in alone if point.policy == "lru"]
    assert rates == sorted(rates)


def test_empty_trace_has_no_hits():
    assert [point.hit_rate for point in sweep([], [10], ["lru", "arc", OPTIMUM])] == [0, 0, 0]


def test_sweep_with_invalid_arguments_raises():
    with pytest.raises(ArgumentError, match="unknown policy mru; use one of optimum, arc, "):
        sweep([], [1], ["mru"])
    with pytest.raises(RangeError, match="1 block or more"):
        sweep([], [0])
    with pytest.raises(RangeError, match="1 block or more"):
        sweep([], [])


def test_spread_with_failing_worker_raises():
    with pytest.raises(ZeroDivisionError):
        list(spread(lambda n: 1 // n, [1, 0, 1], 2))
    with pytest.raises(StateError, match="1 of 2 tasks were lost"):
        list(spread(lambda n: os._exit(1) if n else n, [0, 1], 2))


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.path.stem)
def test_hit_rates_of_traces_match_independent_simulator(trace):
    for point in sweep(trace.requests, trace.capacities, list(trace.hit_rates), jobs=2):
        assert point.num_blocks == trace.num_blocks
        assert point.hit_rate == pytest.approx(trace.hit_rate(point.policy, point.capacity), abs=trace.tolerance)
