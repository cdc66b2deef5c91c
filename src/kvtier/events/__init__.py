"""KV events for routers: publishes stored and removed blocks over ZMQ in vLLM's format. Needs the extra `events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from kvtier.events.publisher import EventPublisher

__all__ = ["EventConfig", "publish_events"]


@dataclass(frozen=True, slots=True)
class EventConfig:
    """Endpoints and format of an EventPublisher."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Address on which to listen. Any subscriber can read the tokens of prompts, unless `token_ids` is False."""
    replay_endpoint: str = ""
    """Address at which subscribers can request missed messages. If it is empty, there is no replay."""
    topic: str = ""
    connects: bool = False
    """True to connect to a collector at `endpoint` instead of listening there."""
    rank: int = 0
    """The data-parallel rank of this engine."""
    int_hashes: bool = True
    """True to send the last 8 bytes of each key as an integer (vLLM's default) instead of all 32 bytes."""
    token_ids: bool = True
    """True to send the tokens of stored blocks, for routers that hash prompts."""
    num_kept: int = 10_000
    """Number of messages kept for replay. The state of the index before these messages is also kept."""
    max_queued: int = 100_000
    """Maximum number of queued events. Further events are dropped, and an AllBlocksCleared replaces them."""
    shared_tiers: tuple[str, ...] = ("shared",)
    """Names of the stores outside this machine. Their blocks have the locality REMOTE, all other blocks LOCAL."""

    def __post_init__(self) -> None:
        if not self.endpoint or self.rank < 0 or min(self.num_kept, self.max_queued) < 1:
            raise ArgumentError(f"events need an endpoint, rank >= 0, num_kept >= 1 and max_queued >= 1, got {self}")


def publish_events(config: EventConfig) -> EventPublisher:
    """Return a listener for a CacheManager. The listener publishes events until it is closed."""
    try:
        from kvtier.events.publisher import EventPublisher
    except ImportError as error:
        raise UnavailableError(f"KV events need the extra: pip install 'kvtier[events]' ({error})") from error
    return EventPublisher(config)
