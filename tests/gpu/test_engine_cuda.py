"""The engine on CUDA: the same answers as on the CPU, with captured decode steps and without, in a cache too small."""

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
def test_engine_on_cuda_matches_cpu(wanted, num_blocks, graph_sizes):
    assert answers("cuda", num_blocks, graph_sizes=graph_sizes) == wanted


def test_engine_on_cuda_with_proposer_matches_cpu(wanted):
    assert answers("cuda", 200, proposer=NgramProposer(3), graph_sizes=(8,)) == wanted
    assert answers("cuda", 60, proposer=DraftProposer(model("cuda"), 3)) == wanted


def test_pinned_copier_reuses_memory_after_its_kernel():
    """Sends of all sizes behind a busy stream, more than are kept at a time: none is written over before it is read."""
    from kvtier.engine.pinned_copier import PinnedCopier

    copies, device, random_ = PinnedCopier(), torch.device("cuda"), np.random.default_rng(0)
    wanted, there = [], []
    for number in range(50):
        if number % 7 == 0:
            torch.cuda._sleep(20_000_000)  # about 10 ms
        data = random_.integers(0, 256, 8 * int(random_.integers(0, 40_000)), dtype=np.uint8)
        wanted.append(data.copy())
        there.append(copies.to_device(data, device))
        data[:] = 0  # the caller's to change
    for expected, found in zip(wanted, there, strict=True):
        assert np.array_equal(found.cpu().numpy(), expected)
    for count in (1, 64, 5000, 3):
        numbers = torch.randint(0, 1 << 40, (count,), device=device)
        assert copies.to_list(numbers) == numbers.tolist()


def test_pinned_copier_polls_callback_while_waiting():
    from kvtier.engine.pinned_copier import PinnedCopier

    for num_news in (0, 3, 1 << 60):
        heard = []

        def listen(heard=heard, num_news=num_news):
            heard.append(None)
            return len(heard) <= num_news

        numbers = torch.arange(100, device="cuda")
        torch.cuda.synchronize()
        copies = PinnedCopier(listen)
        copies.to_list(numbers)  # compiles
        heard.clear()
        torch.cuda._sleep(40_000_000)  # about 20 ms
        assert copies.to_list(numbers) == list(range(100))
        assert len(heard) == num_news + 1 if num_news < 1 << 60 else len(heard) > 3


def test_sample_with_pinned_copier_matches_plain_copies():
    from kvtier.engine.pinned_copier import PinnedCopier

    copies, logits = PinnedCopier(), torch.randn(12, 1000, device="cuda")
    some = [{}, {"temperature": 0.3}, {"top_p": 0.4}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.9}, {"temperature": 0.0}]
    params = [SamplingParams(**{"temperature": 1.0, **each}, seed=i) for i, each in enumerate(some * 2)]
    plain, sent = ([RequestSampler(each) for each in params] for _ in range(2))
    for _ in range(5):
        expected = [each.token_id for each in sample(logits.clone(), plain)]
        found = sample(logits.clone(), sent, copies.to_list, copies.to_device)
        assert [each.token_id for each in found] == expected
