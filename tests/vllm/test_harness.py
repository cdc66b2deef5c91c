"""Test the test harness itself with vLLM alone. The other tests of this folder rely on these properties."""

from __future__ import annotations

import pytest

import vllm_scenarios as scenarios
from vllm_support import VllmError, prompt_of

PROMPTS = [prompt_of(number, 200) for number in range(900, 903)]


def test_multiprocess_engine_alone_returns_tokens_of_oracle(vllm, oracle):
    with vllm.start(None, executor="mp") as engine:
        assert engine.tokens(PROMPTS) == oracle.tokens(PROMPTS)
        assert len(engine.processes()) >= 3


def test_poison_with_vllm_alone_changes_no_token(vllm, oracle):
    """If vLLM alone read poisoned blocks, the poison tests could not show faults of the connector."""
    with vllm.start(None) as engine:
        engine.run(scenarios.poison_free_blocks)
        assert engine.tokens(PROMPTS * 2) == oracle.tokens(PROMPTS * 2)


def test_wrong_block_in_a_prefix_changes_the_answer(vllm, oracle):
    """Comparing tokens detects a block that contains the KV of another block."""
    prompt = prompt_of(910, 200)
    with vllm.start(None) as engine:
        assert engine.tokens([prompt]) == oracle.tokens([prompt])
        engine.run(scenarios.overwrite_cached_block, 1, 4)
        (answer,) = engine.ask([prompt])
    assert answer.num_cached == 192
    assert [answer.tokens] != oracle.tokens([prompt])


def test_engine_that_cannot_start_raises_with_the_reason(vllm):
    with pytest.raises(VllmError, match="no such connector"), vllm.start({"kv_connector": "no such connector"}):
        pass
