"""KvtierStorage: implements all three versions of SGLang's interface for storage backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.page_store import PageStore


class KvtierStorage(HiCacheStorage):
    """A HiCache storage backend over a store of kvtier.

    If the constructor or the registration of a pool raises an error, SGLang refuses to attach the backend. No other
    method raises an error: after an error, the method returns "not found" or "not stored".
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        settings = HiCacheSettings.parse(storage_config.extra_config)
        self.pages = PageStore(settings, RankIdentity.of(storage_config))
        self._has_metrics = bool(storage_config.enable_storage_metrics)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.pages.add_pool(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.pages.add_pool(host_pool, str(host_pool_name))

    # ---- v1: pages of the host pool --------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.pages.num_leading(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self.pages.get(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self.pages.set(keys, host_indices)

    # ---- v2: several pools -----------------------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the length of the longest usable prefix in each pool, and the minimum (see `usable_prefix`)."""
        kv_pages = final = self.pages.num_leading(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        for transfer in pool_transfers or ():
            if not final:
                break
            found = self.pages.exists(keys[:kv_pages], str(transfer.name))
            num_last = 0
            if transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
                num_last = max(1, len(transfer.keys or ()))
            boundary = usable_prefix(found, num_last)
            if boundary:
                hits[transfer.name] = boundary
            final = min(final, boundary)
        return PoolTransferResult(final, hits)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self.pages.get(each.keys or [], each.host_indices, str(each.name)) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self.pages.set(each.keys or [], each.host_indices, str(each.name)) for each in transfers}

    # ---- v0: flat pages, which SGLang also uses for draft models ---------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.pages.get_tensors([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return self.pages.get_tensors(keys, target_locations or [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return value is not None and self.pages.set_tensors([key], [value])[0]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return values is not None and all(self.pages.set_tensors(keys, values))

    def exists(self, key: str) -> bool:
        return self.pages.exists([key])[0]

    # ---- operation -------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove the pages of this model, layout and rank."""
        return self.pages.clear()

    def get_stats(self) -> Any:
        """Return the transfers since the last call, or None if SGLang does not collect storage metrics."""
        if not self._has_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        stats = StorageMetrics()
        for kind, num_pages, nbytes, seconds in self.pages.take_transfers():
            pages, bandwidth = (
                (stats.prefetch_pgs, stats.prefetch_bandwidth)
                if kind == "get"
                else (stats.backup_pgs, stats.backup_bandwidth)
            )
            pages.append(num_pages)
            bandwidth.append(nbytes / max(seconds, 1e-9) / (1 << 30))
        return stats

    def close(self) -> None:
        self.pages.close()


def usable_prefix(found: Sequence[bool], num_last: int) -> int:
    """Return the length of the longest prefix whose required pages were found.

    The last `num_last` pages of the prefix are required, or all pages if `num_last` is 0.
    """
    if not num_last:
        return next((index for index, is_found in enumerate(found) if not is_found), len(found))
    for stop in range(len(found), 0, -1):
        if all(found[max(0, stop - num_last) : stop]):
            return stop
    return 0
