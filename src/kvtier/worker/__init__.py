"""Workers execute the plans of the cache manager. They move blocks between tiers and report results."""

from kvtier.worker.controller import CacheController

__all__ = ["CacheController"]
