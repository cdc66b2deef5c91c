"""The block index: keys, pools, the radix tree, leases and eviction. It holds slot numbers, never KV data.

The classes are not thread-safe and have no clock. The caller passes the time as `now`.
"""

from kvtier.index.chain import Chain, MediaItem, Namespace
from kvtier.index.events import BlocksRemoved, BlocksStored, Event, IndexCleared, Listener
from kvtier.index.ghost import Estimate, GhostCache
from kvtier.index.labels import NO_HINTS, Hints, Outcome
from kvtier.index.lease import Lease, Retention
from kvtier.index.misses import Miss, MissReason
from kvtier.index.node import BlockState
from kvtier.index.policies import Policy, make_policy
from kvtier.index.pool import BlockPool, Shortage, Slots
from kvtier.index.tier import Tier
from kvtier.index.tree import RadixTree

__all__ = [
    "NO_HINTS",
    "BlockPool",
    "BlockState",
    "BlocksRemoved",
    "BlocksStored",
    "Chain",
    "Estimate",
    "Event",
    "GhostCache",
    "Hints",
    "IndexCleared",
    "Lease",
    "Listener",
    "MediaItem",
    "Miss",
    "MissReason",
    "Namespace",
    "Outcome",
    "Policy",
    "RadixTree",
    "Retention",
    "Shortage",
    "Slots",
    "Tier",
    "make_policy",
]
