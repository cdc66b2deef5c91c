"""Who asks: API keys and tenants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from kvtier.server.config import Tenant
from kvtier.server.errors import ApiError

ANYONE = ""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ApiKeys:
    """Finds the tenant of a key. Every key is compared, in constant time, so that the time tells nothing."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = [(hashlib.sha256(tenant.key.encode()).digest(), tenant) for tenant in tenants]

    def tenant(self, authorization: str | None) -> Tenant | None:
        """Of an Authorization header; None if the server has no keys. Raises 401."""
        if not self._tenants:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401, "an API key is needed: send the header Authorization: Bearer <key>", code="invalid_api_key"
            )
        return found[0]

    def admit_admin(self, authorization: str | None, peer: str | None) -> None:
        """Raise unless the key is an admin's; without any keys, unless the caller is on this machine."""
        tenant = self.tenant(authorization)
        if tenant is None and peer in _LOOPBACK:
            return
        if tenant is None or not tenant.admin:
            raise ApiError(403, "this needs an admin key", code="admin_only")


def salt_of(tenant: Tenant | None, cache_salt: str | None) -> bytes:
    """What keeps one tenant's cache from another's; within a tenant, what the request says."""
    if tenant is None and cache_salt is None:
        return b""
    return f"{tenant.name if tenant else ANYONE}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")
