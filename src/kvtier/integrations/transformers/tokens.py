"""RecordedRows: the tokens in the rows and columns of one cache.

    column        0 1 2 3 4 5 6 7 ..
    row 0         - - a b c d e f          2 columns of padding; token 0 of the row is in column 2
    row 1         g h i j k l m n
                  |-- loaded --|-- computed by the model

transformers does not check that the input of the model continues the tokens in a cache. Before a forward pass computes
prompt tokens, RecordedRows rejects any input that differs from the prompt, because the output would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvtier.cache.foreign import SavePoint
from kvtier.errors import ArgumentError
from kvtier.index import Chain

Ids = np.ndarray[Any, np.dtype[np.int64]]

_ADVICE = (
    "call `begin` for every prompt, pass the same input_ids and attention_mask to `begin` and `generate`, and use "
    "neither prefill_chunk_size nor assisted decoding, which compute a cached prefix again"
)


@dataclass(slots=True, eq=False)
class RecordedRow:
    """One row of a cache."""

    chain: Chain
    """The tokens whose KV is in the cache, without padding."""
    padding: int
    num_saved: int = 0
    """Number of leading blocks that were loaded or saved, or that could not be saved."""
    point: SavePoint = field(default_factory=SavePoint)


class RecordedRows:
    """Tokens of a cache. They are checked and recorded when the model computes them."""

    def __init__(self, prompts: Ids, padding: Sequence[int], rows: Sequence[RecordedRow], num_columns: int) -> None:
        """`prompts` contains the token ids [row, column]. The first `num_columns` columns are in the cache."""
        self._prompts, self._padding = prompts, np.asarray(padding)
        self.rows = rows
        self.num_columns = num_columns
        """Number of columns that the cache has according to the forward passes so far."""
        self._new: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._num_recorded = num_columns

    def check(self, past: int, ids: torch.Tensor | None, positions: torch.Tensor | None, mask: Any) -> bool:
        """Check the input of a forward pass. Return False if the tokens of the input cannot be recorded.

        The cache holds `past` columns. Raise ArgumentError if the cache and the input do not belong together.
        """
        num_rows, length = self._prompts.shape
        if ids is not None and ids.shape[0] != num_rows:
            raise ArgumentError(
                f"the model computes {ids.shape[0]} rows with a cache of {num_rows} rows: beams cannot share a "
                f"cache, and num_return_sequences must be passed to `begin` too"
            )
        if past >= length:
            if ids is not None and ids.shape[1] > 1:  # a single token is not checked: that would wait for the GPU
                is_token = np.ones((num_rows, ids.shape[1]), bool)
                self._check_positions(past, ids.shape[1], positions, is_token)
            return ids is not None and past == self.num_columns
        if ids is None:
            raise ArgumentError("inputs_embeds do not identify the tokens of a block; use input_ids")
        if past != self.num_columns:
            return False
        known = min(ids.shape[1], length - past)
        expected = self._prompts[:, past : past + known]
        is_token = np.arange(past, past + known) >= self._padding[:, None]
        given = ids[:, :known].cpu().numpy()
        if (given != expected)[is_token].any():
            raise ArgumentError(
                f"the model computes {ids.shape[1]} tokens after the first {past}, but they are not the next tokens "
                f"of the prompt of {length} tokens: {_ADVICE}"
            )
        self._check_positions(past, known, positions, is_token)
        self._check_mask(past + known, mask)
        return True

    def _check_positions(self, past: int, count: int, positions: torch.Tensor | None, is_token: Any) -> None:
        if positions is None:
            return
        expected = np.arange(past, past + count) - self._padding[:, None]
        rows = positions if positions.ndim == 2 else positions[0]
        given = np.broadcast_to(rows[:, :count].cpu().numpy(), expected.shape)
        if (given != expected)[is_token].any():
            raise ArgumentError(
                f"the model computes tokens at positions {given.min()} to {given.max()}, but {past} columns "
                f"precede them in the cache: {_ADVICE}, and do not set use_cache=False"
            )

    def _check_mask(self, stop: int, mask: Any) -> None:
        expected = np.arange(stop) >= self._padding[:, None]
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            given = mask[:, :stop].cpu().numpy() != 0
            if given.shape != expected.shape or (given != expected).any():
                raise ArgumentError(f"the attention_mask of the model is not the mask of `begin`: {_ADVICE}")
        elif mask is None and self._padding.any():
            raise ArgumentError(f"the prompts are padded, but the model got no attention_mask: {_ADVICE}")

    def crop(self, num_columns: int) -> None:
        """Forget the tokens after the first `num_columns` columns."""
        self.record()
        self.num_columns = self._num_recorded = num_columns
        self._prompts = self._prompts[:, :num_columns]  # the next tokens may differ from the prompts
        for row in self.rows:
            tokens = row.chain.tokens[: max(0, num_columns - row.padding)]
            row.chain = Chain(row.chain.namespace, tokens, salt=row.chain.salt, adapter=row.chain.adapter)
            row.num_saved, row.point = min(row.num_saved, row.chain.num_blocks), SavePoint()

    def add(self, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Add the tokens of a finished forward pass. Tensors are read later, to avoid waiting for the GPU."""
        self._new.append((ids.detach(), positions))
        self.num_columns += ids.shape[1]

    @property
    def has_full_block(self) -> bool:
        """True if a row has a full block that `num_saved` does not count."""
        block_tokens = self.rows[0].chain.namespace.block_tokens
        return any((self.num_columns - row.padding) // block_tokens > row.num_saved for row in self.rows)

    def record(self) -> bool:
        """Append the new tokens to the chains. Return False if their positions are not consecutive."""
        if not self._new:
            return True
        ids = torch.cat([ids for ids, _ in self._new], dim=1).cpu().numpy()
        first, self._num_recorded = self._num_recorded, self.num_columns
        new, self._new = self._new, []
        if all(positions is not None and positions.ndim == 2 for _, positions in new):
            wide = [positions.expand(len(ids), -1) for _, positions in new if positions is not None]
            expected = np.arange(first, self.num_columns) - self._padding[:, None]
            given = torch.cat(wide, dim=1).cpu().numpy()
            if (given != expected)[expected >= 0].any():
                return False
        for row, tokens in zip(self.rows, ids, strict=True):
            row.chain.append(tokens[max(0, row.padding - first) :])
        return True
