"""Control functions. The front end calls them by name, and the engine process runs them between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from kvtier.engine.cache_runtime import TRAFFIC_SECONDS, CacheRuntime
from kvtier.engine.engine import Engine
from kvtier.index import Estimate
from kvtier.memory import PINNED, Placement
from kvtier.memory.costs import saved_costs
from kvtier.router import ReplicaCosts


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return the engine's part of GET /state."""
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


def routing(engine: Engine) -> dict[str, Any]:
    """Return what a router needs: the namespace of the block keys, the measured costs, and the load of this engine."""
    namespace, stats = engine.manager.namespace, engine.manager.stats
    device = next((tier for tier in stats.tiers if tier.num_blocks), None)
    in_use = device.num_used - device.num_evictable if device is not None else 0
    costs = ReplicaCosts.measured(engine.manager.cost_model, namespace.block_tokens)
    return {
        "namespace": {each.name: getattr(namespace, each.name) for each in fields(namespace) if each.init},
        "costs": asdict(costs) if costs is not None else {},
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "max_rows": engine.config.scheduler.max_rows,
        "pressure": in_use / device.num_blocks if device is not None else 0.0,
    }


def _transfers(engine: Engine) -> list[dict[str, Any]]:
    limits = _link_limits(engine)
    return [
        {
            "source": traffic.source,
            "target": traffic.target,
            "bytes": traffic.num_bytes,
            "gb_per_s": traffic.bytes_per_second / 1e9,
            "window_seconds": TRAFFIC_SECONDS,
            "limit_gb_per_s": limits.get((traffic.source, traffic.target)),
        }
        for traffic in engine.tiers.traffic()
    ]


def _link_limits(engine: Engine) -> dict[tuple[str, str], float]:
    """Return the GPU link's speed in GB/s, by direction; empty without a GPU or saved measurements."""
    device = Placement.parse(str(engine.model.weights.device))
    costs = saved_costs(device) if device.kind == "cuda" else None
    if costs is None:
        return {}
    ways = {("device", "host"): f"{device.kind}>{PINNED.kind}", ("host", "device"): f"{PINNED.kind}>{device.kind}"}
    return {ends: costs.links[key] for ends, key in ways.items() if key in costs.links}


def _ghost(engine: Engine) -> dict[str, Any] | None:
    """Return estimates of the hit rate at other sizes of the larger memory tier, or None if there are no estimates."""
    ghost = engine.manager.tree.ghost
    if ghost is None:
        return None
    curve, learned = ghost.curve(), ghost.curve("learned")
    own = {"policy": curve[0].policy, "num_blocks": curve[0].capacity, "points": _points(curve)}
    return own if curve[0].policy == "learned" else own | {"learned": _points(learned)}


def _points(curve: Sequence[Estimate]) -> list[dict[str, float]]:
    return [
        {"num_blocks": point.capacity, "hit_rate": point.hit_rate, "error": point.error}
        for point in sorted(curve, key=lambda point: point.capacity)
    ]


def _on_prompt(method: Callable[..., int], result: str) -> Callable[..., dict[str, int]]:
    def call(engine: Engine, tokens: Sequence[int], salt: bytes, **arguments: Any) -> dict[str, int]:
        return {result: method(engine.tiers, chain=engine.chain(tokens, salt=salt), **arguments)}

    return call


def _without_result(method: Callable[..., None]) -> Callable[..., dict[str, bool]]:
    def call(engine: Engine, **arguments: Any) -> dict[str, bool]:
        method(engine.tiers, **arguments)
        return {"ok": True}

    return call


CONTROLS: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    {
        "snapshot": snapshot,
        "routing": routing,
        "metrics": lambda engine: {"metrics": engine.tiers.metrics.collect()},
        "explain": lambda engine, request_id: asdict(engine.explain(request_id)),
        "beat": lambda _: {},  # a reply proves that the engine's thread runs
        "pin": _on_prompt(CacheRuntime.pin, "pinned_tokens"),
        "prefetch": _on_prompt(CacheRuntime.prefetch, "blocks"),
        "demote": _on_prompt(CacheRuntime.demote, "blocks"),
        "drop": _on_prompt(CacheRuntime.drop, "blocks"),
        "close_session": lambda engine, **session: {"blocks": engine.close_session(**session)},
        "unpin": _without_result(CacheRuntime.unpin),
        "reset": _without_result(CacheRuntime.reset),
        "sleep": _without_result(CacheRuntime.sleep),
        "wake": _without_result(CacheRuntime.wake),
        "resize": _without_result(CacheRuntime.resize),
        "set_quota": _without_result(CacheRuntime.set_quota),
    }
)
