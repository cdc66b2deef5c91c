"""KV events for routers: stored and removed blocks, over ZMQ, in vLLM's format. Needs the extra `events`."""

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
    """Address to listen on for subscribers or, with `connects`, address of a collector. Events contain prompts, which
    anyone who can connect can read."""
    replay_endpoint: str = ""
    """Address where subscribers can request missed messages; empty for no replay."""
    topic: str = ""
    connects: bool = False
    """Connect to `endpoint` instead of listening there."""
    rank: int = 0
    """The data-parallel rank of this engine."""
    int_hashes: bool = True
    """Send the last 64 bits of each key, as vLLM does by default, instead of all 32 bytes."""
    token_ids: bool = True
    """Send the tokens of stored blocks, for routers that hash prompts."""
    num_kept: int = 10_000
    """Messages kept for replay."""
    max_queued: int = 100_000
    """Maximum number of queued events. More events are dropped, which leaves a gap in the sequence numbers."""

    def __post_init__(self) -> None:
        if not self.endpoint or self.rank < 0 or min(self.num_kept, self.max_queued) < 1:
            raise ArgumentError(f"events need an endpoint, rank >= 0, num_kept and max_queued >= 1, got {self}")


def publish_events(config: EventConfig) -> EventPublisher:
    """Return a listener for a CacheManager. The listener publishes events until it is closed."""
    try:
        from kvtier.events.publisher import EventPublisher
    except ImportError as error:
        raise UnavailableError(f"KV events need the extra: pip install 'kvtier[events]' ({error})") from error
    return EventPublisher(config)
