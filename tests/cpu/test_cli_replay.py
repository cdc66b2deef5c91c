"""The commands `kvtier replay` and `kvtier plan`."""

from __future__ import annotations

import argparse
import json

import pytest

from kvtier.cli import main
from kvtier.cli.replay import seconds, size
from kvtier.replay import SyntheticTrace, generate, read_trace
from kvtier.replay.deployment import GIB, Deployment, simulate
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, preset
from trace_support import write_trace

MODEL = {"layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "params": 1e9, "kv_bytes": 64.0}


@pytest.fixture
def files(tmp_path):
    """Write a trace file and a model file. Return arguments for these files, 4 GiB of device memory and one process."""
    write_trace(generate(SyntheticTrace(sessions=25, seed=3)), tmp_path / "t.jsonl.gz")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return [str(tmp_path / "t.jsonl.gz"), "--model", str(tmp_path / "model.json"), "--device", "4GiB", "--jobs", "1"]


def run_json(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1
    return json.loads(output.out)


def test_replay_json_matches_simulation(files, capsys):
    sizes = ["--host", "4GiB", "--disk", "64GiB", "--policy", "lru,arc,s3fifo", "--capacities", "5"]
    result = run_json(capsys, "replay", *files, *sizes)
    setups = [
        Deployment(
            preset(ModelSpec, files[2]),
            preset(GpuSpec, "h200"),
            device_bytes=4 * GIB,
            host_bytes=4 * GIB,
            disk_bytes=64 * GIB,
            disk=preset(DiskSpec, "nvme-gen4"),
            policy=policy,
        )
        for policy in ("lru", "arc", "s3fifo")
    ]
    expected = simulate(read_trace(files[0]).requests, setups)
    assert [run["policy"] for run in result["results"]] == ["lru", "arc", "s3fifo"]
    for run, summary in zip(result["results"], expected, strict=True):
        assert run["ttft"] == summary.ttft
        assert run["hit_rates"] == summary.hit_rates
        assert run["evictions"] == summary.evictions
    assert {point["policy"] for point in result["curve"]} == {"lru", "arc", "s3fifo", "optimum"}
    assert result == run_json(capsys, "replay", *files, *sizes), "a second run returned another result"


def test_replay_table_shows_tiers_and_latencies_and_bandwidths(files, capsys):
    assert main(["replay", *files, "--host", "4GiB", "--disk", "64GiB", "--capacities", "0"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "device",
        "host",
        "disk",
        "TTFT p50",
        "p90",
        "p99",
        "to device GB/s",
        "disk GB/s",
        "evicted from host",
    ):
        assert expected in output
    assert "never reused" in output


def test_replay_reports_overloaded_gpus(capsys):
    assert main(["replay", "synthetic:sessions=60", "--gpu", "l40s", "--speed", "50", "--capacities", "0"]) == 0
    assert "The GPUs are overloaded: half of the requests queue for" in capsys.readouterr().out


def test_plan_prints_advice_and_effect_of_more_memory(files, capsys, tmp_path):
    result = run_json(
        capsys, "plan", *files, "--ttft-p99", "500ms", "--limit", "40", "--html", str(tmp_path / "p.html")
    )
    assert result["advice"]["target_ttft_p99"] == 0.5
    assert any("100 GiB more host memory would change the hit rate by" in line for line in result["advice"]["text"])
    assert result["prices"]["source"]
    assert result["prices"]["assumed"] == []
    assert "<svg" not in (tmp_path / "p.html").read_text(), "the page must draw its plots in the browser"
    assert main(["plan", *files, "--ttft-p99", "500ms", "--limit", "40"]) == 0
    assert result["advice"]["text"][0] in capsys.readouterr().out


@pytest.mark.parametrize("command", [["replay", "--capacities", "0"], ["plan", "--ttft-p99", "500ms"]])
def test_refused_requests_are_reported_only_if_there_are_any(command, files, capsys):
    assert main([command[0], *files, *command[1:]]) == 0
    output = capsys.readouterr().out
    assert "are refused" not in output
    assert "\nrefused " not in output
    block_tokens = 512  # the block size of traces
    blocks = max(request.input_tokens for request in read_trace(files[0]).requests) // block_tokens
    small_device = f"{blocks * block_tokens * preset(ModelSpec, files[2]).token_bytes}B"
    arguments = [command[0], *files, *command[1:], "--device", small_device]
    runs = run_json(capsys, *arguments)["results"]
    refused, count = runs[0]["num_refused"], runs[0]["num_requests"]
    assert refused > 0
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert f"{refused} of {count} requests are refused, because they need more KV than fits on the GPUs" in output
    row = next(line for line in output.splitlines() if line.startswith("refused "))
    assert row.split()[1:] == [str(run["num_refused"]) for run in runs]


def test_replay_lists_assumed_hardware_values(capsys):
    options = ["synthetic:sessions=2", "--capacities", "0", "--device", "20GiB"]
    assumed = run_json(capsys, "replay", *options, "--gpu", "a100")["setup"]["assumed"]["gpu"]
    assert assumed["link_bandwidth"] == preset(GpuSpec, "a100").link_bandwidth
    assert main(["replay", *options, "--gpu", "a100"]) == 0
    output = capsys.readouterr().out
    assert f"Assumed, without a source: gpu link_bandwidth {assumed['link_bandwidth']:g}, gpu compute_share" in output
    assert "Sources: model: meta-llama/Meta-Llama-3-8B" in output
    assert run_json(capsys, "replay", *options, "--gpu", "h200")["setup"]["assumed"]["gpu"] == {}


def test_replay_of_synthetic_trace_applies_speed_and_replicas(capsys):
    options = ["--capacities", "0", "--jobs", "1", "--device", "20GiB"]
    one = run_json(capsys, "replay", "synthetic:sessions=20,turns=3,seed=9", *options)
    assert one["trace"]["num_requests"] == len(list(generate(SyntheticTrace(sessions=20, turns=3.0, seed=9))))
    fast = run_json(
        capsys, "replay", "synthetic:sessions=20,turns=3,seed=9", *options, "--speed", "4", "--replicas", "2"
    )
    assert fast["trace"]["seconds"] == pytest.approx(one["trace"]["seconds"] / 4)
    assert fast["results"][0]["num_requests"] == one["results"][0]["num_requests"]


def test_replay_reports_and_counts_invalid_lines(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    write_trace(generate(SyntheticTrace(sessions=3)), path)
    path.write_text(path.read_text() + "{]\n" + '{"timestamp": 1}\n' * 9)
    arguments = ["replay", str(path), "--device", "8GiB", "--capacities", "0"]
    assert main([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["trace"]["num_problems"] == 10
    number = path.read_text().splitlines().index("{]") + 1
    assert f"{path}:{number}: not JSON" in output.err
    assert "skipped invalid lines: 10 (5 of them not shown)" in output.err
    assert main([*arguments, "--strict"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "cannot read the trace none.jsonl"),
        (["synthetic:turn=3"], "unknown parameter 'turn' of a synthetic trace; known: sessions"),
        (["synthetic:turns=x"], "turns must be a number, got 'x'"),
        (["synthetic:", "synthetic:"], "cannot be combined"),
        (["synthetic:sessions=2", "--gpu", "h300"], "unknown gpu 'h300'"),
        (["synthetic:sessions=2", "--policy", "mru"], "unknown eviction policy 'mru'"),
        (["synthetic:sessions=2", "--disk", "1TiB"], "through host memory"),
        (["synthetic:sessions=2", "--limit", "0"], "--limit"),
        (["synthetic:turns=nan"], "turns must be finite and at least 1, got nan"),
        (["synthetic:sessions=1e3"], "sessions must be an integer, got '1e3'"),
        (["synthetic:sessions=2", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["synthetic:sessions=2", "--capacities", "1"], "at least two points"),
        (
            ["synthetic:sessions=2", "--capacities", "0", "--host", "1KiB"],
            "1024 bytes of host cannot hold a block of 512",
        ),
        (
            ["synthetic:sessions=2", "--capacities", "0", "--host", "1GiB", "--disk", "1KiB"],
            "1024 bytes of disk cannot hold a block",
        ),
        (
            ["synthetic:sessions=2", "--device", "1GiB", "--capacities", "0", "--html", "/nowhere/r.html"],
            "cannot write the report",
        ),
    ],
)
def test_replay_with_invalid_option_fails_without_traceback(arguments, message, capsys):
    assert main(["replay", *arguments]) == 1
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


def test_size_and_seconds_parse_units():
    assert [size(text) for text in ("40GiB", "1.5TB", "100 mib", "0", "7B")] == [
        40 << 30,
        1_500_000_000_000,
        100 << 20,
        0,
        7,
    ]
    assert [seconds(text) for text in ("2s", "500ms", "1.5", "2min")] == [2.0, 0.5, 1.5, 120.0]
    for wrong in ("40", "GiB", "4 parsecs", "-1GiB", "1.2.3GB"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number and a unit"):
            size(wrong)
    for wrong in ("0s", "fast", "-2s", "2h"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number above 0"):
            seconds(wrong)


def test_replay_with_invalid_size_exits_2(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["replay", "t.jsonl", "--host", "lots"])
    assert exited.value.code == 2
    assert "expected a number and a unit" in capsys.readouterr().err


def test_plan_with_copies_simulates_the_routing_of_a_fleet(files, capsys):
    """`--copies 2` simulates two copies of the trace, each with its own prompts."""
    options = ["plan", *files, "--ttft-p99", "500ms", "--replicas", "3", "--copies", "2"]
    result = run_json(capsys, *options)
    num_requests = len(read_trace(files[0]).requests)
    assert set(result["routing"]) == {"cache", "round robin"}
    assert all(each["num_requests"] == 2 * num_requests for each in result["routing"].values())
    assert result["routing"]["cache"]["hit_rate"] > result["routing"]["round robin"]["hit_rate"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert f"3 replicas of {result['blocks_per_replica']:,} blocks, {2 * num_requests:,} requests" in shown
    assert "the target of 0.5 s" in shown
    assert "one index becomes the bottleneck at" in shown


def test_plan_copies_option_with_html_or_value_0_fails(files, tmp_path, capsys):
    options = ["plan", *files, "--ttft-p99", "500ms", "--copies"]
    assert main([*options, "1", "--html", str(tmp_path / "p.html")]) == 1
    assert "--copies has no HTML report" in capsys.readouterr().err
    assert main([*options, "0"]) == 1
    assert "at least one copy" in capsys.readouterr().err
