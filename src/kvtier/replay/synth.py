"""Synthetic traces: conversations over shared system prompts, agents with tools, documents asked about repeatedly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.errors import RangeError
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class SyntheticTrace:
    """The knobs. Lengths are means of geometric distributions, in blocks of 512 tokens but where they say tokens.

    A session is one of `system_prompts`, for a share of sessions `tool_blocks` of tool definitions or one of
    `documents`, then turns: each adds a message and, before the next turn, the answer. The popularity of system
    prompts and documents falls as 1 / rank.
    """

    sessions: int = 1000
    session_rate: float = 1.0
    """Sessions that begin per second."""
    turns: float = 4.0
    think_seconds: float = 60.0
    system_prompts: int = 8
    system_blocks: float = 2.0
    agent_share: float = 0.2
    tool_blocks: float = 8.0
    document_share: float = 0.2
    documents: int = 50
    document_blocks: float = 20.0
    message_blocks: float = 2.0
    answer_tokens: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "system_prompts", "documents"):
            if not getattr(self, name) >= 1:
                raise RangeError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("turns", "system_blocks", "tool_blocks", "document_blocks", "message_blocks", "answer_tokens"):
            if not 1 <= getattr(self, name) < math.inf:
                raise RangeError(f"{name} is a mean of at least 1, got {getattr(self, name)}")
        if not (0 < self.session_rate < math.inf and 0 <= self.think_seconds < math.inf):
            raise RangeError(f"session_rate > 0 and think_seconds >= 0, got {self.session_rate}, {self.think_seconds}")
        if not (min(self.agent_share, self.document_share) >= 0 and self.agent_share + self.document_share <= 1):
            raise RangeError(f"shares {self.agent_share} and {self.document_share} are no parts of one")


def generate(spec: SyntheticTrace) -> Iterator[TraceRequest]:
    """The requests in order of time. The same knobs and seed give the same trace on every machine."""
    maker = _Maker(spec)
    start = 0.0
    waiting: list[tuple[float, int, _Session]] = []
    for order in range(spec.sessions):
        start += maker.random.exponential(1 / spec.session_rate)
        while waiting and waiting[0][0] <= start:
            yield from _turn(maker, waiting)
        heapq.heappush(waiting, (start, order, maker.session()))
    while waiting:
        yield from _turn(maker, waiting)


@dataclass(slots=True)
class _Session:
    ids: list[int]
    turns_left: int


class _Maker:
    """Draws sessions and messages; every new block gets the next hash id."""

    def __init__(self, spec: SyntheticTrace) -> None:
        self.spec = spec
        self.random = np.random.default_rng(spec.seed)
        self._next_id = 0
        self._systems = [self.blocks(spec.system_blocks) for _ in range(spec.system_prompts)]
        self._tools = [self.blocks(spec.tool_blocks) for _ in range(spec.system_prompts)]
        self._documents = [self.blocks(spec.document_blocks) for _ in range(spec.documents)]

    def blocks(self, mean: float) -> list[int]:
        """New ids, as many as drawn."""
        count = int(self.random.geometric(1 / mean))
        first, self._next_id = self._next_id, self._next_id + count
        return list(range(first, first + count))

    def session(self) -> _Session:
        """A new one, with what its first turn begins with."""
        system = self._popular(len(self._systems))
        ids = list(self._systems[system])
        kind = self.random.random()
        if kind < self.spec.agent_share:
            ids += self._tools[system]
        elif kind < self.spec.agent_share + self.spec.document_share:
            ids += self._documents[self._popular(len(self._documents))]
        return _Session(ids, int(self.random.geometric(1 / self.spec.turns)))

    def _popular(self, count: int) -> int:
        weights = 1 / np.arange(1, count + 1)
        return int(self.random.choice(count, p=weights / weights.sum()))


def _turn(maker: _Maker, waiting: list[tuple[float, int, _Session]]) -> Iterator[TraceRequest]:
    """The next request of the session that is due, which then thinks, or ends."""
    now, order, session = heapq.heappop(waiting)
    spec, random = maker.spec, maker.random
    session.ids += maker.blocks(spec.message_blocks)
    tail = int(random.integers(1, TRACE_BLOCK_TOKENS + 1))
    input_tokens = (len(session.ids) - 1) * TRACE_BLOCK_TOKENS + tail
    output_tokens = int(random.geometric(1 / spec.answer_tokens))
    yield TraceRequest(round(now * 1000), input_tokens, output_tokens, tuple(session.ids))
    session.turns_left -= 1
    if session.turns_left > 0:
        # the last block was not full, so with the answer behind it it becomes another one
        del session.ids[-1]
        session.ids += maker.blocks(max(1.0, (tail + output_tokens) / TRACE_BLOCK_TOKENS))
        heapq.heappush(waiting, (now + random.exponential(spec.think_seconds), order, session))
