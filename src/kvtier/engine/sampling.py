"""From logits to tokens: one sampler for a whole batch of requests.

A request's sample depends on its logits, its parameters, its own tokens and its own generator, never on its batch
mates: every step works on rows, and random numbers are drawn from a generator per request.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvtier.engine.params import Logprobs, Penalties, SamplingParams
from kvtier.errors import ArgumentError

# Top-p mostly ends within this many tokens; then the whole vocabulary need not be sorted.
_TRIMMED = 512


class Sample(NamedTuple):
    """What the sampler chose for one row."""

    token_id: int
    logprobs: Logprobs | None


class RequestSampler:
    """A request's side of sampling: its parameters, its generator and the tokens penalties count."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] = (), eos_token_ids: Sequence[int] = (), index: int = 0
    ) -> None:
        """`index` tells the n samples of a request apart."""
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._random = np.random.default_rng([seed, index])
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._counts: dict[int, int] = {}
        self._num_chosen = 0
        self._ends = tuple({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._constraint = params.constraint() if params.constraint is not None else None

    def accept(self, token_id: int) -> None:
        """Count a token of the output (the sampler does not do it itself: drafted tokens may be refused)."""
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._num_chosen += 1
        if self._constraint is not None:
            self._constraint.accept(token_id)

    def is_end(self, token_id: int) -> bool:
        """Whether this token ends the request."""
        return token_id in self._ends

    @property
    def changes_logits(self) -> bool:
        """Whether `adjust` would do anything now."""
        is_early = bool(self._ends) and self._num_chosen < self.params.min_tokens
        return self._constraint is not None or is_early or self.params.penalties != Penalties()

    @torch.inference_mode()
    def adjust(self, logits: torch.Tensor) -> None:
        """Apply penalties to a row of logits in place, and forbid an end that would come too early, and what does not
        fit the constraint."""
        penalties = self.params.penalties
        output = torch.tensor(list(self._counts), dtype=torch.int64, device=logits.device)
        if penalties.repetition != 1.0:
            seen = torch.from_numpy(np.union1d(self._prompt, np.fromiter(self._counts, np.int64))).to(logits.device)
            scores = logits[seen]
            logits[seen] = torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition)
        if len(output) and (penalties.presence or penalties.frequency):
            times = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            logits[output] -= penalties.presence + penalties.frequency * times
        if self._num_chosen < self.params.min_tokens and self._ends:
            logits[list(self._ends)] = -torch.inf
        if self._constraint is not None:
            self._constraint.forbid(logits)

    def uniform(self) -> float:
        """The request's next random number, in [0, 1)."""
        return float(self._random.random())


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    requests: Sequence[RequestSampler],
    to_list: Callable[[torch.Tensor], list[int]] | None = None,
) -> list[Sample]:
    """Choose a token for each row of logits ([rows, vocab], float32); changes them. Accept nothing by itself.

    `to_list` brings the tokens to the host; None: Tensor.tolist.
    """
    if logits.shape[0] != len(requests):
        raise ArgumentError(f"{logits.shape[0]} rows of logits for {len(requests)} requests: one each")
    reports = _report_later(logits, requests)
    for row, request in enumerate(requests):
        if request.changes_logits:
            request.adjust(logits[row])
    chosen = logits.argmax(-1)
    random = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if random:
        chosen[random] = _draw(logits[random] if len(random) < len(requests) else logits, [requests[i] for i in random])
    tokens = chosen.tolist() if to_list is None else to_list(chosen)
    return [Sample(token, _logprobs(reports.get(row), token)) for row, token in enumerate(tokens)]


class _Order(NamedTuple):
    """How a row's tokens are looked at. Only rows alike are drawn together, so that none depends on the others."""

    width: int
    """The most likely ones in order, this many; 0: all."""
    sorted: bool


def _draw(logits: torch.Tensor, requests: Sequence[RequestSampler]) -> torch.Tensor:
    chosen = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    groups: dict[_Order, list[int]] = {}
    for row, request in enumerate(requests):
        params = request.params
        order = _Order(min(params.top_k, logits.shape[1]), bool(params.top_k) or params.top_p < 1.0)
        groups.setdefault(order, []).append(row)
    for order, rows in groups.items():
        chosen[rows] = _draw_alike(logits[rows], [requests[row] for row in rows], order)
    return chosen


def _draw_alike(logits: torch.Tensor, requests: Sequence[RequestSampler], order: _Order) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, and one draw by inverting the running sum of what is left.

    Sums are running sums, which take the elements of a row in order; torch.sum may not.
    """
    params = [request.params for request in requests]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    weights = logits.double().div_(column([each.temperature for each in params]))
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    top_p, min_p = column([each.top_p for each in params]), column([each.min_p for each in params])
    total, tokens = None, None
    if order.sorted and not order.width:
        total = weights.cumsum(-1)[:, -1:]
    if order.sorted:
        weights, tokens = _likeliest(weights, order.width, top_p if total is None else top_p * total)
    if order.sorted:
        running = weights.cumsum(-1)
        dropped = running - weights >= top_p * (running[:, -1:] if total is None else total)
        dropped &= top_p < 1.0  # all of them reach 1 but for rounding
        weights.masked_fill_(dropped, 0.0)
    if any(each.min_p for each in params):
        weights.masked_fill_(weights < min_p, 0.0)  # the likeliest has weight 1
    running = weights.cumsum(-1)
    target = column([request.uniform() for request in requests]) * running[:, -1:]
    # right, because a draw that falls exactly on a border belongs to the token after it
    place = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    return (place if tokens is None else tokens.gather(-1, place)).squeeze(-1)


class _Ranked(NamedTuple):
    """Weights from the heaviest on, and whose they are."""

    weights: torch.Tensor
    tokens: torch.Tensor


def _likeliest(weights: torch.Tensor, width: int, mass: torch.Tensor) -> _Ranked:
    """`width` of each row, or (0) at least as many as reach its `mass`. Sorting all of a row is slow, and rare."""
    found = _Ranked(*weights.topk(width or min(_TRIMMED, weights.shape[1]), dim=-1))
    short = (found.weights.cumsum(-1)[:, -1:] < mass).squeeze(-1) if not width else None
    if short is None or not bool(short.any()):
        return found
    everything = _Ranked(torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64))
    for all_of_row, some_of_row in zip(everything, found, strict=True):
        all_of_row[:, : some_of_row.shape[1]] = some_of_row
    everything.weights[short], everything.tokens[short] = weights[short].sort(dim=-1, descending=True, stable=True)
    return everything


class _Report(NamedTuple):
    """Log-probabilities of a row, and its most likely tokens."""

    row: torch.Tensor
    top: tuple[tuple[int, float], ...]


def _report_later(logits: torch.Tensor, requests: Sequence[RequestSampler]) -> dict[int, _Report]:
    """For the rows that want log-probabilities: taken before anything changes the logits."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return {}
    logprobs = logits[rows].log_softmax(-1)
    wanted = [requests[row].params.logprobs or 0 for row in rows]
    values, tokens = logprobs.topk(min(max(wanted), logits.shape[1]), dim=-1)
    found = {}
    for i, (row, count) in enumerate(zip(rows, wanted, strict=True)):
        top = tuple(zip(tokens[i, :count].tolist(), values[i, :count].tolist(), strict=True))
        found[row] = _Report(logprobs[i], top)
    return found


def _logprobs(report: _Report | None, token: int) -> Logprobs | None:
    return None if report is None else Logprobs(float(report.row[token]), report.top)
