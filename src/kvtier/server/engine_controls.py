"""What the front end can ask the engine process to do between two steps: functions of the engine, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from kvtier.engine.engine import Engine


def snapshot(engine: Engine) -> dict[str, Any]:
    """The engine's part of GET /state."""
    stats, group = engine.manager.stats, engine.groups[0]
    block_bytes = group.cache[0].numel() * group.cache.element_size()
    running = len(engine.scheduler.running)
    return {
        "tiers": [
            {
                "name": "device",
                "num_blocks": stats.num_blocks,
                "num_used": stats.num_blocks - stats.num_free,
                "num_pinned": stats.num_blocks - stats.num_free - stats.num_evictable,
                "block_bytes": block_bytes,
                "bytes": stats.num_blocks * block_bytes,
            }
        ],
        "hits": {
            "queried_tokens": stats.queried_tokens,
            "by_tier": {"device": stats.hit_tokens},
            "missed_tokens": stats.queried_tokens - stats.hit_tokens,
        },
        "transfers": [],
        "running": running,
        "waiting": len(engine.scheduler.waiting),
        "holds": stats.num_holds,
        "ghost": None,
    }


def explain(engine: Engine, request_id: str) -> dict[str, Any]:
    """What became of a request."""
    return asdict(engine.explain(request_id))


CONTROLS: Mapping[str, Callable[..., Any]] = MappingProxyType({"snapshot": snapshot, "explain": explain})
