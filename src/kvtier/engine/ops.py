"""The operations of a forward pass. TorchOps and CpuOps are in this module.

TorchOps       any device: plain torch, the reference for the other classes
CpuOps         CPU: native code where it is supported and faster, otherwise torch
InvariantOps   CPU, float32: bit-identical results for a sequence in any batch (ops_invariant.py)
TritonOps      CUDA: fused kernels that can be captured in a graph (ops_triton.py)

The cache of a layer is [blocks, 2, block_tokens, kv_heads, head_dim], a strided view of the block-first device cache.
block_tokens precedes kv_heads, so that gathered blocks need no permutation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.native import EngineNative, native
from kvtier.engine.weights import Linear


def paged_attention(q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
    """Compute attention for q [tokens, heads, head_dim], one sequence at a time. Reference implementation."""
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[3]
    for rows, table, context in sequences_of(batch):
        blocks = cache[table[: -(-context // cache.shape[2])]]
        keys, values = blocks.transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys.float()) * q.shape[2] ** -0.5
        scores.masked_fill_(~_visible(rows, context, q.device), -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(q.dtype)
    return out


def fast_paged_attention(heads: Heads, cache: Tensor, batch: ForwardBatch, code: EngineNative | None) -> Tensor:
    """Compute attention on the CPU, with native code where it is supported and faster, otherwise with torch."""
    _, q, k, v = heads
    if q.dtype != torch.float32 or q.shape[2] % 16:
        code = None  # native code needs float32 and a head_dim that is a multiple of 16
    if code is not None and batch.is_decode:
        return code.attend(q, cache, batch.block_tables, batch.context_lens, max(batch.contexts))
    out = torch.empty(q.shape, dtype=q.dtype)
    if code is not None and 1 in batch.query_lens:
        _attend_singles(q, cache, batch, code, out)
    for rows, table, context in sequences_of(batch):
        count = rows.stop - rows.start
        if count == 1 and code is not None:
            continue
        if code is not None and (count < context or code.has_fast_long_inputs):
            code.attend_chunk(q[rows], cache, table, context, out[rows])
        elif count == context:
            out[rows] = _attend(q[rows], k[rows], v[rows])
        elif count == 1:
            out[rows] = _attend_one(q[rows], *_gathered(cache, table, context))
        else:
            out[rows] = _attend(q[rows], *_gathered(cache, table, context), _visible(rows, context, q.device))
    return out


def _attend_singles(q: Tensor, cache: Tensor, batch: ForwardBatch, code: EngineNative, out: Tensor) -> None:
    """Compute attention for those sequences of a batch that have one new token, with native code."""
    singles = [index for index, count in enumerate(batch.query_lens) if count == 1]
    chosen = torch.tensor(singles)
    rows = batch.query_starts[chosen].long()
    longest = max(batch.contexts[index] for index in singles)
    out[rows] = code.attend(q[rows], cache, batch.block_tables[chosen], batch.context_lens[chosen], longest)


def sequences_of(batch: ForwardBatch) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield the rows of new tokens, the block table and the context length of each sequence."""
    starts = itertools.accumulate(batch.query_lens, initial=0)
    for index, (start, count, context) in enumerate(zip(starts, batch.query_lens, batch.contexts, strict=False)):
        yield slice(start, start + count), batch.block_tables[index], context


def _visible(rows: slice, context: int, device: torch.device) -> Tensor:
    """Return the causal mask [queries, context]. A query sees the tokens up to its own position."""
    count = rows.stop - rows.start
    return torch.ones(count, context, dtype=torch.bool, device=device).tril(context - count)


def _gathered(cache: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence, [context, kv_heads, head_dim] each."""
    blocks = table[: -(-context // cache.shape[2])]
    keys, values = (cache[:, part].index_select(0, blocks).flatten(0, 1)[:context] for part in (0, 1))
    return keys, values


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute attention for q [queries, heads, dim] over k and v [context, kv_heads, dim]. No mask means causal."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    has_groups = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=has_groups)
    return out.squeeze(0).transpose(0, 1)


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention for one token, without a mask. Query heads that share a KV head become its queries."""
    grouped = q.view(1, k.shape[1], -1, q.shape[2])
    out = scaled_dot_product_attention(grouped, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    return out.view(1, q.shape[1], q.shape[2])


class Heads(NamedTuple):
    """Queries, keys and values of the new tokens: views [tokens, heads, head_dim] of one tensor, qkv."""

    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def split(cls, qkv: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
        """Split `qkv`, [tokens, (num_heads + 2 num_kv_heads) * head_dim]."""
        parts = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k, v = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return cls(parts, q, k, v)


class Ops(Protocol):
    """The operations of a forward pass. Unless stated otherwise, a tensor x is [tokens, features]."""

    def linear(self, x: Tensor, w: Linear) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32. x may also be 3-D and strided."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of residual + x, and the sum residual + x. May overwrite `residual`."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(left half) * right half."""

    def rotate_and_store(self, heads: Heads, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
        """Rotate q and k in place, then write k and v to the cache. cos and sin are [tokens, head_dim / 2]."""

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute attention for the new tokens. Call `rotate_and_store` first. Return [tokens, q_dim]."""


class TorchOps:
    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return linear(x, w.weight, w.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return (self.rms_norm(residual, weight, eps), residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def rotate_and_store(self, heads: Heads, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for each in (heads.q, heads.k):  # rotate each pair of elements (i, i + head_dim / 2) in place
            left, right = each.chunk(2, dim=-1)
            new_left = left * cos - right * sin
            right.copy_(right * cos + left * sin)
            left.copy_(new_left)
        blocks, offsets = batch.slots // cache.shape[2], batch.slots % cache.shape[2]
        cache[:, 0].index_put_((blocks, offsets), heads.k)
        cache[:, 1].index_put_((blocks, offsets), heads.v)

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        return paged_attention(heads.q, cache, batch).flatten(1)


class CpuOps:
    """The default on the CPU. Each operation uses native code where it is supported and faster, otherwise torch."""

    def __init__(self) -> None:
        self._plain = TorchOps()
        self._code = native().code

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """Use `w.packed` if it is faster: always for few tokens, and on some processors for many tokens."""
        if self._code is None or w.packed is None or not self._code.is_faster(x.shape[0], w.packed):
            return linear(x, w.weight, w.bias)
        out = self._code.linear(x, w.packed)
        return out if w.bias is None else out.add_(w.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._code is None or x.ndim != 2 or not self._code.takes(x):
            return self._plain.rms_norm(x, weight, eps)
        return self._code.norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self._code is None or not self._code.takes(x) or not self._code.takes(residual):
            return self._plain.add_rms_norm(x, residual, weight, eps)
        return (self._code.norm(x, residual, weight, eps), residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if self._code is None or not self._code.takes(gate_up, 32):
            return self._plain.silu_mul(gate_up)
        return self._code.gate(gate_up)

    def rotate_and_store(self, heads: Heads, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
        if self._code is None or not self._code.takes(heads.qkv, 32):
            self._plain.rotate_and_store(heads, cos, sin, cache, batch)
        else:
            self._code.rotate(heads.qkv, cos, sin, cache, batch.slots)

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        return fast_paged_attention(heads, cache, batch, self._code).flatten(1)
