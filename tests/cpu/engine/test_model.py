"""The model computes the same logits and greedy tokens as transformers, at every position and in any batch."""

import numpy as np
import pytest
import torch

from engine_driver import Driver, greedy, random_schedule, run_schedule
from kvtier.engine import Model, load_model
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.ops import TorchOps
from kvtier.errors import ArgumentError, RangeError

ALL = [
    *("llama", "llama, tied, one kv head", "llama, llama3 rope", "llama, linear rope", "llama, biases"),
    *("qwen2", "qwen3"),
]


def prompts(*lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(3, 199, length).tolist() for length in lengths]


def oracle_logits(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("ops", [None, TorchOps()], ids=["fast", "plain"])
@pytest.mark.parametrize("kind", ALL)
def test_model_logits_equal_transformers_at_every_position(checkpoint, kind, ops):
    folder, oracle = checkpoint(kind)
    model = load_model(folder, ops=ops)
    given = prompts(90, 1, 17, 33)
    schedule = random_schedule(np.random.default_rng(5), given, 30)
    actual = run_schedule(Driver(model, len(given), 96), schedule)
    for i, prompt in enumerate(given):
        torch.testing.assert_close(actual[i], oracle_logits(oracle, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_model_greedy_tokens_equal_transformers(checkpoint, kind):
    folder, oracle = checkpoint(kind)
    given = prompts(5, 40, 12, 1, 64)
    actual = greedy(Driver(load_model(folder), len(given), 96), given, 20)
    for prompt, tokens in zip(given, actual, strict=True):
        with torch.inference_mode():
            expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_model_in_half_precision_is_close_to_float32(checkpoint, dtype):
    folder, oracle = checkpoint("llama")
    (prompt,) = prompts(50)
    model = load_model(folder, dtype)
    logits = Driver(model, 1, 64).step({0: prompt})[0]
    assert logits.dtype == torch.float32
    expected = oracle_logits(oracle, prompt)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_before_layer_callback_precedes_use_of_the_layer_cache(checkpoint):
    model = load_model(checkpoint("llama")[0])
    cache, seen = model.new_cache(4, 4), []
    batch = ForwardBatch.build([SequenceInput([5, 6], 0, [2])], 4, torch.device("cpu"))

    def check(layer):
        assert not cache[2, layer].any()
        assert cache[2, :layer].any() or layer == 0
        seen.append(layer)

    model.forward(batch, cache, before_layer=check)
    assert seen == [0, 1, 2]
    assert cache[2, :, :, :2].all()
    assert not cache[2, :, :, 2:].any()
    assert not cache[[0, 1, 3]].any()


def test_forward_returns_only_rows_that_need_logits(checkpoint):
    model = load_model(checkpoint("llama")[0])
    cache = model.new_cache(8, 4)
    (prompt,) = prompts(10)
    inputs = [
        SequenceInput(prompt, 0, [0, 1, 2], 0),
        SequenceInput(prompt, 0, [3, 4, 5], 3),
        SequenceInput(prompt[:1], 0, [6]),
    ]
    batch = ForwardBatch.build(inputs, 4, torch.device("cpu"))
    assert batch.logit_rows.tolist() == [17, 18, 19, 20]
    assert model.forward(batch, cache).shape == (4, 64)


def test_forward_batch_concatenates_sequences():
    inputs = [SequenceInput([1, 2, 3], 2, [7, 4], 0), SequenceInput([9], 4, [1, 5, 0])]
    batch = ForwardBatch.build(inputs, 4, torch.device("cpu"))
    assert batch.input_ids.tolist() == [1, 2, 3, 9]
    assert batch.positions.tolist() == [2, 3, 4, 4]
    assert batch.slots.tolist() == [30, 31, 16, 20]
    assert batch.query_starts.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [5, 5]
    assert batch.block_tables.tolist() == [[7, 4, 0], [1, 5, 0]]
    assert not batch.is_decode


@pytest.mark.parametrize(
    ("sequence", "error", "text"),
    [
        (SequenceInput([], 0, [1]), ArgumentError, "1 or more new tokens and 0 or more computed tokens, got 0 and 0"),
        (SequenceInput([1], -1, [1]), ArgumentError, "got 1 and -1"),
        (SequenceInput([1] * 5, 4, [1, 2]), RangeError, "reach 9 tokens, but its 2 blocks of 4 tokens hold 8"),
        (SequenceInput([1], 0, [1], 2), RangeError, r"must be in \[0, 1\], got 2"),
    ],
)
def test_forward_batch_with_invalid_sequence_raises(sequence, error, text):
    with pytest.raises(error, match=text):
        ForwardBatch.build([sequence], 4, torch.device("cpu"))


def test_forward_batch_without_sequences_raises():
    with pytest.raises(ArgumentError, match="at least one sequence"):
        ForwardBatch.build([], 4, torch.device("cpu"))


def test_forward_with_wrong_cache_or_position_raises(checkpoint):
    model: Model = load_model(checkpoint("llama")[0])
    batch = ForwardBatch.build([SequenceInput([1], 0, [0])], 4, torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r"\[blocks, 3, 2, block tokens, 2, 16\]"):
        model.forward(batch, torch.zeros(2, 3, 2, 4, 2, 8))
    batch = ForwardBatch.build([SequenceInput([1], 256, range(65))], 4, torch.device("cpu"))
    with pytest.raises(ArgumentError, match="reach 257 tokens; the model has 256 positions"):
        model.forward(batch, model.new_cache(65, 4))
