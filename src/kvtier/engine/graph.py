"""Run decode steps as CUDA graphs. A graph needs one launch instead of several hundred.

A graph has fixed shapes and addresses. There is one graph for each of a few batch sizes, and the inputs of a step are
copied into tensors that all graphs share. A step uses the smallest graph that fits. The unused rows of the graph are
padding: they attend to one token and store nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.model import Model
from kvtier.errors import ArgumentError


class DecodeGraphs:
    """Captured decode steps of one model on one cache."""

    def __init__(self, model: Model, cache: torch.Tensor, max_blocks: int, batch_sizes: Sequence[int]) -> None:
        """`max_blocks` is the length of the longest block table."""
        if not batch_sizes or min(batch_sizes) < 1:
            raise ArgumentError(f"decode graphs need batch sizes of at least 1, got {list(batch_sizes)}")
        self._model = model
        self._cache = cache
        self._sizes = sorted(set(batch_sizes))
        self._inputs = _padded(self._sizes[-1], max_blocks, cache.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # largest first, because smaller graphs reuse the memory of the largest
            self._capture(size, pool)

    def takes(self, batch: ForwardBatch) -> bool:
        """True if every sequence has one new token and one row of logits, and a captured graph is large enough."""
        return (
            batch.is_decode
            and len(batch.query_lens) <= self._sizes[-1]
            and len(batch.logit_rows) == len(batch.query_lens)
            and batch.block_tables.shape[1] <= self._inputs.block_tables.shape[1]
        )

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits [sequences, vocab], valid until the next step. `takes(batch)` must be True."""
        count = len(batch.query_lens)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        inputs = self._inputs
        for mine, given, filler in (
            (inputs.input_ids, batch.input_ids, 0),
            (inputs.positions, batch.positions, 0),
            (inputs.slots, batch.slots, -1),
            (inputs.context_lens, batch.context_lens, 1),
        ):
            mine[:count].copy_(given)
            if count < size:
                mine[count:size].fill_(filler)
        inputs.block_tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if count < size:
            inputs.block_tables[count:size, :1].zero_()
        self._graphs[size].replay()
        return self._outputs[size][:count]

    def _capture(self, size: int, pool: Any) -> None:
        batch = _first_rows(self._inputs, size)
        step = self._model
        stream = torch.cuda.Stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):  # a first run, because a capture cannot compile kernels or allocate workspaces
            step.logits(step.forward(batch, self._cache))
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._outputs[size] = step.logits(step.forward(batch, self._cache))
        self._graphs[size] = graph


def _padded(size: int, max_blocks: int, device: torch.device) -> ForwardBatch:
    """Return a batch of rows that attend to one token of block 0 and store nothing."""
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=zeros,
        positions=zeros.clone(),
        slots=zeros - 1,
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(size, dtype=torch.int32, device=device),
        block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
        logit_rows=torch.arange(size, device=device),
        query_lens=(1,) * size,
        contexts=(1,) * size,
    )


def _first_rows(batch: ForwardBatch, size: int) -> ForwardBatch:
    rows = {field.name: getattr(batch, field.name)[:size] for field in fields(batch)}
    return ForwardBatch(**{**rows, "query_starts": batch.query_starts[: size + 1]})
