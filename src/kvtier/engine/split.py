"""A model's share for one of several tensor-parallel ranks.

qkv, gate_up   rows: the rank's heads, and its part of the feed-forward width
output, down   columns: what multiplies them; every rank has a sum of its own, and all of them are added up
the rest       whole: embedding, norms, head
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
    """The shape of each rank's share; an ArgumentError where it cannot be shared out equally."""
    names = {"num_heads": "attention heads", "num_kv_heads": "KV heads", "ffn_dim": "feed-forward features"}
    for name, words in names.items():
        if getattr(config, name) % num_ranks:
            raise ArgumentError(
                f"tensor_parallel={num_ranks}: the model's {getattr(config, name)} {words} cannot be shared out "
                f"equally; choose a number of ranks that divides {config.num_heads} attention heads, "
                f"{config.num_kv_heads} KV heads and {config.ffn_dim} feed-forward features"
            )
    return replace(config, **{name: getattr(config, name) // num_ranks for name in names})


def split_weights(config: ModelConfig, weights: ModelWeights, rank: int, num_ranks: int) -> ModelWeights:
    """One rank's weights; `config` is the whole model's."""
    layers = tuple(split_layer(config, layer, rank, num_ranks) for layer in weights.layers)
    return replace(without_layers(weights, rank), layers=layers)


def without_layers(weights: ModelWeights, rank: int) -> ModelWeights:
    """What a rank has beside its layers. The first makes the logits; the others have a head without rows."""
    return replace(weights, layers=(), head=weights.head if rank == 0 else Linear(weights.embedding[:0]))


def split_layer(config: ModelConfig, layer: LayerWeights, rank: int, num_ranks: int) -> LayerWeights:
    """One rank's part of a layer."""
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
    """The same with every tensor changed: moved, or copied. A packed matrix stays as it is."""
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
    """The rank's part of each of the matrices that lie one below the other."""

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.chunk(num_ranks)[rank] for part in tensor.split(heights)])

    return Linear(mine(whole.weight), None if whole.bias is None else mine(whole.bias))


def _columns(whole: Linear, rank: int, num_ranks: int) -> Linear:
    """The bias is added once, by the first rank."""
    return Linear(whole.weight.chunk(num_ranks, dim=1)[rank].contiguous(), whole.bias if rank == 0 else None)
