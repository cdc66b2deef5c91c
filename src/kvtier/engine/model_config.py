"""The configuration of a model of the Llama family, from a Hugging Face config.json or GGUF metadata.

Unsupported settings that would change the result raise CheckpointError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import CheckpointError

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_ROPE_KINDS = ("default", "linear", "llama3")
_WINDOW = "uses attention with a sliding window of {} tokens; kvtier supports full attention only"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, with two context extensions that change only the frequencies: linear and llama3."""

    theta: float = 10000.0
    kind: str = "default"
    """default; linear, which divides all frequencies by `factor`; or llama3, which divides low frequencies by `factor`,
    medium frequencies by less, and high frequencies not at all."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192  # context length before the extension; only for llama3

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the rotation angle per position for each pair of elements of a head: [head_dim / 2], float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        base = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return base / self.factor
        if self.kind != "llama3":
            return base
        wavelength = 2 * math.pi / base
        smooth = self.original_positions / wavelength - self.low_freq_factor
        smooth = (smooth / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        between = (1 - smooth) * base / self.factor + smooth * base
        long = wavelength > self.original_positions / self.low_freq_factor
        short = wavelength < self.original_positions / self.high_freq_factor
        return torch.where(long, base / self.factor, torch.where(short, base, between))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str  # llama, qwen2 or qwen3
    num_layers: int
    hidden_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    attention_bias: bool = False
    """True if q, k, v and the attention output have biases. Ignored for qwen2, where only q, k and v have biases."""
    tied_embeddings: bool = False
    """True if the embedding matrix also computes the logits."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = {each.name: getattr(self, each.name) for each in fields(self) if each.type == "int"}
        wrong = [f"{name} = {value!r}" for name, value in sizes.items() if not isinstance(value, int) or value < 1]
        if wrong:
            raise CheckpointError(f"the sizes of a model must be positive integers, got {', '.join(wrong)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly: "
                "num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; it must be even for the rotary embedding")
        outside = [each for each in self.eos_token_ids if not 0 <= each < self.vocab_size]
        if outside:
            raise CheckpointError(
                f"end-of-text token {outside[0]} is outside the vocabulary of {self.vocab_size} tokens; check "
                "eos_token_id in config.json and generation_config.json"
            )

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.architecture == "qwen2"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.architecture != "qwen2"

    @property
    def qk_norm(self) -> bool:
        """True if each head of q and k is normalized before the rotation."""
        return self.architecture == "qwen3"

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json, and end-of-text ids from generation_config.json if that file exists."""
        config = cls.from_hf(_read_json(folder / "config.json"))
        generation = folder / "generation_config.json"
        eos = _token_ids(_read_json(generation).get("eos_token_id")) if generation.exists() else ()
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *eos))))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Convert the contents of a Hugging Face config.json."""
        names = config.get("architectures") or []
        architecture = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
        if architecture is None:
            raise CheckpointError(
                f"the checkpoint is a {', '.join(names) or 'model without a named architecture'}; "
                f"kvtier runs {', '.join(_ARCHITECTURES)}"
            )
        _refuse_unsupported(config)
        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        return cls(
            architecture=architecture,
            num_layers=_required(config, "num_hidden_layers"),
            hidden_dim=hidden,
            ffn_dim=_required(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=_required(config, "vocab_size"),
            max_positions=config.get("max_position_embeddings") or 2048,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=_rope_of(config),
            attention_bias=bool(config.get("attention_bias")),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, tied_embeddings: bool) -> ModelConfig:
        """Convert the metadata of a GGUF file. `tied_embeddings` is not part of the metadata."""
        name = str(metadata.get("general.architecture"))
        if name not in _ARCHITECTURES.values():
            raise CheckpointError(
                f"the GGUF model has architecture {name!r}; kvtier runs {', '.join(_ARCHITECTURES.values())}"
            )
        values = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
        heads = _required(values, "attention.head_count")
        hidden = _required(values, "embedding_length")
        head_dim = values.get("attention.key_length") or hidden // heads
        _refuse_unsupported_gguf(values, head_dim)
        return cls(
            architecture=name,
            num_layers=_required(values, "block_count"),
            hidden_dim=hidden,
            ffn_dim=_required(values, "feed_forward_length"),
            num_heads=heads,
            num_kv_heads=values.get("attention.head_count_kv") or heads,
            head_dim=head_dim,
            vocab_size=values.get("vocab_size") or len(_required(metadata, "tokenizer.ggml.tokens")),
            max_positions=_required(values, "context_length"),
            norm_eps=_required(values, "attention.layer_norm_rms_epsilon"),
            rope=RopeConfig(
                theta=values.get("rope.freq_base", 10000.0),
                kind="linear" if values.get("rope.scaling.type") == "linear" else "default",
                factor=values.get("rope.scaling.factor", 1.0),
            ),
            tied_embeddings=tied_embeddings,
            eos_token_ids=_token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("use_sliding_window", config.get("sliding_window") is not None):
        raise CheckpointError(f"the checkpoint {_WINDOW.format(config.get('sliding_window'))}")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"the feed-forward activation is {config['hidden_act']!r}; kvtier supports silu only")
    if config.get("mlp_bias"):
        raise CheckpointError("the feed-forward matrices have biases (mlp_bias), which kvtier does not support")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor is {config['partial_rotary_factor']}; kvtier supports 1.0 only (whole heads)"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"the safetensors are quantized ({method}); use a folder with unquantized weights, or a GGUF file"
        )


def _refuse_unsupported_gguf(values: Mapping[str, Any], head_dim: int) -> None:
    if values.get("attention.sliding_window"):
        raise CheckpointError(f"the GGUF model {_WINDOW.format(values['attention.sliding_window'])}")
    if values.get("expert_count"):
        raise CheckpointError(f"the GGUF model has {values['expert_count']} experts; kvtier supports dense models only")
    rotated = values.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"rope.dimension_count is {rotated}; kvtier requires the size of a head, {head_dim}")
    kind = values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise CheckpointError(f"rope scaling of type {kind!r} is not supported; supported types: none, linear")


def _rope_of(config: Mapping[str, Any]) -> RopeConfig:
    """Read rope_parameters (transformers 5) or rope_theta and rope_scaling (earlier versions)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"rope scaling of type {kind!r} is not supported; supported types: {', '.join(_ROPE_KINDS)}"
        )
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(_required(rope, "factor")))
    low, high = (float(_required(rope, f"{name}_freq_factor")) for name in ("low", "high"))
    positions = int(_required(rope, "original_max_position_embeddings"))
    return RopeConfig(theta, kind, float(_required(rope, "factor")), low, high, positions)


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise CheckpointError(f"the configuration of the model has no {key!r}, which is required")
    return values[key]


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; a Hugging Face model folder must contain this file") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
