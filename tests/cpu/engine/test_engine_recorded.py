"""The replay of a recorded engine run has as many hits in each tier (device, host, disk) as the run itself."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from benchmarks.follow import follow, read_log
from benchmarks.random_weights import random_weights
from benchmarks.step_recorder import StepRecorder

from engine_helpers import greedy
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.replay import read_trace
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore

TINY = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("always_load", [False, True])
def test_replay_of_recorded_run_has_the_same_hits_by_tier(tmp_path, always_load, phases):
    model = Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=3))
    cache = CacheConfig(26, host=HostConfig(30), stores=(StoreConfig("disk"),), partial_scan=0, always_load=always_load)
    store = DiskStore(tmp_path / "disk", 64 << 20, segment_bytes=1 << 20, min_free_bytes=0)
    config = EngineConfig(4, cache, SchedulerConfig(max_rows=4, max_step_tokens=16), phases=phases)
    engine = Engine(model, config=config, stores={"disk": store})
    chosen = random.Random(1)
    with contextlib.closing(StepRecorder(tmp_path / "log.jsonl")) as recorder:
        recorder.attach(engine.scheduler, now=engine._clock())
        prompts: list[list[int]] = [[chosen.randrange(61) for _ in range(9)] for _ in range(8)]
        for _ in range(4):
            prompts = [prompt + [chosen.randrange(61) for _ in range(3)] for prompt in prompts]
            names = {engine.add(prompt, greedy(5)): i for i, prompt in enumerate(prompts)}
            answers: dict[int, list[int]] = {}
            while engine.has_work():
                for output in engine.step():
                    assert not output.error
                    answers.setdefault(names[output.request_id], []).extend(output.token_ids)
            prompts = [prompt + answers[i] for i, prompt in enumerate(prompts)]
        expected = {f"{name}#0": engine.explain(name) for name in [f"request-{i}" for i in range(32)]}
    scheduler = engine.scheduler.config
    engine.close()
    log = read_log(tmp_path / "log.jsonl")
    replayed = follow(log, cache, scheduler)
    assert replayed.tokens_from == {name: each.tokens_from for name, each in log.requests.items()}
    assert {name: sum(tiers.values()) for name, tiers in replayed.tokens_from.items()} == {
        name: each.num_cached_tokens for name, each in expected.items()
    }
    tiers = {tier for each in replayed.tokens_from.values() for tier, count in each.items() if count}
    assert "host" in tiers  # not "disk": the measured speeds decide whether blocks are read from the disk
    assert any(route == "store" for route, _, _ in replayed.outcomes)  # blocks were written to the disk
    assert len(read_trace(tmp_path / "log.jsonl").requests) == 32
