"""A tensor-parallel engine gives the same answers as an engine with one rank, and raises if a rank fails."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from benchmarks.random_weights import random_weights

from cache_support import Worker
from engine_helpers import Answer, finish, greedy, prompts
from kvtier.cache.admin import CacheAdmin
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.engine import Model, ModelConfig
from kvtier.engine.cache_runtime import CacheRuntime
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model_config import RopeConfig
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.engine.rank_link import rendezvous
from kvtier.engine.speculate import DraftProposer
from kvtier.engine.split import split_config, split_weights
from kvtier.errors import ArgumentError, ClosedError, EngineError, RangeError
from kvtier.index import Chain, Namespace
from kvtier.memory import CPU
from kvtier.messages import Plan, Probe
from kvtier.scheduler import Scheduler, SchedulerConfig
from kvtier.storage import DiskStore, MemoryStore
from kvtier.worker.layer_waits import LayerWaits
from support import stop_process

SHAPE = ModelConfig("llama", 3, 32, 48, 8, 4, 8, 199, 512, norm_eps=1e-5, rope=RopeConfig(10000.0))
DRAFT = replace(SHAPE, num_layers=1, num_heads=3, num_kv_heads=3)
BLOCK = 4


def model_of(config: ModelConfig, seed: int = 1) -> Model:
    """Return a model with random weights, including any biases and any norms of queries and keys."""
    weights = random_weights(config, torch.float32, torch.device("cpu"), seed=seed)
    random = torch.Generator().manual_seed(seed)
    for layer in weights.layers:
        for vector in (layer.qkv.bias, layer.output.bias, layer.q_norm, layer.k_norm):
            if vector is not None:
                vector.normal_(0.5, 0.5, generator=random)
    return Model(config, weights)


MODEL = model_of(SHAPE)
DRAFT_MODEL = model_of(DRAFT, 2)


# ---- split models --------------------------------------------------------------------------------------------------


class AllReduce:
    """An all_reduce between threads, used instead of a process group."""

    def __init__(self, num_ranks: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60)

    def of(self, rank: int):
        def all_reduce(mine: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = mine
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return all_reduce


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "config",
    [
        SHAPE,
        replace(SHAPE, attention_bias=True),
        replace(SHAPE, architecture="qwen2"),
        replace(SHAPE, architecture="qwen3"),
    ],
    ids=["llama", "bias", "qwen2", "qwen3"],
)
def test_split_model_on_all_ranks_equals_whole_model(config, num_ranks):
    model, all_reduce, blocks = model_of(config), AllReduce(num_ranks), 6
    sequences = [
        SequenceInput([3, 4, 5, 6, 7, 8, 9], 0, [0, 1], 1),
        SequenceInput([11], 0, [2], 0),
        SequenceInput([13, 14, 15], 0, [4], 2),
    ]
    batch = ForwardBatch.build(sequences, BLOCK, torch.device("cpu"))
    expected_cache = model.new_cache(blocks, BLOCK)
    expected = model.logits(model.forward(batch, expected_cache))
    actual: dict[int, torch.Tensor] = {}
    caches: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        part = Model(
            split_config(config, num_ranks),
            split_weights(config, model.weights, rank, num_ranks),
            all_reduce=all_reduce.of(rank),
        )
        caches[rank] = part.new_cache(blocks, BLOCK)
        hidden = part.forward(batch, caches[rank])
        if rank == 0:
            actual[rank] = part.logits(hidden)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(actual[0], expected, rtol=1e-5, atol=1e-5)
    heads = torch.cat([caches[rank] for rank in range(num_ranks)], dim=4)
    torch.testing.assert_close(heads, expected_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "num_ranks", "reason"),
    [
        (SHAPE, 3, "8 attention heads"),
        (replace(SHAPE, num_kv_heads=2), 4, "2 KV heads"),
        (replace(SHAPE, ffn_dim=46), 4, "46 feed-forward features"),
    ],
)
def test_split_config_with_unequal_shares_raises(config, num_ranks, reason):
    with pytest.raises(ArgumentError, match=f"tensor_parallel={num_ranks}: the model's {reason}"):
        split_config(config, num_ranks)


def test_engine_with_invalid_parallel_options_starts_no_process():
    with pytest.raises(ArgumentError, match="4 KV heads cannot be split into 3 equal shards"):
        Engine(MODEL, config=EngineConfig(BLOCK, CacheConfig(8), tensor_parallel=3))
    with pytest.raises(ArgumentError, match="4 ranks cannot divide 2 shards"):
        Engine(MODEL, config=EngineConfig(BLOCK, CacheConfig(8), tensor_parallel=4, kv_shards=2))
    config = EngineConfig(BLOCK, CacheConfig(8, host=HostConfig(8), stores=(StoreConfig("disk"),)), tensor_parallel=2)
    with pytest.raises(ArgumentError, match="give the URL of the store instead"):
        Engine(MODEL, config=config, stores={"disk": MemoryStore(1 << 20)})
    with pytest.raises(RangeError, match="tensor_parallel must be at least 1"):
        EngineConfig(tensor_parallel=0)
    assert not children()


# ---- loads that fail on another rank -------------------------------------------------------------------------------


class Scripted:
    """A controller of two simulated ranks. `poll` returns and removes the reports that the test adds to `reports`."""

    overlaps_compute = False

    def __init__(self) -> None:
        self.workers = [Worker(rank, ()) for rank in range(2)]
        self.reports = []

    def submit(self, plan: Plan) -> None:
        for worker in self.workers:
            worker.submit(plan)

    def poll(self, **_):
        taken, self.reports = self.reports, []
        return taken

    def layer_waits(self, _) -> LayerWaits:
        return LayerWaits([], CPU)


def test_have_succeeded_is_false_after_load_failed_on_one_rank():
    namespace, controller = Namespace("model", block_tokens=BLOCK), Scripted()
    manager = CacheManager(namespace, CacheConfig(4, host=HostConfig(8), always_load=True), num_ranks=2)
    scheduler = Scheduler(manager, SchedulerConfig())
    tiers = CacheRuntime(manager, [DeviceCacheGroup(MODEL, 4, BLOCK)], controller, {}, scheduler, lambda: 0.0)
    chain = Chain(namespace, [7] * (2 * BLOCK) + [1])

    def settle(lose=None, ranks=(0, 1)) -> None:
        tiers.submit(manager.plan())
        for rank in ranks:
            while controller.workers[rank].todo:
                controller.reports.append(controller.workers[rank].work(lose))
        tiers.poll()

    hold = manager.match(chain)
    assert manager.allocate(hold, 2 * BLOCK) is None
    for worker in controller.workers:
        worker.device.update({int(slot): "kv" for slot in hold.table})
    manager.on_scheduled(hold)
    manager.publish(hold, 2 * BLOCK)
    manager.finish(hold)
    settle()
    CacheAdmin(manager).demote(chain)
    hold = manager.match(chain)
    assert manager.allocate(hold, 2 * BLOCK) is None
    loads = manager.overlap(hold)
    assert loads
    # Rank 1 reports first, and its load has failed.
    settle(lose=lambda transfer, _: [True] * transfer.num_blocks, ranks=(1,))
    transfers = tiers.begin_step(manager.plan(), loads)
    assert not transfers.have_succeeded()
    settle(ranks=(0,))
    assert not transfers.have_succeeded()
    # Both ranks have reported, so the load is no longer in flight. `begin_step` removes the load from `tiers.failed`.
    assert tiers.begin_step(manager.plan(), loads).have_succeeded()
    manager.abort(hold)
    manager.check()


# ---- processes -----------------------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    """Return the rank processes that this process has started."""
    return [child for child in psutil.Process().children() if "rank_process" in " ".join(child.cmdline())]


def engine_of(
    num_ranks: int, folder: Path | None = None, *, num_blocks: int = 24, draft=False, model=MODEL, **options
) -> Engine:
    """Return an engine with a host tier and, if `folder` is given, a disk tier. Cached blocks are always loaded."""
    saving = WritebackConfig(WritePolicy.THROUGH)
    stores = (StoreConfig("disk", saving, WaitPolicy.WAIT),) if folder is not None else ()
    cache = CacheConfig(num_blocks, host=HostConfig(40, saving=saving), stores=stores, always_load=True)
    config = EngineConfig(
        BLOCK, cache, SchedulerConfig(8, 64), tensor_parallel=num_ranks, **{"kv_shards": 4, **options}
    )
    urls = {"disk": f"disk:{folder}?bytes=64MiB&segment=1MiB&free=0"} if folder is not None else {}
    return Engine(model, config=config, stores=urls, proposer=DraftProposer(DRAFT_MODEL, 2) if draft else None)


def answers_of(engine: Engine, requests: list[list[int]]) -> list[Answer]:
    names = [engine.add(prompt, greedy(10, logprobs=2)) for prompt in requests]
    answers = finish(engine)
    return [answers[name] for name in names]


def assert_equal(actual: list[Answer], expected: list[Answer]) -> None:
    assert [answer.tokens for answer in actual] == [answer.tokens for answer in expected]
    for one, other in zip(actual, expected, strict=True):
        logprobs_of_both = [[each.chosen for each in answer.logprobs] for answer in (one, other)]
        np.testing.assert_allclose(*logprobs_of_both, atol=1e-4)


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    return prompts(3, 21, 30, 9, 26, shared=[0, 12, 0, 20])


@pytest.fixture(scope="module")
def expected(requests) -> list[Answer]:
    """Return the answers of an engine with one rank and without prefix caching."""
    engine = Engine(MODEL, config=EngineConfig(BLOCK, CacheConfig(64, prefix_caching=False)))
    answers = answers_of(engine, requests)
    engine.close()
    return answers


def test_two_ranks_with_all_tiers_answer_like_one_rank(requests, expected, tmp_path):
    engine = engine_of(2, tmp_path, draft=True)
    try:
        (child,) = children()
        assert_equal(answers_of(engine, requests), expected)
        assert_equal(answers_of(engine, requests[::-1]), expected[::-1])  # some blocks are only on the host
        host = engine.manager.stats.tiers[1]
        assert host.hit_tokens > 0
        states = {state.name: state for state in engine.tiers.states()}
        # sizes are sums over all ranks, so they equal those of an engine with one rank
        block_bytes = sum(model.new_cache(1, BLOCK).nbytes for model in (MODEL, DRAFT_MODEL))
        assert states["device"].block_bytes == block_bytes
        assert all(each.num_bytes % block_bytes == 0 for each in engine.tiers.traffic())
        assert states["disk"].used_bytes > 0
        tiers = engine.tiers
        tiers.sleep()
        tiers.wake()
        assert_equal(answers_of(engine, requests[:2]), expected[:2])
        assert tiers.demote(engine.chain(requests[1])) > 0
        tiers.resize("device", 40)
        tiers.resize("host", 60)
        again = answers_of(engine, requests)
        assert_equal(again, expected)
        assert min(answer.num_cached for answer in again) > 0
        tiers.reset()
        fetched = answers_of(engine, requests)  # all cached blocks are read from the disk
        assert_equal(fetched, expected)
        assert sum(answer.num_cached for answer in fetched) > 40
        assert engine.explain("request-0").state == "length"
        tiers.drop(engine.chain(requests[0]))
        tiers.reset(clear_stores=True)
        assert [state.num_used for state in tiers.states()] == [0, 0, 0]
        assert_equal(answers_of(engine, requests), expected)
        assert "kvtier_store_used_bytes" in {metric.name for metric in tiers.metrics.collect()}
    finally:
        engine.close()
    assert not child.is_running()
    engine.close()  # a second close has no effect


def test_two_ranks_with_two_phases_answer_like_one_rank(requests, expected, tmp_path):
    engine = engine_of(2, tmp_path, phases=2)
    try:
        for _ in range(3):
            assert_equal(answers_of(engine, requests), expected)
        assert_equal(answers_of(engine, requests[::-1]), expected[::-1])
        engine.tiers.sleep()
        engine.tiers.wake()
        assert_equal(answers_of(engine, requests), expected)
        name = engine.add(requests[0], greedy(50))
        for _ in range(8):
            engine.step()
        assert engine.scheduler._steps
        assert all(stats.num_objects >= 0 for stats in engine._ranks.stats("disk"))  # works while a step is in flight
        assert engine.abort(name)
        assert_equal(answers_of(engine, requests), expected)
    finally:
        engine.close()


def test_stored_blocks_are_readable_with_any_number_of_ranks(requests, expected, tmp_path):
    num_cached = []
    for num_ranks in (1, 2, 4, 1):
        # The engine with 4 ranks has no draft model, so it has another namespace. It uses the same folders, but shares
        # no blocks with the other engines.
        engine = engine_of(num_ranks, tmp_path, draft=num_ranks != 4)
        try:
            actual = answers_of(engine, requests)
            assert_equal(actual, expected)
            num_cached.append(sum(answer.num_cached for answer in actual))
            engine.tiers.save_all()
            if num_ranks == 2:  # so that later engines can read only blocks that two ranks stored
                engine.tiers.reset(clear_stores=True)
                assert_equal(answers_of(engine, requests), expected)
                engine.tiers.save_all()
        finally:
            engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"shard-{i}-of-4" for i in range(4)]
    assert num_cached[1] > num_cached[0]
    assert num_cached[1] == num_cached[3]
    assert not children()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_of_model_with_other_biases_share_no_block(requests, tmp_path, num_ranks):
    """The same model finds the blocks that two ranks stored. A model with other biases must not find them."""
    config, cached = replace(SHAPE, architecture="qwen2"), []
    same, other = model_of(config), model_of(config)
    for layer in other.weights.layers:
        layer.qkv.bias.add_(1.0)
    for count, model in [(2, same), (num_ranks, same), (num_ranks, other)]:
        alone = Engine(model, config=EngineConfig(BLOCK, CacheConfig(64, prefix_caching=False)))
        engine = engine_of(count, tmp_path, model=model)
        try:
            actual = answers_of(engine, requests[:1])
            assert_equal(actual, answers_of(alone, requests[:1]))
            cached.append(actual[0].num_cached)
            engine.tiers.save_all()
        finally:
            engine.close()
            alone.close()
    assert cached == [0, 20, 0]


def test_block_unreadable_on_one_rank_is_a_miss_on_all_ranks(requests, expected, tmp_path):
    engine = engine_of(1, tmp_path, kv_shards=2)
    answers_of(engine, requests)
    engine.tiers.save_all()
    engine.close()
    # damage one byte in every 512 bytes of the file that rank 1 reads
    (segment,) = (tmp_path / "shard-1-of-2").glob("*.kv")
    with segment.open("r+b") as data:
        for at in range(0, segment.stat().st_size, 512):
            data.seek(at)
            data.write(b"\xff")
    engine = engine_of(2, tmp_path, kv_shards=2)
    try:
        assert_equal(answers_of(engine, requests), expected)
        assert engine.manager.stats.tiers[2].hit_tokens == 0
    finally:
        engine.close()


# ---- failures of ranks ---------------------------------------------------------------------------------------------


def test_ranks_sending_more_than_a_pipe_holds_do_not_deadlock(tmp_path):
    """Regression: rank 0 sent plans with many keys and rank 1 sent lookups, but neither rank read its pipe."""
    engine = engine_of(2, tmp_path)
    controller = engine.tiers._controller
    keys, num_plans, num_lookups = b"".join(number.to_bytes(32, "little") for number in range(20_000)), 40, 0
    for number in range(num_plans):
        controller.submit(Plan(1000 + number, 0, probes=(Probe(5000 + number, "disk", keys),)))
    while num_lookups < num_plans * 2:  # both ranks answer each probe
        controller.wait(1.0)
        for report in controller.poll():
            num_lookups += sum(lookup.probe_id >= 5000 for lookup in report.lookups)
    engine.close()


def listeners() -> set[tuple[str, int]]:
    """Return the addresses on which this process and its ranks listen."""
    processes = [psutil.Process(), *children()]
    connections = [each for process in processes for each in process.net_connections(kind="inet")]
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def test_rendezvous_opens_no_port(tmp_path):
    before = listeners()
    first, second = (rendezvous(str(tmp_path / "store"), 2) for _ in range(2))
    assert listeners() == before
    first.set("name", "value")
    assert second.get("name") == b"value"


def test_ranks_listen_on_loopback_only_and_ignore_strangers(requests, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = listeners()
    engine = engine_of(2)
    new = listeners() - before
    assert {address for address, _ in new} <= {"127.0.0.1", "::1"}
    [folder] = tmp_path.glob("kvtier-ranks-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for address in new:
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"\0" * 64)
    assert_equal(answers_of(engine, requests), expected)
    engine.close()
    assert not list(tmp_path.glob("kvtier-ranks-*"))


def test_engine_raises_in_every_step_after_a_rank_was_killed(requests):
    engine = engine_of(2)
    (child,) = children()
    for prompt in requests:
        engine.add(prompt, greedy(50))
    engine.step()
    child.kill()
    with pytest.raises(EngineError, match=r"rank 1 ended with exit code -9; .*Close this engine and start a new one"):
        finish(engine)
    engine.add(requests[0], greedy(5))
    with pytest.raises(EngineError, match="cannot continue"):
        finish(engine)
    engine.close()
    assert not children()


def test_engine_raises_if_a_rank_hangs_longer_than_timeout(requests):
    engine = engine_of(2, rank_timeout_seconds=3.0)
    (child,) = children()
    engine.add(requests[0], greedy(50))
    engine.step()
    stop_process(child.pid)
    with pytest.raises(EngineError, match="an engine needs all of its ranks"):
        finish(engine)
    engine.close()  # kills the rank, which does not respond
    assert not children()


def test_failure_of_rank_0_in_a_step_ends_all_ranks(requests, monkeypatch):
    engine = engine_of(2)

    def broken(*_):
        raise RuntimeError("out of memory")

    engine.add(requests[0], greedy(50))
    monkeypatch.setattr(engine.model, "logits", broken)
    with pytest.raises(EngineError, match="rank 0 failed in a step: RuntimeError: out of memory"):
        engine.step()
    engine.close()
    assert not children()


def test_interrupt_in_a_step_raises_keyboard_interrupt(requests, monkeypatch):
    engine = engine_of(2)

    def interrupted(*_):
        raise KeyboardInterrupt

    engine.add(requests[0], greedy(50))
    monkeypatch.setattr(engine.model, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.add(requests[1], greedy(5))
    with pytest.raises(EngineError, match="rank 0 was stopped in a step by KeyboardInterrupt"):
        finish(engine)
    engine.close()
    assert not children()


def test_rank_start_error_states_reason_and_leaves_no_process(tmp_path):
    (tmp_path / "shard-3-of-4").write_text("not a folder")
    with pytest.raises(EngineError, match=r"rank 1 failed: .*shard-3-of-4"):
        engine_of(2, tmp_path)
    assert not children()
    (tmp_path / "shard-3-of-4").unlink()
    engine = engine_of(1, tmp_path)  # the failed start left no folder locked
    engine.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_init_failure_leaves_no_process_or_thread(num_ranks):
    threads, processes = {*threading.enumerate()}, {*psutil.Process().children()}
    cache = CacheConfig(16, policy="nope", host=HostConfig(16))
    with pytest.raises(ArgumentError, match="unknown eviction policy 'nope'"):
        Engine(MODEL, config=EngineConfig(BLOCK, cache, tensor_parallel=num_ranks))
    assert {*threading.enumerate()} <= threads
    assert {*psutil.Process().children()} <= processes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_close_without_prefix_caching_closes_open_stores(tmp_path, num_ranks):
    """An engine without prefix caching does not open stores from URLs. `close` closes stores passed as objects."""
    store = DiskStore(tmp_path / "open", 1 << 20, segment_bytes=1 << 18, min_free_bytes=0)
    cache = CacheConfig(8, prefix_caching=False, host=HostConfig(8), stores=(StoreConfig("a"), StoreConfig("b")))
    stores = {"a": store, "b": f"disk:{tmp_path}/unopened?bytes=1MiB&free=0"}
    engine = Engine(MODEL, config=EngineConfig(BLOCK, cache, tensor_parallel=num_ranks), stores=stores)
    assert not store.contains([bytes(32)])[0].ok  # the store is still open (otherwise `contains` raises)
    for _ in range(2):
        engine.close()
        with pytest.raises(ClosedError):
            store.contains([bytes(32)])
    assert not (tmp_path / "unopened").exists()
