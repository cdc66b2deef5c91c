"""ForwardBatch: the flat input of a forward pass, with the new tokens of all sequences and the slots of their KV.

    tokens of three sequences   a a a a | b | c c        query_starts = [0, 4, 5, 7]
    a: first chunk of a prompt    b: decoding    c: a later chunk, or draft tokens to verify

The batch is prepared on the host with numpy. Its sizes stay on the host and can be read without waiting for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from kvtier.errors import ArgumentError, RangeError

I32 = np.ndarray[Any, np.dtype[np.int32]]
I64 = np.ndarray[Any, np.dtype[np.int64]]
Table = Sequence[int] | I32
# A table of torch types, because numpy takes 5 us to compute the name of a type.
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("uint8", "int32", "int64", "float32", "float64")}


class SequenceInput(NamedTuple):
    token_ids: Sequence[int]
    """The new tokens, at least one."""
    num_computed: int
    """Number of earlier tokens. Their keys and values are in the cache."""
    block_table: Table
    """Blocks of the sequence, in order, with room for the computed and the new tokens."""
    num_logits: int = 1
    """Number of tokens at the end of `token_ids` that need logits: 0 if more prompt tokens follow, 1 to sample, and
    k + 1 to verify k draft tokens. If prompt tokens are scored, the number is larger."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of a step as tensors on the model's device, and the sizes of the step on the host."""

    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64: block * block_tokens + offset; on CUDA, -1 means that no KV is stored
    query_starts: torch.Tensor  # [sequences + 1] int32
    context_lens: torch.Tensor  # [sequences] int32: tokens to attend to, including the new tokens
    block_tables: torch.Tensor  # [sequences, longest table] int32; undefined after the last block of a sequence
    logit_rows: torch.Tensor  # [logits] int64: rows of `input_ids` that need logits, in the order of the sequences
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]  # `context_lens` on the host

    @property
    def is_decode(self) -> bool:
        """True if every sequence has exactly one new token."""
        return len(self.query_lens) == len(self.input_ids)

    @classmethod
    def build(cls, sequences: Sequence[SequenceInput], block_tokens: int, device: torch.device) -> ForwardBatch:
        """Check every sequence against its block table and build a batch."""
        layout = BatchLayout.of(sequences, block_tokens)
        return layout.batch(*to_tensors([np.concatenate(layout.numbers), layout.tables], device))


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The inputs of a step as arrays on the host."""

    numbers: tuple[I64, ...]
    """input_ids, positions, slots, query_starts, context_lens and logit_rows of the ForwardBatch."""
    tables: I32
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[SequenceInput], block_tokens: int) -> BatchLayout:
        """Check every sequence against its block table."""
        if not sequences:
            raise ArgumentError("a forward pass needs at least one sequence")
        query_lens = np.array([len(each.token_ids) for each in sequences], np.int64)
        computed = np.array([each.num_computed for each in sequences], np.int64)
        wanted = np.array([each.num_logits for each in sequences], np.int64)
        num_blocks = np.array([len(each.block_table) for each in sequences], np.int64)
        is_wrong = (query_lens < 1) | (computed < 0) | (computed + query_lens > num_blocks * block_tokens)
        is_wrong |= (wanted < 0) | (wanted > query_lens)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            _explain(index, sequences[index], block_tokens)
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        is_used = np.arange(num_blocks.max()) < num_blocks[:, None]
        tables = np.zeros(is_used.shape, np.int32)
        tables[is_used] = np.concatenate([each.block_table for each in sequences])
        owner = np.repeat(np.arange(len(sequences)), query_lens)
        positions = np.arange(starts[-1]) - starts[owner] + computed[owner]
        slots = tables[owner, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        # The last wanted[i] rows of sequence i need logits. before[i] counts the logits of all earlier sequences.
        before = np.cumsum(wanted) - wanted
        logit_rows = np.repeat(starts[1:] - wanted - before, wanted) + np.arange(int(wanted.sum()))
        contexts = computed + query_lens
        ids = np.fromiter(itertools.chain.from_iterable(each.token_ids for each in sequences), np.int64)
        numbers = ids, positions, slots, starts, contexts, logit_rows
        return cls(numbers, tables, tuple(query_lens.tolist()), tuple(contexts.tolist()))

    def batch(self, numbers: torch.Tensor, tables: torch.Tensor) -> ForwardBatch:
        """Return the batch, given device copies of self.numbers (concatenated) and of self.tables."""
        parts = numbers[: sum(map(len, self.numbers))].split([len(each) for each in self.numbers])
        ids, positions, slots, starts, contexts, logit_rows = parts
        return ForwardBatch(
            *(ids, positions, slots, starts.int(), contexts.int(), tables, logit_rows), self.query_lens, self.contexts
        )


def _explain(index: int, sequence: SequenceInput, block_tokens: int) -> NoReturn:
    new, room = len(sequence.token_ids), len(sequence.block_table) * block_tokens
    if not new or sequence.num_computed < 0:
        raise ArgumentError(
            f"sequence {index} needs 1 or more new tokens and 0 or more computed tokens, got {new} and "
            f"{sequence.num_computed}"
        )
    if sequence.num_computed + new > room:
        raise RangeError(
            f"sequence {index} would reach {sequence.num_computed + new} tokens, but its {len(sequence.block_table)} "
            f"blocks of {block_tokens} tokens hold {room}; allocate blocks before the step"
        )
    raise RangeError(f"num_logits of sequence {index} must be in [0, {new}], got {sequence.num_logits}")


def to_tensors(arrays: Sequence[np.ndarray[Any, np.dtype[Any]]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a GPU in one transfer, without waiting for its end. On the CPU, share the memory of the arrays."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    firsts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)]).tolist()
    packed = np.zeros(firsts[-1], np.uint8)
    for first, array in zip(firsts, arrays, strict=False):
        packed[first : first + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    parts = [
        there[first : first + array.nbytes].view(_DTYPES[array.dtype])
        for first, array in zip(firsts, arrays, strict=False)
    ]
    return [part if array.ndim == 1 else part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
