"""PinnedCopier: copies the inputs and tokens of a step with a kernel that accesses pinned host memory.

A copy engine finishes the queued copies of one stream before it serves another stream. During a load or save of blocks,
the inputs and tokens of a step would therefore wait for milliseconds. While 256 MiB were copied in each direction, a
decode step took 17 to 18.5 ms instead of 12.9 ms (H200, 2026-11-15). A kernel does not use the copy engines.
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


class _Pinned:
    """Pinned memory that a kernel reads until the event `done`."""

    __slots__ = ("bytes", "done", "words")

    def __init__(self, num_words: int) -> None:
        self.words = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self.bytes = self.words.numpy().view(np.uint8)
        self.done = torch.cuda.Event()


class PinnedCopier:
    """Copies up to a few MB on the current stream. Used by one thread.

    Pinned memory is kept until its kernel is done, because torch's pool does not track kernels. Then the memory is
    reused, because new memory and a new event would take 100 us per decode step (host of the H200, 2026-11-16).
    """

    def __init__(self) -> None:
        self._sent: deque[_Pinned] = deque()
        self._back = torch.empty(0, dtype=torch.int64)
        self._arrived = torch.cuda.Event()

    def to_device(self, data: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
        """Copy bytes to the device. The number of bytes must be a multiple of 8."""
        pinned = self._pinned(len(data))
        pinned.bytes[: len(data)] = data
        there = torch.empty(len(data), dtype=torch.uint8, device=device)
        _run(pinned.words, there.view(torch.int64), len(data) // _WORD)
        pinned.done.record()
        self._sent.append(pinned)
        return there

    def to_list(self, tensor: torch.Tensor) -> list[int]:
        """Copy an int64 tensor to the host. Waits for the current stream."""
        count = tensor.numel()
        if len(self._back) < count:
            self._back = torch.empty(_rounded(count), dtype=torch.int64, pin_memory=True)
        _run(tensor.contiguous(), self._back, count)
        self._arrived.record(torch.cuda.current_stream(tensor.device))
        self._arrived.synchronize()
        numbers: list[int] = self._back[:count].tolist()
        return numbers

    def _pinned(self, nbytes: int) -> _Pinned:
        """Return the oldest pinned memory if its kernel is done and it is large enough, otherwise new memory."""
        if self._sent and (len(self._sent) >= _NUM_KEPT or self._sent[0].done.query()):
            oldest = self._sent.popleft()
            oldest.done.synchronize()
            if len(oldest.bytes) >= nbytes:
                return oldest
        return _Pinned(_rounded(nbytes // _WORD))


def _run(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    if count:
        _copy[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK)


def _rounded(num_words: int) -> int:
    """Round up to a power of two, so that most copies can reuse memory."""
    return max(_BLOCK, 1 << num_words.bit_length())
