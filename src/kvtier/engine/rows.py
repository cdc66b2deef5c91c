"""DeviceRows: keeps the token, position, sampling parameters and block table of each row on the device.

    SETUP     host -> staging    rows that are new or that the host has changed
    PREPARE   staging -> State   `State.warp` and `State.append` move old rows, and add new rows and new blocks
    FORWARD   State -> State     the step writes the sampled token and the next position of each row
    UNPREP    tokens -> staging  the sampled tokens, so that the next step does not overwrite them
    FETCH     staging -> host    the sampled tokens

If rows and blocks stay the same, SETUP and PREPARE of a decode step copy nothing. Each batch in flight has a number,
its phase. Each phase has its own staging memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.batch import BatchData
from kvtier.batch.pipeline import Ticket
from kvtier.engine.forward import I32, I64, BatchLayout, ForwardBatch, SequenceInput, to_tensors
from kvtier.engine.sampling import COLUMNS, SLOT, Resident
from kvtier.engine.sequence import EngineSequence
from kvtier.memory import PINNED, BatchCopy, Buffer, Placement
from kvtier.scheduler import Row
from kvtier.state import Added, Permutation, State

_TOKEN, _POSITION = 0, 1  # columns of `DeviceRows.heads`, see sampling.COLUMNS
UNKNOWN = -1
"""Stands for a token that is not on the host yet, because the step that samples it is in flight."""
_STALE = -1  # stands for a position or count that the device does not have


class RowInput(NamedTuple):
    """A row of a step, its sequence, its input for the model, and the prompt tokens to score."""

    row: Row
    sequence: EngineSequence
    inputs: SequenceInput
    scored: I32

    @property
    def num_sampled(self) -> int:
        """Number of tokens to sample: 0 if the row does not sample, otherwise 1 plus the number of draft tokens."""
        return self.inputs.num_logits - len(self.scored)

    @property
    def number(self) -> int:
        """Number of output tokens before the first token that the row samples."""
        return self.row.stop - self.row.num_draft - self.row.request.num_prompt_tokens

    @property
    def is_resident(self) -> bool:
        """True if the row computes one token, which it reads from the device, and samples the next token."""
        return self.row.wants_token and self.row.num_tokens == 1 and not len(self.scored)


class Staging:
    """Host memory, pinned if the device is a GPU, and device memory of the same shape."""

    def __init__(self, shape: tuple[int, ...], dtype: str, placement: Placement) -> None:
        host = PINNED if placement.is_device else placement
        self._host, self._there = (Buffer(math.prod(shape), dtype, each) for each in (host, placement))
        self.host = self._host.numpy().reshape(shape)
        self.there = self._there.torch().view(shape)
        self.host[...] = 0

    def send(self, copy: BatchCopy, first: Any, count: Any) -> None:
        """Add copies from the host to the device. Copy i has `count[i]` elements and begins at element `first[i]`."""
        copy.pieces(self._host, first, count, self._there, first)

    def fetch(self, copy: BatchCopy, count: int) -> None:
        """Add a copy of the first `count` elements from the device to the host."""
        copy(self._there, count, self._host)


class _RowState(NamedTuple):
    """State of a row on the device after all steps in flight have ended."""

    position: int
    """Position of the row's next token. _STALE if the device does not have this token."""
    owner: object
    """The allocation that the block table belongs to."""
    table: Any
    slot: int
    """The row's slot in the token counts, or -1 for a row without penalties."""
    num_counted: int
    """Number of output tokens in the token counts. _STALE if the counts have to be filled again."""


class _PhaseRows:
    """Staging memory of one phase, and the changes that PREPARE applies."""

    def __init__(self, max_rows: int, max_blocks: int, num_numbers: int, placement: Placement) -> None:
        self.heads = Staging((max_rows, COLUMNS), "i64", placement)
        self.tables = Staging((max_rows, max_blocks), "i32", placement)
        self.numbers = Staging((num_numbers,), "i64", placement)
        self.tokens = Staging((max_rows,), "i64", placement)
        self.heads_perm = self.perm = Permutation.identity(0)
        self.added = Added([], [], [])
        """Blocks that the tables on the device lack."""
        self.fills: list[tuple[int, I64, Any]] = []
        """Token counts to fill, as (slot, tokens, counts). RequestSampler.counts returns tokens and counts."""
        self.slots: list[int] = []
        """The slots of the rows in the token counts."""
        self.rows: Sequence[RowInput] = ()
        self.num_resident = 0
        """Number of leading rows that read their token from the device."""
        self.layout: BatchLayout | None = None
        """Layout of a step with rows that read their tokens from the host. None if all rows are resident."""


class DeviceRows:
    """Rows on the device, in the order of the latest batch. The host records the state of each row (`_RowState`)."""

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        max_tokens: int,
        block_tokens: int,
        vocab: int,
        device: torch.device,
        num_phases: int,
    ) -> None:
        placement = Placement.parse(device)
        self.block_tokens = block_tokens
        self.heads = State((max_rows, COLUMNS), "i64", placement)
        """The head of each row, see sampling.COLUMNS."""
        self.tables = State((max_rows, max_blocks), "i32", placement)
        """The block table of each row."""
        for state in (self.heads, self.tables):
            state.front.zero_()
            state.back.zero_()
        num_numbers = 4 * max_tokens + 4 * max_rows + 1  # for BatchLayout.numbers and `written` (see `setup`)
        self._phases = [_PhaseRows(max_rows, max_blocks, num_numbers, placement) for _ in range(num_phases)]
        self.counts = torch.zeros(max_rows, vocab, dtype=torch.int32, device=device)
        """Token counts by slot, see sampling.IN_PROMPT. A row with penalties keeps its slot, because its counts take 4
        bytes per token of the vocabulary and would be slow to move."""
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._range = torch.arange(max_rows, device=device)
        self._states: dict[Ticket, _RowState] = {}  # rows of the latest batch

    # ---- SETUP, on the engine's thread -----------------------------------------------------------------------------

    def setup(self, batch: BatchData, rows: Sequence[RowInput], copy: BatchCopy) -> None:
        """Compare the rows of a batch with the rows on the device, and send the differences."""
        phase, before, after = self._phases[batch.phase], self._states, {}
        is_new = batch.perm.is_new
        new_heads = []
        phase.added, phase.num_resident, phase.fills = Added([], [], []), 0, []
        used = {before[ticket].slot for ticket in batch.requests if ticket in before}
        for at, (ticket, each) in enumerate(zip(batch.requests, rows, strict=True)):
            row, sampler, known = each.row, each.sequence.sampler, before.get(ticket)
            old = None if is_new[at] else known
            slot = -1 if not sampler.is_penalized else _free(used) if known is None else known.slot
            used.add(slot)
            phase.num_resident += each.is_resident and at == phase.num_resident
            if old is None or (each.is_resident and old.position != row.first):
                phase.heads.host[at] = each.inputs.token_ids[0], row.first, *sampler.resident
                phase.heads.host[at, SLOT] = slot
                new_heads.append(at)
            owner, table = row.request.allocation, each.inputs.block_table
            if old is None or old.owner is not owner:
                self._add_blocks(phase, at, table[:0], table)
            elif old.table is not table:
                self._add_blocks(phase, at, old.table, table)
            position = row.stop if row.wants_token and not row.num_draft else _STALE
            num_counted = _STALE if old is None else old.num_counted
            if slot >= 0 and row.wants_token:
                if num_counted != each.number:
                    phase.fills.append((slot, *sampler.counts()))
                num_counted = _STALE if row.num_draft else each.number + 1
            after[ticket] = _RowState(position, owner, table, slot, num_counted)
        phase.heads_perm = _with_new(batch.perm, new_heads)
        phase.perm, phase.rows, phase.slots = batch.perm, rows, [each.slot for each in after.values()]
        if phase.added.rows:
            at = np.array(phase.added.rows) * phase.tables.host.shape[1] + np.array(phase.added.first)
            phase.tables.send(copy, at, np.array(phase.added.count))
        if new_heads:
            phase.heads.send(copy, np.array(new_heads) * COLUMNS, COLUMNS)
        phase.layout = None
        if phase.num_resident < len(rows):
            phase.layout = BatchLayout.of([each.inputs for each in rows], self.block_tokens)
            # the rows that sample, and the positions of their sampled tokens
            written = [(at, each.row.stop - each.row.num_draft) for at, each in enumerate(rows) if each.num_sampled]
            numbers = np.concatenate((*phase.layout.numbers, np.array(written, np.int64).reshape(-1, 2).T.ravel()))
            phase.numbers.host[: len(numbers)] = numbers
            phase.numbers.send(copy, [0], [len(numbers)])
        self._states = after

    def _add_blocks(self, phase: _PhaseRows, at: int, old: Any, table: Any) -> None:
        """Record the blocks to send: all blocks of the new table after its common prefix with the old table."""
        common = min(len(old), len(table))
        differs = old[:common] != table[:common]
        first = int(differs.argmax()) if differs.any() else common
        if first < len(table):
            phase.tables.host[at, first : len(table)] = table[first:]
            for column, number in zip(phase.added, (at, first, len(table) - first), strict=True):
                column.append(number)

    # ---- PREPARE, FORWARD and UNPREP, in the order of the batches. `number` is the phase of the batch. -------------

    def prepare(self, number: int, copy: BatchCopy) -> None:
        """Move the rows into the order of the batch, and add new rows and new blocks."""
        phase = self._phases[number]
        self.heads.warp(phase.heads_perm, copy, new=phase.heads.there)
        sizes = [] if phase.perm.is_identity else [len(each.inputs.block_table) for each in phase.rows]
        if sizes or phase.added.rows:
            self.tables.append(phase.perm, sizes, phase.added, phase.tables.there, copy)
        for slot, tokens, counts in phase.fills:
            at, values = to_tensors([tokens, counts], self.counts.device)
            self.counts[slot].zero_()[at] = values

    def batch(self, number: int) -> ForwardBatch:
        """Return the inputs of the model for a batch whose PREPARE has run."""
        phase = self._phases[number]
        count = len(phase.rows)
        longest = max([len(each.inputs.block_table) for each in phase.rows])
        tables = self.tables.front[:count, :longest]
        if phase.layout is not None:
            batch = phase.layout.batch(phase.numbers.there, tables)
            batch.input_ids[: phase.num_resident] = self.heads.front[: phase.num_resident, _TOKEN]
            return batch
        tokens, positions = self.heads.front[:count, _TOKEN], self.heads.front[:count, _POSITION]
        blocks = tables.gather(1, (positions // self.block_tokens).unsqueeze(1)).squeeze(1)
        contexts = tuple([each.row.stop for each in phase.rows])
        return ForwardBatch(
            input_ids=tokens,
            positions=positions,
            slots=blocks.long() * self.block_tokens + positions % self.block_tokens,
            query_starts=self._starts[: count + 1],
            context_lens=(positions + 1).int(),
            block_tables=tables,
            logit_rows=self._range[:count],
            query_lens=(1,) * count,
            contexts=contexts,
        )

    def is_resident(self, number: int) -> bool:
        """True if all rows of the batch read their tokens from the device."""
        return self._phases[number].layout is None

    def sampling(self, number: int, chosen: Sequence[int] | None = None) -> Resident:
        """Return the sampling state of each row that samples, or only of `chosen` rows if the batch is resident."""
        phase = self._phases[number]
        rows, positions = self._written(phase)
        slots = [slot for slot, each in zip(phase.slots, phase.rows, strict=True) if each.num_sampled]
        heads = self.heads.front[rows]
        if chosen is None:
            return Resident(heads, positions, self.counts, slots)
        (at,) = to_tensors([np.array(chosen)], heads.device)
        return Resident(heads[at], positions[at], self.counts, [slots[row] for row in chosen])

    def write(self, number: int, tokens: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """Store the next token and position of each row that samples, or only of `chosen` rows of a resident batch."""
        phase, heads = self._phases[number], self.heads.front
        rows, positions = self._written(phase)
        if chosen is not None:
            rows, positions = chosen, positions[chosen]
        heads[rows, _TOKEN], heads[rows, _POSITION] = tokens, positions
        if max(phase.slots) >= 0:  # count the tokens of rows with penalties
            slots = heads[rows, SLOT]
            is_counted = (slots >= 0) & (tokens >= 0)
            at = slots.clamp(min=0), tokens.clamp(min=0)
            self.counts.index_put_(at, is_counted.int(), accumulate=True)

    def keep(self, number: int, tokens: torch.Tensor) -> None:
        """Copy the sampled tokens of a batch to memory that the next batch does not overwrite."""
        self._phases[number].tokens.there[: len(tokens)] = tokens

    def _written(self, phase: _PhaseRows) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Return the rows that sample, and the positions of their sampled tokens."""
        if phase.layout is None:
            rows = slice(len(phase.rows))
            return rows, self.heads.front[rows, _POSITION] + 1
        first, count = sum(map(len, phase.layout.numbers)), sum([each.num_sampled > 0 for each in phase.rows])
        at, positions = phase.numbers.there[first : first + 2 * count].view(2, -1)
        return at, positions

    # ---- FETCH and UPDATE, on the engine's thread. `number` is the phase of the batch. -----------------------------

    def fetch(self, number: int, count: int, copy: BatchCopy) -> None:
        """Add a copy of the tokens of a batch from the device to the host."""
        self._phases[number].tokens.fetch(copy, count)

    def tokens(self, number: int, count: int) -> list[int]:
        """Return the tokens that `fetch` has copied."""
        found: list[int] = self._phases[number].tokens.host[:count].tolist()
        return found


def _free(used: set[int]) -> int:
    """Return the lowest slot that is not used."""
    return next(slot for slot in itertools.count() if slot not in used)


def _with_new(perm: Permutation, new: list[int]) -> Permutation:
    """Return `perm` with the rows `new` marked as new too."""
    if not new or perm.is_new[new].all():
        return perm
    index = perm.index.copy()
    index[new] = perm.size0
    return Permutation(index, perm.size0)
