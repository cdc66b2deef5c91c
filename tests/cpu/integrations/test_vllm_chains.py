"""Keys of vLLM requests depend on salt, LoRA files, media and prompt embeddings. Namespaces depend on the model."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvtier.errors import ArgumentError
from kvtier.fingerprint import files_digest
from kvtier.index import Namespace
from kvtier.integrations.vllm.chains import ChainBuilder
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.identity import namespace_of
from kvtier.layout import CacheGroup

BLOCK = 4
NAMESPACE = Namespace("model", block_tokens=BLOCK)


def request_of(tokens, *, salt=None, lora=None, media=(), embeds=None):
    return SimpleNamespace(
        all_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        cache_salt=salt,
        lora_request=lora,
        mm_features=list(media),
        prompt_embeds=embeds,
    )


def extra_keys(request, first, stop, item):
    """Return keys in the same form as vLLM's generate_block_hash_extra_keys."""
    keys = [("mm", digest, start - first) for start, digest in request.mm_features if first <= start < stop]
    if request.lora_request:
        keys.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    if request.cache_salt and first == 0:
        keys.append(("cache_salt", request.cache_salt))
    if request.prompt_embeds is not None:
        keys.append(("prompt_embeds", request.prompt_embeds[first:stop].tobytes()))
    return tuple(keys) or None, item


def keys_of(request, builder=None):
    chain = (builder or ChainBuilder(NAMESPACE, extra_keys)).build(request)
    return chain.key_list(0, chain.num_blocks)


def adapter(folder, content, name="lora"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def test_salt_separates_all_blocks_of_chains():
    assert set(keys_of(request_of(range(8), salt="a"))).isdisjoint(keys_of(request_of(range(8), salt="b")))


def test_media_changes_chain_keys_from_its_position_on():
    plain = keys_of(request_of(range(12)))
    cat = keys_of(request_of(range(12), media=[(5, "cat")]))
    dog = keys_of(request_of(range(12), media=[(5, "dog")]))
    shifted = keys_of(request_of(range(12), media=[(6, "cat")]))
    assert plain[0] == cat[0] == dog[0] == shifted[0]
    assert len({keys[1] for keys in (plain, cat, dog, shifted)}) == 4
    assert len({keys[2] for keys in (plain, cat, dog, shifted)}) == 4


def test_prompt_embeds_separate_chains_of_equal_tokens():
    one, other = np.zeros((8, 2), np.float32), np.ones((8, 2), np.float32)
    assert keys_of(request_of([0] * 8, embeds=one)) == keys_of(request_of([0] * 8, embeds=one.copy()))
    assert set(keys_of(request_of([0] * 8, embeds=one))).isdisjoint(keys_of(request_of([0] * 8, embeds=other)))


def test_lora_chain_depends_on_the_contents_of_lora_files(tmp_path):
    builder = ChainBuilder(NAMESPACE, extra_keys)
    first = keys_of(request_of(range(8), lora=adapter(tmp_path / "a", b"1" * 999)), builder)
    same = keys_of(request_of(range(8), lora=adapter(tmp_path / "b", b"1" * 999)), builder)
    assert first == same  # another path, but the same name and content
    changed = keys_of(request_of(range(8), lora=adapter(tmp_path / "a", b"2" * 999)), builder)
    assert set(first).isdisjoint(changed)
    renamed = keys_of(request_of(range(8), lora=adapter(tmp_path / "b", b"1" * 999, "other")), builder)
    assert set(first).isdisjoint(renamed)


def test_lora_without_files_shares_blocks_in_one_builder_only():
    lora = SimpleNamespace(lora_name="a", lora_path="hub/name")
    builder = ChainBuilder(NAMESPACE, extra_keys)
    assert keys_of(request_of(range(8), lora=lora), builder) == keys_of(request_of(range(8), lora=lora), builder)
    assert keys_of(request_of(range(8), lora=lora)) != keys_of(request_of(range(8), lora=lora), builder)


REQUESTS = st.builds(
    request_of,
    st.lists(st.integers(0, 1), min_size=8, max_size=8),
    salt=st.sampled_from([None, "a"]),
    media=st.sampled_from([[], [(5, "cat")], [(1, "cat")]]),
)


@given(REQUESTS, REQUESTS)
def test_chains_share_blocks_exactly_if_vllm_hashes_agree(one, other):
    """vLLM's hash of a block covers the hash of the parent block, and the tokens and extra keys of the block itself."""

    def hashes(request):
        blocks = range(0, 8, BLOCK)
        parts = [(tuple(request.all_token_ids[i : i + BLOCK]), extra_keys(request, i, i + BLOCK, 0)[0]) for i in blocks]
        return [tuple(parts[: number + 1]) for number in range(len(parts))]

    pairs = zip(hashes(one), hashes(other), keys_of(one), keys_of(other), strict=True)
    assert all((a == b) == (c == d) for a, b, c, d in pairs)


def test_files_digest_changes_with_any_sampled_part(tmp_path):
    weights = tmp_path / "model.safetensors"
    (tmp_path / "notes.txt").write_text("not part of the model")
    digests = set()
    for changed in (None, 0, 500_000, 999_999):
        content = bytearray(1_000_000)
        if changed is not None:
            content[max(0, changed - 20_000) : changed + 20_000] = b"\1" * len(
                content[max(0, changed - 20_000) : changed + 20_000]
            )
        weights.write_bytes(content)
        digests.add(files_digest(tmp_path))
    (tmp_path / "notes.txt").write_text("changed")
    assert len(digests) == 4
    assert files_digest(tmp_path) in digests


VECTORS = ("input_layernorm.weight", "self_attn.k_proj.bias", "self_attn.q_norm.weight", "self_attn.attn.k_scale")


def write_weights(path, changed=None):
    """Write a model with 4 layers of 2 MiB. If `changed` is given, add 1 to all elements of the tensor with this name.

    Return the digest of the folder and the tensors by name.
    """
    tensors = {}
    for layer in range(4):
        own = {"mlp.up_proj.weight": (512, 1024), "mlp.experts.up_proj_bias": (8, 25), **dict.fromkeys(VECTORS, (100,))}
        for part, shape in own.items():
            name = f"model.layers.{layer}.{part}"
            tensors[name] = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + (name == changed)
    save_file(tensors, path)
    return files_digest(path.parent), tensors


def test_files_digest_depends_on_every_vector_and_bias(tmp_path):
    """Models that differ in one vector or bias must not share KV.

    `files_digest` samples each file, and each vector and bias on its own, because the samples of a file miss most of
    them.
    """
    path = tmp_path / "model.safetensors"
    first, tensors = write_weights(path)
    digests = [write_weights(path, name)[0] for name in tensors]
    assert len({first, *digests}) == 1 + len(tensors)
    assert write_weights(path)[0] == first
    path.write_bytes(path.read_bytes()[:-1])
    assert files_digest(tmp_path) != first  # a file that safetensors cannot read has a digest too


class HfConfig(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


def config_of(model="hub/model", load_format="auto", **settings):
    hf_config = HfConfig(architectures=["LlamaForCausalLM"], rope_theta=1e4, **settings)
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, dtype="bf16", quantization=None, hf_config=hf_config),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
        load_config=SimpleNamespace(load_format=load_format),
    )


GROUP = CacheGroup.attention("main", 2, 4, 8, "bf16", 16)
DISK = ConnectorConfig.parse({"stores": ["disk:/var/kv?bytes=1GiB"]})


def test_namespace_of_unknown_revision_with_disk_raises():
    with pytest.raises(ArgumentError, match="set `revision` in kv_connector_extra_config"):
        namespace_of(DISK, config_of(), GROUP, 1, "cpu")
    assert namespace_of(ConnectorConfig(), config_of(), GROUP, 1, "cpu").revision == "unknown"


def test_namespace_of_dummy_weights_with_disk_raises(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    with pytest.raises(ArgumentError, match="revision"):
        namespace_of(DISK, config_of(str(tmp_path), "dummy"), GROUP, 1, "cpu")


def test_namespace_depends_on_weights_settings_and_layout(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    first = namespace_of(DISK, config_of(str(tmp_path)), GROUP, 1, "cpu")
    assert namespace_of(DISK, config_of(str(tmp_path)), GROUP, 1, "cpu") == first
    others = [
        namespace_of(DISK, config_of(str(tmp_path)), GROUP, 1, "cuda"),
        namespace_of(DISK, config_of(str(tmp_path), rope_scaling=2), GROUP, 1, "cpu"),
        namespace_of(DISK, config_of(str(tmp_path)), GROUP, 2, "cpu"),
    ]
    weights.write_bytes(b"2")
    others.append(namespace_of(DISK, config_of(str(tmp_path)), GROUP, 1, "cpu"))
    assert len({first.fingerprint, *(each.fingerprint for each in others)}) == 5


def test_namespace_is_equal_for_every_number_of_ranks():
    config = ConnectorConfig.parse({"revision": "1"})
    whole = namespace_of(config, config_of(), GROUP, 1, "cpu")
    assert namespace_of(config, config_of(), GROUP.of_rank(2), 2, "cpu") == whole


def test_namespace_revision_is_the_hub_commit():
    assert namespace_of(DISK, config_of(_commit_hash="abc"), GROUP, 1, "cpu").revision == "hub/model@abc"
