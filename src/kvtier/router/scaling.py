"""Computes the number of replicas that a fleet needs for its load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import RangeError


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica."""

    requests: float
    """Number of running and waiting requests, divided by the maximum number of requests per step. Can exceed 1."""
    pressure: float
    """Share of the device blocks that running requests use. The rest caches prefixes."""


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Largest mean load per replica. If a fleet exceeds one of these values, it grows."""

    requests: float = 0.7
    pressure: float = 0.7

    def __post_init__(self) -> None:
        if min(self.requests, self.pressure) <= 0:
            raise RangeError(f"the largest loads must be above 0, got {self}")


def num_replicas_for(loads: Sequence[ReplicaLoad], current: int, config: ScalingConfig | None = None) -> int:
    """Return the smallest number of replicas, at least 1, whose mean load is within the limits of `config`.

    Return `current` if no replica has reported a load.
    """
    if not loads:
        return current
    limits = config or ScalingConfig()
    requests = sum(load.requests for load in loads) / limits.requests
    pressure = sum(load.pressure for load in loads) / limits.pressure
    return max(1, math.ceil(max(requests, pressure) - 1e-9))
