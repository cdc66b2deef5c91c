"""Admission: limits on the length and the number of requests, in total and per tenant."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.server.config import Tenant, tenant_name
from kvtier.server.errors import ApiError
from kvtier.server.messages import Started

_DECAY = 0.9  # weight of the old value in the moving average of request durations


class Admission:
    """Counts running and waiting answers. Rejects requests above a limit, and estimates when a retry will succeed.

    For the quota of tokens per minute, each tenant has a debt. The uncached prompt tokens and the generated tokens of a
    finished request are added to the debt. The debt falls by `tokens_per_minute` every minute. Requests are rejected
    while the debt is at least `tokens_per_minute`.
    """

    def __init__(self, started: Started, max_waiting: int) -> None:
        self._started = started
        self._max_waiting = max_waiting
        self.num_rows = started.max_rows  # maximum number of answers that run at once, in all replicas together
        self._mean_seconds = 1.0
        self._num_requests: Counter[str] = Counter()
        self._debts: dict[str, tuple[float, float]] = {}  # by tenant: tokens, and time of the last `spend`
        self.num_answers = 0  # admitted and not finished
        self.num_device_blocks = started.num_blocks  # current size of the device tier
        self.closed = ""  # reason to reject all requests; empty if requests are accepted

    def max_tokens(self, tenant: Tenant | None) -> int:
        """Return how many tokens a prompt plus one answer may have, limited by context, device tier and quota."""
        quota = tenant.device_blocks if tenant is not None else 0
        num_blocks = min(quota, self.num_device_blocks) if quota else self.num_device_blocks
        return min(self._started.max_context, num_blocks * self._started.block_tokens)

    @contextmanager
    def admit(self, num_answers: int, tenant: Tenant | None) -> Iterator[None]:
        """Count the answers of a request until the with statement ends. Raises 429 above a limit, 503 if closed."""
        began = time.monotonic()
        with self.prepare(tenant):
            max_answers = self.num_rows + self._max_waiting
            if self.num_answers + num_answers > max_answers:
                rounds = self.num_answers / self.num_rows - 1
                seconds = max(1, math.ceil(rounds * self._mean_seconds))
                message = (
                    f"{self.num_answers} answers are running or waiting and the request needs {num_answers} more; "
                    f"the limit is {max_answers}; retry in about {seconds} s"
                )
                raise ApiError(429, message, code="overloaded", retry_after=seconds)
            self.num_answers += num_answers
            try:
                yield
            finally:
                self.num_answers -= num_answers
                self._mean_seconds = _DECAY * self._mean_seconds + (1 - _DECAY) * (time.monotonic() - began)

    @contextmanager
    def prepare(self, tenant: Tenant | None) -> Iterator[None]:
        """Check a tenant's quotas, and count one request of the tenant until the with statement ends.

        Raises 429 above a quota, 503 if closed.
        """
        if self.closed:
            raise ApiError(503, f"the server does not accept requests: {self.closed}", code="not_ready")
        if tenant is not None:
            self._check_quota(tenant)
        name = tenant_name(tenant)
        self._num_requests[name] += 1
        try:
            yield
        finally:
            self._num_requests[name] -= 1

    def spend(self, tenant: Tenant | None, num_tokens: int) -> None:
        """Add tokens to the debt of a tenant. No effect if the tenant has no quota of tokens."""
        if tenant is not None and tenant.tokens_per_minute:
            self._debts[tenant.name] = (self._debt(tenant) + num_tokens, time.monotonic())

    def _debt(self, tenant: Tenant) -> float:
        """Return the current debt of a tenant in tokens."""
        debt, since = self._debts.get(tenant.name, (0.0, 0.0))
        return max(0.0, debt - (time.monotonic() - since) * tenant.tokens_per_minute / 60)

    def _check_quota(self, tenant: Tenant) -> None:
        if tenant.max_requests and self._num_requests[tenant.name] >= tenant.max_requests:
            message = f"tenant {tenant.name} has reached its limit of {tenant.max_requests} concurrent requests"
            seconds = max(1, math.ceil(self._mean_seconds))
            raise ApiError(429, message, code="tenant_requests", retry_after=seconds)
        over = self._debt(tenant) - tenant.tokens_per_minute
        if tenant.tokens_per_minute and over >= 0:
            message = f"tenant {tenant.name} has used its {tenant.tokens_per_minute} tokens per minute"
            seconds = max(1, math.ceil(60 * over / tenant.tokens_per_minute))
            raise ApiError(429, message, code="tenant_tokens", retry_after=seconds)
