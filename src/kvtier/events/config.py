"""Where KV events go, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class EventConfig:
    """What an EventPublisher is told."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Where subscribers come to, or, with `connects`, where the one that collects from many is. Events show prompts:
    whoever may connect may read them."""
    replay_endpoint: str = ""
    """Where who missed something may ask for it; empty: nowhere."""
    topic: str = ""
    connects: bool = False
    """Connect to `endpoint` instead of listening there."""
    rank: int = 0
    """The data-parallel rank of this engine."""
    int_hashes: bool = True
    """Tell keys as their last 64 bits, as vLLM does by default, instead of as 32 bytes."""
    token_ids: bool = True
    """Tell the tokens of stored blocks. Routers that hash prompts by themselves need them."""
    num_kept: int = 10_000
    """Messages kept for replay."""
    max_queued: int = 100_000
    """Events that may wait to be sent; more are lost, and the gap in the numbers shows it."""

    def __post_init__(self) -> None:
        if not self.endpoint or self.rank < 0 or min(self.num_kept, self.max_queued) < 1:
            raise ArgumentError(f"events need an endpoint, rank >= 0, num_kept and max_queued >= 1, got {self}")
