"""vLLM with kvtier returns the same tokens as vLLM alone, and reuses blocks that its device cache has evicted."""

from __future__ import annotations

import pytest

import vllm_scenarios as scenarios
from vllm_support import BLOCK, connector, prompt_of, reusable_tokens

EXPLAIN = {"kvtier": {"explain": True}}
HITS = "vllm:external_prefix_cache_hits"
FROM_HOST = "vllm:prompt_tokens_cached_by_source source=host"


def turns(engine, prompts, **options):
    """Run conversations of two turns.

    Return the prompts and answers of both turns, and for each conversation the number of tokens that its second turn
    should find in the cache.
    """
    first = engine.ask(prompts, **options)
    second = [[*prompt, *answer.tokens, *prompt_of(99, 40)] for prompt, answer in zip(prompts, first, strict=True)]
    # The KV of the last generated token is computed in the next turn, so its block is not cached yet.
    known = [reusable_tokens(len(prompt) + len(answer.tokens)) for prompt, answer in zip(prompts, first, strict=True)]
    return prompts + second, first + engine.ask(second, **options), known


@pytest.mark.vllm_ci
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_turns_larger_than_device_cache_get_tokens_of_vllm_alone(vllm, oracle, executor):
    prompts = [prompt_of(number, 290 + number) for number in range(6)]
    with vllm.start(connector(verify_loads=True), executor=executor) as engine:
        asked, answers, known = turns(engine, prompts, max_tokens=20, transfer=EXPLAIN)
        metrics = engine.metrics()
    assert [answer.tokens for answer in answers] == oracle.tokens(asked, max_tokens=20)
    assert [answer.num_cached for answer in answers] == [0] * 6 + known
    assert metrics[HITS] == metrics[FROM_HOST] == sum(known)
    assert [answer.transfer["kvtier"]["tokens_from"].get("host", 0) for answer in answers] == [0] * 6 + known


def test_turns_with_spawned_processes_equal_vllm_alone(vllm, oracle):
    with vllm.start(connector(), executor="spawn") as engine:
        asked, answers, known = turns(engine, [prompt_of(number) for number in range(4)], max_tokens=8)
    assert [answer.tokens for answer in answers] == oracle.tokens(asked, max_tokens=8)
    assert [answer.num_cached for answer in answers] == [0] * 4 + known


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 95, 96, 97])
def test_prompt_near_block_boundary_computes_last_token(engine, oracle, num_tokens):
    prompt = prompt_of(1000 + num_tokens, num_tokens)
    (cold,) = engine.ask([prompt])
    assert engine.reset()
    (warm,) = engine.ask([prompt])
    assert [cold.tokens, warm.tokens] == oracle.tokens([prompt, prompt])
    assert (cold.num_cached, warm.num_cached) == (0, reusable_tokens(num_tokens))


def test_prompt_with_one_output_token_is_cached(engine, oracle):
    prompt = prompt_of(40, 200)
    (cold,) = engine.ask([prompt], max_tokens=1)
    assert engine.reset()
    (warm,) = engine.ask([prompt], max_tokens=1)
    assert [cold.tokens, warm.tokens] == oracle.tokens([prompt, prompt], max_tokens=1)
    assert warm.num_cached == reusable_tokens(200)


def test_several_samples_equal_vllm_alone(engine, oracle):
    # vLLM 0.32 fails on CPUs if it splits the prefill of a request with a seed. The prompts of the three samples have
    # 240 tokens in total, which fit into one step.
    prompt, options = prompt_of(41, 80), {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    (cold,) = engine.ask([prompt], **options)
    assert engine.reset()
    (warm,) = engine.ask([prompt], **options)
    (expected,) = oracle.ask([prompt], **options)
    assert len({expected.tokens, *expected.others}) == 3
    assert {(each.tokens, each.others) for each in (cold, warm)} == {(expected.tokens, expected.others)}
    assert warm.num_cached == reusable_tokens(80)


def test_prompt_logprobs_compute_the_whole_prompt(engine, oracle):
    prompt = prompt_of(42, 200)
    engine.ask([prompt])
    assert engine.reset()
    (answer,) = engine.ask([prompt], prompt_logprobs=1)
    assert (answer.num_cached, answer.num_prompt_logprobs) == (0, 200)
    assert [answer.tokens] == oracle.tokens([prompt])


@pytest.mark.parametrize("chunk", [24, 80])
def test_chunked_prefill_saves_whole_blocks_only(vllm, oracle, chunk):
    prompts = [prompt_of(number, 150) for number in range(50, 56)]
    with vllm.start(connector(verify_loads=True), max_num_batched_tokens=chunk) as engine:
        engine.run(scenarios.start_comparing_loads)
        cold = engine.ask(prompts)
        assert engine.reset()
        warm = engine.ask(prompts)
        assert engine.run(scenarios.num_compared_blocks) == 6 * (reusable_tokens(150) // BLOCK)
    assert [answer.tokens for answer in cold + warm] == oracle.tokens(prompts + prompts)
    assert [answer.num_cached for answer in warm] == [reusable_tokens(150)] * 6


def test_preempted_requests_load_their_own_output(vllm):
    with vllm.start(connector(verify_loads=True, max_saving_blocks=0), num_gpu_blocks_override=30) as engine:
        engine.run(scenarios.start_comparing_loads)
        answers = engine.ask_together([prompt_of(number, 150) for number in range(60, 66)], max_tokens=120)
        assert engine.metrics()["vllm:num_preemptions"] > 0
        assert engine.run(scenarios.num_compared_blocks) > 0  # blocks that preempted requests have loaded again
        engine.run(scenarios.check_idle)
    assert {len(answer.tokens) for answer in answers} == {120}


def test_rejected_drafts_are_not_saved(vllm, oracle):
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    pattern = prompt_of(70, 20)
    prompts = [[*prompt_of(70 + number, 30), *pattern * 6] for number in range(4)]
    with vllm.start(connector(verify_loads=True), speculative_config=drafts) as engine:
        engine.run(scenarios.start_comparing_loads)
        asked, answers, known = turns(engine, prompts, max_tokens=70)
        metrics = engine.metrics()
        assert engine.run(scenarios.num_compared_blocks) > 0
    accepted, drafted = (metrics[f"vllm:spec_decode_num_{each}_tokens"] for each in ("accepted", "draft"))
    assert drafted - accepted > 0
    assert [answer.tokens for answer in answers] == oracle.tokens(asked, max_tokens=70)
    assert [answer.num_cached for answer in answers[4:]] == known
