"""What a scheduler is told, what it says and what it hears back: limits, steps with their rows, results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.cache.allocation import BlockCopy
from kvtier.errors import RangeError
from kvtier.messages import Plan
from kvtier.scheduler.request import Control, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    max_rows: int = 256
    """Requests in a step."""
    max_step_tokens: int = 2048
    """Tokens in a step; longer prompts are computed in chunks."""
    max_context: int = 1 << 30
    """Tokens of a request, prompt and answer."""
    lookahead_tokens: int = 0
    """Slots a generating request has beyond its step where there is room, for somebody who guesses ahead."""
    starts_early: bool = False
    """Whether the worker can wait for a load layer by layer, so that a step may start before it is done."""
    age_seconds: float = 30.0
    """Waiting this long is worth one step of priority, so that nobody waits for ever."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_step_tokens", "max_context"):
            if getattr(self, name) < 1:
                raise RangeError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_rows > self.max_step_tokens:
            raise RangeError(
                f"{self.max_rows} rows need as many tokens a step, got max_step_tokens={self.max_step_tokens}"
            )
        if self.lookahead_tokens < 0:
            raise RangeError(f"lookahead_tokens must be at least 0, got {self.lookahead_tokens}")
        if self.age_seconds <= 0:
            raise RangeError(f"age_seconds must be above 0, got {self.age_seconds}")


class Row(NamedTuple):  # as RowResult made for every token: a frozen dataclass takes 2.5 times as long
    """Tokens [first, first + num_tokens) of a request, computed in this step; the last `num_draft` are guesses."""

    request: Request
    first: int
    num_tokens: int
    num_draft: int
    wants_token: bool
    """Whether it ends where the known tokens end, so that the next one is sampled."""
    loads: tuple[int, ...] = ()
    """Transfers that still bring its cached blocks: each layer waits for its part. Their reports are given to the
    manager before `update`; if one failed, the row's result counts for nothing."""

    @classmethod
    def of(cls, request: Request, num_tokens: int, loads: tuple[int, ...] = ()) -> Row:
        """The next tokens of a request, guesses behind the known ones."""
        first, known = request.num_computed, request.chain.num_tokens
        num_draft = max(0, first + num_tokens - known)
        return cls(request, first, num_tokens, num_draft, first + num_tokens - num_draft == known, loads)

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.first + self.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: controls and nothing else, or copies of blocks and then compute the rows."""

    controls: tuple[Control, ...]
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...]
    preempted: tuple[Request, ...]
    refused: tuple[Request, ...]
    plan: Plan
    """Blocks to move between tiers, beside the rows; their reports go to the manager."""

    @property
    def num_tokens(self) -> int:
        """Over all rows."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def attended_tokens(self) -> float:
        """Over all tokens, how many each looks back on."""
        return sum(row.num_tokens * (row.first + row.num_tokens / 2) for row in self.rows)

    @property
    def loads(self) -> tuple[int, ...]:
        """Transfers its rows wait for, layer by layer."""
        return tuple(load for row in self.rows for load in row.loads)

    def __bool__(self) -> bool:
        return bool(self.controls or self.rows or self.refused or self.plan)


class RowResult(NamedTuple):
    """What a row gave: tokens that follow (none for a chunk that is not the last), and whether it is enough."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
