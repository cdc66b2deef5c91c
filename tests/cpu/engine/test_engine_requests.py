"""Request options, finish reasons, aborts and errors in the engine."""

import functools
import json

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_helpers import Answers, alone, finish, greedy, is_greedy, make_engine, needs_smollm2, prompts, serve
from kvtier.engine import Model, Penalties, SamplingParams, Tokenizer, load_model, load_tokenizer
from kvtier.engine.sequence import FinishReason
from kvtier.errors import ArgumentError, RangeError, StateError
from scheduler_support import check_scheduler


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("llama")[0])


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Return a tokenizer with one token per byte, so that a character may need several tokens.

    The tiny model has only 199 token ids. The tokenizer uses ids 0 to 197, so it covers 198 of the 256 byte values. Id
    198 has no text.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    # all 128 ASCII bytes and 70 other bytes (`letters` is not in byte order)
    kept = letters[:128] + letters[160:230]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(kept)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def sampled(max_tokens=8, **options):
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 5, **options})


# ---- n answers, seeds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "shared"), [(33, 32), (32, 28), (3, 0)])
def test_n_answers_share_the_blocks_of_the_prompt(model, length, shared):
    engine = make_engine(model, 64, 4)
    (prompt,) = prompts(1, length)
    name = engine.add(prompt, sampled(6, n=4))
    answers = Answers()
    while len(engine.scheduler.running) < 4:
        answers.take(engine.step())
        check_scheduler(engine.scheduler)
    tables = [request.allocation.table[: shared // 4].tolist() for request in engine.scheduler.running]
    assert all(table == tables[0] for table in tables)
    finish(engine, answers)
    assert answers[name, 0].num_cached == 0
    assert all(answers[name, index].num_cached >= shared for index in range(1, 4))
    assert engine.manager.stats.hit_tokens >= 3 * shared
    texts = [tuple(answers[name, index].tokens) for index in range(4)]
    assert len(set(texts)) == 4
    assert all(answers[name, index].reason is FinishReason.LENGTH for index in range(4))


def test_n_answers_are_reproducible_with_any_cache(model):
    (prompt,) = prompts(1, 21)
    results = []
    for prefix_caching, blocks in ((True, 64), (False, 64), (True, 12)):
        engine = make_engine(model, blocks, 4, prefix_caching=prefix_caching)
        name = engine.add(prompt, sampled(12, n=3))
        answers = finish(engine)
        results.append([answers[name, index].tokens for index in range(3)])
    assert results[0] == results[1] == results[2]


def test_seed_gives_the_same_tokens_in_any_batch(model):
    given = prompts(2, 9, 17, 30, 5, shared=[0, 4, 4, 0])
    params = [
        sampled(10, seed=seed, temperature=0.7, top_p=0.9, penalties=Penalties(repetition=1.2)) for seed in range(4)
    ]
    expected = [alone(model, prompt, each).tokens for prompt, each in zip(given, params, strict=True)]
    engine = make_engine(model, 20, 4, max_step_tokens=16)
    assert [answer.tokens for answer in serve(engine, list(zip(given, params, strict=True)), 4)] == expected
    other = alone(model, given[0], sampled(10, seed=77)).tokens
    assert other != expected[0]


# ---- finish reasons --------------------------------------------------------------------------------------------------


def test_stop_token_ends_the_answer_and_is_included(model):
    (prompt,) = prompts(3, 12)
    tokens = alone(model, prompt, greedy(10)).tokens
    place = next(i for i in range(3, 10) if tokens.index(tokens[i]) == i)
    answer = alone(model, prompt, greedy(10, stop_token_ids=(tokens[place],)))
    assert answer.tokens == tokens[: place + 1]
    assert answer.reason is FinishReason.STOP


def test_eos_ends_the_answer_unless_ignored(checkpoint, model):
    oracle = checkpoint("llama")[1]
    for seed in range(400):
        (prompt,) = prompts(seed, 2)
        answer = alone(model, prompt, greedy(6, ignore_eos=False))
        if answer.reason is FinishReason.STOP:
            break
    assert answer.tokens[-1] == 2  # the EOS token of the tiny model
    assert is_greedy(oracle, prompt, answer.tokens)
    ignored = alone(model, prompt, greedy(6))
    assert ignored.tokens[: len(answer.tokens)] == answer.tokens
    assert len(ignored.tokens) == 6
    delayed = alone(model, prompt, greedy(6, ignore_eos=False, min_tokens=6))
    assert len(delayed.tokens) == 6
    assert 2 not in delayed.tokens[:-1]


def test_stop_text_is_cut_from_the_answer(model, byte_tokenizer):
    (prompt,) = prompts(5, 10)
    engine = make_engine(model, tokenizer=byte_tokenizer)
    engine.add(prompt, greedy(40), request_id="whole")
    text = finish(engine)["whole"].text
    for begin in range(0, len(text) - 3, 5):
        stop = text[begin : begin + 3]
        name = engine.add(prompt, greedy(40, stop=("\x00never", stop)))
        answer = finish(engine)[name]
        assert answer.text == text[: text.index(stop)]
        assert answer.reason is FinishReason.STOP
        assert stop in byte_tokenizer.decode(answer.tokens)
        if not stop.endswith("\ufffd"):  # a final U+FFFD is matched late: the next token may complete the character
            assert stop not in byte_tokenizer.decode(answer.tokens[:-1])


def test_partial_match_of_stop_text_is_output_at_the_end(model, byte_tokenizer):
    (prompt,) = prompts(5, 10)
    engine = make_engine(model, tokenizer=byte_tokenizer)
    name = engine.add(prompt, greedy(40))
    text = finish(engine)[name].text
    name = engine.add(prompt, greedy(40, stop=(text[-2:] + "more", text + "\x00")))
    answer = finish(engine)[name]
    assert (answer.text, answer.reason) == (text, FinishReason.LENGTH)


@pytest.mark.parametrize("length", [200, 254, 255])
def test_full_context_finishes_request_with_reason_length(model, length):
    """The tiny model has 256 positions."""
    (prompt,) = prompts(6, length)
    engine = make_engine(model, 80, 4, max_step_tokens=256)
    name = engine.add(prompt, greedy(1000))
    answer = finish(engine)[name]
    assert len(answer.tokens) == 256 - length
    assert answer.reason is FinishReason.LENGTH
    assert engine.explain(name).state == "length"


def test_prompt_that_fills_the_context_is_refused(model):
    engine = make_engine(model, 80, 4)
    with pytest.raises(RangeError, match="the prompt has 256 tokens"):
        engine.add([5] * 256)
    assert not engine.has_work()


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_larger_than_cache_ends_all_answers_as_refused(model, n):
    engine = make_engine(model, 4, 4)
    (prompt,) = prompts(7, 30)
    name = engine.add(prompt, sampled(5, n=n))
    other = engine.add(prompt[:3], greedy(2))
    answers = finish(engine)
    for index in range(n):
        assert answers[name, index].reason is FinishReason.REFUSED
        assert "room for 16 tokens" in answers[name, index].error
    assert answers[other].reason is FinishReason.LENGTH


def test_answer_larger_than_cache_finishes_with_reason_length(model):
    engine = make_engine(model, 4, 4)
    (prompt,) = prompts(8, 6)
    name = engine.add(prompt, greedy(100))
    answer = finish(engine)[name]
    assert answer.reason is FinishReason.LENGTH
    assert answer.tokens == alone(model, prompt, greedy(len(answer.tokens))).tokens
    assert len(prompt) + len(answer.tokens) == 17  # 16 tokens fit into the cache; the last token is not stored


def test_invalid_prompt_raises(model):
    engine = make_engine(model)
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        engine.add([])
    with pytest.raises(ArgumentError, match="no tokenizer"):
        engine.add("hello")
    for bad in ([1, -1], [199]):
        with pytest.raises(RangeError, match=r"token ids must be in \[0, 199\)"):
            engine.add(bad)
    engine.add([1], request_id="mine")
    with pytest.raises(ArgumentError, match="a request with id mine is running"):
        engine.add([1], request_id="mine")


@pytest.mark.parametrize("token", [-1, 199])
def test_stop_token_outside_the_vocabulary_raises(model, token):
    """If the engine accepted the token, a step would index outside the logits and fail all requests of the step."""
    engine = make_engine(model)
    with pytest.raises(RangeError, match=rf"in \[0, 199\), got {min(5, token)} .. {max(5, token)}"):
        engine.add([1], greedy(4, min_tokens=2, stop_token_ids=(5, token)))
    assert not engine.has_work()


# ---- logprobs --------------------------------------------------------------------------------------------------------


def test_engine_logprobs_equal_transformers(checkpoint, model):
    oracle = checkpoint("llama")[1]
    given = prompts(9, 12, 30, 4)
    engine = make_engine(model, 40, 4, max_step_tokens=8)
    requests = [(prompt, sampled(6, logprobs=5, temperature=0.8, top_k=50)) for prompt in given]
    for (prompt, _), answer in zip(requests, serve(engine, requests), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(answer.logprobs) == 6
        for token, actual, row in zip(answer.tokens, answer.logprobs, expected, strict=True):
            assert actual.chosen == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(5)
            assert [token for token, _ in actual.top] == top.indices.tolist()
            np.testing.assert_allclose([value for _, value in actual.top], top.values.numpy(), atol=1e-4)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_joined_output_texts_equal_the_decoded_tokens(model, byte_tokenizer):
    @given(seed=st.integers(0, 10**6), stop=st.sampled_from([(), ("é",), ("\ufffd\ufffd",)]))
    @example(seed=43887, stop=("\ufffd\ufffd",))  # regression: a partial character at the end matched the stop text
    @settings(max_examples=15, deadline=None)
    def check(seed, stop):
        engine = make_engine(model, 64, 4, tokenizer=byte_tokenizer)
        for prompt in prompts(seed, 3, 8):
            engine.add(prompt, sampled(24, seed=seed, temperature=2.0, stop=stop))
        for answer in finish(engine).values():
            decoded = byte_tokenizer.decode(answer.tokens)
            if answer.reason is FinishReason.STOP:
                decoded = decoded[: min(decoded.index(text) for text in stop)]
            assert answer.text == decoded

    check()


@needs_smollm2
@given(st.text(min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_streamed_decoding_of_any_text_equals_decode(text):
    tokenizer = real_tokenizer()
    tokens = tokenizer.encode(text)
    stream = tokenizer.stream()
    assert "".join([*(stream.add(token) for token in tokens), stream.finish()]) == tokenizer.decode(tokens)


real_tokenizer = functools.cache(load_tokenizer)


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_abort_frees_blocks_and_ends_output(model):
    engine = make_engine(model, 32, 4, prefix_caching=False)
    kept, aborted = prompts(10, 14, 30)
    name, other = engine.add(kept, greedy(9)), engine.add(aborted, sampled(9, n=3))
    answers = Answers()
    for _ in range(4):
        answers.take(engine.step())
    assert engine.manager.stats.num_allocations == 4
    assert engine.abort(other)
    assert engine.manager.stats.num_allocations == 1
    assert engine.manager.tree.tiers[0].pool.num_free == 32 - len(engine.scheduler.running[0].allocation.table)
    check_scheduler(engine.scheduler)
    assert not engine.abort(other)
    assert not engine.abort("unknown")
    num_tokens_before = {key: len(answer.tokens) for key, answer in answers.items() if key[0] == other}
    finish(engine, answers)
    assert {key: len(answer.tokens) for key, answer in answers.items() if key[0] == other} == num_tokens_before
    assert answers[name].tokens == alone(model, kept, greedy(9)).tokens
    assert engine.explain(other).state == "abort"


def test_abort_also_cancels_answers_that_have_not_started(model):
    engine = make_engine(model)
    for steps in (0, 1):
        name = engine.add(prompts(11, 100)[0], sampled(4, n=3))  # the prompt needs two steps of 64 tokens
        for _ in range(steps):
            engine.step()
        assert engine.abort(name)
        assert not engine.has_work()
        check_scheduler(engine.scheduler)


# ---- errors ----------------------------------------------------------------------------------------------------------


class Faulty(Model):
    """A model whose forward pass can fail.

    If `raise_next` contains an error, the next forward pass writes NaN to the cache, raises the error and removes it.
    """

    def __init__(self, model):
        super().__init__(model.config, model.weights, model.ops)
        self.raise_next = None

    def forward(self, batch, cache, before_layer=None):
        hidden = super().forward(batch, cache, before_layer)
        if self.raise_next is not None:
            error, self.raise_next = self.raise_next, None
            blocks = batch.slots // cache.shape[3]
            cache[blocks, :, :, batch.slots % cache.shape[3]] = torch.nan  # the KV of a failed step is invalid
            raise error
        return hidden


@pytest.mark.parametrize("num_steps_before", range(5))
def test_step_error_ends_only_requests_in_the_step(model, num_steps_before):
    faulty = Faulty(model)
    engine = make_engine(faulty, 32, 4, max_step_tokens=24, max_rows=2)
    given = prompts(12, 30, 12, 20, 12, shared=[0, 0, 10, 10])
    names = [engine.add(prompt, sampled(6, n=2) if i == 0 else greedy(6)) for i, prompt in enumerate(given)]
    answers = Answers()
    for _ in range(num_steps_before):
        answers.take(engine.step())
    faulty.raise_next = RuntimeError("the device failed")
    answers.take(engine.step())
    check_scheduler(engine.scheduler)
    finish(engine, answers)
    failed = [key for key, answer in answers.items() if answer.reason is FinishReason.ERROR]
    assert failed
    assert all("RuntimeError: the device failed" in answers[key].error for key in failed)
    assert {key[0] for key in failed} < set(names)
    assert (names[0], 1) in answers  # the second answer of the first request is reported even if it had not started
    for name, prompt in zip(names[1:], given[1:], strict=True):
        if (name, 0) not in failed:
            assert answers[name].tokens == alone(model, prompt, greedy(6)).tokens
        again = engine.add(prompt, greedy(6))
        assert finish(engine)[again].tokens == alone(model, prompt, greedy(6)).tokens
    assert engine.manager.num_available == 32


class FailingConstraint:
    """A constraint that allows every token and raises after `num_tokens` tokens."""

    def __init__(self, num_tokens):
        self.num_left = num_tokens

    def forbid(self, _):
        if not self.num_left:
            raise StateError("no more tokens")

    def accept(self, _):
        self.num_left -= 1


@pytest.mark.parametrize(("num_tokens", "n"), [(0, 1), (0, 3), (3, 1), (3, 3)])
def test_failing_constraint_ends_only_its_request(model, num_tokens, n):
    engine = make_engine(model, 64, 4)
    mine, others = prompts(18, 9, 14)
    params = sampled(8, n=n, ignore_eos=False, constraint=lambda: FailingConstraint(num_tokens))
    name, other = engine.add(mine, params), engine.add(others, greedy(8))
    answers = finish(engine)
    for index in range(n):
        answer = answers[name, index]
        assert (answer.reason, answer.error) == (FinishReason.ERROR, "no more tokens")
        assert len(answer.tokens) == num_tokens
    assert answers[other].tokens == alone(model, others, greedy(8)).tokens
    assert answers[other].reason is FinishReason.LENGTH
    assert engine.explain(name).state == "error"
    assert engine.manager.num_available == 64
    again = engine.add(mine, greedy(8))
    assert finish(engine)[again].tokens == alone(model, mine, greedy(8)).tokens


def test_interrupt_propagates_and_the_engine_continues(model):
    faulty = Faulty(model)
    engine = make_engine(faulty)
    (prompt,) = prompts(13, 10)
    name = engine.add(prompt, greedy(4))
    faulty.raise_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.explain(name).state == "error"
    check_scheduler(engine.scheduler)
    again = engine.add(prompt, greedy(4))
    assert finish(engine)[again].tokens == alone(model, prompt, greedy(4)).tokens


def test_cache_reset_and_abort_do_not_affect_later_requests(model):
    engine = make_engine(model)
    first, second = prompts(14, 10, 12)
    name = engine.add(first, greedy(5))
    engine.step()
    engine.manager.reset()
    assert engine.abort(name)
    other = engine.add(second, greedy(5))
    assert finish(engine)[other].tokens == alone(model, second, greedy(5)).tokens


# ---- explanations ----------------------------------------------------------------------------------------------------


def test_explain_covers_running_and_recent_requests(model):
    engine = make_engine(model, 12, 4)
    (prompt,) = prompts(16, 17)
    with pytest.raises(ArgumentError, match="request unknown is neither running"):
        engine.explain("unknown")
    cold = engine.add(prompt, greedy(3))
    assert engine.explain(cold).state == "waiting"
    engine.step()
    assert engine.explain(cold).state == "running"
    finish(engine)
    assert engine.explain(cold).num_new_tokens == 3
    warm = engine.add(prompt, greedy(3), salt=b"")
    other = engine.add(prompt, greedy(3), salt=b"another tenant")
    finish(engine)
    assert engine.explain(cold).num_cached_tokens == 0
    assert engine.explain(warm).num_cached_tokens == 16
    assert engine.explain(other).num_cached_tokens == 0
    assert engine.explain(cold).miss != engine.explain(other).miss
    json.dumps([engine.explain(name).miss for name in (cold, warm, other)])


def test_close_aborts_running_requests(model):
    engine = make_engine(model)
    name = engine.add(prompts(17, 10)[0], greedy(5))
    engine.step()
    engine.close()
    assert engine.explain(name).state == "abort"
    assert engine.manager.stats.num_allocations == 0
