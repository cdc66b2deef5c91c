"""Sampling of tokens from logits, for a whole batch of requests.

The sample of a request never depends on the rest of the batch, because all operations work on single rows and every
request has its own random generator.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.engine.forward import to_tensors
from kvtier.engine.native import SAMPLING_ROW, native
from kvtier.engine.params import Logprobs, Penalties, SamplingParams
from kvtier.errors import KvtierError, NoTokenError

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # increment of SplitMix64, mask of 64 bits
_COLDEST = float(np.finfo(np.float32).tiny)  # lowest temperature to divide by, instead of 0
_LARGEST = float(np.finfo(np.float32).max)
NO_TOKEN = -1
"""The token of a row that cannot be sampled, because one of its logits is NaN or +inf, or all logits are -inf."""
_NO_DISTRIBUTION = (
    "no token can be sampled: a logit of this request is NaN or infinite, or every token of the vocabulary is forbidden"
)


_CONFLICT = "no token satisfies allowed_token_ids, bad_words, min_tokens and the grammar together; relax one of them"


class Resident(NamedTuple):
    """Sampling parameters that are kept on the device."""

    params: torch.Tensor  # [rows, 4] int64: RequestSampler.resident of each row
    positions: torch.Tensor  # [rows] int64: positions of the sampled tokens in their sequences


class Drawn(NamedTuple):
    """Tokens sampled for a batch of rows, on the device."""

    tokens: torch.Tensor  # [rows] int64
    reports: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """By row: log-probabilities of all tokens, then log-probabilities and ids of the most likely tokens."""
    errors: dict[int, Exception]
    """Errors of the constraints and restrictions, by row."""


class Sample(NamedTuple):
    token_id: int
    """NO_TOKEN if the row failed. In this case, `RequestSampler.error` is set."""
    logprobs: Logprobs | None


class TokenRestrictions:
    """`logit_bias`, `allowed_token_ids` and `bad_words` of one request, as tensors on the device of the logits."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._single = [tokens[0] for tokens in params.bad_words if len(tokens) == 1]
        self._longer = [(tokens[:-1], tokens[-1]) for tokens in params.bad_words if len(tokens) > 1]
        self._chosen: list[int] = []
        self._tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.can_conflict = bool(params.allowed_token_ids or params.bad_words)
        """True if the restrictions can forbid every token, for example together with a grammar."""

    def accept(self, token_id: int) -> None:
        if self._longer:
            self._chosen.append(token_id)

    def apply(self, logits: torch.Tensor) -> None:
        """Change a row of logits in place."""
        tokens, biases, is_forbidden = self._on(logits)
        if len(tokens):
            scores = logits[tokens]
            logits[tokens] = _clamped(scores + biases, scores)
        logits.masked_fill_(is_forbidden, -torch.inf)
        ends = [last for first, last in self._longer if tuple(self._chosen[-len(first) :]) == first]
        if ends:
            logits[ends] = -torch.inf

    def _on(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the biased tokens, their biases and the mask of tokens that are always forbidden."""
        if self._tensors is None:
            bias, allowed = self._params.logit_bias, list(self._params.allowed_token_ids)
            mask = np.full(len(logits), bool(allowed))
            mask[allowed] = False
            mask[self._single] = True
            arrays = np.array([token for token, _ in bias], np.int64), np.array([each for _, each in bias], np.float32)
            tokens, biases, is_forbidden = (torch.from_numpy(each).to(logits.device) for each in (*arrays, mask))
            self._tensors = tokens, biases.to(logits.dtype), is_forbidden
        return self._tensors


class RequestSampler:
    """The sampling state of one request: parameters, random generator, and token counts for penalties."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]] = (),
        eos_token_ids: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        """`index` is the number of this sample among the n samples of a request."""
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._key = _mixed(_mixed(seed) + index)
        # The device computes random numbers from a key and a position in the whole sequence. The length of the prompt
        # is subtracted from the key, so that the numbers depend only on the position in the output.
        numbers = np.array([max(params.temperature, _COLDEST), params.min_p, params.top_p])
        key = np.array([(self._key - len(prompt) * _GOLDEN) & _MASK], np.uint64).view(np.int64)
        self.resident = np.concatenate((key, numbers.view(np.int64)))
        """Key of the random numbers, followed by temperature, min_p and top_p as the bits of float64 numbers."""
        self._prompt, self.num_prompt = prompt, len(prompt)
        self._counts: dict[int, int] = {}
        self.num_accepted = 0
        self._ends = tuple({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._constraint = params.constraint() if params.constraint is not None else None
        is_restricted = params.logit_bias or params.allowed_token_ids or params.bad_words
        self._restrictions = TokenRestrictions(params) if is_restricted else None
        is_changed = params.penalties != Penalties() or self._restrictions is not None
        self._always_changes = is_changed or self._constraint is not None
        self.waits_for_token = (
            params.penalties != Penalties()
            or self._constraint is not None
            or any(len(each) > 1 for each in params.bad_words)
        )
        """True if the host needs all earlier tokens of the output before it can adjust the logits of a token."""
        self._min_tokens = params.min_tokens if self._ends else 0
        self.is_greedy = params.is_greedy
        self.is_sorted = bool(params.top_k) or params.top_p < 1.0
        """True if top_k or top_p needs the tokens sorted by weight."""
        self.error = ""
        """Reason why the request failed, set by `fail`. Samples of a failed request are invalid."""
        self.has_conflict = False
        """True if the request failed because its own restrictions forbid every token."""

    def fail(self, error: Exception) -> None:
        """Record an error of this request. Only the first error is kept."""
        self.has_conflict = self.has_conflict or (not self.error and isinstance(error, NoTokenError))
        named = f"{type(error).__name__}: {error}"
        self.error = self.error or (str(error) if isinstance(error, KvtierError) and str(error) else named)

    def accept(self, token_id: int) -> None:
        """Update the counts and the constraint. Call this method for every token that `sample` returns."""
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self.num_accepted += 1
        if self._restrictions is not None:
            self._restrictions.accept(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)

    def is_end(self, token_id: int) -> bool:
        return token_id in self._ends

    def changes_logits(self, number: int) -> bool:
        """True if `adjust` changes the logits of output token `number`."""
        return self._always_changes or number < self._min_tokens

    @torch.inference_mode()
    def adjust(self, logits: torch.Tensor, number: int) -> None:
        """Apply penalties, restrictions, `min_tokens` and constraint to the logits of output token `number`."""
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
        restrictions = self._restrictions
        if restrictions is not None:
            restrictions.apply(logits)
        if number < self._min_tokens:
            logits[list(self._ends)] = -torch.inf
        if self._constraint is not None:
            self._constraint.forbid(logits)
        if restrictions is not None and restrictions.can_conflict and bool(logits.isneginf().all()):
            raise NoTokenError(_CONFLICT)

    @functools.cached_property
    def _in_prompt(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Distinct tokens of the prompt. Computed on demand; 33,000 tokens take 8 ms (host of the H200, 2026-11-15)."""
        return np.unique(np.asarray(self._prompt, np.int64))


def sample(logits: torch.Tensor, requests: Sequence[RequestSampler]) -> list[Sample]:
    """Sample the next token of each request from logits ([rows, vocab], float32). Overwrites the logits."""
    drawn = draw(logits, requests, [request.num_accepted for request in requests])
    return to_samples(drawn, drawn.tokens.tolist(), requests)


@torch.inference_mode()
def draw(
    logits: torch.Tensor, requests: Sequence[RequestSampler], numbers: Sequence[int], resident: Resident | None = None
) -> Drawn:
    """Sample output token `numbers[row]` for each row of logits. Overwrites the logits.

    A row fails if its constraint raises, or if its logits are not finite. In the second case, its token is NO_TOKEN.
    Other rows are unaffected. With `resident`, no parameters are copied to the device.
    """
    reports, errors = _logprobs(logits, requests), {}
    for row, (request, number) in enumerate(zip(requests, numbers, strict=True)):
        if request.changes_logits(number):
            try:
                request.adjust(logits[row], number)
            except Exception as error:  # the caller provides the code of the constraint
                errors[row] = error
    random = [row for row, request in enumerate(requests) if not request.is_greedy]
    if resident is None and random:
        params = np.stack([request.resident for request in requests])
        positions = np.array([number + request.num_prompt for request, number in zip(requests, numbers, strict=True)])
        resident = Resident(*to_tensors([params, positions], logits.device))
    if len(random) == len(requests) and resident is not None:
        chosen = _draw(logits, requests, resident)
    else:
        chosen = logits.argmax(-1)
        # argmax selects a NaN if there is one, else +inf. It selects -inf only if all logits are -inf.
        chosen = _unless_infinite(logits.gather(-1, chosen[:, None]).squeeze(-1), chosen)
        if random and resident is not None:
            mine = Resident(*(each[random] for each in resident))
            chosen[random] = _draw(logits[random], [requests[row] for row in random], mine)
    return Drawn(chosen, reports, errors)


def to_samples(drawn: Drawn, tokens: Sequence[int], requests: Sequence[RequestSampler]) -> list[Sample]:
    """Return the samples for the tokens in `drawn`, and set the `error` of requests whose rows failed."""
    samples = [Sample(token, None) for token in tokens]
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        if row in drawn.errors:
            request.fail(drawn.errors[row])
        elif token == NO_TOKEN:
            request.error = request.error or _NO_DISTRIBUTION
        if row in drawn.reports and not request.error:
            logprobs, values, top = drawn.reports[row]
            listed = tuple(zip(top.tolist(), values.tolist(), strict=True))
            samples[row] = Sample(token, Logprobs(float(logprobs[token]), listed))
    return samples


def _mixed(number: int) -> int:
    """Return the output of the SplitMix64 generator in state `number`."""
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


def _clamped(changed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Limit changed scores to finite numbers, but keep scores that were not finite before the change."""
    return torch.where(scores.isfinite(), changed.clamp(-_LARGEST, _LARGEST), scores)


def _unless_infinite(highest: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Replace tokens by NO_TOKEN in rows whose highest logit is not finite. `highest` is NaN if any logit is NaN."""
    return tokens.masked_fill(~highest.isfinite(), NO_TOKEN)


def _draw(logits: torch.Tensor, requests: Sequence[RequestSampler], resident: Resident) -> torch.Tensor:
    """Sample each row. Rows with equal top_k and `is_sorted` form a group, whose rows all need the same operations."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault((request.params.top_k, request.is_sorted), []).append(row)
    if len(groups) == 1:
        return _draw_group(logits, requests, resident)
    chosen = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    for rows in groups.values():
        mine = Resident(*(each[rows] for each in resident))
        chosen[rows] = _draw_group(logits[rows], [requests[row] for row in rows], mine)
    return chosen


def _draw_group(logits: torch.Tensor, requests: Sequence[RequestSampler], resident: Resident) -> torch.Tensor:
    """Sample the rows of one group. Overwrites the logits."""
    uniform = uniforms(resident.params[:, 0], resident.positions)
    numbers = resident.params[:, 1:].view(torch.float64)
    code = native().code if logits.device.type == "cpu" and not requests[0].params.top_k else None
    if code is None or not code.takes(logits):
        return _draw_in_torch(logits, requests, numbers, uniform)
    rows = np.empty(len(requests), SAMPLING_ROW)
    rows["temperature"], rows["min_p"], rows["top_p"] = numbers.numpy().T
    rows["uniform"] = uniform.numpy()
    return code.draw(logits, rows)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one random number in [0, 1) per row: the output of SplitMix64 for the row's key and position."""
    state = keys + (positions + 1) * _signed(_GOLDEN)  # int64 arithmetic wraps around
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _shifted(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Shift 64-bit numbers to the right, with zeros from the left."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _draw_in_torch(
    logits: torch.Tensor, requests: Sequence[RequestSampler], numbers: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p, then sample by inverting the running sum of the weights.

    All sums are computed by cumsum, which adds the elements of a row in order. torch.sum does not guarantee an order.
    Only `_heaviest` waits for the device. The host queues the other operations and continues.
    """
    params = [request.params for request in requests]
    temperature, min_p, top_p = numbers[:, 0:1].float(), numbers[:, 1:2].float(), numbers[:, 2:3]
    uniform = uniform[:, None]
    highest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(highest)
    weights.div_(temperature).exp_()
    tokens = None
    if requests[0].is_sorted:
        if top_k := params[0].top_k:
            weights, tokens = weights.topk(min(top_k, weights.shape[1]), dim=-1)
            mass = top_p * _running(weights)[:, -1:]
        else:
            mass = top_p * _running(weights)[:, -1:]
            weights, tokens = _heaviest(mass, top_p, weights)
        dropped = _running(weights) - weights >= mass
        dropped &= top_p < 1.0  # with top_p = 1, only rounding errors could drop tokens
        weights = weights.masked_fill(dropped, 0.0)
    if any(each.min_p for each in params):
        weights = weights.masked_fill(weights < min_p, 0.0)  # the most likely token has weight 1
    running = _running(weights)
    target = uniform * running[:, -1:]
    # right=True, because a target equal to a running sum must select the token after that sum
    place = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    chosen = place if tokens is None else tokens.gather(-1, place)
    return _unless_infinite(highest, chosen).squeeze(-1)


def _running(weights: torch.Tensor) -> torch.Tensor:
    return weights.cumsum(-1, dtype=torch.float64)


def _heaviest(mass: torch.Tensor, top_p: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the heaviest weights of each row, in descending order and padded with zeros, and their tokens.

    The returned weights of a row sum to at least `mass`, which is top_p times the row's total. A token is light if its
    weight is below total * (1 - top_p) / vocab_size. The light tokens together weigh less than total * (1 - top_p), so
    all other tokens reach `mass`. The other tokens are usually few, so sorting them is cheaper than sorting all tokens.
    """
    cut = (mass * (1 / top_p - 1) / weights.shape[1]).clamp_(max=1.0)  # 1 / top_p may be inf; no weight is above 1
    is_heavy = weights >= cut.mul_(1 - 1e-6).to(weights.dtype)
    counts = is_heavy.sum(-1)
    rows, tokens = is_heavy.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    packed = weights.new_zeros(len(weights), max(1, int(counts.max())))  # a row of NaN has no heavy token
    owners = torch.zeros_like(packed, dtype=torch.int64)
    packed[rows, places], owners[rows, places] = weights[rows, tokens], tokens
    heaviest = packed.sort(dim=-1, descending=True, stable=True)
    return heaviest.values, owners.gather(-1, heaviest.indices)


def _logprobs(
    logits: torch.Tensor, requests: Sequence[RequestSampler]
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the log-probabilities and most likely tokens of rows with `logprobs`, before penalties."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return {}
    logprobs = logits[rows].log_softmax(-1)
    wanted = [requests[row].params.logprobs or 0 for row in rows]
    values, tokens = logprobs.topk(min(max(wanted), logits.shape[1]), dim=-1)
    return {
        row: (logprobs[i], values[i, :count], tokens[i, :count])
        for i, (row, count) in enumerate(zip(rows, wanted, strict=True))
    }
