"""Abort requests and reset caches while copies are in flight. No request or block remains, and no token is wrong."""

from __future__ import annotations

import pytest

import vllm_scenarios as scenarios
from vllm_support import connector, prompt_of, reusable_tokens

FAULTY = {"module": "vllm_connectors", "name": "FaultyConnector"}


@pytest.fixture(scope="module")
def engine(vllm):
    with vllm.start(connector(**FAULTY, verify_loads=True), num_gpu_blocks_override=40) as running:
        yield running


@pytest.mark.vllm_ci
def test_abort_while_loading_releases_all_blocks(engine, oracle):
    prompt = prompt_of(200)
    engine.ask([prompt])
    assert engine.reset()
    assert engine.run(scenarios.abort_while_loading, prompt) == "WAITING_FOR_REMOTE_KVS"
    (answer,) = engine.ask([prompt])
    assert (answer.num_cached, [answer.tokens]) == (reusable_tokens(300), oracle.tokens([prompt]))


@pytest.mark.vllm_ci
def test_abort_while_saving_keeps_blocks_until_saved(engine, oracle):
    prompt = prompt_of(201)
    assert engine.run(scenarios.abort_while_saving, prompt) > 0
    assert engine.reset()
    (answer,) = engine.ask([prompt])
    assert 0 < answer.num_cached <= reusable_tokens(300)
    assert [answer.tokens] == oracle.tokens([prompt])


@pytest.mark.parametrize("has_run", [False, True])
def test_abort_after_a_reset_saves_no_empty_block(vllm, oracle, has_run):
    prompt = prompt_of(206 + has_run)
    with vllm.start(connector(**FAULTY)) as engine:
        engine.run(scenarios.poison_free_blocks)
        engine.ask([prompt])
        assert engine.reset()
        engine.run(scenarios.abort_after_reset_while_loading, prompt, has_run=has_run)
        assert engine.reset()
        (answer,) = engine.ask([prompt])
    assert (answer.num_cached, [answer.tokens]) == (0, oracle.tokens([prompt]))


def test_random_aborts_leave_no_requests_or_blocks(engine, oracle):
    prompts = [prompt_of(210 + number % 6, 40 + 83 * number % 500) for number in range(40)]
    engine.run(scenarios.set_faults, fail_loads=5, fail_saves=7)
    states = set().union(*(engine.run(scenarios.random_aborts, prompts, seed) for seed in range(4)))
    engine.run(scenarios.set_faults, fail_loads=0, fail_saves=0)
    assert {"RUNNING", "WAITING_FOR_REMOTE_KVS"} <= states
    assert engine.reset()
    assert engine.tokens(prompts[:8]) == oracle.tokens(prompts[:8])


def test_reset_while_loading_changes_no_token(engine, oracle):
    prompt = prompt_of(202)
    engine.ask([prompt])
    assert engine.reset()
    assert [engine.run(scenarios.reset_while_loading, prompt).tokens] == oracle.tokens([prompt])
    engine.run(scenarios.check_idle)


@pytest.mark.parametrize("running", [False, True])
def test_reset_while_saving_changes_no_token(engine, oracle, running):
    prompt = prompt_of(203 + running)
    answer = engine.run(scenarios.reset_while_saving, prompt, running=running)
    assert [answer.tokens] == oracle.tokens([prompt], max_tokens=40)


def test_reset_of_connector_empties_host_memory(engine, oracle):
    prompt = prompt_of(205)
    engine.ask([prompt])
    assert engine.reset(connector=True)
    (answer,) = engine.ask([prompt])
    assert (answer.num_cached, [answer.tokens]) == (0, oracle.tokens([prompt]))


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_with_work_in_flight_empties_the_caches(vllm, oracle, mode):
    prompts = [prompt_of(number) for number in range(220, 224)]
    with vllm.start(connector(), executor="mp", num_gpu_blocks_override=40) as engine:
        engine.ask(prompts)
        assert engine.reset()
        for num_steps in (1, 3, 6, 20):
            engine.run(scenarios.pause, prompts, mode, num_steps)
        engine.run(scenarios.pause, [], mode, 0)
        answers = engine.ask(prompts)
    assert [answer.num_cached for answer in answers] == [0] * 4
    assert [answer.tokens for answer in answers] == oracle.tokens(prompts)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_sleep_with_work_in_flight_empties_the_caches(vllm, oracle, mode):
    prompts = [prompt_of(number) for number in range(230, 234)]
    with vllm.start(connector(), executor="mp", num_gpu_blocks_override=40) as engine:
        engine.ask(prompts)
        assert engine.reset()
        assert all(engine.run(scenarios.sleep, prompts, mode, num_steps) for num_steps in (1, 3, 6, 20))
        assert engine.run(scenarios.sleep, [], mode, 0)
        cold = engine.ask(prompts)
        assert engine.reset()
        warm = engine.ask(prompts)
    assert [answer.num_cached for answer in cold + warm] == [0] * 4 + [reusable_tokens(300)] * 4
    assert [answer.tokens for answer in cold + warm] == oracle.tokens(prompts * 2)
