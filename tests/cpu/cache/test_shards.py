"""Blocks that several ranks store. The stored objects must not depend on the number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError
from kvtier.index import Chain, Namespace
from kvtier.layout import CacheGroup, KVLayout, LayerSpec, TensorSpec
from kvtier.messages import Drop, Plan, Probe, Route, StoreLookup, TransferRequest, TransferResult, slot_bytes
from kvtier.storage import MemoryStore, ShardStores, open_shards
from kvtier.worker import store_io
from kvtier.worker.controller import CacheController
from kvtier.worker.sharding import Sharding, parts_of
from storage_support import Fault, FaultyStore

NAMESPACE = hashlib.sha256(b"a model").digest()
BLOCKS = 5
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(BLOCKS)]
HOST = [4, 0, 5, 2, 3]
"""Host slot of each block."""


@st.composite
def layouts(draw):
    """Draw a layout with a group "main" and, optionally, a draft group and an MLA group.

    Each layer of "main" has 4 or 8 KV heads. Scales and an indexer are optional.
    """
    tokens, heads = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([4, 8]))
    element = draw(st.sampled_from([dt.u8, dt.bf16, dt.f32, dt.fp8_e4m3, dt.u4]))
    extras = [
        TensorSpec("key_scale", dt.f32, (tokens, heads), head_axis=1),
        TensorSpec("value_scale", dt.f16, (heads, 3), head_axis=0),
        TensorSpec("indexer", dt.u8, (tokens, 5)),
    ]
    extra = draw(st.lists(st.sampled_from(extras), unique=True, max_size=3))
    main = CacheGroup.attention("main", draw(st.integers(1, 3)), heads, 6, element, tokens, extra=extra)
    if draw(st.booleans()):
        both = (TensorSpec("key", dt.f16, (tokens, 4, 2), 1), TensorSpec("value", dt.f16, (tokens, 4, 2), 1))
        main = main.with_layers([LayerSpec(both)])
    others = [
        CacheGroup.attention("draft", 1, 4, 2, dt.f32, tokens),
        CacheGroup.mla("latent", 2, 9, dt.bf16, tokens),
    ]
    groups = [main, *draw(st.lists(st.sampled_from(others), unique=True, max_size=2))]
    return KVLayout(tokens, tuple(draw(st.permutations(groups))))


def blocks_of(layout: KVLayout, seed: int = 0) -> list[list[np.ndarray]]:
    """Return random tensors [block, outer, head, byte] for every group.

    `outer` stands for all axes before the head axis. Tensors without a head axis have the shape [block, 1, 1, byte].
    """
    random = np.random.default_rng(seed)
    made = []
    for group in layout.groups:
        tensors = []
        for _, spec, span in group.tensors():
            axis = spec.head_axis
            outer, heads = (1, 1) if axis is None else (math.prod(spec.shape[:axis]), spec.shape[axis])
            shape = (BLOCKS, outer, heads, span.nbytes // outer // heads)
            tensors.append(random.integers(0, 256, shape, np.uint8))
        made.append(tensors)
    return made


def of_rank(layout: KVLayout, blocks: list[list[np.ndarray]], rank: int, num_ranks: int) -> list[np.ndarray]:
    """Return the blocks of a rank as one array [block, byte] per group.

    Of a tensor with a head axis, a block contains only the heads of this rank. Other tensors are included whole.
    """
    mine = []
    for group, tensors in zip(layout.groups, blocks, strict=True):
        parts = []
        for (_, spec, _), tensor in zip(group.tensors(), tensors, strict=True):
            if spec.head_axis is not None:
                count = tensor.shape[2] // num_ranks
                tensor = tensor[:, :, rank * count : (rank + 1) * count]
            parts.append(tensor.reshape(BLOCKS, -1))
        mine.append(np.concatenate(parts, axis=1))
    return mine


class Ranks:
    """The controllers of all ranks of one cache."""

    def __init__(self, layout: KVLayout, num_ranks: int, num_shards: int, stores) -> None:
        self.layout, self.num_ranks = layout, num_ranks
        mine = layout.of_rank(num_ranks)
        self.caches = [
            [torch.zeros(BLOCKS, group.block_bytes, dtype=torch.uint8) for group in mine.groups]
            for _ in range(num_ranks)
        ]
        self.controllers = [
            CacheController(
                mine,
                caches,
                BLOCKS + 1,
                stores={"disk": stores[rank] if isinstance(stores, list) else stores},
                namespace=NAMESPACE,
                sharding=Sharding(rank, num_ranks, num_shards),
            )
            for rank, caches in enumerate(self.caches)
        ]
        self.lookups: list[list[StoreLookup]] = [[] for _ in range(num_ranks)]
        self.ids = itertools.count(1)

    def fill(self, blocks: list[list[np.ndarray]]) -> None:
        for rank, caches in enumerate(self.caches):
            for cache, expected in zip(caches, of_rank(self.layout, blocks, rank, self.num_ranks), strict=True):
                cache.copy_(torch.from_numpy(expected))

    def run(self, *tasks: TransferRequest | Probe | Drop) -> list[list[TransferResult]]:
        """Run the tasks on every rank. Append the lookups to `lookups`. Return the transfer results by rank."""
        kinds = [tuple(task for task in tasks if isinstance(task, kind)) for kind in (TransferRequest, Probe, Drop)]
        done = []
        for rank, controller in enumerate(self.controllers):
            controller.submit(Plan(1, 0, *kinds))
            outcomes: list[TransferResult] = []
            while controller.is_busy:
                controller.wait(1.0)
                for report in controller.poll():
                    assert report.rank == rank
                    outcomes += report.results
                    self.lookups[rank] += report.lookups
            done.append(outcomes)
        return done

    def transfer(self, route: Route, blocks=range(BLOCKS)) -> TransferRequest:
        device, host = (slot_bytes(np.array(each, np.int32)) for each in (list(blocks), [HOST[i] for i in blocks]))
        ends = {
            Route.DEVICE_TO_HOST: ("device", "host", device, host),
            Route.HOST_TO_DEVICE: ("host", "device", host, device),
            Route.HOST_TO_STORE: ("host", "disk", host, b""),
            Route.STORE_TO_HOST: ("disk", "host", b"", host),
        }[route]
        return TransferRequest(next(self.ids), route, *ends, b"".join(KEYS[i] for i in blocks))

    def save_and_store(self) -> None:
        for route in (Route.DEVICE_TO_HOST, Route.HOST_TO_STORE):
            for outcomes in self.run(self.transfer(route)):
                assert all(outcome.ok for outcome in outcomes), outcomes

    def fetch_and_load(self) -> None:
        for route in (Route.STORE_TO_HOST, Route.HOST_TO_DEVICE):
            for outcomes in self.run(self.transfer(route)):
                assert all(outcome.ok for outcome in outcomes), outcomes

    def assert_holds(self, blocks: list[list[np.ndarray]]) -> None:
        for rank, caches in enumerate(self.caches):
            for cache, expected in zip(caches, of_rank(self.layout, blocks, rank, self.num_ranks), strict=True):
                np.testing.assert_array_equal(cache.numpy(), expected)

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()


@pytest.fixture
def ranks():
    made: list[Ranks] = []

    def make(*arguments, **options) -> Ranks:
        made.append(Ranks(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def payloads(store: MemoryStore) -> dict[bytes, bytes]:
    return {key: bytes(stored.payload) for key, stored in store.objects.items()}


# ---- stored bytes --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(layouts(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_stored_blocks_do_not_depend_on_number_of_ranks(layout, num_writers, num_readers, seed):
    stores, blocks = [MemoryStore(1 << 22) for _ in range(2)], blocks_of(layout, seed)
    made = []
    try:
        made.append(Ranks(layout, num_writers, 4, stores[0]))
        made[0].fill(blocks)
        made[0].save_and_store()
        made.append(Ranks(layout, num_readers, 4, stores[0]))
        made[1].fetch_and_load()
        made[1].assert_holds(blocks)
        made.append(Ranks(layout, num_readers, 4, stores[1]))
        made[2].fill(blocks)
        made[2].save_and_store()
        assert payloads(stores[0]) == payloads(stores[1])  # the stored objects do not depend on the number of ranks
        made.append(Ranks(layout, num_writers, 4, stores[1]))
        made[3].fetch_and_load()
        made[3].assert_holds(blocks)
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_block_is_stored_as_shards_and_replicated_objects(ranks, num_ranks):
    store, layout = (
        MemoryStore(1 << 20),
        KVLayout(
            2,
            (
                CacheGroup.attention("main", 2, 4, 8, dt.f16, 2, extra=[TensorSpec("indexer", dt.u8, (2, 5))]),
                CacheGroup.mla("latent", 2, 9, dt.bf16, 2),
            ),
        ),
    )
    cache_ranks = ranks(layout, num_ranks, 4, store)
    cache_ranks.fill(blocks_of(layout))
    cache_ranks.save_and_store()
    assert len(store.objects) == BLOCKS * (4 + 1 + 1)  # 4 shards, the indexer of the group main, and the group latent
    sizes = sorted({len(payload) for payload in payloads(store).values()})
    of_token = {2 * 8 * 2, 5, 9 * 2}  # bytes of one token in one layer: K and V of a head in f16, indexer, latent
    assert sizes == sorted(2 * 2 * nbytes for nbytes in of_token)  # 2 layers, 2 tokens


def test_rank_with_a_single_shard_stores_without_gathering(ranks):
    layout = KVLayout(16, (CacheGroup.attention("main", 3, 4, 8, dt.f16, 16),))
    for sharding in (Sharding(), Sharding(3, 4, 4)):
        (part,) = parts_of(layout.of_rank(sharding.num_ranks).groups, sharding)
        assert part.span is not None
    (first, second) = parts_of(layout.of_rank(2).groups, Sharding(1, 2, 4))
    assert (first.shard, second.shard) == (2, 3)
    assert [len(part.pieces) for part in (first, second)] == [1, 1]  # equal layers form one piece
    store = MemoryStore(1 << 22)
    alone, blocks = ranks(layout, 1, 1, store), blocks_of(layout)
    alone.fill(blocks)
    alone.save_and_store()
    assert payloads(store) == {key: of_rank(layout, blocks, 0, 1)[0][i].tobytes() for i, key in enumerate(KEYS)}


def test_keys_of_different_shard_counts_do_not_collide(ranks):
    store = MemoryStore(1 << 22)
    layout = KVLayout(4, (CacheGroup.attention("main", 2, 4, 8, dt.f16, 4),))
    for num_shards in (1, 2, 4):
        each = ranks(layout, 1, num_shards, store)
        each.fill(blocks_of(layout, num_shards))
        each.save_and_store()
    assert len(store.objects) == BLOCKS * (1 + 2 + 4)
    for num_shards in (1, 2, 4):
        again = ranks(layout, 1, num_shards, store)
        again.fetch_and_load()
        again.assert_holds(blocks_of(layout, num_shards))


@pytest.mark.parametrize(("max_bytes", "expected"), [(5000, [6, 6, 3]), (1, [3] * 5), (1 << 20, [15])])
def test_gathered_blocks_are_written_in_bounded_batches(ranks, monkeypatch, max_bytes, expected):
    monkeypatch.setattr(store_io, "_GATHER_BYTES", max_bytes)  # two blocks fit into 5000 bytes
    layout = KVLayout(4, (CacheGroup.attention("main", 2, 4, 8, dt.f32, 4, extra=[TensorSpec("i", dt.u8, (3,))]),))
    calls: list[int] = []

    class Counting(MemoryStore):
        def write(self, writes, **options):
            calls.append(len(writes))
            return super().write(writes, **options)

    store, blocks = Counting(1 << 22), blocks_of(layout)
    cache_ranks = ranks(layout, 1, 2, store)
    cache_ranks.fill(blocks)
    cache_ranks.save_and_store()
    assert calls == expected  # three objects per block: two shards and the replicated tensor
    other = ranks(layout, 2, 2, store)
    other.fetch_and_load()
    other.assert_holds(blocks)


# ---- folders -------------------------------------------------------------------------------------------------------


def test_disk_has_one_folder_per_shard_for_any_number_of_ranks(tmp_path):
    layout, blocks = KVLayout(4, (CacheGroup.attention("main", 2, 4, 8, dt.f16, 4),)), None
    url = f"disk:{tmp_path}?bytes=64MiB&segment=1MiB&free=0"
    for num_ranks in (1, 2, 4, 1):
        stores = [open_shards([url], Sharding(rank, num_ranks, 4).shards, 4) for rank in range(num_ranks)]
        cache_ranks = Ranks(layout, num_ranks, 4, stores)
        if blocks is None:
            blocks = blocks_of(layout)
            cache_ranks.fill(blocks)
            cache_ranks.save_and_store()
        else:
            cache_ranks.run(Probe(99, "disk"))
            for lookups in cache_ranks.lookups:
                assert sorted(b"".join(each.present for each in lookups)) == sorted(b"".join(KEYS))
            cache_ranks.fetch_and_load()
            cache_ranks.assert_holds(blocks)
        assert stores[0].stats.num_objects == BLOCKS * 4 // num_ranks
        cache_ranks.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"shard-{i}-of-4" for i in range(4)]


@pytest.mark.parametrize(
    "group",
    [
        CacheGroup.mla("latent", 2, 9, dt.bf16, 4),
        CacheGroup.attention("main", 2, 4, 8, dt.f16, 4, extra=[TensorSpec("indexer", dt.u8, (4, 3))]),
    ],
    ids=lambda group: group.name,
)
def test_replicated_tensors_on_disk_are_found_by_all_ranks(tmp_path, group):
    layout = KVLayout(4, (group,))
    url, blocks = f"disk:{tmp_path}?bytes=64MiB&segment=1MiB&free=0", blocks_of(layout)
    for is_new in (True, False):
        shards = [Sharding(rank, 2, 4).shards for rank in range(2)]
        cache_ranks = Ranks(layout, 2, 4, [open_shards([url], each, 4, replicated=True) for each in shards])
        if is_new:
            cache_ranks.fill(blocks)
            cache_ranks.save_and_store()
        else:
            cache_ranks.fetch_and_load()
            cache_ranks.assert_holds(blocks)
        cache_ranks.close()


def test_open_shards_of_memory_url_opens_one_store():
    shards = open_shards(["memory:?bytes=1MiB"], range(2, 4), 4)
    assert len(shards.stores) == 1
    assert shards.of(2) is shards.of(3) is shards.of(None)
    shards.close()


def test_open_shards_closes_opened_stores_after_an_error(tmp_path):
    (tmp_path / "shard-1-of-2").write_text("not a folder")
    url = f"disk:{tmp_path}?bytes=64MiB&segment=1MiB&free=0"
    with pytest.raises(Exception, match="shard-1-of-2"):
        open_shards([url], range(2), 2)
    (tmp_path / "shard-1-of-2").unlink()
    open_shards([url], range(2), 2).close()  # the failed call has not left the first folder locked


# ---- lookups -------------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(4, (CacheGroup.attention("main", 2, 4, 8, dt.f16, 4), CacheGroup.mla("latent", 1, 6, dt.u8, 4)))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("lost_shard", [2, None], ids=["shard", "replicated"])
def test_block_with_a_missing_object_is_absent(ranks, num_ranks, lost_shard):
    """The block is absent on every rank that reads the missing object.

    Only one rank reads a shard. All ranks read an object that is not sharded.
    """
    store = MemoryStore(1 << 22)
    cache_ranks = ranks(LAYOUT, num_ranks, 4, store)
    cache_ranks.fill(blocks_of(LAYOUT))
    cache_ranks.save_and_store()
    parts = [
        part
        for rank in range(num_ranks)
        for part in parts_of(LAYOUT.of_rank(num_ranks).groups, Sharding(rank, num_ranks, 4))
    ]
    lost = next(part for part in parts if part.shard == lost_shard)
    del store.objects[lost.key_list(KEYS[1])[0]]
    readers = {
        rank for rank in range(num_ranks) if lost_shard is None or lost_shard in Sharding(rank, num_ranks, 4).shards
    }
    cache_ranks.run(Probe(5, "disk", b"".join(KEYS)))
    cache_ranks.run(Probe(6, "disk"))
    for rank, (asked, *found) in enumerate(cache_ranks.lookups):
        expected = KEYS[1] if rank in readers else b""
        assert asked.absent == expected
        assert asked.present == b"".join(key for key in KEYS if key != expected)
        listed = b"".join(each.present for each in found)
        assert {listed[at : at + 32] for at in range(0, len(listed), 32)} == {*KEYS} - {expected}
    for rank, (outcome,) in enumerate(cache_ranks.run(cache_ranks.transfer(Route.STORE_TO_HOST))):
        assert (outcome.ok, outcome.arrived) == ((False, b"\1\0\1\1\1") if rank in readers else (True, b""))


def test_drop_removes_objects_of_all_shards(ranks):
    store = MemoryStore(1 << 22)
    cache_ranks = ranks(LAYOUT, 2, 4, store)
    cache_ranks.fill(blocks_of(LAYOUT))
    cache_ranks.save_and_store()
    cache_ranks.run(Drop("disk", KEYS[0] + KEYS[1]))
    assert len(store.objects) == (BLOCKS - 2) * 5  # 4 shards and the latent
    cache_ranks.run(Drop("disk"))
    assert not store.objects


def test_drop_of_keys_removes_objects_in_all_shard_stores(ranks):
    stores = ShardStores(tuple(MemoryStore(1 << 22) for _ in range(4)))
    cache_ranks = ranks(LAYOUT, 1, 4, stores)
    cache_ranks.fill(blocks_of(LAYOUT))
    cache_ranks.save_and_store()
    # the first store also has the latents, which are not sharded
    assert [len(store.objects) for store in stores.stores] == [2 * BLOCKS, BLOCKS, BLOCKS, BLOCKS]
    cache_ranks.run(Drop("disk", KEYS[0] + KEYS[1]))
    assert [len(store.objects) for store in stores.stores] == [2 * (BLOCKS - 2), *[BLOCKS - 2] * 3]
    cache_ranks.run(Probe(5, "disk", b"".join(KEYS)))
    assert cache_ranks.lookups[0][-1].absent == KEYS[0] + KEYS[1]
    cache_ranks.run(Drop("disk"))
    assert not any(store.objects for store in stores.stores)


def test_second_rank_does_not_write_replicated_tensors(ranks):
    layout = KVLayout(4, (CacheGroup.mla("latent", 2, 9, dt.bf16, 4),))
    stores = [MemoryStore(1 << 22), MemoryStore(1 << 22)]
    cache_ranks, blocks = ranks(layout, 2, 2, stores), blocks_of(layout)
    cache_ranks.fill(blocks)
    cache_ranks.run(cache_ranks.transfer(Route.DEVICE_TO_HOST))
    (first,), (second,) = cache_ranks.run(cache_ranks.transfer(Route.HOST_TO_STORE))
    assert (first.ok, first.num_bytes) == (True, BLOCKS * layout.groups[0].block_bytes)
    assert (second.ok, second.num_bytes, second.arrived) == (True, 0, b"")
    assert [len(store.objects) for store in stores] == [BLOCKS, 0]


def test_fetch_does_not_write_a_corrupt_shard_to_the_host(ranks):
    store, blocks = MemoryStore(1 << 22), blocks_of(LAYOUT)
    cache_ranks = ranks(LAYOUT, 1, 4, store)
    cache_ranks.fill(blocks)
    cache_ranks.save_and_store()
    bad = parts_of(LAYOUT.groups, Sharding(0, 1, 4))[1].key_list(KEYS[2])[0]
    again = ranks(LAYOUT, 1, 4, FaultyStore(store, [Fault(flip_bit=9, only=lambda key: key == bad)]))
    hosts = again.controllers[0]._hosts
    for host in hosts:
        host.slots().fill_(0xEE)
    ((outcome,),) = again.run(again.transfer(Route.STORE_TO_HOST))
    assert outcome.arrived == b"\1\1\0\1\1"
    kept = hosts[0].block(HOST[2]).numpy()
    expected = of_rank(LAYOUT, blocks, 0, 1)[0][2]
    kept, expected = kept.reshape(-1, 4, 16), expected.reshape(-1, 4, 16)  # 4 heads of 8 f16 elements
    assert (kept[:, 1] == 0xEE).all()  # head 1, which is in the corrupt shard, was not written
    np.testing.assert_array_equal(kept[:, [0, 2, 3]], expected[:, [0, 2, 3]])


# ---- a manager and its ranks ---------------------------------------------------------------------------------------


class Cache:
    """A manager, and one controller per rank. `stores` is a store for all ranks, or a list with one store per rank."""

    def __init__(self, num_ranks: int, stores, *, is_shared: bool) -> None:
        self.namespace = Namespace("model", block_tokens=4)
        store = StoreConfig("disk", wait=WaitPolicy.WAIT, is_shared=is_shared)
        config = CacheConfig(BLOCKS, host=HostConfig(BLOCKS + 1), stores=(store,), always_load=True)
        self.ranks = Ranks(LAYOUT, num_ranks, 4, stores)
        self.manager = CacheManager(self.namespace, config, num_ranks=num_ranks)
        self.chain = Chain(self.namespace, [7] * (4 * BLOCKS) + [1])

    def settle(self, is_done) -> None:
        for _ in range(10000):
            if is_done():
                return
            plan = self.manager.plan()
            for controller in self.ranks.controllers:
                controller.submit(plan)
                controller.wait(0.01)
                for report in controller.poll():
                    self.manager.apply(report)
        raise AssertionError("the transfers did not finish")

    def compute(self, blocks) -> None:
        allocation = self.manager.match(self.chain)
        assert self.manager.allocate(allocation, 4 * BLOCKS) is None
        order = [int(slot) for slot in allocation.table]
        for rank, caches in enumerate(self.ranks.caches):
            for cache, mine in zip(caches, of_rank(LAYOUT, blocks, rank, self.ranks.num_ranks), strict=True):
                cache[order] = torch.from_numpy(mine)
        self.manager.on_scheduled(allocation)
        self.manager.publish(allocation, 4 * BLOCKS)
        self.manager.finish(allocation)
        self.settle(lambda: not self.manager.has_plans)

    def find(self, blocks) -> int:
        """Load the cached blocks of the chain to the device, and check them on every rank. Return the number found."""
        fetch = self.manager.prefetch(self.chain)
        self.settle(lambda: self.manager.is_prefetched(fetch))
        allocation = self.manager.match(self.chain, prefetch=fetch)
        self.manager.end_prefetch(fetch)
        assert self.manager.allocate(allocation, 4 * allocation.lease.num_matched) is None
        self.settle(lambda: self.manager.is_ready(allocation))
        num_found = allocation.lease.num_matched
        for rank, caches in enumerate(self.ranks.caches):
            for cache, mine in zip(caches, of_rank(LAYOUT, blocks, rank, self.ranks.num_ranks), strict=True):
                for block in range(num_found):
                    np.testing.assert_array_equal(cache[int(allocation.table[block])].numpy(), mine[block])
        self.manager.finish(allocation)
        return num_found


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_manager_finds_blocks_written_by_more_or_fewer_ranks(num_writers, num_readers, is_shared):
    store, blocks = MemoryStore(1 << 22), blocks_of(LAYOUT)
    writers = Cache(num_writers, store, is_shared=is_shared)
    writers.compute(blocks)
    readers = Cache(num_readers, store, is_shared=is_shared)
    assert readers.find(blocks) == BLOCKS
    readers.ranks.close()
    writers.ranks.close()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("fault", [Fault("an error"), Fault(flip_bit=3), Fault(cut_to=1)], ids=["error", "flip", "cut"])
def test_failed_read_on_one_rank_is_a_miss_on_all_ranks(fault, is_shared):
    store, blocks = MemoryStore(1 << 22), blocks_of(LAYOUT)
    writers = Cache(2, store, is_shared=is_shared)
    writers.compute(blocks)
    bad = parts_of(LAYOUT.of_rank(2).groups, Sharding(1, 2, 4))[0].key_list(writers.chain.keys()[2 * 32 : 3 * 32])[0]
    calls = itertools.count()

    def is_bad(key: bytes) -> bool:
        return key == bad

    fault.only = is_bad

    class FailingReads(FaultyStore):
        """A store with faults in reads. `contains` and `scan` have no faults, so they find the object."""

        def contains(self, keys, **_):
            return self.inner.contains(keys)

        def scan(self, *arguments, **_):
            return self.inner.scan(*arguments)

        def read_into(self, reads, **options):
            next(calls)
            return super().read_into(reads, **options)

    readers = Cache(2, [store, FailingReads(store, [fault])], is_shared=is_shared)
    assert readers.find(blocks) == 2  # the third block failed on rank 1, so later blocks cannot match
    assert next(calls) == 1  # rank 1 has read once
    readers.manager.check()
    readers.ranks.close()
    writers.ranks.close()


# ---- invalid arguments --------------------------------------------------------------------------------------------


def test_invalid_sharding_raises():
    layout = KVLayout(4, (CacheGroup.attention("main", 1, 6, 8, dt.f16, 4),))
    with pytest.raises(ArgumentError, match="6 KV heads, which cannot be split among 4 ranks"):
        layout.of_rank(4)
    with pytest.raises(ArgumentError, match="2 ranks cannot divide 3 shards"):
        Sharding(0, 2, 3)
    with pytest.raises(ArgumentError, match="invalid rank 2 of 2"):
        Sharding(2, 2, 2)
    with pytest.raises(ArgumentError, match="invalid rank -1 of 2"):
        Sharding(-1, 2, 2)
    with pytest.raises(ArgumentError, match="invalid rank 0 of 0"):
        Sharding(0, 0, 1)
    with pytest.raises(ArgumentError, match="1 ranks cannot divide 0 shards"):
        Sharding(0, 1, 0)
    assert [list(Sharding(rank, 3, 6).shards) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(
        ArgumentError, match="6 KV heads of 8 f16 elements on each rank, which cannot be divided into 4"
    ):
        parts_of(layout.groups, Sharding(0, 1, 4))
    odd = KVLayout(2, (CacheGroup.attention("main", 1, 4, 1, dt.u4, 2),))
    with pytest.raises(ArgumentError, match="whole heads and bytes"):
        parts_of(odd.groups, Sharding(0, 1, 4))
    with pytest.raises(ArgumentError, match="no head axis 2"):
        TensorSpec("key", dt.u8, (4, 4), head_axis=2)
