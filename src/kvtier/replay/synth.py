"""Synthetic traces: conversations with shared system prompts, agents with tools, questions about documents."""

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
    """Parameters of a trace. `turns`, all `.._blocks` and `answer_tokens` are means of geometric distributions.

    A session starts with one of `system_prompts` prompts. Some sessions continue with tool definitions (`agent_share`)
    or with one of `documents` documents (`document_share`). Every turn adds a message, and the answer is added before
    the next turn. The n-th prompt, or document, has a probability proportional to 1 / n. A block has 512 tokens.
    """

    sessions: int = 1000
    session_rate: float = 1.0
    """Sessions that start per second."""
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
                raise RangeError(f"{name} must be finite and at least 1, got {getattr(self, name)}")
        if not (0 < self.session_rate < math.inf and 0 <= self.think_seconds < math.inf):
            raise RangeError(
                f"session_rate must be finite and above 0, and think_seconds finite and 0 or more, got "
                f"{self.session_rate} and {self.think_seconds}"
            )
        if not (min(self.agent_share, self.document_share) >= 0 and self.agent_share + self.document_share <= 1):
            raise RangeError(
                f"agent_share and document_share must be 0 or more, and their sum at most 1, got {self.agent_share} "
                f"and {self.document_share}"
            )


def generate(spec: SyntheticTrace) -> Iterator[TraceRequest]:
    """Yield requests in order of time. The same parameters and seed produce the same trace on every machine."""
    sessions = _Sessions(spec)
    start = 0.0
    for _ in range(spec.sessions):
        start += sessions.random.exponential(1 / spec.session_rate)
        yield from sessions.turns_until(start)
        sessions.start(start)
    yield from sessions.turns_until(math.inf)


class _Sessions:
    """The running sessions. New blocks get consecutive hash ids."""

    def __init__(self, spec: SyntheticTrace) -> None:
        self.spec = spec
        self.random = np.random.default_rng(spec.seed)
        self._next_id = self._num_started = 0
        self._due: list[tuple[float, int, list[int], int]] = []
        """Heap of (time of the next turn, session number, hash ids, turns left)."""
        self._systems = [self._blocks(spec.system_blocks) for _ in range(spec.system_prompts)]
        self._tools = [self._blocks(spec.tool_blocks) for _ in range(spec.system_prompts)]
        self._documents = [self._blocks(spec.document_blocks) for _ in range(spec.documents)]

    def _blocks(self, mean: float) -> list[int]:
        count = int(self.random.geometric(1 / mean))
        first, self._next_id = self._next_id, self._next_id + count
        return list(range(first, first + count))

    def start(self, now: float) -> None:
        system = self._popular(len(self._systems))
        ids = list(self._systems[system])
        kind = self.random.random()
        if kind < self.spec.agent_share:
            ids += self._tools[system]
        elif kind < self.spec.agent_share + self.spec.document_share:
            ids += self._documents[self._popular(len(self._documents))]
        heapq.heappush(self._due, (now, self._num_started, ids, int(self.random.geometric(1 / self.spec.turns))))
        self._num_started += 1

    def turns_until(self, end: float) -> Iterator[TraceRequest]:
        spec, random = self.spec, self.random
        while self._due and self._due[0][0] <= end:
            now, number, ids, turns_left = heapq.heappop(self._due)
            ids += self._blocks(spec.message_blocks)
            tail = int(random.integers(1, TRACE_BLOCK_TOKENS + 1))
            input_tokens = (len(ids) - 1) * TRACE_BLOCK_TOKENS + tail
            output_tokens = int(random.geometric(1 / spec.answer_tokens))
            yield TraceRequest(round(now * 1000), input_tokens, output_tokens, tuple(ids))
            if turns_left > 1:
                # The answer is appended to the last block, so this block gets a new id.
                del ids[-1]
                ids += self._blocks(max(1.0, (tail + output_tokens) / TRACE_BLOCK_TOKENS))
                heapq.heappush(self._due, (now + random.exponential(spec.think_seconds), number, ids, turns_left - 1))

    def _popular(self, count: int) -> int:
        weights = 1 / np.arange(1, count + 1)
        return int(self.random.choice(count, p=weights / weights.sum()))
