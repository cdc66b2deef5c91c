"""Namespace of vLLM's KV: engines share blocks only if their KV has the same meaning and the same byte layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvtier.errors import ArgumentError
from kvtier.fingerprint import files_digest
from kvtier.index import Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.layout import CacheGroup, KVLayout, LayerSpec, TensorSpec

# Keys of a Hugging Face configuration that do not change the KV.
_UNRELATED = ("_name_or_path", "transformers_version", "_commit_hash", "architectures")


def namespace_of(
    config: ConnectorConfig, vllm_config: Any, group: CacheGroup, num_shards: int, page_format: str
) -> Namespace:
    """Return the namespace of a cache group. It is the same on all ranks and in all engines that share blocks.

    `num_shards` is the number of ranks, or 1 if every rank holds all data. `page_format` describes the format of
    one layer of a block, such as attention backend and layout. Raise ArgumentError if a store is persistent and the
    revision of the weights is unknown.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    revision = config.revision or _revision_of(vllm_config)
    persistent = [store.url.split("?")[0] for store in config.stores if store.is_persistent]
    if not revision and persistent:
        raise ArgumentError(
            f"the revision of the weights of {model.model} is unknown, and {', '.join(persistent)} keeps blocks after "
            f"this process ends: set `revision` in kv_connector_extra_config, and change it whenever the weights change"
        )
    block_tokens = cache.block_size
    whole = KVLayout(block_tokens, (_of_all_ranks(group, num_shards),))
    described = hashlib.sha256(json.dumps(whole.describe()).encode()).hexdigest()
    settings = [model.dtype, model.quantization, cache.cache_dtype, _config_digest(model.hf_config)]
    return Namespace(
        " ".join(getattr(model.hf_config, "architectures", None) or [str(model.model)]),
        revision or "unknown",
        " ".join(map(str, settings)),
        f"vllm {page_format} {described}",
        block_tokens,
    )


def _of_all_ranks(group: CacheGroup, num_shards: int) -> CacheGroup:
    """Extend a rank's cache group to the heads of all ranks. The namespace then does not depend on the rank count."""

    def whole(spec: TensorSpec) -> TensorSpec:
        axis = spec.head_axis
        if axis is None:
            return spec
        shape = (*spec.shape[:axis], spec.shape[axis] * num_shards, *spec.shape[axis + 1 :])
        return TensorSpec(spec.name, spec.dtype, shape, head_axis=axis)

    return CacheGroup(group.name, tuple(LayerSpec(tuple(map(whole, layer.tensors))) for layer in group.layers))


def _revision_of(vllm_config: Any) -> str:
    """Return a digest of local model files, or name@commit of a hub model; empty if unknown or for dummy weights."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) in ("dummy", "LoadFormat.DUMMY"):
        return ""
    folder = Path(str(model.model))
    if folder.exists():
        return files_digest(folder).hex()
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"{model.model}@{commit}" if commit else ""


def _config_digest(hf_config: Any) -> str:
    settings = {name: value for name, value in hf_config.to_dict().items() if name not in _UNRELATED}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
