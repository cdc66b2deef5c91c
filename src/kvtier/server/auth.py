"""API keys: authentication of tenants and separation of their caches."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from kvtier.server.config import Tenant, tenant_name
from kvtier.server.errors import ApiError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ApiKeys:
    """Finds the tenant of a key. Compares all keys in constant time, so that the time reveals nothing."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = [(hashlib.sha256(tenant.key.encode()).digest(), tenant) for tenant in tenants]

    def tenant(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of an Authorization header; None if the server has no keys. Raises 401."""
        if not self._tenants:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not matches:
            message = "missing or unknown API key: send the header Authorization: Bearer <key>"
            raise ApiError(401, message, code="invalid_api_key")
        return matches[0]

    def admit_admin(self, authorization: str | None, peer: str | None) -> None:
        """Raise unless the key is an admin's. Without keys, raise unless the client is on this machine."""
        tenant = self.tenant(authorization)
        if tenant is None and peer in _LOOPBACK:
            return
        if tenant is None or not tenant.admin:
            raise ApiError(403, "this endpoint needs an admin key", code="admin_only")


def salt_of(tenant: Tenant | None, cache_salt: str | None) -> bytes:
    """Return the salt of block keys: it separates the caches of tenants, and those of `cache_salt` within a tenant."""
    if tenant is None and cache_salt is None:
        return b""
    return f"{tenant_name(tenant)}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")
