"""A closed engine frees its tensors without a garbage collection. Out-of-memory errors name the option to lower."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvtier.cache.config import CacheConfig, HostConfig
from kvtier.engine import Model
from kvtier.engine.engine import EngineConfig
from kvtier.engine.llm import LLM
from kvtier.engine.params import SamplingParams
from kvtier.engine.speculate import NgramProposer
from kvtier.errors import OutOfMemoryError


@pytest.fixture
def no_collection():
    """Disable the garbage collector, so that tensors in a reference cycle stay allocated."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_tensors() -> set[int]:
    return {id(value) for value in gc.get_objects() if type(value) is torch.Tensor}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc.get_objects touches deprecated objects of torch
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("host_blocks", [0, 64])
@pytest.mark.parametrize("ending", ["finished", "aborted", "failed"])
def test_closed_engine_frees_its_tensors(tiny_model, drafts, host_blocks, ending):
    before = live_tensors()
    host = HostConfig(host_blocks) if host_blocks else None
    proposer = NgramProposer(drafts) if drafts else None
    llm = LLM(str(tiny_model), EngineConfig(16, CacheConfig(64, host=host)), proposer=proposer)
    llm.generate(["hello", "hello hello hello hello"], SamplingParams(max_tokens=12, n=2, seed=1))
    engine = llm.engine
    if ending != "finished":
        engine.add("hello", SamplingParams(max_tokens=100), request_id="open")
        engine.step()
    if ending == "failed":
        engine.model.weights.embedding.fill_(torch.nan)
        while engine.has_work():
            engine.step()
    owned = [
        weakref.ref(value) for value in gc.get_objects() if type(value) is torch.Tensor and id(value) not in before
    ]
    assert len(owned) > 10
    llm.close()
    del llm, engine, proposer
    assert [tuple(tensor.shape) for tensor in (ref() for ref in owned) if tensor is not None] == []


def test_engine_memory_error_states_the_option_to_lower(tiny_model, monkeypatch):
    def new_cache(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Model, "new_cache", new_cache)
    message = r"64 device blocks of 0\.0. MiB need more than .* GiB, but only .* GiB are free on cpu; lower num_blocks"
    with pytest.raises(OutOfMemoryError, match=message):
        LLM(str(tiny_model), EngineConfig(16, CacheConfig(64)))
