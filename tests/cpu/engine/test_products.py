"""Kernels of every instruction set of this processor, compared with torch, and the choice of an instruction set."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from engine_helpers import needs_smollm2
from kvtier.engine import LLM, Engine, load_model
from kvtier.engine import native as module
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.native import ISAS, SAMPLING_ROW, EngineNative, missing_features, native, pack
from kvtier.engine.ops import paged_attention
from kvtier.errors import ArgumentError, UnavailableError

KINDS = ("Q4_0", "Q4_1", "Q8_0", "BF16")
AVX512 = ("AVX512F", "AVX512BW", "AVX512VNNI")
MOST = 127 * 128
"""A product in integer arithmetic rounds each input to k * scale. The integer k is in -MOST .. MOST.

Each block of 32 columns has its own scale.
"""
pytestmark = pytest.mark.skipif(native().code is None, reason=native().reason)


def loaded(monkeypatch, isa: str) -> EngineNative:
    if missing := missing_features(isa):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    monkeypatch.setenv("KVTIER_CPU_ISA", isa)
    code = native.__wrapped__().code
    assert code is not None
    return code


@pytest.fixture(params=("best", *ISAS))
def code(request, monkeypatch) -> EngineNative:
    """Return the kernels of one instruction set. `best` is compiled for the processor of this machine."""
    return native().code if request.param == "best" else loaded(monkeypatch, request.param)


def stored_as(kind: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as checkpoints store it, and its dequantised values."""
    gguf = pytest.importorskip("gguf")
    if kind == "BF16":
        return weight.bfloat16(), weight.bfloat16().float()
    quant = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weight.numpy(), quant)
    return torch.from_numpy(stored), torch.from_numpy(gguf.quants.dequantize(stored, quant))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (80, 160), (208, 576)])
def test_packed_product_equals_dequantised_product(code, kind, shape, threads):
    torch.set_num_threads(threads)
    raw, exact = stored_as(kind, torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    packed = pack(kind, raw)
    # A product with a unit vector selects a column without summing, so every bit must be equal.
    for first in range(0, shape[1], 4):
        columns = torch.eye(shape[1])[first : first + 4]
        assert torch.equal(code.linear(columns, packed), exact[:, first : first + 4].t())
    wide = torch.randn(16, shape[1], generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 16)[:, None]
    right = wide.double() @ exact.double().t()
    for count in range(1, 17):
        unit = wide[:count].double().norm(dim=1, keepdim=True) * exact.double().norm(dim=1)
        error = (code.linear(wide[:count], packed) - right[:count]).abs() / unit
        assert error.max() < 2e-6  # 17 units in the last place (2^-23) of float32


@pytest.mark.parametrize("kind", KINDS)
def test_packed_product_does_not_depend_on_other_rows(code, kind):
    raw, _ = stored_as(kind, torch.randn(48, 96))
    packed, rows = pack(kind, raw), torch.randn(16, 96)
    for counts in (range(1, 5), range(5, 17)):  # with AMX, each range has its own code path
        together = code.linear(rows[: counts[-1]], packed)
        for count in counts:
            assert torch.equal(code.linear(rows[:count], packed), together[:count])
            assert torch.equal(code.linear(rows[:count].flip(0), packed), together[:count].flip(0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_long_product_equals_products_of_16_rows(code, kind, threads):
    torch.set_num_threads(threads)
    raw, _ = stored_as(kind, torch.randn(208, 96))
    for packed in (pack(kind, raw.clone()), pack(kind, raw, integer=True)):
        if packed is None:
            continue  # there are no integer products for BF16
        for count in (17, 31, 32, 33, 150):
            rows = torch.randn(count, 96)
            expected = torch.cat([code.linear(part, packed) for part in rows.split(16)])
            assert torch.equal(code.linear(rows, packed), expected)


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", ""])
def test_long_products_are_native_only_where_torch_is_slower(monkeypatch, vendor):
    monkeypatch.setattr(module, "vendor", lambda: vendor)
    fast = loaded(monkeypatch, "avx512").is_faster
    exact, integer = (pack("Q8_0", stored_as("Q8_0", torch.randn(16, 32))[0], integer=each) for each in (False, True))
    assert fast(16, exact)
    assert fast(16, integer)
    assert fast(17, exact) == (vendor == "AuthenticAMD")
    assert not fast(17, integer)
    assert not loaded(monkeypatch, "avx2").is_faster(17, exact)


@pytest.mark.parametrize("undefined", [("AMX_BF16",), ("AMX_BF16", *AVX512), ("AMX_BF16", *AVX512, "AVXVNNI", "AVX2")])
def test_packed_product_without_amx_or_avx_is_close_to_best_isa(monkeypatch, tmp_path, undefined):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    flags = (*module.SOURCE.local_flags, *(f"-U__{name}__" for name in undefined))
    monkeypatch.setattr(module, "SOURCE", replace(module.SOURCE, local_flags=flags))
    code = module.native.__wrapped__().code
    weight = torch.randn(48, 96)
    for kind in KINDS:
        packed, rows = pack(kind, stored_as(kind, weight)[0]), torch.randn(16, 96)
        together = code.linear(rows, packed)
        torch.testing.assert_close(together, native().code.linear(rows, packed), rtol=1e-5, atol=1e-5)
        one_by_one = torch.cat([code.linear(row[None], packed) for row in rows])
        assert torch.equal(one_by_one, together)  # the order of the sums does not depend on the number of rows


def rounded(x: np.ndarray) -> np.ndarray:
    """Round inputs as integer products do. The scale of a block of 32 columns is its largest absolute value / MOST."""
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(MOST), most, out=np.zeros_like(most), where=most > 1e-30)
    steps = np.rint(blocks * inverse).astype(np.float64)
    return (steps * (most / np.float32(MOST))).reshape(x.shape)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (80, 160), (208, 576)])
def test_integer_product_equals_product_of_rounded_input(code, kind, shape, threads):
    torch.set_num_threads(threads)
    raw, exact = stored_as(kind, torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    packed, weight = pack(kind, raw, integer=True), exact.double().numpy()
    assert packed.is_integer
    wide = torch.randn(16, shape[1], generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 16)[:, None]
    wide[3, :32], wide[4, 5] = 0, 1e6  # a block of zeros, and an outlier
    right = rounded(wide.numpy()) @ weight.T
    lengths = np.linalg.norm(wide.double().numpy(), axis=1, keepdims=True).clip(1e-30)  # not 0 for a row of zeros
    unit = lengths * np.linalg.norm(weight, axis=1)
    for count in range(1, 17):
        actual = code.linear(wide[:count], packed).numpy()
        # 2e-6 is 17 units in the last place (2^-23) of float32
        assert (np.abs(actual - right[:count]) / unit[:count]).max() < 2e-6
        assert (np.abs(actual - (wide.double().numpy() @ weight.T)[:count]) / unit[:count]).max() < 1e-4


def test_integer_product_of_extreme_bytes_is_exact(code):
    """Sums of the largest products of bytes must not saturate.

    Each row of a matrix has 32 elements. In Q4_1, every element has the value 15. In Q8_0, the values -128 and 127
    alternate. Every input is MOST or -MOST.
    """
    elements = np.array([-128, 127] * 16, np.int8)
    one = np.float16(1).tobytes()
    q8 = torch.from_numpy(np.frombuffer((one + elements.tobytes()) * 16, np.uint8).reshape(16, 34).copy())
    q4 = torch.from_numpy(
        np.frombuffer((one + np.float16(0).tobytes() + b"\xff" * 16) * 16, np.uint8).reshape(16, 20).copy()
    )
    for sign in (1.0, -1.0):
        x = torch.full((1, 32), sign * MOST)
        assert code.linear(x, pack("Q4_1", q4.clone(), integer=True)).tolist() == [[sign * 32 * 15 * MOST] * 16]
        same_signs = x * torch.from_numpy(np.sign(elements).astype(np.float32))  # all products have the same sign
        expected = sign * 16 * (128 + 127) * MOST
        assert code.linear(same_signs, pack("Q8_0", q8, integer=True)).tolist() == [[expected] * 16]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_integer_product_does_not_depend_on_other_rows(code, kind):
    raw, _ = stored_as(kind, torch.randn(48, 96))
    packed, rows = pack(kind, raw, integer=True), torch.randn(16, 96)
    together = code.linear(rows, packed)
    for count in range(1, 17):
        assert torch.equal(code.linear(rows[:count], packed), together[:count])
        assert torch.equal(code.linear(rows[:count].flip(0), packed), together[:count].flip(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_integer_product_of_nonfinite_row_is_nan(code, value):
    raw, _ = stored_as("Q4_1", torch.randn(16, 64))
    rows = torch.ones(2, 64)
    rows[1, 40] = value
    actual = code.linear(rows, pack("Q4_1", raw, integer=True))
    assert actual[0].isfinite().all()
    assert actual[1].isnan().all()


def test_concurrent_products_equal_single_products(code):
    """While one caller uses the worker threads, any other caller computes on its own thread only."""
    torch.set_num_threads(2)
    raw, _ = stored_as("Q8_0", torch.randn(512, 576))
    packed, rows = pack("Q8_0", raw), torch.randn(4, 576)
    expected = code.linear(rows, packed)
    with ThreadPoolExecutor(3) as executor:
        found = list(executor.map(lambda _: code.linear(rows, packed), range(300)))
    assert all(torch.equal(each, expected) for each in found)


def test_products_in_forked_child_equal_parent(code):
    """Threads do not survive a fork, so a child starts new ones."""
    torch.set_num_threads(2)
    raw, _ = stored_as("Q8_0", torch.randn(512, 576))
    packed, rows = pack("Q8_0", raw), torch.randn(1, 576)
    expected = code.linear(rows, packed)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(code.linear(rows, packed), expected) for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_smollm2
def test_integer_model_has_namespace_of_its_own():
    exact, rounding = (load_model(products=each) for each in ("exact", "integer"))
    assert rounding.weights.arithmetic == "torch.float32 with integer products"
    keys = {Engine(each).manager.namespace.fingerprint for each in (exact, rounding)}
    assert len(keys) == 2


def test_integer_products_without_quantised_matrix_raise(checkpoint):
    folder, _ = checkpoint("llama")
    with pytest.raises(UnavailableError, match="no matrix is stored as Q8_0"):
        load_model(folder, products="integer")
    with pytest.raises(ArgumentError, match="use one of exact, integer"):
        load_model(folder, products="int4")


def test_integer_products_with_invariant_mode_raise():
    with pytest.raises(ArgumentError, match="do not support invariant mode or tensor_parallel"):
        LLM(products="integer", invariant=True)


def test_pack_returns_none_for_unsupported_matrix():
    assert pack("Q6_K", torch.zeros(16, 210, dtype=torch.uint8)) is None
    assert pack("BF16", torch.zeros(17, 32, dtype=torch.bfloat16)) is None
    assert pack("BF16", torch.zeros(16, 33, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 576])
def test_norm_and_gate_of_every_isa_equal_torch(code, dim):
    generator = torch.Generator().manual_seed(dim)
    x, residual, weight = (torch.randn(*shape, generator=generator) for shape in ((5, dim), (5, dim), (dim,)))
    summed = residual.clone()
    torch.testing.assert_close(code.norm(x, summed, weight, 1e-5), rms_norm(x + residual, (dim,), weight, 1e-5))
    torch.testing.assert_close(summed, x + residual)
    gate_up = torch.randn(5, 2 * dim, generator=generator) * 20
    torch.testing.assert_close(code.gate(gate_up), silu(gate_up[:, :dim]) * gate_up[:, dim:])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 48), (8, 1, 128)])
def test_decode_attention_of_every_isa_equals_torch(code, heads, kv_heads, dim):
    generator = torch.Generator().manual_seed(dim)
    lengths = torch.tensor([1, 15, 16, 33, 70], dtype=torch.int32)
    cache = torch.randn(40, 2, 4, kv_heads, dim, generator=generator)
    q = torch.randn(5, heads, dim, generator=generator)
    tables = torch.randint(0, 40, (5, 18), generator=generator, dtype=torch.int32)
    actual = code.attend(q, cache, tables, lengths, 70)
    for row, length in enumerate(lengths.tolist()):
        keys, values = cache[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = (each.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for each in (keys, values))
        expected = (q[row, :, None] @ keys.transpose(1, 2) * dim**-0.5).softmax(-1) @ values
        torch.testing.assert_close(actual[row], expected[:, 0], rtol=1e-4, atol=1e-5)


def test_draw_of_every_isa_equals_draw_of_best_isa(code):
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 3, (64, 1024)).astype(np.float32))
    params = np.zeros(64, SAMPLING_ROW)
    params["temperature"], params["uniform"] = random.uniform(0.3, 1.5, 64), random.uniform(0, 1, 64)
    params["top_p"] = np.where(np.arange(64) % 2, 1.0, 0.9)
    best = native().code
    assert torch.equal(code.draw(logits.clone(), params), best.draw(logits.clone(), params))


def test_unknown_isa_raises(monkeypatch):
    monkeypatch.setenv("KVTIER_CPU_ISA", "sse9")
    with pytest.raises(ArgumentError, match=r"'sse9'; use avx2, avx2_vnni, avx512, avx512_vnni, amx"):
        native.__wrapped__()


def test_isa_without_processor_support_raises_with_features(monkeypatch):
    monkeypatch.setenv("KVTIER_CPU_ISA", "avx512")
    monkeypatch.setattr(module, "features", lambda: frozenset({"avx", "avx2"}))
    with pytest.raises(UnavailableError, match=r"KVTIER_CPU_ISA=avx512 needs a processor with .*avx512f"):
        native.__wrapped__()


def test_forced_isa_without_compiler_raises(monkeypatch, tmp_path):
    if missing_features("avx2"):
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("KVTIER_CPU_ISA", "avx2")
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(UnavailableError, match="no kernels for KVTIER_CPU_ISA=avx2: compiling with"):
        native.__wrapped__()


def test_each_forced_isa_has_its_own_library(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    for isa in ISAS:
        if not missing_features(isa):
            loaded(monkeypatch, isa)
    assert len(list(tmp_path.glob("engine-*.so"))) == sum(not missing_features(isa) for isa in ISAS)


def gcc_version() -> tuple[int, ...]:
    """Return the version of gcc, or an empty tuple if it is not installed."""
    if shutil.which("gcc") is None:
        return ()
    text = subprocess.run(
        ["gcc", "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout
    return tuple(map(int, text.strip().split(".")))


def random_chunk(heads: int, kv_heads: int, dim: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries for all tokens of a sequence, a filled cache of one layer, and the block table of the sequence."""
    generator = torch.Generator().manual_seed(context)
    num_blocks = -(-context // 16) + 3
    cache = torch.randn(num_blocks, 2, 16, kv_heads, dim, generator=generator)
    qkv = torch.randn(context, heads + 2 * kv_heads, dim, generator=generator)
    return qkv[:, :heads], cache, torch.randperm(num_blocks, generator=generator).int()


def attend_chunk(code: EngineNative, q: Tensor, cache: Tensor, table: Tensor, context: int) -> Tensor:
    out = torch.full(q.shape, torch.nan)
    code.attend_chunk(q, cache, table, context, out)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 80), (100, 1, 16), (2, 1, 256)])
def test_chunk_attention_equals_plain_attention(code, shape, threads):
    torch.set_num_threads(threads)
    for count, context in ((1, 1), (1, 64), (2, 65), (5, 300), (33, 33), (70, 200), (129, 129)):
        q, cache, table = random_chunk(*shape, context)
        q = q[context - count :]
        inputs = [SequenceInput([0] * count, context - count, table.tolist())]
        batch = ForwardBatch.build(inputs, 16, torch.device("cpu"))
        expected = paged_attention(q, cache, batch)
        torch.testing.assert_close(attend_chunk(code, q, cache, table, context), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunk_attention_does_not_depend_on_the_chunks(code, threads):
    torch.set_num_threads(threads)
    check_chunks(code)


@pytest.mark.skipif(gcc_version() < (9,), reason="needs gcc 9")
def test_chunk_attention_ignores_fma_default_of_compiler(monkeypatch, tmp_path):
    """For some processors, gcc 13 avoids fused multiply-add in loops with a single sum.

    Here, CC has an option that always avoids it. The flags of kvtier override this option.
    """
    monkeypatch.setenv("CC", "gcc --param=avoid-fma-max-bits=512")
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    check_chunks(native.__wrapped__().code)


def check_chunks(code: EngineNative) -> None:
    """Check that attention computed in chunks equals attention of the whole prompt, bit for bit."""
    q, cache, table = random_chunk(6, 2, 32, 150)
    whole = attend_chunk(code, q, cache, table, 150)
    for chunk in (1, 7, 64, 149):
        parts = [
            attend_chunk(code, q[first : first + chunk], cache, table, min(first + chunk, 150))
            for first in range(0, 150, chunk)
        ]
        assert torch.equal(torch.cat(parts), whole)
