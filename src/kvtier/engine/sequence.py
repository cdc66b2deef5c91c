"""EngineSequence: one of the n sequences of a request. StopChecker: finds stop strings in the text of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier.batch.pipeline import Ticket
from kvtier.engine.params import Explanation, FinishReason, Output, PromptLogprobs
from kvtier.engine.sampling import RequestSampler, Sample
from kvtier.engine.tokenizer import TokenStream
from kvtier.errors import StateError
from kvtier.scheduler import Request

_SCORES_PER_OUTPUT = 128  # limits the time in which the server encodes one output: 8 ms with 20 alternatives per token


class StopChecker:
    """Finds stop strings in streamed text. Holds back text that may be the start of a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include`, `feed` also returns the stop string."""
        self._stops = tuple(stops)
        self._include = include
        self.held = ""
        """Text that was held back and not released yet."""
        self.found = ""
        """The stop string that was found; empty before that."""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Add text. Return the text that can be released, and True if a stop string was found."""
        if not self._stops:
            return piece, False
        text = self.held + piece
        ends = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if ends:
            self.held = ""
            end, self.found = min(ends, key=lambda found: found[0])
            return text[: end + len(self.found) if self._include else end], True
        # hold back the longest suffix of the text that is a prefix of a stop string
        lengths = range(min(max(map(len, self._stops)) - 1, len(text)), 0, -1)
        keep = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False


@dataclass(slots=True)
class EngineSequence:
    """One of the n sequences of a request, with its scheduler request, its sampler and its text decoder."""

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
    """Sequences of this request that have not started. They start once the prompt is computed, and share its blocks."""
    ticket: Ticket = field(init=False)
    """Handle of the sequence in the pipeline, set when the sequence starts."""

    def take(self, samples: list[Sample]) -> Output:
        """Add sampled tokens and return the output of this step. Drop tokens after the end of the sequence."""
        if not self.sampler.params.max_tokens:  # the sample is not part of the output
            self.finish_reason = FinishReason.LENGTH
            return self.output("", [])
        text = ""
        for taken, sample in enumerate(samples, 1):
            is_end = self.sampler.is_end(sample.token_id)
            decoded = "" if is_end or self.stream is None else self.stream.add(sample.token_id)
            piece, is_stopped = self.stop.feed(decoded)
            text += piece
            if is_end or is_stopped:
                self.finish_reason = FinishReason.STOP
                break
            if self.request.num_new_tokens + taken >= self.request.max_new_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        if self.finish_reason is not None and not is_stopped:
            text += self._rest()
        return self.output(text, samples[:taken])

    def take_scores(self, scores: list[PromptLogprobs]) -> list[Output]:
        """Return outputs with the log-probabilities of prompt tokens, at most `_SCORES_PER_OUTPUT` in each output."""
        if any(math.isnan(score.chosen) for score in scores):
            raise StateError("a logit of the prompt is NaN or infinite, so the log-probabilities are undefined")
        count = self.sampler.params.prompt_logprobs
        cut = [score if len(score.top) == count else score._replace(top=score.top[:count]) for score in scores]
        parts = (cut[begin : begin + _SCORES_PER_OUTPUT] for begin in range(0, len(cut), _SCORES_PER_OUTPUT))
        return [replace(self.output("", []), prompt_logprobs=tuple(part)) for part in parts]

    def end(self, reason: FinishReason, error: str = "") -> Output:
        self.finish_reason = reason
        try:
            text = self._rest()
        except Exception as failure:  # raised by the tokenizer; the sequence still ends
            self.sampler.fail(failure)
            self.finish_reason, text, error = FinishReason.ERROR, "", error or self.sampler.error
        return self.output(text, [], error)

    def output(self, text: str, samples: list[Sample], error: str = "") -> Output:
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
            stop_text=self.stop.found,
        )

    def _rest(self) -> str:
        """Return the held-back text, plus U+FFFD for an incomplete character. Stop strings never match this U+FFFD."""
        return "" if self.stream is None else self.stop.held + self.stream.finish()

    def explain(self) -> Explanation:
        request = self.request
        state = self.finish_reason.value if self.finish_reason is not None else request.state.value
        arrival, fetched = request.arrival, request.fetch_times
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
            None if request.scheduled_at is None else request.scheduled_at - arrival,
            None if self.first_token_at is None else self.first_token_at - arrival,
            arrival,
            None if fetched is None else (fetched[0] - arrival, fetched[1] - arrival),
            None if request.loaded_at is None else request.loaded_at - arrival,
        )
