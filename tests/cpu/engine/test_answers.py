"""The cache never changes an answer: 500 requests of 100 conversations get the same tokens with any set of tiers."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import greedy
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore, MemoryStore, Store
from scheduler_support import check_scheduler
from storage_support import Fault, FaultyStore

TINY = ModelConfig("llama", 2, 16, 24, 2, 1, 8, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
NUM_TALKS, NUM_TURNS, AT_ONCE = 100, 5, 20
Answers = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=7), InvariantOps())


@pytest.fixture(scope="module")
def talks() -> list[list[list[int]]]:
    """Return the user turns of all conversations. Each conversation begins with one of three system prompts."""
    words = random.Random(11)
    systems = [[words.randrange(61) for _ in range(length)] for length in (9, 17, 30)]
    return [
        [
            (systems[i % 3] if not turn else []) + [words.randrange(61) for _ in range(words.randrange(1, 12))]
            for turn in range(NUM_TURNS)
        ]
        for i in range(NUM_TALKS)
    ]


@pytest.fixture(scope="module")
def expected(model, talks) -> Answers:
    """Return the answers of an engine without a cache."""
    return play(make(model, CacheConfig(2000, prefix_caching=False)), talks)


def make(model: Model, cache: CacheConfig, store: Store | None = None) -> Engine:
    limits = SchedulerConfig(max_rows=8, max_step_tokens=48)
    return Engine(model, config=EngineConfig(4, cache, limits), stores={"disk": store} if store is not None else None)


def play(engine: Engine, talks: list[list[list[int]]]) -> Answers:
    """Run AT_ONCE conversations at a time. Send a turn when the answer to the previous turn has arrived."""
    answers: Answers = [[] for _ in talks]
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}

    def send(name: str) -> None:
        done = answers[int(name)]
        prompts[name] = prompts.get(name, []) + (list(done[-1]) if done else []) + talks[int(name)][len(done)]
        outputs[name] = []
        engine.add(prompts[name], greedy(4), request_id=name)

    for start in range(0, len(talks), AT_ONCE):
        for i in range(start, start + AT_ONCE):
            send(str(i))
        while any(len(answers[i]) < NUM_TURNS for i in range(start, start + AT_ONCE)):
            for output in engine.step():
                assert not output.error
                outputs[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None:
                    answers[int(output.request_id)].append(tuple(outputs[output.request_id]))
                    if len(answers[int(output.request_id)]) < NUM_TURNS:
                        send(output.request_id)
        check_scheduler(engine.scheduler)
    return answers


def test_device_tier_does_not_change_answers(model, talks, expected):
    engine = make(model, CacheConfig(300))
    assert play(engine, talks) == expected
    assert engine.manager.stats.hit_tokens > 5000


@pytest.mark.parametrize("write", WritePolicy)
def test_small_device_and_host_tiers_do_not_change_answers(model, talks, expected, write):
    engine = make(model, CacheConfig(90, host=HostConfig(800, saving=WritebackConfig(write)), always_load=True))
    assert play(engine, talks) == expected
    assert engine.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks > 100
    engine.close()


def test_disk_tier_and_restart_do_not_change_answers(model, talks, expected, tmp_path):
    disk = StoreConfig("disk", wait=WaitPolicy.WAIT)
    cache = CacheConfig(90, host=HostConfig(120), stores=(disk,), always_load=True)
    for _ in range(2):
        store = DiskStore(tmp_path, 64 << 20, segment_bytes=1 << 20, min_free_bytes=0)
        engine = make(model, cache, store)
        assert play(engine, talks) == expected
        assert engine.manager.transfers.counts[Route.STORE_TO_HOST].num_blocks > 100
        engine.tiers.save_all()
        engine.close()


def test_store_and_copy_failures_do_not_change_answers(model, talks, expected):
    faults = random.Random(3)

    def random_faults():
        while True:
            number = faults.random()
            bit = faults.randrange(4096)
            yield Fault("an error") if number < 0.1 else Fault(flip_bit=bit) if number < 0.2 else Fault()

    store = FaultyStore(MemoryStore(1 << 30), random_faults())
    disk = StoreConfig("disk", wait=WaitPolicy.DEADLINE)
    engine = make(model, CacheConfig(90, host=HostConfig(120), stores=(disk,)), store)
    for lane in engine.tiers._controller._transfers._lanes.values():
        mover = lane._mover

        def sometimes(*arguments, mover=mover):
            if faults.random() < 0.1:
                raise RuntimeError("the link is down")
            return mover(*arguments)

        lane._mover = sometimes
    assert play(engine, talks) == expected
    assert sum(route.num_failed for route in engine.manager.transfers.counts.values()) > 20
    engine.close()
