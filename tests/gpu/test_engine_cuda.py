"""The engine on CUDA: the same answers as on the CPU, with captured decode steps and without, in a cache too small."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvtier.cache.config import CacheConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.random_weights import random_weights
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.speculate import DraftProposer, NgramProposer
from kvtier.scheduler import SchedulerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TINY = ModelConfig("llama", 3, 64, 96, 4, 2, 16, 97, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
PROMPTS = [[(7 * i + j * j) % 97 for j in range(5 + 11 * i)] for i in range(6)] + [[3] * 40, [3] * 48, [3] * 48]


def model(device: str) -> Model:
    """The same numbers on any device."""
    weights = random_weights(TINY, torch.float32, torch.device("cpu"), seed=1)
    return Model(TINY, _moved(weights, torch.device(device)))


def _moved(thing, device):
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, tuple):
        return tuple(_moved(each, device) for each in thing)
    if dataclasses.is_dataclass(thing):
        fields = {each.name: getattr(thing, each.name) for each in dataclasses.fields(thing)}
        return dataclasses.replace(thing, **{name: _moved(value, device) for name, value in fields.items()})
    return thing


def answers(device: str, num_blocks: int, *, graph_sizes=(), proposer=None) -> list[tuple[int, ...]]:
    """Greedy answers to all prompts, half of them added while the others run."""
    config = EngineConfig(
        8, CacheConfig(num_blocks), SchedulerConfig(max_rows=8, max_step_tokens=32), graph_sizes=graph_sizes
    )
    engine = Engine(model(device), config=config, proposer=proposer)
    found: dict[str, list[int]] = {}
    waiting = list(enumerate(PROMPTS))
    for step in range(2000):
        if step % 3 == 0 and waiting:
            index, prompt = waiting.pop(0)
            engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), request_id=str(index))
        for output in engine.step():
            assert not output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.scheduler.check()
        if not engine.has_work() and not waiting:
            break
    engine.close()
    return [tuple(found[str(index)]) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    return answers("cpu", 200)


@pytest.mark.parametrize("graph_sizes", [(), (1, 4)])
@pytest.mark.parametrize("num_blocks", [200, 12])
def test_the_same_answers_as_on_the_cpu(wanted, num_blocks, graph_sizes):
    assert answers("cuda", num_blocks, graph_sizes=graph_sizes) == wanted


def test_the_same_answers_with_somebody_guessing_ahead(wanted):
    assert answers("cuda", 200, proposer=NgramProposer(3), graph_sizes=(8,)) == wanted
    assert answers("cuda", 60, proposer=DraftProposer(model("cuda"), 3)) == wanted
