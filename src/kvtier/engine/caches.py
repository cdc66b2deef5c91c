"""An engine's caches: the device's tensors, who moves their blocks, and the stores below; on one rank or several."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cache.config import CacheConfig
from kvtier.cache.metrics import Counted
from kvtier.engine.cache_runtime import Controller, new_controller
from kvtier.engine.model import Model
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.engine.parallel import RankedController, RankedStore, Ranks
from kvtier.engine.rank_link import RankConfig
from kvtier.errors import ArgumentError
from kvtier.storage import ShardStores, Store, open_shards
from kvtier.worker.sharding import Sharding

if TYPE_CHECKING:
    from kvtier.engine.engine import EngineConfig

StoreOrUrls = Store | str | Sequence[str]
"""An open store, or where it is: then the engine opens and closes it."""


@dataclass(frozen=True, slots=True)
class Caches:
    """What rank 0 has of them, and how it reaches the rest."""

    groups: list[DeviceCacheGroup]
    controller: Controller
    stores: Mapping[str, Counted]
    ranks: Ranks | None

    def close(self) -> None:
        """End the ranks, close the stores, free the host memory."""
        self.controller.close()


def open_caches(
    models: Sequence[Model],
    config: EngineConfig,
    max_context: int,
    namespace: bytes,
    stores: Mapping[str, StoreOrUrls],
) -> Caches:
    """For a model and those that guess for it; if something cannot be had, what was opened before is closed."""
    num_ranks, cache = config.tensor_parallel, config.cache
    num_host = cache.host.num_blocks if cache.host is not None and cache.prefix_caching else 0
    sharding = Sharding(0, num_ranks, config.kv_shards or num_ranks)
    _check_heads(models[0], sharding)
    wanted = _checked(stores, cache, num_ranks)
    with contextlib.ExitStack() as opened:
        mine: dict[str, Store | ShardStores] = {}
        for name, store in wanted.items():
            if isinstance(store, tuple):
                mine[name] = open_shards(store, sharding.shards, sharding.num_shards)
                opened.callback(mine[name].close)
            else:
                mine[name] = store
        ranks = None
        if num_ranks > 1:
            urls = {name: store for name, store in wanted.items() if isinstance(store, tuple)}
            ranks = Ranks(
                models[0],
                RankConfig(
                    sharding=sharding,
                    model=models[0].config,
                    ops=type(models[0].ops),
                    device=str(models[0].weights.device),
                    num_blocks=cache.num_blocks,
                    block_tokens=config.block_tokens,
                    num_host_blocks=num_host,
                    stores=urls,
                    namespace=namespace,
                    secret=cache.secret,
                    timeout_seconds=config.rank_timeout_seconds,
                ),
            )
            opened.callback(ranks.close)
        first = models[0] if ranks is None else ranks.model
        # a graph with sums over ranks in it was never captured: none with several ranks
        graphs = config.graph_sizes if ranks is None else ()
        groups = [
            DeviceCacheGroup(
                each,
                cache.num_blocks,
                config.block_tokens,
                graph_sizes=graphs if each is first else (),
                max_context=max_context,
            )
            for each in (first, *models[1:])
        ]
        own = new_controller(num_host, groups, mine, namespace, sharding, cache.secret)
        opened.pop_all()
    if ranks is None:
        return Caches(groups, own, mine, None)
    counted = {name: RankedStore(name, store, ranks) for name, store in mine.items() if isinstance(store, ShardStores)}
    return Caches(groups, RankedController(own, ranks), counted, ranks)


def _checked(
    stores: Mapping[str, StoreOrUrls], config: CacheConfig, num_ranks: int
) -> dict[str, Store | tuple[str, ...]]:
    """In the order of the configuration; URLs as tuples."""
    wanted = {each.name for each in config.stores}
    if wanted != {*stores}:
        raise ArgumentError(f"the cache is to have stores {sorted(wanted)}, given were {sorted(stores)}")
    found: dict[str, Store | tuple[str, ...]] = {}
    for name in [each.name for each in config.stores] if config.prefix_caching else ():
        store = stores[name]
        if isinstance(store, str):
            found[name] = (store,)
        elif isinstance(store, Sequence):
            found[name] = tuple(store)
        elif num_ranks > 1:
            raise ArgumentError(
                f"store {name!r} is open in this process; {num_ranks} ranks are as many processes, and each opens its "
                f"own: give its URL, such as 'disk:/mnt/nvme/kv?bytes=200GiB'"
            )
        else:
            found[name] = store
    return found


def _check_heads(model: Model, sharding: Sharding) -> None:
    heads = model.config.num_kv_heads
    if heads % sharding.num_shards:
        raise ArgumentError(
            f"the model's {heads} KV heads cannot be cut into {sharding.num_shards} shards equally: choose kv_shards "
            f"(or tensor_parallel, if it was not given) among the divisors of {heads}"
        )
