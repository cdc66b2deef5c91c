"""Inputs and outputs of the scheduler. A step is one batch of the model; a row is one request's part of a step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtier.cache.allocation import Allocation, BlockCopy
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import ArgumentError, RangeError
from kvtier.index import NO_HINTS, Chain, Hints, Retention
from kvtier.messages import Plan

_NOT_GIVEN = Retention()


class RequestState(Enum):
    """State of a request.

    WAITING --schedule--> RUNNING --preempted, or load failed--> WAITING
    WAITING, RUNNING --> FINISHED | CANCELLED | REFUSED     terminal
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """The request does not fit even if it runs alone, or pinned blocks leave no room. `reason` states the cause."""

    @property
    def is_over(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.RUNNING)


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence. The scheduler changes the attributes of a request; the engine sets only `draft`.

    `chain` contains prompt and output. The KV of its first `num_computed` tokens is in the device cache or is being
    loaded. Steps in flight and later steps compute the other tokens. The step that computes the last token of the chain
    also samples the next token.
    """

    id: str
    chain: Chain
    max_new_tokens: int
    _: KW_ONLY
    priority: int = 0
    retention: Retention = _NOT_GIVEN
    """By default, the blocks have the priority of the request and do not expire."""
    hints: Hints = NO_HINTS
    """Hints of the client about the next request of its session. The learned eviction policy uses them."""
    max_cached_tokens: int | None = None
    """Maximum number of leading tokens that may come from the cache; None sets no limit. The engine needs the logits of
    all later tokens. The limit rises with `num_computed`, so that a preempted request does not compute logits twice."""
    waits_for_token: bool = False
    """True if the caller needs each sampled token before the next row, for a grammar or to draft tokens. Such a request
    gets no new row while its token is being sampled."""
    num_prompt_tokens: int = field(init=False)
    state: RequestState = field(init=False, default=RequestState.WAITING)
    reason: str = field(init=False, default="")
    arrival: float = field(init=False, default=0.0)
    scheduled_at: float | None = field(init=False, default=None)
    """Time of the first admission."""
    fetch_times: tuple[float, float] | None = field(init=False, default=None)
    """Start and end of the first fetch of blocks from stores. None until that fetch has ended."""
    loaded_at: float | None = field(init=False, default=None)
    """Time at which the first load of cached blocks was complete. None before that."""
    prefetch: Prefetch | None = field(init=False, default=None)
    """Fetch of the request's blocks from stores to the host while the request waits."""
    allocation: Allocation | None = field(init=False, default=None)
    """The request's KV. A request that ended keeps its KV while `in_flight` is not empty."""
    in_flight: tuple[Row, ...] = field(init=False, default=())
    """Rows of the request in the steps in flight, oldest first; at most two."""
    num_computed: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    """Number of cached prompt tokens at the last admission before the first preemption. After a failed load, a request
    is admitted again."""
    tokens_from: dict[str, int] = field(init=False, default_factory=dict)
    """Tier name -> number of cached prompt tokens. Set together with `num_cached_tokens`."""
    why_loaded: str = field(init=False, default="")
    """Reason why blocks in lower tiers were loaded or recomputed. Empty if there was no such decision."""
    num_preempted: int = field(init=False, default=0)
    stuck_at: int = field(init=False, default=0)
    """Number of tokens at the last restart of the request; 0 before the first. A request is restarted if it lacks
    blocks and no other request can free any. If this happens twice at the same number, the request is refused."""
    may_load: bool = field(init=False, default=True)
    """True if the request may load blocks from lower tiers. False after a failed load."""
    draft: tuple[int, ...] = field(init=False, default=())
    """Draft tokens that the next row of the request verifies, if there is room."""

    def __post_init__(self) -> None:
        if not self.chain.num_tokens:
            raise ArgumentError(f"request {self.id} has no tokens")
        if self.max_new_tokens < 1:
            raise RangeError(f"max_new_tokens of request {self.id} must be at least 1, got {self.max_new_tokens}")
        self.num_prompt_tokens = self.chain.num_tokens
        if self.retention is _NOT_GIVEN:
            self.retention = Retention(priority=self.priority)

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Pickle all attributes except `in_flight`, `allocation` and `prefetch`, which belong to a scheduler."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, state | {"prefetch": None, "allocation": None, "in_flight": ()}

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.value}, {self.num_computed} of {self.chain.num_tokens} computed)"

    @property
    def num_new_tokens(self) -> int:
        return self.chain.num_tokens - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Number of tokens in the chain, plus one for each row in flight that samples a token."""
        return self.chain.num_tokens + sum([row.wants_token for row in self.in_flight])

    @property
    def num_scheduled(self) -> int:
        """Number of leading tokens that are computed once the steps in flight have ended, if no draft is rejected."""
        return self.in_flight[-1].stop if self.in_flight else self.num_computed

    @property
    def is_generating(self) -> bool:
        """True if only the newest token remains to be scheduled, and at least one earlier token is scheduled."""
        return self.num_scheduled == self.num_known - 1 and self.num_scheduled > 0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step, and rules for the order of requests."""

    max_rows: int = 256
    """Maximum number of running requests. A step has at most one row per running request."""
    max_step_tokens: int = 2048
    """Maximum number of tokens in a step. Longer prompts are computed in chunks."""
    max_context: int = 1 << 30
    """Maximum number of tokens in a request, including prompt and output."""
    lookahead_tokens: int = 0
    """A row that samples a token also reserves blocks for this many later tokens, if there is room."""
    starts_early: bool = False
    """True if the worker can wait for loads layer by layer, so that a step may start before its loads end."""
    age_seconds: float = 30.0
    """The priority for admission rises by one per `age_seconds` since the arrival, so that no request starves."""

    def __post_init__(self) -> None:
        for name, low in {"max_rows": 1, "max_step_tokens": 1, "max_context": 1, "lookahead_tokens": 0}.items():
            if getattr(self, name) < low:
                raise RangeError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_rows > self.max_step_tokens:
            raise RangeError(f"max_step_tokens must be at least max_rows ({self.max_rows}), got {self.max_step_tokens}")
        if self.age_seconds <= 0:
            raise RangeError(f"age_seconds must be above 0, got {self.age_seconds}")


class Row(NamedTuple):  # not a frozen dataclass, because creating a dataclass takes 2.5 times as long
    """Tokens [first, first + num_tokens) of a request, computed in one step. The last `num_draft` tokens are drafts."""

    request: Request
    first: int
    num_tokens: int
    num_draft: int
    wants_token: bool
    """True if the row includes the last known token, so that the next token is sampled. If the previous row of the
    request is still in flight and samples a token, this row starts with that token."""
    loads: tuple[int, ...] = ()
    """Ids of loads in flight. While the row is computed, each layer waits for its part of these loads. The caller must
    apply the reports of the loads before `update`. If a load failed, the result of the row is ignored."""

    @classmethod
    def of(cls, request: Request, num_tokens: int, loads: tuple[int, ...] = ()) -> Row:
        """Return a row with the next tokens of a request. Known tokens precede drafts."""
        first, known = request.num_scheduled, request.num_known
        num_draft = max(0, first + num_tokens - known)
        return cls(request, first, num_tokens, num_draft, first + num_tokens - num_draft == known, loads)

    @property
    def stop(self) -> int:
        return self.first + self.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """Work for the engine. `copies` must be executed before `rows`."""

    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...]
    preempted: tuple[Request, ...]
    refused: tuple[Request, ...]
    plan: Plan
    """Transfers between tiers. The caller passes the reports of the transfers to the CacheManager."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def attended_tokens(self) -> float:
        """Approximate sum of the context lengths of all tokens in the step."""
        return sum(row.num_tokens * (row.first + row.num_tokens / 2) for row in self.rows)

    @property
    def loads(self) -> tuple[int, ...]:
        """Ids of the loads that the rows wait for, layer by layer."""
        return tuple(load for row in self.rows for load in row.loads)


class RowResult(NamedTuple):
    """`tokens`: accepted drafts and the sampled token; empty if `wants_token` is False. `finished` ends the request."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
