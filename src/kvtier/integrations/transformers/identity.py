"""Identity of a model's KV, and checks that the KV can be cached. Models with equal identities share blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtier.errors import ArgumentError
from kvtier.fingerprint import update_digest
from kvtier.index import Namespace
from kvtier.layout import CacheGroup, KVLayout, LayerSpec, TensorSpec
from kvtier.memory.torch_types import from_torch

# Settings in a model's configuration that do not change the KV.
_UNRELATED = ("_name_or_path", "transformers_version", "architectures", "use_cache")
_PROBE_ELEMENTS = 4  # sampled elements per tensor


def base_model_of(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model`, which may be a PEFT model or a compiled model.

    Raise ArgumentError if the model's KV cannot be cached.
    """
    model = getattr(model, "_orig_mod", model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ArgumentError(f"PrefixCache needs a PreTrainedModel of transformers, got {type(model).__name__}")
    name = type(base).__name__
    if base.config.is_encoder_decoder or not base.can_generate():
        raise ArgumentError(f"{name} is not a decoder that generates text; only the KV of decoders can be cached")
    supports_dynamic_cache: Any = base._supports_default_dynamic_cache
    if not supports_dynamic_cache():
        raise ArgumentError(f"{name} does not use a DynamicCache; its state cannot be divided into blocks of tokens")
    for kind in _rope_types(base):
        if "dynamic" in kind or kind == "longrope":
            raise ArgumentError(
                f"{name} uses the rope scaling {kind!r}: the keys of a prefix depend on the length of the whole text, "
                f"so they cannot be reused; use another rope_type, such as yarn or llama3"
            )
    devices = {parameter.device for parameter in base.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ArgumentError(f"{name} is on {len(devices)} devices {sorted(map(str, devices))}; put it on one device")
    return base


def _rope_types(model: PreTrainedModel) -> Iterator[str]:
    """Yield the rope types of all rotary modules. A module for several kinds of layers has a dict of rope types."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        yield from kind.values() if isinstance(kind, dict) else [kind] if isinstance(kind, str) else []


def layout_of_model(model: PreTrainedModel, block_tokens: int) -> KVLayout:
    """Return the layout of a model's KV.

    The model computes one token to find the layout, because not every configuration describes it. All layers are in one
    group. Blocks contain every token even for sliding-window layers, so that a cache can be filled with a prefix of any
    length.
    """
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, attention_mask=torch.ones_like(token), past_key_values=cache, use_cache=True)
    held: list[Any] = cache.layers
    layers = []
    for number, layer in enumerate(held):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.is_initialized:
            raise ArgumentError(
                f"{type(model).__name__} keeps a {type(layer).__name__} for layer {number}; only layers with keys and "
                f"values of every token can be divided into blocks"
            )
        parts = [("key", layer.keys), ("value", layer.values)]
        layers.append(LayerSpec(tuple(_spec(name, tensor, block_tokens) for name, tensor in parts)))
    return KVLayout(block_tokens, (CacheGroup("main", tuple(layers)),))


def _spec(name: str, states: torch.Tensor, block_tokens: int) -> TensorSpec:
    _, num_heads, _, size = states.shape
    return TensorSpec(name, from_torch(states.dtype), (num_heads, block_tokens, size), head_axis=0)


def namespace_of_model(model: PreTrainedModel, layout: KVLayout) -> Namespace:
    """Return a model's namespace. It covers the configuration, weights, attention implementation and layout."""
    described = json.dumps([_settings(model), layout.describe()], sort_keys=True, default=str)
    weights = hashlib.sha256()
    for name, tensor in _base_tensors(model):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        update_digest(weights, [tensor])
    commit = getattr(model.config, "_commit_hash", None) or ""
    return Namespace(
        type(model).__name__,
        f"{commit} {weights.hexdigest()}",
        str(model.dtype),
        f"transformers {model.config._attn_implementation} {hashlib.sha256(described.encode()).hexdigest()}",
        layout.block_tokens,
    )


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    return {name: value for name, value in model.config.to_dict().items() if name not in _UNRELATED}


def model_state(model: PreTrainedModel) -> tuple[object, ...]:
    """Return a value that differs after a change of the model, except for some changes through `.data`.

    It contains the configuration, the attention implementation, and the address and version of each tensor. It also
    contains a few sampled elements of each floating-point tensor. A change in place through `.data` does not change the
    version. Such a change is detected only if it affects a sampled element.
    """
    samples = []
    state: list[object] = [model.config._attn_implementation, repr(_settings(model))]
    for name, tensor in _base_tensors(model):
        state.append((name, tensor.data_ptr(), tensor._version))
        flat = tensor.detach().reshape(-1)
        if flat.is_floating_point():
            samples.append(flat[:: max(1, len(flat) // _PROBE_ELEMENTS)][:_PROBE_ELEMENTS].float())
    digest = hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).digest() if samples else b""
    return (*state, digest)


def adapter_of(model: PreTrainedModel) -> bytes:
    """Return a digest of the active, unmerged PEFT adapters: names, scales and sampled weights. Empty if none."""
    digest, is_active = hashlib.sha256(), False
    for name, layer in adapter_layers(model):
        active = (
            []
            if layer.disable_adapters
            else [each for each in layer.active_adapters if each not in layer.merged_adapters]
        )
        for adapter in active:
            weights = list(_adapter_weights(layer, adapter))
            if weights:
                is_active = True
                scale = getattr(layer, "scaling", {}).get(adapter)
                digest.update(f"{name} {type(layer).__name__} {adapter} {scale}\0".encode())
                update_digest(digest, weights)
    return digest.digest() if is_active else b""


def remove_row_adapters(layers: Sequence[torch.nn.Module]) -> bool:
    """Remove PEFT's hooks that pass `adapter_names` or `alora_offsets` to the layers. Return True if there were any.

    PEFT itself keeps these hooks after an error, and all later calls of the model would use them.
    """
    found = [
        (layer, key)
        for layer in layers
        for key, hook in layer._forward_pre_hooks.items()
        if isinstance(hook, partial) and hook.keywords.keys() & {"adapter_names", "alora_offsets"}
    ]
    for layer, key in found:
        del layer._forward_pre_hooks[key]
        layer._forward_pre_hooks_with_kwargs.pop(key, None)
    return bool(found)


def adapter_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "adapter_layer_names"):
            yield name, module


def _adapter_weights(layer: Any, adapter: str) -> Iterable[torch.Tensor]:
    for attribute in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
        held = getattr(layer, attribute, None)
        own = (
            held[adapter]
            if isinstance(held, torch.nn.ModuleDict | torch.nn.ParameterDict) and adapter in held
            else None
        )
        if isinstance(own, torch.nn.Module):
            yield from own.parameters()
        elif isinstance(own, torch.Tensor):
            yield own


def _base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the base model. Their names are the same with and without adapters."""
    inside = tuple(f"{name}.{part}." for name, layer in adapter_layers(model) for part in layer.adapter_layer_names)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not inside or not name.startswith(inside):
            yield name.replace(".base_layer.", "."), tensor
