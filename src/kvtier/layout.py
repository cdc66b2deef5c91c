"""The layout of a block of KV data: sizes and offsets of its layers and tensors. This module does not import torch.

A cache group is a set of layers that share block tables. A block holds the KV data of `block_tokens` tokens for all
layers of a group:

    block of "main"   [ layer 0              | layer 1              | ... | draft layer          ]
                        key | value | scales   key | value | scales         key | value
                                ^ tensor_span(0, "value")
    host slot         [ block, then padding up to a multiple of 4 KiB ]

In host memory, on disk and on the network, a block has this order without gaps, regardless of the order in the device
cache. The layers of a group may have different sizes: a draft layer, for example, may be smaller than the others.
Layers that need their own block tables, such as layers with a sliding window, form a separate group. Each group has its
own slot size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvtier.dtype import DType, dtype
from kvtier.errors import ArgumentError, RangeError

SLOT_ALIGNMENT = 4096
"""Alignment of host slots in bytes. Direct disk I/O and memory registration need page-aligned slots."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer for the tokens of one block."""

    name: str
    """Role of the tensor: "key", "value", "latent", "key_scale", ..."""
    dtype: DType
    shape: tuple[int, ...]
    """Shape in one block, such as (tokens, heads, head size)."""
    head_axis: int | None = None
    """Axis of the KV heads, which are divided among tensor-parallel ranks. None if every rank has the whole tensor."""

    def __post_init__(self) -> None:
        if not self.name or not self.shape or min(self.shape) <= 0:
            raise ArgumentError(f"a tensor of a layer needs a name and positive sizes, got {self.name!r} {self.shape}")
        if self.head_axis is not None and not 0 <= self.head_axis < len(self.shape):
            raise RangeError(f"{self.name!r} has the shape {self.shape} and therefore no head axis {self.head_axis}")

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(math.prod(self.shape))

    def of_rank(self, num_ranks: int) -> TensorSpec:
        """Return the spec of the part that each of `num_ranks` ranks stores."""
        if self.head_axis is None:
            return self
        heads = self.shape[self.head_axis]
        if heads % num_ranks:
            raise ArgumentError(f"{self.name!r} has {heads} KV heads, which cannot be split among {num_ranks} ranks")
        axis = self.head_axis
        return replace(self, shape=(*self.shape[:axis], heads // num_ranks, *self.shape[axis + 1 :]))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The tensors of one layer, in the order in which a block stores them."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [each.name for each in self.tensors]
        if not names or len({*names}) < len(names):
            raise ArgumentError(f"a layer needs tensors with different names, got {names}")

    @property
    def nbytes(self) -> int:
        """Size of this layer in one block, in bytes."""
        return sum(each.nbytes for each in self.tensors)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes inside a block."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables.

    CacheGroup.attention("main", 32, 8, 128, "bf16", 16)               key and value per layer
    CacheGroup.mla("main", 61, 576, "bf16", 16)                        one latent tensor per layer
    CacheGroup.attention(..., extra=[TensorSpec("key_scale", ...)])    further tensors per layer
    main.with_layers(draft.layers)                                     the layers of main, then draft layers
    """

    name: str
    layers: tuple[LayerSpec, ...]
    window_tokens: int | None = None
    """Length of the sliding window in tokens; None for full attention."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Offset of each layer in a block, then the block size. Computed once, because every transfer uses the offsets."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ArgumentError(f"cache group {self.name!r} has no layers")
        starts = itertools.accumulate((layer.nbytes for layer in self.layers), initial=0)
        object.__setattr__(self, "_starts", tuple(starts))

    @classmethod
    def attention(
        cls,
        name: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        element: str | DType,
        block_tokens: int,
        *,
        extra: Sequence[TensorSpec] = (),
        window_tokens: int | None = None,
    ) -> CacheGroup:
        """Return a group of equal layers with keys and values."""
        shape = (block_tokens, num_kv_heads, head_dim)
        tensors = (*(TensorSpec(role, dtype(element), shape, head_axis=1) for role in ("key", "value")), *extra)
        return cls(name, (LayerSpec(tensors),) * num_layers, window_tokens)

    @classmethod
    def mla(
        cls,
        name: str,
        num_layers: int,
        latent_dim: int,
        element: str | DType,
        block_tokens: int,
        *,
        extra: Sequence[TensorSpec] = (),
    ) -> CacheGroup:
        """Return a group of equal layers with one compressed tensor each (multi-head latent attention)."""
        latent = TensorSpec("latent", dtype(element), (block_tokens, latent_dim))
        return cls(name, (LayerSpec((latent, *extra)),) * num_layers)

    def with_layers(self, layers: Sequence[LayerSpec]) -> CacheGroup:
        return replace(self, layers=(*self.layers, *layers))

    def of_rank(self, num_ranks: int) -> CacheGroup:
        """Return the part of this group that one of `num_ranks` ranks stores: all layers, with a share of the heads."""
        layers = tuple(LayerSpec(tuple(each.of_rank(num_ranks) for each in layer.tensors)) for layer in self.layers)
        return replace(self, layers=layers)

    def unsharded(self) -> CacheGroup:
        """Return this group without head axes, so that every rank has the whole group."""
        layers = [LayerSpec(tuple(replace(each, head_axis=None) for each in layer.tensors)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def block_bytes(self) -> int:
        return self._starts[-1]

    @property
    def slot_bytes(self) -> int:
        """Distance between the starts of consecutive host slots, in bytes."""
        return -(-self.block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def check_layers(self, layers: range | None) -> range:
        """Return `layers`, or all layers for None. Raise RangeError if `layers` are not consecutive."""
        if layers is None:
            return range(self.num_layers)
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.num_layers:
            raise RangeError(f"{layers} are not consecutive layers of group {self.name!r} ({self.num_layers} layers)")
        return layers

    def span(self, layers: range | None = None) -> Span:
        """Return the position of `layers` in a block. None stands for all layers."""
        chosen = self.check_layers(layers)
        start, stop = self._starts[chosen.start], self._starts[chosen.stop]
        return Span(start, stop - start)

    def tensors(self) -> Iterator[tuple[int, TensorSpec, Span]]:
        """Yield the layer number, spec and position of every tensor, in the order of the block."""
        offset = 0
        for index, layer in enumerate(self.layers):
            for each in layer.tensors:
                yield index, each, Span(offset, each.nbytes)
                offset += each.nbytes

    def tensor_span(self, layer: int, name: str) -> Span:
        """Return the position of one tensor of one layer in a block."""
        for index, each, span in self.tensors():
            if index == layer and each.name == name:
                return span
        raise ArgumentError(f"group {self.name!r} has no tensor {name!r} in layer {layer}")

    def layer_groups(self, layers: range | None, piece_bytes: int, min_groups: int) -> list[range]:
        """Split layers into consecutive runs of about equal size.

        If the layers have equal sizes, there is one run per `piece_bytes` bytes, but at least `min_groups` runs and at
        most one per layer. If the sizes differ, there may be fewer runs. The model waits for the first run, so the
        first run is not larger than the average run, unless it is a single layer.
        """
        chosen = self.check_layers(layers)
        total = self.span(chosen).nbytes
        wanted = min(len(chosen), max(min_groups, total // piece_bytes))
        groups: list[range] = []
        start, done = chosen.start, 0
        for index in chosen:
            size = self.layers[index].nbytes
            # Begin the next run if, with this layer, the runs so far would exceed their share of the total bytes.
            if index > start and len(groups) + 1 < wanted and (done + size) * wanted > total * (len(groups) + 1):
                groups.append(range(start, index))
                start = index
            done += size
        return [*groups, range(start, chosen.stop)]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All cache groups of a model, and the number of tokens per block."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if self.block_tokens <= 0 or not names or len({*names}) < len(names):
            raise ArgumentError(
                f"a layout needs block_tokens >= 1 and groups with different names, got {self.block_tokens} and {names}"
            )

    def group(self, name: str) -> CacheGroup:
        for each in self.groups:
            if each.name == name:
                return each
        raise ArgumentError(f"no cache group {name!r}; this layout has {', '.join(each.name for each in self.groups)}")

    def of_rank(self, num_ranks: int) -> KVLayout:
        return replace(self, groups=tuple(group.of_rank(num_ranks) for group in self.groups))

    @property
    def token_bytes(self) -> float:
        """Bytes per token, summed over all groups."""
        return sum(group.block_bytes for group in self.groups) / self.block_tokens

    def describe(self) -> dict[str, object]:
        """Return the layout as plain values. Layouts with equal descriptions store a block as the same bytes."""
        return {
            "block_tokens": self.block_tokens,
            "groups": [
                {
                    "name": group.name,
                    "window_tokens": group.window_tokens,
                    "layers": [
                        [[t.name, t.dtype.name, list(t.shape)] for t in layer.tensors] for layer in group.layers
                    ],
                }
                for group in self.groups
            ],
        }
