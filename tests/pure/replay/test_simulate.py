"""Simulated times equal manual calculations, a plain LRU cache has the same hits, and totals are consistent."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
from benchmarks.fitted_cost import FittedCost
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.errors import ArgumentError, RangeError
from kvtier.messages import Route
from kvtier.replay import SyntheticTrace, TraceRequest, generate
from kvtier.replay.cost import Roofline, Work
from kvtier.replay.deployment import GIB, Deployment, simulate, summarise
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, preset
from kvtier.replay.sim_worker import SimulatedStore, SimulatedWorker
from kvtier.replay.simulator import Simulator
from kvtier.scheduler import SchedulerConfig
from scheduler_support import check_scheduler

DISK = DiskSpec(100.0, 100.0, 0.0)


def per_token(work: Work) -> float:
    """Return a compute time of one second per token."""
    return work.num_tokens


def simulator(device: int, host: int = 0, disk: int = 0, *, link: float = 1e9, early: bool = False, **options):
    """Return a simulator with the given number of blocks per tier. A block has one byte, so `link` is in blocks/s."""
    stores = {"disk": SimulatedStore(disk)} if disk else {}
    cache = CacheConfig(
        device,
        host=HostConfig(host) if host else None,
        stores=(StoreConfig("disk"),) if disk else (),
        always_load=options.pop("always_load", True),
    )
    worker = SimulatedWorker(1, link, disk=DISK, stores=stores, latency_seconds=0.0)
    limits = SchedulerConfig(options.pop("rows", 8), options.pop("tokens", 10_000), starts_early=early)
    return Simulator(cache, limits, options.pop("cost", per_token), worker, block_tokens=512, **options)


def request(time: float, *ids: int, tail: int = 100, answer: int = 1) -> TraceRequest:
    """Return a request whose prompt has one full block of 512 tokens per id, and `tail` tokens of its own."""
    return TraceRequest(time * 1000, len(ids) * 512 + tail, answer, (*ids, 1000 + int(time)))


def test_single_request_computes_prompt_then_one_token_per_step():
    (one,) = simulator(100).run([request(5, 1, 2, answer=4)]).requests
    assert (one.arrival, one.scheduled_at) == (0.0, 0.0)
    assert one.ttft == 1124
    assert one.finished_at == 1124 + 3
    assert one.answer_tokens == 4
    assert one.tokens_from == {"device": 0}


def test_prompt_is_chunked_while_next_request_queues():
    found = simulator(100, tokens=512, rows=1).run([request(0, 1, 2), request(1, 3)])
    first, second = found.requests
    assert first.ttft == 1124
    assert second.queue_seconds == 1124 - 1
    assert second.ttft == 1124 - 1 + 612
    assert found.num_steps == 3 + 2
    assert found.compute_seconds == 1124 + 612


def test_probe_report_is_applied_before_next_arrival():
    """The first request waits for the report of a probe, which looks up the blocks of this request on the disk.

    The simulator must apply the report at once, long before the next request arrives at 10,000 s.
    """
    first, _ = simulator(100, 100, 100).run([request(0, 1, 2), request(10_000, 3)]).requests
    assert first.ttft == 1124


def test_simulated_hits_are_attributed_to_tier_of_blocks():
    earlier = [request(10_000 * i, *range(10 * i, 10 * i + 4)) for i in range(4)]
    again = replace(earlier[0], timestamp_ms=50_000_000, hash_ids=(0, 1, 2, 3, 999))
    for sizes, tier in (((100,), "device"), ((6, 100), "host"), ((6, 5, 100), "disk")):
        run = simulator(*sizes).run([*earlier, again])
        assert run.requests[-1].tokens_from.get(tier) == 4 * 512, tier
        assert run.requests[-1].ttft < 612
        assert run.num_computed_blocks == 16
        assert run.num_reused_blocks == 4
    assert simulator(6).run([*earlier, again]).requests[-1].tokens_from == {"device": 0}


def test_duration_of_simulated_load_depends_on_link_speed():
    earlier = [request(10_000 * i, *range(10 * i, 10 * i + 4)) for i in range(3)]
    again = replace(earlier[0], timestamp_ms=40_000_000, hash_ids=(0, 1, 2, 3, 999))
    run = simulator(6, 100, link=0.5).run([*earlier, again])
    assert run.requests[-1].ttft == pytest.approx(4 / 0.5 + 100)
    to_device = next(use for use in run.links if use.name == "to device")
    assert (to_device.num_bytes, to_device.busy_seconds) == (4, 8.0)


def test_simulated_layer_waits_only_for_its_part_of_load():
    """Computing takes 100 s, and each of the 10 layers waits only for its own part of the load.

    A load of 8 s is hidden completely. After a load of 200 s, the last layer must still be computed, which takes 10 s.
    """
    earlier = [request(10_000 * i, *range(10 * i, 10 * i + 4)) for i in range(3)]
    again = replace(earlier[0], timestamp_ms=40_000_000, hash_ids=(0, 1, 2, 3, 999))
    for link, ttft in ((0.5, 100), (0.02, 200 + 10)):
        run = simulator(6, 100, link=link, early=True, num_layers=10).run([*earlier, again])
        assert run.requests[-1].ttft == pytest.approx(ttft)


def test_simulator_recomputes_blocks_behind_slow_link():
    earlier = [request(10_000 * i, *range(10 * i, 10 * i + 4)) for i in range(8)]
    again = [
        replace(earlier[i], timestamp_ms=(100 + 10 * i) * 1e6, hash_ids=(*earlier[i].hash_ids[:4], 999 + i))
        for i in (0, 1)
    ]
    slow = simulator(6, 100, link=0.0001, always_load=False).run([*earlier, *again])
    fast = simulator(6, 100, link=1.0, always_load=False).run([*earlier, *again])
    assert slow.requests[-1].tokens_from.get("host", 0) == 0
    assert fast.requests[-1].tokens_from["host"] == 4 * 512


def test_measured_transfer_times_exclude_wait_for_link():
    """Four requests queue for the disk. The measured times must not include the time in the queue."""
    earlier = [request(10_000 * i, *range(10 * i, 10 * i + 2 + i)) for i in range(8)]
    again = [replace(each, timestamp_ms=9e8, hash_ids=(*each.hash_ids[:-1], 999)) for each in earlier[:4]]
    ours = simulator(20, 21, 100, link=0.5, always_load=False)
    ours.run([*earlier, *again])
    speeds = ours.manager.cost_model
    for count in (1, 5, 20):
        assert speeds.transfer_seconds((Route.HOST_TO_DEVICE, ""), count) == pytest.approx(count / 0.5)
        assert speeds.transfer_seconds((Route.STORE_TO_HOST, "disk"), count) == pytest.approx(
            count / DISK.read_bandwidth
        )
        assert speeds.compute_seconds(512, count * 512) == pytest.approx(count * 512)


# ---- two steps in flight: phases=2 ----


def overhead(_: Work) -> float:
    """Return the host time of a step, one second."""
    return 1.0


def with_overhead(work: Work) -> float:
    """Return the whole time of a step: the host time plus one second per token."""
    return work.num_tokens + 1.0


def test_two_phases_overlap_host_time_with_previous_step():
    traced = replace(request(0, 1, 2, answer=4), finish_reason="length")
    for phases, ttft, token_seconds in ((1, 1 + 1124, 1 + 1), (2, 1 + 1124, 1)):
        run = simulator(100, cost=with_overhead, host_cost=overhead, phases=phases).run([traced])
        assert run.requests[0].ttft == ttft
        assert run.requests[0].finished_at == ttft + 3 * token_seconds
        assert run.num_steps == 4


def test_host_limits_two_phases_if_slower_than_the_device():
    traced = replace(request(0, 1, 2, answer=4), finish_reason="length")
    options = {"cost": lambda work: work.num_tokens + 3.0, "host_cost": lambda _: 3.0}
    run = simulator(100, phases=2, **options).run([traced])
    # The host prepares step 2 during step 1, so step 2 ends 1 s after step 1. The host needs 3 s for step 3 and 3 s for
    # step 4, so each of these steps ends 3 s after the previous step.
    assert run.requests[0].finished_at == 3 + 1124 + 1 + 3 + 3


@pytest.mark.parametrize(("reason", "num_discarded"), [("length", 0), ("stop", 1), ("", 1)])
def test_two_phases_discard_one_token_after_a_stop(reason, num_discarded):
    traced = replace(request(0, 1, 2, answer=4), finish_reason=reason)
    ours = simulator(100, phases=2)
    run = ours.run([traced])
    assert run.requests[0].answer_tokens == 4
    assert run.requests[0].finished_at == 1124 + 3
    assert run.num_steps == 4 + num_discarded
    assert run.compute_seconds == 1124 + 3 + num_discarded
    assert ours.scheduler._steps == []
    check_scheduler(ours.scheduler)


def test_arrival_waits_for_both_steps_in_flight():
    first = request(0, 1, 2, answer=40)
    second = TraceRequest(1124.5 * 1000, 612, 1, (3, 1001))
    for phases, begins in ((1, 1125), (2, 1126)):
        found = simulator(100, phases=phases).run([first, second]).requests[1]
        assert found.scheduled_at == 1125
        assert found.ttft == begins + 612 + 1 - 1124.5  # the step also computes a token of `first`


@pytest.mark.parametrize("quantum", [0.0, 1000.0])
def test_two_phases_serve_what_one_phase_serves(quantum):
    """The cache is too small for all requests, so requests are preempted."""
    made = SyntheticTrace(sessions=10, turns=2, think_seconds=20, answer_tokens=500, document_blocks=4, seed=3)
    trace, runs = tuple(generate(made)), {}
    options = {"cost": lambda work: work.num_tokens / 64, "quantum": quantum, "early": True}
    for phases in (1, 2):
        ours = simulator(24, 100, 300, phases=phases, **options)
        runs[phases] = ours.run(trace)
        check_scheduler(ours.scheduler)
        assert not ours.scheduler.has_work()
    served = {phases: [each.answer_tokens for each in run.requests] for phases, run in runs.items()}
    assert served[2] == served[1]
    assert max(each.num_preempted for each in runs[2].requests) > 0
    assert runs[2].seconds == pytest.approx(runs[1].seconds, rel=0.01)


def test_simulator_with_three_phases_raises():
    with pytest.raises(RangeError, match="phases must be 1 or 2, got 3"):
        simulator(10, phases=3)


def test_oversized_request_is_refused_and_next_is_served():
    run = simulator(4).run([request(0, *range(10)), request(1, 50)])
    assert [each.is_refused for each in run.requests] == [True, False]
    assert run.requests[0].ttft is None
    assert run.requests[1].ttft == 612


def test_time_stays_finite_if_the_last_event_is_a_refusal():
    """The scheduler refuses the last request in an empty step, and no event follows."""
    made = SyntheticTrace(sessions=4, turns=2, think_seconds=50, answer_tokens=1500, document_blocks=2, seed=4)
    ours = simulator(10, 20, 60, cost=lambda work: work.num_tokens / 64, early=True)
    run = ours.run(tuple(generate(made)))
    assert any(each.is_refused for each in run.requests)
    assert 0 < run.seconds <= run.whole_seconds < 1e4


def test_hit_rate_excludes_refused_requests():
    """The second request has cache hits, but is refused later, because its long answer does not fit into memory."""
    run = simulator(4).run([request(0, 1, 2), request(10_000, 1, 2, answer=2000), request(20_000, 1, 2)])
    assert [each.is_refused for each in run.requests] == [False, True, False]
    assert [each.tokens_from["device"] for each in run.requests] == [0, 1024, 1024]
    found = summarise([run])
    assert (found.num_requests, found.num_refused) == (3, 1)
    assert found.hit_rate == found.hit_rates["device"] == 1024 / (2 * 1124)


def test_saves_after_last_token_do_not_extend_request_time():
    run = simulator(100, 100, link=0.001).run([request(0, 1, 2)])
    assert run.seconds == run.requests[0].finished_at == 1124
    to_host = next(use for use in run.links if use.name == "to host")
    assert (to_host.num_bytes, run.whole_seconds) == (2, 1124 + to_host.busy_seconds)
    assert to_host.busy_seconds == pytest.approx(2000)
    found = summarise([run])
    assert (found.seconds, found.utilisation) == (1124, 1.0)
    assert found.answer_tokens_per_second == 1 / 1124
    link = next(link for link in found.links if link.name == "to host")
    assert (link.bytes_per_second, link.busy) == pytest.approx((2 / 3124, 2000 / 3124))


def test_simulation_of_empty_trace_has_no_requests():
    assert simulator(4).run([]).requests == ()


def test_simulator_on_empty_trace_with_store_reports_progress():
    shares: list[float] = []
    assert simulator(4, 4, 4).run([], shares.append).requests == ()
    assert set(shares) == {0.0}


def lru_tokens(requests: list[TraceRequest], num_slots: int) -> list[int]:
    """Return the number of hit tokens per request in a plain LRU cache. The last prompt token is always computed."""
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    found = []
    for each in requests:
        full = each.input_tokens // 512
        paths = [each.hash_ids[: i + 1] for i in range(full)]
        hits = next((i for i, path in enumerate(paths) if path not in held), full)
        found.append(min(hits, (each.input_tokens - 1) // 512) * 512)
        for path in reversed(paths):
            held.pop(path, None)
            held[path] = None
        while len(held) > num_slots - 1:  # the partial block of the running request uses one slot
            held.popitem(last=False)
    return found


@given(
    ids=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=14),
    num_slots=st.integers(8, 20),
)
@settings(deadline=None, max_examples=60)
def test_sequential_requests_have_same_hits_as_plain_lru(ids, num_slots):
    requests = [TraceRequest(1e7 * i, 512 * len(each) + 10, 1, (*each, 5000 + i)) for i, each in enumerate(ids)]
    run = simulator(num_slots).run(requests)
    assert [each.tokens_from["device"] for each in run.requests] == lru_tokens(requests, num_slots)


SMALL = ModelSpec(4, 8, 2, 64, 1e9)
GPU = GpuSpec(100e12, 8e9, 1e12, 10e9)
TRACE = tuple(generate(SyntheticTrace(sessions=40, session_rate=0.5, think_seconds=10.0)))


def setup(**options) -> Deployment:
    return Deployment(SMALL, GPU, **{"device_bytes": GIB // 8, "disk": preset(DiskSpec, "nvme-gen4"), **options})


@pytest.mark.parametrize("sizes", [{}, {"host_bytes": GIB}, {"host_bytes": GIB // 2, "disk_bytes": 4 * GIB}])
def test_simulation_totals_are_consistent(sizes):
    ours = setup(**sizes).simulator(512)
    found = ours.run(TRACE)
    assert len(found.requests) == len(TRACE)
    for each, traced in zip(found.requests, TRACE, strict=True):
        assert each.prompt_tokens == traced.input_tokens
        assert each.answer_tokens == max(1, traced.output_tokens)
        assert each.arrival <= each.scheduled_at < each.first_token_at <= each.finished_at
        assert sum(each.tokens_from.values()) < each.prompt_tokens
    check_scheduler(ours.scheduler)
    assert not ours.scheduler.has_work()
    assert ours.manager.stats.num_allocations == 0
    total = sum(sum(each.tokens_from.values()) for each in found.requests)
    preempted = sum(each.num_preempted for each in found.requests)  # tokens_from excludes hits after a preemption
    assert total <= ours.manager.stats.hit_tokens if preempted else total == ours.manager.stats.hit_tokens
    assert found.compute_seconds <= found.seconds * (1 + 1e-9)
    assert found.seconds == max(each.finished_at for each in found.requests)
    assert all(use.busy_seconds <= found.whole_seconds * (1 + 1e-9) for use in found.links)


def test_simulation_result_does_not_depend_on_number_of_jobs():
    setups = [setup(host_bytes=GIB, replicas=2, policy=policy) for policy in ("lru", "arc")]
    progress: list[float] = []
    alone = simulate(TRACE, setups, progress=progress.append)
    assert simulate(TRACE, setups, jobs=3) == alone
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


def test_more_memory_and_disk_raise_hit_rate():
    sizes = [{}, {"host_bytes": GIB // 4}, {"host_bytes": GIB // 4, "disk_bytes": 64 * GIB}]
    rates = [summary.hit_rate for summary in simulate(TRACE, [setup(**each) for each in sizes])]
    assert rates == sorted(rates)
    assert rates[0] < rates[1] < rates[2]


def test_simulation_with_merged_steps_matches_single_steps():
    exact, coarse = simulate(TRACE, [setup(host_bytes=GIB, quantum=q) for q in (0.0, 0.02)])
    assert coarse.hit_rate == pytest.approx(exact.hit_rate, abs=0.01)
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.02)
    for share in ("p50", "p90"):  # p99 would depend on a single request
        assert coarse.ttft[share] == pytest.approx(exact.ttft[share], abs=0.02, rel=0.1)


def test_num_simulated_limits_simulated_replicas():
    (one,) = simulate(TRACE, [setup(replicas=4)], num_simulated=1)
    (every,) = simulate(TRACE, [setup(replicas=4)])
    assert 0 < one.num_requests < every.num_requests == len(TRACE)


def test_slower_disk_raises_ttft():
    slow = DiskSpec(1e7, 1e7, 0.001)
    sizes = {"host_bytes": GIB // 4, "disk_bytes": 64 * GIB}
    fast, late = simulate(TRACE, [setup(**sizes), setup(**sizes, disk=slow)])
    assert late.ttft["p90"] > fast.ttft["p90"]
    busy = [next(link.busy for link in each.links if link.name == "disk") for each in (fast, late)]
    assert busy[1] > 10 * busy[0]


# ---- cost ----


def test_roofline_is_bound_by_memory_or_by_compute():
    cost = Roofline(SMALL, replace(GPU, compute_share=1.0, memory_share=1.0, attention_share=1.0, step_seconds=0.0))
    weights = 1e9 * 2 / 1e12
    assert cost.seconds(Work(1, 1, 0, 0)) == pytest.approx(weights)
    assert cost.seconds(Work(1, 10_000, 0, 0)) == pytest.approx(2 * 1e9 * 10_000 / 100e12)
    assert cost.seconds(Work(1, 1, 0, 1_000_000)) == pytest.approx(weights + 1_000_000 * SMALL.token_bytes / 1e12)
    attended = 4 * 4 * 8 * 64 * 1e9 / 100e12
    assert cost.seconds(Work(1, 1, 1e9, 0)) == pytest.approx(weights + attended)


def test_roofline_reads_only_experts_in_use():
    model = replace(SMALL, active_params=1e8)
    cost = Roofline(model, replace(GPU, flops=1e18, step_seconds=0.0, memory_share=1.0))
    assert cost.seconds(Work(1, 1, 0, 0)) == pytest.approx(2e8 / 1e12)
    assert cost.seconds(Work(100, 100, 0, 0)) == pytest.approx(2e9 / 1e12)


@given(
    costs=st.tuples(*[st.floats(0, 1e-3)] * 7).filter(lambda costs: max(costs) > 1e-6),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_fitted_cost_reproduces_measured_step_times(costs, seed):
    import random

    rng = random.Random(seed)
    works = [
        Work(rows, tokens, tokens * read / 2, read)
        for rows, tokens, read in (
            (rng.randint(1, 16), 1 << rng.randint(0, 11), rng.randint(1, 30_000)) for _ in range(60)
        )
    ]
    truth = [
        costs[0]
        + costs[1] * w.num_rows
        + costs[2] * w.num_tokens
        + costs[3] * w.attended_tokens
        + costs[4] * w.read_tokens
        + costs[5] * min(w.num_tokens, 16)
        + costs[6] * min(w.num_tokens, 64)
        for w in works
    ]
    fit = FittedCost(list(zip(works, truth, strict=True)))
    for work, seconds in zip(works, truth, strict=True):
        assert fit.seconds(work) == pytest.approx(seconds, rel=1e-3)
    with pytest.raises(ArgumentError, match="7 costs need at least as many measured steps, got 0"):
        FittedCost([])


# ---- setups ----


def test_invalid_deployment_raises():
    with pytest.raises(ArgumentError, match="through host memory"):
        setup(disk_bytes=GIB)
    with pytest.raises(RangeError, match="leave no room"):
        Deployment(preset(ModelSpec, "llama-3-70b"), preset(GpuSpec, "4090"))
    with pytest.raises(RangeError, match="cannot hold a block"):
        setup(device_bytes=1000).simulator(512)
    with pytest.raises(RangeError, match="0 or more"):
        setup(host_bytes=-1)
    with pytest.raises(RangeError, match="quantum"):
        setup(quantum=-1.0).simulator(512)


def test_kv_bytes_are_90_percent_of_memory_minus_weights():
    eight = Deployment(preset(ModelSpec, "llama-3-8b"), preset(GpuSpec, "h100"))
    assert eight.kv_bytes == pytest.approx(0.9 * 80e9 - 2 * 8.03e9)
    assert eight.model.token_bytes == 131_072


def test_queued_requests_hit_disk_after_memory_eviction():
    """Memory holds three of six conversations. When all six return, their requests queue.

    Each request evicts blocks of other conversations from memory. Therefore the blocks of at least four
    conversations are loaded from the disk.
    """
    paths = [tuple(range(10 * user, 10 * user + 8)) for user in range(6)]
    first = [request(20_000 * user, *path) for user, path in enumerate(paths)]
    again = [request(200_000 + user, *path) for user, path in enumerate(paths)]
    found = simulator(10, 20, 1000, rows=1).run([*first, *again]).requests[6:]
    cached = [sum(each.tokens_from.values()) for each in found]
    assert cached == [8 * 512] * 6
    assert sum(each.tokens_from.get("disk", 0) for each in found) >= 4 * 8 * 512
