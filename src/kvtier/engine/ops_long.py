"""Split a batch so that long prompt chunks can use another attention kernel. Independent of the device."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.engine.forward import ForwardBatch


def long_parts(
    batch: ForwardBatch, least_queries: int, least_scores: int
) -> Iterator[tuple[slice, ForwardBatch, bool]]:
    """Split a batch into its long chunks (one sequence each) and the runs of other sequences between them.

    A chunk is long if it has at least `least_queries` queries, and if queries x keys is at least `least_scores`. Yield
    for each part its rows, its sequences as a batch, and True if the part is a long chunk.
    """
    is_long = [
        count >= least_queries and count * context >= least_scores
        for count, context in zip(batch.query_lens, batch.contexts, strict=True)
    ]
    first = row = 0
    for index, long in enumerate(is_long):
        if long or index + 1 == len(is_long) or is_long[index + 1]:
            rows = slice(row, row + sum(batch.query_lens[first : index + 1]))
            yield rows, _sequences(batch, slice(first, index + 1), rows), long
            first, row = index + 1, rows.stop


def _sequences(batch: ForwardBatch, chosen: slice, rows: slice) -> ForwardBatch:
    """Return consecutive sequences as a batch for attention, which does not use `logit_rows`."""
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
