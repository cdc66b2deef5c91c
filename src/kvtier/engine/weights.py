"""Model weights, and their assembly from a checkpoint.

A checkpoint is a `TensorSource`, which finds tensors by their Hugging Face names. `Assembler` reads each tensor, checks
its shape against the configuration, and fuses two groups of matrices: (q, k, v) and (gate, up).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from kvtier.engine.model_config import ModelConfig
from kvtier.engine.native import PackedWeight, native, pack
from kvtier.engine.packaged import optional_package
from kvtier.errors import CheckpointError, UnavailableError


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None
    packed: PackedWeight | None = None
    """The same matrix in fewer bytes, for CpuOps. Faster for few tokens, because memory bandwidth limits such steps."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, on one device. All tensors except `inverse_frequencies` have the same dtype."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    inverse_frequencies: torch.Tensor  # of the rotary embedding, [head_dim / 2] float32

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def arithmetic(self) -> str:
        """The dtype, and whether products round their input. Models with different arithmetic never share KV."""
        products = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        is_integer = any(each.packed is not None and each.packed.is_integer for each in products)
        return f"{self.dtype}{' with integer products' if is_integer else ''}"


class Products(StrEnum):
    """How the CPU multiplies by quantised matrices. INTEGER applies only to steps of up to native.MAX_TOKENS tokens."""

    EXACT = "exact"
    """In float32, with the dequantised values."""
    INTEGER = "integer"
    """With integer instructions. Each element of the input is rounded to 15 bits, with one scale per 32 columns."""


RawMatrix = tuple[str, torch.Tensor]
"""Stored type and data of a matrix: ("BF16", [rows, columns]), or bytes of a GGUF type: ("Q4_1", [rows, bytes])."""


class TensorSource(Protocol):
    """Finds tensors by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight").

    `read_into` converts a tensor to the dtype of `out`. `raw` returns a matrix in its stored type, or None if `pack`
    does not accept that type. `inverse_frequencies` returns the frequencies of the rotary embedding, scaled if the
    checkpoint contains scaling factors.
    """

    def __contains__(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def raw(self, name: str) -> RawMatrix | None: ...
    def read_into(self, name: str, out: torch.Tensor) -> None: ...
    def inverse_frequencies(self, config: ModelConfig) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Assembler:
    """Reads and fuses all weights. A missing tensor or a wrong shape raises CheckpointError."""

    config: ModelConfig
    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    products: Products = Products.EXACT

    def model(self) -> ModelWeights:
        """Read all weights. Raise UnavailableError if integer products were chosen and no matrix supports them."""
        config = self.config
        names = ["model.embed_tokens.weight"]
        embedding = self._joined(names, [config.vocab_size], config.hidden_dim)
        if config.tied_embeddings:
            head = Linear(embedding, packed=self._packed(names))
        else:
            head = self._linear(["lm_head"], [config.vocab_size], config.hidden_dim, bias=False)
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            norm=self._joined(["model.norm.weight"], [config.hidden_dim]),
            head=head,
            inverse_frequencies=self.source.inverse_frequencies(config).to(self.device),
        )
        if self.products is Products.INTEGER and weights.arithmetic == str(weights.dtype):
            reason = native().reason if native().code is None else "no matrix is stored as Q8_0, Q4_0 or Q4_1"
            raise UnavailableError(
                f"integer products need a quantised GGUF file, the CPU, f32 and native code, but the model has dtype "
                f"{weights.dtype} on {weights.device}, and {reason}; use exact products"
            )
        return weights

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, attention = config.hidden_dim, f"{prefix}self_attn."
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{attention}{part}_proj" for part in "qkv"]
        norms = [f"{attention}{part}_norm.weight" for part in "qk"]
        q_norm, k_norm = (self._joined([name], [config.head_dim]) if config.qk_norm else None for name in norms)
        return LayerWeights(
            input_norm=self._joined([f"{prefix}input_layernorm.weight"], [hidden]),
            qkv=self._linear(names, [q_dim, kv_dim, kv_dim], hidden, bias=config.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._linear([f"{attention}o_proj"], [hidden], q_dim, bias=config.output_bias),
            post_norm=self._joined([f"{prefix}post_attention_layernorm.weight"], [hidden]),
            gate_up=self._linear(
                [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], [config.ffn_dim] * 2, hidden, bias=False
            ),
            down=self._linear([f"{prefix}mlp.down_proj"], [hidden], config.ffn_dim, bias=False),
        )

    def _linear(self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> Linear:
        weights = [f"{name}.weight" for name in names]
        weight = self._joined(weights, rows, columns)
        biases = self._joined([f"{name}.bias" for name in names], rows) if bias else None
        return Linear(weight, biases, self._packed(weights))

    def _joined(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        """Stack tensors by rows. Each tensor is read directly into its rows of the result."""
        out = torch.empty(sum(rows), *columns, dtype=self.dtype, device=self.device)
        for name, part, height in zip(names, out.split(list(rows)), rows, strict=True):
            if name not in self.source:
                raise CheckpointError(
                    f"the checkpoint has no tensor {name!r}, which a {self.config.architecture} model with "
                    f"{self.config.num_layers} layers needs; files are missing, or the configuration is wrong"
                )
            shape, wanted = self.source.shape(name), (height, *columns)
            if shape != wanted:
                raise CheckpointError(
                    f"{name} has shape {list(shape)}, but the configuration requires {list(wanted)}; "
                    "weights and configuration belong to different models"
                )
            self.source.read_into(name, part)
        return out

    def _packed(self, names: Sequence[str]) -> PackedWeight | None:
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return None
        stored = [raw for name in names if (raw := self.source.raw(name)) is not None]
        kinds = {kind for kind, _ in stored}
        if len(stored) != len(names) or len(kinds) != 1:
            return None
        integer = self.products is Products.INTEGER
        return pack(kinds.pop(), torch.cat([rows for _, rows in stored]), integer=integer)


class SafetensorsFolder:
    """A Hugging Face folder. Tensors are in model.safetensors, or in shards that an index file lists."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.from_folder(folder)
        safetensors = optional_package("safetensors", "reading safetensors")
        self._file_of: dict[str, Any] = {}
        for path in _shards(folder):
            try:
                file = safetensors.safe_open(str(path), framework="pt")
            except Exception as error:  # the Rust extension raises OSError or an error class of its own
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def raw(self, name: str) -> RawMatrix | None:
        """Return a matrix stored as bf16, or None for other types. bf16 takes half the bytes of float32."""
        stored = self._file_of[name].get_tensor(name)
        return ("BF16", stored) if stored.dtype == torch.bfloat16 and stored.ndim == 2 else None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._file_of[name].get_tensor(name))

    def inverse_frequencies(self, config: ModelConfig) -> torch.Tensor:
        return config.rope.inverse_frequencies(config.head_dim)


def _shards(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; kvtier reads no pickled "
                "weights (pytorch_model.bin): save the model with safetensors"
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors shards: {error!r}") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(names)} shards that {index} lists are missing: {', '.join(missing)}; "
            "the download is incomplete"
        )
    return [folder / name for name in names]
