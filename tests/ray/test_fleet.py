"""A fleet of three replicas of a tiny model on two raylets: answers, failures, scaling and updates."""

from __future__ import annotations

import pytest

from ray_support import ask


@pytest.fixture(scope="module")
def fleet(cluster):
    cluster.run(3)
    cluster.wait_for_replicas(3)
    return cluster


@pytest.fixture(scope="module")
def answer(tiny_model):
    """Return the answers of a single engine in this process, which all replicas must return."""
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
    wrong = [prompt for prompt, text in load.answers if text != answer(prompt, load.max_tokens)]
    assert wrong == []


@pytest.mark.ray_ci
def test_openai_client_streams_the_answer_of_one_engine(fleet, answer):
    with fleet.client() as client:
        assert ask(client, "hello " * 20, 32, stream=True) == answer("hello " * 20, 32)
        assert ask(client, "hello " * 20, 32, stream=False) == answer("hello " * 20, 32)
