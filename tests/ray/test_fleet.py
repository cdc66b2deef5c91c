"""A fleet of three replicas of a tiny model on two raylets: answers, failures, scaling and updates."""

from __future__ import annotations

import os
import re
import signal

import httpx
import openai
import psutil
import pytest

from ray_support import HEAD, MODEL, WORKER, Load, ask, is_lost, wait_until


@pytest.fixture(scope="module")
def fleet(cluster):
    cluster.run(3)
    cluster.wait_for_replicas(3)
    return cluster


@pytest.fixture(scope="module")
def answer(tiny_model):
    """Return a function that computes the expected answer to a prompt. It uses an engine in this process."""
    from kvtier.engine.llm import LLM
    from kvtier.engine.params import SamplingParams

    known = {}
    llm = LLM(str(tiny_model))

    def of(prompt, max_tokens):
        if (prompt, max_tokens) not in known:
            known[prompt, max_tokens] = llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0))[
                0
            ][0].text
        return known[prompt, max_tokens]

    return of


def assert_right(load, answer):
    """Assert that complete answers equal the answers of one engine. All other requests must get 503 or be lost."""
    assert [prompt for prompt, text in load.answers if text != answer(prompt, load.max_tokens)] == []
    assert [error for error in load.errors if not is_lost(error)] == []


@pytest.mark.ray_ci
def test_openai_client_streams_the_answer_of_one_engine(fleet, answer):
    with fleet.client() as client:
        assert ask(client, "hello " * 20, 32, stream=True) == answer("hello " * 20, 32)
        assert ask(client, "hello " * 20, 32, stream=False) == answer("hello " * 20, 32)


@pytest.mark.ray_ci
def test_repeated_prompts_find_their_blocks(fleet):
    """Each request ends before the next one begins, so only KV events can inform the router about cached blocks."""
    prompts = [f"document {number} " * 40 for number in range(4)]
    with fleet.client() as client:
        for round in range(3):
            for prompt in prompts:
                usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0).usage
                assert round == 0 or usage.prompt_tokens_details.cached_tokens > 400


@pytest.mark.ray_ci
def test_closed_stream_cancels_the_request(fleet):
    with fleet.client() as client:
        options = {"model": MODEL, "prompt": "long ", "max_tokens": 1900, "stream": True}
        stream = client.completions.create(extra_body={"ignore_eos": True}, **options)
        next(iter(stream))
        wait_until(lambda: fleet.state()["running"] == 1, "running request")
        stream.close()
        wait_until(lambda: fleet.state()["running"] == 0 and fleet.state()["in_flight"] == 0, "cancelled request")


@pytest.mark.ray_ci
def test_metrics_of_a_fleet_have_series_of_every_replica(fleet):
    page = httpx.get(f"{fleet.url}/metrics", timeout=60).text
    names = re.findall(r'kvtier_cache_queried_tokens_total{replica="([^"]+)"}', page)
    assert sorted(names) == sorted(each["replica"] for each in fleet.replicas())


def test_unknown_model_of_a_fleet_is_404(fleet):
    with fleet.client() as client, pytest.raises(openai.NotFoundError, match="unknown model"):
        client.completions.create(model="other", prompt="a")


@pytest.mark.ray_ci
def test_killed_replica_loses_only_streams_that_have_begun(fleet, answer):
    """A request may be lost if its stream has begun. All other requests are retried."""
    load = Load(fleet)
    with load.running():
        victim = fleet.wait_for_replicas(3)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        load.more(12)
        wait_until(lambda: not psutil.pid_exists(victim["engine_pid"]), "end of the engine process")
        found = fleet.wait_for_replicas(3)
        load.more(12)
    assert victim["replica"] not in {each["replica"] for each in found}
    assert_right(load, answer)
    assert len(load.errors) <= load.num_clients


def test_killed_engine_process_is_replaced(fleet, answer):
    load = Load(fleet, stream=False)
    with load.running():
        victim = fleet.wait_for_replicas(3)[0]
        os.kill(victim["engine_pid"], signal.SIGKILL)
        load.more(12)
        wait_until(lambda: not psutil.pid_exists(victim["pid"]), "end of the replica")
        fleet.wait_for_replicas(3)
        load.more(12)
    assert_right(load, answer)


def test_replicas_of_killed_raylet_move_to_the_other_node(fleet, answer):
    load = Load(fleet)
    with load.running():
        wait_until(lambda: WORKER in {each["node"] for each in fleet.wait_for_replicas(3)}, "replica on the other node")
        gone = [each for each in fleet.wait_for_replicas(3) if each["node"] == WORKER]
        fleet.kill_worker()
        load.more(12)
        found = fleet.wait_for_replicas(3)
        load.more(12)
    fleet.add_worker()
    assert {each["node"] for each in found} == {HEAD}
    for each in gone:
        wait_until(lambda pid=each["engine_pid"]: not psutil.pid_exists(pid), "end of the engine process")
    assert_right(load, answer)


def test_killed_proxy_closes_connections_and_retry_succeeds(fleet, answer):
    load = Load(fleet)
    with load.running():
        os.kill(fleet.proxy_pid(), signal.SIGKILL)
        load.more(12)
    assert [prompt for prompt, text in load.answers if text != answer(prompt, load.max_tokens)] == []
    lost = (openai.APIConnectionError, openai.APIError, httpx.TransportError)
    assert load.errors
    assert [error for error in load.errors if not isinstance(error, lost)] == []
    with fleet.client(max_retries=5) as client:
        assert ask(client, "retry", 8, stream=True) == answer("retry", 8)


def test_scaling_between_one_and_three_loses_no_request(fleet, answer):
    load = Load(fleet)
    with load.running():
        for number in (1, 3, 1, 3):
            fleet.run(number)
            fleet.wait_for_replicas(number)
            load.more(12)
    assert load.errors == []
    assert_right(load, answer)


def test_rolling_update_drains_replicas(fleet, answer):
    load = Load(fleet)
    with load.running():
        before = {each["replica"] for each in fleet.wait_for_replicas(3)}
        fleet.run(3, {"max_step_tokens": 256})
        after = {each["replica"] for each in fleet.wait_for_replicas(3)}
        load.more(12)
    assert before & after == set()
    assert load.errors == []
    assert_right(load, answer)
