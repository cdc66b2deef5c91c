"""Log-probabilities of prompt tokens, computed in the same steps as the KV of the prompt.

logits of token    0  1  2  3          A token from the cache has no logits. If s is the first scored token, token s - 1
score token        1  2  3  4 ..       and all later tokens are therefore computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvtier.engine.model import Model
from kvtier.engine.params import PromptLogprobs
from kvtier.errors import StateError

_CHUNK_ELEMENTS = 1 << 23  # logits in memory at a time: 32 MiB in float32, and 32 MiB for their log-softmax


class PromptScores:
    """The tokens of one prompt, and the index of the next token that needs a score."""

    def __init__(self, tokens: np.ndarray[Any, np.dtype[np.int32]], first: int, num_top: int) -> None:
        """`first` is the index of the first scored token, `num_top` the number of alternatives per token."""
        self._tokens = tokens
        self._next = max(1, first)
        self.num_top = num_top

    def num_rows(self, first: int, stop: int, *, follows: bool = False) -> int:
        """Return how many tokens are scored in a step that computes the tokens [first, stop).

        The logits of a token score the next token. The last token of the prompt scores none. `follows` is True if the
        previous step of this prompt is still in flight. That step scores the tokens up to and including `first`.
        """
        begin, end = max(self._next - 1, first if follows else 0), min(stop, len(self._tokens) - 1)
        if first > begin < end:
            raise StateError(f"cannot score token {begin + 1}: token {begin} came from the cache, without logits")
        return max(0, end - begin)

    def targets(self, stop: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the `count` tokens that are scored in a step whose last computed token is `stop` - 1."""
        end = min(stop + 1, len(self._tokens))
        return self._tokens[end - count : end].astype(np.int64)

    def take(self, scores: Sequence[PromptLogprobs]) -> None:
        """Advance past scored tokens. Raises StateError if a score is NaN."""
        for score in scores:
            if math.isnan(score.chosen):
                raise StateError("a logit of the prompt is NaN or infinite, so its log-probabilities are undefined")
        self._next += len(scores)


@torch.inference_mode()
def score_rows(
    model: Model, hidden: torch.Tensor, targets: np.ndarray[Any, np.dtype[np.int64]], num_top: int
) -> list[PromptLogprobs]:
    """Return the log-probability of one target token per row of hidden states, in chunks of bounded memory."""
    vocab = model.config.vocab_size
    rows, num_top = max(1, _CHUNK_ELEMENTS // vocab), min(num_top, vocab)
    found: list[PromptLogprobs] = []
    for begin in range(0, len(hidden), rows):
        logprobs = model.logits(hidden[begin : begin + rows]).log_softmax(-1)
        tokens = torch.from_numpy(targets[begin : begin + rows]).to(logprobs.device)
        chosen = logprobs.gather(-1, tokens[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        values, ids = logprobs.topk(num_top, dim=-1)
        columns = (chosen.squeeze(-1).tolist(), ranks.tolist(), ids.tolist(), values.tolist())
        found += [
            PromptLogprobs(value, rank, tuple(zip(top, top_values, strict=True)))
            for value, rank, top, top_values in zip(*columns, strict=True)
        ]
    return found
