"""CacheConfig: what a cache is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.cache.host import HostConfig
from kvtier.cache.store import StoreConfig
from kvtier.errors import ArgumentError, RangeError


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the manager is made from; it is never changed."""

    num_blocks: int
    """Of the device tier."""
    prefix_caching: bool = True
    policy: str = "lru"
    host: HostConfig | None = None
    """A second tier in host memory."""
    stores: tuple[StoreConfig, ...] = ()
    """Further tiers below the host, the nearest first."""
    partial_scan: int = 8
    """How many cached blocks are looked at for one that begins as the first block that was not found does."""
    free_share: float = 0.0
    """Evict from the device ahead of demand, so that this share of it is free."""
    recompute: bool = True
    """Whether blocks are computed where that is expected to be faster than to load them."""
    secret: bytes = field(default=b"", repr=False)
    """Keys the digests that stored blocks carry of their tokens. All who share a store need the same, of at most 64
    bytes; without one whoever reads the store can check a guess at a prompt."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a cache needs at least one block, got num_blocks={self.num_blocks}")
        if self.partial_scan < 0 or not 0 <= self.free_share < 1:
            raise RangeError(
                f"partial_scan counts blocks and free_share is in [0, 1), got {self.partial_scan} and {self.free_share}"
            )
        if len(self.secret) > 64:
            raise RangeError(f"a secret has at most 64 bytes, got {len(self.secret)}")
        names = [store.name for store in self.stores]
        if names and self.host is None:
            raise ArgumentError(f"blocks come from {', '.join(names)} through host memory: give the cache a host tier")
        if len({*names}) < len(names):
            raise ArgumentError(f"stores need different names, got {names}")
