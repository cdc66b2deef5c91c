"""Request: what the scheduler knows of one generation. Control: something to be done between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvtier.cache.allocation import Hold
from kvtier.cache.prefetch import Fetch
from kvtier.errors import ArgumentError, RangeError
from kvtier.index import Chain, Retention


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
        "arrival",
        "chain",
        "draft",
        "fetch",
        "hold",
        "id",
        "max_new_tokens",
        "may_load",
        "num_cached_tokens",
        "num_computed",
        "num_preempted",
        "num_prompt_tokens",
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
        self.fetch: Fetch | None = None
        """Its blocks on their way from stores to the host, while it waits."""
        self.hold: Hold | None = None
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
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in ("fetch", "hold")}
        return None, {**kept, "fetch": None, "hold": None}

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
class Control:
    """Something to be done once, between two steps: a reset, a resize, a pause. Never mixed up with a request."""

    name: str
    run: Callable[[], None]
