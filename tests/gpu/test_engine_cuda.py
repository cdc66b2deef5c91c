"""The engine on CUDA generates the same tokens as on the CPU, with and without graphs, and with a small cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.random_weights import random_weights

from kvtier.cache.config import CacheConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.sampling import RequestSampler, SamplingParams, sample
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


def generate_all(device: str, num_blocks: int, *, graph_sizes=(), proposer=None) -> list[tuple[int, ...]]:
    """Return the greedy outputs of all prompts. New prompts are added while earlier prompts run."""
    config = EngineConfig(
        8, CacheConfig(num_blocks), SchedulerConfig(max_rows=8, max_step_tokens=32), graph_sizes=graph_sizes
    )
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


@pytest.mark.parametrize("graph_sizes", [(), (1, 4)])
@pytest.mark.parametrize("num_blocks", [200, 12])
def test_engine_on_cuda_matches_cpu(expected_outputs, num_blocks, graph_sizes):
    assert generate_all("cuda", num_blocks, graph_sizes=graph_sizes) == expected_outputs


def test_engine_on_cuda_with_proposer_matches_cpu(expected_outputs):
    assert generate_all("cuda", 200, proposer=NgramProposer(3), graph_sizes=(8,)) == expected_outputs
    assert generate_all("cuda", 60, proposer=DraftProposer(model("cuda"), 3)) == expected_outputs


def test_pinned_copier_does_not_overwrite_unread_memory():
    """Send more data on a busy stream than the copier can buffer.

    The copier must not overwrite data that the GPU has not read yet.
    """
    from kvtier.engine.pinned_copier import PinnedCopier

    copies, device, random_ = PinnedCopier(), torch.device("cuda"), np.random.default_rng(0)
    expected, sent = [], []
    for number in range(50):
        if number % 7 == 0:
            torch.cuda._sleep(20_000_000)  # about 10 ms
        data = random_.integers(0, 256, 8 * int(random_.integers(0, 40_000)), dtype=np.uint8)
        expected.append(data.copy())
        sent.append(copies.to_device(data, device))
        data[:] = 0  # the caller may change the data after the call
    for data, copied in zip(expected, sent, strict=True):
        assert np.array_equal(copied.cpu().numpy(), data)
    for count in (1, 64, 5000, 3):
        numbers = torch.randint(0, 1 << 40, (count,), device=device)
        assert copies.to_list(numbers) == numbers.tolist()


def test_sample_with_pinned_copier_matches_plain_copies():
    from kvtier.engine.pinned_copier import PinnedCopier

    copies, logits = PinnedCopier(), torch.randn(12, 1000, device="cuda")
    opts = [{}, {"temperature": 0.3}, {"top_p": 0.4}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.9}, {"temperature": 0.0}]
    params = [SamplingParams(**{"temperature": 1.0, **option}, seed=i) for i, option in enumerate(opts * 2)]
    plain, sent = ([RequestSampler(param) for param in params] for _ in range(2))
    for _ in range(5):
        expected = [row.token_id for row in sample(logits.clone(), plain)]
        samples = sample(logits.clone(), sent, copies.to_device)
        assert [row.token_id for row in samples] == expected
