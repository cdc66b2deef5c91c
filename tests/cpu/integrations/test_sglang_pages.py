"""The page store of the SGLang backend, tested without SGLang: round trips, faults, deadlines, ranks and settings."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from kvtier.errors import ArgumentError
from kvtier.integrations.sglang.config import HiCacheSettings, RankIdentity
from kvtier.integrations.sglang.page_store import PageStore
from kvtier.storage import Breaker, DiskStore, MemoryStore, ObjectResult, ObjectStatus, Results
from sglang_pools import PlainPool, fill, indices_of
from storage_support import Clock, Fault, FaultyStore, SimulatedDisk

HASHES = [f"{number:064x}" for number in range(8)]
PAGES = list(range(8))
TIMEOUT = 2.0
PAGE_BYTES = 800
"""Size of a page in a PlainPool: two pieces of 400 bytes."""


def make_pages(store=None, pool=None, rank=None, clock=time.monotonic, **settings):
    values = {"store": "memory:", "revision": "1", "timeout_s": TIMEOUT, "gib_timeout_s": 0.0, **settings}
    store = store or MemoryStore(1 << 22)
    pages = PageStore(HiCacheSettings.parse(values), rank or RankIdentity("model"), store=store, clock=clock)
    pages.add_pool(pool or PlainPool())
    return pages


def call_all(pages: PageStore, hashes=HASHES, count=8) -> list[object]:
    """Call each method that SGLang's threads use. Return the results."""
    indices, flat = indices_of(PAGES[:count]), [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in hashes]
    return [
        pages.exists(hashes),
        pages.num_leading(hashes),
        pages.set(hashes, indices),
        pages.get(hashes, indices),
        pages.set_tensors(hashes, flat),
        pages.get_tensors(hashes, flat),
        pages.exists(hashes, "mamba"),
        pages.clear(),
    ]


# results of `call_all` if the store fails
NOTHING = [[False] * 8, 0, [False] * 8, [False] * 8, [False] * 8, [None] * 8, [False] * 8, False]


# ---- faults --------------------------------------------------------------------------------------------------------


def test_pages_of_raising_store_are_missing():
    """Every call to the store raises."""

    class Dead:
        def contains(self, *_, **__):
            raise ConnectionError("the server has gone away")

        read_into = write = remove = scan = close = contains

    pages = make_pages(Dead())
    assert call_all(pages) == NOTHING
    assert pages.errors["ConnectionError"] == 7  # the call for the unregistered pool "mamba" does not reach the store
    pages.close()


def test_pages_of_failing_store_are_missing():
    pages = make_pages(FaultyStore(MemoryStore(1 << 22), [Fault(error="no space")] * 100))
    assert call_all(pages) == NOTHING
    assert pages.errors["failed"] > 0


def test_calls_to_hanging_store_end_before_the_time_limit():
    """A call may wait for the store for 90 % of its time limit. `set` calls the store twice within this time."""
    clock = Clock()
    hanging = FaultyStore(MemoryStore(1 << 22), [Fault(hangs=True)] * 100, clock)
    pages = make_pages(hanging, clock=clock, gib_timeout_s=1000.0)
    limit_s = TIMEOUT + 1000.0 * 8 * PAGE_BYTES / (1 << 30)
    indices = indices_of(PAGES)
    for call in (lambda: pages.exists(HASHES), lambda: pages.set(HASHES, indices), lambda: pages.get(HASHES, indices)):
        begin = clock.now
        assert call() == [False] * 8
        assert 0.8 * TIMEOUT <= clock.now - begin <= 0.91 * limit_s  # 90 %, and a tolerance of 1 %
    assert pages.errors["failed"] >= 3 * 8  # each page in each call


def test_late_read_of_hanging_disk_changes_no_page(tmp_path):
    """While the disk hangs, `get` returns at its deadline. When the disk answers later, the pool is not changed."""
    disk, gate = SimulatedDisk(), threading.Event()
    store = DiskStore(
        tmp_path, 1 << 22, files=disk, min_free_bytes=0, segment_bytes=1 << 20, breaker=Breaker(retry_s=60)
    )
    pool = PlainPool()
    fill(pool, 1)
    pages = make_pages(store, pool, timeout_s=0.1)
    pages._settings = HiCacheSettings.parse({"store": "memory:", "timeout_s": 60.0})  # enough time for the writes
    assert pages.set(HASHES, indices_of(PAGES)) == [True] * 8
    pages._settings = HiCacheSettings.parse({"store": "memory:", "timeout_s": 0.1, "gib_timeout_s": 0.0})
    pool.kv_buffer.zero_()
    disk.before = lambda name, _: gate.wait() if name == "read" else None
    assert pages.get(HASHES, indices_of(PAGES)) == [False] * 8
    assert call_all(pages)[2:4] == [[False] * 8] * 2  # the breaker is open, so no call waits
    gate.set()
    pages.close()  # waits for the late reads
    assert not pool.kv_buffer.any()


def test_only_pages_with_slow_objects_are_missing():
    """Only the pages that the store does not return in time are missing. Later calls find them."""
    store = MemoryStore(1 << 22)
    pages = make_pages(store)
    assert pages.set(HASHES, indices_of(PAGES)) == [True] * 8
    chosen = sorted(store.objects)[::3]
    slow = make_pages(FaultyStore(store, [Fault(hangs=True, only=lambda key: key in chosen)]))
    found = slow.get(HASHES, indices_of(PAGES))
    assert found.count(False) == len(chosen)
    assert slow.get(HASHES, indices_of(PAGES)) == [True] * 8


@pytest.mark.parametrize("fault", [Fault(flip_bit=77), Fault(cut_to=10)])
def test_pages_of_corrupt_objects_are_missing(fault):
    """Damaged bytes never reach the pool, and damaged pages can be stored again."""
    store, pool = MemoryStore(1 << 22), PlainPool()
    fill(pool, 2)
    before = pool.kv_buffer.clone()
    pages = make_pages(store, pool)
    assert pages.set(HASHES, indices_of(PAGES)) == [True] * 8
    damaged = make_pages(FaultyStore(store, [fault]), pool)
    pool.kv_buffer.fill_(7)
    assert damaged.get(HASHES, indices_of(PAGES)) == [False] * 8
    assert (pool.kv_buffer == 7).all()
    assert damaged.errors["corrupt"] == 8
    pool.kv_buffer.copy_(before)
    assert pages.set(HASHES, indices_of(PAGES)) == [True] * 8
    assert pages.get(HASHES, indices_of(PAGES)) == [True] * 8


def test_calls_with_wrong_arguments_fail_without_exception():
    """Calls with unequal numbers of indices and keys, unknown pools or invalid tensors fail without an exception."""
    pages = make_pages()
    assert pages.set(HASHES, indices_of(PAGES[:3])) == [False] * 8
    assert pages.get(HASHES, None) == [False] * 8
    assert pages.get(HASHES, indices_of(PAGES), "unknown") == [False] * 8
    assert pages.get_tensors(HASHES[:1], [None]) == [None]
    assert pages.get_tensors(HASHES[:1], [torch.zeros(4, 4).t()]) == [None]
    assert pages.set_tensors(HASHES[:1], [object()]) == [False]
    assert pages.set([], indices_of([])) == []
    assert pages.errors["ArgumentError"] == 5  # object() causes an AttributeError instead
    unregistered = PageStore(HiCacheSettings(("memory:",)), RankIdentity("model"))
    assert call_all(unregistered)[:6] == NOTHING[:6]


# ---- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_pages_in_several_pieces_round_trip(pieces):
    pool = PlainPool("layer_first" if pieces == 6 else "page_first", pieces=pieces)
    fill(pool, 3)
    before, pages = pool.kv_buffer.clone(), make_pages(pool=pool)
    assert pages.set(HASHES[:4], indices_of([5, 2, 9, 0])) == [True] * 4
    pool.kv_buffer.zero_()
    assert pages.get([*HASHES[:4], HASHES[7]], indices_of([0, 1, 2, 3, 4])) == [True] * 4 + [False]
    assert torch.equal(pool.kv_buffer[:, :4], before[:, [5, 2, 9, 0]])
    assert not pool.kv_buffer[:, 4:].any()
    assert pages.num_leading([*HASHES[:3], HASHES[7], HASHES[3]]) == 3


def test_second_set_call_for_a_page_writes_nothing():
    store, pool = MemoryStore(1 << 22), PlainPool()
    pages = make_pages(store, pool)
    for _ in range(2):
        assert pages.set(HASHES[:3], indices_of([0, 1, 2])) == [True] * 3
    assert store.stats.writes.num_done == 3


def test_replicated_ranks_share_pages_but_not_mamba_states():
    """With MLA, all ranks share the pages of rank 0. Each rank has its own states of Mamba layers."""
    store = MemoryStore(1 << 22)
    ranks = [make_pages(store, rank=RankIdentity("m", (rank, 2), is_replicated=True)) for rank in range(2)]
    for rank in ranks:
        rank.add_pool(PlainPool(), "mamba")
    assert ranks[0].set(HASHES[:1], indices_of([0])) == [True]
    assert ranks[0].set(HASHES[:1], indices_of([0]), "mamba") == [True]
    assert [rank.exists(HASHES[:1]) for rank in ranks] == [[True], [True]]
    assert [rank.exists(HASHES[:1], "mamba") for rank in ranks] == [[True], [False]]
    sharded = [make_pages(store, rank=RankIdentity("m", (rank, 2))) for rank in range(2)]
    assert [rank.exists(HASHES[:1]) for rank in sharded] == [[False], [False]]


def test_clear_keeps_pages_of_other_models():
    store = MemoryStore(1 << 22)
    one, other = make_pages(store), make_pages(store, rank=RankIdentity("other"))
    for pages in (one, other):
        assert pages.set(HASHES[:2], indices_of([0, 1])) == [True] * 2
    assert one.clear()
    assert (one.num_leading(HASHES[:2]), other.num_leading(HASHES[:2])) == (0, 2)


def test_clear_of_large_store_stops_at_time_limit():
    """`scan` returns the listing in 10 parts and takes 25 seconds per part. The time limit of `clear` is 60 seconds."""
    clock = Clock()

    class Slow(MemoryStore):
        num_scans = 0

        def scan(self, *_, **__):
            self.num_scans += 1
            clock.now += 25.0
            return replace(super().scan(), cursor="next" if self.num_scans < 10 else "")

    store = Slow(1 << 22)
    pages = make_pages(store, clock=clock)
    assert pages.set(HASHES[:2], indices_of([0, 1])) == [True] * 2
    assert not pages.clear()
    assert store.num_scans == 3
    assert pages.num_leading(HASHES[:2]) == 0  # the objects in the first part of the listing were removed
    assert not pages.errors


def test_clear_with_failed_removal_returns_false():
    class Keeping(MemoryStore):
        def remove(self, keys, **_):
            return Results((ObjectResult(ObjectStatus.FAILED, reason="read-only"),) * len(keys), 0.0)

    pages = make_pages(Keeping(1 << 22))
    assert pages.set(HASHES[:2], indices_of([0, 1])) == [True] * 2
    assert not pages.clear()
    assert pages.errors["failed"] == 2


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs a store"),
        ({"store": 3}, "URL or a list"),
        ({"store": "memory:", "time_out": 1}, "unknown setting time_out"),
        ({"store": "memory:", "timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_settings_with_invalid_values_raise(values, message):
    with pytest.raises(ArgumentError, match=message):
        HiCacheSettings.parse(values)


def test_persistent_store_with_unknown_revision_raises(tmp_path):
    url = f"disk:{tmp_path}/kv?bytes=4MiB&free=0"
    with pytest.raises(ArgumentError, match='set "revision"'):
        PageStore(HiCacheSettings((url,)), RankIdentity("org/model"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))
    first = HiCacheSettings((url,)).revision_of(str(folder))
    (folder / "model.safetensors").write_bytes(bytes(99) + b"1")
    assert HiCacheSettings((url,)).revision_of(str(folder)) != first
    assert HiCacheSettings(("memory:",)).revision_of("org/model") == "unknown"


def test_pages_of_each_rank_are_in_a_separate_folder(tmp_path):
    """The third store is rank 0 of a second server, which uses the same folder at the same time."""
    settings = HiCacheSettings((f"disk:{tmp_path}/kv?bytes=8MiB&free=0",), revision="1")
    ranks = [PageStore(settings, RankIdentity("model", (rank, 2))) for rank in (0, 1, 0)]
    for rank in ranks:
        rank.close()
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["shard-0-of-2", "shard-1-of-2"]


def test_pages_of_replicated_ranks_are_in_one_folder(tmp_path):
    settings = HiCacheSettings((f"disk:{tmp_path}/kv?bytes=8MiB&free=0",), revision="1")
    pools = [PlainPool() for _ in range(2)]
    ranks = [PageStore(settings, RankIdentity("model", (rank, 2), is_replicated=True)) for rank in range(2)]
    for rank, pool in zip(ranks, pools, strict=True):
        rank.add_pool(pool)
    fill(pools[0], 1)
    assert ranks[0].set(HASHES, indices_of(PAGES)) == [True] * 8
    assert ranks[1].get(HASHES, indices_of(PAGES)) == [True] * 8
    assert torch.equal(pools[0].kv_buffer[:, :8], pools[1].kv_buffer[:, :8])
    for rank in ranks:
        rank.close()
