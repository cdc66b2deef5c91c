"""Speculative decoding: a proposer drafts the next tokens cheaply, and the model verifies all drafts in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model
from kvtier.errors import RangeError
from kvtier.scheduler import Request

if TYPE_CHECKING:
    from kvtier.engine.modules import DeviceCacheGroup


class Proposer(Protocol):
    """Drafts tokens. `models` lists the draft models, if the proposer uses any.

    The engine keeps a cache group for each draft model. Each draft model computes its own KV of all tokens of a step.
    """

    num_tokens: int
    models: tuple[Model, ...]

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        """Return at most `num_tokens` draft tokens per request. `groups` are the cache groups of `models`.

        The caches of the groups contain the KV of every token of a request except the last one.
        """


class NgramProposer:
    """Proposes the tokens after an earlier occurrence of the last tokens, because outputs often quote prompts.

    ... the cat sat on the mat. Then the cat          the last 2 tokens "the cat" occurred before
        ^^^^^^^ --------------                        draft of 4 tokens: "sat on the mat"
    """

    models: tuple[Model, ...] = ()

    def __init__(self, num_tokens: int = 4, *, longest: int = 4, shortest: int = 2) -> None:
        """Search for the last `longest` tokens, then for fewer, down to `shortest`. Use the latest earlier match."""
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise RangeError(
                f"need num_tokens >= 1 and 1 <= shortest <= longest, got {num_tokens=}, {shortest=}, {longest=}"
            )
        self.num_tokens = num_tokens
        self._longest, self._shortest = longest, shortest

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        del groups
        return [self._draft(request.chain.tokens) for request in requests]

    def _draft(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[int, ...]:
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            places = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            if len(places):
                after = int(places[-1]) + length
                return tuple(tokens[after : after + self.num_tokens].tolist())
        return ()


class DraftProposer:
    """Drafts greedily with a small model, which shares the vocabulary and the block tables of the main model."""

    def __init__(self, model: Model, num_tokens: int = 4) -> None:
        if num_tokens < 1:
            raise RangeError(f"num_tokens must be at least 1, got {num_tokens}")
        self.models = (model,)
        self.num_tokens = num_tokens

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        """Run the small model on the newest token of each request, then repeatedly on the latest draft token."""
        (group,) = groups
        tables = [each.allocation.table for each in requests if each.allocation is not None]
        limits = (min(len(table) * group.block_tokens, group.model.config.max_positions) for table in tables)
        room = [limit - request.chain.num_tokens for limit, request in zip(limits, requests, strict=True)]
        drafts = [[request.chain.last_token] for request in requests]
        for depth in range(self.num_tokens):
            # the input token at this depth needs a KV slot at position chain.num_tokens - 1 + depth
            alive = [i for i in range(len(requests)) if depth <= room[i]]
            if not alive:
                break
            inputs = [SequenceInput(drafts[i][-1:], requests[i].chain.num_tokens - 1 + depth, tables[i]) for i in alive]
            batch = ForwardBatch.build(inputs, group.block_tokens, group.model.weights.device)
            logits = group.model.logits(group.model.forward(batch, group.cache))
            for i, token in zip(alive, logits.argmax(-1).tolist(), strict=True):
                drafts[i].append(token)
        return [tuple(draft[1:]) for draft in drafts]
