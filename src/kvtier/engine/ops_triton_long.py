"""Triton kernels for long prompt chunks: attention over contiguous keys with TMA loads.

TMA (the Tensor Memory Accelerator) copies whole tiles into shared memory without address computations in the threads.
It needs keys at equal distances, so the keys and values of a sequence are first copied out of the paged cache. For 32k
keys, the copy takes 0.1 ms, and the attention of 2k queries takes 2.2 ms (H200, measured on 2026-11-19).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Minimum queries, and minimum queries x keys, for this kernel. Smaller chunks use the paged kernel, which needs no
# copy. TFLOP/s for the heads of Llama-3-8B (H200, measured on 2026-11-19):
#     queries/keys   512/512   512/2k   512/8k   2k/2k   2k/8k   8k/8k   32k/32k
#     paged kernel        32      145      267     183     329     345       380
#     this kernel         20      123      298     202     438     492       488
LONG_LIMITS = (512, 2048 * 2048)
# Query rows of a tile, keys per iteration, warps, stages. Speed of a prefill, as a share of the speed of a large matrix
# product (H200, measured on 2026-11-19):
#     prompt tokens        2k      8k     32k
#     64, 64, 4, 3       .811    .785    .716
#     128, 128, 8, 3     .794    .781    .732
_ROWS, _KEYS, _WARPS, _STAGES = 64, 64, 4, 3
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
    """Compute attention for ROWS / GROUP tokens and one KV head. A token has GROUP rows, one per query head."""
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
    whole = (context - count + tile * TOKENS + 1) // KEYS * KEYS  # all queries of the tile see the keys below it
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


@triton.jit(do_not_specialize=["context"])
def _gather(
    cache_ptr, table_ptr, out_ptr, context, block_stride, kv_stride, out_stride,
    TOKEN: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Copy up to COPIED of the BLOCK elements of a block's keys or values. Each token has TOKEN elements."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    block = tl.load(table_ptr + index).to(tl.int64)
    at = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    to = index * BLOCK + at
    known = (at < BLOCK) & (to < context.to(tl.int64) * TOKEN)
    data = tl.load(cache_ptr + block * block_stride + part * kv_stride + at, mask=known)
    tl.store(out_ptr + part * out_stride + to, data, mask=known)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)  # compute capability 10 has TMA but was not measured


def supports_long(q: Tensor, kv_heads: int) -> bool:
    """True if `long_attention` supports q [tokens, heads, head_dim]. Query heads of one KV head must fit in a tile."""
    is_small = q.shape[1] // kv_heads <= _ROWS and q.shape[2] in (64, 128)
    return is_small and q.dtype in (torch.bfloat16, torch.float16) and _is_hopper(q.device)


def gather(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """Return the keys and values of a sequence, [2, tokens, kv_heads, head_dim].

    Only the first `context` tokens are defined. The second dimension is a power of two, so that torch's allocator can
    often reuse the memory of the previous chunk, which had a shorter context.
    """
    _, _, block_tokens, kv_heads, dim = cache.shape
    token = kv_heads * dim
    out = torch.empty(2, triton.next_power_of_2(context), kv_heads, dim, dtype=cache.dtype, device=cache.device)
    _gather[(triton.cdiv(context, block_tokens), triton.cdiv(block_tokens * token, _COPIED), 2)](
        *(cache, table, out, context, cache.stride(0), cache.stride(1), out.stride(0)),
        TOKEN=token,
        BLOCK=block_tokens * token,
        COPIED=_COPIED,
        num_warps=4,
    )
    return out


def long_attention(q: Tensor, cache: Tensor, table: Tensor, context: int) -> Tensor:
    """Compute attention for the last tokens of a sequence of `context` tokens. q is [tokens, heads, head_dim]."""
    count, heads, dim = q.shape
    kv_heads = cache.shape[3]
    token, group = kv_heads * dim, heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys, values = (
        TensorDescriptor(part, [context, token], [token, 1], [_KEYS, dim]) for part in gather(cache, table, context)
    )
    _long_prefill[(kv_heads, triton.cdiv(count, _ROWS // group))](
        *(q, keys, values, out, count, context, dim**-0.5 * 1.4426950408889634, q.stride(0), out.stride(0)),
        GROUP=group,
        DIM=dim,
        ROWS=_ROWS,
        KEYS=_KEYS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
