"""Triton kernels for long prompt chunks: attention over gathered keys with TMA loads, gathering, and merging.

TMA copies whole tiles into shared memory without address computations in the threads, but it needs keys of equal
strides. The keys of a sequence are therefore copied out of the paged cache first. The copy of 32k tokens takes as long
as 1/30 of the attention of 2k queries over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.ops_long import Sums, attend_split

LONG_KERNEL: Literal["tma", "cudnn", "flash"] | None = None  # not measured yet: benchmarks/prefill_gpu.py
# Shorter chunks and contexts keep the paged kernel, which needs no copy and splits the keys of few queries.
LEAST_QUERIES, LEAST_KEYS = 512, 2048
_COPIED = 4096  # elements of a block that one program copies


@triton.jit
def _add_keys(
    q, top, total, sums, begin, position, k_desc, v_desc, column, scale,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add KEYS keys to the running softmax of a tile. If MASKED, a query sees only keys up to its position."""
    scores = tl.dot(q, k_desc.load([begin, column]).T)
    if MASKED:
        seen = begin + tl.arange(0, KEYS)[None, :] <= position[:, None]
        scores = tl.where(seen, scores, -1e30)  # finite, because -inf - -inf is NaN
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights, kept = tl.exp2(scores * scale - new_top[:, None]), tl.exp2(top - new_top)
    total = total * kept + tl.sum(weights, 1)
    v = v_desc.load([begin, column])
    return new_top, total, tl.dot(weights.to(v.dtype), v, sums * kept[:, None])


@triton.jit(do_not_specialize=["count", "context"])
def _long_prefill(
    q_ptr, k_desc, v_desc, out_ptr, count, context, scale, q_stride, out_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention of ROWS / GROUP tokens of a sequence for one KV head. A token has one row per query head."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # tiles with the most keys run first
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = tile * TOKENS + row // GROUP
    at = token.to(tl.int64)[:, None]
    column = ((kv_head * GROUP + row % GROUP) * DIM)[:, None] + dim[None, :]
    inside = (token < count)[:, None] & (row < TOKENS * GROUP)[:, None]
    q = tl.load(q_ptr + at * q_stride + column, mask=inside, other=0.0)
    position = context - count + token
    whole = (context - count + tile * TOKENS + 1) // KEYS * KEYS  # every query sees all keys below this index
    last = tl.minimum(context, context - count + (tile + 1) * TOKENS)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for begin in range(0, whole, KEYS):
        top, total, sums = _add_keys(
            q, top, total, sums, begin, position, k_desc, v_desc, kv_head * DIM, scale, KEYS, False
        )
    for begin in range(whole, last, KEYS):
        top, total, sums = _add_keys(
            q, top, total, sums, begin, position, k_desc, v_desc, kv_head * DIM, scale, KEYS, True
        )
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at * out_stride + column, out, mask=inside)


@triton.jit(do_not_specialize=["size", "context"])
def _gather(
    cache_ptr, table_ptr, out_ptr, size, context, block_stride, kv_stride, out_stride,
    TOKEN: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Copy a part of a block of keys or values, which has BLOCK elements, TOKEN for each token."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    block = tl.load(table_ptr + index, mask=index * BLOCK < context * TOKEN, other=0).to(tl.int64)
    at = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    to = index * BLOCK + at
    known = (at < BLOCK) & (to < context.to(tl.int64) * TOKEN)
    data = tl.load(cache_ptr + block * block_stride + part * kv_stride + at, mask=known, other=0.0)
    tl.store(out_ptr + part * out_stride + to, data, mask=(at < BLOCK) & (to < size.to(tl.int64) * TOKEN))


@triton.jit
def _merge(
    a_ptr, b_ptr, a_log_ptr, b_log_ptr, out_ptr, a_token, a_head, b_token, b_head, a_log_head, b_log_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge two results for one token. The weight of a is exp(a_log) / (exp(a_log) + exp(b_log))."""
    token, head, dim = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = head < HEADS
    a_log = tl.load(a_log_ptr + head * a_log_head + token, mask=inside, other=0.0)
    b_log = tl.load(b_log_ptr + head * b_log_head + token, mask=inside, other=0.0)
    share, known = tl.sigmoid(a_log - b_log)[:, None], inside[:, None]
    a = tl.load(a_ptr + token * a_token + head[:, None] * a_head + dim[None, :], mask=known, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * b_token + head[:, None] * b_head + dim[None, :], mask=known, other=0.0).to(tl.float32)
    out = (a * share + b * (1.0 - share)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head[:, None]) * DIM + dim[None, :], out, mask=known)


def gather(cache: Tensor, table: Tensor, context: int, size: int) -> tuple[Tensor, Tensor]:
    """Return `size` keys and values of a sequence [size, kv_heads, dim]. Those from `context` on are zero."""
    _, _, block_tokens, kv_heads, dim = cache.shape
    token = kv_heads * dim
    out = torch.empty(2, size, kv_heads, dim, dtype=cache.dtype, device=cache.device)
    _gather[(triton.cdiv(size, block_tokens), triton.cdiv(block_tokens * token, _COPIED), 2)](
        *(cache, table, out, size, context, cache.stride(0), cache.stride(1), out.stride(0)),
        TOKEN=token,
        BLOCK=block_tokens * token,
        COPIED=_COPIED,
        num_warps=4,
    )
    return out[0], out[1]


class CudnnKernel:
    """cuDNN through torch. It builds a plan for every new shape, which takes up to 0.4 s."""

    def __init__(self, granule: int) -> None:
        self.granule = granule

    def gather(self, cache: Tensor, table: Tensor, context: int, size: int) -> tuple[Tensor, Tensor]:
        return gather(cache, table, context, size)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Sums:
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        compute = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, log_sums = compute(q, k, v, None, True, 0.0, causal, False, scale=q.shape[3] ** -0.5)[:2]
        return out[0].transpose(0, 1), log_sums.reshape(q.shape[1], q.shape[2])

    def merge(self, first: Sums, second: Sums) -> Tensor:
        (a, a_log), (b, b_log) = first, second
        out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        _merge[(len(a),)](
            *(a, b, a_log, b_log, out, *a.stride()[:2], *b.stride()[:2], a_log.stride(0), b_log.stride(0)),
            HEADS=a.shape[1],
            DIM=a.shape[2],
            ROWS=triton.next_power_of_2(a.shape[1]),
            num_warps=4,
        )
        return out


@dataclass(frozen=True, slots=True)
class LongAttention:
    """Attention of long prompt chunks. `TritonOps` uses it for chunks that it `takes`."""

    kernel: Literal["tma", "cudnn", "flash"]
    least_queries: int = LEAST_QUERIES
    least_keys: int = LEAST_KEYS
    tile: tuple[int, int, int, int] = (128, 128, 8, 2)
    """Query rows, keys, warps and stages of a tile of the TMA kernel. At head_dim 128: 241 registers, 161 KiB."""
    granule: int = 512
    """Of cuDNN."""

    @classmethod
    def default(cls) -> LongAttention | None:
        """Return the attention for this machine, or None if no kernel was measured to be faster than the paged one."""
        is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        return cls(LONG_KERNEL) if LONG_KERNEL is not None and is_hopper else None

    def takes(self, q: Tensor, batch: ForwardBatch) -> bool:
        """True if the batch has a long chunk that the kernel supports."""
        is_supported = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (64, 128)
        return is_supported and max(batch.query_lens) >= self.least_queries and max(batch.contexts) >= self.least_keys

    def attend(self, q: Tensor, cache: Tensor, table: Tensor, context: int) -> Tensor:
        """Compute attention for the last tokens of a sequence of `context` tokens. q is [tokens, heads, dim]."""
        if self.kernel == "cudnn":
            return attend_split(CudnnKernel(self.granule), q, cache, table, context)
        k, v = gather(cache, table, context, context)
        if self.kernel == "tma":
            return self._tma(q, k, v)
        compute = torch.ops.aten._flash_attention_forward
        inputs = (q[None], k[None], v[None], None, None, len(q), context, 0.0, True, False)
        out: Tensor = compute(*inputs, scale=q.shape[2] ** -0.5)[0]
        return out[0]

    def _tma(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (count, heads, dim), (context, kv_heads, _) = q.shape, k.shape
        rows, keys, warps, stages = self.tile
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k, v = (TensorDescriptor(each, [context, kv_heads * dim], [kv_heads * dim, 1], [keys, dim]) for each in (k, v))
        group = heads // kv_heads
        _long_prefill[(kv_heads, triton.cdiv(count, rows // group))](
            *(q, k, v, out, count, context, dim**-0.5 * 1.4426950408889634, q.stride(0), out.stride(0)),
            GROUP=group,
            DIM=dim,
            ROWS=rows,
            KEYS=keys,
            num_warps=warps,
            num_stages=stages,
        )
        return out
