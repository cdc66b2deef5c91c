"""The six operations a forward pass is made of. One implementation per way of computing; the model knows none of them.

TorchOps       plain torch, any device: what the others are tested against
CpuOps         the CPU: scaled_dot_product_attention, and native code for steps of a few tokens
InvariantOps   the CPU, float32: bits that do not depend on the rest of the batch (ops_invariant.py)
TritonOps      CUDA: fused kernels that can be captured in a graph (ops_triton.py)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear, silu

from kvtier.engine.attention import fast_paged_attention, paged_attention
from kvtier.engine.forward import ForwardBatch
from kvtier.engine.native import MAX_TOKENS, native
from kvtier.engine.weights import Linear


class Heads(NamedTuple):
    """The new tokens' queries, keys and values: views [tokens, heads, head_dim] into one tensor, qkv."""

    qkv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def split(cls, qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> Heads:
        """Cut [tokens, (num_heads + 2 num_kv_heads) * head_dim]."""
        parts = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k, v = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return cls(parts, q, k, v)


class Normed(NamedTuple):
    """What add_rms_norm returns."""

    normed: torch.Tensor
    residual: torch.Tensor


class Ops(Protocol):
    """How a model computes. Every tensor x is [tokens, features]."""

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """x @ w.weight.T + w.bias."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, in float32 (x may have more dimensions, and strides)."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
        """residual + x, and its norm. May write into `residual`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(left half) * right half."""
        ...

    def rotate_and_store(
        self, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """Rotate q and k in place, and put k and v where `batch.slots` says. cos, sin: [tokens, head_dim / 2]."""
        ...

    def attend(self, heads: Heads, cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attention of every new token over its sequence, whose keys and values are all stored: [tokens, q_dim]."""
        ...


class TorchOps:
    """Plain torch on any device."""

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """See Ops."""
        return linear(x, w.weight, w.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
        """See Ops."""
        residual = residual + x
        return Normed(self.rms_norm(residual, weight, eps), residual)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def rotate_and_store(
        self, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """See Ops."""
        for each in (heads.q, heads.k):
            rotate(each, cos, sin)
        store(heads, cache, batch.slots)

    def attend(self, heads: Heads, cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See Ops."""
        return paged_attention(heads.q, cache, batch).flatten(1)


class CpuOps:
    """The fast way on the CPU."""

    def __init__(self) -> None:
        self._plain = TorchOps()
        self._code = native().code

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """Few tokens wait for the weights' bytes: then the packed matrix, a quarter to a half of them, is read."""
        if self._code is None or w.packed is None or x.shape[0] > MAX_TOKENS:
            return linear(x, w.weight, w.bias)
        out = self._code.linear(x, w.packed)
        return out if w.bias is None else out.add_(w.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        if self._code is None or x.ndim != 2 or not self._code.takes(x):
            return self._plain.rms_norm(x, weight, eps)
        return self._code.norm(None, x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
        """See Ops."""
        if self._code is None or not self._code.takes(x) or not self._code.takes(residual):
            return self._plain.add_rms_norm(x, residual, weight, eps)
        return Normed(self._code.norm(x, residual, weight, eps), residual)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        if self._code is None or not self._code.takes(gate_up, 32):
            return self._plain.silu_mul(gate_up)
        return self._code.gate(gate_up)

    def rotate_and_store(
        self, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """See Ops."""
        if self._code is None or not self._code.takes(heads.qkv, 32):
            self._plain.rotate_and_store(heads, cos, sin, cache, batch)
        else:
            self._code.rotate(heads.qkv, cos, sin, cache, batch.slots)

    def attend(self, heads: Heads, cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See Ops."""
        return fast_paged_attention(heads.q, heads.k, heads.v, cache, batch, self._code).flatten(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn each pair (i, i + head_dim / 2) of every head by its token's angle, in place."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = left * cos - right * sin
    right.copy_(right * cos + left * sin)
    left.copy_(turned)


def store(heads: Heads, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the new keys and values to their slots of a layer's cache."""
    block_tokens = cache.shape[2]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    cache[:, 0].index_put_((blocks, offsets), heads.k)
    cache[:, 1].index_put_((blocks, offsets), heads.v)
