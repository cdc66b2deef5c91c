"""Random weights of a given shape, for benchmarks and tests that need no downloaded model."""

from __future__ import annotations

import torch

from kvtier.engine.model_config import ModelConfig
from kvtier.engine.weights import LayerWeights, Linear, ModelWeights


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Return matrices of small normal numbers and norms of one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(0.0, columns**-0.5, generator=generator)

    def linear(rows: int, columns: int, *, bias: bool = False) -> Linear:
        return Linear(matrix(rows, columns), ones(rows) if bias else None)

    def ones(length: int) -> torch.Tensor:
        return torch.ones(length, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        hidden, q_dim = config.hidden_dim, config.num_heads * config.head_dim
        return LayerWeights(
            input_norm=ones(hidden),
            qkv=linear(q_dim + 2 * config.num_kv_heads * config.head_dim, hidden, bias=config.qkv_bias),
            q_norm=ones(config.head_dim) if config.qk_norm else None,
            k_norm=ones(config.head_dim) if config.qk_norm else None,
            output=linear(hidden, q_dim, bias=config.output_bias),
            post_norm=ones(hidden),
            gate_up=linear(2 * config.ffn_dim, hidden),
            down=linear(hidden, config.ffn_dim),
        )

    embedding = matrix(config.vocab_size, config.hidden_dim)
    head = Linear(embedding) if config.tied_embeddings else linear(config.vocab_size, config.hidden_dim)
    layers = tuple(layer() for _ in range(config.num_layers))
    frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)
    return ModelWeights(embedding, layers, ones(config.hidden_dim), head, frequencies)
