"""Attention of long prompt chunks over contiguous keys, independent of the device.

Kernels for contiguous keys are faster than kernels for paged keys. The keys of a sequence are gathered first, which
takes little time compared with the attention of many queries. If the causal mask of a kernel starts at its first key,
a chunk that follows cached tokens needs two calls. The results are merged by the sums of their weights:

    keys      | whole           | front | new tokens | padding |
    call 1    | without a mask  |
    call 2                      | causal, as many queries as keys |

`whole` and the length of call 2 are multiples of the granule of the kernel. A kernel that is prepared for each shape
(cuDNN takes up to 0.4 s) then sees few shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor
from torch.nn.functional import pad

from kvtier.engine.forward import ForwardBatch

Sums = tuple[Tensor, Tensor]
"""Attention over some of the keys [queries, heads, dim], and the logarithm of the sum of weights [heads, queries]."""


class TopLeftKernel(Protocol):
    """A kernel for contiguous keys. Its causal mask lets query i see the keys up to key i."""

    granule: int
    """The numbers of queries and keys are multiples of this."""

    def gather(self, cache: Tensor, table: Tensor, context: int, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` keys and values [size, kv_heads, dim]. Those from `context` on are zero."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Sums: ...

    def merge(self, first: Sums, second: Sums) -> Tensor:
        """Return the attention over the keys of both."""


def attend_split(kernel: TopLeftKernel, q: Tensor, cache: Tensor, table: Tensor, context: int) -> Tensor:
    """Compute attention for the last tokens of a sequence of `context` tokens. q is [tokens, heads, dim]."""
    count, granule = len(q), kernel.granule
    whole = (context - count) // granule * granule
    front = context - count - whole
    size = -(-(front + count) // granule) * granule
    keys, values = kernel.gather(cache, table, context, whole + size)
    if size > count:
        q = pad(q, (0, 0, 0, 0, front, size - front - count))
    sums = kernel.run(q, keys[whole:], values[whole:], causal=True)
    if not whole:
        return sums[0][front : front + count]
    return kernel.merge(sums, kernel.run(q, keys[:whole], values[:whole], causal=False))[front : front + count]


def long_parts(batch: ForwardBatch, least_queries: int, least_keys: int) -> Iterator[tuple[slice, ForwardBatch, bool]]:
    """Split a batch into long chunks, one sequence each, and the runs of sequences between them.

    Yields the rows, the sequences as a batch, and whether it is a long chunk.
    """
    is_long = [
        count >= least_queries and context >= least_keys
        for count, context in zip(batch.query_lens, batch.contexts, strict=True)
    ]
    first = row = 0
    for index, long in enumerate(is_long):
        if long or index + 1 == len(is_long) or is_long[index + 1]:
            rows = slice(row, row + sum(batch.query_lens[first : index + 1]))
            yield rows, _sequences(batch, slice(first, index + 1), rows), long
            first, row = index + 1, rows.stop


def _sequences(batch: ForwardBatch, chosen: slice, rows: slice) -> ForwardBatch:
    """Return consecutive sequences of a batch, without logits."""
    if chosen.stop - chosen.start == len(batch.query_lens):
        return batch
    return ForwardBatch(
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=batch.query_starts[chosen.start : chosen.stop + 1] - rows.start,
        context_lens=batch.context_lens[chosen],
        block_tables=batch.block_tables[chosen],
        logit_rows=batch.logit_rows[:0],
        query_lens=batch.query_lens[chosen],
        contexts=batch.contexts[chosen],
    )
