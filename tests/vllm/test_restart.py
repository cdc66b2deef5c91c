"""Blocks on disk survive restarts of vLLM and kills of its processes. A vLLM with a changed model finds no blocks."""

from __future__ import annotations

import os
import random

import pytest

import vllm_models
import vllm_scenarios as scenarios
from vllm_support import VllmError, connector, prompt_of, reusable_tokens

FROM_HOST = "vllm:prompt_tokens_cached_by_source source=host"
FROM_DISK = "vllm:prompt_tokens_cached_by_source source=disk"
PROMPTS = [prompt_of(number) for number in range(700, 704)]
KILLS = int(os.environ.get("KVTIER_KILLS", "3"))
"""Number of kills in test_kills_lose_no_durable_block. `make soak-vllm` runs 30 kills."""


def disk_of(folder):
    """Return settings with a disk tier and 16 host blocks, which are too few for all prompts."""
    return connector(host_bytes=16 << 16, stores=[{"url": f"disk:{folder}?bytes=64MiB", "wait": "wait"}])


@pytest.mark.vllm_ci
def test_restart_finds_prefix_on_disk(vllm, oracle, tmp_path):
    with vllm.start(disk_of(tmp_path)) as engine:
        cold = engine.run(scenarios.ask_and_store, PROMPTS)
    with vllm.start(disk_of(tmp_path)) as engine:
        warm = engine.ask(PROMPTS)
        metrics = engine.metrics()
    assert [answer.tokens for answer in cold + warm] == oracle.tokens(PROMPTS * 2)
    assert [answer.num_cached for answer in cold + warm] == [0] * 4 + [reusable_tokens(300)] * 4
    assert metrics[FROM_DISK] == 4 * reusable_tokens(300)


@pytest.mark.parametrize("change", ["weights", "block_size", "dtype", "rope"])
def test_changed_model_finds_no_block_on_disk(vllm, tmp_path, change):
    with vllm.start(disk_of(tmp_path / "kv")) as engine:
        engine.run(scenarios.ask_and_store, PROMPTS)
    arguments = {
        "weights": {"model": vllm_models.make_llama(tmp_path / "other", seed=1)},
        "block_size": {"block_size": 64},
        "dtype": {"dtype": "bfloat16"},
        "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}},
    }[change]
    with vllm.start(None, **arguments) as engine:
        expected = engine.tokens(PROMPTS)
    with vllm.start(disk_of(tmp_path / "kv"), **arguments) as engine:
        answers = engine.ask(PROMPTS)
    assert [answer.num_cached for answer in answers] == [0] * 4
    assert [answer.tokens for answer in answers] == expected


def test_damaged_files_change_no_token(vllm, oracle, tmp_path):
    with vllm.start(disk_of(tmp_path)) as engine:
        engine.run(scenarios.ask_and_store, PROMPTS)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        for place in range(50_000, len(data), 200_003):
            data[place] ^= 0x55
        path.write_bytes(data)
    with vllm.start(disk_of(tmp_path)) as engine:
        answers = engine.ask(PROMPTS)
    assert [answer.tokens for answer in answers] == oracle.tokens(PROMPTS)
    assert sum(answer.num_cached for answer in answers) < 4 * reusable_tokens(300)


def test_kills_lose_no_durable_block(vllm, oracle, tmp_path):
    """Store the blocks of PROMPTS. While the engine answers other prompts, kill its worker, its core or all processes.

    The next engine must find all blocks of PROMPTS.
    """
    draws, expected = random.Random(7), oracle.tokens(PROMPTS)
    others = [prompt_of(720 + number % 8, 100 + 61 * number % 400) for number in range(200)]
    for number in range(KILLS + 1):
        with vllm.start(disk_of(tmp_path), executor="mp") as engine:
            answers = []
            for count, prompt in enumerate(PROMPTS, start=1):
                answers += engine.ask([prompt])
                if not number:  # the next prompt reuses the host memory of these 9 blocks, so first store them
                    engine.run(scenarios.metric_after, "vllm:kvtier_moved_blocks purpose=store", count * 9)
            assert [answer.tokens for answer in answers] == expected
            if number:
                assert [answer.num_cached for answer in answers] == [reusable_tokens(300)] * 4, f"after kill {number}"
            if number < KILLS:
                engine.send(scenarios.conversations, others, number, max_tokens=20)
                engine.wait(draws.uniform(0.0, 3.0))
                victim = ("worker", "core", "all")[number % 3]
                engine.kill_some(victim)
                if victim != "core":  # vLLM's client does not detect the end of the core process
                    with pytest.raises(VllmError, match=r"EngineDeadError|vLLM ended"):
                        engine.receive()
                engine.kill()


SMALL = {"max_model_len": 352, "num_gpu_blocks_override": 12}
"""Arguments that give SmolLM2 a device cache of 12 blocks of 32 tokens."""


def small_disk(folder):
    return connector(host_bytes="256MiB", stores=[{"url": f"disk:{folder}?bytes=512MiB", "wait": "wait"}])


def test_smollm2_tokens_are_equal_with_and_without_kvtier(vllm, smollm2, tmp_path):
    """Test a real model: two turns that exceed the device cache, then a restart that reads from disk."""
    first = [prompt_of(number, 200) for number in range(740, 746)]
    with vllm.start(None, model=smollm2, **SMALL, enable_prefix_caching=False) as alone:
        answers = alone.tokens(first)
        second = [[*prompt, *answer, *prompt_of(99, 40)] for prompt, answer in zip(first, answers, strict=True)]
        expected = answers + alone.tokens(second)
    with vllm.start(small_disk(tmp_path), model=smollm2, **SMALL) as engine:
        turns = engine.ask(first) + engine.ask(second)
        metrics = engine.metrics()
        engine.run(scenarios.settle_stores)
        # Host memory is still growing, so the shares of hits from host and disk vary.
        found = {"host": metrics[FROM_HOST], "disk": metrics[FROM_DISK]}
        counted = {
            tier: engine.run(scenarios.metric_after, f"vllm:kvtier_hit_tokens tier={tier}", count)
            for tier, count in found.items()
        }
    with vllm.start(small_disk(tmp_path), model=smollm2, **SMALL) as engine:
        restarted = engine.ask(second)
        again = engine.metrics()
    hits = 6 * reusable_tokens(200 + 8)
    assert [answer.tokens for answer in turns + restarted] == expected + expected[6:]
    assert [answer.num_cached for answer in turns] == [0] * 6 + [reusable_tokens(200 + 8)] * 6
    assert metrics["vllm:external_prefix_cache_hits"] == sum(found.values()) == hits
    assert counted == found
    assert again[FROM_DISK] == 6 * reusable_tokens(200 + 8 + 40) == sum(answer.num_cached for answer in restarted)


@pytest.mark.parametrize("change", ["weights", "block_size", "dtype"])
def test_changed_smollm2_finds_no_block_on_disk(vllm, smollm2, tmp_path, change):
    prompts = [prompt_of(number, 200) for number in range(750, 752)]
    with vllm.start(small_disk(tmp_path / "kv"), model=smollm2, **SMALL) as engine:
        engine.ask(prompts)
        engine.run(scenarios.settle_stores)
    other = {
        "weights": lambda: {"model": vllm_models.scale_weights(smollm2, tmp_path / "other", 1.01)},
        "block_size": lambda: {"model": smollm2, "block_size": 64},
        "dtype": lambda: {"model": smollm2, "dtype": "bfloat16"},
    }
    arguments = SMALL | other[change]()
    with vllm.start(None, **arguments) as engine:
        expected = engine.tokens(prompts)
    with vllm.start(small_disk(tmp_path / "kv"), **arguments) as engine:
        answers = engine.ask(prompts)
    assert [answer.num_cached for answer in answers] == [0, 0]
    assert [answer.tokens for answer in answers] == expected
