"""KV events for routers: which blocks came and went, over ZMQ, as vLLM publishes them. Needs the extra `events`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import UnavailableError
from kvtier.events.config import EventConfig

if TYPE_CHECKING:
    from kvtier.events.publisher import EventPublisher

__all__ = ["EventConfig", "publish_events"]


def publish_events(config: EventConfig) -> EventPublisher:
    """A listener for a CacheManager that publishes what it hears, until it is closed."""
    try:
        from kvtier.events.publisher import EventPublisher
    except ImportError as error:
        raise UnavailableError(f"KV events need the extra: pip install 'kvtier[events]' ({error})") from error
    return EventPublisher(config)
