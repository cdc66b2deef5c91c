"""A bounded mapping per tenant: what one tenant puts in neither evicts nor answers another's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Tenant = TypeVar("Tenant")
Value = TypeVar("Value")


class TenantLru(Generic[Tenant, Value]):
    """Keeps the `size` most recently used values of each tenant, by digest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Tenant, OrderedDict[bytes, Value]] = {}

    def get(self, tenant: Tenant, digest: bytes) -> Value | None:
        """Look up a value, which becomes the most recently used; None if it is not there."""
        values = self._values.get(tenant, OrderedDict())
        if digest in values:
            values.move_to_end(digest)
        return values.get(digest)

    def put(self, tenant: Tenant, digest: bytes, value: Value) -> None:
        """Add or replace a value."""
        values = self._values.setdefault(tenant, OrderedDict())
        values[digest] = value
        values.move_to_end(digest)
        if len(values) > self._size:
            values.popitem(last=False)

    def discard(self, tenant: Tenant, digest: bytes) -> None:
        """Remove a value, if it is there."""
        self._values.get(tenant, OrderedDict()).pop(digest, None)
