"""The deployments that the planner simulates, the deployment that it chooses, and the text of its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.replay import OPTIMUM, SyntheticTrace, generate, sweep
from kvtier.replay.deployment import GIB, Deployment, simulate
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, PriceSpec, preset
from kvtier.replay.planner import STEP, PlanResult, capacities, plan, setups
from kvtier.replay.report import advice_text, plan_result, size_text

TRACE = tuple(generate(SyntheticTrace(sessions=25, session_rate=0.5)))
SETUP = Deployment(
    ModelSpec(4, 8, 2, 64, 1e9, kv_bytes=64.0),  # much KV per token, so that a small trace needs several GiB
    preset(GpuSpec, "h100"),
    device_bytes=4 * GIB,
    disk=preset(DiskSpec, "nvme-gen4"),
)
PRICES = PriceSpec(6.0, 0.12)


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return plan(TRACE, SETUP, 1e9, PRICES, jobs=2)  # every setup meets a TTFT target of 1e9 s


def test_setups_range_from_no_host_memory_to_whole_trace():
    sizes = setups(SETUP, 200 * GIB)
    hosts = [host for host, disk in sizes if not disk]
    assert hosts == [0, 32 * GIB, 64 * GIB, 128 * GIB, 256 * GIB]
    assert {disk for _, disk in sizes} == {0, 512 * GIB}
    assert all(host for host, disk in sizes if disk), "a setup with a disk must have host memory"
    assert all(not disk for _, disk in setups(replace(SETUP, disk=None), 200 * GIB))


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 500, 170_899])
def test_capacities_ascend_to_number_of_blocks(num_blocks):
    found = capacities(num_blocks)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == max(1, num_blocks)
    assert num_blocks < 1000 or len(found) == 20


def test_points_of_plan_equal_direct_simulation(found):
    point = next(point for point in found.points if point.host_bytes and not point.disk_bytes)
    (simulated,) = simulate(TRACE, [replace(SETUP, host_bytes=point.host_bytes)])
    assert point.summary == simulated
    assert point.price == pytest.approx(point.host_bytes / GIB * 6)
    sizes = [each.capacity for each in found.curve if each.policy == "lru"]
    assert list(found.curve) == sweep(TRACE, sizes, ("lru", OPTIMUM))


def test_plan_chooses_cheapest_setup_within_target(found):
    p99s = sorted(point.summary.ttft["p99"] for point in found.points)
    target = (p99s[0] + p99s[-1]) / 2
    advice = plan(TRACE, SETUP, target, PRICES, jobs=2)
    fitting = [point for point in found.points if point.summary.ttft["p99"] <= target]
    assert advice.chosen.price == min(point.price for point in fitting)
    assert advice.more_host.host_bytes == advice.chosen.host_bytes + STEP
    assert advice_text(advice)[0].startswith(f"Buy {size_text(advice.chosen.host_bytes)} of host memory")
    assert "would change the hit rate by" in advice_text(advice)[1]


def test_unreachable_target_reports_nearest_setup(found):
    advice = plan(TRACE, SETUP, 1e-6, PRICES, jobs=2)
    assert advice.chosen is None
    assert advice.nearest.summary.ttft["p99"] == min(point.summary.ttft["p99"] for point in found.points)
    assert "No simulated size has TTFT p99 of 1e-06 s" in advice_text(advice)[0]


def test_plan_does_not_choose_setup_that_refuses_requests():
    """Refused requests have no TTFT, so the percentiles of a setup that refuses requests omit the longest prompts."""
    # room for the full blocks of the longest prompt, but not for its last, partial block
    num_blocks = max(request.input_tokens for request in TRACE) // 512
    small = replace(SETUP, device_bytes=num_blocks * 512 * SETUP.model.token_bytes)
    advice = plan(TRACE, small, 1e9, PRICES, jobs=2)
    refused = advice.nearest.summary.num_refused
    assert 0 < refused < len(TRACE) / 2
    assert advice.chosen is None
    text = advice_text(advice)
    assert text[0].startswith("No simulated size serves every request with TTFT p99 of 1e+09 s")
    assert text[1] == f"This size refuses {refused} of {len(TRACE)} requests: device memory is too small."


def test_plan_with_loose_target_buys_nothing(found):
    assert found.chosen.price == 0
    assert found.more_disk is None
    assert advice_text(found)[0].startswith("Buy no host memory")


def test_plan_result_can_be_written_as_json(found):
    import json

    trace = {"block_tokens": 512}
    result = plan_result(trace, {"token_bytes": SETUP.model.token_bytes}, found)
    assert json.loads(json.dumps(result)) == result
    assert len(result["results"]) == len(found.points)
    assert result["prices"] == {"host_gib": 6.0, "disk_gib": 0.12, "source": "", "assumed": []}


def test_size_text_uses_short_units():
    assert [size_text(n) for n in (5, 3 << 20, 1536 << 20, 200 << 30, 2 << 40)] == [
        "5 bytes",
        "3 MiB",
        "1.5 GiB",
        "200 GiB",
        "2 TiB",
    ]
