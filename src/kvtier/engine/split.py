"""Split the weights of a model into shares for tensor-parallel ranks.

qkv, gate_up             split by rows: each rank has some of the heads and some of the feed-forward features
output, down             split by columns, for the same heads and features; all_reduce adds the ranks' partial results
embedding, norms, head   not split; only rank 0 has the head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from kvtier.engine.model_config import ModelConfig
from kvtier.engine.weights import LayerWeights, Linear, ModelWeights
from kvtier.errors import ArgumentError


def split_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the configuration of one rank's share. Raise ArgumentError if equal shares are impossible."""
    names = {"num_heads": "attention heads", "num_kv_heads": "KV heads", "ffn_dim": "feed-forward features"}
    for name, words in names.items():
        if getattr(config, name) % num_ranks:
            raise ArgumentError(
                f"tensor_parallel={num_ranks}: the model's {getattr(config, name)} {words} cannot be split "
                f"equally; choose a number of ranks that divides {config.num_heads} attention heads, "
                f"{config.num_kv_heads} KV heads and {config.ffn_dim} feed-forward features"
            )
    return replace(config, **{name: getattr(config, name) // num_ranks for name in names})


def split_weights(config: ModelConfig, weights: ModelWeights, rank: int, num_ranks: int) -> ModelWeights:
    """Return the weights of one rank. `config` describes the whole model."""
    layers = tuple(split_layer(config, layer, rank, num_ranks) for layer in weights.layers)
    return replace(without_layers(weights, rank), layers=layers)


def without_layers(weights: ModelWeights, rank: int) -> ModelWeights:
    """Return the weights of a rank except its layers. Only rank 0 has a head, because only rank 0 computes logits."""
    return replace(weights, layers=(), head=weights.head if rank == 0 else Linear(weights.embedding[:0]))


def split_layer(config: ModelConfig, layer: LayerWeights, rank: int, num_ranks: int) -> LayerWeights:
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return replace(
        layer,
        qkv=_rows(layer.qkv, [q_dim, kv_dim, kv_dim], rank, num_ranks),
        output=_columns(layer.output, rank, num_ranks),
        gate_up=_rows(layer.gate_up, [config.ffn_dim] * 2, rank, num_ranks),
        down=_columns(layer.down, rank, num_ranks),
    )


Weights = TypeVar("Weights", ModelWeights, LayerWeights, Linear)


def with_tensors(weights: Weights, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    """Apply `change`, for example a copy, to every tensor. Return the new weights. `Linear.packed` is kept."""
    changed: dict[str, Any] = {}
    for each in fields(weights):
        value = getattr(weights, each.name)
        if isinstance(value, torch.Tensor):
            changed[each.name] = change(value)
        elif isinstance(value, Linear):
            changed[each.name] = with_tensors(value, change)
        elif isinstance(value, tuple):
            changed[each.name] = tuple(with_tensors(one, change) for one in value)
    return replace(weights, **changed)


def _rows(whole: Linear, heights: list[int], rank: int, num_ranks: int) -> Linear:
    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.chunk(num_ranks)[rank] for part in tensor.split(heights)])

    return Linear(mine(whole.weight), None if whole.bias is None else mine(whole.bias))


def _columns(whole: Linear, rank: int, num_ranks: int) -> Linear:
    """Split a matrix by columns. Only rank 0 adds the bias."""
    return Linear(whole.weight.chunk(num_ranks, dim=1)[rank].contiguous(), whole.bias if rank == 0 else None)
