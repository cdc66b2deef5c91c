"""PinnedCopier: a step's few bytes to and from the GPU, by a kernel that reads and writes pinned host memory.

A copy engine serves a stream that always has a copy ready to its end before it turns to another one. Beside a load or
a save of blocks, a step's inputs and its tokens would wait for milliseconds (a decode step of 12.9 ms took 17 to 18.5
beside 256 MiB each way; H200, 2026-11-15). A kernel does not use the copy engines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

_NUM_KEPT = 8
_BLOCK = 1024
_WORD = 8
# Between two looks at the GPU while blocks are under way; other threads have the interpreter then. 20 and 100 us made
# no difference to a step (H200, 2026-11-16).
_LISTEN_SECONDS = 50e-6


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


class _Pinned:
    """Memory that a kernel reads until an event."""

    __slots__ = ("bytes", "done", "words")

    def __init__(self, num_words: int) -> None:
        self.words = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self.bytes = self.words.numpy().view(np.uint8)
        self.done = torch.cuda.Event()


class PinnedCopier:
    """Copies of up to some MB on the current stream. For one thread.

    Pinned memory is kept until its kernel is known to be done, for torch's pool does not see kernels that use it, and
    then used again: memory and an event made anew are 100 us of a decode step (H200's host, 2026-11-16).
    """

    def __init__(self, poll: Callable[[], bool] = lambda: False) -> None:
        """`listen` is called again and again while this thread waits for the GPU, until it returns False."""
        self._poll = poll
        self._sent: deque[_Pinned] = deque()
        self._back = torch.empty(0, dtype=torch.int64)
        self._came = torch.cuda.Event()

    def to_device(self, data: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
        """Bytes as a tensor on the device; their number must be a multiple of 8."""
        pinned = self._pinned(len(data))
        pinned.bytes[: len(data)] = data
        there = torch.empty(len(data), dtype=torch.uint8, device=device)
        _run(pinned.words, there.view(torch.int64), len(data) // _WORD)
        pinned.done.record()
        self._sent.append(pinned)
        return there

    def to_list(self, tensor: torch.Tensor) -> list[int]:
        """A tensor of int64 as numbers; waits for the current stream."""
        count = tensor.numel()
        if len(self._back) < count:
            self._back = torch.empty(_rounded(count), dtype=torch.int64, pin_memory=True)
        _run(tensor.contiguous(), self._back, count)
        self._came.record(torch.cuda.current_stream(tensor.device))
        while not self._came.query() and self._poll():
            time.sleep(_LISTEN_SECONDS)
        self._came.synchronize()
        numbers: list[int] = self._back[:count].tolist()
        return numbers

    def _pinned(self, nbytes: int) -> _Pinned:
        """What was sent first, if that is done and it is large enough; else other memory."""
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
    """So that one piece of memory does for most that is sent."""
    return max(_BLOCK, 1 << num_words.bit_length())
