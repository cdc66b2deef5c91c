"""The sampler agrees with numpy and with the logits processors of transformers, and does not depend on the batch."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.params import PENALTY, REPETITION_PENALTY
from kvtier.engine.sampling import NO_TOKEN, Penalties, RequestSampler, SamplingParams, uniforms
from kvtier.engine.sequence import StopChecker
from kvtier.errors import ArgumentError, RangeError
from sampling_support import penalize_row, sample

VOCAB = 50  # not a multiple of 16, so torch samples; tests of native code use 64 tokens


def rows(count, seed=0, scale=3.0, vocab=VOCAB):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (count, vocab)).astype(np.float32))


def reference_distribution(logits, params):
    """Return the probability of each token that top_k, top_p and min_p keep."""
    scaled = logits.double().numpy() / max(params.temperature, 1e-300)
    order = np.argsort(-scaled, kind="stable")
    order = order[: params.top_k or len(order)]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    kept, reached = {}, 0.0
    for token, weight in zip(order.tolist(), weights.tolist(), strict=True):
        if kept and (reached >= params.top_p):
            break
        reached += weight
        if not kept or weight >= params.min_p * weights[0]:
            kept[token] = weight
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=5e-324),  # 1 / top_p is infinite
    SamplingParams(top_p=5e-324, top_k=5),
    SamplingParams(temperature=5e-324),
    SamplingParams(min_p=5e-324),
]


@pytest.mark.parametrize("vocab", [50, 64], ids=["torch", "native"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_sample_follows_the_reference_distribution(params, vocab):
    logits, count = rows(1, vocab=vocab)[0], 6000
    requests = [RequestSampler(SamplingParams(**{**as_dict(params), "seed": i})) for i in range(count)]
    tokens = [each.token_id for each in sample(logits.expand(count, -1).clone(), requests)]
    expected = reference_distribution(logits, params)
    assert set(tokens) <= set(expected)
    frequency = np.bincount(tokens, minlength=vocab) / count
    for token, probability in expected.items():
        spread = math.sqrt(probability * (1 - probability) / count)
        assert abs(frequency[token] - probability) < 5 * spread + 1e-3


def as_dict(params):
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


@pytest.mark.parametrize("params", PARAMS[1:6], ids=str)
def test_reference_keeps_the_same_tokens_as_transformers(params):
    from transformers import generation

    logits = rows(20, seed=3)
    scores = logits.clone() / params.temperature
    warpers = []
    if params.top_k:
        warpers.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(generation.MinPLogitsWarper(params.min_p))
    for warp in warpers:
        scores = warp(None, scores)
    for row, kept in zip(logits, scores, strict=True):
        expected = set(torch.nonzero(torch.isfinite(kept)).flatten().tolist())
        assert set(reference_distribution(row, params)) == expected


def test_greedy_sample_is_the_argmax():
    logits = rows(7)
    expected = logits.argmax(-1).tolist()
    actual = sample(logits, [RequestSampler(SamplingParams(temperature=0.0))] * 7)
    assert [each.token_id for each in actual] == expected
    assert all(each.logprobs is None for each in actual)


def test_native_sample_equals_torch():
    """The rows of `wide` have one additional token of probability 0.

    Native code rejects this length, so torch is used.
    """
    random = np.random.default_rng(5)
    for vocab in (16, 64, 1008, 4096):
        logits = rows(60, vocab, scale=random.uniform(0.1, 6), vocab=vocab)
        logits[torch.from_numpy(random.random(logits.shape) < 0.2)] = -torch.inf
        logits[:, 3] = logits[:, 5] = logits.amax(-1)  # ties
        params = [
            SamplingParams(
                temperature=float(random.choice([1e-3, 0.3, 1.0, 20.0])),
                top_p=float(random.choice([5e-324, 1e-6, 0.5, 0.95, 0.9999, 1.0])),
                min_p=float(random.choice([0.0, 0.05, 1.0])),
                seed=seed,
            )
            for seed in range(60)
        ]
        wide = torch.cat([logits, torch.full((60, 1), -torch.inf)], 1)
        for _ in range(5):
            native = [each.token_id for each in sample(logits.clone(), [RequestSampler(each) for each in params])]
            assert native == [each.token_id for each in sample(wide.clone(), [RequestSampler(each) for each in params])]
            assert torch.isfinite(logits[range(60), native]).all()
            params = [dataclasses.replace(each, seed=each.seed + 60) for each in params]


@given(seed=st.integers(0, 1000), num_others=st.integers(0, 6), place=st.integers(0, 6))
@settings(max_examples=30, deadline=None)
def test_sample_does_not_depend_on_the_batch(seed, num_others, place):
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, seed=seed, logprobs=2)
    logits = rows(1, seed)
    alone = sample(logits.clone(), [RequestSampler(params, [1, 2])])[0]
    place = min(place, num_others)
    others = [SamplingParams(temperature=0.0), SamplingParams(top_p=0.5), SamplingParams(top_k=3, logprobs=5)] * 2
    requests = [RequestSampler(each) for each in others[:num_others]]
    requests.insert(place, RequestSampler(params, [1, 2]))
    batch = rows(num_others, seed + 1)
    mixed = torch.cat([batch[:place], logits, batch[place:]])
    assert sample(mixed, requests)[place] == alone


def test_sample_is_reproducible_and_depends_on_answer_index():
    params = SamplingParams(seed=7)
    logits = rows(1, scale=0.1).expand(20, -1)

    def stream(index):
        request = RequestSampler(params, index=index)
        tokens = []
        for row in logits:
            tokens.append(sample(row[None].clone(), [request])[0].token_id)
            request.accept(tokens[-1])
        return tokens

    assert stream(0) == stream(0)
    assert stream(0) != stream(1)


def splitmix(state):
    """Return the next output of SplitMix64."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(
    seed=st.integers(0, (1 << 64) - 1),
    index=st.integers(0, 99),
    num_prompt=st.integers(0, 9),
    number=st.integers(0, 1 << 40),
)
@settings(max_examples=200, deadline=None)
def test_uniforms_equal_the_splitmix_reference(seed, index, num_prompt, number):
    request = RequestSampler(SamplingParams(seed=seed), [0] * num_prompt, index=index)
    keys, positions = torch.tensor([int(request.resident[0])]), torch.tensor([num_prompt + number])
    state = splitmix(splitmix(seed) + index) + number * 0x9E3779B97F4A7C15
    assert uniforms(keys, positions).tolist() == [(splitmix(state & ((1 << 64) - 1)) >> 11) * 2.0**-53]


def test_penalties_match_transformers_and_expected_values():
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    prompt, output = [3, 4, 4, 9], [7, 3, 7]
    logits = rows(1)
    request = RequestSampler(SamplingParams(penalties=Penalties(1.3)), prompt)
    for token in output:
        request.accept(token)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits.clone())
    actual = logits.clone()
    penalize_row(actual[0], request)
    torch.testing.assert_close(actual, expected)

    request = RequestSampler(SamplingParams(penalties=Penalties(presence=0.5, frequency=0.25)), prompt)
    assert request.is_penalized
    assert not request.is_on_host
    for token in output:
        request.accept(token)
    actual = logits.clone()
    penalize_row(actual[0], request)
    change = torch.zeros(VOCAB)
    change[7], change[3] = 1.0, 0.75
    torch.testing.assert_close(actual[0], logits[0] - change)


def test_end_tokens_are_forbidden_before_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,))
    request = RequestSampler(params, eos_token_ids=[2])
    for position in range(3):
        logits = torch.zeros(1, VOCAB)
        logits[0, 2], logits[0, 5], logits[0, 8] = 9, 8, 1
        token = sample(logits, [request])[0].token_id
        assert token == (8 if position < 2 else 2)
        request.accept(token)
    assert request.is_end(2)
    assert request.is_end(5)
    assert not request.is_end(8)
    ignoring_eos = RequestSampler(SamplingParams(ignore_eos=True, stop_token_ids=(5,)), eos_token_ids=[2])
    assert not ignoring_eos.is_end(2)
    assert ignoring_eos.is_end(5)


def test_logprobs_are_computed_before_penalties_and_filters():
    logits = rows(2)
    expected = logits.log_softmax(-1)
    params = SamplingParams(temperature=0.3, top_k=2, seed=1, logprobs=4, penalties=Penalties(2.0))
    actual = sample(logits, [RequestSampler(params, [1]), RequestSampler(SamplingParams(temperature=0.0, logprobs=0))])
    for row, each in enumerate(actual):
        assert each.logprobs.chosen == pytest.approx(float(expected[row, each.token_id]))
    order = expected[0].argsort(descending=True)[:4]
    assert [token for token, _ in actual[0].logprobs.top] == order.tolist()
    assert [value for _, value in actual[0].logprobs.top] == pytest.approx(expected[0, order].tolist())
    assert actual[1].logprobs.top == ()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"max_tokens": -1},
        {"min_tokens": 200},
        {"n": 0},
        {"logprobs": -1},
        {"seed": -1},
        {"temperature": 100.1},
        {"top_k": 2.5},
        {"max_tokens": 2.0},
        {"n": 1.5},
        {"logprobs": 0.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 0.0099},
        {"repetition_penalty": 100.1},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
    ],
    ids=str,
)
def test_sampling_params_out_of_range_raise(options):
    penalties = {key.removesuffix("_penalty"): value for key, value in options.items() if "penalty" in key}
    with pytest.raises(RangeError, match="must be"):
        SamplingParams(**(options if not penalties else {"penalties": Penalties(**penalties)}))


NOT_FINITE = {
    "all nan": lambda row: row.fill_(torch.nan),
    "first nan": lambda row: row[:1].fill_(torch.nan),
    "last nan": lambda row: row[-1:].fill_(torch.nan),
    "one +inf": lambda row: row[7:8].fill_(torch.inf),
    "nan among -inf": lambda row: row.fill_(-torch.inf)[3:4].fill_(torch.nan),
    "all +inf": lambda row: row.fill_(torch.inf),
    "all -inf": lambda row: row.fill_(-torch.inf),
}
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=3, top_p=0.5),
    SamplingParams(seed=3, top_k=5, min_p=0.1),
    SamplingParams(seed=3, temperature=5e-324, top_p=5e-324, logprobs=3),
]


@pytest.mark.parametrize("vocab", [50, 64], ids=["torch", "native"])
@pytest.mark.parametrize("corrupt", NOT_FINITE.values(), ids=list(NOT_FINITE))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sample_with_non_finite_row_fails_only_that_row(kind, corrupt, vocab):
    for others in ([], [kind], [kind] * 3, KINDS):
        logits = rows(len(others) + 1, vocab=vocab)
        expected = sample(logits[1:].clone(), [RequestSampler(each) for each in others]) if others else []
        corrupt(logits[0])
        requests = [RequestSampler(each) for each in (kind, *others)]
        actual = sample(logits, requests)
        assert actual[0] == (NO_TOKEN, None)
        assert requests[0].error.startswith("no token can be sampled")
        assert actual[1:] == expected
        assert not any(each.error for each in requests[1:])


@pytest.mark.parametrize("repetition", REPETITION_PENALTY)
@pytest.mark.parametrize("scale", [1.0, 1e30, 3.4e38])
@pytest.mark.parametrize("vocab", [50, 64], ids=["torch", "native"])
def test_penalties_at_the_limits_keep_logits_finite(repetition, scale, vocab):
    penalties = Penalties(repetition, *PENALTY)
    request = RequestSampler(SamplingParams(penalties=penalties, top_p=0.5, seed=1), range(20))
    for token in range(10, 30):
        request.accept(token)
    logits = rows(1, vocab=vocab).clamp(-1, 1) * scale
    adjusted = logits[0].clone()
    penalize_row(adjusted, request)
    assert adjusted.isfinite().all()
    (actual,) = sample(logits, [request])
    assert 0 <= actual.token_id < vocab
    assert not request.error


def test_penalties_keep_non_finite_logits():
    request = RequestSampler(SamplingParams(penalties=Penalties(2.0, 1.0, 1.0)), range(8))
    request.accept(0)
    logits = torch.tensor([-torch.inf, torch.inf, torch.nan, *[1.0] * 5])
    penalize_row(logits, request)
    assert logits[0] == -torch.inf
    assert logits[1] == torch.inf
    assert logits[2].isnan()


def test_invalid_sampling_options_raise():
    with pytest.raises(ArgumentError, match="stop must be"):
        SamplingParams(stop=("",))
    with pytest.raises(ArgumentError, match="all be the same"):
        SamplingParams(temperature=0.0, n=2)


@given(
    text=st.text("ab#\n", max_size=40),
    stops=st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1),
)
def test_stop_checker_on_pieces_equals_search_in_whole_text(text, stops, cuts):
    checker, shown, at, is_stopped = StopChecker(stops), "", 0, False
    for cut in cuts * 40:  # repeated, so that the cuts cover a text of 40 characters
        released, is_stopped = checker.feed(text[at : at + cut])
        at += cut
        shown += released
        assert text.startswith(shown)
        if is_stopped or at >= len(text):
            break
    if not is_stopped:
        assert not any(stop in text for stop in stops)
        assert shown + checker.held == text
    else:
        assert text[len(shown) :].startswith(checker.found)
        assert checker.found in stops
        assert not any(stop in shown for stop in stops)


def test_stop_checker_releases_text_that_can_no_longer_match():
    checker = StopChecker(["User:"])
    assert checker.feed("Hello Us") == ("Hello ", False)
    assert checker.feed("a") == ("Usa", False)
    assert checker.feed(" User") == (" ", False)
    assert checker.feed(": hi") == ("", True)
