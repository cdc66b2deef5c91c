"""Configuration of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.errors import ArgumentError, RangeError
from kvtier.server.config import ServerConfig, option

OWN_ROUTER = "kvtier.integrations.ray.request_router:KvtierRouter"


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Settings of a server whose engines are replicas on Ray Serve."""

    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: str = option("", "where the engines run: ray for replicas on Ray Serve (default: here)", metavar="ray")
    num_replicas: int = option(1, "number of engines on the cluster", "replicas")
    max_replicas: int = option(0, "largest number of engines if their number follows the load; 0: fixed number")
    """If `max_replicas` is not 0, `num_replicas` is the smallest number of engines."""
    replica_cpus: float = option(1.0, "CPUs that Ray reserves for an engine", metavar="N")
    """The engine may use more CPUs than Ray reserves."""
    replica_gpus: float = option(0.0, "GPUs of an engine; 0: one with --device cuda, else none", metavar="N")
    address: str = option(
        "", "address of a running Ray cluster (default: start one here)", "ray_address", metavar="ADDRESS"
    )
    head_only: bool = True
    """True to place the front end on the head node, so that it survives the loss of any other node."""
    request_router: str = OWN_ROUTER
    """Class of the request router for Ray Serve, as module:class."""
    duplicate_cost: float = 1.0
    """See RouterConfig.duplicate_cost. Only KvtierRouter uses it."""
    retry_seconds: float = 30.0
    """Longest time to find a replica for a request. After this time the client gets status 503."""
    health_seconds: float = 2.0
    """Time between two health checks of a replica."""
    upscale_seconds: float = 15.0
    """Time for which a higher load must last before replicas are added."""
    downscale_seconds: float = 300.0
    """Time for which a lower load must last before replicas are removed."""

    def __post_init__(self) -> None:
        if self.cluster not in ("", "ray"):
            raise ArgumentError(f"--cluster must be ray, got {self.cluster!r}")
        if self.num_replicas < 1 or (self.max_replicas and self.max_replicas < self.num_replicas):
            raise RangeError(
                f"a fleet needs at least one replica, and max_replicas must be 0 or at least num_replicas, "
                f"got {self.num_replicas} and {self.max_replicas}"
            )
        if self.cluster and (self.server.metrics_port or self.server.engine.record or self.server.engine.events):
            raise ArgumentError("a fleet does not support --metrics-port, --record and --events; see docs/fleet.md")

    @property
    def most_replicas(self) -> int:
        return max(self.num_replicas, self.max_replicas)

    @property
    def gpus(self) -> float:
        """Number of GPUs that Ray reserves for a replica."""
        return self.replica_gpus or float(self.server.engine.device.startswith("cuda"))
