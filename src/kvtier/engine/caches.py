"""Open the caches of an engine on one or several ranks: device tensors, their controller, and the stores."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.cache.config import CacheConfig, StoreConfig
from kvtier.cache.metrics import Counted
from kvtier.engine.cache_runtime import Controller, NullController, new_controller
from kvtier.engine.model import Model
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.engine.parallel import RankedStore, Ranks
from kvtier.engine.rank_link import RankConfig
from kvtier.engine.rows import DeviceRows
from kvtier.errors import ArgumentError
from kvtier.storage import ShardStores, Store, open_shards
from kvtier.worker.sharding import Sharding

if TYPE_CHECKING:
    from kvtier.engine.engine import EngineConfig

# Maximum number of recorded keys of a store, per block that fits in the store. A full record drops its oldest keys, but
# the store evicts its least recently used blocks. With 1, the record would drop keys of blocks that are still stored.
_KNOWN_PER_BLOCK = 4
StoreOrUrls = Store | str | Sequence[str]
"""An open store, or one or several URLs for `open_store`. The engine closes the store in both cases."""


def open_caches(
    models: Sequence[Model], config: EngineConfig, namespace: bytes, stores: Mapping[str, StoreOrUrls], rows: DeviceRows
) -> tuple[list[DeviceCacheGroup], Controller, Mapping[str, Counted], Ranks | None]:
    """Open the caches of a model and its draft models. After an error, close everything that was opened.

    Return the cache groups of this rank, the controller, the stores by name, and the other ranks (None for one rank).
    """
    num_ranks, cache = config.tensor_parallel, config.cache
    num_host = cache.host.num_blocks if cache.host is not None and cache.prefix_caching else 0
    sharding = Sharding(0, num_ranks, config.kv_shards or num_ranks)
    heads = models[0].config.num_kv_heads
    if heads % sharding.num_shards:
        raise ArgumentError(
            f"the model's {heads} KV heads cannot be split into {sharding.num_shards} equal shards: set kv_shards, or "
            f"tensor_parallel if kv_shards is not set, to a divisor of {heads}"
        )
    with contextlib.ExitStack() as opened:
        mine, urls = _open_stores(stores, cache, sharding, opened)
        ranks = None
        if num_ranks > 1:
            rank_config = RankConfig(
                *(sharding, models[0].config, type(models[0].ops), str(models[0].weights.device)),
                num_blocks=cache.num_blocks,
                block_tokens=config.block_tokens,
                num_host_blocks=num_host,
                stores=urls,
                namespace=namespace,
                secret=cache.secret,
                timeout_seconds=config.rank_timeout_seconds,
            )
            ranks = Ranks(models[0], rank_config)
            opened.callback(ranks.close)
        first = models[0] if ranks is None else ranks.model
        # no CUDA graphs with several ranks, because capturing all_reduce is not tested
        graphs = config.graph_sizes if ranks is None else ()
        sizes = cache.num_blocks, config.block_tokens
        groups = [DeviceCacheGroup(first, *sizes, graph_sizes=graphs, rows=rows)]
        groups += [DeviceCacheGroup(each, *sizes) for each in models[1:]]
        own = new_controller(num_host, groups, mine, namespace, sharding, cache.secret)
        if not cache.prefix_caching:
            own = NullController([each for each in stores.values() if not isinstance(each, str | Sequence)])
        opened.pop_all()
    if ranks is None:
        return groups, own, mine, None
    ranks.own = own
    return groups, ranks, {name: RankedStore(name, store, ranks) for name, store in mine.items()}, ranks


def limit_known_keys(
    config: CacheConfig, groups: Sequence[DeviceCacheGroup], stores: Mapping[str, Counted]
) -> CacheConfig:
    """Return the configuration with a limit on the recorded keys of each store that only this engine writes to.

    A store evicts blocks without notice. Without the limit, the keys of evicted blocks would stay in memory, up to
    `max_known` keys (0.6 GB by default).
    """
    block_bytes = sum(group.block_bytes for group in groups)

    def limited(store: StoreConfig) -> StoreConfig:
        if store.is_shared or store.name not in stores:
            return store
        num_blocks = -(-stores[store.name].stats.max_bytes // block_bytes)
        return replace(store, max_known=min(store.max_known, _KNOWN_PER_BLOCK * num_blocks or store.max_known))

    return replace(config, stores=tuple(map(limited, config.stores)))


def _open_stores(
    stores: Mapping[str, StoreOrUrls], config: CacheConfig, sharding: Sharding, opened: contextlib.ExitStack
) -> tuple[dict[str, Store | ShardStores], dict[str, tuple[str, ...]]]:
    """Return all stores by name, and the URLs of the stores that this function opened.

    Closing `opened` closes these stores. Both results are empty without prefix caching.
    """
    names = [each.name for each in config.stores]
    if {*names} != {*stores}:
        raise ArgumentError(f"config.cache has stores {sorted(names)}, but the given stores are {sorted(stores)}")
    mine: dict[str, Store | ShardStores] = {}
    urls: dict[str, tuple[str, ...]] = {}
    for name in names if config.prefix_caching else ():
        store = stores[name]
        if isinstance(store, str | Sequence):
            urls[name] = (store,) if isinstance(store, str) else tuple(store)
            mine[name] = open_shards(urls[name], sharding.shards, sharding.num_shards)
            opened.callback(mine[name].close)
        elif sharding.num_ranks > 1:
            raise ArgumentError(
                f"store {name!r} is already open, but all {sharding.num_ranks} ranks must open the store themselves; "
                f"give the URL of the store instead, such as 'disk:/mnt/nvme/kv?bytes=200GiB'"
            )
        else:
            mine[name] = store
    return mine, urls
