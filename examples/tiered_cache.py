"""A tiered KV cache around your own tensor: device, host memory and disk, without the engine.

CacheManager decides which blocks to keep, evict, save and load; it handles block numbers only. CacheController copies
the bytes between your tensor, host memory and the store. This program passes plans and reports between them.
"""

from __future__ import annotations

import tempfile
import time

import torch

from kvtier.cache import CacheConfig, CacheManager, HostConfig, StoreConfig
from kvtier.index import Chain, Namespace
from kvtier.layout import CacheGroup, KVLayout
from kvtier.storage import Store, open_store
from kvtier.worker import CacheController

BLOCK_TOKENS, LAYERS, HEADS, HEAD_DIM = 16, 2, 2, 8
DEVICE_BLOCKS, HOST_BLOCKS = 8, 12


class TieredCache:
    def __init__(self, store: Store) -> None:
        self.kv = torch.zeros(DEVICE_BLOCKS, LAYERS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)  # your tensor, blocks first
        group = CacheGroup.attention("main", LAYERS, HEADS, HEAD_DIM, "f32", BLOCK_TOKENS)
        self.namespace = Namespace("my-model", dtype="f32", block_tokens=BLOCK_TOKENS)
        layout, model = KVLayout(BLOCK_TOKENS, (group,)), self.namespace.fingerprint
        tiers = CacheConfig(DEVICE_BLOCKS, host=HostConfig(HOST_BLOCKS), stores=(StoreConfig("store"),), partial_scan=0)
        self.manager = CacheManager(self.namespace, tiers)
        self.controller = CacheController(layout, [self.kv], HOST_BLOCKS, stores={"store": store}, namespace=model)

    def exchange(self) -> None:
        """Submit the next plan and apply finished transfers. An engine does this once per step."""
        self.controller.submit(self.manager.plan(now=time.monotonic()))
        self.controller.wait(0.01)
        for report in self.controller.poll():
            self.manager.apply(report)

    def process(self, tokens: list[int]) -> tuple[dict[str, int], torch.Tensor]:
        """Return the number of cached tokens by tier, and the KV of the full blocks."""
        manager, chain = self.manager, Chain(self.namespace, tokens)
        prefetch = manager.prefetch(chain, now=time.monotonic())  # store -> host; None without stores
        assert prefetch is not None
        while not manager.is_prefetched(prefetch, now=time.monotonic()):
            self.exchange()
        allocation = manager.match(chain, prefetch=prefetch)
        assert manager.allocate(allocation, len(tokens)) is None  # evicts cold blocks, and starts host -> device
        while not manager.is_ready(allocation):
            self.exchange()
        manager.end_prefetch(prefetch)
        manager.on_scheduled(allocation)
        for position in range(allocation.num_cached_tokens, len(tokens)):  # compute what is not cached
            block, offset = divmod(position, BLOCK_TOKENS)
            kv = torch.Generator().manual_seed(hash(tuple(tokens[: position + 1])) % 2**63)  # stands for a model
            self.kv[int(allocation.table[block]), :, :, offset] = torch.randn(LAYERS, 2, HEADS, HEAD_DIM, generator=kv)
        manager.publish(allocation, len(tokens))  # other prompts can match the blocks; starts device -> host -> store
        result = self.kv[allocation.table[: len(tokens) // BLOCK_TOKENS].tolist()]
        manager.finish(allocation)
        while manager.has_plans:  # an engine would run other requests
            self.exchange()
        return {tier: count for tier, count in allocation.tokens_from.items() if count}, result


def main(store: Store) -> None:
    cache = TieredCache(store)
    prompts = [[1000 * prompt + i for i in range(3 * BLOCK_TOKENS + 1)] for prompt in range(8)]
    computed = [cache.process(prompt)[1] for prompt in prompts]
    for number in reversed(range(len(prompts))):  # the newest prompts are still on the device, the oldest in the store
        cached, kv = cache.process(prompts[number])
        assert torch.equal(kv, computed[number])
        print(f"prompt {number}: {cached} of {len(prompts[number])} tokens cached, bytes equal")
    cache.controller.close()  # closes the store, too


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(open_store(f"disk:{folder}?bytes=64MiB&segment=1MiB&free=0B"))
