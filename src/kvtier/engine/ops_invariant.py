"""Batch-invariant operations on the CPU in float32. The result for a token depends only on the token's sequence.

Matrix libraries choose a kernel by the shape of the input, and kernels differ in the order of additions. The result for
a token alone can therefore differ in the last bits from its result in a batch. Here, the library gets only tiles of a
fixed size. Matrix products use tiles of TILE tokens. Attention uses tiles of TILE queries and KEYS keys. Missing rows
are zeros. Missing keys are masked and have the weight 0. The query at position p is row p % TILE of its tile.

Results are invariant only if the library computes a row independently of other rows and of the row's place in a tile.
`_try_out` tests this for matrix products, norms and activations, before the first use of each shape and thread count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.ops import Heads, TorchOps, sequences_of
from kvtier.engine.weights import Linear
from kvtier.errors import ArgumentError, UnavailableError

TILE = 16  # tokens or queries per tile
KEYS = 64  # keys per tile


class InvariantOps:
    """Operations with bit-identical results for all batches and chunk sizes. Slower than CpuOps."""

    def __init__(self) -> None:
        self._plain = TorchOps()
        self._tried: set[tuple[object, ...]] = set()

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return self._by_tiles("linear", w.weight.shape, lambda tile: self._plain.linear(tile, w), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._by_tiles("norm", weight.shape, lambda tile: self._plain.rms_norm(tile, weight, eps), x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x  # no tiles are needed, because the sum of two elements does not depend on the shape
        return (self.rms_norm(residual, weight, eps), residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._by_tiles("silu", gate_up.shape[1:], self._plain.silu_mul, gate_up)

    def rotate_and_store(self, heads: Heads, cos: Tensor, sin: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
        self._plain.rotate_and_store(heads, cos, sin, cache, batch)

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        out = torch.empty(heads.q.shape)
        for whole, table, context in sequences_of(batch):
            first = context - (whole.stop - whole.start)
            for tile in range(first // TILE, (context - 1) // TILE + 1):
                begin, end = max(first, tile * TILE), min(context, (tile + 1) * TILE)
                rows = slice(whole.start + begin - first, whole.start + end - first)
                queries = heads.q.new_zeros(TILE, *heads.q.shape[1:])
                inside = slice(begin - tile * TILE, end - tile * TILE)
                queries[inside] = heads.q[rows]
                out[rows] = _attend_tile(queries, tile * TILE, end, cache, table)[inside]
        return out.flatten(1)

    def _by_tiles(self, name: str, shape: tuple[int, ...], compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise ArgumentError(f"invariant operations need float32 on the CPU, got {x.dtype} on {x.device}")
        key = (name, *shape, *x.shape[1:], torch.get_num_threads())
        if key not in self._tried:
            _try_out(name, compute, x.shape[1:])
            self._tried.add(key)
        padded = x.new_zeros(-(-x.shape[0] // TILE) * TILE, *x.shape[1:])
        padded[: x.shape[0]] = x
        if len(padded) == TILE:
            return compute(padded)[: x.shape[0]]
        return torch.cat([compute(tile.clone()) for tile in padded.split(TILE)])[: x.shape[0]]


def _attend_tile(q: Tensor, first: int, context: int, cache: Tensor, table: Tensor) -> Tensor:
    """Compute attention for queries at the positions [first, first + TILE) over the keys [0, context)."""
    kv_heads, dim, block_tokens = cache.shape[3], cache.shape[4], cache.shape[2]
    group = q.shape[1] // kv_heads
    grouped = q.view(TILE, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, TILE * group, dim)
    for begin in range(0, context, KEYS):
        places = torch.arange(begin, begin + KEYS).clamp_(max=context - 1)
        chosen = cache[table[places // block_tokens], :, places % block_tokens]  # [KEYS, 2, kv_heads, dim]
        keys, values = chosen.permute(1, 2, 0, 3).contiguous()
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(dim**-0.5)
        if begin + KEYS > first + 1:
            scores.masked_fill_(_mask(first - begin, group), -torch.inf)
        new_top = scores.amax(-1, keepdim=True)
        if begin == 0:
            top, weights = new_top, (scores - new_top).exp_()
            total, out = weights.sum(-1, keepdim=True), torch.bmm(weights, values)
            continue
        new_top = torch.maximum(top, new_top)
        weights, kept = (scores - new_top).exp_(), (top - new_top).exp_()
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + torch.bmm(weights, values)
        top = new_top
    return (out / total).view(kv_heads, TILE, group, dim).transpose(0, 1).reshape(TILE, -1, dim)


@functools.cache
def _mask(offset: int, group: int) -> Tensor:
    """Return a mask [TILE * group, KEYS] that is True for keys after the query.

    Query i is at the position of key i + `offset`. The mask has `group` equal rows per query, one for each query
    head of a KV head.
    """
    return torch.arange(KEYS) > (torch.arange(TILE) + offset).repeat_interleave(group)[:, None]


def _try_out(name: str, compute: Callable[[Tensor], Tensor], row_shape: tuple[int, ...]) -> None:
    """Check that the result of a row depends neither on its place in a tile nor on the other rows."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(row_shape, generator=generator)
    expected = None
    for place in range(TILE):
        tile = torch.randn(TILE, *row_shape, generator=generator) if place % 2 else torch.zeros(TILE, *row_shape)
        tile[place] = row
        result = compute(tile)[place]
        expected = result if expected is None else expected
        if not torch.equal(result, expected):
            raise UnavailableError(
                f"{name} for rows of shape {list(row_shape)} computes different bits in rows 0 and {place} of a tile "
                "on this machine; use another build of torch, or one thread (torch.set_num_threads(1))"
            )
