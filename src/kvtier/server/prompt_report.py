"""PromptReport: the parts of a response that describe its prompts (`echo`, `prompt_logprobs`, `return_token_ids`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.engine.params import PromptLogprobs
from kvtier.engine.tokenizer import Tokenizer


class ScoredToken(NamedTuple):
    """A token of a prompt. `score` is None if the log-probability of the token is not computed."""

    token_id: int
    score: PromptLogprobs | None


class PromptReport:
    """The prompts of one response. Choices n * i to n * i + n - 1 answer prompt i."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        n: int,
        *,
        echo: bool = False,
        num_echoed_top: int = 0,
        num_top: int | None = None,
        first_scored: int = 1,
        token_ids: bool = False,
    ) -> None:
        """`echo` repeats the text of the prompt, with `num_echoed_top` alternatives for each prompt token.

        `num_top` is the number of alternatives in vLLM's `prompt_logprobs`; None leaves out this list. `first_scored`
        is the index of the first prompt token that has a score. `token_ids` adds the ids of all tokens.
        """
        self._tokenizer, self._prompts, self._n = tokenizer, prompts, n
        self.echo, self.num_echoed_top = echo, num_echoed_top
        self.num_top = num_top
        self.token_ids = token_ids
        self._first_scored = first_scored
        self._num_shown: defaultdict[int, int] = defaultdict(int)  # number of tokens returned by `tokens`, by choice
        self._has_text: set[int] = set()
        self._has_ids: set[int] = set()

    def text(self, index: int) -> str:
        """Return the prompt's text if `echo` is set and this is the first call for a choice, else an empty text."""
        if not self.echo or index in self._has_text:
            return ""
        self._has_text.add(index)
        return self._tokenizer.decode(self.prompt(index))

    def new_ids(self, index: int) -> list[int] | None:
        """Return the token ids of the prompt in the first call for a choice, and None in later calls."""
        if index in self._has_ids:
            return None
        self._has_ids.add(index)
        return list(self.prompt(index))

    def tokens(self, index: int, scores: Sequence[PromptLogprobs]) -> list[ScoredToken]:
        """Return the next prompt tokens with `scores`. The first call for a choice starts with the unscored tokens."""
        prompt, begin = self.prompt(index), self._num_shown[index]
        first = [] if begin else [ScoredToken(token, None) for token in prompt[: self._first_scored]]
        begin += len(first)
        self._num_shown[index] = begin + len(scores)
        return first + [ScoredToken(prompt[begin + at], score) for at, score in enumerate(scores)]

    def entries(self, tokens: Sequence[ScoredToken]) -> list[Any]:
        """Return the log-probabilities of tokens in vLLM's format, or an empty list if `num_top` is None."""
        if self.num_top is None:
            return []
        return [None if each.score is None else self._entry(each.token_id, each.score) for each in tokens]

    def _entry(self, token: int, score: PromptLogprobs) -> dict[str, Any]:
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(score.top[: self.num_top], 1)]
        values = {str(token): (score.chosen, score.rank)} | {str(other): (value, rank) for other, value, rank in ranked}
        return {
            name: {
                "logprob": max(value, -9999.0),  # JSON cannot represent minus infinity
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(int(name)).decode("utf-8", "replace"),
            }
            for name, (value, rank) in values.items()
        }

    def prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._n]
