"""The cache never changes an answer, bit for bit: with a host tier, tiny pools, every write policy, failing copies."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import greedy
from kvtier.cache.controller import CacheController
from kvtier.cache.host import HostConfig, WritePolicy
from kvtier.cache.manager import CacheConfig
from kvtier.cache.plan import Plan, Purpose, Transfer, slot_bytes
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.random_weights import random_weights
from kvtier.engine.speculate import DraftProposer
from kvtier.errors import ArgumentError
from kvtier.scheduler import SchedulerConfig

TINY = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
SOAK = int(os.environ.get("KVTIER_SOAK", "1"))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=3), InvariantOps())


def make(model: Model, num_blocks: int, host: HostConfig | None, *, caching: bool = True, **options) -> Engine:
    cache = CacheConfig(num_blocks, prefix_caching=caching, host=host)
    return Engine(model, config=EngineConfig(4, cache, SchedulerConfig(max_rows=4, max_step_tokens=16)), **options)


def conversations(random, count: int) -> list[list[list[int]]]:
    """Turns of conversations over two system prompts; a turn is the prompt without the answers so far."""
    systems = [[random.randrange(61) for _ in range(9)] for _ in range(2)]
    return [[systems[i % 2] + [random.randrange(61) for _ in range(3)] for _ in range(3)] for i in range(count)]


def talk(engine: Engine, talks: list[list[list[int]]]) -> list[list[tuple[int, ...]]]:
    """Play all conversations at once, turn by turn; each turn begins with what was said before."""
    said = [[] for _ in talks]
    answers: list[list[tuple[int, ...]]] = [[] for _ in talks]
    for turn in range(len(talks[0])):
        found: dict[str, list[int]] = {}
        for i, messages in enumerate(talks):
            said[i] = said[i] + messages[turn]
            engine.add(said[i], greedy(5), request_id=str(i))
        while engine.has_work():
            for output in engine.step():
                assert not output.error
                found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.scheduler.check()
        for i in range(len(talks)):
            answers[i].append(tuple(found[str(i)]))
            said[i] = said[i] + found[str(i)]
    return answers


@given(
    random=st.randoms(use_true_random=False),
    num_blocks=st.sampled_from([16, 20, 40]),
    host=st.builds(
        HostConfig,
        st.sampled_from([3, 12, 100]),
        st.sampled_from(WritePolicy),
        max_saving_blocks=st.sampled_from([2, 100]),
        low_share=st.sampled_from([0.3, 1.0]),
    ),
)
@settings(max_examples=6 * SOAK, deadline=None)
def test_a_host_tier_never_changes_an_answer(model, random, num_blocks, host):
    talks = conversations(random, 5)
    wanted = talk(make(model, 400, None, caching=False), talks)
    assert talk(make(model, num_blocks, host), talks) == wanted


def test_answers_stay_when_copies_fail(model, monkeypatch):
    import random

    talks = conversations(random.Random(1), 6)
    wanted = talk(make(model, 400, None, caching=False), talks)
    engine = make(model, 16, HostConfig(60))
    faults = random.Random(2)
    copy = CacheController._copy

    def sometimes(self, transfer):
        if faults.random() < 0.3:
            raise RuntimeError("the link is down")
        return copy(self, transfer)

    monkeypatch.setattr(CacheController, "_copy", sometimes)
    assert talk(engine, talks) == wanted
    failed = engine.manager.moves.counts.num_failed
    assert failed[Purpose.SAVE] > 0


def test_host_hits_happen_and_are_counted(model):
    engine = make(model, 16, HostConfig(200))
    prompts = [[i] * 21 for i in range(6)]
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(2), request_id=str(i))
            while engine.has_work():
                engine.step()
    assert engine.manager.moves.counts.num_blocks[Purpose.LOAD] >= 20
    assert all(engine.explain(str(i)).num_cached_tokens >= 20 for i in range(6))


def test_the_draft_models_blocks_travel_with_the_main_ones(model):
    """The model drafts for itself: with its KV right, also after a load, every guess is kept."""
    import random

    talks = conversations(random.Random(5), 4)
    wanted = talk(make(model, 400, None, caching=False), talks)
    engine = make(model, 24, HostConfig(100), proposer=DraftProposer(model, 3))
    assert talk(engine, talks) == wanted
    assert engine.manager.moves.counts.num_blocks[Purpose.LOAD] > 0


def test_a_transfer_out_of_range_is_reported_as_failed():
    controller = CacheController([torch.zeros(4, 2, 3)], 2)
    slots = {
        name: slot_bytes(torch.tensor(ids, dtype=torch.int32).numpy()) for name, ids in (("good", [1]), ("bad", [9]))
    }
    plan = Plan(
        1,
        0,
        (
            Transfer(1, Purpose.SAVE, "device", "host", slots["good"], slots["bad"]),
            Transfer(2, Purpose.SAVE, "device", "host", slots["good"], slots["good"]),
        ),
    )
    controller.submit(plan)
    (report,) = controller.poll()
    assert [outcome.ok for outcome in report.outcomes] == [False, True]
    assert "slots 9 .. 9 of host, which has 2" in report.outcomes[0].reason
    assert report.outcomes[1].num_bytes == 24
    assert controller.poll() == []
    with pytest.raises(ArgumentError, match="host blocks"):
        CacheController([torch.zeros(4)], 0)
