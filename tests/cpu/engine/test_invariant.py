"""In batch-invariant mode, the bits of the logits depend neither on prompt chunks nor on the rest of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import Driver, random_schedule, run_schedule
from kvtier.engine import InvariantOps, load_model
from kvtier.errors import ArgumentError, UnavailableError


def prompts(random, *lengths):
    return [random.integers(3, 199, length).tolist() for length in lengths]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_invariant_logits_do_not_depend_on_chunks_or_batch(checkpoint, kind):
    model = load_model(checkpoint(kind)[0], ops=InvariantOps())

    @given(
        seed=st.integers(0, 10**6), block_tokens=st.sampled_from([1, 4, 16]), max_tokens=st.sampled_from([1, 3, 20, 80])
    )
    @settings(max_examples=8, deadline=None)
    def check(seed, block_tokens, max_tokens):
        random = np.random.default_rng(seed)
        texts = prompts(random, *random.integers(1, 90, 3).tolist())
        alone = [Driver(model, 1, 96).step({0: text})[0] for text in texts]
        driver = Driver(model, len(texts), 96, block_tokens, seed)
        mixed = run_schedule(driver, random_schedule(random, texts, max_tokens))
        for i, expected in enumerate(alone):
            assert torch.equal(mixed[i], expected)

    check()


def test_invariant_logits_equal_transformers(checkpoint):
    folder, oracle = checkpoint("llama")
    (prompt,) = prompts(np.random.default_rng(0), 100)
    actual = Driver(load_model(folder, ops=InvariantOps()), 1, 128).step({0: prompt})[0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_invariant_ops_require_float32(checkpoint):
    model = load_model(checkpoint("llama")[0], "f16", ops=InvariantOps())
    with pytest.raises(ArgumentError, match=r"need float32 on the CPU, got torch\.float16"):
        Driver(model, 1, 8).step({0: [1, 2]})


def test_invariant_ops_reject_row_dependent_operation():
    ops = InvariantOps()
    scale = torch.linspace(1, 2, 16)[:, None]
    with pytest.raises(UnavailableError, match="computes different bits in rows 0 and 1"):
        ops._by_tiles("uneven", (4,), lambda tile: tile * scale, torch.ones(3, 4))
