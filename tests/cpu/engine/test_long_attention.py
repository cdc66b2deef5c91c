"""Splitting a batch into parts does not change the results of attention.

Each long prompt chunk is a part of its own. All sequences between two long chunks form one part.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.ops import Heads, paged_attention
from kvtier.engine.ops_long import long_parts


def paged(seed, lengths, heads, block_tokens):
    """Return random queries, one layer of a random cache, and a batch with random block tables."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    blocks = random.permutation(sum(-(-(a + b) // block_tokens) for a, b in lengths) + 2).tolist()
    cache = torch.randn(len(blocks), 3, 2, block_tokens, heads[1], 16, generator=generator)[:, 1]
    inputs = [
        SequenceInput([0] * new, old, [blocks.pop() for _ in range(-(-(old + new) // block_tokens))])
        for old, new in lengths
    ]
    batch = ForwardBatch.build(inputs, block_tokens, torch.device("cpu"))
    qkv = torch.randn(len(batch.input_ids), (heads[0] + 2 * heads[1]) * 16, generator=generator)
    return Heads.split(qkv, *heads).q, cache, batch


@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.just(1) | st.integers(1, 60)), min_size=1, max_size=5),
    limits=st.tuples(st.integers(2, 40), st.integers(1, 4000)),  # least_queries and least_scores of long_parts
    heads=st.sampled_from([(6, 2), (4, 4), (3, 1)]),
    block_tokens=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_attention_of_parts_equals_attention_of_batch(lengths, limits, heads, block_tokens, seed):
    q, cache, batch = paged(seed, lengths, heads, block_tokens)
    out = torch.full_like(q, torch.nan)
    found = []
    for rows, part, is_long in long_parts(batch, *limits):
        if is_long:
            found.append((part.contexts[0] - part.query_lens[0], *part.query_lens))
        else:
            assert part.is_decode == all(count == 1 for count in part.query_lens)
        out[rows] = paged_attention(q[rows], cache, part)
    assert found == [(old, new) for old, new in lengths if new >= limits[0] and new * (old + new) >= limits[1]]
    torch.testing.assert_close(out, paged_attention(q, cache, batch), rtol=1e-5, atol=1e-5)


def test_parts_of_a_batch_keep_inputs_of_their_sequences():
    _, _, batch = paged(0, [(3, 1), (9, 1), (5, 30), (0, 2), (40, 25)], (2, 1), 4)
    parts = list(long_parts(batch, 20, 1000))
    assert [(rows.start, rows.stop, is_long) for rows, _, is_long in parts] == [
        (0, 2, False), (2, 32, True), (32, 34, False), (34, 59, True),
    ]  # fmt: skip
    for name in ("input_ids", "positions", "slots"):
        assert torch.equal(torch.cat([getattr(part, name) for _, part, _ in parts]), getattr(batch, name))
    assert [part.query_starts.tolist() for _, part, _ in parts] == [[0, 1, 2], [0, 30], [0, 2], [0, 25]]
    assert [part.contexts for _, part, _ in parts] == [(4, 10), (35,), (2,), (65,)]
    assert [part.is_decode for _, part, _ in parts] == [True, False, False, False]


@pytest.mark.parametrize("limits", [(31, 1), (1, 1051)])  # the longer chunk has 30 queries and 30 x 35 scores
def test_batch_without_long_chunks_is_one_part(limits):
    _, _, batch = paged(0, [(3, 1), (5, 30)], (2, 1), 4)
    assert list(long_parts(batch, *limits)) == [(slice(0, 31), batch, False)]
