"""kvtier and transformers compute the same log-probabilities of prompts, with and without cached blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import Recorder, finish, greedy, make_engine, prompts
from kvtier.engine import NgramProposer, SamplingParams, load_model, scoring
from kvtier.engine.sequence import FinishReason
from kvtier.errors import RangeError, StateError
from kvtier.index import Chain, Namespace
from kvtier.scheduler import Request, Row


@pytest.fixture(scope="module")
def llama(checkpoint):
    folder, oracle = checkpoint("llama")
    return load_model(folder), oracle


def expected(oracle, prompt):
    """Return the log-probability of each prompt token except the first, and of every token id at every position."""
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None]).squeeze(-1).numpy(), logprobs


def scores(engine, prompt, start=1, num_top=0, **options):
    params = greedy(**{"max_tokens": 2, "prompt_logprobs": num_top, "prompt_logprobs_start": start, **options})
    name = engine.add(prompt, params)
    return finish(engine)[name]


def values(answer):
    return np.array([score.chosen for score in answer.prompt_logprobs])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompt_logprobs_of_cached_prompts_equal_transformers(checkpoint, kind):
    folder, oracle = checkpoint(kind)
    model = load_model(folder)

    @given(
        seed=st.integers(0, 10**6),
        block_tokens=st.sampled_from([1, 4, 16]),
        max_step_tokens=st.sampled_from([3, 16, 64]),
        start=st.integers(1, 60),
    )
    @settings(max_examples=10, deadline=None)
    def check(seed, block_tokens, max_step_tokens, start):
        engine = make_engine(model, 512 // block_tokens, block_tokens, max_step_tokens=max_step_tokens)
        (prompt,) = prompts(seed, 48)
        exact, _ = expected(oracle, prompt)
        uncached = scores(engine, prompt)
        np.testing.assert_allclose(values(uncached), exact, atol=1e-4)
        name = engine.add(prompt, greedy(1))
        assert finish(engine)[name].num_cached == 47  # all tokens but the last, which is always computed
        cached = scores(engine, prompt, start)
        assert cached.num_cached == min(start - 1, 47)
        np.testing.assert_allclose(values(cached), exact[start - 1 :], atol=1e-4)
        np.testing.assert_allclose(values(cached), values(uncached)[start - 1 :], atol=1e-4)
        assert cached.tokens == uncached.tokens

    check()


def test_prompt_logprobs_have_ranks_and_alternatives(llama):
    model, oracle = llama
    (prompt,) = prompts(1, 20)
    _, logprobs = expected(oracle, prompt)
    answer = scores(make_engine(model), prompt, num_top=3)
    for position, score in enumerate(answer.prompt_logprobs):
        row = logprobs[position]
        assert score.rank == int((row > row[prompt[position + 1]]).sum()) + 1
        top = row.topk(3)
        assert [token for token, _ in score.top] == top.indices.tolist()
        np.testing.assert_allclose([value for _, value in score.top], top.values.numpy(), atol=1e-4)


def test_prompt_logprobs_in_mixed_batches_equal_transformers(llama):
    """Requests share steps and cached blocks, use drafts, and are sometimes preempted.

    One request has no prompt log-probabilities, and one has two answers.
    """
    model, oracle = llama
    given = prompts(2, 30, 12, 25, 30, 9, 1, shared=[20, 20, 20, 20, 0, 0])
    engine = make_engine(model, 24, 4, max_step_tokens=16, proposer=NgramProposer(2))
    names = []
    for index, prompt in enumerate(given):
        options = {"prompt_logprobs": index % 3} if index != 2 else {}
        sampled = {"temperature": 1.0, "n": 2, "seed": 3} if index == 1 else {}
        names.append(engine.add(prompt, greedy(6, **options, **sampled)))
    answers = finish(engine)
    for index, (name, prompt) in enumerate(zip(names, given, strict=True)):
        exact, _ = expected(oracle, prompt)
        np.testing.assert_allclose(values(answers[name]), exact if index != 2 else [], atol=1e-4)
        assert {len(score.top) for score in answers[name].prompt_logprobs} <= {index % 3}
    assert answers[names[1], 1].prompt_logprobs == []
    assert sum(engine.explain(name).num_preempted for name in names) > 0


def test_prompt_logprobs_of_preempted_request_are_complete(llama):
    model, oracle = llama
    given = prompts(3, 40, 40, 40)
    engine = make_engine(model, 24, 4, max_step_tokens=16)
    names = [engine.add(prompt, greedy(20, prompt_logprobs=0)) for prompt in given]
    answers = finish(engine)
    assert sum(engine.explain(name).num_preempted for name in names) > 0
    for name, prompt in zip(names, given, strict=True):
        np.testing.assert_allclose(values(answers[name]), expected(oracle, prompt)[0], atol=1e-4)


def test_prompt_logprobs_compute_logits_in_chunks(llama, monkeypatch):
    model, _ = llama
    (prompt,) = prompts(4, 50)
    whole = scores(make_engine(model), prompt, num_top=2)
    monkeypatch.setattr(scoring, "_CHUNK_ELEMENTS", 7 * model.config.vocab_size)
    largest = []

    class Counting(Recorder):
        def logits(self, hidden):
            largest.append(len(hidden))
            return super(Recorder, self).logits(hidden)  # without recording

    chunked = scores(make_engine(Counting(model)), prompt, num_top=2)
    assert max(largest) == 7
    np.testing.assert_allclose(values(chunked), values(whole), atol=1e-5)


def test_max_tokens_0_scores_prompt_and_generates_nothing(llama):
    model, oracle = llama
    (prompt,) = prompts(5, 21)
    engine = make_engine(model)
    answer = scores(engine, prompt, max_tokens=0)
    assert (answer.tokens, answer.text, answer.reason) == ([], "", FinishReason.LENGTH)
    np.testing.assert_allclose(values(answer), expected(oracle, prompt)[0], atol=1e-4)
    again = engine.add(prompt, greedy(0))
    assert finish(engine)[again].num_cached == 20
    assert "every full block was found" in engine.explain(again).miss


def test_explanation_gives_logprobs_as_reason_of_the_miss(llama):
    model, _ = llama
    (prompt,) = prompts(6, 21)
    engine = make_engine(model)
    scores(engine, prompt)
    name = engine.add(prompt, greedy(prompt_logprobs=0, prompt_logprobs_start=9))
    assert finish(engine)[name].num_cached == 8
    assert engine.explain(name).miss == "the log-probabilities of the prompt require computing all tokens from 8 on"


def test_prompt_logprobs_that_are_nan_fail_only_their_request(llama):
    model, oracle = llama
    bad, good = prompts(7, 20, 20)

    class Broken(Recorder):
        def logits(self, hidden):
            found = super(Recorder, self).logits(hidden)  # without recording
            # the step that scores both prompts has 2 x 19 rows; the first 10 rows score tokens of the first prompt
            is_bad = torch.arange(len(found)) < (10 if len(found) == 38 else 0)
            return found.masked_fill(is_bad[:, None], torch.nan)

    engine = make_engine(Broken(model))
    names = [engine.add(prompt, greedy(0, prompt_logprobs=0)) for prompt in (bad, good)]
    answers = finish(engine)
    assert answers[names[0]].reason is FinishReason.ERROR
    assert "NaN" in answers[names[0]].error
    np.testing.assert_allclose(values(answers[names[1]]), expected(oracle, good)[0], atol=1e-4)


def test_scored_token_with_missing_logits_raises_state_error():
    chain = Chain(Namespace("model", "weights", "f32", "layout", 4), list(range(10)))
    request = Request("request", chain, 1, max_cached_tokens=3)
    scored = [scoring.scored_tokens(Row(request, 0, stop, 0, False)).tolist() for stop in (2, 3, 4, 10)]
    assert scored == [[], [], [4], [4, 5, 6, 7, 8, 9]]
    with pytest.raises(StateError, match="came from the cache"):
        scoring.scored_tokens(Row(request, 4, 4, 0, False))


@pytest.mark.parametrize("wrong", [{"prompt_logprobs": -1}, {"prompt_logprobs_start": 0}, {"max_tokens": -1}])
def test_invalid_prompt_logprobs_are_range_errors(wrong):
    with pytest.raises(RangeError, match=next(iter(wrong))):
        SamplingParams(**wrong)
