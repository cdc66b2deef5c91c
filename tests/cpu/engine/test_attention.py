"""Fast attention and native code on the CPU return the same results as plain torch code, for random block tables."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.native import native
from kvtier.engine.ops import CpuOps, Heads, TorchOps, fast_paged_attention, paged_attention
from kvtier.native_code import Native

CPU = torch.device("cpu")


def paged(seed, lengths, *, heads=(6, 2), dim=32, block_tokens=4):
    """Return (q, k, v) of each sequence, the Heads of the batch, a filled cache of one layer, and the ForwardBatch."""
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    blocks = random.permutation(sum(-(-(a + b) // block_tokens) for a, b in lengths) + 2).tolist()
    cache = torch.randn(len(blocks), 3, 2, block_tokens, kv_heads, dim, generator=generator)[:, 1]
    inputs, whole, flat = [], [], []
    for computed, new in lengths:
        table = [blocks.pop() for _ in range(-(-(computed + new) // block_tokens))]
        q = torch.randn(new, num_heads, dim, generator=generator)
        keys, values = torch.randn(2, computed + new, kv_heads, dim, generator=generator)
        for at in range(computed + new):
            cache[table[at // block_tokens], 0, at % block_tokens] = keys[at]
            cache[table[at // block_tokens], 1, at % block_tokens] = values[at]
        inputs.append(SequenceInput([0] * new, computed, table))
        whole.append((q, keys, values))
        flat.append(torch.cat([q, keys[computed:], values[computed:]], dim=1))
    parts = Heads.split(torch.cat(flat).flatten(1), num_heads, kv_heads)
    return whole, parts, cache, ForwardBatch.build(inputs, block_tokens, CPU)


def masked_attention(q, keys, values):
    """Compute attention with torch and a causal mask. Each query head gets a copy of its keys and values."""
    group = q.shape[1] // keys.shape[1]
    mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
    q, keys, values = (
        each.transpose(0, 1) for each in (q, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1))
    )
    return scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)[0].transpose(0, 1)


# numbers of computed and new tokens of each sequence
LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.just(1) | st.integers(1, 20)), min_size=1, max_size=4)
DECODING = st.lists(st.tuples(st.integers(0, 90), st.just(1)), min_size=1, max_size=5)
HEADS = st.sampled_from([(6, 2), (4, 4), (3, 1), (32, 1)])


@given(
    lengths=LENGTHS | DECODING,
    heads=HEADS,
    dim=st.sampled_from([16, 24, 32, 64]),
    block_tokens=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
    compiled=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_paged_attention_equals_masked_attention(lengths, heads, dim, block_tokens, seed, compiled):
    whole, parts, cache, batch = paged(seed, lengths, heads=heads, dim=dim, block_tokens=block_tokens)
    expected = torch.cat([masked_attention(*each) for each in whole])
    torch.testing.assert_close(paged_attention(parts.q, cache, batch), expected, rtol=1e-4, atol=1e-5)
    fast = fast_paged_attention(parts, cache, batch, native().code if compiled else None)
    torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_paged_attention_with_threads_equals_masked_attention(threads):
    torch.set_num_threads(threads)
    for lengths in ([(70, 1)], [(5, 1), (90, 1), (0, 1)]):
        whole, parts, cache, batch = paged(0, lengths)
        expected = torch.cat([masked_attention(*each) for each in whole])
        actual = fast_paged_attention(parts, cache, batch, native().code)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_ignores_table_entries_after_last_block(compiled):
    whole, parts, cache, batch = paged(0, [(5, 1), (90, 1), (0, 9), (70, 9), (200, 40)])
    for table, context in zip(batch.block_tables, batch.contexts, strict=True):
        # in a running engine, entries after a row's last block can be left over from an earlier sequence
        table[-(-context // cache.shape[2]) :] = 1 << 30
    expected = torch.cat([masked_attention(*each) for each in whole])
    torch.testing.assert_close(paged_attention(parts.q, cache, batch), expected, rtol=1e-4, atol=1e-5)
    fast = fast_paged_attention(parts, cache, batch, native().code if compiled else None)
    torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-5)


needs_compiler = pytest.mark.skipif(native().code is None, reason=native().reason)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_native_norm_silu_and_rope_equal_torch(threads):
    torch.set_num_threads(threads)
    fast, plain = CpuOps(), TorchOps()
    x, residual, weight = torch.randn(5, 96) * 4, torch.randn(5, 96), torch.randn(96)
    expected = plain.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(fast.add_rms_norm(x, residual.clone(), weight, 1e-5), expected)
    torch.testing.assert_close(fast.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    gate_up = torch.cat([torch.linspace(-120, 120, 64), torch.randn(64)])[None].repeat(3, 1)
    torch.testing.assert_close(fast.silu_mul(gate_up), plain.silu_mul(gate_up))
    _, parts, cache, batch = paged(3, [(9, 7), (0, 3)], dim=64)
    cos, sin = torch.rand(2, 10, 32)
    copy, copied = Heads.split(parts.qkv.flatten(1).clone(), 6, 2), cache.clone()
    plain.rotate_and_store(parts, cos, sin, cache, batch)
    fast.rotate_and_store(copy, cos, sin, copied, batch)
    torch.testing.assert_close(copy.qkv, parts.qkv)
    torch.testing.assert_close(copied, cache)


def test_model_without_compiler_computes_same_logits(monkeypatch, checkpoint):
    from engine_driver import Driver
    from kvtier.engine import load_model, ops

    folder, _ = checkpoint("llama")
    expected = Driver(load_model(folder), 1, 32).step({0: [5, 6, 7]})[0]
    monkeypatch.setattr(ops, "native", lambda: Native(None, "no compiler"))
    driver = Driver(load_model(folder), 1, 32)
    actual = torch.cat([driver.step({0: [token]})[0] for token in (5, 6, 7)])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_native_without_working_compiler_reports_reason(monkeypatch, tmp_path):
    from kvtier.engine import native as module

    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    actual = module.native.__wrapped__()
    assert actual.code is None
    assert "compiling with /nonexistent/cc failed" in actual.reason
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler found" in module.native.__wrapped__().reason
