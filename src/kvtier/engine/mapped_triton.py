"""MappedCopies: a step's few bytes to and from the GPU, by a kernel that reads and writes pinned host memory.

A copy engine serves a stream that always has a copy ready to its end before it turns to another one. Beside a load or
a save of blocks, a step's inputs and its tokens would wait for milliseconds (a decode step of 12.9 ms took 17 to 18.5
beside 256 MiB each way; H200, 2026-11-15). A kernel does not use the copy engines.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

_NUM_KEPT = 8
_BLOCK = 1024
_WORD = 8


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


class MappedCopies:
    """Copies of up to some MB on the current stream. For one thread.

    Pinned memory is kept until its kernel is known to be done: torch's pool does not see kernels that use it.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def to_device(self, data: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
        """Bytes as a tensor on the device; their number must be a multiple of 8."""
        pinned = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = data
        there = torch.empty(len(data), dtype=torch.uint8, device=device)
        self._run(pinned, there)
        done = torch.cuda.Event()
        done.record()
        self._kept.append((pinned, done))
        while self._kept and (len(self._kept) > _NUM_KEPT or self._kept[0][1].query()):
            self._kept[0][1].synchronize()
            self._kept.popleft()
        return there

    def to_list(self, tensor: torch.Tensor) -> list[int]:
        """A tensor of int64 as numbers; waits for the current stream."""
        pinned = torch.empty(tensor.shape, dtype=torch.int64, pin_memory=True)
        self._run(tensor.contiguous().view(torch.uint8), pinned.view(torch.uint8))
        torch.cuda.current_stream(tensor.device).synchronize()
        return [int(each) for each in pinned.tolist()]

    def _run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        count = source.numel() // _WORD
        if count:
            _copy[(triton.cdiv(count, _BLOCK),)](
                source.view(torch.int64), target.view(torch.int64), count, BLOCK=_BLOCK
            )
