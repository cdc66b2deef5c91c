"""The moving side of the cache: executes plans, moves bytes between tiers, reports results."""

from kvtier.worker.controller import CacheController

__all__ = ["CacheController"]
