"""Test vLLM in several processes: engines that share a Redis server, and the ranks of one engine."""

from __future__ import annotations

import json

import pytest

import vllm_scenarios as scenarios
from vllm_support import VllmError, connector, prompt_of, reusable_tokens

FAULTY = {"module": "vllm_connectors", "name": "FaultyConnector"}
PROMPTS = [prompt_of(number) for number in range(800, 804)]


def redis_of(port, prefix):
    return connector(stores=[{"url": f"redis://127.0.0.1:{port}/0?prefix={prefix}", "wait": "wait"}])


def test_engine_finds_blocks_of_another_engine(vllm, oracle, redis_port):
    settings = redis_of(redis_port, "shared:")
    with vllm.start(settings) as one, vllm.start(settings, executor="mp") as other:
        one.ask(PROMPTS)
        one.run(scenarios.settle_stores)
        answers = other.ask(PROMPTS)
        found = other.metrics()["vllm:prompt_tokens_cached_by_source source=external_unspecified"]
        one.send(scenarios.conversations, [prompt_of(810 + number, 300) for number in range(50)], 1, max_tokens=20)
        one.wait(0.5)
        one.kill()
        with pytest.raises(VllmError):
            one.receive()
        later = other.ask([*PROMPTS, *(prompt_of(810 + number, 300) for number in range(8))])
    assert [answer.tokens for answer in answers] == oracle.tokens(PROMPTS)
    assert [answer.num_cached for answer in answers] == [reusable_tokens(300)] * 4
    assert found == 4 * reusable_tokens(300)
    asked = [*PROMPTS, *(prompt_of(810 + number, 300) for number in range(8))]
    assert [answer.tokens for answer in later] == oracle.tokens(asked)


@pytest.fixture(scope="module")
def two_ranks(vllm):
    """Return the tokens that vLLM with two ranks and without a connector generates."""
    with vllm.start(None, executor="mp", tensor_parallel_size=2) as engine:
        return engine.tokens(PROMPTS)


def test_two_ranks_with_failing_loads_change_no_token(vllm, two_ranks):
    """Every second load fails on rank 1. A failed load counts as a miss on both ranks."""
    faults = json.dumps({"fail_loads": 2, "rank": 1})
    settings = connector(**FAULTY, verify_loads=True)
    with vllm.start(settings, executor="mp", tensor_parallel_size=2, KVTIER_FAULTS=faults) as engine:
        cold, warm = engine.ask(PROMPTS), engine.ask(PROMPTS)
        assert engine.reset()
        again = engine.ask(PROMPTS)
        assert engine.run(scenarios.metric_after, "vllm:kvtier_failed_blocks purpose=load") > 0
    assert [answer.tokens for answer in cold + warm + again] == two_ranks * 3
    assert sum(answer.num_cached for answer in warm) > 0


def test_smallest_host_memory_of_a_rank_limits_host_tier(vllm, two_ranks):
    faults = json.dumps({"ready_slots": 12, "rank": 1})
    settings = connector(**FAULTY, verify_loads=True)
    with vllm.start(settings, executor="mp", tensor_parallel_size=2, KVTIER_FAULTS=faults) as engine:
        cold, warm = engine.ask(PROMPTS), engine.ask(PROMPTS)
        assert engine.reset()
        (again,) = engine.ask(PROMPTS[-1:])
        assert engine.run(scenarios.metric_after, "vllm:kvtier_blocks tier=host", 12) == 12
    assert [answer.tokens for answer in [*cold, *warm, again]] == [*two_ranks * 2, two_ranks[-1]]
    assert again.num_cached == reusable_tokens(300)


def test_two_ranks_read_blocks_that_one_rank_stored(vllm, two_ranks, tmp_path):
    settings = connector(stores=[{"url": f"disk:{tmp_path}?bytes=64MiB", "wait": "wait"}], kv_shards=2)
    with vllm.start(settings) as engine:
        engine.ask(PROMPTS)
        engine.run(scenarios.settle_stores)
    with vllm.start(settings, executor="mp", tensor_parallel_size=2) as engine:
        answers = engine.ask(PROMPTS)
    assert [answer.num_cached for answer in answers] == [reusable_tokens(300)] * 4
    assert [answer.tokens for answer in answers] == two_ranks
