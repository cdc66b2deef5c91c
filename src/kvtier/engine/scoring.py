"""Log-probabilities of prompt tokens, computed in the same steps as the KV of the prompt.

The logits of a token score the next token. A token from the cache has no logits. If s is the first scored token, token
s - 1 and all later tokens are therefore computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvtier.engine.model import Model
from kvtier.engine.params import PromptLogprobs
from kvtier.errors import StateError
from kvtier.scheduler import Row

_CHUNK_ELEMENTS = 1 << 23  # logits in memory at a time: 32 MiB in float32, and 32 MiB for their log-softmax


def scored_tokens(row: Row) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the prompt tokens that a row scores. The request of the row must have a limit on cached tokens.

    The logits of the last prompt token score no prompt token. The tokens after index `max_cached_tokens` of the request
    are not scored yet. If the previous row of the request is still in flight, that row scores the tokens up to and
    including `row.first`.
    """
    request = row.request
    assert request.max_cached_tokens is not None
    begin = max(request.max_cached_tokens, row.first if len(request.in_flight) > 1 else 0)
    end = min(row.stop, request.num_prompt_tokens - 1)
    if row.first > begin < end:
        raise StateError(f"cannot score token {begin + 1}: token {begin} came from the cache, without logits")
    return request.chain.token_range(begin + 1, max(begin, end) + 1)


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
