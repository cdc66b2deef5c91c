"""kvtier as a storage backend of SGLang's HiCache (docs/sglang.md).

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "module_path": "kvtier.integrations.sglang",
        "class_name": "KvtierStorage", "interface_v1": 1, "store": "disk:/nvme/kv?bytes=200GiB"}'

    HiCacheController   threads for backup and prefetch, one backend per rank
        │  page hashes, host indices ↓   ↑ bools
    KvtierStorage       SGLang's interface: v0 (tensors), v1 (one host pool), v2 (several pools)
    PageStore           keys, labels, deadlines, errors; one stored object per page of a pool
        │  Read, Write ↓   ↑ Results
    Store               disk, Redis, S3, Mooncake

Only `storage` imports SGLang. The other modules work with SGLang's objects but do not import SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.integrations.sglang.storage import KvtierStorage

__all__ = ["KvtierStorage"]


def __getattr__(name: str) -> Any:
    if name != "KvtierStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.integrations.sglang.storage import KvtierStorage

    return KvtierStorage
