"""DeviceCache: the engine's cache tensors, and the addresses of the layers of a block in these tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvtier.errors import ArgumentError, ClosedError
from kvtier.layout import CacheGroup, Span
from kvtier.memory import Placement
from kvtier.memory.copy_plan import I64
from kvtier.memory.region import MemoryRef
from kvtier.transfer.block_view import BlockView


@dataclass(frozen=True, slots=True, eq=False)
class LayerRange:
    """Some layers of a block, and their segments in the device cache. A contiguous block has one segment."""

    span: Span
    """Position of the layers in the block."""
    pointer: I64
    """Address of each segment in block 0. This and the following arrays have one element per segment."""
    stride: I64
    nbytes: I64
    offset: I64
    """Offset of each segment in the block on the host."""

    def __len__(self) -> int:
        return len(self.pointer)


class DeviceCache:
    """The engine's cache tensors of one cache group. `release()` drops the references to the tensors.

        DeviceCache.block_first(group, tensor)              [block, layer, K/V, ...]: a block is contiguous
        DeviceCache.layer_first(group, [{"key": k, "value": v}, ...])   [block, ...] for each layer and role

    Layer-first tensors may be views into one tensor, such as tensor[:, 0]. Adjacent parts are then copied together.
    """

    def __init__(self, group: CacheGroup, views: Sequence[tuple[int, int, BlockView]]) -> None:
        """`views` contains (layer, offset in the block, view) for each part of a block, sorted by offset."""
        first = views[0][2]
        if any(view.placement != first.placement for _, _, view in views):
            raise ArgumentError("the tensors of one cache group must be on one device")
        if any(view.num_blocks != first.num_blocks for _, _, view in views):
            raise ArgumentError(
                f"the tensors of one cache group must have the same number of blocks, got "
                f"{sorted({view.num_blocks for _, _, view in views})}"
            )
        self.group = group
        self.num_blocks = first.num_blocks
        self.placement: Placement = first.placement
        self._views: list[tuple[int, int, BlockView]] = list(views)
        self.holdings: list[MemoryRef] = list({id(view.holding): view.holding for _, _, view in views}.values())
        """References that keep the tensors alive. Copies in flight also hold these references."""
        self._parts: dict[range, LayerRange] = {}

    @classmethod
    def block_first(cls, group: CacheGroup, tensor: torch.Tensor) -> DeviceCache:
        """Use a tensor whose first dimension is blocks. Each block contains all layers of the group."""
        view = BlockView.of(tensor)
        if view.block_bytes != group.block_bytes:
            raise ArgumentError(
                f"a block of this tensor of shape {tuple(tensor.shape)} has {view.block_bytes} bytes, "
                f"but a block of group {group.name!r} has {group.block_bytes}"
            )
        spans = [group.span(range(layer, layer + 1)) for layer in range(group.num_layers)]
        parts = [replace(view, pointer=view.pointer + span.offset, block_bytes=span.nbytes) for span in spans]
        return cls(group, [(layer, spans[layer].offset, part) for layer, part in enumerate(parts)])

    @classmethod
    def layer_first(cls, group: CacheGroup, layers: Sequence[Mapping[str, torch.Tensor]]) -> DeviceCache:
        """Use one mapping from role (such as "key") to tensor for each layer of the group."""
        wanted = [{each.name for each in layer.tensors} for layer in group.layers]
        given = [{*layer} for layer in layers]
        if wanted != given:
            at = next((i for i, pair in enumerate(zip(wanted, given, strict=False)) if pair[0] != pair[1]), len(given))
            raise ArgumentError(
                f"group {group.name!r} has {len(wanted)} layers, and {len(given)} were given; the first mismatch is "
                f"layer {at}, which needs {sorted(wanted[at]) if at < len(wanted) else 'nothing'}, "
                f"got {sorted(given[at]) if at < len(given) else 'nothing'}"
            )
        views = []
        for layer, spec, span in group.tensors():
            view = BlockView.of(layers[layer][spec.name])
            if view.block_bytes != span.nbytes:
                raise ArgumentError(
                    f"{spec.name} of layer {layer} has {view.block_bytes} bytes per block, "
                    f"but group {group.name!r} needs {span.nbytes} ({spec.shape} of {spec.dtype})"
                )
            views.append((layer, span.offset, view))
        return cls(group, views)

    @property
    def is_released(self) -> bool:
        return not self._views

    @property
    def extent(self) -> list[tuple[int, int]]:
        return [(view.pointer, view.end) for _, _, view in self._views]

    def release(self) -> None:
        """Drop the tensors, so that the engine can free them. Copies in flight keep their references."""
        self._views, self.holdings = [], []
        self._parts = {}

    def part(self, layers: range) -> LayerRange:
        """Return the segments of these layers, sorted by offset. The result is cached."""
        part = self._parts.get(layers)
        if part is None:
            if self.is_released:
                raise ClosedError(f"the cache of group {self.group.name!r} was released; register the new cache")
            views = [each for each in self._views if each[0] in layers]
            part = self._parts[layers] = LayerRange(self.group.span(layers), *_segments(views))
        return part


def _segments(views: Sequence[tuple[int, int, BlockView]]) -> I64:
    """Join parts that are adjacent in one allocation. Return rows for LayerRange: pointer, stride, nbytes, offset."""
    columns: list[list[int]] = []
    expected = None  # allocation, address and stride of a part that would continue the last segment
    for _, offset, view in views:
        if (_memory(view), view.pointer, view.stride) == expected:
            columns[-1][2] += view.block_bytes
        else:
            columns.append([view.pointer, view.stride, view.block_bytes, offset])
        expected = _memory(view), view.pointer + view.block_bytes, view.stride
    segments: I64 = np.array(columns, np.int64).T.copy()
    return segments


def _memory(view: BlockView) -> int:
    """Return an id of the allocation. CUDA refuses a copy across two allocations, even if they are adjacent."""
    owner = view.holding.owner
    return owner.untyped_storage().data_ptr() if isinstance(owner, torch.Tensor) else id(view.holding)
