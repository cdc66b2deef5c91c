"""Scheduler inputs and outputs: limits, requests, steps with their rows, per-row results, and control operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtier.cache.allocation import Allocation, BlockCopy
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import ArgumentError, RangeError
from kvtier.index import Chain, Retention
from kvtier.messages import Plan


class RequestState(Enum):
    """Where a request stands.

    WAITING --schedule--> RUNNING --preempted--> WAITING
    WAITING, RUNNING --> FINISHED | CANCELLED | REFUSED     once, and for good
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """It can never fit, or not beside what is pinned; `reason` says why."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self not in (RequestState.WAITING, RequestState.RUNNING)


class Request:
    """One sequence. Its chain grows with the answer; the scheduler changes it, callers read.

    `num_computed` tokens of the chain have their KV in the cache; what is left is computed next, and the sample after
    the last one is the next token.
    """

    __slots__ = (
        "allocation",
        "arrival",
        "chain",
        "draft",
        "id",
        "max_new_tokens",
        "may_load",
        "num_cached_tokens",
        "num_computed",
        "num_preempted",
        "num_prompt_tokens",
        "prefetch",
        "priority",
        "reason",
        "retention",
        "scheduled_at",
        "state",
        "stuck_at",
        "tokens_from",
        "why_loaded",
    )

    def __init__(
        self,
        id: str,
        chain: Chain,
        max_new_tokens: int,
        *,
        priority: int = 0,
        retention: Retention | None = None,
    ) -> None:
        if not chain.num_tokens:
            raise ArgumentError(f"request {id} has no tokens")
        if max_new_tokens < 1:
            raise RangeError(f"request {id} asks for {max_new_tokens} new tokens; at least one is generated")
        self.id = id
        self.chain = chain
        self.num_prompt_tokens = chain.num_tokens
        self.max_new_tokens = max_new_tokens
        self.priority = priority
        self.retention = retention or Retention(priority=priority)
        self.state = RequestState.WAITING
        self.reason = ""
        self.arrival = 0.0
        self.scheduled_at: float | None = None
        """When it was first given KV."""
        self.prefetch: Prefetch | None = None
        """Its blocks on their way from stores to the host, while it waits."""
        self.allocation: Allocation | None = None
        self.num_computed = 0
        self.num_cached_tokens = 0
        """Of the prompt, found when it was first scheduled."""
        self.tokens_from: dict[str, int] = {}
        """The same by the tier they were found in."""
        self.why_loaded = ""
        """Whether cached blocks of lower tiers were loaded or computed again, and why; empty if there were none."""
        self.num_preempted = 0
        self.stuck_at = 0
        """Tokens it had when it last gave its KV up because there was no room, though nobody else ran."""
        self.may_load = True
        """Whether cached blocks of lower tiers may be waited for; not any more once a load failed."""
        self.draft: tuple[int, ...] = ()
        """Tokens somebody guesses come next; the next step checks them."""

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """What travels: all but what it holds, whose way leads into the tree."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in ("prefetch", "allocation")}
        return None, {**kept, "prefetch": None, "allocation": None}

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.value}, {self.num_computed} of {self.chain.num_tokens} computed)"

    @property
    def num_new_tokens(self) -> int:
        """Generated so far."""
        return self.chain.num_tokens - self.num_prompt_tokens

    @property
    def is_generating(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_computed == self.chain.num_tokens - 1 and self.num_computed > 0


@dataclass(frozen=True, slots=True)
class ControlOp:
    """Something to be done once, between two steps: a reset, a resize, a pause. Never mixed up with a request."""

    name: str
    run: Callable[[], None]


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

    controls: tuple[ControlOp, ...]
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
