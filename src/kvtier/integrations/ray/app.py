"""The Ray Serve application of a fleet, which consists of a front end and engine replicas."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application

from kvtier.integrations.ray.config import OWN_ROUTER, RayConfig
from kvtier.integrations.ray.ingress import FleetIngress
from kvtier.integrations.ray.replica import EngineReplica

_HEAD = "node:__internal_head__"  # only the head node has this resource, so an actor that needs it runs there
_QUIET = MappingProxyType({"enable_access_log": False})  # kvtier logs requests itself
MAX_REPLICAS = 64
"""Maximum number of replicas that a router can choose from. During an update, old and new replicas count."""
_MOST_ONGOING = 100_000  # so large that Ray Serve never limits requests; the front end limits them instead


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for a Serve config file. `args` may contain options of `kvtier serve`, and `tenants`."""
    from kvtier.cli.serve import fleet_config_of

    return fleet_app(fleet_config_of(args))


def fleet_app(config: RayConfig) -> Application:
    """Return the application for `serve.run`."""
    server = config.server
    router: dict[str, Any] = {"request_router_class": config.request_router.replace(":", ".")}
    if config.request_router == OWN_ROUTER:
        router["request_router_kwargs"] = {
            "block_tokens": server.engine.tiers.block_tokens,
            "max_replicas": MAX_REPLICAS,
            "duplicate_cost": config.duplicate_cost,
        }
    drain = server.limits.drain_seconds
    replicas = serve.deployment(
        name="engine",
        request_router_config=RequestRouterConfig(request_routing_stats_period_s=2.0, **router),
        max_ongoing_requests=server.limits.waiting + server.engine.max_rows,
        health_check_period_s=config.health_seconds,
        health_check_timeout_s=server.limits.engine_reply_seconds + config.health_seconds,
        graceful_shutdown_timeout_s=drain + 60,  # 60 s to save the cache
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": config.replica_cpus, "num_gpus": config.gpus},
        logging_config=_QUIET,
        **_scale(config),
    )(EngineReplica)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=_MOST_ONGOING,
        health_check_period_s=config.health_seconds,
        graceful_shutdown_timeout_s=drain + 5,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0.1, "resources": {_HEAD: 0.001} if config.head_only else {}},
        logging_config=_QUIET,
        user_config={"most_replicas": config.most_replicas},
    )(FleetIngress)
    return ingress.bind(server, config.retry_seconds, replicas.bind(server))


def _scale(config: RayConfig) -> dict[str, Any]:
    if not config.max_replicas:
        return {"num_replicas": config.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.num_replicas,
            max_replicas=config.max_replicas,
            metrics_interval_s=2.0,
            look_back_period_s=10.0,
            upscale_delay_s=config.upscale_seconds,
            downscale_delay_s=config.downscale_seconds,
            policy=AutoscalingPolicy(policy_function="kvtier.integrations.ray.scaling:scale"),
        )
    }
