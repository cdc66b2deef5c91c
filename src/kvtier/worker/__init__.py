"""Workers execute the plans of the cache manager: they move bytes between tiers and report results."""

from kvtier.worker.controller import CacheController

__all__ = ["CacheController"]
