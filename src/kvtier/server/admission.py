"""Admission: how many answers may be asked for at a time, by all and by each tenant."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.server.config import Tenant
from kvtier.server.errors import ApiError

_MEMORY = 0.9  # of the mean time of a request, at each one that ends


class Room:
    """Tokens that one request can ever have."""

    def __init__(self, max_context: int, block_tokens: int, num_blocks: int) -> None:
        self._max_context = max_context
        self._block_tokens = block_tokens
        self.num_blocks = num_blocks
        """Of the device tier, now."""

    def of(self, tenant: Tenant | None) -> int:
        """For a request of this tenant: the model's context, the device tier and the tenant's quota bound it."""
        quota = tenant.device_blocks if tenant is not None else 0
        num_blocks = min(quota, self.num_blocks) if quota else self.num_blocks
        return min(self._max_context, num_blocks * self._block_tokens)


class Admission:
    """A bounded queue by counting: whoever does not fit is told when to come again.

    Tokens are counted when a request ends, so a tenant may overdraw a minute once and then waits until it is paid.
    """

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._max_answers = max_running + max_waiting
        self._clock = clock
        self._num_answers = 0
        self._mean_seconds = 1.0
        self._requests: dict[str, int] = {}
        self._debts: dict[str, tuple[float, float]] = {}
        self.closed = ""
        """Why no new requests are taken; empty while they are."""

    @property
    def num_answers(self) -> int:
        """Admitted and not over."""
        return self._num_answers

    @contextmanager
    def admit(self, num_answers: int, tenant: Tenant | None) -> Iterator[None]:
        """Hold places for as long as the block runs; or raise 429, or 503 when closed."""
        if self.closed:
            raise ApiError(503, f"the server takes no new requests: {self.closed}", code="not_ready", retry_after=5)
        if self._num_answers + num_answers > self._max_answers:
            waiting = self._num_answers - self._max_running
            seconds = max(1, math.ceil(waiting / self._max_running * self._mean_seconds))
            raise ApiError(
                429,
                f"{self._num_answers} answers are under way or waiting, {num_answers} more are asked for and "
                f"{self._max_answers} is the limit; come again in about {seconds} s",
                code="overloaded",
                retry_after=seconds,
            )
        name = tenant.name if tenant is not None else ""
        if tenant is not None:
            self._check_quota(tenant)
        self._num_answers += num_answers
        self._requests[name] = self._requests.get(name, 0) + 1
        began = self._clock()
        try:
            yield
        finally:
            self._num_answers -= num_answers
            self._leave(name)
            self._mean_seconds = _MEMORY * self._mean_seconds + (1 - _MEMORY) * (self._clock() - began)

    @contextmanager
    def prepare(self, tenant: Tenant | None) -> Iterator[None]:
        """Count a request against its tenant's limits while it is prepared; raise 429, or 503 when closed."""
        if self.closed:
            raise ApiError(503, f"the server takes no new requests: {self.closed}", code="not_ready", retry_after=5)
        if tenant is None:
            yield
            return
        self._check_quota(tenant)
        self._requests[tenant.name] = self._requests.get(tenant.name, 0) + 1
        try:
            yield
        finally:
            self._leave(tenant.name)

    def _leave(self, name: str) -> None:
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name]

    def spend(self, tenant: Tenant | None, num_tokens: int) -> None:
        """A tenant's request cost this much."""
        if tenant is not None and tenant.tokens_per_minute:
            self._debts[tenant.name] = (self._debt(tenant) + num_tokens, self._clock())

    def _debt(self, tenant: Tenant) -> float:
        """Tokens spent and not yet paid by the passing of time."""
        debt, since = self._debts.get(tenant.name, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - since) * tenant.tokens_per_minute / 60)

    def _check_quota(self, tenant: Tenant) -> None:
        if tenant.max_requests and self._requests.get(tenant.name, 0) >= tenant.max_requests:
            raise ApiError(
                429,
                f"{tenant.max_requests} requests of {tenant.name} are under way, which is its limit",
                code="tenant_requests",
                retry_after=max(1, math.ceil(self._mean_seconds)),
            )
        over = self._debt(tenant) - tenant.tokens_per_minute
        if tenant.tokens_per_minute and over >= 0:
            raise ApiError(
                429,
                f"{tenant.name} has spent its {tenant.tokens_per_minute} tokens of this minute",
                code="tenant_tokens",
                retry_after=max(1, math.ceil(60 * over / tenant.tokens_per_minute)),
            )
