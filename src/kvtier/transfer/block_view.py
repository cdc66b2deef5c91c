"""BlockView: the address, stride and size of the blocks in a tensor. Direction: to the host, or to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from kvtier.errors import ArgumentError, RangeError
from kvtier.memory import Buffer, Placement
from kvtier.memory.copy_plan import I64
from kvtier.memory.interop import placement_of
from kvtier.memory.region import MemoryRef

Ids = Sequence[int] | I64


class Direction(StrEnum):
    """Direction of a transfer. "Device" is the engine's cache, even if this cache is in host memory."""

    D2H = "d2h"
    """From the device cache to the host."""
    H2D = "h2d"
    """From the host to the device cache."""


def as_direction(direction: Direction | str) -> Direction:
    try:
        return Direction(direction)
    except ValueError as error:
        raise ArgumentError(f"unknown direction {direction!r}; use 'd2h' or 'h2d'") from error


@dataclass(frozen=True, slots=True, eq=False)
class BlockView:
    """Blocks of equal size at equal distances in a tensor of one layer or of all layers. Keeps the tensor alive."""

    pointer: int
    stride: int
    """Bytes from one block to the next."""
    block_bytes: int
    """Size of a block. The bytes of a block are contiguous."""
    num_blocks: int
    holding: MemoryRef
    run_blocks: int = 0
    """Blocks per piece, if the memory is pinned in pieces; 0 if it is one piece. A copy must not span two pieces."""

    @property
    def placement(self) -> Placement:
        return self.holding.placement

    @property
    def end(self) -> int:
        """The address after the last block; 0 without blocks."""
        return self.pointer + (self.num_blocks - 1) * self.stride + self.block_bytes if self.num_blocks else 0

    @classmethod
    def of(cls, source: torch.Tensor | Buffer | BlockView, block_bytes: int | None = None) -> BlockView:
        """View the blocks along the first dimension of a tensor, or the blocks of `block_bytes` bytes in a Buffer."""
        if isinstance(source, BlockView):
            return source
        if isinstance(source, Buffer):
            if not block_bytes or source.nbytes % block_bytes:
                raise ArgumentError(f"a Buffer of {source.nbytes} bytes does not consist of blocks of {block_bytes}")
            count = source.nbytes // block_bytes
            return cls(source.data(), block_bytes, block_bytes, count, source.holding)
        return cls._of_tensor(source)

    @classmethod
    def _of_tensor(cls, tensor: torch.Tensor) -> BlockView:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
            raise ArgumentError(f"need a tensor whose first dimension is blocks, got {type(tensor).__name__}")
        dense, expected = True, 1
        for length, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
            dense &= length == 1 or stride == expected
            expected *= length
        if not dense:
            raise ArgumentError(
                f"the blocks of this tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} are not "
                "contiguous; register each contiguous part separately"
            )
        item = tensor.element_size()
        stride = tensor.stride(0) * item
        if tensor.shape[0] > 1 and stride < expected * item:
            raise ArgumentError(f"the blocks of this tensor overlap: {expected * item} bytes at stride {stride}")
        holding = MemoryRef(tensor.data_ptr(), tensor.nbytes, placement_of(tensor), owner=tensor.detach(), pooled=True)
        return cls(tensor.data_ptr(), stride, expected * item, tensor.shape[0], holding)

    def addresses(self, ids: I64) -> I64:
        return self.pointer + ids * self.stride


def check_ids(name: str, ids: Any, num_blocks: int) -> I64:
    """Return block ids as an array. An error names the first id that is out of range."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{name} must be a list of whole numbers, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64)
    if len(array) and (np.minimum.reduce(array) < 0 or np.maximum.reduce(array) >= num_blocks):
        bad = int(np.argmax((array < 0) | (array >= num_blocks)))
        raise RangeError(f"{name}[{bad}] is {int(array[bad])}, outside 0..{num_blocks - 1}")
    return array


def check_moves(
    device_ids: Ids, host_ids: Ids, direction: Direction, num_device: int, num_host: int
) -> tuple[I64, I64]:
    """Return both lists of ids as arrays. Raise if ids are out of range or unpaired, or if a destination repeats."""
    on_device = check_ids("device_ids", device_ids, num_device)
    on_host = check_ids("host_ids", host_ids, num_host)
    if len(on_device) != len(on_host):
        raise ArgumentError(
            f"device_ids and host_ids must have the same length, got {len(on_device)} and {len(on_host)}"
        )
    name, targets = ("host_ids", on_host) if direction is Direction.D2H else ("device_ids", on_device)
    in_order = np.sort(targets)
    duplicates = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(duplicates):
        raise ArgumentError(f"block {int(duplicates[0])} occurs twice in {name}; each destination can occur only once")
    return on_device, on_host
