"""The SGLang backend with a real Redis server behind a faulty proxy. Faults cause only misses, and later calls work."""

from __future__ import annotations

import contextlib
import uuid

import pytest
import torch

from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.page_store import PageStore
from sglang_pools import PlainPool, fill, indices_of
from store_proxy import Faults, Proxy

HASHES = [f"{number:064x}" for number in range(6)]
INDICES = indices_of(list(range(6)))
FAULTS = {
    "dead": Faults(refuses=1 << 20),
    "hanging": Faults(hangs=True),
    "slow": Faults(delay_s=2.0),
    "cut": Faults(cut_at=300),
    "corrupt": Faults(flips=tuple(range(4000, 40_000, 900))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_server_fills_no_page_with_wrong_bytes(name, redis_port):
    """No call raises. A page is a miss or has the right bytes. After the fault, all pages are found again."""
    with contextlib.closing(Proxy(redis_port)) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?prefix={uuid.uuid4().hex}:&retries=0&timeout=1s"
        settings = HiCacheSettings.parse({"store": url, "revision": "1", "timeout_s": 1.0, "gib_timeout_s": 0.0})
        pages, pool = PageStore(settings, RankIdentity("model")), PlainPool()
        pages.add_pool(pool)
        fill(pool, 1)
        before = pool.kv_buffer.clone()
        while not all(pages.set(HASHES, INDICES)):
            pass
        proxy.set(FAULTS[name])
        if name == "dead":
            proxy.drop()
        for _ in range(3):
            pool.kv_buffer.fill_(9)
            found = pages.get(HASHES, INDICES)
            for page, is_found in enumerate(found):
                expected = before[:, page] if is_found else torch.full_like(before[:, page], 9)
                assert torch.equal(pool.kv_buffer[:, page], expected)
            assert len(pages.set(HASHES, INDICES)) == len(HASHES)
            assert 0 <= pages.num_leading(HASHES) <= len(HASHES)
        proxy.set(Faults())
        # Repeat the calls, because the breaker rejects them for a while. After "corrupt", only the second loop runs.
        while not all(pages.set(HASHES, INDICES) if name != "corrupt" else [True]):
            pool.kv_buffer.copy_(before)
        pool.kv_buffer.copy_(before)
        while not all(pages.get(HASHES, INDICES)):
            pool.kv_buffer.copy_(before)
            pages.set(HASHES, INDICES)
        assert torch.equal(pool.kv_buffer[:, :6], before[:, :6])
        pages.close()
