"""Which replica serves which request, and how fast time runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import numpy as np

from kvtier.errors import RangeError
from kvtier.replay.trace import TraceRequest


class Routing(Enum):
    """How requests are spread over replicas."""

    RANDOM = "random"
    PREFIX = "prefix"
    """To the replica that was sent the longest part of the prompt before, unless it has much more work than others."""


def scale_time(requests: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """The same requests, coming `factor` times as fast."""
    if not 0 < factor < float("inf"):
        raise RangeError(f"time can be scaled by a factor above 0, got {factor}")
    return tuple(replace(request, timestamp_ms=request.timestamp_ms / factor) for request in requests)


def route(
    requests: Sequence[TraceRequest], num_replicas: int, routing: Routing = Routing.PREFIX, *, seed: int = 0
) -> list[tuple[TraceRequest, ...]]:
    """The requests of each replica, in order of time."""
    if num_replicas < 1:
        raise RangeError(f"at least one replica serves, got {num_replicas}")
    if num_replicas == 1:
        return [tuple(requests)]
    choices = (
        np.random.default_rng(seed).integers(0, num_replicas, len(requests)).tolist()
        if routing is Routing.RANDOM
        else _PrefixRouter(num_replicas).choose(requests)
    )
    parts: list[list[TraceRequest]] = [[] for _ in range(num_replicas)]
    for request, choice in zip(requests, choices, strict=True):
        parts[choice].append(request)
    return [tuple(part) for part in parts]


class _PrefixRouter:
    """Knows what it sent where, as a router does that hears nothing back, and forgets nothing.

    Work is the tokens that had to be computed, fading with a half-life, so that a replica which is `slack` times as
    busy as the mean is passed over.
    """

    def __init__(self, num_replicas: int, *, slack: float = 1.25, half_life_ms: float = 60_000.0) -> None:
        self._sent: dict[tuple[int, int], int] = {}  # (number of the path above, hash id) -> number of the path
        self._where: list[int] = []  # replicas that were sent a path, as bits
        self._work = np.zeros(num_replicas)
        self._slack, self._half_life_ms = slack, half_life_ms

    def choose(self, requests: Sequence[TraceRequest]) -> list[int]:
        """The replica of each request."""
        choices, before = [], 0.0
        for request in requests:
            self._work *= 0.5 ** ((request.timestamp_ms - before) / self._half_life_ms)
            before = request.timestamp_ms
            paths = self._paths(request)
            choice, num_known = self._best(paths)
            self._work[choice] += request.input_tokens - num_known * request.block_tokens
            for path in paths:
                self._where[path] |= 1 << choice
            choices.append(choice)
        return choices

    def _paths(self, request: TraceRequest) -> list[int]:
        paths, above = [], -1
        for id in request.prompt_ids:
            above = self._sent.setdefault((above, id), len(self._sent))
            if above == len(self._where):
                self._where.append(0)
            paths.append(above)
        return paths

    def _best(self, paths: list[int]) -> tuple[int, int]:
        """The replica with the longest run of the paths, of those not overloaded; among equals the least busy."""
        limit = self._slack * self._work.mean() + 1
        able = [replica for replica in range(len(self._work)) if self._work[replica] <= limit]
        lengths = dict.fromkeys(able, 0)
        for number, path in enumerate(paths, 1):
            holding = [replica for replica in able if self._where[path] >> replica & 1]
            if not holding:
                break
            lengths.update(dict.fromkeys(holding, number))
        best = max(able, key=lambda replica: (lengths[replica], -self._work[replica]))
        return best, lengths[best]
