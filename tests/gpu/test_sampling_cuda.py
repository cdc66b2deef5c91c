"""On CUDA, sampled tokens follow the distribution that the sampling parameters define."""

from dataclasses import replace

import pytest
import torch

from kvtier.engine.params import Penalties, SamplingParams
from kvtier.engine.sampling import RequestSampler, draw
from sampling_support import CASES, check_draws, penalize_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("params", CASES, ids=lambda params: f"{params.seed}")
def test_draws_on_cuda_follow_the_computed_distribution(params):
    check_draws(params, 64, "cuda")


@pytest.mark.parametrize("params", CASES[::2], ids=lambda params: f"{params.seed}")
def test_penalties_of_the_kernel_equal_those_of_torch(params):
    penalized, plain = [], []
    logits = torch.randn(64, 32000, generator=torch.Generator().manual_seed(params.seed)).cuda() * 3
    expected = logits.clone()
    exact = Penalties(2.0, 0.5, 0.25)  # all results are exact, so the kernel and torch give equal numbers
    for row in range(64):
        each = replace(params, penalties=exact, seed=row)
        tokens = logits[row].topk(60).indices.tolist()  # tokens that are likely to be sampled
        request = RequestSampler(each, tokens[:40])
        for token in tokens[20:] + tokens[50:]:  # some are in the prompt too, and some are accepted twice
            request.accept(token)
        penalize_row(expected[row], request)
        penalized.append(request)
        plain.append(RequestSampler(replace(each, penalties=Penalties()), tokens[:40]))
    numbers = list(range(64))
    found = draw(logits, penalized, numbers).tokens
    assert found.tolist() == draw(expected, plain, numbers).tokens.tolist()


def test_sampled_tokens_pass_top_k_top_p_and_min_p():
    kinds = [{}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}]
    logits = torch.randn(200, 32000, generator=torch.Generator().manual_seed(5)) * 3
    requests = [RequestSampler(SamplingParams(seed=row, **kinds[row % len(kinds)])) for row in range(200)]
    sampled = draw(logits.cuda(), requests, [0] * 200).tokens.cpu()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    for row, request in enumerate(requests):
        order = weights[row].argsort(descending=True, stable=True)
        kept = order[: request.params.top_k or len(order)]
        running = weights[row][kept].double().cumsum(0)
        before = running - weights[row][kept]
        assert sampled[row] in kept[before < request.params.top_p * running[-1] * (1 + 1e-5)].tolist()
        assert weights[row][sampled[row]] >= request.params.min_p * (1 - 1e-5)
        if request.params.is_greedy:
            assert sampled[row] == order[0]
