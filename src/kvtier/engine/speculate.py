"""Speculation: somebody guesses the next tokens cheaply, the model checks them all in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model
from kvtier.errors import ArgumentError, RangeError
from kvtier.index.pool import I32
from kvtier.scheduler import Request

if TYPE_CHECKING:
    from kvtier.engine.modules import DeviceCacheGroup


class Proposer(Protocol):
    """Who guesses. `models` have a cache group each, which the engine fills with every step it runs."""

    num_tokens: int
    models: tuple[Model, ...]

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        """At most `num_tokens` guesses for each request, all of whose tokens but the newest are computed."""


class NgramProposer:
    """Looks the last tokens up in what was written before: answers often quote their prompt.

    ... the cat sat on the mat. Then the cat          last 2 tokens "the cat" were there before
                ^^^^^^^ ------                        guess what followed: "sat on the"
    """

    models: tuple[Model, ...] = ()

    def __init__(self, num_tokens: int = 4, *, longest: int = 4, shortest: int = 2) -> None:
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise RangeError(f"guess at least 1 token, from 1 <= {shortest} <= {longest}; got num_tokens={num_tokens}")
        self.num_tokens = num_tokens
        self._longest, self._shortest = longest, shortest

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        """What followed the last place that ends as each request does now."""
        del groups
        return [self._guess(request.chain.tokens) for request in requests]

    def _guess(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[int, ...]:
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            if len(found):
                after = int(found[-1]) + length
                return tuple(tokens[after : after + self.num_tokens].tolist())
        return ()


class DraftProposer:
    """A small model of the same vocabulary guesses greedily. Its KV is a second cache group with the same tables."""

    def __init__(self, model: Model, num_tokens: int = 4) -> None:
        if num_tokens < 1:
            raise RangeError(f"guess at least 1 token, got num_tokens={num_tokens}")
        self.models = (model,)
        self.num_tokens = num_tokens

    def propose(self, requests: Sequence[Request], groups: Sequence[DeviceCacheGroup]) -> list[tuple[int, ...]]:
        """Run the small model over the newest token, then over its own guesses."""
        if len(groups) != 1:
            raise ArgumentError(f"a draft model has one cache group, got {len(groups)}")
        group = groups[0]
        limits = (min(len(_table(each)) * group.block_tokens, group.model.config.max_positions) for each in requests)
        room = [limit - request.chain.num_tokens for limit, request in zip(limits, requests, strict=True)]
        guesses: list[list[int]] = [[] for _ in requests]
        for depth in range(self.num_tokens):
            # the token fed at this depth is written at num_tokens - 1 + depth: it needs a slot there
            alive = [i for i in range(len(requests)) if depth <= room[i]]
            if not alive:
                break
            inputs = [
                SequenceInput(
                    [guesses[i][-1] if depth else requests[i].chain.last_token],
                    requests[i].chain.num_tokens - 1 + depth,
                    _table(requests[i]),
                )
                for i in alive
            ]
            batch = ForwardBatch.build(inputs, group.block_tokens, group.model.weights.device)
            logits = group.model.logits(group.model.forward(batch, group.cache))
            for i, token in zip(alive, logits.argmax(-1).tolist(), strict=True):
                guesses[i].append(token)
        return [tuple(guess) for guess in guesses]


def _table(request: Request) -> I32:
    assert request.allocation is not None
    return request.allocation.table
