"""EngineSequence: one answer, from its tokens to its text. StopChecker: stop texts in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.engine.params import Explanation, FinishReason, Output
from kvtier.engine.sampling import RequestSampler, Sample
from kvtier.engine.tokenizer import Tokenizer, TokenStream
from kvtier.scheduler import Request


class Released(NamedTuple):
    """What may be shown now."""

    text: str
    stopped: str | None
    """The stop text that was found; the output ends before it."""


class StopChecker:
    """Feed it a text piece by piece; it gives back what can no longer be part of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def feed(self, piece: str) -> Released:
        """Add a piece. Once a stop text was found, feed nothing more."""
        if not self._stops:
            return Released(piece, None)
        text = self._held + piece
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            self._held = ""
            return Released(text[: found[0]], found[1])
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return Released(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The rest, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True)
class EngineSequence:
    """An answer in the making. The engine owns it."""

    id: str
    index: int
    request: Request
    sampler: RequestSampler
    stream: TokenStream | None
    stop: StopChecker
    miss: str = ""
    finish_reason: FinishReason | None = None
    first_token_at: float | None = None
    siblings: list[EngineSequence] = field(default_factory=list)
    """The other answers to the same prompt; they start when its blocks are there to be shared."""

    @classmethod
    def of(
        cls, id: str, index: int, request: Request, sampler: RequestSampler, tokenizer: Tokenizer | None
    ) -> EngineSequence:
        """For a request that has not run yet."""
        stream = tokenizer.stream() if tokenizer is not None else None
        return cls(id, index, request, sampler, stream, StopChecker(sampler.params.stop))

    def take(self, samples: list[Sample]) -> Output:
        """Tokens were chosen. Returns what to tell: an end cuts the rest of the tokens off."""
        text, taken = "", 0
        for sample in samples:
            taken += 1
            is_end = self.sampler.is_end(sample.token_id)
            released = self.stop.feed("" if is_end or self.stream is None else self.stream.add(sample.token_id))
            text += released.text
            if is_end or released.stopped is not None:
                self.finish_reason = FinishReason.STOP
                break
            if self.request.num_new_tokens + taken >= self.request.max_new_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        if self.finish_reason is not None:
            text += self._rest(stopped=self.finish_reason is FinishReason.STOP and not is_end)
        return self.output(text, samples[:taken])

    def end(self, reason: FinishReason, error: str = "") -> Output:
        """End the answer without another token."""
        self.finish_reason = reason
        try:
            text = self._rest(stopped=False)
        except Exception as failure:  # of the tokenizer: the answer ends all the same
            self.sampler.fail(failure)
            self.finish_reason, text, error = FinishReason.ERROR, "", error or self.sampler.error
        return self.output(text, [], error)

    def output(self, text: str, samples: list[Sample], error: str = "") -> Output:
        """What to tell about this step."""
        return Output(
            self.id,
            self.index,
            text,
            tuple([sample.token_id for sample in samples]),
            tuple([sample.logprobs for sample in samples if sample.logprobs is not None]),
            self.finish_reason,
            self.request.num_prompt_tokens,
            self.request.num_cached_tokens,
            error,
        )

    def _rest(self, *, stopped: bool) -> str:
        """Text held back for a stop text that did not come, and half a character, which is part of no stop text."""
        if stopped or self.stream is None:
            return ""
        rest = self.stream.finish()
        whole = rest.rstrip("\N{REPLACEMENT CHARACTER}")
        released = self.stop.feed(whole)
        if released.stopped is not None:
            return released.text
        return released.text + self.stop.finish() + rest[len(whole) :]

    def explain(self) -> Explanation:
        """What became of it."""
        request = self.request
        state = self.finish_reason.value if self.finish_reason is not None else request.state.value
        return Explanation(
            self.id,
            state,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_new_tokens,
            request.num_preempted,
            self.miss,
            dict(request.tokens_from),
            request.why_loaded,
            None if request.scheduled_at is None else request.scheduled_at - request.arrival,
            None if self.first_token_at is None else self.first_token_at - request.arrival,
        )
