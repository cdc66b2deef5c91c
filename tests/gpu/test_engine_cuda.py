"""The engine on CUDA generates the same tokens as on the CPU, with and without graphs, and with a small cache."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from benchmarks.random_weights import random_weights

from kvtier.cache.config import CacheConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.speculate import DraftProposer, NgramProposer
from kvtier.scheduler import SchedulerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TINY = ModelConfig("llama", 3, 64, 96, 4, 2, 16, 97, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
PROMPTS = [[(7 * i + j * j) % 97 for j in range(5 + 11 * i)] for i in range(6)] + [[3] * 40, [3] * 48, [3] * 48]


def model(device: str) -> Model:
    """Return a model whose weights do not depend on the device."""
    weights = random_weights(TINY, torch.float32, torch.device("cpu"), seed=1)
    return Model(TINY, _to_device(weights, torch.device(device)))


def _to_device(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_to_device(item, device) for item in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _to_device(field, device) for name, field in fields.items()})
    return value


def generate_all(device: str, num_blocks: int, *, graph_sizes=(), proposer=None, phases=1) -> list[tuple[int, ...]]:
    """Return the greedy outputs of all prompts. New prompts are added while earlier prompts run."""
    limits = SchedulerConfig(max_rows=8, max_step_tokens=32)
    config = EngineConfig(8, CacheConfig(num_blocks), limits, graph_sizes=graph_sizes, phases=phases)
    engine = Engine(model(device), config=config, proposer=proposer)
    outputs: dict[str, list[int]] = {}
    waiting = list(enumerate(PROMPTS))
    for step in range(2000):
        if step % 3 == 0 and waiting:
            index, prompt = waiting.pop(0)
            engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), request_id=str(index))
        for output in engine.step():
            assert not output.error
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.scheduler.check()
        if not engine.has_work() and not waiting:
            break
    engine.close()
    return [tuple(outputs[str(index)]) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected_outputs() -> list[tuple[int, ...]]:
    return generate_all("cpu", 200)


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("graph_sizes", [(), (1, 4)])
@pytest.mark.parametrize("num_blocks", [200, 12])
def test_engine_on_cuda_matches_cpu(expected_outputs, num_blocks, graph_sizes, phases):
    assert generate_all("cuda", num_blocks, graph_sizes=graph_sizes, phases=phases) == expected_outputs


def test_engine_on_cuda_with_proposer_matches_cpu(expected_outputs):
    assert generate_all("cuda", 200, proposer=NgramProposer(3), graph_sizes=(8,)) == expected_outputs
    assert generate_all("cuda", 60, proposer=DraftProposer(model("cuda"), 3)) == expected_outputs


def test_default_keeps_two_steps_in_flight_on_a_gpu():
    with contextlib.closing(Engine(model("cuda"), config=EngineConfig(8, CacheConfig(16), graph_sizes=()))) as engine:
        assert engine.config.phases == 2
