"""An experiment of prefill_gpu: attention with one warp that loads and two groups of warps that compute (Gluon).

Each group computes half of a tile's rows. It issues the product of the next scores and the product with the values
together, and computes the softmax of the next scores while the product with the values runs.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def _load(
    k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, steps, column,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for step in range(steps):
        stage, turn = step % STAGES, (step // STAGES) & 1
        mbarrier.wait(k_free.index(stage), turn ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [step * KEYS, column], k_ready.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_free.index(stage), turn ^ 1)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [step * KEYS, column], v_ready.index(stage), v_tiles.index(stage))


@gluon.jit
def _weigh(scores, top, scale, begin, position, whole, S: gl.constexpr, KEYS: gl.constexpr):
    if begin >= whole:
        key = begin + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        scores = gl.where(key[None, :] <= position[:, None], scores, -1e30)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_top[:, None])
    return weights, new_top, gl.exp2(top - new_top)


@gluon.jit
def _compute(
    q_ptr, q_tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, out_ptr, steps, kv_head, tile, count, context,
    scale, q_stride, out_stride,
    WHICH: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    row = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, IO))
    token = tile * TOKENS + row // GROUP
    column = ((kv_head * GROUP + row % GROUP) * DIM)[:, None] + dim[None, :]
    inside = ((token < count) & (row < TOKENS * GROUP))[:, None] & (dim < DIM)[None, :]
    q = q_tiles.index(WHICH)
    q.store(gl.load(q_ptr + token.to(gl.int64)[:, None] * q_stride + column, mask=inside, other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    row = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    position = context - count + tile * TOKENS + row // GROUP
    whole = (context - count + tile * TOKENS + 1) // KEYS * KEYS
    top = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    sums = gl.zeros([ROWS, DIM], gl.float32, A)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S)

    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    weights, top, kept = _weigh(scores, top, scale, 0, position, whole, S, KEYS)
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(dtype), P)
    for step in range(1, steps):
        stage, turn = step % STAGES, (step // STAGES) & 1
        before, before_turn = (step - 1) % STAGES, ((step - 1) // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), turn)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), before_turn)
        running = warpgroup_mma(p, v_tiles.index(before), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(stage), count=1)
        weights, top, kept = _weigh(scores, top, scale, step * KEYS, position, whole, S, KEYS)
        total = total * kept + gl.sum(weights, 1)
        sums = warpgroup_mma_wait(0, deps=(running,))
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(before), count=1)
        p = gl.convert_layout(weights.to(dtype), P)
        sums = sums * gl.convert_layout(kept, gl.SliceLayout(1, A))[:, None]
    last = steps - 1
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    running = warpgroup_mma(p, v_tiles.index(last % STAGES), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=(running,))
    sums = sums / gl.convert_layout(total, gl.SliceLayout(1, A))[:, None]
    out = gl.convert_layout(sums.to(dtype), IO)
    gl.store(out_ptr + token.to(gl.int64)[:, None] * out_stride + column, out, mask=inside)


@gluon.jit(do_not_specialize=["count", "context"])
def _attention(
    q_ptr, k_desc, v_desc, out_ptr, count, context, scale, q_stride, out_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of 2 ROWS query rows for one KV head. A token has one row per query head."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kv_head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    last = gl.minimum(context, context - count + (tile + 1) * (2 * ROWS // GROUP))
    steps = (last + KEYS - 1) // KEYS
    gl.warp_specialize(
        [
            (_compute, (q_ptr, q_tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, out_ptr, steps, kv_head,
                        tile, count, context, scale, q_stride, out_stride, gl.constexpr(0), GROUP, DIM, ROWS, KEYS,
                        STAGES)),
            (_compute, (q_ptr, q_tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, out_ptr, steps, kv_head,
                        tile, count, context, scale, q_stride, out_stride, gl.constexpr(1), GROUP, DIM, ROWS, KEYS,
                        STAGES)),
            (_load, (k_desc, v_desc, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, steps, kv_head * DIM, KEYS,
                     STAGES)),
        ],
        [4, 4],  # the loading group needs one warp; four keep the register counts of all groups explicit
        [240, 24],
    )  # fmt: skip


def gluon_attention(q: Tensor, k: Tensor, v: Tensor, rows: int = 64, keys: int = 128, stages: int = 2) -> Tensor:
    """Compute causal attention for q [tokens, heads, dim], the last of the keys. k and v are contiguous."""
    (count, heads, dim), (context, kv_heads, _) = q.shape, k.shape
    group, out = heads // kv_heads, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape, stride, block = [context, kv_heads * dim], [kv_heads * dim, 1], [keys, dim]
    descriptors = [TensorDescriptor(each, shape, stride, block, layout) for each in (k, v)]
    _attention[(kv_heads, triton.cdiv(count, 2 * rows // group))](
        *(q, *descriptors, out, count, context, dim**-0.5 * 1.4426950408889634, q.stride(0), out.stride(0)),
        GROUP=group,
        DIM=dim,
        ROWS=rows,
        KEYS=keys,
        STAGES=stages,
        num_warps=4,
    )
    return out
