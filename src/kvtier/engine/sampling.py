"""Sampling of tokens from logits, for a whole batch of requests.

For given logits, the sample of a request does not depend on the rest of the batch: all operations work on single rows,
and every request has its own random generator. On CUDA, a Triton kernel samples (sampling_triton.py). On the CPU,
native code or torch samples. All three apply the same penalties and filters.
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

COLUMNS, PARAMS = 12, slice(2, 12)
"""Number of columns of a head, and the columns with sampling parameters. A head is the state of one row, in
int64 columns: token, position, key of the random numbers, temperature, min_p, top_p, top_k, repetition penalty,
presence penalty, frequency penalty, slot of the token counts, RequestSampler.is_on_host. Fractions are stored as the
bits of float64."""
SLOT = 10
"""Column with the index of the request's row in `Resident.counts`, or -1 for a request without penalties."""
IN_PROMPT = 1 << 30
"""Bit of a token count: set if the prompt contains the token. The other bits count occurrences in the output."""
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # increment of SplitMix64, mask of 64 bits
_COLDEST = float(np.finfo(np.float32).tiny)  # lowest temperature above 0; float32 may round lower values to 0
_LARGEST = float(np.finfo(np.float32).max)
NO_TOKEN = -1
"""The token of a row that cannot be sampled, because one of its logits is NaN or +inf, or all logits are -inf."""
_NO_DISTRIBUTION = (
    "no token can be sampled: a logit of this request is NaN or +inf, or every token of the vocabulary is forbidden"
)
_CONFLICT = "no token satisfies allowed_token_ids, bad_words, min_tokens and the grammar together; relax one of them"


class Resident(NamedTuple):
    """The sampling state of a batch of rows, on the device."""

    heads: torch.Tensor  # [rows, COLUMNS] int64
    positions: torch.Tensor  # [rows] int64: positions of the sampled tokens in their sequences
    counts: torch.Tensor  # [slots, vocab] int32, see IN_PROMPT
    slots: Sequence[int]
    """Copy of the column SLOT of `heads`, on the host."""


class Drawn(NamedTuple):
    """Tokens sampled for a batch of rows, on the device."""

    tokens: torch.Tensor  # [rows] int64
    reports: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """By row: log-probabilities of all tokens, log-probabilities of the most likely tokens, ids of these tokens."""
    errors: dict[int, Exception]
    """Errors that constraints and restrictions raised, by row."""


class Sample(NamedTuple):
    token_id: int
    """Invalid, often NO_TOKEN, if the row failed. In this case, `RequestSampler.error` is set."""
    logprobs: Logprobs | None


class TokenRestrictions:
    """`logit_bias`, `allowed_token_ids` and `bad_words` of one request, as tensors on the device of the logits."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._longer = [(tokens[:-1], tokens[-1]) for tokens in params.bad_words if len(tokens) > 1]
        self._tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        """Apply the restrictions, in place, to the logits of the token that follows `output`."""
        tokens, biases, is_forbidden = self._on(logits)
        if len(tokens):
            scores = logits[tokens]
            logits[tokens] = _clamped(scores + biases, scores)
        logits.masked_fill_(is_forbidden, -torch.inf)
        ends = [last for first, last in self._longer if tuple(output[-len(first) :]) == first]
        if ends:
            logits[ends] = -torch.inf

    def _on(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the biased tokens, their biases and the mask of tokens that are always forbidden."""
        if self._tensors is None:
            bias, allowed = self._params.logit_bias, list(self._params.allowed_token_ids)
            mask = np.full(len(logits), bool(allowed))
            mask[allowed] = False
            mask[[tokens[0] for tokens in self._params.bad_words if len(tokens) == 1]] = True
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
        # The device computes random numbers from a key and a position in the whole sequence. The key is lowered by
        # _GOLDEN for each prompt token, so that the numbers depend only on the position in the output.
        key = np.array([(self._key - len(prompt) * _GOLDEN) & _MASK], np.uint64).view(np.int64)
        temperature = 0.0 if params.is_greedy else max(params.temperature, _COLDEST)
        filters = np.array([temperature, params.min_p, params.top_p]).view(np.int64)
        each = params.penalties
        penalties = np.array([each.repetition, each.presence, each.frequency], np.float64).view(np.int64)
        self._prompt, self.num_prompt = prompt, len(prompt)
        self._output: list[int] = []
        self._ends_tensor: torch.Tensor | None = None
        self._ends = tuple({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._constraint = params.constraint() if params.constraint is not None else None
        is_restricted = params.logit_bias or params.allowed_token_ids or params.bad_words
        self._restrictions = TokenRestrictions(params) if is_restricted else None
        self.is_penalized = params.penalties != Penalties()
        self.waits_for_token = self._constraint is not None or any(len(each) > 1 for each in params.bad_words)
        """True if the host needs all earlier tokens of the output before it can adjust the logits of a token."""
        self._min_tokens = params.min_tokens if self._ends else 0
        is_reported = self.is_penalized and params.logprobs is not None  # the report needs logits without penalties
        self.is_on_host = bool(is_restricted or self._constraint is not None or self._min_tokens or is_reported)
        """True if the host changes the logits before a token is sampled."""
        self.resident = np.concatenate((key, filters, [params.top_k], penalties, [-1, self.is_on_host]))
        """Values for the columns PARAMS of a head. The slot is -1 here. With penalties, it is set in the head."""
        self.error = ""
        """Reason why the request failed. Samples of a failed request are invalid."""
        self.has_conflict = False
        """True if the request failed because its own restrictions forbid every token."""

    def fail(self, error: Exception) -> None:
        """Record an error of this request. Only the first error is kept."""
        self.has_conflict = self.has_conflict or (not self.error and isinstance(error, NoTokenError))
        named = f"{type(error).__name__}: {error}"
        self.error = self.error or (str(error) if isinstance(error, KvtierError) and str(error) else named)

    def accept(self, token_id: int) -> None:
        """Add a token to the output, and update the constraint. Call this method for every valid sample."""
        self._output.append(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)

    def is_end(self, token_id: int) -> bool:
        return token_id in self._ends

    @torch.inference_mode()
    def adjust(self, logits: torch.Tensor, number: int) -> None:
        """Apply restrictions, `min_tokens` and the constraint to the logits of output token `number`."""
        if self._restrictions is not None:
            self._restrictions.apply(logits, self._output)
        if number < self._min_tokens:
            logits[self._ends_on(logits.device)] = -torch.inf
        if self._constraint is not None:
            self._constraint.forbid(logits)
        # for example, a grammar and these restrictions together can forbid every token
        if (self.params.allowed_token_ids or self.params.bad_words) and bool(logits.isneginf().all()):
            raise NoTokenError(_CONFLICT)

    def counts(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int32]]]:
        """Return token ids and their counts (see IN_PROMPT). Without a repetition penalty, the prompt is left out."""
        output, times = np.unique(np.array(self._output, np.int64), return_counts=True)
        prompt = self._in_prompt if self.params.penalties.repetition != 1.0 else output[:0]
        tokens = np.union1d(prompt, output)
        counts = np.zeros(len(tokens), np.int32)
        counts[np.searchsorted(tokens, prompt)] = IN_PROMPT
        counts[np.searchsorted(tokens, output)] += times.astype(np.int32)
        return tokens, counts

    def _ends_on(self, device: torch.device) -> torch.Tensor:
        """Return the tokens that end the output, on the device. The first call enqueues a copy to the device."""
        if self._ends_tensor is None:
            (self._ends_tensor,) = to_tensors([np.array(self._ends, np.int64)], device)
        return self._ends_tensor

    @functools.cached_property
    def _in_prompt(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Distinct prompt tokens. Computed on demand: 33,000 tokens take 8 ms (H200 host, measured on 2026-11-15)."""
        return np.unique(np.asarray(self._prompt, np.int64))


@torch.inference_mode()
def draw(
    logits: torch.Tensor, requests: Sequence[RequestSampler], numbers: Sequence[int], resident: Resident | None = None
) -> Drawn:
    """Sample output token `numbers[row]` for each row of logits. May overwrite the logits.

    A row fails if its constraint or restrictions raise an error, or if its logits allow no token. In the second case,
    its token is NO_TOKEN. Other rows are unaffected. With `resident`, no parameters are copied to the device.
    """
    reports, errors = report_logprobs(logits, requests), {}
    if resident is None:
        resident = _to_resident(requests, numbers, logits)
    for row, (request, number) in enumerate(zip(requests, numbers, strict=True)):
        if request.is_on_host or (request.is_penalized and not logits.is_cuda):
            try:
                if request.is_penalized:
                    penalize(logits[row], resident.counts[resident.slots[row]], request.params.penalties)
                request.adjust(logits[row], number)
            except Exception as error:  # a constraint is code of the caller, so it may raise any error
                errors[row] = error
    return Drawn(_choose(logits, requests, resident), reports, errors)


def _to_resident(requests: Sequence[RequestSampler], numbers: Sequence[int], logits: torch.Tensor) -> Resident:
    """Copy the sampling state of requests to the device."""
    is_penalized = np.array([request.is_penalized for request in requests])
    slots = np.where(is_penalized, np.cumsum(is_penalized) - 1, -1)
    heads = np.zeros((len(requests), COLUMNS), np.int64)
    heads[:, PARAMS], heads[:, SLOT] = np.stack([request.resident for request in requests]), slots
    counts = np.zeros((max(1, int(slots.max()) + 1), logits.shape[1]), np.int32)
    for request, slot in zip(requests, slots.tolist(), strict=True):
        if slot >= 0:
            tokens, times = request.counts()
            counts[slot, tokens] = times
    positions = np.array([number + request.num_prompt for request, number in zip(requests, numbers, strict=True)])
    on_device = to_tensors([heads, positions, counts], logits.device)
    return Resident(on_device[0], on_device[1], on_device[2], slots.tolist())


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> None:
    """Apply the penalties to a row of logits, in place. Finite logits stay finite."""
    at = slice(None) if logits.is_cuda else counts.nonzero().squeeze(1)  # nonzero would wait for a GPU
    scores, found = logits[at], counts[at]
    times = (found & (IN_PROMPT - 1)).to(logits.dtype)
    changed = torch.where(scores > 0, scores / penalties.repetition, scores * penalties.repetition)
    changed -= (penalties.presence + penalties.frequency * times) * (times > 0)
    logits[at] = torch.where(found != 0, _clamped(changed, scores), scores)


def _choose(logits: torch.Tensor, requests: Sequence[RequestSampler], resident: Resident) -> torch.Tensor:
    """Sample each row. On the CPU, rows that need the same operations form a group. May overwrite the logits."""
    if logits.is_cuda:
        from kvtier.engine.sampling_triton import sample_rows

        return sample_rows(logits, resident)
    groups: dict[tuple[int, bool] | None, list[int]] = {}
    for row, request in enumerate(requests):
        params = request.params
        groups.setdefault(None if params.is_greedy else (params.top_k, params.top_p < 1.0), []).append(row)
    if len(groups) == 1:
        return _choose_group(logits, requests, resident.heads, resident.positions)
    chosen = torch.empty(len(requests), dtype=torch.int64)
    for rows in groups.values():
        mine = [requests[row] for row in rows]
        chosen[rows] = _choose_group(logits[rows], mine, resident.heads[rows], resident.positions[rows])
    return chosen


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


def _mixed(number: Any) -> Any:
    """Return the output of the SplitMix64 generator in state `number`. `number` is an int or an array of uint64."""
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


def _choose_group(
    logits: torch.Tensor, requests: Sequence[RequestSampler], heads: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample the rows of one group. Overwrites the logits."""
    if requests[0].params.is_greedy:
        # argmax selects a NaN if there is one, else a +inf if there is one, and -inf only if all logits are -inf.
        chosen = logits.argmax(-1)
        return _unless_infinite(logits.gather(-1, chosen[:, None]).squeeze(-1), chosen)
    params = heads[:, PARAMS]
    uniform, numbers = uniforms(params[:, 0], positions), params[:, 1:4].view(torch.float64)
    code = native().code if not requests[0].params.top_k else None
    if code is None or not code.takes(logits):
        return _draw_in_torch(logits, requests, numbers, torch.from_numpy(uniform))
    rows = np.empty(len(requests), SAMPLING_ROW)
    rows["temperature"], rows["min_p"], rows["top_p"] = numbers.numpy().T
    rows["uniform"] = uniform
    return code.draw(logits, rows)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return one random number in [0, 1) per row: the output of SplitMix64 for the row's key and position."""
    states = keys.numpy().view(np.uint64) + positions.numpy().view(np.uint64) * _GOLDEN
    numbers: np.ndarray[Any, np.dtype[np.float64]] = (_mixed(states) >> 11) * 2.0**-53
    return numbers


def _draw_in_torch(
    logits: torch.Tensor, requests: Sequence[RequestSampler], numbers: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p, then sample by inverting the running sum of the weights.

    All sums are computed by cumsum, which adds the elements of a row in order. torch.sum does not guarantee an order.
    """
    params = [request.params for request in requests]
    temperature, min_p, top_p = numbers[:, 0:1].float(), numbers[:, 1:2].float(), numbers[:, 2:3]
    uniform = uniform[:, None]
    highest = logits.amax(-1, keepdim=True)
    weights = logits.sub_(highest)
    weights.div_(temperature).exp_()
    tokens = None
    top_k = params[0].top_k
    if top_k or params[0].top_p < 1.0:  # these filters need the tokens sorted by weight
        if top_k:
            weights, tokens = weights.topk(min(top_k, weights.shape[1]), dim=-1)
            mass = top_p * _running(weights)[:, -1:]
        else:
            mass = top_p * _running(weights)[:, -1:]
            weights, tokens = weights.sort(dim=-1, descending=True, stable=True)
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


def report_logprobs(
    logits: torch.Tensor, requests: Sequence[RequestSampler]
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the entries of `Drawn.reports` for requests with `logprobs`. Call it before penalties are applied."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return {}
    (index,) = to_tensors([np.array(rows)], logits.device)
    logprobs = logits[index].log_softmax(-1)
    wanted = [requests[row].params.logprobs or 0 for row in rows]
    values, tokens = logprobs.topk(min(max(wanted), logits.shape[1]), dim=-1)
    return {
        row: (logprobs[i], values[i, :count], tokens[i, :count])
        for i, (row, count) in enumerate(zip(rows, wanted, strict=True))
    }
