"""A chi-square test that compares sampled tokens with the expected probability of each token."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import torch

from kvtier.engine.params import Penalties, SamplingParams
from kvtier.engine.sampling import IN_PROMPT, RequestSampler, Sample, draw, penalize, to_samples

NUM_DRAWS = 100_000
PROMPT, OUTPUT = (3, 4, 4, 9), (7, 3, 7, 11)
# Each token is a cell of the chi-square test. Cells with fewer expected draws than _LEAST are merged.
_LEAST = 5.0
_OPTIONS = {
    "temperature": (1.0, 0.6, 1.7),
    "top_k": (0, 7),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.08),
    "penalties": (Penalties(), Penalties(1.3, 0.4, 0.25)),
}
CASES = [
    SamplingParams(**dict(zip(_OPTIONS, values, strict=True)), seed=number)
    for number, values in enumerate(itertools.product(*_OPTIONS.values()))
]


def expected_shares(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Return the probability of each token that can be sampled after PROMPT and OUTPUT."""
    scores = list(logits)
    penalties = params.penalties
    for token in {*PROMPT, *OUTPUT}:
        scores[token] = (
            scores[token] / penalties.repetition if scores[token] > 0 else scores[token] * penalties.repetition
        )
    for token in OUTPUT:
        scores[token] -= penalties.frequency
    for token in {*OUTPUT}:
        scores[token] -= penalties.presence
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[: params.top_k or len(scores)]
    weights = {token: math.exp((scores[token] - scores[order[0]]) / params.temperature) for token in order}
    total, reached, kept = sum(weights.values()), 0.0, {}
    for token in order:
        if reached >= params.top_p * total:
            break
        reached += weights[token]
        if weights[token] >= params.min_p:
            kept[token] = weights[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def sample(logits: torch.Tensor, requests: list[RequestSampler]) -> list[Sample]:
    """Sample the next token of each request from logits ([rows, vocab], float32). Overwrite the logits."""
    numbers = [int((request.counts()[1] & (IN_PROMPT - 1)).sum()) for request in requests]
    drawn = draw(logits, requests, numbers)
    return to_samples(drawn, drawn.tokens.tolist(), requests)


def penalize_row(logits: torch.Tensor, request: RequestSampler) -> None:
    """Apply the penalties of a request to a row of logits, in place."""
    counts = torch.zeros(len(logits), dtype=torch.int32)
    tokens, times = request.counts()
    counts[tokens] = torch.from_numpy(times)
    penalize(logits, counts.to(logits.device), request.params.penalties)


def check_draws(params: SamplingParams, vocab: int, device: str) -> None:
    """Draw NUM_DRAWS tokens and compare the count of each token with the expected count."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, vocab).astype(np.float32))
    request = RequestSampler(params, PROMPT)
    for token in OUTPUT:
        request.accept(token)
    row = logits.clone().to(device)
    penalize_row(row, request)
    plain = RequestSampler(replace(params, penalties=Penalties()))  # `row` includes the penalties already
    rows = row.expand(NUM_DRAWS, -1).clone()
    tokens = draw(rows, [plain] * NUM_DRAWS, range(NUM_DRAWS)).tokens.cpu().numpy()
    counts, shares = np.bincount(tokens, minlength=vocab), expected_shares(logits.tolist(), params)
    assert {*np.flatnonzero(counts)} <= {*shares}, "the parameters exclude a token that was drawn"
    cells = sorted((share * NUM_DRAWS, int(counts[token])) for token, share in shares.items())
    while len(cells) > 1 and cells[0][0] < _LEAST:
        cells = sorted([(cells[0][0] + cells[1][0], cells[0][1] + cells[1][1]), *cells[2:]])
    if len(cells) > 1:
        assert chi_square_deviation(cells) < 4.0


def chi_square_deviation(cells: list[tuple[float, int]]) -> float:
    """Return by how many standard deviations the cube root of the chi-square statistic is above its mean.

    By the approximation of Wilson and Hilferty, this cube root is nearly normally distributed.
    """
    degrees = len(cells) - 1
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
