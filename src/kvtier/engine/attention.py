"""Paged attention in torch: a reference to read, and the fast path of the CPU.

The cache of a layer is [blocks, 2, block_tokens, kv_heads, head_dim] (a view with strides into the block-first device
cache). Token before head, because gathering a sequence's blocks then gives [tokens, kv_heads, head_dim] with nothing
left to permute, and a token's keys of all heads are one contiguous write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.native import NativeCode


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, code: NativeCode | None
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
    q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, code: NativeCode, out: torch.Tensor
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
