"""The engine's own cache tensors, registered: where each layer's part of a block lies."""

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
from kvtier.transfer.plane import BlockView


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The contiguous parts of a block in the device cache, one column each: block-first caches have one."""

    pointer: I64
    stride: I64
    nbytes: I64
    offset: I64
    """In the block, as the host has it."""

    def __len__(self) -> int:
        return len(self.pointer)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRange:
    """Some layers of a block: where they lie in it, and what they consist of in the device cache."""

    span: Span
    segments: Segments


class DeviceCache:
    """One group's cache tensors, which stay the engine's. `release()` forgets them.

        DeviceCache.block_first(group, tensor)              [block, layer, K/V, ...]: a block is one piece
        DeviceCache.layer_first(group, [{"key": k, "value": v}, ...])   a tensor per layer and role, blocks first

    Layer-first tensors may be views into one (such as tensor[:, 0]); parts that touch in memory travel together.
    """

    def __init__(self, group: CacheGroup, planes: Sequence[tuple[int, int, BlockView]]) -> None:
        """`planes`: layer, offset in the block, and blocks of each part, in the order of the block."""
        first = planes[0][2]
        if any(plane.placement != first.placement for _, _, plane in planes):
            raise ArgumentError("the tensors of one cache group must be on one device")
        if any(plane.num_blocks != first.num_blocks for _, _, plane in planes):
            raise ArgumentError(
                f"the tensors of one cache group need equally many blocks, got "
                f"{sorted({plane.num_blocks for _, _, plane in planes})}"
            )
        self.group = group
        self.num_blocks = first.num_blocks
        self.placement: Placement = first.placement
        self._planes: list[tuple[int, int, BlockView]] = list(planes)
        self.holdings: list[MemoryRef] = list({id(plane.holding): plane.holding for _, _, plane in planes}.values())
        """What keeps the tensors alive: whoever copies holds these."""
        self._parts: dict[range, LayerRange] = {}

    @classmethod
    def block_first(cls, group: CacheGroup, tensor: torch.Tensor) -> DeviceCache:
        """A tensor whose first dimension is blocks and whose block is, byte for byte, a block of the group."""
        plane = BlockView.of(tensor)
        if plane.block_bytes != group.block_bytes:
            raise ArgumentError(
                f"a block of this tensor of shape {tuple(tensor.shape)} has {plane.block_bytes} bytes, "
                f"one of group {group.name!r} {group.block_bytes}"
            )
        return cls(group, _layers_of(group, plane))

    @classmethod
    def layer_first(cls, group: CacheGroup, layers: Sequence[Mapping[str, torch.Tensor]]) -> DeviceCache:
        """One mapping from role to tensor for each layer of the group."""
        wanted = [{each.name for each in layer.tensors} for layer in group.layers]
        given = [{*layer} for layer in layers]
        if wanted != given:
            at = next((i for i, pair in enumerate(zip(wanted, given, strict=False)) if pair[0] != pair[1]), len(given))
            raise ArgumentError(
                f"group {group.name!r} has {len(wanted)} layers, {len(given)} were given; the first that differs is "
                f"{at}: it needs {sorted(wanted[at]) if at < len(wanted) else 'nothing'}, "
                f"got {sorted(given[at]) if at < len(given) else 'nothing'}"
            )
        planes = []
        for layer, spec, span in group.tensors():
            plane = BlockView.of(layers[layer][spec.name])
            if plane.block_bytes != span.nbytes:
                raise ArgumentError(
                    f"{spec.name} of layer {layer} has {plane.block_bytes} bytes per block, group {group.name!r} says "
                    f"{span.nbytes} ({spec.shape} of {spec.dtype})"
                )
            planes.append((layer, span.offset, plane))
        return cls(group, planes)

    @property
    def is_released(self) -> bool:
        """Whether the tensors are forgotten."""
        return not self._planes

    @property
    def extent(self) -> list[tuple[int, int]]:
        """The address ranges in use."""
        return [(plane.pointer, plane.end) for _, _, plane in self._planes]

    def release(self) -> None:
        """Forget the tensors and their addresses, so that the engine can free them. Copies under way keep theirs."""
        self._planes, self.holdings = [], []
        self._parts = {}

    def part(self, layers: range) -> LayerRange:
        """What these layers of a block consist of, in the order of the block."""
        found = self._parts.get(layers)  # asked for every transfer
        if found is None:
            if self.is_released:
                raise ClosedError(f"the cache of group {self.group.name!r} was released; register the new one")
            planes = [each for each in self._planes if each[0] in layers]
            found = self._parts[layers] = LayerRange(self.group.span(layers), _join(planes))
        return found


def _layers_of(group: CacheGroup, plane: BlockView) -> list[tuple[int, int, BlockView]]:
    """Whole blocks as the parts that each layer has of them."""
    spans = [group.span(range(layer, layer + 1)) for layer in range(group.num_layers)]
    return [
        (layer, span.offset, replace(plane, pointer=plane.pointer + span.offset, block_bytes=span.nbytes))
        for layer, span in enumerate(spans)
    ]


def _join(planes: Sequence[tuple[int, int, BlockView]]) -> Segments:
    """Join parts that follow each other in one memory. In the host's block they follow each other anyway."""
    columns: list[list[int]] = []
    memory = None
    for _, offset, plane in planes:
        last = columns[-1] if columns else None
        if (
            last is not None
            and memory == _memory(plane)
            and last[1] == plane.stride
            and last[0] + last[2] == plane.pointer
        ):
            last[2] += plane.block_bytes
        else:
            columns.append([plane.pointer, plane.stride, plane.block_bytes, offset])
        memory = _memory(plane)
    return Segments(*np.array(columns, np.int64).T.copy())


def _memory(plane: BlockView) -> int:
    """The allocation a plane lies in: the driver refuses a copy across two, even if they touch."""
    owner = plane.holding.owner
    return owner.untyped_storage().data_ptr() if isinstance(owner, torch.Tensor) else id(plane.holding)
