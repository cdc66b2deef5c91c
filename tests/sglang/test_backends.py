"""KvtierStorage returns the same results as SGLang's file and simulation backends, and works in SGLang's controller."""

from __future__ import annotations

import importlib
import os
import random

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.storage.sim_storage import SimHiCacheStorage

from kvtier.integrations.sglang import KvtierStorage
from sglang_pools import LAYOUTS, fill, indices_of, make_config, make_pool

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
NUM_PAGES, PAGE = 12, 4
SIDE_POOLS = (PoolName.SWA, PoolName.MAMBA)


def extra(folder, **settings):
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier.integrations.sglang",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "store": f"disk:{folder}?bytes=64MiB&free=0",
        "revision": "1",
        **settings,
    }


@pytest.fixture
def kvtier(tmp_path):
    made = []

    def make(folder="kv", settings=None, **fields):
        config = make_config(extra(tmp_path / folder, **(settings or {})), **fields)
        made.append(StorageBackendFactory.create_backend("dynamic", config, None))
        assert isinstance(made[-1], KvtierStorage)
        return made[-1]

    yield make
    for each in made:
        each.close()


class Trio:
    """KvtierStorage (`ours`), HiCacheFile and SimHiCacheStorage.

    Each backend has its own pools. At the start, pools of the same name have equal bytes.
    """

    def __init__(self, ours, folder, layout, *, is_mla, seed):
        folder.mkdir()
        config = make_config({"sim_op_latency_us": 0, "sim_write_gbps": 0}, is_mla_model=is_mla)
        self.ours, self.file, self.sim = ours, HiCacheFile(config, str(folder)), SimHiCacheStorage(config)
        self.pools = {}
        for backend in (self.ours, self.file, self.sim):
            pool = make_pool(layout, is_mla=is_mla, num_pages=NUM_PAGES, page_size=PAGE)
            backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, PoolName.KV)
            self.pools[backend, PoolName.KV] = pool
            for name in SIDE_POOLS:
                self.pools[backend, name] = make_pool(layout, is_mla=is_mla, num_pages=NUM_PAGES, page_size=PAGE)
                backend.register_mem_host_pool_v2(self.pools[backend, name], name)
        self.random = random.Random(seed)
        self.generation = 0
        self.hashes = [f"{number:064x}" for number in range(18)]
        self.refill()

    def refill(self):
        """Fill all pools with new bytes. Pools of the same name get equal bytes."""
        self.generation += 1
        for (_, name), pool in self.pools.items():
            seed = self.generation * 10 + [PoolName.KV, *SIDE_POOLS].index(name)  # a different seed for each name
            fill(pool, seed)

    def same_bytes(self):
        for name in (PoolName.KV, *SIDE_POOLS):
            mine, theirs = self.pools[self.ours, name], self.pools[self.file, name]
            assert torch.equal(mine.kv_buffer.view(torch.uint8), theirs.kv_buffer.view(torch.uint8)), name

    def draw(self):
        count = self.random.randint(1, 6)
        start = self.random.randrange(len(self.hashes))
        keys = [self.hashes[(start + at) % len(self.hashes)] for at in range(count)]
        return keys, self.random.sample(range(NUM_PAGES), count)

    def flat(self, backend, pages):
        return [self.pools[backend, PoolName.KV].get_data_page(page * PAGE) for page in pages]

    def set_v1(self):
        keys, pages = self.draw()
        mine = self.ours.batch_set_v1(keys, indices_of(pages))
        assert mine == self.sim.batch_set_v1(keys, indices_of(pages))
        assert all(mine) == self.file.batch_set(keys, self.flat(self.file, pages))

    def set_v0(self):
        keys, pages = self.draw()
        mine = self.ours.batch_set(keys, self.flat(self.ours, pages))
        assert mine == self.file.batch_set(keys, self.flat(self.file, pages))
        assert mine == self.sim.batch_set(keys, self.flat(self.sim, pages))

    def get_v1(self):
        keys, pages = self.draw()
        mine = self.ours.batch_get_v1(keys, indices_of(pages))
        assert mine == self.sim.batch_get_v1(keys, indices_of(pages))
        assert mine == self.read_file(keys, pages)

    def get_v0(self):
        keys, pages = self.draw()
        pool = self.pools[self.ours, PoolName.KV]
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        mine = self.ours.batch_get(keys, targets)
        for target, result, page in zip(targets, mine, pages, strict=True):
            assert result is None or result is target
            if result is not None:
                pool.set_from_flat_data_page(page * PAGE, result)
        assert [each is not None for each in mine] == self.read_file(keys, pages)

    def read_file(self, keys, pages):
        pool = self.pools[self.file, PoolName.KV]
        found = self.file.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for page, data in zip(pages, found, strict=True):
            if data is not None:
                pool.set_from_flat_data_page(page * PAGE, data)
        return [data is not None for data in found]

    def lookup(self):
        keys, _ = self.draw()
        assert self.ours.batch_exists(keys) == self.file.batch_exists(keys) == self.sim.batch_exists(keys)
        assert self.ours.exists(keys[0]) == self.file.exists(keys[0]) == self.sim.exists(keys[0])

    def transfers(self, *, with_kv):
        names = self.random.sample([PoolName.KV, *SIDE_POOLS] if with_kv else SIDE_POOLS, self.random.randint(1, 2))
        made = []
        for name in names:
            keys, pages = self.draw()
            indices = indices_of(pages)
            if self.random.random() < 0.1:
                indices = indices[:-1]  # for a wrong number of indices, backends must return False, not raise
            policy = self.random.choice(list(PoolHitPolicy))
            made.append(PoolTransfer(name=name, host_indices=indices, keys=keys, hit_policy=policy))
        return made

    def set_v2(self):
        transfers = self.transfers(with_kv=True)
        assert self.ours.batch_set_v2(transfers) == self.file.batch_set_v2(transfers)
        good = [each for each in transfers if each.host_indices.numel() == len(each.keys) * PAGE]
        self.sim.batch_set_v2(good)

    def get_v2(self):
        transfers = self.transfers(with_kv=True)
        assert self.ours.batch_get_v2(transfers) == self.file.batch_get_v2(transfers)

    def lookup_v2(self):
        keys, _ = self.draw()
        transfers = self.transfers(with_kv=False)
        mine, theirs = self.ours.batch_exists_v2(keys, transfers), self.file.batch_exists_v2(keys, transfers)
        assert mine == theirs == self.sim.batch_exists_v2(keys, transfers)

    def clear(self):
        if self.random.random() < 0.2:
            assert self.ours.clear() == self.file.clear() == self.sim.clear()


@pytest.mark.parametrize("is_mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_calls_return_the_results_of_sglang_backends(kvtier, tmp_path, layout, is_mla):
    """Make random calls of the v0, v1 and v2 interfaces, and compare the results with those of SGLang's backends.

    After each call, the pools of kvtier have the same bytes as the pools of HiCacheFile.
    """
    for seed in range(2 * SOAK):
        trio = Trio(
            kvtier(f"kv-{seed}", is_mla_model=is_mla), tmp_path / f"file-{seed}", layout, is_mla=is_mla, seed=seed
        )
        calls = (trio.set_v1, trio.set_v0, trio.get_v1, trio.get_v0, trio.lookup, trio.set_v2, trio.get_v2)
        for _ in range(150):
            trio.random.choice((*calls, trio.lookup_v2, trio.refill, trio.clear))()
            trio.same_bytes()
        assert not trio.ours.pages.errors.keys() - {"ArgumentError"}  # the error for a wrong number of indices


def test_backend_with_other_settings_never_hits(kvtier):
    """Pages of another model, revision, dtype, layout, page size, layer range or attention kind are not found."""
    keys = ["a" * 64]
    base = {"layout": "page_first"}
    cases = {
        "model": ({}, base, {"model_name": "other"}),
        "revision": ({"revision": "2"}, base, {}),
        "dtype": ({}, {**base, "dtype": torch.bfloat16}, {}),
        "layout": ({}, {"layout": "page_first_direct"}, {}),
        "page size": ({}, {**base, "page_size": 8}, {}),
        "layers": ({}, {**base, "layer_num": 2, "end_layer": 2}, {}),
        "kind": ({}, {**base, "is_mla": True}, {}),
    }
    first = kvtier()
    first.register_mem_pool_host(make_pool(**base))
    assert first.batch_set_v1(keys, indices_of([0])) == [True]
    first.close()
    found = {}
    for name, (settings, pool, fields) in cases.items():
        backend = kvtier(settings=settings, **fields)
        backend.register_mem_pool_host(make_pool(**pool))
        found[name] = backend.batch_exists(keys), backend.exists(keys[0])
        backend.close()
    assert found == dict.fromkeys(cases, (0, False))
    again = kvtier()
    again.register_mem_pool_host(make_pool(**base))
    assert again.batch_exists(keys) == 1  # the same settings find the page after a restart


@pytest.mark.parametrize(
    "fields", [{"tp_rank": 1}, {"pp_rank": 1, "pp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2}]
)
def test_backend_ranks_do_not_share_pages(kvtier, fields):
    """Each rank opens its own folder below one URL, and ranks never share pages."""
    ranks = [
        kvtier(tp_size=2, **each)
        for each in ({**fields, **dict.fromkeys((k for k in fields if "rank" in k), 0)}, fields)
    ]
    for number, backend in enumerate(ranks):
        pool = make_pool("page_first")
        fill(pool, number)
        backend.register_mem_pool_host(pool)
    assert ranks[0].batch_set_v1(["a"], indices_of([0])) == [True]
    assert [backend.batch_exists(["a"]) for backend in ranks] == [1, 0]


def test_backend_draft_pages_differ_from_target_pages(kvtier):
    """Draft pages arrive as flat tensors under keys with the suffix .draft, even if target pages use interface v1."""
    backend = kvtier()
    pool, draft = make_pool("page_first"), make_pool("page_first", layer_num=1, end_layer=1)
    fill(pool, 1), fill(draft, 2)
    backend.register_mem_pool_host(pool)
    assert backend.batch_set_v1(["a"], indices_of([2])) == [True]
    assert backend.batch_set(["a.draft"], [draft.get_data_page(8)])
    (page,) = backend.batch_get(["a.draft"], [draft.get_dummy_flat_data_page()])
    assert torch.equal(page.view(torch.uint8), draft.get_data_page(8).view(torch.uint8))
    other = torch.zeros_like(page).view(torch.bfloat16)
    assert backend.batch_get(["a.draft"], [other]) == [None]  # another element type, with the same number of bytes
    assert backend.batch_get(["b.draft"], [other]) == [None]


def controller_of(backend, pool):
    """Return SGLang's controller with only those attributes that its page functions use."""
    module = importlib.import_module("sglang.srt.managers.cache_controller")
    controller = object.__new__(module.HiCacheController)
    controller.storage_backend, controller.mem_pool_host, controller.page_size = backend, pool, PAGE
    controller.has_draft = False
    controller.page_set_func = controller._page_set_zero_copy
    controller.page_get_func = controller._page_get_zero_copy
    return controller


class Operation:
    """An operation of SGLang's controller, with only those attributes that the page functions use."""

    def __init__(self, hashes, pages):
        self.hash_value, self.host_indices, self.prefix_keys = hashes, indices_of(pages), None
        self.completed_tokens, self.request_id = 0, "request"

    def increment(self, count):
        self.completed_tokens += count


def test_controller_backs_up_and_prefetches_pages(kvtier):
    """With SGLang's own controller functions, back up five pages. Then prefetch three of them and a missing page."""
    backend, pool = kvtier(), make_pool("page_first_direct")
    fill(pool, 3)
    before = pool.kv_buffer.clone()
    backend.register_mem_pool_host(pool)
    controller, hashes = controller_of(backend, pool), [f"{number:064x}" for number in range(5)]
    backup = Operation(hashes, [0, 1, 2, 3, 4])
    controller._page_backup(backup)
    assert backup.completed_tokens == 5 * PAGE
    pool.kv_buffer.zero_()
    prefetch = Operation(hashes, [0, 1, 2, 3, 4])
    controller.page_get_func(prefetch, [*hashes[:3], "missing"], indices_of([0, 1, 2, 3]))
    assert prefetch.completed_tokens == 3 * PAGE
    assert torch.equal(pool.kv_buffer[:, :3].view(torch.uint8), before[:, :3].view(torch.uint8))


def test_controller_survives_a_closed_store(kvtier):
    """The controller's functions must return after an error, because an exception would end SGLang's thread."""
    backend, pool = kvtier(), make_pool("page_first")
    backend.register_mem_pool_host(pool)
    backend.close()
    controller = controller_of(backend, pool)
    backup = Operation(["a"], [0])
    controller._page_backup(backup)
    controller.page_get_func(backup, ["a"], indices_of([0]))
    assert backup.completed_tokens == 0
    assert backend.pages.errors["ClosedError"] >= 2


def test_backend_stores_nothing_for_pool_without_memory(kvtier):
    """DeepSeek-V4's KV pool has no memory of its own. A page exists if the side pools have it."""
    backend, pool, side = kvtier(), make_pool("page_first"), make_pool("page_first")
    pool.kv_buffer = None
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    keys = ["a", "b"]
    transfer = PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=indices_of([0, 1]))
    assert backend.batch_set_v1(keys, indices_of([0, 1])) == [True, True]
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [True, True]}
    assert backend.batch_exists_v2([*keys, "c"], [transfer]).kv_hit_pages == 2
    assert backend.batch_get_v1(keys, indices_of([0, 1])) == [True, True]


def test_backend_take_transfers_empties_the_list(kvtier):
    backend = kvtier(enable_storage_metrics=True)
    backend.register_mem_pool_host(make_pool("page_first"))
    backend.batch_set_v1(["a", "b"], indices_of([0, 1]))
    backend.batch_get_v1(["a"], indices_of([2]))
    taken = backend.pages.take_transfers()
    assert [(kind, pages) for kind, pages, _, _ in taken] == [("set", 2), ("get", 1)]
    assert backend.pages.take_transfers() == []
