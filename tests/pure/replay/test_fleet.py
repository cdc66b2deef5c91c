"""The simulation of a fleet: hits of one replica, blocks in the router's index, hits by routing, and roofline costs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import RangeError
from kvtier.replay import SyntheticTrace, TraceRequest, generate
from kvtier.replay.cost import Roofline, Work
from kvtier.replay.curves import Accesses, index_hits
from kvtier.replay.fleet import FleetConfig, FleetRouting, FleetSimulation, FleetTrace, replica_costs, simulate_fleets
from kvtier.replay.hardware import GpuSpec, ModelSpec
from kvtier.router import ReplicaCosts

COSTS = ReplicaCosts(0.001, 2e-5, 1e-10, 1e-4, 1e-3)
REQUESTS = st.lists(
    st.builds(
        lambda at, ids, tail: TraceRequest(at, len(ids) * 512 - tail, 1, tuple(ids)),
        st.integers(0, 10_000),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.integers(0, 511),
    ),
    max_size=25,
)


def run(requests, num_replicas, num_blocks, routing=FleetRouting.CACHE):
    simulation = FleetSimulation(FleetConfig(num_replicas, num_blocks, COSTS, routing), 512)
    summary = simulation.run(FleetTrace(requests))
    simulation.router.check()
    return summary


@given(requests=REQUESTS, num_blocks=st.integers(1, 30), routing=st.sampled_from(FleetRouting))
@settings(deadline=None)
def test_fleet_of_one_replica_has_same_hits_as_index(requests, num_blocks, routing):
    requests.sort(key=lambda request: request.timestamp_ms)
    accesses = Accesses(requests)
    summary = run(requests, 1, num_blocks, routing)
    total = sum(len(paths) for paths in accesses)
    assert summary.hit_rate * max(1, total) == pytest.approx(index_hits(accesses, num_blocks, "lru"))
    assert (summary.num_requests, summary.imbalance) == (len(requests), 1.0)


@given(requests=REQUESTS, num_replicas=st.integers(1, 70))
@settings(deadline=None)
def test_router_of_fleet_holds_the_blocks_of_all_replicas(requests, num_replicas):
    requests.sort(key=lambda request: request.timestamp_ms)
    simulation = FleetSimulation(FleetConfig(num_replicas, 12, COSTS), 512)
    simulation.run(FleetTrace(requests))
    simulation._end_until(1e9)  # end all prompts
    index = simulation.router.index
    index.check()
    for number, replica in enumerate(simulation._replicas):
        held = index._masks[:, 0, number // 64] >> number % 64 & 1
        assert held.sum() == replica.tree.tiers[0].pool.num_slots - replica.tree.tiers[0].pool.num_free


def test_cache_routing_finds_more_hits_than_round_robin():
    trace = list(generate(SyntheticTrace(sessions=150, seed=1)))
    cache, rotation = (run(trace, 8, 400, routing) for routing in FleetRouting)
    assert cache.hit_rate > 1.5 * rotation.hit_rate
    assert cache.num_index_blocks <= 8 * 400
    assert cache.ttft["p50"] <= rotation.ttft["p50"]


def test_fleets_in_several_processes_have_equal_results(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # with torch loaded, all fleets run in this process
    trace = FleetTrace(list(generate(SyntheticTrace(sessions=20, seed=1))), 2)
    configs = [FleetConfig(3, 50, COSTS, routing) for routing in FleetRouting]
    alone, spread = (simulate_fleets(configs, trace, 512, jobs=jobs) for jobs in (1, 2))
    assert [replace(each, decision_seconds=0.0) for each in spread] == [
        replace(each, decision_seconds=0.0) for each in alone
    ]
    assert alone[0].hit_rate != alone[1].hit_rate


def test_replica_costs_equal_the_roofline_for_long_prompts():
    model = ModelSpec(32, 32, 8, 128, 8e9)
    gpu = GpuSpec(990e12, 141e9, 4.8e12, 55e9)
    costs = replica_costs(model, gpu, 512)
    for tokens in (4096, 16384):
        attended = tokens * tokens / 2
        expected = Roofline(model, gpu).seconds(Work(1, tokens, attended, tokens))
        found = costs.step_seconds + costs.token_seconds * tokens + costs.attended_seconds * attended
        assert found == pytest.approx(expected, rel=1e-3)
    assert costs.host_seconds == 512 * model.token_bytes / 55e9


def test_fleet_without_replicas_or_blocks_raises():
    for replicas, blocks in ((0, 1), (1, 0)):
        with pytest.raises(RangeError, match="at least one replica and one block"):
            FleetConfig(replicas, blocks, COSTS)


@given(requests=REQUESTS, copies=st.integers(1, 4))
def test_copies_of_a_trace_share_prefixes_only_within_a_copy(requests, copies):
    requests.sort(key=lambda request: request.timestamp_ms)
    trace = FleetTrace(requests, copies)
    found = list(trace)
    assert len(found) == len(trace) == copies * len(requests)
    assert [each[0] for each in found] == sorted(each[0] for each in found)
    once = [tuple(paths) for _, paths, _ in FleetTrace(requests)]
    num_paths = len({path for paths in once for path in paths})
    by_copy = [[] for _ in range(copies)]  # the path numbers of copy c begin at c * num_paths
    for _, paths, _ in found:
        if len(paths):
            by_copy[paths[0] // max(1, num_paths)].append(tuple(paths % num_paths))
    assert all(sorted(each) == sorted(paths for paths in once if paths) for each in by_copy)


def test_trace_with_bad_number_of_copies_raises():
    with pytest.raises(RangeError, match="at least one copy"):
        FleetTrace([], 0)
    with pytest.raises(RangeError, match="use fewer copies"):
        FleetTrace([TraceRequest(0, 1024, 1, (1, 2))], 2**31)
