"""What an engine tells of a request: Output and Explanation. No torch: they go to processes that do not compute."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.engine.params import Logprobs


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
