"""The deciding side of the cache: selects the blocks to match, evict, save, fetch and load. Never imports torch."""

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager

__all__ = ["CacheConfig", "CacheManager", "HostConfig", "StoreConfig", "WaitPolicy", "WritePolicy", "WritebackConfig"]
