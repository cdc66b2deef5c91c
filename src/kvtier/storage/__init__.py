"""Stores keep blocks outside the memory tiers and have one batched interface. This package never imports torch."""

from kvtier.storage.audit import Inventory, Verification, take_inventory, verify
from kvtier.storage.calls import Breaker
from kvtier.storage.cascade import Cascade
from kvtier.storage.codec import Compression
from kvtier.storage.disk.store import DiskStore, Sync
from kvtier.storage.memory import MemoryStore
from kvtier.storage.open import ShardStores, open_shards, open_store
from kvtier.storage.remote.store import RemoteStore
from kvtier.storage.store import (
    CallStats,
    Label,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    Scattered,
    Store,
    StoredObject,
    StoreStats,
    UsesMemory,
    Write,
    digest_tokens,
)

__all__ = [
    "Breaker",
    "CallStats",
    "Cascade",
    "Compression",
    "DiskStore",
    "Inventory",
    "Label",
    "MemoryStore",
    "ObjectResult",
    "ObjectStatus",
    "Page",
    "Read",
    "RemoteStore",
    "Results",
    "Scattered",
    "ShardStores",
    "Store",
    "StoreStats",
    "StoredObject",
    "Sync",
    "UsesMemory",
    "Verification",
    "Write",
    "digest_tokens",
    "open_shards",
    "open_store",
    "take_inventory",
    "verify",
]
