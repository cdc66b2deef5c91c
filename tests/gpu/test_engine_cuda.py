"""On CUDA, the engine gives the same tokens as on the CPU, and closed engines leave no device memory allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import gc

import pytest
import torch
from benchmarks.random_weights import random_weights

from kvtier.cache.config import CacheConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.params import Penalties
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.speculate import DraftProposer, NgramProposer
from kvtier.scheduler import SchedulerConfig
from phases_support import Alternating
from scheduler_support import check_scheduler

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
        check_scheduler(engine.scheduler)
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


def test_engine_on_cuda_has_two_steps_in_flight_by_default():
    with contextlib.closing(Engine(model("cuda"), config=EngineConfig(8, CacheConfig(16), graph_sizes=()))) as engine:
        assert engine.config.phases == 2


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "logprobs": 2},
    {"temperature": 0.8, "penalties": Penalties(1.3, 0.5, 0.5)},
    {"temperature": 0.0, "penalties": Penalties(1.1, 0.1, 0.1), "logprobs": 1},
    {"temperature": 0.0, "constraint": Alternating},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": (5, 6, 7), "bad_words": ((1, 2), (3,))},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": ((4, 2.0),)},
]


def sample_all(graph_sizes, phases: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of requests of all kinds, which arrive and end at different steps."""
    config = EngineConfig(8, CacheConfig(200), SchedulerConfig(max_rows=8), graph_sizes=graph_sizes, phases=phases)
    engine = Engine(model("cuda"), config=config)
    waiting = [(f"{i} {j}", PROMPTS[i], kind) for i in range(6) for j, kind in enumerate(KINDS)]
    found = {name: ([], []) for name, _, _ in waiting}
    while waiting or engine.has_work():
        if waiting:
            name, prompt, kind = waiting.pop()
            params = SamplingParams(**{"max_tokens": 9 + len(waiting) % 7, "seed": len(waiting), **kind})
            engine.add(prompt, params, request_id=name)
        for output in engine.step():
            assert not output.error
            found[output.request_id][0].extend(output.token_ids)
            found[output.request_id][1].extend(each.chosen for each in output.logprobs)
    engine.close()
    return found


@pytest.mark.parametrize("phases", [1, 2])
def test_captured_steps_sample_same_tokens_as_plain_steps(phases):
    expected, found = sample_all((), 1), sample_all((1, 2, 4, 8), phases)
    assert {name: tokens for name, (tokens, _) in found.items()} == {name: each[0] for name, each in expected.items()}
    for name, (_, logprobs) in found.items():
        assert logprobs == pytest.approx(expected[name][1], abs=1e-4)


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("is_woken", [False, True])
def test_first_step_waits_until_the_cache_is_zeroed(is_woken, phases):
    """The default stream writes the zeros. The answers must not change if this stream is busy.

    The cache is zeroed when the engine is made and, if `is_woken`, again when the engine wakes.
    """
    answers = []
    for is_busy in (False, True):
        config = EngineConfig(8, CacheConfig(200), SchedulerConfig(max_rows=8), graph_sizes=(), phases=phases)
        if is_busy and not is_woken:
            torch.cuda._sleep(1 << 30)  # the default stream is busy for about half a second
        engine = Engine(model("cuda"), config=config)
        if is_woken:
            engine.tiers.sleep()
            if is_busy:
                torch.cuda._sleep(1 << 30)
            engine.tiers.wake()
        for prompt in PROMPTS:
            engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.close()
        answers.append(tokens)
    assert answers[0] == answers[1]


def test_closed_engines_leave_no_device_memory():
    gc.collect()
    gc.disable()
    try:
        used = []
        for number in range(50):
            config = EngineConfig(8, CacheConfig(500), SchedulerConfig(max_rows=8), graph_sizes=(1, 4), phases=2)
            engine = Engine(model("cuda"), config=config)
            for prompt in PROMPTS:
                engine.add(prompt, SamplingParams(max_tokens=5, seed=number))
            for _ in range(6 + number % 5):
                engine.step()
            engine.close()
            del engine
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert used[-1] == used[0], used


def test_captured_steps_survive_closing_another_engine():
    config = EngineConfig(8, CacheConfig(200), SchedulerConfig(max_rows=8), graph_sizes=(1, 4))
    first, second = (Engine(model("cuda"), config=config) for _ in range(2))
    answers = []
    for other in (first, None):
        name = second.add(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        if other is not None:
            other.add(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=3))
            while other.has_work():
                other.step()
            other.close()
            torch.cuda.empty_cache()
            filler = torch.full((64 << 20,), torch.nan, device="cuda")  # overwrites the freed memory
            del filler
        tokens = []
        while second.has_work():
            tokens += [token for output in second.step() if output.request_id == name for token in output.token_ids]
        answers.append(tokens)
    second.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 20
