"""Tests with salts, LoRA adapters, media and embeddings: requests share a block only if vLLM would share the block."""

from __future__ import annotations

import pytest

import vllm_models
import vllm_scenarios as scenarios
from vllm_support import connector, prompt_of, reusable_tokens

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "enable_prompt_embeds": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [str(vllm_models.make_adapter(folder / name, seed)) for seed, name in enumerate("ab", start=1)]


@pytest.fixture(scope="module")
def engine(vllm):
    with vllm.start(connector(verify_loads=True), **LORA) as running:
        yield running


@pytest.fixture(scope="module")
def alone(vllm):
    """Yield vLLM with LoRA and without a connector."""
    with vllm.start(None, **LORA, enable_prefix_caching=False) as running:
        yield running


def ask(engine, prompt, **options):
    """Send a request with an empty device cache, so that all cached tokens come from kvtier."""
    assert engine.reset()
    (answer,) = engine.ask([prompt], **options)
    return answer


def test_salts_do_not_share_blocks(engine, oracle):
    prompt = prompt_of(500, 200)
    answers = {salt: ask(engine, prompt, salt=salt) for salt in (None, "a", "b", "a\0b")}
    assert [answer.num_cached for answer in answers.values()] == [0] * 4
    again = [ask(engine, prompt, salt=salt).num_cached for salt in answers]
    assert again == [reusable_tokens(200)] * 4
    assert {answer.tokens for answer in answers.values()} == set(oracle.tokens([prompt]))


def test_adapters_do_not_share_blocks(engine, alone, adapters):
    prompt = prompt_of(501, 200)
    loras = [None, ("a", 1, adapters[0]), ("b", 2, adapters[1])]
    cold = [ask(engine, prompt, lora=lora) for lora in loras]
    warm = [ask(engine, prompt, lora=lora) for lora in loras]
    expected = [alone.ask([prompt], lora=lora)[0].tokens for lora in loras]
    assert len(set(expected)) == 3
    assert [answer.tokens for answer in cold + warm] == expected * 2
    assert [answer.num_cached for answer in cold + warm] == [0] * 3 + [reusable_tokens(200)] * 3


def test_adapter_with_changed_files_finds_no_old_blocks(engine, alone, tmp_path):
    prompt, folder = prompt_of(502, 200), str(vllm_models.make_adapter(tmp_path / "c", 3))
    ask(engine, prompt, lora=("c", 3, folder))
    vllm_models.make_adapter(tmp_path / "c", 4)
    answer = ask(engine, prompt, lora=("c", 4, folder))
    assert answer.num_cached == 0
    assert answer.tokens == alone.ask([prompt], lora=("c", 4, folder))[0].tokens


def test_prompt_embeddings_do_not_share_blocks(engine, alone):
    seeds = [1, 2, 1]
    answers = [engine.run(scenarios.ask_with_embeddings, seed, 200) for seed in seeds]
    zeros = ask(engine, [0] * 200)  # vLLM represents embeddings by token id 0
    assert [answer.num_cached for answer in answers] == [0, 0, reusable_tokens(200)]
    assert zeros.num_cached == 0
    expected = [alone.run(scenarios.ask_with_embeddings, seed, 200).tokens for seed in seeds]
    assert expected[0] != expected[1]
    assert [answer.tokens for answer in answers] == expected


def test_prompts_with_different_sounds_share_only_first_blocks(vllm, tmp_path):
    """The prompts have equal tokens, but the third block contains different sounds.

    A real audio encoder reads the sounds.
    """
    model = vllm_models.make_qwen2_audio(tmp_path)
    prompt = [*prompt_of(505, 70), vllm_models.AUDIO_TOKEN, *prompt_of(506, 100)]
    asked = prompt, vllm_models.SAMPLES, [300, 5000, 300, 5000]
    arguments = {"model": model, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 1}}
    # vLLM reserves tokens for 30 s of audio.
    arguments |= {"max_model_len": 1024, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 36}
    with vllm.start(None, **arguments, enable_prefix_caching=False) as alone:
        expected = [each.tokens for each in alone.run(scenarios.ask_with_audio, *asked)]
    with vllm.start(connector(verify_loads=True), **arguments) as engine:
        answers = engine.run(scenarios.ask_with_audio, *asked)
    assert expected[0] != expected[1]
    assert [answer.tokens for answer in answers] == expected
    everything = reusable_tokens(170 + vllm_models.AUDIO_TOKENS)
    assert [answer.num_cached for answer in answers] == [0, 64, everything, everything]


def test_images_do_not_share_blocks(vllm, tmp_path):
    """The prompts have equal tokens but different images. A real vision encoder reads the images."""
    model, prompt = vllm_models.make_blip2(tmp_path), prompt_of(507, 170)
    asked = prompt, vllm_models.PIXELS, [1, 2, 1, 2]
    arguments = {"model": model, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    with vllm.start(None, **arguments, enable_prefix_caching=False) as alone:
        expected = [each.tokens for each in alone.run(scenarios.ask_with_images, *asked)]
    with vllm.start(connector(verify_loads=True), **arguments) as engine:
        answers = engine.run(scenarios.ask_with_images, *asked)
    assert expected[0] != expected[1]
    assert [answer.tokens for answer in answers] == expected
    everything = reusable_tokens(170 + vllm_models.IMAGE_TOKENS)
    assert [answer.num_cached for answer in answers] == [0, 0, everything, everything]


def test_save_false_stores_no_blocks_and_load_false_loads_none(engine, oracle):
    prompt = prompt_of(503, 200)
    ask(engine, prompt, transfer={"kvtier": {"save": False}})
    assert ask(engine, prompt).num_cached == 0
    assert ask(engine, prompt, transfer={"kvtier": {"load": False}}).num_cached == 0
    answer = ask(engine, prompt, transfer={"kvtier": {"explain": True}})
    assert (answer.num_cached, [answer.tokens]) == (reusable_tokens(200), oracle.tokens([prompt]))


def test_keys_are_equal_iff_vllm_hashes_are_equal(engine, adapters):
    """Compare the blocks of random pairs of requests.

    The requests are drawn from few tokens, salts, adapters, media and embeddings, so that equal blocks are likely.
    """
    num_equal, num_different = engine.run(scenarios.compare_keys_with_hashes, adapters, num_examples=400)
    assert num_equal > 100
    assert num_different > 100
