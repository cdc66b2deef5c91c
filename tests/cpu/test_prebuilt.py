"""Prebuilt native libraries: engine variants agree with torch, and the best variant for the processor is loaded."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier import native_code
from kvtier.cli.main import main
from kvtier.engine import native as engine
from kvtier.engine.native import EngineNative, pack
from kvtier.memory import native as memory
from kvtier.native_code import X86_VARIANTS, Native, Variant, features, load
from kvtier.storage import checksum as storage
from native_support import prebuilt_folder

only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the variants are for x86-64")


@pytest.fixture
def prebuilt(monkeypatch):
    folder = prebuilt_folder()
    monkeypatch.setenv("KVTIER_NATIVE_DIR", str(folder))
    monkeypatch.setenv("KVTIER_CACHE_DIR", "/dev/null/kvtier")
    monkeypatch.setenv("CC", "/dev/null")
    return folder


def loaded_with(monkeypatch, present: frozenset[str]) -> Native[EngineNative]:
    """Load the native code of the engine as on a processor that has exactly the features `present`."""
    monkeypatch.setattr(native_code, "features", lambda: present)
    return engine.native.__wrapped__()


def test_prebuilt_libraries_are_loaded_without_compiler(prebuilt):
    for module in (engine, memory, storage):
        found = module.native.__wrapped__()
        assert found.code is not None, found.reason
        assert f"prebuilt in {prebuilt}" in found.reason


@only_x86
@pytest.mark.usefixtures("prebuilt")
@pytest.mark.parametrize("variant", X86_VARIANTS, ids=lambda variant: variant.name)
def test_engine_variant_matches_torch(monkeypatch, variant: Variant):
    if not variant.needs <= features():
        pytest.skip(f"this processor has no {', '.join(sorted(variant.needs - features()))}")
    found = loaded_with(monkeypatch, variant.needs)
    assert found.code is not None, found.reason
    assert found.reason.endswith(f"({variant.name})")
    torch.manual_seed(0)
    gguf = pytest.importorskip("gguf")
    weight, rows = torch.randn(48, 96), torch.randn(16, 96)
    for kind in ("Q4_1", "Q8_0", "BF16"):
        raw = weight.bfloat16()
        stored = raw.float()
        if kind != "BF16":
            quantized = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
            raw = torch.from_numpy(quantized)
            stored = torch.from_numpy(gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType[kind]))
        packed = pack(kind, raw)
        assert packed is not None
        for count in (1, 4, 5, 16):
            torch.testing.assert_close(
                found.code.linear(rows[:count], packed), rows[:count] @ stored.T, rtol=1e-4, atol=1e-4
            )
    residual = torch.randn(5, 96)
    expected = torch.nn.functional.rms_norm(residual, (96,), torch.ones(96), 1e-5)
    torch.testing.assert_close(found.code.norm(None, residual.clone(), torch.ones(96), 1e-5), expected)


@only_x86
@pytest.mark.usefixtures("prebuilt")
def test_best_supported_variant_is_chosen_at_run_time(monkeypatch):
    amx, v4_vnni, v4, v3_vnni, v3, _ = X86_VARIANTS
    names = []
    # do not load the library, because this processor may lack some of the features
    monkeypatch.setattr(engine, "EngineNative", lambda path: path)
    vnni = (v4_vnni.needs, v3_vnni.needs)
    for present in (amx.needs, *vnni, v4.needs, v4.needs - {"avx512vl"}, v3.needs - {"fma"}, frozenset()):
        names.append(loaded_with(monkeypatch, present | {"sse2"}).reason.rpartition("(")[2].rstrip(")"))
    assert names == ["amx", "v4-vnni", "v3-vnni", "v4", "v3", "v1", "v1"]


def test_prebuilt_library_of_other_version_is_reported_missing(prebuilt):
    other = replace(memory.SOURCE, flags=(*memory.SOURCE.flags, "-DOTHER"))
    found = load(other, memory.MemoryNative)
    assert found.code is None
    assert f"{prebuilt} has no library of kvtier.memory for this version" in found.reason
    assert "kvtier build-native" in found.reason
    assert "/dev/null/kvtier" in found.reason  # the reason why the library cannot be compiled


def test_missing_prebuilt_library_is_compiled_if_possible(monkeypatch, tmp_path):
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("this machine has no C compiler")
    monkeypatch.setenv("KVTIER_NATIVE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    found = storage.native.__wrapped__()
    if storage.SOURCE.variants:  # there are no variants if this processor is not x86-64
        assert found.code is not None, found.reason
        assert "compiled in" in found.reason


def test_damaged_or_untrusted_prebuilt_library_is_not_used(prebuilt, monkeypatch, tmp_path):
    copy = shutil.copytree(prebuilt, tmp_path / "copy")
    monkeypatch.setenv("KVTIER_NATIVE_DIR", str(copy))
    libraries = list(copy.glob("memory-*.so"))  # several if the folder also has libraries of older sources
    for library in libraries:
        library.chmod(0o777)
    found = memory.native.__wrapped__()
    assert found.code is None
    assert "can be written by others" in found.reason
    for library in libraries:
        library.unlink()
        library.write_bytes(b"\x7fELF, but short")
        library.chmod(0o755)
    found = memory.native.__wrapped__()
    assert found.code is None
    assert "cannot be used" in found.reason


def test_build_native_without_compiler_prints_each_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert main(["build-native", str(tmp_path / "out"), "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["library"] for row in rows} >= {"kvtier.engine", "kvtier.memory"}
    assert all("no-such-compiler failed" in row["error"] for row in rows)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("prebuilt")
def test_prebuilt_checksum_equals_python():
    code = storage.native.__wrapped__().code
    if code is None:
        pytest.skip("the checksum library is for x86-64")
    data = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8).tobytes()
    assert code.checksum(data, len(data)) == storage.checksum_in_python(data)
