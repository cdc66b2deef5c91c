"""Sampling parameters of a request, and its outputs. No torch: the front end process imports this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtier.errors import ArgumentError, RangeError

if TYPE_CHECKING:
    import torch


_MAX_LOGPROBS = 1024


class Bounds(NamedTuple):
    """Lowest and highest accepted value of a parameter."""

    low: float
    high: float


# The HTTP protocol uses the same numbers. Together with float32 logits they keep every intermediate value finite.
TEMPERATURE = Bounds(0.0, 100.0)
"""OpenAI accepts up to 2. Above 100 the distribution is uniform for any model."""
PENALTY = Bounds(-2.0, 2.0)
"""Presence and frequency penalty, as OpenAI, vLLM and SGLang define them."""
REPETITION_PENALTY = Bounds(0.01, 100.0)
"""vLLM and SGLang accept up to 2; checkpoints ship values of 1.0 to 1.3. A factor of 100 either way already decides
every choice, and logits below 1e36 stay finite. Without a lower bound, 1e-45 is 0 in float32: x / 0 is infinite."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Against repeating: all neutral by default."""

    repetition: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence: float = 0.0
    """Taken from the logits of tokens in the output."""
    frequency: float = 0.0
    """Taken from them once for each time they occur there."""

    def __post_init__(self) -> None:
        _within("repetition penalty", self.repetition, *REPETITION_PENALTY)
        _within("presence penalty", self.presence, *PENALTY)
        _within("frequency penalty", self.frequency, *PENALTY)


class Constraint(Protocol):
    """Restricts the tokens of one answer: a grammar and its position. An exception ends that answer only."""

    def forbid(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that cannot follow to -inf. Raises StateError if it cannot."""

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep only this many of the most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    penalties: Penalties = field(default_factory=Penalties)
    seed: int | None = None
    """The same seed gives the same tokens; without one they differ from run to run."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 128
    min_tokens: int = 0
    """Before this many tokens neither the end-of-text token nor a stop token is chosen."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of each chosen token and of this many of the most likely ones."""
    n: int = 1
    """Samples per prompt; they share its blocks."""
    constraint: Callable[[], Constraint] | None = None
    """Makes what limits the tokens of one answer (grammar.Grammars)."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, *TEMPERATURE)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _whole("max_tokens", self.max_tokens, 1, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("n", self.n, 1, 1 << 16)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, 0, (1 << 64) - 1)
        if not all(isinstance(token, int) for token in self.stop_token_ids):
            raise ArgumentError(f"stop_token_ids must be whole numbers, got {self.stop_token_ids!r}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ArgumentError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}")
        if self.n > 1 and self.is_greedy:
            raise ArgumentError(f"n = {self.n} samples at temperature 0 would all be the same; raise the temperature")
        if self.constraint is not None and (self.min_tokens or self.ignore_eos):
            raise ArgumentError("a constraint says where an answer ends: neither min_tokens nor ignore_eos go with it")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


class Logprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most likely tokens, the likeliest first."""


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or not (low < value if open_low else low <= value) or value > high:
        raise RangeError(
            f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}, got {value!r}"
        )


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise RangeError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop text or token came."""
    LENGTH = "length"
    """It reached max_tokens, the model's context, or all the cache has room for."""
    ABORT = "abort"
    """Somebody cancelled it."""
    REFUSED = "refused"
    """There is no room for it, and nothing under way will make some; `error` says why."""
    ERROR = "error"
    """The request or its whole step failed; `error` says why."""


@dataclass(slots=True)
class Output:
    """What one step added to one answer.

    Not frozen, and not to be changed: a frozen dataclass takes five times as long to make, once per token.
    """

    request_id: str
    index: int
    """Which of the request's n answers."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """As many as tokens, if the request asked for them."""
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str = ""

    def __reduce__(self) -> tuple[type[Output], tuple[object, ...]]:
        """Outputs travel between processes: 8.5 us there and back; 31.6 as dataclasses do it (x86-64, 2026-11-15)."""
        told = (self.request_id, self.index, self.text, self.token_ids, self.logprobs)
        return Output, (*told, self.finish_reason, self.num_prompt_tokens, self.num_cached_tokens, self.error)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a request, and why its prompt was found in the cache or not."""

    request_id: str
    state: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_preempted: int
    miss: str
    """Why the match ended where it did."""
    tokens_from: dict[str, int]
    """The cached tokens by the tier they were found in."""
    why_loaded: str
    """Whether blocks of lower tiers were loaded or computed again, with the numbers; empty if there were none."""
    waited_seconds: float | None
    """From its arrival until it had a place and its blocks were on their way."""
    ttft_seconds: float | None
    """From its arrival to its first token."""
