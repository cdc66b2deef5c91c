"""CUDA: everything between the matrices in one kernel each, none of which waits for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from kvtier.engine.attention_triton import triton_paged_attention
from kvtier.engine.forward import ForwardBatch
from kvtier.engine.ops import Heads, Normed
from kvtier.engine.weights import Linear


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, inner, inner_stride, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row. Rows are (outer, inner) with strides, so that heads can be normed where they lie."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < DIM
    at = row // inner * x_stride + row % inner * inner_stride + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        there = residual_ptr + row * DIM + column
        x += tl.load(there, mask=inside, other=0.0).to(tl.float32)
        tl.store(there, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, dim, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < dim
    gate = tl.load(gate_up_ptr + row * 2 * dim + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * dim + dim + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * dim + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, cache_ptr, slots_ptr, block_stride, kv_stride, token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One token: q and k turned in place, k and v to their slot. A slot of -1 stores nothing (a padded row)."""
    token = tl.program_id(0).to(tl.int64)
    column, head = tl.arange(0, PADDED), tl.arange(0, ROWS)
    dim: tl.constexpr = 2 * HALF
    cos = tl.load(cos_ptr + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slots_ptr + token)
    slot_base = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * token_stride
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (column < HALF)[None, :]
    at = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * dim + column[None, :]
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = (head < HEADS + KV_HEADS)[:, None]
    new_left = tl.where(turns, left * cos - right * sin, left).to(qkv_ptr.dtype.element_ty)
    new_right = tl.where(turns, right * cos + left * sin, right).to(qkv_ptr.dtype.element_ty)
    tl.store(at, new_left, mask=inside & turns)
    tl.store(at + HALF, new_right, mask=inside & turns)
    is_value = head >= HEADS + KV_HEADS
    kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    to = cache_ptr + slot_base + (tl.where(is_value, kv_stride, 0) + kv_head * dim)[:, None] + column[None, :]
    kept = inside & (head >= tl.where(slot >= 0, HEADS, ROWS))[:, None]
    tl.store(to, new_left, mask=kept)
    tl.store(to + HALF, new_right, mask=kept)


class TritonOps:
    """The fast way on CUDA."""

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """See Ops."""
        return linear(x, w.weight, w.bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        return _launch_norm(x, None, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
        """See Ops."""
        return Normed(_launch_norm(x, residual, weight, eps), residual)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul[(rows, triton.cdiv(dim, 1024))](gate_up, out, dim, COLUMNS=1024, num_warps=4)
        return out

    def rotate_and_store(
        self, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> None:
        """See Ops."""
        tokens, num_all, dim = heads.qkv.shape
        kv_heads = cache.shape[3]
        _rotate_and_store[(tokens,)](
            *(heads.qkv, cos, sin, cache, batch.slots, *cache.stride()[:3]),
            HEADS=num_all - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            PADDED=triton.next_power_of_2(dim // 2),
            BLOCK_TOKENS=cache.shape[2],
            ROWS=triton.next_power_of_2(num_all),
            num_warps=4,
        )

    def attend(self, heads: Heads, cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See Ops."""
        return triton_paged_attention(heads.q, cache, batch).flatten(1)


def _launch_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    dim, inner = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    padded = triton.next_power_of_2(dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm[(x.numel() // dim,)](
        *(x, x if residual is None else residual, weight, out, x.stride(0), inner, x.stride(1) if x.ndim == 3 else 0),
        eps,
        DIM=dim,
        PADDED=padded,
        ADD=residual is not None,
        num_warps=min(16, max(1, padded // 512)),
    )
    return out
