"""PrefixTiers: host memory and stores for the blocks of one model.

    cache tensors  <─copy_─>  staging blocks  <─CacheController─>  host slots  <─>  stores

A cache of transformers has rows and columns of tokens, not blocks, so blocks pass through a small staging area on the
model's device. Loads and saves return when the copies are done. Writes to stores continue in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from kvtier.cache.allocation import Allocation, CacheStats
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WritebackConfig
from kvtier.cache.foreign import ForeignDevice, SavePoint
from kvtier.cache.manager import CacheManager
from kvtier.cache.prefetch import Prefetch, origins
from kvtier.errors import ArgumentError
from kvtier.index import Chain, Namespace
from kvtier.layout import KVLayout
from kvtier.memory.torch_types import torch_dtype
from kvtier.storage import open_store
from kvtier.worker.controller import CacheController

_STORE = "store"
_WAIT_SECONDS = 0.05
"""Maximum time to wait for a report before the next plan is made."""
_MAX_WRITING = 4096  # maximum number of blocks in flight to a store
DISK_BYTES = "20GiB"
"""Size of a disk store whose URL has no `bytes`."""

Tensors = list[tuple[int, str, torch.Tensor]]
"""Layer, role (key or value), and staging memory [block, head, token, size]."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A lease on the blocks of a prompt in host memory."""

    allocation: Allocation
    prefetch: Prefetch | None
    """The fetch from the store. None if there is no store or the prompt is empty."""

    @property
    def num_blocks(self) -> int:
        return self.allocation.lease.num_matched


class PrefixTiers:
    """Blocks of one model in host memory and in a store. Not thread-safe."""

    def __init__(
        self,
        namespace: Namespace,
        layout: KVLayout,
        device: torch.device,
        urls: Sequence[str],
        *,
        host_bytes: int,
        staging_bytes: int,
        wait_seconds: float,
        secret: bytes,
    ) -> None:
        self.group = layout.groups[0]
        num_host = host_bytes // self.group.slot_bytes
        if num_host < 1:
            raise ArgumentError(
                f"host_bytes is {host_bytes}, but one block of {layout.block_tokens} tokens has "
                f"{self.group.slot_bytes} bytes: raise host_bytes or lower block_tokens"
            )
        self.num_staging = max(1, min(num_host, staging_bytes // self.group.block_bytes))
        self._staging = torch.empty((self.num_staging, self.group.block_bytes), dtype=torch.uint8, device=device)
        stores = {_STORE: open_store([with_size(url) for url in urls])} if urls else {}
        try:
            self._controller = CacheController(
                layout,
                [self._staging],
                num_host,
                stores=stores,
                namespace=namespace.fingerprint,
                secret=secret,
                layer_wise=False,
                lazy_host=True,
            )
        except BaseException:
            for store in stores.values():
                store.close()
            raise
        # `is_shared`: look up the keys of each prompt, because listing a large store would delay the first prompt.
        saving = WritebackConfig(max_blocks=_MAX_WRITING)
        below = tuple(
            StoreConfig(name, saving=saving, wait_seconds=wait_seconds, is_shared=True, max_fetching_blocks=num_host)
            for name in stores
        )
        host = HostConfig(num_host, saving=WritebackConfig(max_blocks=self.num_staging))
        config = CacheConfig(0, owns_device=False, host=host, stores=below, always_load=True, secret=secret)
        self._manager = CacheManager(namespace, config, num_host_ready=self._controller.num_host_ready)
        self._is_closed = False

    @property
    def namespace(self) -> Namespace:
        return self._manager.namespace

    @property
    def stats(self) -> CacheStats:
        return self._manager.stats

    @property
    def _device(self) -> ForeignDevice:
        assert self._manager.foreign is not None
        return self._manager.foreign

    def use_namespace(self, namespace: Namespace) -> None:
        """Change the namespace, because the model has changed. Blocks of the old namespace are no longer used."""
        self.flush(0.0)
        self._manager.reset(namespace)
        self._controller.use_namespace(namespace.fingerprint)

    # ---- loads -----------------------------------------------------------------------------------------------------

    def match(self, chain: Chain) -> PrefixMatch:
        """Fetch the longest stored prefix to the host, and lease the blocks there. The caller must call `release`."""
        manager = self._manager
        prefetch = manager.prefetch(chain, now=time.monotonic())
        if prefetch is not None:
            self._run(lambda: manager.is_prefetched(prefetch, now=time.monotonic()))
        allocation = manager.match(chain, now=time.monotonic(), prefetch=prefetch)
        if prefetch is not None:
            manager.end_prefetch(prefetch)
        return PrefixMatch(allocation, prefetch)

    def load(self, match: PrefixMatch, stop: int) -> Iterator[tuple[int, int, Tensors]]:
        """Load the matched blocks [0, stop) in parts. Yield the first block, the end, and the tensors of each part.

        Stop at the first block that did not arrive. The tensors are valid until the next part.
        """
        for first in range(0, stop, self.num_staging):
            count = min(self.num_staging, stop - first)
            number = self._device.load(match.allocation, first, np.arange(count, dtype=np.int32))
            num_arrived = self._finish({number})[number].find(0)
            count = count if num_arrived < 0 else num_arrived
            if count:
                yield first, first + count, self.staging(count)
            if num_arrived >= 0:
                return

    def release(self, match: PrefixMatch, num_used: int) -> None:
        """End the lease. The first `num_used` blocks count as hits."""
        now = time.monotonic()
        match.allocation.tokens_from = origins(match.prefetch, num_used, self.namespace.block_tokens)
        self._manager.on_scheduled(match.allocation, now=now)
        self._manager.finish(match.allocation, now=now)

    # ---- saves -----------------------------------------------------------------------------------------------------

    def save(
        self, chain: Chain, point: SavePoint, first: int, stop: int, fill: Callable[[int, int, Tensors], None]
    ) -> None:
        """Save the blocks [first, stop) of a chain. `fill` copies a given range of blocks into staging memory.

        If the host has lost earlier blocks of the chain or has no more slots, the remaining blocks are not saved.
        """
        for low in range(first, stop, self.num_staging):
            high = min(low + self.num_staging, stop)
            fill(low, high, self.staging(high - low))
            table = [0] * low + list(range(high - low))
            started = self._device.save(chain, table, point, high, num_dropped=low, now=time.monotonic())
            self._finish({*started})
            if point.is_over or point.num_blocks < high:
                point.is_over = True
                return

    # ---- progress --------------------------------------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Wait until all blocks are written to the store. Return False after the timeout."""
        deadline = time.monotonic() + timeout
        self._run(lambda: not self._manager.has_plans or time.monotonic() >= deadline)
        return not self._manager.has_plans

    def close(self, timeout: float) -> None:
        """Write all blocks to the store, for at most `timeout` seconds, and free the memory. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.flush(timeout)
            self._controller.close()

    def _finish(self, transfers: set[int]) -> dict[int, bytes]:
        """Wait for transfers. Return one mask per transfer, with a byte per block that is 1 if the block arrived."""
        arrived: dict[int, bytes] = {}
        self._run(lambda: transfers <= arrived.keys(), arrived)
        return arrived

    def _run(self, is_done: Callable[[], bool], arrived: dict[int, bytes] | None = None) -> None:
        """Execute plans and apply reports until `is_done` returns True."""
        while True:
            plan = self._manager.plan(now=time.monotonic())
            if plan:
                self._controller.submit(plan)
            for report in self._controller.poll():
                for done in self._manager.apply(report):
                    if arrived is not None:
                        arrived[done.transfer.id] = bytes(done.arrived)
            if is_done():
                break
            if self._controller.is_busy:
                self._controller.wait(_WAIT_SECONDS)
        plan = self._manager.plan(now=time.monotonic())  # the last reports may have made writes to the store possible
        if plan:
            self._controller.submit(plan)

    def staging(self, num_blocks: int) -> Tensors:
        """Return views of the first `num_blocks` staging blocks, one view for each tensor of a block."""
        views: Tensors = []
        for layer, spec, span in self.group.tensors():
            part = self._staging[:num_blocks, span.offset : span.offset + span.nbytes]
            views.append((layer, spec.name, part.view(torch_dtype(spec.dtype)).view(num_blocks, *spec.shape)))
        return views


def with_size(url: str) -> str:
    """Return the URL. If it names a disk store without a size, add the size `DISK_BYTES`."""
    parts: Any = urlsplit(url)
    if parts.scheme != "disk" or "bytes=" in parts.query:
        return url
    return f"{url}{'&' if parts.query else '?'}bytes={DISK_BYTES}"
