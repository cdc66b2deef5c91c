"""ShardStores: the stores that hold one rank's shards of every block.

A server takes all of them. A folder has one owner, and which process that is changes with the number of ranks: so a
disk store of S shards is S folders, of which a rank opens those of its shards.

    disk:/kv, 4 shards        /kv/shard-0-of-4   /kv/shard-1-of-4   /kv/shard-2-of-4   /kv/shard-3-of-4
    opened by 2 ranks         |------------ rank 0 ------------|   |------------ rank 1 ------------|
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvtier.errors import ArgumentError
from kvtier.storage.open import is_folder, open_store
from kvtier.storage.store import Store, StoreStats, Traffic, UsesMemory


@dataclass(frozen=True, slots=True)
class ShardStores:
    """One store for all shards, or one for each of the shards from `first` on."""

    stores: tuple[Store, ...]
    first: int = 0

    def of(self, shard: int | None) -> Store:
        """Where a shard is; None: what every rank has, which is with the first shard."""
        if len(self.stores) == 1:
            return self.stores[0]
        return self.stores[0 if shard is None else shard - self.first]

    @property
    def stats(self) -> StoreStats:
        """Of all of them together."""
        return sum_stats([store.stats for store in self.stores])

    def register(self, memory: memoryview) -> None:
        """With those of them that use it, also if one refuses."""
        with contextlib.ExitStack() as asking:
            for store in self.stores:
                if isinstance(store, UsesMemory):
                    asking.callback(store.register, memory)

    def unregister(self, memory: memoryview) -> None:
        """From those of them that use it, also if one cannot."""
        with contextlib.ExitStack() as asking:
            for store in self.stores:
                if isinstance(store, UsesMemory):
                    asking.callback(store.unregister, memory)

    def close(self) -> None:
        """All of them, also if one cannot be closed in order."""
        with contextlib.ExitStack() as closing:
            for store in self.stores:
                closing.callback(store.close)


def open_shards(urls: Sequence[str], shards: range, num_shards: int, *, secret: bytes | None = None) -> ShardStores:
    """What these URLs name (see `open_store`), for some of a block's `num_shards` shards."""
    if num_shards == 1 or not any(is_folder(url) for url in urls):
        return ShardStores((open_store(urls, secret=secret),), shards.start)
    stores: list[Store] = []
    with contextlib.ExitStack() as opened:  # if one cannot be opened, those before it are closed
        for shard in shards:
            stores.append(open_store(urls, secret=secret, shard=shard, num_shards=num_shards))
            opened.callback(stores[-1].close)
        opened.pop_all()
    return ShardStores(tuple(stores), shards.start)


def sum_stats(stats: Sequence[StoreStats]) -> StoreStats:
    """Of several stores that hold parts of the same blocks."""
    if not stats:
        raise ArgumentError("there are no stores to sum up")
    totals: dict[str, Any] = {}
    for each in fields(StoreStats):
        values = [getattr(one, each.name) for one in stats]
        totals[each.name] = _sum_traffic(values) if isinstance(values[0], Traffic) else sum(values)
    return StoreStats(**totals)


def _sum_traffic(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(**{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(Traffic)})
