"""Run decode steps as CUDA graphs. A graph needs one launch instead of several hundred.

A graph reads the tokens, positions and block tables of the rows from the device, computes the logits, samples, and
writes the next token and position of each row. A graph has fixed shapes and addresses. There is therefore one graph for
each of a few batch sizes, and a step uses the smallest graph that fits. Unused rows of a graph are padding: they attend
to one token and store nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.model import Model
from kvtier.engine.rows import DeviceRows
from kvtier.errors import ArgumentError


class DecodeGraphs:
    """Captured decode steps of one model on one cache."""

    def __init__(self, model: Model, cache: torch.Tensor, rows: DeviceRows, batch_sizes: Sequence[int]) -> None:
        if not batch_sizes or min(batch_sizes) < 1:
            raise ArgumentError(f"decode graphs need batch sizes of at least 1, got {list(batch_sizes)}")
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sizes = sorted({min(size, len(rows.counts)) for size in batch_sizes})
        self.max_rows = self._sizes[-1]
        self._inputs = _padded(self.max_rows, min(len(cache), rows.tables.front.shape[1]), cache.device)
        self._tokens = torch.zeros(self.max_rows, dtype=torch.int64, device=cache.device)
        # A graph reads three numbers: the index (0 or 1) of the front tensor of `rows.heads`, the index of the front
        # tensor of `rows.tables`, and the number of rows. `State.warp` exchanges the front and the back tensor.
        self._control = torch.zeros(3, dtype=torch.int32, device=cache.device)
        self._firsts = rows.heads.front.data_ptr(), rows.tables.front.data_ptr()
        self._known = 0, 0, 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        pool = torch.cuda.graph_pool_handle()
        # cuBLAS keeps a workspace per stream. A workspace allocated in a capture is in the memory pool of the capture.
        # Clear all workspaces before and after the captures, so that no graph uses memory from another pool.
        torch._C._cuda_clearCublasWorkspaces()
        for size in reversed(self._sizes):  # largest first, because smaller graphs reuse the memory of the largest
            self._capture(size, pool)
        torch._C._cuda_clearCublasWorkspaces()

    def run(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one token for each of the first `count` rows. Return the logits and the tokens.

        Both tensors are valid until the next step. Rows whose sampling needs the host are not sampled and not written.
        """
        fronts = self._rows.heads.front.data_ptr(), self._rows.tables.front.data_ptr()
        control = int(fronts[0] != self._firsts[0]), int(fronts[1] != self._firsts[1]), count
        for at, (old, new) in enumerate(zip(self._known, control, strict=True)):
            if old != new:
                self._control[at].fill_(new)  # a kernel, not a copy from the host
        self._known = control
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        self._graphs[size].replay()
        return self._outputs[size][:count], self._tokens[:count]

    def _capture(self, size: int, pool: Any) -> None:
        # Run the step once before the capture, because a capture cannot compile kernels. Use the current stream for
        # this run, because cuBLAS keeps 256 MiB for each stream (H200, torch 2.11).
        self._step(size)
        torch.cuda.synchronize(self._cache.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._outputs[size] = self._step(size)
        self._graphs[size] = graph

    def _step(self, size: int) -> torch.Tensor:
        from kvtier.engine.sampling_triton import load_rows, sample_captured

        batch = _first_rows(self._inputs, size)
        load_rows(self._rows, self._control, batch)
        logits = self._model.logits(self._model.forward(batch, self._cache))
        sample_captured(logits, self._rows, self._control, self._tokens)
        return logits


def _padded(size: int, max_blocks: int, device: torch.device) -> ForwardBatch:
    """Return the inputs of a graph. The graph overwrites everything that depends on the rows."""
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
