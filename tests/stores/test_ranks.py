"""Engines with one rank and with two ranks share blocks on a server."""

from __future__ import annotations

import pytest
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import finish, greedy, prompts
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy
from kvtier.engine import Model, ModelConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model_config import RopeConfig

SHAPE = ModelConfig("llama", 2, 32, 48, 4, 2, 8, 199, 512, norm_eps=1e-5, rope=RopeConfig(10000.0))
MODEL = Model(SHAPE, random_weights(SHAPE, torch.float32, torch.device("cpu"), seed=1))


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 2), (2, 1)])
def test_engines_with_different_rank_counts_share_blocks(redis_port, num_writers, num_readers):
    url = f"redis://127.0.0.1:{redis_port}?prefix=ranks-{num_writers}:"
    store = StoreConfig("shared", wait=WaitPolicy.WAIT, is_shared=True)
    cache = CacheConfig(64, host=HostConfig(64), stores=(store,), always_load=True)
    found = []
    for num_ranks in (num_writers, num_readers):
        config = EngineConfig(4, cache, tensor_parallel=num_ranks, kv_shards=2)
        engine = Engine(MODEL, config=config, stores={"shared": url})
        names = [engine.add(prompt, greedy(8)) for prompt in prompts(5, 30, 17)]
        answers = finish(engine)
        engine.tiers.save_all()
        found.append([(answers[name].tokens, answers[name].num_cached) for name in names])
        engine.close()
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    assert [num_cached for _, num_cached in found[0]] == [0, 0]
    assert [num_cached for _, num_cached in found[1]] == [28, 16]
