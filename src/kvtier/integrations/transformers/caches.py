"""Subclasses of transformers' caches, for PrefixCache.

A cache of transformers does not contain tokens, so PrefixCache records the tokens in forward hooks. The subclasses
detect changes that the hooks cannot see, such as reordered rows. They also keep the keys and values that sliding-window
layers drop. A column of a cache contains one token of each row (see tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from kvtier.errors import ArgumentError

Pair = tuple[torch.Tensor, torch.Tensor]


class RecentStates:
    """Keys and values of sliding-window layers in columns `start` and later, kept until their blocks are saved."""

    def __init__(self, sliding: Sequence[int]) -> None:
        self.is_valid = True
        """False in copies of a cache and after `stop`. No more blocks are saved then."""
        self.start = 0
        self._pieces: dict[int, list[Pair]] = {layer: [] for layer in sliding}

    def __deepcopy__(self, memo: dict[int, Any]) -> RecentStates:
        copied = RecentStates(())  # PrefixCache does not record copies of its caches
        copied.is_valid = False
        return copied

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self._pieces)

    def add(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        pieces = self._pieces.get(layer)
        if pieces is not None and self.is_valid:
            pieces.append((keys.detach(), values.detach()))

    def states(self, layer: int) -> Pair:
        """Return the keys and values of a sliding-window layer in columns `start` and later."""
        pieces = self._pieces[layer]
        if len(pieces) > 1:
            keys, values = (torch.cat(parts, dim=-2) for parts in zip(*pieces, strict=True))
            pieces[:] = [(keys, values)]
        return pieces[0]

    def drop_before(self, column: int) -> None:
        """Free the states of columns before `column`."""
        count = column - self.start
        if count > 0:
            for layer, pieces in self._pieces.items():
                keys, values = self.states(layer)
                pieces[:] = [(keys[..., count:, :].clone(), values[..., count:, :].clone())]
            self.start = column

    def stop(self) -> None:
        """Free all states, and record nothing from now on."""
        self.is_valid = False
        for pieces in self._pieces.values():
            pieces.clear()


class PrefixDynamicCache(DynamicCache):
    """A DynamicCache from PrefixCache.begin."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.recent = RecentStates(_sliding_layers(self))
        self.hit_tokens: tuple[int, ...] = ()
        """Number of tokens in each row that were loaded instead of computed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        self.recent.add(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        layers: list[Any] = self.layers
        for number, layer in enumerate(layers):
            is_cut = layer.is_sliding and layer.get_seq_length() >= layer.sliding_window and not layer.record_past
            if is_cut and tokens_to_remove:
                raise ArgumentError(
                    f"cannot remove {abs(tokens_to_remove)} tokens: layer {number} has a sliding window of "
                    f"{layer.sliding_window} tokens and has dropped all earlier tokens; call `begin` again with the "
                    f"shorter prompt"
                )
        if self.recent.layers:
            self.recent.stop()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.recent.stop()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.recent.stop()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.recent.stop()
        super().batch_select_indices(indices)

    def reset(self) -> None:
        self.recent.stop()
        super().reset()  # type: ignore[no-untyped-call]


class PrefixStaticCache(StaticCache):
    """A StaticCache from PrefixCache.begin."""

    def __init__(self, config: Any, max_length: int) -> None:
        super().__init__(config=config, max_cache_len=max_length)
        self.max_length = max_length
        self.recent = RecentStates(_sliding_layers(self))
        self.hit_tokens: tuple[int, ...] = ()
        """Number of tokens in each row that were loaded instead of computed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        self.recent.add(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.recent.stop()
        super().reorder_cache(beam_idx)

    def reset(self) -> None:
        self.recent.stop()
        super().reset()  # type: ignore[no-untyped-call]


PrefixKV = PrefixDynamicCache | PrefixStaticCache


def row_states(cache: PrefixKV, layer: int, row: int, first: int, stop: int) -> Pair:
    """Return the keys and values [head, column, size] of columns [first, stop) of a row."""
    if layer in cache.recent.layers:
        keys, values = cache.recent.states(layer)
        first, stop = first - cache.recent.start, stop - cache.recent.start
    else:
        held: Any = cache.layers[layer]
        keys, values = held.keys, held.values
    return keys[row, :, first:stop], values[row, :, first:stop]


def _sliding_layers(cache: Cache) -> list[int]:
    return [number for number, is_sliding in enumerate(cache.is_sliding) if is_sliding]
