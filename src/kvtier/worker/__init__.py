"""The moving side of the cache: executes plans, moves bytes between tiers, reports results."""
