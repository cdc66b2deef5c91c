"""Hardware specs from presets, files and the output of `kvtier doctor`. Invalid specs raise errors."""

from __future__ import annotations

import json

import pytest

from kvtier.errors import ArgumentError, RangeError
from kvtier.replay.cost import Roofline, Work
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, PriceSpec, from_doctor, preset, presets

# KV bytes per token and number of parameters from the model cards
KNOWN = {
    "llama-3-8b": (131_072, 8.03e9),
    "llama-3-70b": (327_680, 70.6e9),
    "qwen3-8b": (147_456, 8.2e9),
    "smollm2-135m": (23_040, 134.5e6),
    "deepseek-v3": (70_272, 671e9),
}
DOCTOR = {
    "kvtier": "0",
    "measured": {"cuda:0": {"name": "NVIDIA X", "memory_bytes": 5e10, "link_gbs": {"to host": 20, "to device": 24}}},
}


@pytest.mark.parametrize(("kind", "count"), [(ModelSpec, 6), (GpuSpec, 6), (DiskSpec, 6), (PriceSpec, 1)])
def test_every_preset_loads_and_names_its_source(kind, count):
    found = presets(kind)
    assert len(found) >= count
    assert all(spec.source for spec in found.values())
    assert all(preset(kind, name) == spec for name, spec in found.items())


@pytest.mark.parametrize("name", KNOWN)
def test_model_presets_match_model_cards(name):
    model = preset(ModelSpec, name)
    assert (model.token_bytes, model.params) == KNOWN[name]
    if not model.kv_elements:
        # The number of attention parameters is the left side times twice the hidden size, so the left side alone must
        # be below the number of all parameters.
        assert model.layers * model.head_dim * (model.heads + model.kv_heads) < model.params


def prefill(first: int, count: int) -> Work:
    return Work(1, count, count * (first + count / 2), first + count)


@pytest.mark.parametrize(
    ("works", "milliseconds"),
    [
        ([prefill(0, 8192)], 219.8),
        ([*(prefill(8192 * i, 8192) for i in range(4)), prefill(32768, 256)], 1530),
        ([Work(64, 64, 64 * 1250, 64 * 1250)], 13.2),
    ],
)
def test_h200_preset_reproduces_measured_times(works, milliseconds):
    """The preset was fitted to records in benchmarks/results/engine_gpu.jsonl and tiers_gpu.jsonl."""
    cost = Roofline(preset(ModelSpec, "llama-3-8b"), preset(GpuSpec, "h200"))
    assert sum(cost.seconds(work) for work in works) * 1e3 == pytest.approx(milliseconds, rel=0.03)
    assert not preset(GpuSpec, "h200").assumed


def test_gpu_presets_are_complete():
    assert {"h200", "h100", "a100", "l40s", "4090", "cpu"} <= set(presets(GpuSpec))


def test_preset_reads_toml_and_json_files(tmp_path):
    (tmp_path / "d.toml").write_text("read_bandwidth = 3e9\nwrite_bandwidth = 1e9\n")
    assert preset(DiskSpec, str(tmp_path / "d.toml")) == DiskSpec(3e9, 1e9)
    (tmp_path / "d.json").write_text('{"read_bandwidth": 3e9, "write_bandwidth": 1e9}')
    assert preset(DiskSpec, str(tmp_path / "d.json")) == DiskSpec(3e9, 1e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("read = 1", "unknown key of DiskSpec: read; known keys: assumed, latency_seconds, name, read_bandwidth"),
        ("read_bandwidth = 1e9", "missing 1 required positional argument: 'write_bandwidth'"),
        ("read_bandwidth = 0\nwrite_bandwidth = 1", "read_bandwidth must be above 0, got 0"),
        ('read_bandwidth = "x"\nwrite_bandwidth = 1', "must be above 0, got 'x'"),
        ("read_bandwidth =", "is not valid TOML"),
        ('read_bandwidth = 1\nwrite_bandwidth = 1\nassumed = ["speed"]', "assumed must be a list of keys of DiskSpec"),
        ("read_bandwidth = 1\nwrite_bandwidth = 1\nlatency_seconds = -1", "latency_seconds must be 0 or more, got -1"),
    ],
)
def test_invalid_preset_file_raises_error_with_reason(tmp_path, text, message):
    (tmp_path / "d.toml").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        preset(DiskSpec, str(tmp_path / "d.toml"))


def test_unknown_or_unreadable_preset_raises(tmp_path):
    with pytest.raises(ArgumentError, match="unknown gpu 'h300'; use one of 4090, a100, "):
        preset(GpuSpec, "h300")
    with pytest.raises(ArgumentError, match=r"cannot read .*none.toml: No such file"):
        preset(GpuSpec, str(tmp_path / "none.toml"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ArgumentError, match="must contain one table, got list"):
        preset(GpuSpec, str(tmp_path / "list.json"))


def test_from_doctor_applies_measured_memory_and_link(tmp_path):
    (tmp_path / "doctor.json").write_text(json.dumps(DOCTOR))
    found = from_doctor(tmp_path / "doctor.json", preset(GpuSpec, "h100"))
    assert (found.name, found.memory_bytes, found.link_bandwidth) == ("NVIDIA X", 5e10, 20e9)
    assert found.flops == preset(GpuSpec, "h100").flops
    assert "doctor.json" in found.source
    assert "link_bandwidth" not in from_doctor(tmp_path / "doctor.json", preset(GpuSpec, "a100")).assumed


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"kvtier": "0"}, "has no GPU"),
        ({"measured": {"cuda:0": {"name": "X"}}}, "lacks a field of kvtier doctor --json for cuda:0: KeyError"),
        ({"measured": {"cuda:0": {"name": "X", "memory_bytes": 1, "link_gbs": {}}}}, "the link was not measured"),
    ],
)
def test_from_doctor_without_measurement_raises(tmp_path, document, message):
    (tmp_path / "doctor.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=message):
        from_doctor(tmp_path / "doctor.json", preset(GpuSpec, "h100"))


def test_spec_of_several_gpus_multiplies_compute_memory_and_link():
    one = preset(GpuSpec, "h100")
    four = one.times(4)
    assert (four.flops, four.memory_bytes, four.link_bandwidth) == (4 * one.flops, 4 * one.memory_bytes, 4 * 55e9)
    with pytest.raises(RangeError, match="at least one GPU"):
        one.times(0)
    with pytest.raises(RangeError, match="step_seconds"):
        GpuSpec(1, 1, 1, 1, step_seconds=-1)
