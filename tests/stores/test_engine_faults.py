"""Faults of a shared store never change the outputs of an engine."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import conversations, greedy, talk
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import Breaker, Label, ObjectStatus, Store, Write
from kvtier.storage.record import RECORD_BYTES
from storage_support import OTHER_NAMESPACE, Clock, all_objects
from store_proxy import Faults

TINY = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
DEADLINE_S = 1.0


def make_model(seed: int) -> Model:
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=seed), InvariantOps())


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(3)


@pytest.fixture(scope="module")
def chats():
    return conversations(random.Random(1), 5)


@pytest.fixture(scope="module")
def expected(model, chats):
    return talk(make_engine(model), chats)


def make_engine(model: Model, store: Store | None = None, *, num_blocks: int = 400, num_host: int = 400) -> Engine:
    """Return an engine with a shared store. If `store` is None, return an engine without caching."""
    scheduler = SchedulerConfig(max_rows=4, max_step_tokens=16)
    if store is None:
        return Engine(model, config=EngineConfig(4, CacheConfig(num_blocks, prefix_caching=False), scheduler))
    shared = StoreConfig("shared", is_shared=True, wait_seconds=60)  # longer than the deadline of the store
    cache = CacheConfig(num_blocks, host=HostConfig(num_host), stores=(shared,), always_load=True)
    return Engine(model, config=EngineConfig(4, cache, scheduler), stores={"shared": store})


def fill_store(model: Model, setup, chats, **options) -> None:
    """Run the conversations on another engine, which saves their blocks to the store."""
    engine = make_engine(model, setup.store(**options))
    talk(engine, chats)
    engine.tiers.save_all()
    engine.close()


def num_fetched(engine: Engine) -> int:
    return engine.manager.transfers.counts[Route.STORE_TO_HOST].num_blocks


def num_failed(engine: Engine) -> int:
    return engine.manager.transfers.counts[Route.STORE_TO_HOST].num_failed


def test_engine_fetches_blocks_saved_by_another_engine(model, setup, chats, expected):
    fill_store(model, setup, chats)
    engine = make_engine(model, setup.store())
    assert talk(engine, chats) == expected
    assert num_fetched(engine) > 20
    engine.close()


class RandomFaults:
    """Called before each step. About every third call replaces the proxy's faults by random ones, or by none.

    Some of these calls close all connections, or remove all objects from the server.
    """

    def __init__(self, setup, seed: int) -> None:
        self._setup, self._rng, self._num_hangs = setup, random.Random(seed), 0

    def __call__(self) -> None:
        if self._rng.random() < 0.7:
            return
        kinds = ["refuse", "drop", "flip", "head", "cut", "slow", "hang", "wipe"]
        kind = self._rng.choice(kinds + ["none"] * len(kinds))
        at = self._rng.randrange
        if kind == "hang":
            self._num_hangs += 1
        if kind == "wipe":
            self._setup.raw.wipe()
        if kind == "drop":
            self._setup.proxy.drop()
        faults = {
            "refuse": Faults(refuses=at(1, 5)),
            "flip": Faults(flips=tuple(at(20_000 * 8) for _ in range(20))),
            "head": Faults(flips=tuple(at(400 * 8) for _ in range(3))),
            "cut": Faults(cut_at=at(5000)),
            "slow": Faults(delay_s=0.01),
            # At most two hangs, because each takes a second.
            "hang": Faults(hangs_at=at(5000)) if self._num_hangs <= 2 else Faults(),
        }
        self._setup.proxy.set(faults.get(kind, Faults()))


def test_engine_outputs_do_not_change_under_store_faults(model, setup, chats, expected):
    fetched = failed = 0
    for seed in range(3):
        fill_store(model, setup, chats)
        store = setup.store(breaker=Breaker(retry_s=0), timeout_s=DEADLINE_S)
        engine = make_engine(model, store, num_blocks=20, num_host=16)
        assert talk(engine, chats, RandomFaults(setup, seed)) == expected
        setup.proxy.set(Faults())
        fetched, failed = fetched + num_fetched(engine), failed + num_failed(engine)
        engine.close()
    assert fetched > 0
    assert failed > 0


@pytest.mark.parametrize("hangs_at", [0, 5000])  # the lookup hangs, or the fetch of seven blocks
def test_hanging_store_gets_no_calls_after_one_deadline(model, setup, chats, expected, hangs_at):
    fill_store(model, setup, chats)
    clock = Clock()
    store = setup.store(breaker=Breaker(clock=clock), timeout_s=DEADLINE_S)
    engine = make_engine(model, store)
    setup.proxy.set(Faults(hangs_at=hangs_at))
    prompt = [*chats[0][0], *expected[0][0], *chats[0][1]]
    engine.add(prompt, greedy(2), request_id="first")
    while engine.has_work():  # after the deadline of the lookup or fetch, the blocks are computed
        engine.step()
    assert engine.explain("first").num_cached_tokens < 7 * 4
    assert (num_failed(engine) > 0) == (hangs_at > 0)  # at offset 0, the lookup hangs, so no fetch starts
    traffic, refused = (setup.proxy.num_asked, setup.proxy.num_connections), store.stats.num_refused
    assert talk(engine, chats) == expected
    assert (setup.proxy.num_asked, setup.proxy.num_connections) == traffic, "the open breaker let a call through"
    assert store.stats.num_refused > refused
    setup.proxy.set(Faults())
    clock.now = 1000.0
    reconnected = make_engine(model, store)  # the first call of this engine closes the breaker
    assert talk(reconnected, chats) == expected
    assert num_fetched(reconnected) > 0
    reconnected.close()
    engine.close()


def test_engine_never_uses_objects_of_another_model(model, setup, chats, expected):
    other = make_model(4)
    store = setup.store()
    fill_store(model, setup, chats)
    ours = {each.key: each.label for each in all_objects(store)}
    fill_store(other, setup, chats)
    theirs = [each.key for each in all_objects(store) if each.key not in ours]
    assert len(ours) > 20
    assert len(theirs) > 20, "the other model stored too few objects under its own keys"
    for number, (mine, label) in enumerate(ours.items()):
        value = setup.raw.get(theirs[number % len(theirs)].hex())
        if number % 2:  # replace our object by the other model's object
            setup.raw.set(mine.hex(), value)
        else:  # store the other model's block under our key, with another namespace
            wrong = Label(OTHER_NAMESPACE, label.token_digest)
            assert store.write([Write(mine, wrong, value[RECORD_BYTES:])])[0].status is ObjectStatus.STORED
    engine = make_engine(model, setup.store())
    assert talk(engine, chats) == expected
    assert num_failed(engine) > 0
    engine.close()


def test_engine_recomputes_blocks_if_store_is_wiped_before_fetch(model, setup, chats, expected):
    fill_store(model, setup, chats)
    store = setup.store()
    engine = make_engine(model, store)
    read_into = store.read_into

    def wipe_and_read(reads, **options):
        setup.raw.wipe()
        return read_into(reads, **options)

    store.read_into = wipe_and_read
    assert talk(engine, chats) == expected
    assert num_failed(engine) > 0
    assert store.stats.reads.num_done == 0
    engine.close()
