"""logit_bias, allowed_token_ids and bad_words: changed logits, invalid values, and use with other parameters."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import VOCAB, alone, finish, greedy, make_engine, prompts
from kvtier.engine import NgramProposer, Penalties, SamplingParams, load_model
from kvtier.engine.params import MAX_ALLOWED_TOKENS, MAX_BIASES
from kvtier.engine.sampling import RequestSampler
from kvtier.engine.sequence import FinishReason
from kvtier.errors import ArgumentError, RangeError
from sampling_support import sample

SMALL = 12  # number of token ids
token = st.integers(0, SMALL - 1)


@given(
    bias=st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4, unique=True),
    allowed=st.lists(token, max_size=SMALL, unique=True),
    output=st.lists(token, max_size=6),
    seed=st.integers(0, 100),
)
def test_adjusted_logits_equal_transformers_processors(bias, bad_words, allowed, output, seed):
    import transformers

    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, SMALL).astype(np.float32))
    expected, ids = logits.clone()[None], torch.tensor([[0, *output]])  # the processors need at least one token
    if bias:
        expected = transformers.SequenceBiasLogitsProcessor({(key,): value for key, value in bias.items()})(
            ids, expected
        )
    words = [list(word) for word in bad_words]
    if words:
        process = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)
        expected = process(torch.tensor([[SMALL + 1, *output]]), expected)  # no bad word has the token SMALL + 1
    forbidden = [each for each in range(SMALL) if allowed and each not in allowed]
    expected[0, forbidden] = -torch.inf
    params = SamplingParams(
        logit_bias=tuple(bias.items()), bad_words=tuple(bad_words), allowed_token_ids=tuple(allowed)
    )
    sampler = RequestSampler(params)
    for each in output:
        sampler.accept(each)
    if bool(expected.isneginf().all()):
        sample(logits[None].clone(), [sampler])
        assert sampler.has_conflict
        return
    assert sampler.is_on_host == bool(bias or bad_words or allowed)
    sampler.adjust(logits, len(output))
    torch.testing.assert_close(logits, expected[0])


def test_extreme_logits_stay_finite_with_biases():
    logits = torch.tensor([3.4e38, -3.4e38, 0.0])
    RequestSampler(SamplingParams(logit_bias=((0, 100.0), (1, -100.0)))).adjust(logits, 0)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": tuple((1, 0.0) for _ in range(MAX_BIASES + 1))},
        {"allowed_token_ids": (1,) * (MAX_ALLOWED_TOKENS + 1)},
        {"bad_words": ((1,),) * 257},  # the maximum is 256
        {"bad_words": ((),)},
    ],
    ids=str,
)
def test_restrictions_out_of_range_raise(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint("llama")[0])


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_engine_with_unknown_token_raises_range_error(model, name):
    value = {"logit_bias": ((VOCAB, 1.0),), "allowed_token_ids": (VOCAB,), "bad_words": ((1, VOCAB),)}[name]
    with pytest.raises(RangeError, match=name):
        make_engine(model).add([1, 2], SamplingParams(**{name: value}))


class OddTokens:
    """A constraint that allows only odd tokens."""

    def forbid(self, logits):
        logits[::2] = -torch.inf

    def accept(self, token_id):
        assert token_id % 2


def test_restrictions_hold_with_drafts_and_several_samples(model):
    """Drafts, penalties, a constraint and several samples do not change which tokens the restrictions allow."""
    given = prompts(1, 12, 12, 12, 12)
    repeated = [prompt * 3 for prompt in given]
    free = alone(model, repeated[0], greedy(12)).tokens
    cases = [
        {"bad_words": (tuple(free[:2]), (free[4],))},
        {"allowed_token_ids": tuple(range(40, 90)), "penalties": Penalties(1.3, 0.5, 0.5)},
        {"logit_bias": ((7, 100.0), (9, 60.0)), "bad_words": ((7, 7),), "constraint": OddTokens, "ignore_eos": False},
        {"allowed_token_ids": (11, 13, 15), "temperature": 1.0, "n": 3, "seed": 4},
    ]
    engine = make_engine(model, 128, 4, proposer=NgramProposer(3))
    names = [engine.add(prompt, greedy(12, **case)) for prompt, case in zip(repeated, cases, strict=True)]
    answers = finish(engine)
    for name, prompt, case in zip(names, repeated, cases, strict=True):
        if case.get("n", 1) == 1:
            assert answers[name].tokens == alone(model, prompt, greedy(12, **case)).tokens
    first = answers[names[0]].tokens
    assert free[4] not in first
    assert tuple(free[:2]) not in itertools.pairwise(first)
    assert all(40 <= each < 90 for each in answers[names[1]].tokens)
    assert answers[names[2]].tokens[:4] == [7, 9, 7, 9]
    assert all({*answers[names[3], index].tokens} <= {11, 13, 15} for index in range(3))
    assert len({tuple(answers[names[3], index].tokens) for index in range(3)}) > 1


def test_conflicting_restrictions_end_only_their_request(model):
    given = prompts(2, 10, 10, 10)
    expected = alone(model, given[1], greedy(8)).tokens
    engine = make_engine(model)
    both = greedy(8, allowed_token_ids=(4, 6), constraint=OddTokens, ignore_eos=False)
    late = greedy(8, allowed_token_ids=(4,), bad_words=((4, 4, 4),))
    names = [engine.add(prompt, params) for prompt, params in zip(given, (both, greedy(8), late), strict=True)]
    answers = finish(engine)
    assert [answers[name].reason for name in names] == [
        FinishReason.CONFLICT,
        FinishReason.LENGTH,
        FinishReason.CONFLICT,
    ]
    assert "no token satisfies" in answers[names[0]].error
    assert answers[names[1]].tokens == expected
    assert answers[names[2]].tokens == [4, 4]
