"""Cache-aware routing: chooses the replica with the shortest expected time to the first token of a prompt.

The package uses no sockets, threads or clock. The caller receives KV events and applies them through `Router.feed`.
"""

from kvtier.router.feed import EventBatch, FeedState, ReplicaFeed
from kvtier.router.foreign import ForeignKeys
from kvtier.router.placement import PlacementIndex, hashes_of
from kvtier.router.router import ReplicaCosts, RouteDecision, Router, RouterConfig, median_costs

__all__ = [
    "EventBatch",
    "FeedState",
    "ForeignKeys",
    "PlacementIndex",
    "ReplicaCosts",
    "ReplicaFeed",
    "RouteDecision",
    "Router",
    "RouterConfig",
    "hashes_of",
    "median_costs",
]
