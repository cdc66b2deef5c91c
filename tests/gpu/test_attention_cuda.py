"""CUDA kernels and captured decode steps, compared with plain torch on random block tables."""

import dataclasses

import numpy as np
import pytest
import torch

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.ops import Heads, TorchOps, paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = torch.device("cuda")
TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def paged(seed, lengths, *, heads=(6, 2), dim=64, block_tokens=16, dtype=torch.float32, device=GPU):
    """Return random queries, keys and values, one layer of a random cache, and a batch with random block tables.

    For each sequence, `lengths` contains the number of computed tokens and the number of new tokens.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = random.permutation(sum(-(-(a + b) // block_tokens) for a, b in lengths) + 2).tolist()
    options = {"generator": generator, "device": device, "dtype": dtype}
    cache = torch.randn(len(blocks), 3, 2, block_tokens, heads[1], dim, **options)[:, 1]
    inputs = []
    for computed, new in lengths:
        table = [blocks.pop() for _ in range(-(-(computed + new) // block_tokens))]
        inputs.append(SequenceInput([0] * new, computed, table))
    batch = ForwardBatch.build(inputs, block_tokens, device)
    qkv = torch.randn(len(batch.input_ids), (heads[0] + 2 * heads[1]) * dim, **options)
    return Heads.split(qkv, *heads), cache, batch


MIXES = {
    "one prompt": [(0, 300)],
    "decode": [(0, 1), (15, 1), (16, 1), (1000, 1), (37, 1)],
    "chunks and decode": [(0, 130), (100, 1), (64, 64), (511, 200), (3, 2)],
    "long prefixes": [(9000, 40), (700, 3), (0, 5), (2047, 33)],  # long enough for the kernel to split the keys
    "many rows": [(at * 7 % 190, 1) for at in range(300)],  # so many that the kernel does not split the keys
}
SHAPES = [((6, 2), 64), ((32, 8), 128), ((4, 4), 32), ((9, 3), 64), ((16, 1), 128), ((5, 1), 48)]
BLOCK_SIZES = (16, 4, 64)

# Every case compiles new kernels, because data type, heads, head size, block size and number of splits are compile-time
# constants. bfloat16 is tested with four mixes and every shape, float16 with the cases of FEW, and float32 with four of
# these cases. Products in float32 are unrolled, so they take much longer to compile. Prefills with a head size of 128
# take the longest.
FEW = [
    ("one prompt", SHAPES[1], 16),
    ("one prompt", SHAPES[5], 4),
    ("decode", SHAPES[4], 64),
    ("decode", SHAPES[0], 16),
    ("chunks and decode", SHAPES[2], 4),
    ("chunks and decode", SHAPES[3], 64),
    ("long prefixes", SHAPES[0], 64),
    ("long prefixes", SHAPES[2], 16),
    ("many rows", SHAPES[1], 16),
]
CASES = [
    (torch.bfloat16, mix, shape, BLOCK_SIZES[(i + j) % 3])
    for i, mix in enumerate(["one prompt", "decode", "chunks and decode", "long prefixes"])
    for j, shape in enumerate(SHAPES)
]
CASES += [(torch.float16, *case) for case in FEW]
CASES += [(torch.float32, *FEW[index]) for index in (1, 2, 4, 6)]


@pytest.mark.parametrize(("dtype", "mix", "shape", "block_tokens"), CASES, ids=str)
def test_paged_attention_kernel_matches_reference(dtype, mix, shape, block_tokens):
    from kvtier.engine.ops_triton import triton_paged_attention

    heads, dim = shape
    for seed in range(2):
        parts, cache, batch = paged(seed, MIXES[mix], heads=heads, dim=dim, block_tokens=block_tokens, dtype=dtype)
        result = triton_paged_attention(parts.q, cache, batch)
        expected = paged_attention(parts.q, cache, batch)
        torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


LONG_MIXES = {
    "first chunks": [(0, 300), (0, 129), (0, 64)],
    "cached prefixes": [(700, 300), (17, 100), (1024, 512), (1, 65)],
    "long and short": [(5, 1), (900, 1), (333, 200), (0, 9), (64, 130), (2047, 33)],
}
LONG_CASES = [(torch.bfloat16, mix, shape) for mix in LONG_MIXES for shape in (((32, 8), 128), ((6, 2), 64))]
LONG_CASES += [(torch.float16, "cached prefixes", shape) for shape in (((4, 4), 128), ((5, 1), 64))]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize(("dtype", "mix", "shape"), LONG_CASES, ids=str)
def test_attention_of_long_chunks_matches_reference(dtype, mix, shape):
    from kvtier.engine.ops_triton import TritonOps
    from kvtier.engine.ops_triton_long import supports_long

    parts, cache, batch = paged(0, LONG_MIXES[mix], heads=shape[0], dim=shape[1], dtype=dtype)
    assert supports_long(parts.q, shape[0][1])
    expected = paged_attention(parts.q, cache, batch).flatten(1)
    # every chunk of at least 64 queries uses the kernel for long chunks
    result = TritonOps(long_limits=(64, 64 * 64)).attend(parts, cache, batch)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_gather_ignores_table_entries_after_the_last_block():
    from kvtier.engine.ops_triton_long import gather

    _, cache, batch = paged(3, [(100, 27), (0, 1)], dtype=torch.bfloat16)
    table = batch.block_tables[0].clone()  # the first sequence has 127 tokens
    result = gather(cache, torch.cat([table, table.new_full((9,), 1 << 30)]), 127)[:, :127]
    assert torch.equal(result, cache[table.long()].transpose(0, 1).flatten(1, 2)[:, :127])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_ops_match_torch_ops(dtype):
    from kvtier.engine.ops_triton import TritonOps

    fast, plain, tolerance = TritonOps(), TorchOps(), {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    x, residual = torch.randn(2, 7, 576, device=GPU, dtype=dtype)
    weight, gate_up = torch.randn(576, device=GPU, dtype=dtype), torch.randn(7, 3072, device=GPU, dtype=dtype)
    expected = plain.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(fast.add_rms_norm(x, residual.clone(), weight, 1e-5), expected, **tolerance)
    torch.testing.assert_close(fast.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), **tolerance)
    torch.testing.assert_close(fast.silu_mul(gate_up), plain.silu_mul(gate_up), **tolerance)
    parts, cache, batch = paged(0, [(9, 7), (0, 3)], dtype=dtype)
    norm = torch.randn(64, device=GPU, dtype=dtype)
    torch.testing.assert_close(fast.rms_norm(parts.k, norm, 1e-5), plain.rms_norm(parts.k, norm, 1e-5), **tolerance)
    cos, sin = torch.rand(2, 10, 32, device=GPU, dtype=dtype)
    copy, copied = Heads.split(parts.qkv.flatten(1).clone(), 6, 2), cache.clone()
    plain.rotate_and_store(parts, cos, sin, cache, batch)
    fast.rotate_and_store(copy, cos, sin, copied, batch)
    torch.testing.assert_close(copy.qkv, parts.qkv, **tolerance)
    torch.testing.assert_close(copied, cache, **tolerance)
    without_slots = dataclasses.replace(batch, slots=torch.full_like(batch.slots, -1))
    fast.rotate_and_store(copy, cos, sin, copied, without_slots)
    torch.testing.assert_close(copied, cache, **tolerance)


def test_captured_attention_reads_tables_at_replay():
    from kvtier.engine.ops_triton import TritonOps

    ops = TritonOps()
    parts, cache, batch = paged(0, [(99, 1), (40, 1), (7, 1)])
    ops.attend(parts, cache, batch)  # compile before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attend(parts, cache, batch)
    other, other_cache, other_batch = paged(1, [(80, 1), (9, 1), (30, 1)])
    assert other_cache.shape[0] <= cache.shape[0]
    cache[: other_cache.shape[0]].copy_(other_cache)
    parts.qkv.copy_(other.qkv)
    batch.context_lens.copy_(other_batch.context_lens)
    batch.block_tables[:, : other_batch.block_tables.shape[1]].copy_(other_batch.block_tables)
    graph.replay()
    torch.cuda.synchronize()
    expected = paged_attention(other.q, other_cache, other_batch).flatten(1)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-4)


def test_decode_graph_logits_match_plain_step():
    from benchmarks.random_weights import random_weights

    from kvtier.engine.graph import DecodeGraphs
    from kvtier.engine.model import Model
    from kvtier.engine.model_config import ModelConfig
    from kvtier.engine.params import SamplingParams
    from kvtier.engine.rows import DeviceRows
    from kvtier.engine.sampling import RequestSampler
    from kvtier.memory import BatchCopy
    from kvtier.state import Permutation

    config = ModelConfig("qwen3", 3, 128, 256, 8, 2, 64, 500, 512)
    model = Model(config, random_weights(config, torch.float32, GPU))
    plain = Model(config, model.weights, TorchOps())
    cache = model.new_cache(64, 16)
    prompts = [SequenceInput(list(range(5, 5 + 40 * i + 9)), 0, range(1 + 10 * i, 11 + 10 * i)) for i in range(3)]
    start = ForwardBatch.build(prompts, 16, GPU)
    logits = model.logits(model.forward(start, cache))
    torch.testing.assert_close(logits, plain.logits(plain.forward(start, cache.clone())), rtol=1e-3, atol=1e-3)
    rows = DeviceRows(8, 12, 64, 16, config.vocab_size, GPU, 1)
    graphs = DecodeGraphs(model, cache, rows, batch_sizes=[1, 4, 8])
    greedy = RequestSampler(SamplingParams(temperature=0.0)).resident.tolist()
    for at, prompt in enumerate(prompts):
        rows.heads.front[at] = torch.tensor([7 + at, len(prompt.token_ids), *greedy], device=GPU)
        rows.tables.front[at, :10] = torch.tensor(list(prompt.block_table), dtype=torch.int32, device=GPU)
    for step in range(20):
        if step % 4 == 3:  # reorder the rows, which swaps the front and back tensors of `heads` and `tables`
            with BatchCopy() as copy:
                rows.heads.warp(Permutation([1, 0, 2], 3), copy)
                rows.tables.append(Permutation([1, 0, 2], 3), [10] * 3, ([], [], []), rows.tables.back, copy)
            prompts = [prompts[1], prompts[0], prompts[2]]
        count = 1 + step % 3
        heads = rows.heads.front[:count].tolist()
        inputs = [
            SequenceInput([head[0]], head[1], each.block_table) for head, each in zip(heads, prompts, strict=False)
        ]
        expected = plain.logits(plain.forward(ForwardBatch.build(inputs, 16, GPU), cache.clone()))
        logits, tokens = graphs.run(count)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert tokens.tolist() == logits.argmax(-1).tolist()
        written = rows.heads.front[:count, :2].tolist()
        assert written == [[token, head[1] + 1] for token, head in zip(tokens.tolist(), heads, strict=True)]
    with pytest.raises(ValueError, match="at least 1"):
        DecodeGraphs(model, cache, rows, [])
