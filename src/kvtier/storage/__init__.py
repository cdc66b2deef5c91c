"""Stores: where blocks are kept outside memory, behind one small batched interface. Never imports torch."""

from kvtier.storage.codec import Compression
from kvtier.storage.disk import DiskStore, Sync
from kvtier.storage.guard import Batch, Breaker
from kvtier.storage.memory import MemoryStore
from kvtier.storage.store import (
    Label,
    Outcome,
    Page,
    Read,
    Results,
    Status,
    Store,
    StoredObject,
    StoreStats,
    Traffic,
    Write,
    digest_tokens,
)

__all__ = [
    "Batch",
    "Breaker",
    "Compression",
    "DiskStore",
    "Label",
    "MemoryStore",
    "Outcome",
    "Page",
    "Read",
    "Results",
    "Status",
    "Store",
    "StoreStats",
    "StoredObject",
    "Sync",
    "Traffic",
    "Write",
    "digest_tokens",
]
