"""PageStore: SGLang's pages in a store, one object per page and pool.

SGLang does not catch exceptions of a backend. An exception would end a thread of the server. After an error, methods
therefore return "not found" or "not stored". PageStore counts all errors and logs the first error of each kind. The
deadline of a call grows with the number of bytes. After a call has returned, successfully or not, the store no longer
writes to the memory that was passed to the call.

    object key   SHA-256( fingerprint of the namespace | page hash [ | "." | pool name, except for the KV pool ] )
    label        the fingerprint, and a digest of the page hash and the element type
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvtier.errors import ArgumentError
from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.pages import KV, HostPool, Views, tensor_views
from kvtier.storage import Label, ObjectResult, ObjectStatus, Read, Store, UsesMemory, Write, digest_tokens, open_store
from kvtier.storage.audit import pages as inventory_pages
from kvtier.storage.store import num_bytes

logger = logging.getLogger("kvtier.sglang")

Value = TypeVar("Value")
_CLEAR_SECONDS = 60.0  # time limit of `clear`, checked once for about every 4,096 objects
_STORE_SHARE = 0.9
"""Share of a deadline that the store may use. The rest is for finishing the copy of a page and waking the calling
thread. These two took 20 ms in all at a load average of 20 on 2 cores (measured on an EPYC, 2026-11-18)."""


class PageStore:
    """Pages of one rank. Thread-safe. No method raises, except for `add_pool` and the constructor."""

    def __init__(
        self,
        settings: HiCacheSettings,
        rank: RankIdentity,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store of `settings`, unless `store` is given. Raise an error if opening fails."""
        self._settings, self._rank, self._clock = settings, rank, clock
        self._revision = settings.revision_of(rank.model)
        self._secret = settings.secret
        shard, num_shards = rank.part if settings.has_disk else (0, 1)
        self._store: Store = open_store(settings.store, shard=shard, num_shards=num_shards) if store is None else store
        self._pools: dict[str, HostPool] = {}
        self._lock = threading.Lock()
        self.errors: Counter[str] = Counter()
        """Number of errors by kind: the name of an exception, or the status of an object."""
        self.transfers: list[tuple[str, int, int, float]] = []
        """The newest transfers since the last `take_transfers`: kind ("get" or "set"), pages, bytes, seconds."""

    def add_pool(self, pool: Any, name: str = KV) -> None:
        """Add a host pool. If the store registers memory, register the memory of the pool."""
        added = HostPool(pool, name, self._rank, self._revision)
        self._pools[name] = added
        if isinstance(self._store, UsesMemory) and added.memory is not None:
            self._never_raise(None, functools.partial(self._store.register, added.memory))

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def exists(self, hashes: Sequence[str], name: str = KV) -> list[bool]:
        """Return for each page whether it is stored."""
        begin = self._clock()
        return self._never_raise([False] * len(hashes), lambda: self._contains(hashes, name, begin))

    def num_leading(self, hashes: Sequence[str]) -> int:
        """Return how many leading pages of the KV pool are stored."""
        return _num_leading_true(self.exists(hashes))

    def _contains(self, hashes: Sequence[str], name: str, begin: float) -> list[bool]:
        pool = self._pool(name)
        if pool.is_logical:
            return [True] * len(hashes)
        keys = [_key(pool, each) for each in hashes]
        return self._ok(self._store.contains(keys, timeout_s=self._left_s(begin)).outcomes)

    def _left_s(self, begin: float, memory: Sequence[Views] = ()) -> float:
        """Return the time that is left for the store in a call that transfers `memory`."""
        return max(0.0, begin + _STORE_SHARE * self._settings.deadline(_size(memory)) - self._clock())

    # ---- pages of a pool -------------------------------------------------------------------------------------------

    def get(self, hashes: Sequence[str], indices: torch.Tensor, name: str = KV) -> list[bool]:
        """Fill pages of a pool from the store. Return for each page whether it was found."""
        begin = self._clock()
        return self._never_raise([False] * len(hashes), lambda: self._get(hashes, indices, self._pool(name), begin))

    def set(self, hashes: Sequence[str], indices: torch.Tensor, name: str = KV) -> list[bool]:
        """Store pages of a pool, except those that are already stored. Return for each page whether it is stored."""
        begin = self._clock()
        return self._never_raise([False] * len(hashes), lambda: self._set(hashes, indices, self._pool(name), begin))

    def _get(self, hashes: Sequence[str], indices: torch.Tensor, pool: HostPool, begin: float) -> list[bool]:
        if pool.is_logical or not hashes:
            return [True] * len(hashes)
        if pool.has_addresses:
            return self._read(pool, hashes, pool.pages(indices, len(hashes)), begin)
        pages = pool.empty_pages(len(hashes))
        found = self._read(pool, hashes, tensor_views(pages), begin)
        for number, is_found in enumerate(found):
            if is_found:
                pool.fill_page(indices, number, pages[number])
        return found

    def _set(self, hashes: Sequence[str], indices: torch.Tensor, pool: HostPool, begin: float) -> list[bool]:
        if pool.is_logical or not hashes:
            return [True] * len(hashes)
        if pool.has_addresses:
            return self._write(pool, hashes, pool.pages(indices, len(hashes)), begin)
        copies = pool.flat_pages(indices, len(hashes))
        return self._write(pool, hashes, tensor_views(copies), begin)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def get_tensors(self, hashes: Sequence[str], targets: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Fill one tensor per page. Return the tensor of each page that was found, and None for a missing page."""
        nothing: list[torch.Tensor | None] = [None] * len(hashes)
        begin = self._clock()

        def read() -> list[torch.Tensor | None]:
            tensors = [each for each in targets if each is not None]
            if len(tensors) < len(hashes):
                raise ArgumentError(f"{len(hashes)} pages need as many target tensors, got {len(tensors)}")
            kinds = [str(each.dtype) for each in tensors]
            found = self._read(self._pool(KV), hashes, tensor_views(tensors), begin, kinds)
            return [each if is_found else None for each, is_found in zip(tensors, found, strict=True)]

        return self._never_raise(nothing, read)

    def set_tensors(self, hashes: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store pages from one tensor per page. Return for each page whether it is stored."""
        begin = self._clock()

        def write() -> list[bool]:
            tensors = [each.contiguous() for each in values]
            kinds = [str(each.dtype) for each in tensors]
            return self._write(self._pool(KV), hashes, tensor_views(tensors), begin, kinds)

        return self._never_raise([False] * len(hashes), write)

    # ---- operation -------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove the pages of this rank's pools. Return False if this fails or exceeds the time limit."""

        def remove() -> bool:
            mine = {pool.namespace.fingerprint for pool in self._pools.values()}
            deadline = self._clock() + _CLEAR_SECONDS
            for page in inventory_pages(self._store, limit=4096):
                keys = [each.key for each in page.objects if each.label.namespace in mine]
                if page.reason or self._clock() > deadline:
                    return False
                removed = self._store.remove(keys, timeout_s=self._settings.timeout_s).outcomes if keys else ()
                self._ok(removed)  # counts errors
                if any(outcome.status is ObjectStatus.FAILED for outcome in removed):
                    return False
            return True

        return self._never_raise(False, remove)

    def take_transfers(self) -> list[tuple[str, int, int, float]]:
        with self._lock:
            taken, self.transfers = self.transfers, []
            return taken

    def close(self) -> None:
        """Close the store. Later calls find and store nothing."""
        self._never_raise(None, self._store.close)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> HostPool:
        pool = self._pools.get(name)
        if pool is None:
            raise ArgumentError(f"the pool {name} is not registered; registered: {', '.join(self._pools) or 'none'}")
        return pool

    def _labels(self, pool: HostPool, hashes: Sequence[str], kinds: Sequence[str] | None) -> list[Label]:
        own = pool.namespace.dtype
        texts = [f"{each} {kind}" for each, kind in zip(hashes, kinds or [own] * len(hashes), strict=True)]
        return [Label(pool.namespace.fingerprint, digest_tokens(text.encode(), self._secret)) for text in texts]

    def _read(
        self,
        pool: HostPool,
        hashes: Sequence[str],
        memory: Sequence[Views],
        begin: float,
        kinds: Sequence[str] | None = None,
    ) -> list[bool]:
        labels = self._labels(pool, hashes, kinds)
        reads = [
            Read(_key(pool, each), label, views) for each, label, views in zip(hashes, labels, memory, strict=True)
        ]
        results = self._store.read_into(reads, timeout_s=self._left_s(begin, memory))
        self._note("get", len(hashes), results.nbytes, results.seconds)
        return self._ok(results.outcomes)

    def _write(
        self,
        pool: HostPool,
        hashes: Sequence[str],
        memory: Sequence[Views],
        begin: float,
        kinds: Sequence[str] | None = None,
    ) -> list[bool]:
        labels, keys = self._labels(pool, hashes, kinds), [_key(pool, each) for each in hashes]
        known = self._store.contains(keys, timeout_s=self._left_s(begin))
        missing = [index for index, result in enumerate(known) if not result.ok]
        writes = [Write(keys[index], labels[index], memory[index]) for index in missing]
        results = self._store.write(writes, timeout_s=self._left_s(begin, [memory[index] for index in missing]))
        self._note("set", len(hashes), results.nbytes, results.seconds)
        stored = dict(zip(missing, self._ok(results.outcomes), strict=True))
        return [stored.get(index, True) for index in range(len(hashes))]

    def _note(self, kind: str, num_pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.transfers.append((kind, num_pages, nbytes, seconds))
            del self.transfers[:-1024]  # bounded even if SGLang collects no metrics

    def _ok(self, outcomes: Sequence[ObjectResult]) -> list[bool]:
        for outcome in outcomes:
            if outcome.status in (ObjectStatus.FAILED, ObjectStatus.CORRUPT):
                self._count(outcome.status.value, outcome.reason)
        return [outcome.ok for outcome in outcomes]

    def _never_raise(self, nothing: Value, call: Callable[[], Value]) -> Value:
        """Return the result of a call, or `nothing` if it fails."""
        try:
            return call()
        except Exception as error:  # an exception would end a thread of SGLang, and with it the hierarchical cache
            self._count(type(error).__name__, str(error))
            return nothing

    def _count(self, kind: str, reason: str) -> None:
        with self._lock:
            self.errors[kind] += 1
            is_first = self.errors[kind] == 1
        if is_first:
            logger.warning("kvtier storage: %s: %s (further errors of this kind are only counted)", kind, reason)


def _key(pool: HostPool, page_hash: str) -> bytes:
    scoped = page_hash if pool.name == KV else f"{page_hash}.{pool.name}"
    return hashlib.sha256(pool.namespace.fingerprint + scoped.encode()).digest()


def _size(memory: Sequence[Views]) -> int:
    return sum(map(num_bytes, memory))


def _num_leading_true(values: Sequence[bool]) -> int:
    return next((index for index, value in enumerate(values) if not value), len(values))
