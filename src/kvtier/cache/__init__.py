"""Cache policy: selects the blocks to match, evict, save, fetch and load. This package never imports torch."""

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager

__all__ = ["CacheConfig", "CacheManager", "HostConfig", "StoreConfig", "WaitPolicy", "WritePolicy", "WritebackConfig"]
