"""What the front end can ask the engine process to do between two steps: functions of the engine, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from kvtier.engine.engine import Engine
from kvtier.engine.traffic import WINDOW_SECONDS
from kvtier.memory import PINNED, Placement
from kvtier.memory.costs import saved_costs


def snapshot(engine: Engine) -> dict[str, Any]:
    """The engine's part of GET /state."""
    stats = engine.manager.stats
    states = engine.tiers.states()
    in_use = {tier.name: tier.num_used - tier.num_evictable for tier in stats.tiers if tier.num_blocks}
    used_by = {
        tier.name: {tenant.decode(errors="replace"): count for tenant, count in tier.used_by.items()}
        for tier in engine.manager.tree.tiers
    }
    return {
        "asleep": engine.tiers.is_asleep,
        "tiers": [
            {
                "name": state.name,
                "num_blocks": state.num_blocks or (state.max_bytes // state.block_bytes if state.block_bytes else 0),
                "num_used": state.num_used,
                "num_pinned": in_use.get(state.name, 0),
                "block_bytes": state.block_bytes,
                "bytes": state.max_bytes,
                "used_bytes": state.used_bytes,
                "used_by": used_by.get(state.name, {}),
            }
            for state in states
        ],
        "hits": {
            "queried_tokens": stats.queried_tokens,
            "by_tier": {state.name: state.hit_tokens for state in states},
            "missed_tokens": stats.queried_tokens - stats.hit_tokens,
        },
        "transfers": _transfers(engine),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "holds": stats.num_allocations,
        "ghost": _ghost(engine),
    }


def _transfers(engine: Engine) -> list[dict[str, Any]]:
    limits = _link_limits(engine)
    return [
        {
            "source": each.source,
            "target": each.target,
            "bytes": each.num_bytes,
            "gb_per_s": each.bytes_per_second / 1e9,
            "window_seconds": WINDOW_SECONDS,
            "limit_gb_per_s": limits.get((each.source, each.target)),
        }
        for each in engine.tiers.traffic()
    ]


def _link_limits(engine: Engine) -> dict[tuple[str, str], float]:
    """What `kvtier doctor --calibrate` has measured of this GPU's link; nothing is known of a CPU's own copies."""
    device = Placement.parse(str(engine.model.weights.device))
    costs = saved_costs(device) if device.kind == "cuda" else None
    if costs is None:
        return {}
    ways = {("device", "host"): f"{device.kind}>{PINNED.kind}", ("host", "device"): f"{PINNED.kind}>{device.kind}"}
    return {ends: costs.links[key] for ends, key in ways.items() if key in costs.links}


def _ghost(engine: Engine) -> dict[str, Any] | None:
    ghost = engine.manager.tree.ghost
    if ghost is None:
        return None
    curve = ghost.curve()
    points = sorted(curve, key=lambda estimate: estimate.capacity)
    return {
        "policy": curve[0].policy,
        "num_blocks": curve[0].capacity,
        "points": [{"num_blocks": each.capacity, "hit_rate": each.hit_rate, "error": each.error} for each in points],
    }


def metrics(engine: Engine) -> str:
    """The cache's part of GET /metrics."""
    return engine.tiers.metrics.render()


def explain(engine: Engine, request_id: str) -> dict[str, Any]:
    """What became of a request."""
    return asdict(engine.explain(request_id))


def pin(engine: Engine, name: str, tokens: Sequence[int], salt: bytes) -> dict[str, int]:
    """Keep what is cached of a prompt."""
    return {"pinned_tokens": engine.tiers.pin(name, engine.chain(tokens, salt=salt))}


def unpin(engine: Engine, name: str) -> dict[str, bool]:
    """Let it go."""
    engine.tiers.unpin(name)
    return {"ok": True}


def prefetch(engine: Engine, tokens: Sequence[int], salt: bytes) -> dict[str, int]:
    """Bring it from stores to the host."""
    return {"blocks": engine.tiers.prefetch(engine.chain(tokens, salt=salt))}


def demote(engine: Engine, tokens: Sequence[int], salt: bytes) -> dict[str, int]:
    """Keep it below the device only."""
    return {"blocks": engine.tiers.demote(engine.chain(tokens, salt=salt))}


def drop(engine: Engine, tokens: Sequence[int], salt: bytes) -> dict[str, int]:
    """Forget it."""
    return {"blocks": engine.tiers.drop(engine.chain(tokens, salt=salt))}


def reset(engine: Engine, *, clear_stores: bool) -> dict[str, bool]:
    """Forget everything."""
    engine.tiers.reset(clear_stores=clear_stores)
    return {"ok": True}


def sleep(engine: Engine) -> dict[str, bool]:
    """Free the device."""
    engine.tiers.sleep()
    return {"ok": True}


def wake(engine: Engine) -> dict[str, bool]:
    """Have it again."""
    engine.tiers.wake()
    return {"ok": True}


def resize(engine: Engine, tier: str, num_blocks: int) -> dict[str, bool]:
    """Give a tier another size."""
    engine.tiers.resize(tier, num_blocks)
    return {"ok": True}


def beat(engine: Engine) -> None:
    """Reply, which shows that the engine's thread runs."""


def set_quota(engine: Engine, tier: str, salt: bytes, num_blocks: int) -> dict[str, bool]:
    """Limit what a tenant has of a tier."""
    engine.tiers.set_quota(tier, salt, num_blocks)
    return {"ok": True}


CONTROLS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            *(snapshot, metrics, explain, set_quota, beat),
            *(pin, unpin, prefetch, demote, drop, reset, sleep, wake, resize),
        )
    }
)
