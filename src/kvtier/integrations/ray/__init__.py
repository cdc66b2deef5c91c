"""A fleet of engines on Ray Serve (docs/fleet.md).

    kvtier serve --cluster ray --replicas 3

    client --HTTP--> Serve's proxy --> FleetIngress      front end of `kvtier serve`: API keys, limits, tokens, answers
                                           │ FleetEngine   requests and control calls, retries
                                           │ KvtierRouter  chooses a replica with kvtier.router
                                           ▼
                                       EngineReplica     the engine process of `kvtier serve`
                                           └──KV events over ZMQ──> KvtierRouter

Ray Serve places, checks, restarts, drains and scales the replicas. Only modules of this package import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.integrations.ray.config import RayConfig

if TYPE_CHECKING:
    from kvtier.integrations.ray.app import build, fleet_app

__all__ = ["RayConfig", "build", "fleet_app"]


def __getattr__(name: str) -> Any:
    """Import `build` and `fleet_app` at their first use, because they need Ray."""
    if name not in ("build", "fleet_app"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.integrations.ray import app

    return getattr(app, name)
