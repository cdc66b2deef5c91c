"""Autoscaling policy for Ray Serve, based on the running and waiting requests and on the device blocks in use."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from kvtier.router.scaling import ReplicaLoad, num_replicas_for


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas. Ray Serve applies its limits and delays to the result."""
    metrics = context.aggregated_metrics or {}
    load, pressure = metrics.get("load", {}), metrics.get("pressure", {})
    loads = [ReplicaLoad(load[name], pressure.get(name, 0.0)) for name in load]
    return num_replicas_for(loads, context.current_num_replicas), {}
