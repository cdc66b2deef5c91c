"""The pipeline modules of the engine. They run a scheduler step in the ops of the pipeline.

SETUP     ModelForward   sends rows that are new or changed to the device, and the step to other ranks
PREPARE   ModelForward   moves the rows into the order of the batch, and copies the blocks in Step.copies
FORWARD   ModelForward   fills the caches and computes the logits
FORWARD   Sampler        samples tokens and writes them into the rows
UNPREP    Sampler        copies the tokens to memory that the next step does not overwrite
FETCH     Sampler        copies the tokens to the host
UPDATE    ModelForward   waits for the other ranks
UPDATE    Sampler        adds the tokens to the samples of the step

On CUDA, a captured graph can run FORWARD for a step that only decodes and waits for no loads. With draft tokens,
FORWARD itself copies the tokens to the host and adds them to the samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from kvtier.batch import BATCH, COPY, Environment, Key, Module
from kvtier.batch.pipeline import Ticket
from kvtier.cache.allocation import BlockCopy
from kvtier.engine.forward import ForwardBatch, SequenceInput, to_tensors
from kvtier.engine.graph import DecodeGraphs
from kvtier.engine.model import Model
from kvtier.engine.params import PromptLogprobs
from kvtier.engine.rows import UNKNOWN, DeviceRows, RowInput
from kvtier.engine.sampling import Drawn, Resident, Sample, draw, report_logprobs, to_samples
from kvtier.engine.scoring import score_rows, scored_tokens
from kvtier.engine.sequence import EngineSequence
from kvtier.errors import OutOfMemoryError
from kvtier.scheduler import Row, Step

if TYPE_CHECKING:
    from kvtier.engine.cache_runtime import StepTransfers
    from kvtier.engine.parallel import Ranks

LOGITS = Key("logits", torch.Tensor)
_NONE = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class StepRun:
    """A step in the pipeline."""

    step: Step
    transfers: StepTransfers
    planned: dict[Ticket, RowInput] = field(default_factory=dict)
    """Rows whose inputs could be built."""
    rows: list[RowInput] = field(default_factory=list)
    """The planned rows, in the order of the batch."""
    captured: torch.Tensor | None = None
    """Tokens that a captured decode step has sampled. Rows whose sampling needs the host have no valid token yet."""
    drawn: Drawn | None = None
    """Sampled tokens on the device. None if a row has draft tokens, if no row samples, or if blocks are missing."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    scores: dict[str, list[PromptLogprobs]] = field(default_factory=dict)
    """Log-probabilities of prompt tokens, by the id of the scheduler request."""
    has_loaded: bool = True
    """False if a load failed on this rank or, after UPDATE, on any rank. The scheduler then runs the rows again."""


class DeviceCacheGroup:
    """A model and its device cache. The groups of the main model and of draft models share block tables."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_tokens: int,
        *,
        graph_sizes: Sequence[int] = (),
        rows: DeviceRows | None = None,
    ) -> None:
        """On CUDA, decode steps with up to max(graph_sizes) rows run as graphs, which read and write `rows`."""
        self.model = model
        self.block_tokens = block_tokens
        self._graph_sizes = graph_sizes if model.weights.device.type == "cuda" else ()
        self._rows = rows
        self._graphs: DecodeGraphs | None = None
        self.renew(num_blocks)

    def renew(self, num_blocks: int) -> None:
        """Replace the cache with a new cache of `num_blocks` zeroed blocks."""
        try:
            self.cache = self.model.new_cache(num_blocks, self.block_tokens)
            if self._graph_sizes and self._rows is not None:
                self._graphs = DecodeGraphs(self.model, self.cache, self._rows, self._graph_sizes)
            if self.cache.is_cuda:  # steps run on another stream, which could write before the zeros are written
                torch.cuda.synchronize(self.cache.device)
        except torch.OutOfMemoryError as error:
            device, block = self.model.weights.device, self.block_bytes
            graphs = f" and CUDA graphs for up to {max(self._graph_sizes)} rows" if self._graph_sizes else ""
            raise OutOfMemoryError(
                f"{num_blocks} device blocks of {block / 2**20:.2f} MiB{graphs} need more than "
                f"{num_blocks * block / 2**30:.2f} GiB, but only {free_bytes(device) / 2**30:.2f} GiB are "
                f"free on {device}; lower num_blocks (--blocks){' or graph_sizes' if graphs else ''}"
            ) from error

    def free(self) -> None:
        """Free the memory of the cache. Call `renew` before the next step."""
        self._graphs = None
        self.cache = self.model.new_cache(0, self.block_tokens)
        if self.cache.is_cuda:
            torch._C._cuda_clearCublasWorkspaces()  # otherwise torch keeps 32 MiB for each stream of this engine
            torch.cuda.empty_cache()  # otherwise torch keeps the memory in its pool

    @property
    def block_bytes(self) -> int:
        config = self.model.config
        elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.block_tokens
        return elements * self.model.weights.dtype.itemsize

    def logits(self, batch: ForwardBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute a batch, fill the cache, and return the logits."""
        return self.model.logits(self.model.forward(batch, self.cache, before_layer))

    def replay(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a captured decode step for `count` rows. Return logits and tokens, or None if no graph fits."""
        return self._graphs.run(count) if self._graphs is not None and count <= self._graphs.max_rows else None

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, on the current stream."""
        self.cache[[copy.target for copy in copies]] = self.cache[[copy.source for copy in copies]]


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class ModelForward(Module):
    """Moves the rows into the order of the batch, and runs the models of all groups. groups[0] produces the logits."""

    writes: ClassVar[frozenset[Key[Any]]] = frozenset({LOGITS})

    def __init__(self, groups: Sequence[DeviceCacheGroup], rows: DeviceRows, ranks: Ranks | None = None) -> None:
        self._groups, self._rows, self._ranks = groups, rows, ranks

    def setup(self, env: Environment) -> None:
        batch = env.at(BATCH)
        run: StepRun = batch.work
        run.rows = [run.planned[ticket] for ticket in batch.requests]
        self._rows.setup(batch, run.rows, env.at(COPY))
        if self._ranks is not None:
            self._ranks.begin_step(run.step, [each.inputs for each in run.rows])

    def prepare(self, env: Environment) -> None:
        batch = env.at(BATCH)
        self._rows.prepare(batch.phase, env.at(COPY))
        if copies := batch.work.step.copies:
            for group in self._groups:
                group.copy_blocks(copies)

    def forward(self, env: Environment) -> None:
        """Fill the caches and compute logits. Layers wait for blocks that are being loaded."""
        phase, run = env.at(BATCH).phase, env.at(BATCH).work
        wait = run.transfers.before_layer(0)
        captured = self._groups[0].replay(len(run.rows)) if wait is None and self._rows.is_resident(phase) else None
        if captured is not None:
            logits, run.captured = captured
        if captured is None or len(self._groups) > 1:
            batch = self._rows.batch(phase)
        if captured is None:
            if self._ranks is not None:
                unknown = unknown_tokens([each.inputs for each in run.rows])
                self._groups[0].model.share_tokens(batch.input_ids, unknown)
            is_scored = any(len(each.scored) for each in run.rows)
            logits = self._score(batch, run) if is_scored else self._groups[0].logits(batch, wait)
        for number, group in enumerate(self._groups[1:], 1):
            group.model.forward(batch, group.cache, run.transfers.before_layer(number))
        env.produce(LOGITS, logits)

    def update(self, env: Environment) -> None:  # noqa: ARG002
        if self._ranks is not None:
            self._ranks.end_step()

    def _score(self, batch: ForwardBatch, run: StepRun) -> torch.Tensor:
        """Compute a batch and score its prompt tokens. Return the logits for the tokens to sample."""
        group, rows = self._groups[0], run.rows
        hidden = group.model.forward(batch, group.cache, run.transfers.before_layer(0))
        counts = np.array([[len(each.scored), each.num_sampled] for each in rows])
        is_scored = np.repeat(np.tile([True, False], len(rows)), counts.ravel())
        scored, sampled = (
            hidden[torch.from_numpy(np.flatnonzero(chosen)).to(hidden.device)] for chosen in (is_scored, ~is_scored)
        )
        targets = np.concatenate([each.scored for each in rows]).astype(np.int64)
        num_top = max(each.sequence.sampler.params.prompt_logprobs or 0 for each in rows if len(each.scored))
        found = iter(score_rows(group.model, scored, targets, num_top))
        for each in rows:
            run.scores[each.row.request.id] = list(itertools.islice(found, len(each.scored)))
        return group.model.logits(sampled)


class Sampler(Module):
    """Samples the next tokens and verifies draft tokens.

    A draft token is accepted if it equals the token sampled at its position, so drafts never change the output. After a
    failure, a row gets no more samples, and `RequestSampler.error` contains the reason.
    """

    reads: ClassVar[frozenset[Key[Any]]] = frozenset({LOGITS})

    def __init__(self, rows: DeviceRows) -> None:
        self._rows = rows

    @torch.inference_mode()
    def forward(self, env: Environment) -> None:
        logits, batch = env.at(LOGITS), env.at(BATCH)
        run: StepRun = batch.work
        run.has_loaded = run.transfers.have_arrived()
        rows = [each for each in run.rows if each.num_sampled]
        if not run.has_loaded or not rows:
            return  # if blocks are missing, the logits are wrong; the scheduler runs these rows again
        if not any(each.row.num_draft for each in rows):
            run.drawn = self._draw_rows(logits, rows, run.captured, batch.phase)
            return
        counts = np.array([each.num_sampled for each in rows])
        firsts, alive = np.cumsum(counts) - counts, np.arange(len(rows))
        for depth in range(int(counts.max())):
            mine = [rows[i] for i in alive]
            drawn = _draw(logits[(firsts[alive] + depth).tolist()], mine, depth)
            if not depth:
                self._rows.write(batch.phase, drawn.tokens)
            alive = alive[_accept(run, mine, drawn, drawn.tokens.tolist(), depth)]
            if not len(alive):
                return

    def unprep(self, env: Environment) -> None:
        batch = env.at(BATCH)
        if batch.work.drawn is not None:
            self._rows.keep(batch.phase, batch.work.drawn.tokens)

    def fetch(self, env: Environment) -> None:
        batch = env.at(BATCH)
        if batch.work.drawn is not None:
            self._rows.fetch(batch.phase, len(batch.work.drawn.tokens), env.at(COPY))

    def update(self, env: Environment) -> None:
        batch = env.at(BATCH)
        run: StepRun = batch.work
        run.has_loaded = run.transfers.have_succeeded() and run.has_loaded
        if not run.has_loaded:
            run.samples, run.scores = {}, {}
        elif run.drawn is not None:
            rows = [each for each in run.rows if each.num_sampled]
            _accept(run, rows, run.drawn, self._rows.tokens(batch.phase, len(rows)), 0)

    def _draw_rows(
        self, logits: torch.Tensor, rows: Sequence[RowInput], captured: torch.Tensor | None, phase: int
    ) -> Drawn:
        """Sample one token for each row that a captured step has not sampled. Write the tokens to the rows."""
        if captured is None:
            drawn = _draw(logits, rows, 0, self._rows.sampling(phase))
            self._rows.write(phase, drawn.tokens)
            return drawn
        drawn = Drawn(captured, report_logprobs(logits, [each.sequence.sampler for each in rows]), {})
        host = [at for at, each in enumerate(rows) if each.sequence.sampler.is_on_host]
        if host:
            (chosen,) = to_tensors([np.array(host)], logits.device)
            mine = _draw(logits[chosen], [rows[at] for at in host], 0, self._rows.sampling(phase, host))
            self._rows.write(phase, mine.tokens, chosen)
            captured[chosen] = mine.tokens
            drawn.errors.update({host[at]: error for at, error in mine.errors.items()})
        return drawn


def _draw(logits: torch.Tensor, rows: Sequence[RowInput], depth: int, resident: Resident | None = None) -> Drawn:
    return draw(logits, [each.sequence.sampler for each in rows], [each.number + depth for each in rows], resident)


def _accept(run: StepRun, rows: Sequence[RowInput], drawn: Drawn, tokens: list[int], depth: int) -> list[bool]:
    """Record the sample of each row that has not failed or ended. Return True for rows that accept draft[depth]."""
    is_match = []
    samplers = [each.sequence.sampler for each in rows]
    for (row, *_), sampler, one in zip(rows, samplers, to_samples(drawn, tokens, samplers), strict=True):
        is_match.append(False)
        if sampler.error or row.request.state.is_over:
            continue
        try:
            sampler.accept(one.token_id)
        except Exception as error:  # raised by the constraint
            sampler.fail(error)
            continue
        run.samples.setdefault(row.request.id, []).append(one)
        is_match[-1] = depth < row.num_draft and row.request.draft[depth] == one.token_id
    return is_match


def plan_row(row: Row, sequence: EngineSequence) -> RowInput:
    """Return the input of a row. Raise an error if the input cannot be built."""
    request, known = row.request, row.stop - row.num_draft
    assert request.allocation is not None
    scored = _NONE if request.max_cached_tokens is None else scored_tokens(row)
    if row.first == request.chain.num_tokens:
        tokens = [UNKNOWN]
    elif row.first == known - 1 == request.chain.num_tokens - 1:
        tokens = [request.chain.last_token]
    else:
        tokens = request.chain.token_range(row.first, known).tolist()
    tokens += request.draft[: row.num_draft]
    num_logits = len(scored) + (row.num_draft + 1 if row.wants_token else 0)
    return RowInput(row, sequence, SequenceInput(tokens, row.first, request.allocation.table, num_logits), scored)


def unknown_tokens(inputs: Sequence[SequenceInput]) -> list[int]:
    """Return the indices of the rows whose token is on the device of rank 0, but not on the host.

    Such rows come first and have one token each. Their indices are therefore also indices into `input_ids`.
    """
    return [at for at, each in enumerate(inputs) if each.token_ids[0] == UNKNOWN]
