"""From logits to tokens: one sampler for a whole batch of requests.

A request's sample depends on its logits, its parameters, its own tokens and its own generator, never on its batch
mates: every step works on rows, and random numbers are drawn from a generator per request.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.engine.forward import Send, to_tensors
from kvtier.engine.native import SAMPLING_ROW, native
from kvtier.engine.params import Logprobs, Penalties, SamplingParams
from kvtier.errors import ArgumentError, KvtierError

_COLDEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
NO_TOKEN = -1
"""Sampled for a row that has no distribution: a logit is NaN or +inf, or all are -inf."""
_NO_DISTRIBUTION = (
    "no token can be sampled: a logit of this request is NaN or infinite, or every token of the vocabulary is forbidden"
)


class Sample(NamedTuple):
    """Sampled token of one row."""

    token_id: int
    """NO_TOKEN if the row failed; the request's `error` is set then."""
    logprobs: Logprobs | None


class CandidateOrder(NamedTuple):
    """How a row's tokens are looked at. Only rows alike are drawn together, so that none depends on the others."""

    width: int
    """The most likely ones in order, this many; 0: all."""
    sorted: bool


class RequestSampler:
    """A request's side of sampling: its parameters, its generator and the tokens penalties count."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]] = (),
        eos_token_ids: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        """`index` tells the n samples of a request apart."""
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._random = np.random.default_rng([seed, index])
        self._prompt = prompt
        self._counts: dict[int, int] = {}
        self._num_chosen = 0
        self._ends = tuple({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._constraint = params.constraint() if params.constraint is not None else None
        self._always_changes = params.penalties != Penalties() or self._constraint is not None
        self._min_tokens = params.min_tokens if self._ends else 0
        self.is_greedy = params.is_greedy
        self.order = CandidateOrder(params.top_k, bool(params.top_k) or params.top_p < 1.0)
        """How its tokens are looked at."""
        self.error = ""
        """Why the request cannot continue; its sampled tokens are invalid then. Set by `fail`."""

    def fail(self, error: Exception) -> None:
        """Record an error that belongs to this request alone. The first one counts."""
        named = f"{type(error).__name__}: {error}"
        self.error = self.error or (str(error) if isinstance(error, KvtierError) and str(error) else named)

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
        return self._always_changes or self._num_chosen < self._min_tokens

    @torch.inference_mode()
    def adjust(self, logits: torch.Tensor) -> None:
        """Apply penalties to a row of logits in place, and forbid an end that would come too early, and what does not
        fit the constraint."""
        penalties = self.params.penalties
        output = torch.tensor(list(self._counts), dtype=torch.int64, device=logits.device)
        if penalties.repetition != 1.0:
            seen = torch.from_numpy(np.union1d(self._in_prompt, np.fromiter(self._counts, np.int64))).to(logits.device)
            scores = logits[seen]
            logits[seen] = _clamped(
                torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition), scores
            )
        if len(output) and (penalties.presence or penalties.frequency):
            times = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            scores = logits[output]
            logits[output] = _clamped(scores - (penalties.presence + penalties.frequency * times), scores)
        if self._num_chosen < self._min_tokens:
            logits[list(self._ends)] = -torch.inf
        if self._constraint is not None:
            self._constraint.forbid(logits)

    def uniform(self) -> float:
        """The request's next random number, in [0, 1)."""
        return float(self._random.random())

    @functools.cached_property
    def _in_prompt(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The prompt's tokens, each once: 8 ms for 33,000 (H200's host, 2026-11-15), so only where a penalty asks."""
        return np.unique(np.asarray(self._prompt, np.int64))


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    requests: Sequence[RequestSampler],
    to_list: Callable[[torch.Tensor], list[int]] | None = None,
    send: Send | None = None,
) -> list[Sample]:
    """Sample a token for each row of logits ([rows, vocab], float32), which it overwrites. Accepts no token.

    A row that fails (its constraint raises, its logits are not finite) gets NO_TOKEN and sets its request's `error`;
    the other rows are unaffected. Finiteness is computed on the device and reaches the host with the tokens. `to_list`
    copies the tokens to the host, `send` copies bytes to the device; None uses torch for both.
    """
    if logits.shape[0] != len(requests):
        raise ArgumentError(f"{logits.shape[0]} rows of logits for {len(requests)} requests: one each")
    reports = _report_later(logits, requests)
    for row, request in enumerate(requests):
        if request.changes_logits:
            try:
                request.adjust(logits[row])
            except Exception as error:  # a constraint is the caller's code
                request.fail(error)
    random = [row for row, request in enumerate(requests) if not request.is_greedy]
    if len(random) == len(requests):
        chosen = _draw(logits, requests, send)
    else:
        chosen = logits.argmax(-1)
        # argmax finds NaN first, then +inf; it finds -inf only if there is nothing else
        chosen = _unless_infinite(logits.gather(-1, chosen[:, None]).squeeze(-1), chosen)
        if random:
            chosen[random] = _draw(logits[random], [requests[row] for row in random], send)
    tokens = chosen.tolist() if to_list is None else to_list(chosen)
    return [
        _sample(request, token, reports.get(row))
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True))
    ]


def _sample(request: RequestSampler, token: int, report: _Report | None) -> Sample:
    if token == NO_TOKEN:
        request.error = request.error or _NO_DISTRIBUTION
    return Sample(token, None if report is None or request.error else Logprobs(float(report.row[token]), report.top))


def _clamped(changed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Limit changed scores to finite numbers; scores that were not finite before stay as they were."""
    return torch.where(scores.isfinite(), changed.clamp(-_LARGEST, _LARGEST), scores)


def _unless_infinite(highest: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of rows by their highest logit (NaN if a row has one); NO_TOKEN if that is not finite."""
    return tokens.masked_fill(~highest.isfinite(), NO_TOKEN)


def _draw(logits: torch.Tensor, requests: Sequence[RequestSampler], send: Send | None) -> torch.Tensor:
    groups: dict[CandidateOrder, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(request.order, []).append(row)
    if len(groups) == 1:
        return _draw_alike(logits, requests, requests[0].order, send)
    chosen = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    for order, rows in groups.items():
        chosen[rows] = _draw_alike(logits[rows], [requests[row] for row in rows], order, send)
    return chosen


def _draw_alike(
    logits: torch.Tensor, requests: Sequence[RequestSampler], order: CandidateOrder, send: Send | None
) -> torch.Tensor:
    """One draw for each row. Changes the logits."""
    code = native().code if logits.device.type == "cpu" and not order.width else None
    if code is None or not code.takes(logits):
        return _draw_in_torch(logits, requests, order, send)
    wishes = [(_temperature(each), each.params.min_p, each.params.top_p, each.uniform()) for each in requests]
    return code.draw(logits, np.array(wishes, SAMPLING_ROW))


def _draw_in_torch(
    logits: torch.Tensor, requests: Sequence[RequestSampler], order: CandidateOrder, send: Send | None
) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, and one draw by inverting the running sum of what is left.

    Sums are running sums, which take the elements of a row in order; torch.sum may not. A GPU is still busy with the
    logits when this is called: nothing here waits for it, so that all of this is in its queue when they are there.
    """
    params = [request.params for request in requests]
    columns = (
        np.array([_temperature(request) for request in requests], np.float32),
        np.array([each.min_p for each in params], np.float32),
        np.array([each.top_p for each in params], np.float64),
        np.array([request.uniform() for request in requests], np.float64),
    )
    temperature, min_p, top_p, uniform = (each[:, None] for each in to_tensors(columns, logits.device, send))
    highest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(highest)
    weights.div_(temperature).exp_()
    tokens = None
    if order.sorted:
        if order.width:
            weights, tokens = weights.topk(min(order.width, weights.shape[1]), dim=-1)
            mass = top_p * _running(weights)[:, -1:]
        else:
            mass = top_p * _running(weights)[:, -1:]
            weights, tokens = _reaching(mass, top_p, weights)
        dropped = _running(weights) - weights >= mass
        dropped &= top_p < 1.0  # all of them reach 1 but for rounding
        weights = weights.masked_fill(dropped, 0.0)
    if any(each.min_p for each in params):
        weights = weights.masked_fill(weights < min_p, 0.0)  # the likeliest has weight 1
    running = _running(weights)
    target = uniform * running[:, -1:]
    # right, because a draw that falls exactly on a border belongs to the token after it
    place = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    chosen = place if tokens is None else tokens.gather(-1, place)
    return _unless_infinite(highest, chosen).squeeze(-1)


def _temperature(request: RequestSampler) -> float:
    """As a float32 that is not 0: with 0 the likeliest would weigh 0 / 0, and not 1."""
    return max(request.params.temperature, _COLDEST)


def _running(weights: torch.Tensor) -> torch.Tensor:
    return weights.cumsum(-1, dtype=torch.float64)


class _Ranked(NamedTuple):
    """Weights from the heaviest on, and whose they are; rows that have fewer end with zeros."""

    weights: torch.Tensor
    tokens: torch.Tensor


def _reaching(mass: torch.Tensor, top_p: torch.Tensor, weights: torch.Tensor) -> _Ranked:
    """Of each row as many as reach its mass, which is its share p of all.

    Tokens lighter than (1 - p) / vocabulary of all weigh less than 1 - p together: the others reach p. Mostly they are
    few, and need no sort of the whole vocabulary.
    """
    cut = (mass * (1 / top_p - 1) / weights.shape[1]).clamp_(max=1.0)  # the likeliest has weight 1; 1 / p may be inf
    is_heavy = weights >= cut.mul_(1 - 1e-6).to(weights.dtype)
    counts = is_heavy.sum(-1)
    rows, tokens = is_heavy.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    packed = weights.new_zeros(len(weights), max(1, int(counts.max())))  # a row of NaN has none
    owners = torch.zeros_like(packed, dtype=torch.int64)
    packed[rows, places], owners[rows, places] = weights[rows, tokens], tokens
    heaviest = packed.sort(dim=-1, descending=True, stable=True)
    return _Ranked(heaviest.values, owners.gather(-1, heaviest.indices))


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
