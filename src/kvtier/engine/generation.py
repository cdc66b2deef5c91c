"""Generation: one answer being written, from its tokens to its text, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.output import Explanation, FinishReason, Output
from kvtier.engine.sampling import RequestSampler, Sample
from kvtier.engine.stop import StopChecker
from kvtier.engine.tokenizer import Tokenizer, TokenStream
from kvtier.scheduler import Request


@dataclass(slots=True)
class Generation:
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
    siblings: list[Generation] = field(default_factory=list)
    """The other answers to the same prompt; they start when its blocks are there to be shared."""

    @classmethod
    def of(
        cls, id: str, index: int, request: Request, sampler: RequestSampler, tokenizer: Tokenizer | None
    ) -> Generation:
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
