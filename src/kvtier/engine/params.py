"""Sampling parameters and outputs of a request. Does not import torch, because the front end uses this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtier.errors import ArgumentError, RangeError

if TYPE_CHECKING:
    import torch

_MAX_LOGPROBS = 1024  # maximum alternatives per token; a limit on the size of outputs

# Lowest and highest accepted values, for Python callers and for HTTP requests. These limits keep every intermediate
# value finite in float32.
TEMPERATURE = (0.0, 100.0)
"""OpenAI accepts up to 2. At 100, the distribution is nearly uniform for any model."""
PENALTY = (-2.0, 2.0)
"""Range of the presence and frequency penalties, equal to the range of OpenAI, vLLM and SGLang."""
REPETITION_PENALTY = (0.01, 100.0)
"""vLLM and SGLang accept up to 2. Checkpoints recommend 1.0 to 1.3. At 100, repetitions are practically excluded, and
logits below 1e36 stay finite. The lower bound prevents a division by 0, because float32 rounds tiny values to 0."""
LOGIT_BIAS = (-100.0, 100.0)
"""Equal to the range of OpenAI and vLLM."""
# Limits on the number of restrictions of one request, because each restriction costs time and memory.
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 16_384
_MAX_BAD_WORDS = 256


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties for repeated tokens; the defaults have no effect."""

    repetition: float = 1.0
    """Divides the positive logits and multiplies the negative logits of tokens that are in the prompt or output."""
    presence: float = 0.0
    """Subtracted from the logit of every token that is in the output."""
    frequency: float = 0.0
    """Subtracted from the logit of a token once for each occurrence in the output."""

    def __post_init__(self) -> None:
        _within("repetition penalty", self.repetition, *REPETITION_PENALTY)
        _within("presence penalty", self.presence, *PENALTY)
        _within("frequency penalty", self.frequency, *PENALTY)


class Constraint(Protocol):
    """Restricts the tokens of one sequence, for example by a grammar. If a method raises, only this sequence ends."""

    def forbid(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf. Raise StateError if every token is forbidden."""

    def accept(self, token_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, and the conditions that end the output."""

    temperature: float = 1.0
    """0 always selects the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all tokens."""
    top_p: float = 1.0
    """Keep the smallest number of most likely tokens whose probabilities sum to at least this value."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this fraction of the largest probability."""
    penalties: Penalties = field(default_factory=Penalties)
    seed: int | None = None
    """The same seed gives the same random numbers; None uses a random seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    include_stop: bool = False
    """True if the output includes the stop string that ended it."""
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and a number. After the penalties, the number is added to the logit of the token."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be sampled; empty for all tokens. To allow the end of the text, include an end-of-text token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not contain."""
    max_tokens: int = 128
    """0 computes the prompt and generates nothing."""
    min_tokens: int = 0
    """End-of-text and stop tokens are not sampled before this number of output tokens. Stop strings still apply."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to report with each sampled token and its log-probability. None: no report."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report with each prompt token and its log-probability. None: no report."""
    prompt_logprobs_start: int = 1
    """Index s of the first prompt token to report. With `prompt_logprobs`, at most s - 1 leading tokens come from the
    cache, because the model computes the log-probability of token s at token s - 1. Token 0 has no log-probability."""
    n: int = 1
    """Number of samples per prompt. All samples share the blocks of the prompt."""
    constraint: Callable[[], Constraint] | None = None
    """Function that returns a new constraint for each sample (see schemas.SchemaCompiler.constraint)."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, *TEMPERATURE)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _whole("max_tokens", self.max_tokens, 0, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("n", self.n, 1, 1 << 16)
        _whole("prompt_logprobs_start", self.prompt_logprobs_start, 1, 1 << 31)
        optional = {"logprobs": _MAX_LOGPROBS, "prompt_logprobs": _MAX_LOGPROBS, "seed": (1 << 64) - 1}
        for name, high in optional.items():
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, high)
        if not all(isinstance(token, int) for token in self.stop_token_ids):
            raise ArgumentError(f"stop_token_ids must be whole numbers, got {self.stop_token_ids!r}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ArgumentError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")
        sizes = {"logit_bias": MAX_BIASES, "allowed_token_ids": MAX_ALLOWED_TOKENS, "bad_words": _MAX_BAD_WORDS}
        for name, most in sizes.items():
            if len(getattr(self, name)) > most:
                raise RangeError(f"{name} has {len(getattr(self, name))} items; at most {most} are accepted")
        for token, bias in self.logit_bias:
            _within(f"the logit_bias of token {token}", bias, *LOGIT_BIAS)
        if not all(self.bad_words):
            raise ArgumentError("bad_words must not contain an empty sequence; leave it out")
        if self.n > 1 and self.is_greedy:
            raise ArgumentError(f"n = {self.n} samples at temperature 0 would all be the same; raise the temperature")
        if self.constraint is not None and (self.min_tokens or self.ignore_eos):
            raise ArgumentError(
                "min_tokens and ignore_eos are not allowed with a constraint, because the constraint ends the output"
            )

    @property
    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """Token ids that occur in the parameters, by name of the parameter."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": tuple(token for tokens in self.bad_words for token in tokens),
        }

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities of the model, before penalties, temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most likely tokens, in descending order."""


class PromptLogprobs(NamedTuple):
    """Log-probability of a prompt token, given the tokens before it."""

    chosen: float
    rank: int
    """1 plus the number of more likely tokens."""
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most likely tokens, in descending order."""


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or not (low < value if open_low else low <= value) or value > high:
        raise RangeError(
            f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}, got {value!r}"
        )


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise RangeError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


class FinishReason(Enum):
    """The reason why a sequence ended."""

    STOP = "stop"
    """End-of-text, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, the context length or the capacity of the cache was reached."""
    ABORT = "abort"
    """The caller cancelled the request."""
    CONFLICT = "conflict"
    """No token satisfies allowed_token_ids, bad_words, min_tokens and the constraint together."""
    REFUSED = "refused"
    """The request does not fit into the cache; `error` has the reason."""
    ERROR = "error"
    """The request or its step failed; `error` has the reason."""


@dataclass(slots=True)
class Output:
    """Text and tokens that one step added to one sequence. Treat an output as immutable.

    The class is not frozen, because creating a frozen instance takes five times as long.
    """

    request_id: str
    index: int
    """Index of the sequence among the n sequences of its request."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """One element per token if SamplingParams.logprobs is set, otherwise empty."""
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str = ""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """One element per prompt token, beginning at SamplingParams.prompt_logprobs_start. Long results are divided among
    several outputs. Only the first sequence of a request has such results."""
    stop_text: str = ""
    """The stop string that ended the sequence, otherwise empty."""

    def __reduce__(self) -> tuple[type[Output], tuple[object, ...]]:
        """Pickle the fields as a tuple. A round trip takes 8.5 instead of 31.6 us (x86-64, measured on 2026-11-15)."""
        fields = (self.request_id, self.index, self.text, self.token_ids, self.logprobs)
        rest = (self.finish_reason, self.num_prompt_tokens, self.num_cached_tokens, self.error)
        return Output, (*fields, *rest, self.prompt_logprobs, self.stop_text)


@dataclass(frozen=True, slots=True)
class Explanation:
    """State of a request, with the reasons for its cache hits and misses."""

    request_id: str
    state: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_preempted: int
    miss: str
    """Reason why the cached prefix was not longer."""
    tokens_from: dict[str, int]
    """Number of cached tokens by tier."""
    why_loaded: str
    """Reason for the decision to load blocks from lower tiers or to recompute them. Empty without such a decision."""
    waited_seconds: float | None
    """Time from arrival to the first admission. None before that."""
    ttft_seconds: float | None
    arrived_at: float = 0.0
    """Time of arrival on the engine's clock, time.monotonic() by default."""
    fetch_seconds: tuple[float, float] | None = None
    """Start and end of the first fetch from stores, in seconds after arrival. None until that fetch has ended."""
    loaded_seconds: float | None = None
    """Time from arrival to the end of the first load to the device. None before that."""
