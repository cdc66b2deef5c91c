"""The prefix cache for transformers: rejected inputs, isolation, restarts, damage and limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import peft
import psutil
import pytest
import torch
import transformers as hf

from kvtier.errors import ArgumentError, ClosedError
from kvtier.integrations.transformers import PrefixCache
from kvtier.storage import open_store
from transformers_models import PAD, greedy, make_model, padded, prompt, shared_model

IDS = prompt(30)
SLOT_BYTES = 4096
"""Host memory of a block of 4 tokens: 1.5 KiB of KV, rounded up to 4 KiB."""


def open_prefix(model, store=(), **options):
    return PrefixCache(model, store, **{"host_bytes": "4MiB", "block_tokens": 4, **options})


def disk(folder) -> str:
    return f"disk:{folder}?bytes=64MiB&free=0"


def save(model, folder) -> None:
    """Save the KV of IDS on disk."""
    with open_prefix(model, disk(folder)) as prefix:
        prefix.generate(IDS, max_new_tokens=1, do_sample=False)


def hits(model, folder, ids=IDS, **options) -> int:
    """Return the number of prompt tokens found on disk."""
    with open_prefix(model, disk(folder)) as prefix:
        return prefix.begin(ids, **options).hit_tokens[0]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prefix_cache_of_dynamic_rope_is_refused(kind):
    factors = [1.0] * 4
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 64}
    with pytest.raises(ArgumentError, match=f"rope scaling '{kind}'"):
        open_prefix(make_model("llama", rope_parameters=rope))


def test_prefix_cache_of_encoder_decoder_is_refused():
    config = hf.T5Config(vocab_size=50, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    with pytest.raises(ArgumentError, match="is not a decoder"):
        open_prefix(hf.T5ForConditionalGeneration(config).eval())


def test_prefix_cache_of_linear_attention_is_refused():
    config = hf.MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(ArgumentError, match="MambaForCausalLM"):
        open_prefix(hf.MambaForCausalLM(config).eval())


def test_prefix_cache_of_other_object_is_refused():
    with pytest.raises(ArgumentError, match="needs a PreTrainedModel"):
        open_prefix(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beams cannot share a cache"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size is set"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is set"),
        ({"generation_config": hf.GenerationConfig(num_beams=3)}, "num_beams=3"),
        ({"cache_implementation": "static"}, "makes the cache"),
        ({"inputs_embeds": torch.zeros(1, 30, 32)}, "inputs_embeds cannot identify"),
        ({"token_type_ids": torch.ones(1, 30, dtype=torch.long)}, "token_type_ids"),
        ({"use_cache": False}, "use_cache=False"),
    ],
)
def test_generate_with_unsupported_option_is_refused(options, message):
    with open_prefix(shared_model("llama")) as prefix, pytest.raises(ArgumentError, match=message):
        prefix.generate(IDS, max_new_tokens=2, **options)


def test_begin_of_invalid_prompt_is_refused():
    model, mask = shared_model("llama"), torch.ones_like(IDS)
    right, empty, gap = mask.clone(), torch.zeros_like(IDS), mask.clone()
    right[0, -1] = 0
    gap[0, 10] = 0
    with open_prefix(model) as prefix:
        for wrong in (right, empty, gap, mask[:, 1:]):
            with pytest.raises(ArgumentError, match="attention_mask"):
                prefix.begin(IDS, wrong)
        with pytest.raises(ArgumentError, match="padding token 0: pass attention_mask"):
            prefix.begin(torch.cat((torch.tensor([[PAD]]), IDS), dim=1))
        with pytest.raises(ArgumentError, match="shape"):
            prefix.begin(IDS[0])
        with pytest.raises(ArgumentError, match="pixel_values cannot identify"):
            prefix.begin(IDS, pixel_values=torch.zeros(1))
        for inputs in ((IDS.tolist(),), ({"input_ids": IDS},), (IDS, mask.tolist())):
            with pytest.raises(ArgumentError, match=r"must be a tensor.*return_tensors"):
                prefix.begin(*inputs)
        with pytest.raises(ArgumentError, match="input_ids are missing"):
            prefix.begin()
        with pytest.raises(ArgumentError, match="num_return_sequences"):
            prefix.begin(IDS, num_return_sequences=0)
        with pytest.raises(ArgumentError, match="no room for the prompt of 30"):
            prefix.begin(IDS, max_length=29)


@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_begin_accepts_attention_mask_of_other_dtypes(kind):
    with open_prefix(shared_model("llama")) as prefix:
        prefix.generate(inputs=IDS, max_new_tokens=1)
        assert prefix.begin(IDS, torch.ones_like(IDS, dtype=kind)).hit_tokens == (28,)


def test_forward_with_used_cache_is_refused():
    """With a used cache, transformers would append a part of the prompt again and return a wrong answer."""
    model = shared_model("llama")
    with open_prefix(model) as prefix:
        cache = prefix.begin(IDS)
        greedy(model, {"input_ids": IDS}, past_key_values=cache)
        with pytest.raises(ArgumentError, match="call `begin` for every prompt"):
            greedy(model, {"input_ids": IDS}, past_key_values=cache)
        with pytest.raises(ArgumentError, match="do not set use_cache=False"):
            greedy(model, {"input_ids": IDS}, past_key_values=prefix.begin(IDS), use_cache=False)


def test_forward_beyond_static_cache_is_refused():
    model = shared_model("llama")
    with open_prefix(model) as prefix, pytest.raises(ArgumentError, match="room for 32 tokens"):
        greedy(model, {"input_ids": IDS}, past_key_values=prefix.begin(IDS, max_length=32))


def test_generate_ignores_hybrid_cache_of_config():
    """Older configurations of Gemma set `cache_implementation` to "hybrid". transformers ignores this setting."""
    model = make_model("gemma2")
    model.generation_config.cache_implementation = "hybrid"
    with open_prefix(model) as prefix:
        expected = greedy(model, {"input_ids": IDS})
        for _ in range(2):
            assert torch.equal(prefix.generate(IDS, max_new_tokens=8, do_sample=False), expected)


def test_begin_after_model_conversion_is_refused():
    model = make_model("llama")
    with open_prefix(model) as prefix:
        model.to(torch.bfloat16)
        with pytest.raises(ArgumentError, match=r"from torch.float32 to torch.bfloat16"):
            prefix.begin(IDS)


def test_compiled_model_with_cached_prefix_gives_same_answer():
    model = torch.compile(make_model("llama"), backend="eager")
    with open_prefix(model) as prefix:
        expected = greedy(model, {"input_ids": IDS})
        prefix.generate(IDS, max_new_tokens=1)
        cache = prefix.begin(IDS)
        assert cache.hit_tokens == (28,)
        assert torch.equal(greedy(model, {"input_ids": IDS}, past_key_values=cache), expected)


def test_begin_in_training_mode_or_autocast_is_refused():
    model = make_model("llama")
    with open_prefix(model) as prefix:
        model.train()
        with pytest.raises(ArgumentError, match="training mode"):
            prefix.begin(IDS)
        model.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match="autocast"):
            prefix.begin(IDS)


def test_forward_of_beams_with_shared_cache_is_refused():
    model = shared_model("llama")
    with open_prefix(model) as prefix, pytest.raises(ArgumentError, match="beams cannot share a cache"):
        model.generate(IDS, past_key_values=prefix.begin(IDS), num_beams=2, max_new_tokens=2)


def test_forward_of_repeated_prefix_is_refused():
    """Versions of transformers before 5.20 send the whole prompt to a filled cache if prefill_chunk_size is set."""
    model = shared_model("llama")
    with open_prefix(model) as prefix, torch.no_grad():
        prefix.generate(IDS, max_new_tokens=1)
        with pytest.raises(ArgumentError, match="neither prefill_chunk_size"):
            model(input_ids=IDS[:, :8], past_key_values=prefix.begin(IDS))
        same = torch.full_like(IDS, 7)
        prefix.generate(same, max_new_tokens=1)
        with pytest.raises(ArgumentError, match="positions 0 to 1, but 28 columns"):
            model(input_ids=same[:, :2], position_ids=torch.tensor([[0, 1]]), past_key_values=prefix.begin(same))


def test_forward_of_assisted_decoding_after_hit_is_refused():
    """transformers 5.23 sends the whole prompt to a filled cache if prompt_lookup_num_tokens is set.

    If the cache is empty, the answer is correct.
    """
    model, ids = shared_model("llama"), prompt(6).repeat(1, 5)
    with open_prefix(model) as prefix:
        expected = greedy(model, {"input_ids": ids}, 20)
        options = {"max_new_tokens": 20, "do_sample": False, "prompt_lookup_num_tokens": 3}
        assert torch.equal(model.generate(ids, past_key_values=prefix.begin(ids), **options), expected)
        turn = torch.cat((expected, prompt(4, 9)), dim=1)
        cache = prefix.begin(turn)
        assert cache.hit_tokens[0] >= 44  # the saved blocks do not contain rejected proposals
        assert torch.equal(
            greedy(model, {"input_ids": turn}, past_key_values=cache), greedy(model, {"input_ids": turn})
        )
        with pytest.raises(ArgumentError, match="assisted decoding"):
            model.generate(ids, past_key_values=prefix.begin(ids), **options)


def test_forward_of_other_prompt_is_refused():
    """transformers does not check that the cache belongs to the input. Another prompt would get a wrong answer."""
    model, other = shared_model("llama"), IDS.clone()
    other[0, -1] += 1
    with open_prefix(model) as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        with pytest.raises(ArgumentError, match="not the next tokens of the prompt"):
            greedy(model, {"input_ids": other}, past_key_values=prefix.begin(IDS))
        inputs = padded([[1, 2, 3], [4, 5, 6, 7, 8, 9]])
        with pytest.raises(ArgumentError, match="attention_mask"):
            model(input_ids=inputs["input_ids"], past_key_values=prefix.begin(**inputs))


def test_crop_of_sliding_layer_is_refused():
    model = shared_model("gemma3")
    with open_prefix(model) as prefix:
        cache = prefix.begin(IDS)
        greedy(model, {"input_ids": IDS}, past_key_values=cache)
        with pytest.raises(ArgumentError, match="sliding window of 9 tokens"):
            cache.crop(-2)


# ---- isolation -----------------------------------------------------------------------------------------------------


def test_prefix_cache_of_other_model_never_hits(tmp_path):
    """Blocks of one model are misses for models with other weights, dtypes, attention implementations or configs."""
    save(make_model("llama"), tmp_path)
    assert hits(make_model("llama"), tmp_path) == 28
    others = {
        "weights": make_model("llama", seed=1),
        "dtype": make_model("llama").to(torch.bfloat16),
        "rope": make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        "attention": make_model("llama", attn_implementation="eager"),
        "architecture": make_model("qwen3"),
        "layers": make_model("llama", num_hidden_layers=2),
    }
    one_weight = others["one matrix"] = make_model("llama")
    with torch.no_grad():
        one_weight.model.layers[2].self_attn.v_proj.weight += 1e-3
    revision = others["revision"] = make_model("llama")
    revision.config._commit_hash = "0123abc"
    assert {name: hits(model, tmp_path) for name, model in others.items()} == dict.fromkeys(others, 0)
    assert hits(make_model("llama"), tmp_path, salt="tenant") == 0


SMALL_TENSORS = {
    "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias", "input_layernorm.weight", "inv_freq"),
    "qwen3": ("q_norm.weight", "k_norm.weight", "post_attention_layernorm.weight", "inv_freq"),
}


@pytest.mark.parametrize("kind", SMALL_TENSORS)
def test_prefix_cache_with_other_small_tensor_never_hits(tmp_path, kind):
    """Blocks are misses if one bias, norm or buffer changes while the prefix cache is open, or before it is opened."""
    save(make_model(kind), tmp_path)
    for ending in SMALL_TENSORS[kind]:
        model = make_model(kind)
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name.endswith(f".{ending}")]
        tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[names[-1]]
        with open_prefix(model, disk(tmp_path)) as prefix, torch.no_grad():
            assert prefix.begin(IDS).hit_tokens == (28,), ending
            tensor.mul_(1.5)
            assert prefix.begin(IDS).hit_tokens == (0,), ending
        assert hits(model, tmp_path) == 0, ending


@pytest.mark.parametrize("change", ["in place", "data", "replaced"])
def test_begin_after_weight_change_misses_old_blocks(change):
    model = make_model("llama")
    with open_prefix(model) as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        assert prefix.begin(IDS).hit_tokens == (28,)
        layer = model.model.layers[1].self_attn.k_proj
        with torch.no_grad():
            if change == "in place":
                layer.weight.mul_(1.01)
            elif change == "data":
                layer.weight.data.mul_(1.01)
            else:
                layer.weight = torch.nn.Parameter(layer.weight * 1.01)
        cache = prefix.begin(IDS)
        assert cache.hit_tokens == (0,)
        assert torch.equal(greedy(model, {"input_ids": IDS}, past_key_values=cache), greedy(model, {"input_ids": IDS}))
        assert prefix.begin(IDS).hit_tokens == (28,)


@pytest.mark.parametrize("change", ["attention", "window"])
def test_begin_after_settings_change_misses_old_blocks(change):
    model = make_model("mistral-sliding")
    with open_prefix(model) as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        assert prefix.begin(IDS).hit_tokens == (28,)
        if change == "attention":
            model.set_attn_implementation("eager")
        else:
            model.config.sliding_window = 5
        assert prefix.begin(IDS).hit_tokens == (0,)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5.23
def test_base_model_and_adapters_never_share_blocks(tmp_path):
    """The base model and each adapter have their own blocks, even after switching and merging adapters."""
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    save(make_model("llama"), tmp_path)
    model = peft.get_peft_model(make_model("llama"), lora, "one").eval()
    model.add_adapter("two", lora)
    model.eval()
    with open_prefix(model, disk(tmp_path)) as prefix:
        for name in ("one", "two"):
            model.set_adapter(name)
            assert prefix.begin(IDS).hit_tokens == (0,)
            expected = greedy(model, {"input_ids": IDS})
            for _ in range(2):
                assert torch.equal(prefix.generate(IDS, max_new_tokens=8, do_sample=False), expected)
            assert prefix.begin(IDS).hit_tokens == (28,)
        with model.disable_adapter():
            assert prefix.begin(IDS).hit_tokens == (28,)  # blocks of the base model, read from disk
            model.base_model.model.eval()
            assert torch.equal(
                prefix.generate(IDS, max_new_tokens=8, do_sample=False), greedy(make_model("llama"), {"input_ids": IDS})
            )
        model.set_adapter("one")
        model.merge_adapter()
        assert prefix.begin(IDS).hit_tokens == (0,)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5.23
def test_generate_with_adapter_names_is_refused():
    """With `adapter_names`, PEFT computes the KV with the named adapters instead of the active adapter."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model("llama"), lora, "one").eval()
    model.add_adapter("two", lora)
    model.eval()
    with open_prefix(model) as prefix:
        for name in ("one", "two"):
            with pytest.raises(ArgumentError, match="adapter_names"):
                prefix.generate(IDS, max_new_tokens=2, do_sample=False, adapter_names=[name])
        expected = greedy(model, {"input_ids": IDS})
        assert torch.equal(prefix.generate(IDS, max_new_tokens=8, do_sample=False), expected)
        with pytest.raises(ArgumentError, match="adapter_names"):
            model.generate(input_ids=IDS, past_key_values=prefix.begin(IDS), max_new_tokens=2, adapter_names=["two"])
        assert torch.equal(greedy(model, {"input_ids": IDS}), expected)  # PEFT's hooks do not outlive the error
        assert torch.equal(prefix.generate(IDS, max_new_tokens=8, do_sample=False), expected)


# ---- stores and limits ---------------------------------------------------------------------------------------------

RESTARTED = """
import sys, torch
from kvtier.integrations.transformers import PrefixCache
from transformers_models import greedy, make_model, prompt
model, ids = make_model(sys.argv[1]), prompt(30)
with PrefixCache(model, sys.argv[2], host_bytes="4MiB", block_tokens=4) as prefix:
    cache = prefix.begin(ids)
    print(cache.hit_tokens[0], greedy(model, {"input_ids": ids}, past_key_values=cache)[0].tolist())
"""


def test_prefix_cache_is_read_from_disk_by_other_process(tmp_path):
    """A second process finds the blocks that the first process stored, and returns the same answer."""
    printed = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", RESTARTED, "gemma3", disk(tmp_path)]
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split(maxsplit=1))
    assert [each[0] for each in printed] == ["0", "28"]
    assert printed[0][1] == printed[1][1]


def test_begin_with_damaged_blocks_has_a_shorter_hit(tmp_path):
    """Flipped bytes on disk shorten the hit, but do not change the answer."""
    model = shared_model("llama")
    save(model, tmp_path)
    for path in Path(tmp_path).glob("**/*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for at in range(5 * 4096, len(data), 5 * 4096):  # one byte in every fifth page
                data[at] ^= 0xFF
            path.write_bytes(data)
    with open_prefix(model, disk(tmp_path)) as prefix:
        cache = prefix.begin(IDS)
        assert cache.hit_tokens[0] < 28
        assert torch.equal(greedy(model, {"input_ids": IDS}, past_key_values=cache), greedy(model, {"input_ids": IDS}))


def test_prefix_cache_stays_within_memory_limits(tmp_path):
    """Run 300 prompts of 7 blocks with 64 host blocks. After 100 prompts, the process must grow by less than 16 MiB."""
    model = shared_model("llama")
    process = psutil.Process()
    with open_prefix(model, disk(tmp_path), host_bytes=64 * SLOT_BYTES) as prefix:
        assert prefix.stats.tiers[0].num_blocks == 64
        for seed in range(100):
            prefix.generate(prompt(30, seed), max_new_tokens=1)
        before = process.memory_info().rss
        for seed in range(100, 300):
            prefix.generate(prompt(30, seed), max_new_tokens=1)
            assert prefix.stats.tiers[0].num_used <= 64
        assert process.memory_info().rss - before < 16 << 20
        assert not prefix._recorded  # freed caches leave no records
        assert prefix.begin(prompt(30, 150)).hit_tokens == (28,)  # from disk


def test_begin_of_prompt_larger_than_host_hits_partly():
    model = shared_model("llama")
    with open_prefix(model, host_bytes=4 * SLOT_BYTES) as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        cache = prefix.begin(IDS)
        assert cache.hit_tokens == (16,)
        assert torch.equal(greedy(model, {"input_ids": IDS}, past_key_values=cache), greedy(model, {"input_ids": IDS}))


def test_prefix_cache_with_small_staging_loads_in_parts(tmp_path):
    model = shared_model("gemma3")
    with open_prefix(model, disk(tmp_path), staging_bytes=1) as prefix:
        prefix.generate(IDS, max_new_tokens=1)
        cache = prefix.begin(IDS)
        assert cache.hit_tokens == (28,)
        assert torch.equal(greedy(model, {"input_ids": IDS}, past_key_values=cache), greedy(model, {"input_ids": IDS}))


def test_prefix_cache_stats_count_tokens_by_tier(tmp_path):
    model = shared_model("llama")
    save(model, tmp_path)
    with open_prefix(model, disk(tmp_path)) as prefix:
        prefix.begin(IDS)
        prefix.begin(IDS)
        assert {tier.name: tier.hit_tokens for tier in prefix.stats.tiers} == {"host": 28, "store": 28}


def test_close_removes_hooks_and_closes_store(tmp_path):
    model = make_model("llama")
    prefix = open_prefix(model, disk(tmp_path))
    cache = prefix.begin(IDS)
    prefix.close()
    prefix.close()
    greedy(model, {"input_ids": IDS}, past_key_values=cache)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(ClosedError):
        prefix.begin(IDS)
    open_store(disk(tmp_path)).close()


def test_prefix_cache_of_invalid_size_is_refused(tmp_path):
    model = shared_model("llama")
    with pytest.raises(ArgumentError, match="raise host_bytes"):
        open_prefix(model, host_bytes=100)
    with pytest.raises(ArgumentError, match="16GiB"):
        open_prefix(model, host_bytes="much")
    with pytest.raises(ArgumentError, match="block_tokens=0"):
        open_prefix(model, block_tokens=0)
    with open_prefix(model, f"disk:{tmp_path}/new"):  # valid: a disk store without a size may use 20 GiB
        assert (tmp_path / "new").is_dir()
