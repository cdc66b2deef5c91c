"""The pipeline modules of the engine. They run a scheduler step in three of the eight ops of the pipeline.

SETUP     InputBuilder   builds a ForwardBatch from the rows of the step, on the device
PREPARE   InputBuilder   copies the blocks in Step.copies
FORWARD   ModelForward   computes the logits
FORWARD   Sampler        samples tokens for the engine
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from kvtier.batch import BATCH, Environment, Key, Module
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.graph import DecodeGraphs
from kvtier.engine.model import Model
from kvtier.engine.params import PromptLogprobs
from kvtier.engine.sampling import Sample, sample
from kvtier.engine.scoring import score_rows
from kvtier.engine.sequence import EngineSequence
from kvtier.scheduler import Row, Step

if TYPE_CHECKING:
    from kvtier.engine.cache_runtime import StepTransfers
    from kvtier.engine.parallel import Ranks
    from kvtier.engine.pinned_copier import PinnedCopier

LOGITS = Key("logits", torch.Tensor)
FORWARD_BATCH = Key("forward batch", ForwardBatch)
SCORES = Key("scores", dict)
"""Log-probabilities of prompt tokens, by the id of the scheduler request."""


class DeviceCacheGroup:
    """A model and its device cache. The groups of the main model and of draft models share block tables."""

    def __init__(
        self, model: Model, num_blocks: int, block_tokens: int, *, graph_sizes: Sequence[int] = (), max_context: int = 0
    ) -> None:
        """On CUDA, decode steps of at most max(graph_sizes) rows are captured and replayed as graphs."""
        self.model = model
        self.block_tokens = block_tokens
        self._graph_sizes = graph_sizes if model.weights.device.type == "cuda" else ()
        self._max_context = max_context
        self._graphs: DecodeGraphs | None = None
        self.renew(num_blocks)

    def renew(self, num_blocks: int) -> None:
        """Replace the cache with a new cache of `num_blocks` zeroed blocks."""
        self.cache = self.model.new_cache(num_blocks, self.block_tokens)
        if self._graph_sizes:
            max_blocks = min(num_blocks, -(-self._max_context // self.block_tokens))
            self._graphs = DecodeGraphs(self.model, self.cache, max_blocks, self._graph_sizes)

    def free(self) -> None:
        """Free the memory of the cache. Call `renew` before the next step."""
        self._graphs = None
        self.cache = self.model.new_cache(0, self.block_tokens)
        if self.cache.is_cuda:
            torch.cuda.empty_cache()  # otherwise torch keeps the memory in its pool

    @property
    def block_bytes(self) -> int:
        return self.cache[0:0].element_size() * int(np.prod(self.cache.shape[1:]))

    def logits(self, batch: ForwardBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute a batch, fill the cache, and return the logits. The logits are valid until the next step."""
        if self._graphs is not None and before_layer is None and self._graphs.takes(batch):
            return self._graphs.logits(batch)
        return self.model.logits(self.model.forward(batch, self.cache, before_layer))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, on the current stream."""
        self.cache[list(targets)] = self.cache[list(sources)]


class InputBuilder(Module):
    """Builds the inputs of a step, in the row order of the pipeline."""

    writes: ClassVar[frozenset[Key[Any]]] = frozenset({FORWARD_BATCH})
    transfers: StepTransfers
    step: Step

    def __init__(self, groups: Sequence[DeviceCacheGroup], copies: PinnedCopier | None = None) -> None:
        self._groups = groups
        self._copies = copies
        self._planned: Mapping[str, Row] = {}
        self.rows: list[tuple[Row, EngineSequence]] = []
        """Rows of the current batch, in the order of the batch, without rows whose inputs could not be built."""
        self.num_scored: list[int] = []
        """Number of prompt tokens that each row scores."""
        self._ready: dict[int, ForwardBatch] = {}
        self.sequences: list[SequenceInput] = []

    def plan(self, step: Step, transfers: StepTransfers) -> None:
        self.step, self.transfers = step, transfers
        self._planned = {row.request.id: row for row in step.rows}

    def setup(self, env: Environment) -> None:
        """Build the batch on the host and copy it to the device. A request fails if its input cannot be built."""
        batch = env.at(BATCH)
        self.rows, self.num_scored, inputs = [], [], []
        for ticket in batch.requests:
            sequence: EngineSequence = ticket.request
            row = self._planned[sequence.request.id]
            try:
                scored = sequence.scores.num_rows(row.first, row.stop) if sequence.scores is not None else 0
                inputs.append(_input(row, scored))
            except Exception as error:
                sequence.sampler.fail(error)
            else:
                self.rows.append((row, sequence))
                self.num_scored.append(scored)
        self.sequences = inputs
        group = self._groups[0]
        send = self._copies.to_device if self._copies is not None else None
        device = group.model.weights.device
        self._ready[batch.phase] = ForwardBatch.build(inputs, group.block_tokens, device, send)

    def prepare(self, env: Environment) -> None:
        env.produce(FORWARD_BATCH, self._ready.pop(env.at(BATCH).phase))
        if copies := self.step.copies:
            for group in self._groups:
                group.copy_blocks([copy.source for copy in copies], [copy.target for copy in copies])


class ModelForward(Module):
    """Runs the models of all cache groups. The first model produces the logits."""

    reads: ClassVar[frozenset[Key[Any]]] = frozenset({FORWARD_BATCH})
    writes: ClassVar[frozenset[Key[Any]]] = frozenset({LOGITS, SCORES})

    def __init__(self, groups: Sequence[DeviceCacheGroup], inputs: InputBuilder, ranks: Ranks | None = None) -> None:
        self._groups = groups
        self._inputs = inputs
        self._ranks = ranks

    def forward(self, env: Environment) -> None:
        """Fill the caches and compute logits. Layers wait for blocks that are being loaded."""
        inputs, ranks = self._inputs, self._ranks
        with ranks.step(inputs.step, inputs.sequences) if ranks is not None else contextlib.nullcontext():
            self._compute(env)
        self._inputs.transfers.on_forward_launched()

    def _compute(self, env: Environment) -> None:
        batch, transfers = env.at(FORWARD_BATCH), self._inputs.transfers
        scores: dict[str, list[PromptLogprobs]] = {}
        if any(self._inputs.num_scored):
            logits = self._score(batch, transfers.before_layer(0), scores)
        else:
            logits = self._groups[0].logits(batch, transfers.before_layer(0))
        for number, group in enumerate(self._groups[1:], 1):
            group.model.forward(batch, group.cache, transfers.before_layer(number))
        env.produce(LOGITS, logits)
        env.produce(SCORES, scores)

    def _score(
        self,
        batch: ForwardBatch,
        before_layer: Callable[[int], None] | None,
        scores: dict[str, list[PromptLogprobs]],
    ) -> torch.Tensor:
        """Compute a batch with rows that score their prompts. Return the logits of the other rows."""
        group, inputs = self._groups[0], self._inputs
        hidden = group.model.forward(batch, group.cache, before_layer)
        counts = np.array([inputs.num_scored, [_num_sampled(row) for row, _ in inputs.rows]])
        is_scored = np.repeat(np.tile([True, False], len(inputs.rows)), counts.T.ravel())
        scored, sampled = (
            hidden[torch.from_numpy(np.flatnonzero(chosen)).to(hidden.device)] for chosen in (is_scored, ~is_scored)
        )
        mine = [
            (sequence.request.id, sequence.scores, count)
            for count, (_, sequence) in zip(inputs.num_scored, inputs.rows, strict=True)
            if count and sequence.scores is not None
        ]
        targets = np.concatenate([each.targets(count) for _, each, count in mine])
        found = iter(score_rows(group.model, scored, targets, max(each.num_top for _, each, _ in mine)))
        for id, _, count in mine:
            scores[id] = list(itertools.islice(found, count))
        return group.model.logits(sampled)


class Sampler(Module):
    """Samples the next tokens and verifies draft tokens.

    A draft token is accepted if it equals the token sampled at its position, so drafts never change the output. After a
    failure, a row gets no more samples, and `RequestSampler.error` contains the reason.
    """

    reads: ClassVar[frozenset[Key[Any]]] = frozenset({LOGITS, SCORES})

    def __init__(self, inputs: InputBuilder, copies: PinnedCopier | None = None) -> None:
        self._inputs = inputs
        self._to_list = copies.to_list if copies is not None else None
        self._send = copies.to_device if copies is not None else None
        self.samples: dict[str, list[Sample]] = {}
        self.scores: dict[str, list[PromptLogprobs]] = {}
        """Log-probabilities of prompt tokens, by the id of the scheduler request."""

    @torch.inference_mode()
    def forward(self, env: Environment) -> None:
        logits, rows = env.at(LOGITS), self._inputs.rows
        self.samples = {sequence.request.id: [] for _, sequence in rows}
        self.scores = {}
        if not self._inputs.transfers.arrived():
            return  # blocks are missing, so the logits are wrong; the scheduler runs these rows again
        self.scores = env.at(SCORES)
        counts = np.array([_num_sampled(row) for row, _ in rows], np.int64)
        firsts = np.cumsum(counts) - counts
        alive = [i for i, count in enumerate(counts) if count]
        for depth in range(int(counts.max(initial=0))):
            places = (firsts[alive] + depth).tolist()
            # no copy is needed if all rows are sampled
            mine = logits if len(places) == len(logits) else logits[places]
            chosen = sample(mine, [rows[i][1].sampler for i in alive], self._to_list, self._send)
            alive = [i for i, one in zip(alive, chosen, strict=True) if self._accept(*rows[i], one, depth)]
            if not alive:
                return

    def _accept(self, row: Row, sequence: EngineSequence, one: Sample, depth: int) -> bool:
        """Record a sample. True if it equals the draft token at this depth. Then the next position can be sampled."""
        if sequence.sampler.error:
            return False
        try:
            sequence.sampler.accept(one.token_id)
        except Exception as error:  # raised by the constraint
            sequence.sampler.fail(error)
            return False
        self.samples[sequence.request.id].append(one)
        return depth < row.num_draft and row.request.draft[depth] == one.token_id


def _num_sampled(row: Row) -> int:
    """Return the number of tokens to sample for a row: one, and one more for each draft token to verify."""
    return row.num_draft + 1 if row.wants_token else 0


def _input(row: Row, num_scored: int) -> SequenceInput:
    request = row.request
    assert request.allocation is not None
    known = row.stop - row.num_draft
    if row.first == known - 1 == request.chain.num_tokens - 1:
        tokens = [request.chain.last_token]
    else:
        tokens = request.chain.token_range(row.first, known).tolist()
    tokens += request.draft[: row.num_draft]
    return SequenceInput(tokens, row.first, request.allocation.table, num_scored + _num_sampled(row))
