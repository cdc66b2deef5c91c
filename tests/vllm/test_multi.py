"""Test kvtier together with vLLM's ExampleConnector in a MultiConnector."""

from __future__ import annotations

import pytest

import vllm_scenarios as scenarios
from vllm_support import connector, prompt_of, reusable_tokens


def both(folder, *, first):
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    children = [connector(), example] if first == "kvtier" else [example, connector()]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("first", ["kvtier", "example"])
def test_offer_that_vllm_does_not_choose_is_released(vllm, oracle, tmp_path, first):
    """Each connector offers its cached blocks. vLLM loads from the first connector that has any."""
    prompts = [prompt_of(number) for number in range(600, 604)]
    # ExampleConnector saves only the first chunk of a prompt, so the first chunk must contain the whole prompt.
    with vllm.start(both(tmp_path / "example", first=first), max_num_batched_tokens=512) as engine:
        cold = engine.ask(prompts)
        assert engine.reset()
        warm = engine.ask(prompts)
        engine.run(scenarios.check_idle)
        num_loaded = engine.run(scenarios.num_loaded)
    assert [answer.tokens for answer in cold + warm] == oracle.tokens(prompts * 2)
    assert [answer.num_cached for answer in warm] == [reusable_tokens(300)] * 4
    assert (num_loaded > 0) == (first == "kvtier")
