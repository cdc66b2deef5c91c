"""Where the blocks of a tensor are: an address, a stride, and the bytes of one block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from kvtier.errors import ArgumentError
from kvtier.memory import CPU, PINNED, Buffer, Placement
from kvtier.memory.copy_plan import I64
from kvtier.memory.placement import gpu, has_gpu
from kvtier.memory.region import MemoryRef


class Direction(StrEnum):
    """Which way blocks move. "Device" is the engine's cache, also where that is in host memory."""

    D2H = "d2h"
    """From the device cache to the host."""
    H2D = "h2d"
    """From the host to the device cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockView:
    """Blocks of equal size at equal distances: one tensor of one layer, or whole blocks.

    It keeps the memory alive.
    """

    pointer: int
    stride: int
    """Bytes from one block to the next."""
    block_bytes: int
    """Bytes of a block, which are contiguous."""
    num_blocks: int
    holding: MemoryRef
    """Keeps the memory alive, and knows which copies use it."""
    run_blocks: int = 0
    """A copy never spans a multiple of so many blocks (memory registered piece by piece); 0: no such bounds."""

    @property
    def placement(self) -> Placement:
        """Where the blocks are."""
        return self.holding.placement

    @property
    def end(self) -> int:
        """The address behind the last block."""
        return self.pointer + (self.num_blocks - 1) * self.stride + self.block_bytes if self.num_blocks else 0

    @classmethod
    def of(cls, source: torch.Tensor | Buffer | BlockView, block_bytes: int | None = None) -> BlockView:
        """The blocks along the first dimension of a tensor, or of a Buffer of blocks of so many bytes each."""
        if isinstance(source, BlockView):
            return source
        if isinstance(source, Buffer):
            if not block_bytes or source.nbytes % block_bytes:
                raise ArgumentError(f"a Buffer of {source.nbytes} bytes is not a number of blocks of {block_bytes}")
            count = source.nbytes // block_bytes
            return cls(source.data(), block_bytes, block_bytes, count, source.holding)
        return cls._of_tensor(source)

    @classmethod
    def _of_tensor(cls, tensor: torch.Tensor) -> BlockView:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
            raise ArgumentError(f"blocks are the first dimension of a tensor, got {type(tensor).__name__}")
        dense, expected = True, 1
        for length, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
            dense &= length == 1 or stride == expected
            expected *= length
        if not dense:
            raise ArgumentError(
                f"a block must be contiguous, but in this tensor of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} it is not; register each contiguous part by itself"
            )
        item = tensor.element_size()
        stride = tensor.stride(0) * item
        if tensor.shape[0] > 1 and stride < expected * item:
            raise ArgumentError(f"the blocks of this tensor overlap: {expected * item} bytes every {stride}")
        holding = MemoryRef(tensor.data_ptr(), tensor.nbytes, _placement(tensor), owner=tensor.detach(), pooled=True)
        return cls(tensor.data_ptr(), stride, expected * item, tensor.shape[0], holding)

    def addresses(self, ids: I64) -> I64:
        """Where these blocks begin."""
        return self.pointer + ids * self.stride


class SlotAddresses(NamedTuple):
    """Where slots are. Keeps nothing alive: a transfer keeps the memory, from being submitted until its report."""

    pointer: int
    stride: int
    run_blocks: int
    """As in Plane."""


def _placement(tensor: torch.Tensor) -> Placement:
    if tensor.is_cuda:
        return gpu(tensor.device.index or 0)
    if not tensor.is_cpu:
        raise ArgumentError(f"kvtier has no placement for torch device {tensor.device}")
    return PINNED if has_gpu() and tensor.numel() and tensor.is_pinned() else CPU


def as_direction(direction: Direction | str) -> Direction:
    """The direction of this name."""
    try:
        return Direction(direction)
    except ValueError as error:
        raise ArgumentError(f"unknown direction {direction!r}; use 'd2h' or 'h2d'") from error
