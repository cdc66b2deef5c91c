"""Whatever happens to a shared store, an engine's answers are, token by token, those it gives without one."""

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
from store_proxy import Mood

TINY = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
DEADLINE_S = 1.0


def make_model(seed: int) -> Model:
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=seed), InvariantOps())


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(3)


@pytest.fixture(scope="module")
def talks():
    return conversations(random.Random(1), 5)


@pytest.fixture(scope="module")
def wanted(model, talks):
    return talk(make_engine(model), talks)


def make_engine(model: Model, store: Store | None = None, *, num_blocks: int = 400, num_host: int = 400) -> Engine:
    """With a shared store below; without one, an engine that keeps nothing."""
    scheduler = SchedulerConfig(max_rows=4, max_step_tokens=16)
    if store is None:
        return Engine(model, config=EngineConfig(4, CacheConfig(num_blocks, prefix_caching=False), scheduler))
    shared = StoreConfig("shared", is_shared=True, wait_seconds=60)  # the store's own deadline comes first
    cache = CacheConfig(num_blocks, host=HostConfig(num_host), stores=(shared,), always_load=True)
    return Engine(model, config=EngineConfig(4, cache, scheduler), stores={"shared": store})


def filled(model: Model, setup, talks, **options) -> None:
    """Some engine has stored these conversations."""
    engine = make_engine(model, setup.store(**options))
    talk(engine, talks)
    engine.tiers.save_all()
    engine.close()


def num_fetched(engine: Engine) -> int:
    return engine.manager.transfers.counts[Route.STORE_TO_HOST].num_blocks


def num_failed(engine: Engine) -> int:
    return engine.manager.transfers.counts[Route.STORE_TO_HOST].num_failed


def test_engine_fetches_blocks_of_other_engine(model, setup, talks, wanted):
    filled(model, setup, talks)
    engine = make_engine(model, setup.store())
    assert talk(engine, talks) == wanted
    assert num_fetched(engine) > 20
    engine.close()


class Weather:
    """Between steps the network, the server and what it holds change at random."""

    def __init__(self, setup, seed: int) -> None:
        self._setup, self._rng, self._num_hangs = setup, random.Random(seed), 0

    def __call__(self) -> None:
        if self._rng.random() < 0.7:
            return
        rough = ["refuse", "drop", "flip", "head", "cut", "slow", "hang", "wipe"]
        kind = self._rng.choice(rough + ["fair"] * len(rough))
        at = self._rng.randrange
        if kind == "hang":
            self._num_hangs += 1
        if kind == "wipe":
            self._setup.raw.wipe()
        if kind == "drop":
            self._setup.proxy.drop()
        moods = {
            "refuse": Mood(refuses=at(1, 5)),
            "flip": Mood(flips=tuple(at(20_000 * 8) for _ in range(20))),
            "head": Mood(flips=tuple(at(400 * 8) for _ in range(3))),
            "cut": Mood(cut_at=at(5000)),
            "slow": Mood(delay_s=0.01),
            "hang": Mood(hangs_at=at(5000)) if self._num_hangs <= 2 else Mood(),  # each costs its second
        }
        self._setup.proxy.set(moods.get(kind, Mood()))


def test_answers_do_not_change_under_store_faults(model, setup, talks, wanted):
    fetched = failed = 0
    for seed in range(3):
        filled(model, setup, talks)
        store = setup.store(breaker=Breaker(retry_s=0), timeout_s=DEADLINE_S)
        engine = make_engine(model, store, num_blocks=20, num_host=16)
        assert talk(engine, talks, Weather(setup, seed)) == wanted
        setup.proxy.set(Mood())
        fetched, failed = fetched + num_fetched(engine), failed + num_failed(engine)
        engine.close()
    assert fetched > 0
    assert failed > 0


@pytest.mark.parametrize("hangs_at", [0, 5000])  # at the first answer, and in the middle of the seven blocks
def test_hanging_store_costs_engine_one_deadline(model, setup, talks, wanted, hangs_at):
    filled(model, setup, talks)
    clock = Clock()
    store = setup.store(breaker=Breaker(clock=clock), timeout_s=DEADLINE_S)
    engine = make_engine(model, store)
    setup.proxy.set(Mood(hangs_at=hangs_at))
    prompt = [*talks[0][0], *wanted[0][0], *talks[0][1]]
    engine.add(prompt, greedy(2), request_id="first")
    while engine.has_work():  # its blocks do not come: it waits until the deadline, and is computed
        engine.step()
    assert engine.explain("first").num_cached_tokens < 7 * 4
    assert (num_failed(engine) > 0) == (hangs_at > 0)
    asked, refused = (setup.proxy.num_asked, setup.proxy.num_connections), store.stats.num_refused
    assert talk(engine, talks) == wanted
    assert (setup.proxy.num_asked, setup.proxy.num_connections) == asked, "a call reached the store"
    assert store.stats.num_refused > refused
    setup.proxy.set(Mood())
    clock.now = 1000.0
    again = make_engine(model, store)  # the same store, which may be asked again
    assert talk(again, talks) == wanted
    assert num_fetched(again) > 0
    again.close()
    engine.close()


def test_engine_never_uses_objects_of_other_model(model, setup, talks, wanted):
    other = make_model(4)
    store = setup.store()
    filled(model, setup, talks)
    ours = {each.key: each.label for each in all_objects(store)}
    filled(other, setup, talks)
    theirs = [each.key for each in all_objects(store) if each.key not in ours]
    assert len(ours) > 20
    assert len(theirs) > 20, "another model's blocks have keys of their own"
    for number, (mine, label) in enumerate(ours.items()):
        value = setup.raw.get(theirs[number % len(theirs)].hex())
        if number % 2:  # their object under our name
            setup.raw.set(mine.hex(), value)
        else:  # their block, with a record as ours but for the model
            wrong = Label(OTHER_NAMESPACE, label.token_digest)
            assert store.write([Write(mine, wrong, value[RECORD_BYTES:])])[0].status is ObjectStatus.STORED
    engine = make_engine(model, setup.store())
    assert talk(engine, talks) == wanted
    assert num_failed(engine) > 0
    engine.close()


def test_store_wiped_before_fetch_is_a_miss(model, setup, talks, wanted):
    filled(model, setup, talks)
    store = setup.store()
    engine = make_engine(model, store)
    read_into = store.read_into

    def wiped(reads, **options):
        setup.raw.wipe()
        return read_into(reads, **options)

    store.read_into = wiped
    assert talk(engine, talks) == wanted
    assert num_failed(engine) > 0
    assert store.stats.reads.num_done == 0
    engine.close()
