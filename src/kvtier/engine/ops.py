"""Operations of the model on the CPU and in plain torch, attention included.

Paged attention in torch: a reference to read, and the fast path of the CPU.

The cache of a layer is [blocks, 2, block_tokens, kv_heads, head_dim] (a view with strides into the block-first device
cache). Token before head, because gathering a sequence's blocks then gives [tokens, kv_heads, head_dim] with nothing
left to permute, and a token's keys of all heads are one contiguous write.

The six operations a forward pass is made of. One implementation per way of computing; the model knows none of them.

TorchOps       plain torch, any device: what the others are tested against
CpuOps         the CPU: scaled_dot_product_attention, and native code for steps of a few tokens
InvariantOps   the CPU, float32: bits that do not depend on the rest of the batch (ops_invariant.py)
TritonOps      CUDA: fused kernels that can be captured in a graph (ops_triton.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.native import MAX_TOKENS, EngineNative, native
from kvtier.engine.weights import Linear


def paged_attention(q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """What every other implementation must equal: q [tokens, heads, head_dim], one sequence after the other."""
    out = torch.empty_like(q)
    group = q.shape[1] // cache.shape[3]
    for rows, table, context in _sequences(batch):
        keys, values = cache[table].transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys.float()) * q.shape[2] ** -0.5
        scores.masked_fill_(~_visible(rows, context, q.device), -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(q.dtype)
    return out


def fast_paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    batch: ForwardBatch,
    code: EngineNative | None,
) -> torch.Tensor:
    """The same on the CPU. k and v are the new tokens' own, which a whole prompt needs no cache to attend to."""
    if q.dtype != torch.float32 or q.shape[2] % 16:
        code = None  # not for such heads
    if code is not None and batch.is_decode:
        return code.attend(q, cache, batch.block_tables, batch.context_lens, max(batch.contexts))
    out = torch.empty(q.shape, dtype=q.dtype)
    if code is not None and 1 in batch.query_lens:
        _attend_singles(q, cache, batch, code, out)
    for rows, table, context in _sequences(batch):
        count = rows.stop - rows.start
        if count == 1 and code is not None:
            continue
        if count == context:
            out[rows] = _attend(q[rows], k[rows], v[rows], None, causal=True)
            continue
        keys, values = _gathered(cache, table, context)
        if count == 1:
            out[rows] = _attend_one(q[rows], keys, values)
        else:
            out[rows] = _attend(q[rows], keys, values, _visible(rows, context, q.device), causal=False)
    return out


def _attend_singles(
    q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, code: EngineNative, out: torch.Tensor
) -> None:
    """Those of a mixed batch that bring one token, as if they were alone: keys are read where they lie."""
    singles = [index for index, count in enumerate(batch.query_lens) if count == 1]
    chosen = torch.tensor(singles)
    rows = batch.query_starts[chosen].long()
    longest = max(batch.contexts[index] for index in singles)
    out[rows] = code.attend(q[rows], cache, batch.block_tables[chosen], batch.context_lens[chosen], longest)


def _sequences(batch: ForwardBatch) -> Iterator[tuple[slice, torch.Tensor, int]]:
    """Of each sequence: its rows, its blocks, its number of tokens."""
    starts = itertools.accumulate(batch.query_lens, initial=0)
    for index, (start, count, context) in enumerate(zip(starts, batch.query_lens, batch.contexts, strict=False)):
        yield slice(start, start + count), batch.block_tables[index], context


def _visible(rows: slice, context: int, device: torch.device) -> torch.Tensor:
    """[queries, context]: the last query sees all, the one before it one token less, and so on."""
    count = rows.stop - rows.start
    return torch.ones(count, context, dtype=torch.bool, device=device).tril(context - count)


def _gathered(cache: torch.Tensor, table: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, [context, kv_heads, head_dim] each."""
    num_blocks = -(-context // cache.shape[2])
    blocks = table[:num_blocks]
    keys, values = (cache[:, part].index_select(0, blocks).flatten(0, 1)[:context] for part in (0, 1))
    return keys, values


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    """[queries, heads, dim] over [context, kv_heads, dim]."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return found.squeeze(0).transpose(0, 1)


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query sees every token, so the heads that share keys can stand as queries of one head: nothing repeats."""
    grouped = q.view(1, k.shape[1], -1, q.shape[2])
    found = scaled_dot_product_attention(grouped, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    return found.view(1, q.shape[1], q.shape[2])


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
