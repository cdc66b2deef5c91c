"""Loaded blocks have the bytes that vLLM computed, whatever else runs at the same time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vllm_scenarios as scenarios
from vllm_support import connector, prompt_of, reusable_tokens

FAULTY = {"module": "vllm_connectors", "name": "FaultyConnector"}


@pytest.fixture(scope="module")
def checked(vllm):
    """Yield an engine that compares the bytes of every loaded block. Its host memory has 40 blocks."""
    settings = connector(verify_loads=True, host_bytes=40 << 16, max_saving_blocks=0)
    with vllm.start(settings, num_gpu_blocks_override=30) as engine:
        engine.run(scenarios.start_comparing_loads)
        engine.run(scenarios.check_offers)
        yield engine


requests = st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(1, 60))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=1, max_size=8), st.integers(0, 99))
def test_loaded_blocks_have_the_computed_bytes(checked, drawn, seed):
    prompts = [prompt_of(300 + family, length) + prompt_of(seed, extra) for family, length, extra in drawn]
    checked.run(scenarios.conversations, prompts, seed, max_tokens=30)
    checked.run(scenarios.check_idle)


def test_repeated_prompts_load_and_evict_blocks(checked):
    """The fixture `checked` must load and evict blocks.

    Otherwise, test_loaded_blocks_have_the_computed_bytes would compare no bytes.
    """
    prompts = [prompt_of(310 + number % 7, 350) for number in range(21)]
    checked.run(scenarios.conversations, prompts, 1, max_tokens=10)
    assert checked.run(scenarios.num_compared_blocks) > 20
    metrics = checked.metrics()
    assert metrics["vllm:kvtier_evicted_blocks tier=host"] > 0
    assert metrics["vllm:kvtier_failed_blocks purpose=load"] == 0


@pytest.mark.vllm_ci
@pytest.mark.parametrize("caching", [True, False])
def test_poisoned_free_blocks_are_never_used(vllm, oracle, caching):
    """Copies are delayed. If a save held no reference to its device block, the save would copy poison."""
    prompts = [prompt_of(320 + number % 5, 60 + 97 * number % 300) for number in range(24)]
    arguments = {"num_gpu_blocks_override": 30, "enable_prefix_caching": caching}
    with vllm.start(connector(**FAULTY, max_saving_blocks=0), **arguments) as engine:
        engine.run(scenarios.poison_free_blocks)
        engine.run(scenarios.start_comparing_loads)
        engine.run(scenarios.slow_copies, 12)
        engine.run(scenarios.conversations, prompts, 3, max_tokens=40)
        answers = engine.ask(prompts)
        assert engine.run(scenarios.num_compared_blocks) > 20
        assert engine.metrics()["vllm:num_preemptions"] > 0
        engine.run(scenarios.check_idle)
    assert [answer.tokens for answer in answers] == oracle.tokens(prompts)


@pytest.mark.vllm_ci
@pytest.mark.parametrize("caching", [True, False])
def test_save_after_end_of_request_reads_computed_bytes(vllm, oracle, caching):
    """Before the saves of a finished request run, other requests overwrite every device block that no save holds."""
    prompt, others = prompt_of(340), [prompt_of(341 + number, 200) for number in range(8)]
    arguments = {"num_gpu_blocks_override": 24, "enable_prefix_caching": caching}
    with vllm.start(connector(**FAULTY, max_saving_blocks=9), **arguments) as engine:
        engine.run(scenarios.poison_free_blocks)
        engine.run(scenarios.save_after_reuse, prompt, others)
        engine.run(scenarios.check_idle)
        assert engine.reset()
        (answer,) = engine.ask([prompt])
    assert (answer.num_cached, [answer.tokens]) == (reusable_tokens(300), oracle.tokens([prompt]))
