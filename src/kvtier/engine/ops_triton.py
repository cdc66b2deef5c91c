"""CUDA operations in Triton, with fused kernels for the operations between matrix products.

The prefill kernel uses tiles of queries. The decode kernel splits the keys of a sequence among programs. With few
tiles, the prefill kernel also splits the keys. Both kernels read keys and values in place from the strided cache of one
layer, [blocks, 2, block_tokens, kv_heads, head_dim]. The grid of the decode kernel depends only on shapes. A decode
step can therefore be captured in a CUDA graph and replayed with other context lengths.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.ops import Heads
from kvtier.engine.ops_long import long_parts
from kvtier.engine.ops_triton_long import LONG_LIMITS, long_attention, supports_long
from kvtier.engine.weights import Linear

# Prefill tiles: query rows, keys, warps, and stages of the software pipeline.
# TFLOP/s for the heads of Llama-3-8B (H200, measured on 2026-11-19):
#     queries                                512    32k
#     64 x 64, 4 warps, 2 stages              32    400
#     128 x 64, 8 warps, 3 stages             28    358
_TILE = (64, 64, 4, 2)
_TILE_SMALL_HEADS = (128, 64, 4, 3)  # head_dim up to 64
_TILE_F32 = (32, 32, 4, 3)  # Triton unrolls float32 dots: tiles of 128 x 64 would take minutes to compile
# Decode kernel: keys per iteration, and warps. With 4 warps instead of 2, 128 rows over 1k keys take 6 % less time, but
# 256 rows take 4 % more time (a layer with the heads of Llama-3-8B, H200, measured on 2026-11-20).
_SPLIT_KEYS, _SPLIT_WARPS, _SPLIT_WARPS_F32 = 64, 2, 4
_MOST_PREFILL_SPLITS, _LEAST_SHARE = 16, 1024  # prefill: maximum number of shares of the keys, minimum keys per share


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, inner, inner_stride, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Normalize one row of x. With ADD, first add x to the residual, then normalize the sum. x may be strided."""
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
    """Rotate q and k of one token in place. Write k and v to the token's slot, except for a padding row (slot -1)."""
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


def _power_of_2(number: int) -> int:
    """Return the lowest power of two >= `number`. triton.next_power_of_2 takes 1.5 us, a tenth of a kernel launch."""
    return 1 << max(0, number - 1).bit_length()


class TritonOps:
    """Fused Triton kernels. The default on CUDA."""

    def __init__(self, long_limits: tuple[int, int] = LONG_LIMITS) -> None:
        """Chunks that reach both `long_limits` (queries, queries x keys) use the kernel for long chunks if possible."""
        self._long_limits = long_limits

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return linear(x, w.weight, w.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _launch_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return (_launch_norm(x, residual, weight, eps), residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul[(rows, -(-dim // 1024))](gate_up, out, dim, COLUMNS=1024, num_warps=4)
        return out

    def rotate_and_store(self, heads: Heads, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
        tokens, num_all, dim = heads.qkv.shape
        kv_heads = cache.shape[3]
        _rotate_and_store[(tokens,)](
            *(heads.qkv, cos, sin, cache, batch.slots, *cache.stride()[:3]),
            HEADS=num_all - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            PADDED=_power_of_2(dim // 2),
            BLOCK_TOKENS=cache.shape[2],
            ROWS=_power_of_2(num_all),
            num_warps=4,
        )

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        q, most, (queries, scores) = heads.q, max(batch.query_lens), self._long_limits
        if most < queries or most * max(batch.contexts) < scores or not supports_long(q, cache.shape[3]):
            return triton_paged_attention(q, cache, batch).flatten(1)
        parts = [
            long_attention(q[rows], cache, part.block_tables[0], part.contexts[0])
            if is_long
            else triton_paged_attention(q[rows], cache, part)
            for rows, part, is_long in long_parts(batch, queries, scores)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    dim, inner = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    padded = _power_of_2(dim)
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


@triton.jit
def _attend(
    q, top, total, sums, begin, last, position, table, base, dim, scale, block_stride, kv_stride, token_stride,
    BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add KEYS keys to the running softmax of a tile. If MASKED, a query sees only keys up to its position."""
    key = begin + tl.arange(0, KEYS)
    k_mask, v_mask = (dim < DIM)[:, None], (dim < DIM)[None, :]
    if MASKED:
        known = key < last
        k_mask, v_mask = k_mask & known[None, :], v_mask & known[:, None]
        block = tl.load(table + key // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_TOKENS).to(tl.int64)
    at = base + block * block_stride + key % BLOCK_TOKENS * token_stride
    k = tl.load(at[None, :] + dim[:, None], mask=k_mask, other=0.0)
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    seen = new_top
    if MASKED:
        seen = tl.where(new_top == float("-inf"), 0.0, new_top)  # avoids NaN if a row sees none of these keys
    weights, kept = tl.exp2(scores * scale - seen[:, None]), tl.exp2(top - seen)  # compiles to a fused multiply-add
    total = total * kept + tl.sum(weights, 1)
    v = tl.load(at[:, None] + kv_stride + dim[None, :], mask=v_mask, other=0.0)
    sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision="ieee")
    return new_top, total, sums


@triton.jit
def _prefill(
    q_ptr, cache_ptr, out_ptr, partial_ptr, top_ptr, total_ptr, tables_ptr, starts_ptr, contexts_ptr, scale,
    q_stride, out_stride, table_stride, block_stride, kv_stride, token_stride, head_stride,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute attention for ROWS / GROUP tokens and one KV head. A token has GROUP rows, one per query head.

    If SPLITS > 1, attend only to one share of the keys, and store partial sums for `_combine`.
    """
    sequence, kv_head = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - first
    context = tl.load(contexts_ptr + sequence)
    TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.cdiv(count, TOKENS) - 1 - tl.program_id(0) // SPLITS  # tiles with the most keys run first
    split = tl.program_id(0) % SPLITS
    if tile < 0:
        return
    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, PADDED)
    inside = (token < count)[:, None] & (row < TOKENS * GROUP)[:, None] & (dim < DIM)[None, :]
    place = (first + token).to(tl.int64)
    q = tl.load(q_ptr + place[:, None] * q_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    position = context - count + token
    last = tl.minimum(context, context - count + (tile + 1) * TOKENS)
    whole = (context - count + tile * TOKENS + 1) // KEYS * KEYS  # every query sees all keys below this index
    share = tl.cdiv(tl.cdiv(last, SPLITS), KEYS) * KEYS
    least, last = split * share, tl.minimum(last, (split + 1) * share)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    table, base = tables_ptr + sequence * table_stride, cache_ptr + kv_head * head_stride
    for begin in range(least, tl.minimum(whole, last), KEYS):
        top, total, sums = _attend(
            q, top, total, sums, begin, last, position, table, base, dim, scale, block_stride, kv_stride, token_stride,
            BLOCK_TOKENS, DIM, KEYS, False,
        )  # fmt: skip
    for begin in range(tl.maximum(whole, least), last, KEYS):
        top, total, sums = _attend(
            q, top, total, sums, begin, last, position, table, base, dim, scale, block_stride, kv_stride, token_stride,
            BLOCK_TOKENS, DIM, KEYS, True,
        )  # fmt: skip
    if SPLITS == 1:
        to = out_ptr + place[:, None] * out_stride + head[:, None] * DIM + dim[None, :]
        tl.store(to, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        at_row = (place * (tl.num_programs(2) * GROUP) + head) * SPLITS + split
        mine = (token < count) & (row < TOKENS * GROUP)
        tl.store(partial_ptr + at_row[:, None] * DIM + dim[None, :], sums, mask=inside)
        tl.store(top_ptr + at_row, top, mask=mine)
        tl.store(total_ptr + at_row, total, mask=mine)


@triton.jit
def _decode(
    q_ptr, cache_ptr, partial_ptr, top_ptr, total_ptr, tables_ptr, contexts_ptr, scale,
    q_stride, table_stride, block_stride, kv_stride, token_stride, head_stride,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute attention for the GROUP query heads of a KV head over one share of the keys of a sequence.

    If SPLITS is 1, store the final result in `partial_ptr`. Otherwise store partial sums for `_combine`.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + sequence)
    share = tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS
    begin, end = split * share, tl.minimum(context, (split + 1) * share)
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + row
    place = sequence.to(tl.int64)
    q = tl.load(q_ptr + place * q_stride + head[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    table, base = tables_ptr + place * table_stride, cache_ptr + kv_head * head_stride
    for at_key in range(begin, end, KEYS):
        key = at_key + tl.arange(0, KEYS)
        known = key < end
        block = tl.load(table + key // BLOCK_TOKENS, mask=known, other=0).to(tl.int64)
        at = base + block * block_stride + key % BLOCK_TOKENS * token_stride
        k = tl.load(at[None, :] + dim[:, None], mask=known[None, :] & (dim < DIM)[:, None], other=0.0)
        v = tl.load(at[:, None] + kv_stride + dim[None, :], mask=known[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = tl.where(known[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision="ieee")
        top = new_top
    heads = tl.num_programs(1) * GROUP
    to = (place * heads + head) * SPLITS + split
    if SPLITS == 1:
        sums = sums / total[:, None]
    else:
        tl.store(top_ptr + to, top, mask=row < GROUP)
        tl.store(total_ptr + to, total, mask=row < GROUP)
    tl.store(partial_ptr + to[:, None] * DIM + dim[None, :], sums.to(partial_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    partial_ptr, top_ptr, total_ptr, out_ptr, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of one query. If a share has no keys, its `top` is -inf and its weight is 0."""
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    top = tl.load(top_ptr + row * SPLITS + split)
    weights = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(total_ptr + row * SPLITS + split) * weights, 0)
    at = partial_ptr + (row * SPLITS + split)[:, None] * DIM + dim[None, :]
    partial = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / total
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)


def triton_paged_attention(q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
    """Compute attention for q [tokens, heads, head_dim], with any row stride, over the paged cache of a layer."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.is_decode:
        _run_decode(q, cache, batch, out)
    else:
        _run_prefill(q, cache, batch, out)
    return out


def _run_prefill(q: Tensor, cache: Tensor, batch: ForwardBatch, out: Tensor) -> None:
    kv_heads, group = cache.shape[3], q.shape[1] // cache.shape[3]
    tile = _TILE_F32 if q.dtype == torch.float32 else _TILE if q.shape[2] > 64 else _TILE_SMALL_HEADS
    rows, keys, warps, stages = tile
    rows = max(rows, _power_of_2(group))
    tiles = [-(-length // (rows // group)) for length in batch.query_lens]
    splits = prefill_splits(sum(tiles) * kv_heads * rows, max(batch.contexts), q.device)
    partial, top, total = _partial(q, splits) if splits > 1 else (out, out, out)
    sizes = _sizes(q, cache)
    _prefill[(max(tiles) * splits, len(tiles), kv_heads)](
        *(q, cache, out, partial, top, total, batch.block_tables, batch.query_starts, batch.context_lens, _scale(q)),
        *(q.stride(0), out.stride(0), batch.block_tables.stride(0), *cache.stride()[:4]),
        ROWS=rows,
        KEYS=keys,
        SPLITS=splits,
        num_warps=warps,
        num_stages=stages,
        **sizes,
    )
    if splits > 1:
        _join(partial, top, total, out, sizes["PADDED"])


def _run_decode(q: Tensor, cache: Tensor, batch: ForwardBatch, out: Tensor) -> None:
    sequences, heads, _ = q.shape
    kv_heads, splits = cache.shape[3], num_splits(sequences * cache.shape[3], q.device)
    partial, top, total = _partial(q, splits) if splits > 1 else (out, out, out)
    sizes = _sizes(q, cache)
    _decode[(sequences, kv_heads, splits)](
        *(q, cache, partial, top, total, batch.block_tables, batch.context_lens, _scale(q)),
        *(q.stride(0), batch.block_tables.stride(0), *cache.stride()[:4]),
        ROWS=max(16, _power_of_2(heads // kv_heads)),  # tl.dot needs at least 16 rows
        KEYS=_SPLIT_KEYS,
        SPLITS=splits,
        num_warps=_SPLIT_WARPS_F32 if q.dtype == torch.float32 else _SPLIT_WARPS,
        num_stages=3,
        **sizes,
    )
    if splits > 1:
        _join(partial, top, total, out, sizes["PADDED"])


def _partial(q: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate three tensors for partial results: weighted sums of values, largest scores, and total weights."""
    tokens, heads, dim = q.shape
    top, total = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=q.device)
    return torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device), top, total


def _join(partial: Tensor, top: Tensor, total: Tensor, out: Tensor, padded: int) -> None:
    tokens, heads, splits, dim = partial.shape
    _combine[(tokens * heads,)](partial, top, total, out, DIM=dim, PADDED=padded, SPLITS=splits, num_warps=1)


@functools.cache  # torch takes 3 us to return the properties
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(programs: int, device: torch.device) -> int:
    """Return the number of shares into which the decode kernel splits the keys of a sequence: a power of two.

    `programs` is the number of programs without splits. With splits, an SM gets at most four programs. Time of one
    layer with the heads of Llama-3-8B in us, with 132 SMs (H200, measured on 2026-11-20):
        rows x context   2 x 32k   8 x 8k   16 x 32k   24 x 1k   32 x 8k   48 x 1k   64 x 1k
        shares                32        8          4         2         2         1         1
        time                68.4     67.9        485      33.8       248      57.9      66.0
        half the shares     80.2     79.7        580      40.0       284
        twice the shares    74.1     71.8        519      38.8       263      66.7      72.4
    """
    most = min(64, max(1, 4 * _processors(device) // programs))
    return int(1 << most.bit_length() - 1)


def prefill_splits(rows: int, most_keys: int, device: torch.device) -> int:
    """Return the number of shares into which the prefill kernel splits the keys of a tile: a power of two.

    `rows` is the number of rows of all tiles. Splits help if few tokens attend to many keys, because such a prefill has
    fewer tiles than the GPU has SMs. Time of one layer with the heads of Llama-3-8B over 32k keys, with tiles of 128
    rows (H200, measured on 2026-11-15):
        tokens               16     64     256    512
        without splits, ms   0.95   1.00   1.04   0.96
        with splits, ms      0.14   0.22   0.62   1.05
    """
    tiles, processors = max(1, rows // 128), _processors(device)  # the rules are tuned for tiles of 128 rows
    if 4 * tiles > 3 * processors:  # the tiles occupy more than three quarters of the SMs
        return 1
    most = min(_MOST_PREFILL_SPLITS, 2 * processors // tiles, max(1, most_keys // _LEAST_SHARE))  # at most two per SM
    return 1 << most.bit_length() - 1


def _scale(q: Tensor) -> float:
    """Return log2(e) / sqrt(head_dim), because the kernels use exp2 instead of exp."""
    return float(q.shape[2] ** -0.5 * 1.4426950408889634)


def _sizes(q: Tensor, cache: Tensor) -> dict[str, Any]:
    dim = q.shape[2]
    group = q.shape[1] // cache.shape[3]
    return {"BLOCK_TOKENS": cache.shape[2], "GROUP": group, "DIM": dim, "PADDED": max(16, _power_of_2(dim))}
