"""The Llama family on a paged, block-first cache.

    cache[block, layer, K or V, token in block, kv_head, head_dim]

A block is contiguous over all layers and can be copied in one piece. Attention reads a layer as a strided view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.ops import CpuOps, Heads, Ops, TorchOps
from kvtier.engine.weights import LayerWeights, ModelWeights
from kvtier.errors import ArgumentError

AllReduce = Callable[[Tensor], Tensor]


def default_ops(device: torch.device) -> Ops:
    """Return the fastest operations for a device."""
    if device.type == "cuda":
        from kvtier.engine.ops_triton import TritonOps

        return TritonOps()
    return CpuOps() if device.type == "cpu" else TorchOps()


class Model:
    """A decoder-only transformer. The caller owns the cache."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Ops | None = None, all_reduce: AllReduce | None = None
    ) -> None:
        """`all_reduce` sums a tensor over all ranks. Pass it if `weights` are the share of one rank (split.py)."""
        self.config = config
        self.weights = weights
        self.ops = default_ops(weights.device) if ops is None else ops
        self._all_reduce = all_reduce
        angles = torch.outer(torch.arange(config.max_positions, device=weights.device), weights.inverse_frequencies)
        self._cos, self._sin = angles.cos().to(weights.dtype), angles.sin().to(weights.dtype)

    def new_cache(self, num_blocks: int, block_tokens: int) -> Tensor:
        """Allocate a cache of zeros. Uninitialized memory may hold NaN, and masking does not remove a NaN."""
        config = self.config
        shape = (num_blocks, config.num_layers, 2, block_tokens, config.num_kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=self.weights.dtype, device=self.weights.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: Tensor, before_layer: Callable[[int], None] | None = None) -> Tensor:
        """Compute the new tokens and store their KV. Return the hidden states of the rows that need logits.

        `before_layer(index)` is called before a layer reads the cache, to wait for blocks that are being loaded.
        """
        self._check(batch, cache)
        ops, config = self.ops, self.config
        residual = self.weights.embedding[batch.input_ids]
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        normed = ops.rms_norm(residual, self.weights.layers[0].input_norm, config.norm_eps)
        following = [layer.input_norm for layer in self.weights.layers[1:]] + [self.weights.norm]
        steps = zip(self.weights.layers, following, cache.unbind(1), strict=True)
        for index, (layer, next_norm, layer_cache) in enumerate(steps):
            if before_layer is not None:
                before_layer(index)
            attended = self._attention(layer, normed, cos, sin, layer_cache, batch)
            if layer is self.weights.layers[-1]:  # after the last attention, only the rows that need logits are used
                attended, residual = attended[batch.logit_rows], residual[batch.logit_rows]
            if self._all_reduce is not None:
                attended = self._all_reduce(attended)
            normed, residual = ops.add_rms_norm(attended, residual, layer.post_norm, config.norm_eps)
            fed = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
            if self._all_reduce is not None:
                fed = self._all_reduce(fed)
            normed, residual = ops.add_rms_norm(fed, residual, next_norm, config.norm_eps)
        return normed

    def share_tokens(self, input_ids: Tensor, places: Sequence[int]) -> None:
        """Send `input_ids[places]` from rank 0 to the other ranks.

        Every rank must call this method. The other ranks must pass 0 at `places`, because all_reduce adds the values.
        """
        if places and self._all_reduce is not None:
            input_ids[places] = self._all_reduce(input_ids[places])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token for rows that `forward` returned: [rows, vocab], float32."""
        return self.ops.linear(hidden, self.weights.head).float()

    def _attention(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch
    ) -> Tensor:
        ops, config = self.ops, self.config
        heads = Heads.split(ops.linear(x, layer.qkv), config.num_heads, config.num_kv_heads)
        for each, norm in ((heads.q, layer.q_norm), (heads.k, layer.k_norm)):
            if norm is not None:
                each.copy_(ops.rms_norm(each, norm, config.norm_eps))
        ops.rotate_and_store(heads, cos, sin, cache, batch)
        return ops.linear(ops.attend(heads, cache, batch), layer.output)

    def _check(self, batch: ForwardBatch, cache: Tensor) -> None:
        config = self.config
        inner = (config.num_layers, 2, cache.shape[3], config.num_kv_heads, config.head_dim)
        if cache.shape[1:] != inner:
            raise ArgumentError(
                f"the cache has shape {list(cache.shape)}; this model needs [blocks, {config.num_layers}, 2, block "
                f"tokens, {config.num_kv_heads}, {config.head_dim}], see Model.new_cache"
            )
        longest = max(batch.contexts)
        if longest > config.max_positions:
            raise ArgumentError(
                f"a sequence would reach {longest} tokens; the model has {config.max_positions} positions"
            )
