"""Attention of long chunks, split into a call over cached keys and a causal call, equals the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.ops import Heads, paged_attention
from kvtier.engine.ops_long import attend_split, long_parts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class PlainKernel:
    """Computes in float32 with plain torch. Checks the shapes that the split promises."""

    def __init__(self, granule):
        self.granule = granule

    def gather(self, cache, table, context, size):
        chosen = cache[table[: -(-context // cache.shape[2])]].transpose(0, 1).flatten(1, 2)[:, :context]
        keys, values = pad(chosen, (0, 0, 0, 0, 0, size - context))
        return keys, values

    def run(self, q, k, v, *, causal):
        assert len(q) % self.granule == len(k) % self.granule == 0
        assert len(v) == len(k)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[2] ** -0.5
        if causal:
            assert len(q) == len(k)
            scores.masked_fill_(~torch.ones(len(q), len(k), dtype=torch.bool).tril(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1)

    def merge(self, first, second):
        (a, a_log), (b, b_log) = first, second
        return torch.lerp(b.float(), a.float(), torch.sigmoid(a_log - b_log).T.unsqueeze(-1)).to(a.dtype)


def paged(seed, lengths, heads, block_tokens, dtype):
    """Return random queries, one layer of a random cache, and a batch with random block tables."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    blocks = random.permutation(sum(-(-(a + b) // block_tokens) for a, b in lengths) + 2).tolist()
    cache = torch.randn(len(blocks), 3, 2, block_tokens, heads[1], 16, generator=generator).to(dtype)[:, 1]
    inputs = [
        SequenceInput([0] * new, old, [blocks.pop() for _ in range(-(-(old + new) // block_tokens))])
        for old, new in lengths
    ]
    batch = ForwardBatch.build(inputs, block_tokens, torch.device("cpu"))
    qkv = torch.randn(len(batch.input_ids), (heads[0] + 2 * heads[1]) * 16, generator=generator).to(dtype)
    return Heads.split(qkv, *heads).q, cache, batch


@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.just(1) | st.integers(1, 60)), min_size=1, max_size=5),
    limits=st.tuples(st.integers(2, 40), st.integers(1, 90)),
    heads=st.sampled_from([(6, 2), (4, 4), (3, 1)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    granule=st.sampled_from([1, 8, 32, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_split_attention_of_long_parts_equals_paged_attention(
    lengths, limits, heads, block_tokens, granule, dtype, seed
):
    q, cache, batch = paged(seed, lengths, heads, block_tokens, dtype)
    out = torch.full_like(q, torch.nan)
    num_long = 0
    for rows, part, is_long in long_parts(batch, *limits):
        if is_long:
            num_long += 1
            count, context = part.query_lens[0], part.contexts[0]
            assert (len(part.query_lens), count >= limits[0], context >= limits[1]) == (1, True, True)
            out[rows] = attend_split(PlainKernel(granule), q[rows], cache, part.block_tables[0], context)
        else:
            assert part.is_decode == all(count == 1 for count in part.query_lens)
            out[rows] = paged_attention(q[rows], cache, part)
    assert num_long == sum(new >= limits[0] and old + new >= limits[1] for old, new in lengths)
    torch.testing.assert_close(out, paged_attention(q, cache, batch), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_parts_of_a_batch_keep_inputs_of_their_sequences():
    _, _, batch = paged(0, [(3, 1), (9, 1), (5, 30), (0, 2), (40, 25)], (2, 1), 4, torch.float32)
    parts = list(long_parts(batch, 20, 30))
    assert [(rows.start, rows.stop, is_long) for rows, _, is_long in parts] == [
        (0, 2, False), (2, 32, True), (32, 34, False), (34, 59, True),
    ]  # fmt: skip
    for name in ("input_ids", "positions", "slots"):
        assert torch.equal(torch.cat([getattr(part, name) for _, part, _ in parts]), getattr(batch, name))
    assert [part.query_starts.tolist() for _, part, _ in parts] == [[0, 1, 2], [0, 30], [0, 2], [0, 25]]
    assert [part.contexts for _, part, _ in parts] == [(4, 10), (35,), (2,), (65,)]
    assert [part.is_decode for _, part, _ in parts] == [True, False, False, False]


@pytest.mark.parametrize("least", [(1000, 1), (1, 1000)])
def test_batch_without_long_chunks_is_one_part(least):
    _, _, batch = paged(0, [(3, 1), (5, 30)], (2, 1), 4, torch.float32)
    assert list(long_parts(batch, *least)) == [(slice(0, 31), batch, False)]
