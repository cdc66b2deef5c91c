"""With every proposer, speculation accepts correct drafts and does not change the answers."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import VOCAB, alone, finish, greedy, make_engine, prompts, serve
from kvtier.engine import InvariantOps, Model, Penalties, SamplingParams, load_model
from kvtier.engine.sequence import FinishReason
from kvtier.engine.speculate import DraftProposer, NgramProposer
from kvtier.errors import ArgumentError, RangeError

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))


@pytest.fixture(scope="module")
def model(checkpoint):
    """Return a batch-invariant model, whose results do not depend on the number of tokens verified at once."""
    return load_model(checkpoint("llama")[0], ops=InvariantOps())


@pytest.fixture(scope="module")
def draft(checkpoint):
    """Return a draft model that has the vocabulary of `model`, but another architecture and shape."""
    return load_model(checkpoint("qwen3")[0], ops=InvariantOps())


class RandomProposer:
    """Proposes up to five next tokens from `truth`, which contains prompts with their correct answers.

    In half of the proposals, one token is replaced by a random token. If no entry of `truth` begins with the tokens of
    a request, the proposal is empty.
    """

    models = ()

    def __init__(self, seed, truth=()):
        self.num_tokens = 5
        self._random = np.random.default_rng(seed)
        self._truth = [tuple(each) for each in truth]

    def propose(self, requests, groups):
        assert groups == []
        return [self._guess(tuple(request.chain.tokens.tolist())) for request in requests]

    def _guess(self, tokens):
        right = next((each[len(tokens) :] for each in self._truth if each[: len(tokens)] == tokens), ())
        guess = list(right[: self._random.integers(0, 6)])
        if guess and self._random.random() < 0.5:
            guess[self._random.integers(len(guess))] = int(self._random.integers(VOCAB))
        return tuple(guess)


def test_drafts_never_change_an_answer(model, draft):
    proposers = {
        "ngram": lambda *_: NgramProposer(4, longest=3, shortest=1),
        "draft": lambda *_: DraftProposer(draft, 3),
        "itself": lambda *_: DraftProposer(model, 3),
        "random": lambda seed, truth: RandomProposer(seed, truth),
    }

    @given(
        seed=st.integers(0, 10**6),
        proposer_name=st.sampled_from(sorted(proposers)),
        block_tokens=st.sampled_from([1, 4, 16]),
        # the longest request needs room for 52 tokens: 38 prompt tokens and 14 of 15 answer tokens
        room=st.sampled_from([52, 64, 256]),
        max_step_tokens=st.sampled_from([4, 32]),
        prefix_caching=st.booleans(),
    )
    @settings(max_examples=8 * SOAK, deadline=None)
    def check(seed, proposer_name, block_tokens, room, max_step_tokens, prefix_caching):
        random = np.random.default_rng(seed)
        given = prompts(seed, *random.integers(1, 16, 4).tolist(), shared=random.integers(0, 16, 4).tolist())
        given[0] += given[0][-4:] * 2  # a repetition, so that NgramProposer proposes tokens
        kinds = (greedy, lambda count: SamplingParams(temperature=0.4, seed=seed, max_tokens=count))
        params = [kinds[random.integers(2)](int(random.integers(1, 16))) for _ in given]
        expected = [alone(model, *each) for each in zip(given, params, strict=True)]
        truth = [(*prompt, *answer.tokens) for prompt, answer in zip(given, expected, strict=True)]
        engine = make_engine(
            model,
            -(-room // block_tokens),
            block_tokens,
            max_step_tokens=max_step_tokens,
            prefix_caching=prefix_caching,
            proposer=proposers[proposer_name](seed, truth),
        )
        actual = serve(engine, list(zip(given, params, strict=True)), seed)
        assert [(each.tokens, each.reason) for each in actual] == [(each.tokens, each.reason) for each in expected]

    check()


def answer_of(engine, prompt, params):
    name = engine.add(prompt, params)
    return finish(engine)[name]


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_draft_by_the_same_model_is_always_accepted(model, block_tokens, temperature):
    """Prefix hits and partial block copies must also restore the KV of the draft model."""
    engine = make_engine(model, 256 // block_tokens, block_tokens, proposer=DraftProposer(model, 4))
    params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, max_tokens=21)
    long, short = prompts(1, 37, 21, shared=[23, 23])
    cold = answer_of(engine, long, params)
    assert cold.num_cached == 0
    for prompt, min_cached in ((long, 56), (short, 20), (long + cold.tokens[:9], 61)):
        answer = answer_of(engine, prompt, params)
        assert answer.num_cached >= min_cached // block_tokens * block_tokens
        assert answer.num_steps == 5  # one step for the first token, then four steps of five tokens
        assert answer.tokens == alone(model, prompt, params).tokens
    copied = answer_of(engine, [*long[:30], 7, 8, 9], params)
    assert copied.num_cached == 30
    assert copied.num_steps == 5
    assert engine.explain("request-0").num_cached_tokens == 0


def test_ngram_proposer_finds_repeated_text(model):
    (prompt,) = prompts(2, 12)
    tokens = alone(model, prompt, greedy(40)).tokens
    engine = make_engine(model, proposer=NgramProposer(4))
    name = engine.add(prompt + tokens + prompt, greedy(20))
    plain = alone(model, prompt + tokens + prompt, greedy(20))
    assert finish(engine)[name].tokens == plain.tokens
    guess = NgramProposer(3, longest=2, shortest=2)._draft
    assert guess(np.array([1, 2, 3, 4, 5, 1, 2], np.int32)) == (3, 4, 5)
    assert guess(np.array([1, 2, 3, 1, 2, 4, 1, 2], np.int32)) == (4, 1, 2)
    assert guess(np.array([1, 2, 3], np.int32)) == ()
    assert guess(np.array([1], np.int32)) == ()


@pytest.mark.parametrize("length", [240, 252, 253, 254, 255])
def test_drafts_stop_at_the_end_of_the_context(model, length):
    (prompt,) = prompts(3, length)
    engine = make_engine(model, 70, 4, max_step_tokens=256, proposer=DraftProposer(model, 4))
    answer = answer_of(engine, prompt, greedy(100))
    assert len(answer.tokens) == 256 - length
    assert answer.tokens == alone(model, prompt, greedy(100)).tokens


@pytest.mark.parametrize("num_blocks", [3, 4, 5])
def test_drafts_need_no_more_blocks_than_the_answer(model, num_blocks):
    """Fill the cache to its last slot, with and without a proposer."""
    (prompt,) = prompts(4, 6)
    plain = make_engine(model, num_blocks, 4)
    guessing = make_engine(model, num_blocks, 4, proposer=DraftProposer(model, 4))
    actual, expected = (answer_of(engine, prompt, greedy(100)) for engine in (guessing, plain))
    assert actual.tokens == expected.tokens
    assert actual.reason is FinishReason.LENGTH
    assert guessing.explain("request-0").num_preempted <= 1


class Failing(Model):
    """A draft model that cannot compute logits. Engine steps can still fill its cache, but proposing drafts fails."""

    def __init__(self, model):
        super().__init__(model.config, model.weights, model.ops)

    def logits(self, hidden):
        del hidden
        raise RuntimeError("the draft model failed")


def test_failing_proposer_warns_and_answers_continue(model, draft):
    engine = make_engine(model, proposer=DraftProposer(Failing(draft), 2))
    (prompt,) = prompts(5, 9)
    with pytest.warns(RuntimeWarning, match="the draft model failed"):
        answer = answer_of(engine, prompt, greedy(6))
    assert answer.tokens == alone(model, prompt, greedy(6)).tokens


def test_small_draft_model_raises_or_limits_the_context(model):
    """A draft model with another vocabulary size is refused. A draft model with fewer positions limits the context."""
    other = Model(replace(model.config, vocab_size=100), model.weights)
    with pytest.raises(ArgumentError, match="100 tokens, but the model has 199"):
        make_engine(model, proposer=DraftProposer(other))
    short = Model(replace(model.config, max_positions=64), model.weights, InvariantOps())
    engine = make_engine(model, proposer=DraftProposer(short))
    (prompt,) = prompts(6, 50)
    answer = answer_of(engine, prompt, greedy(100))
    assert len(answer.tokens) == 14
    assert answer.tokens == alone(model, prompt, greedy(14)).tokens
    with pytest.raises(RangeError, match="may have at most 64"):
        engine.add([5] * 64)


def test_n_answers_are_the_same_with_and_without_drafts(model, draft):
    (prompt,) = prompts(7, 21)
    params = SamplingParams(temperature=0.3, seed=3, n=3, max_tokens=10, ignore_eos=True)
    actual = []
    for proposer in (None, DraftProposer(draft, 3), DraftProposer(model, 3)):
        engine = make_engine(model, 24, 4, proposer=proposer)
        name = engine.add(prompt, params)
        answers = finish(engine)
        actual.append([answers[name, index].tokens for index in range(3)])
    assert actual[0] == actual[1] == actual[2]


def test_drafts_work_with_penalties_and_logprobs_and_min_tokens(model):
    (prompt,) = prompts(8, 10)
    for params in (
        greedy(20, penalties=Penalties(frequency=1.5, presence=0.5, repetition=1.3)),
        greedy(20, logprobs=2),
        greedy(20, ignore_eos=False, min_tokens=20),
    ):
        expected = alone(model, prompt, params)
        engine = make_engine(model, proposer=RandomProposer(1, [prompt + expected.tokens]))
        actual = answer_of(engine, prompt, params)
        assert actual.tokens == expected.tokens
        assert actual.logprobs == expected.logprobs
        assert actual.num_steps < expected.num_steps


def test_invalid_proposer_raises(model):
    for wrong in ({"num_tokens": 0}, {"shortest": 0}, {"longest": 1}):
        with pytest.raises(RangeError):
            NgramProposer(**wrong)
    with pytest.raises(RangeError):
        DraftProposer(model, 0)
