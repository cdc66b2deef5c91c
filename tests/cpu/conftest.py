"""Fixtures for the tests that need torch. With a GPU, `placement` also covers pinned and device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import dtype as dt
from kvtier.memory import CPU, PINNED, Buffer, Placement

PLACEMENTS = [CPU, *([PINNED, Placement("cuda", 0)] if torch.cuda.is_available() else [])]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# The fixtures have session scope, because hypothesis rejects fixtures with function scope. The fixtures have no state.
@pytest.fixture(scope="session", params=PLACEMENTS, ids=str)
def placement(request: pytest.FixtureRequest) -> Placement:
    """Return one of the placements that are available on this machine. A test runs once for each placement."""
    return request.param


@pytest.fixture(scope="session")
def make() -> Callable[..., Buffer]:
    """Return a function `make(placement, array, dtype=None, size=None)` that copies `array` into a new Buffer.

    `dtype` defaults to the dtype of the array, and `size` to the number of elements that fit into the bytes. `size` is
    needed if the elements of a packed type end inside the last byte.
    """
    return _make


@pytest.fixture(scope="session")
def read() -> Callable[[Buffer], Bytes]:
    """Return a function `read(buffer)` that waits for the GPU, if there is one, and returns a uint8 copy."""
    return _read


def _make(placement: Placement, array: Any, dtype: Any = None, size: int | None = None) -> Buffer:
    data = np.frombuffer(array, np.uint8) if isinstance(array, bytes | bytearray) else np.asarray(array)
    raw = np.array(data).reshape(-1).view(np.uint8)
    element = dt.dtype(data.dtype if dtype is None else dtype)
    buffer = Buffer(raw.size * 8 // element.bits if size is None else size, element, placement)
    assert buffer.nbytes == raw.size, f"{raw.size} bytes do not fill {buffer}"
    if raw.size:
        buffer.bytes_tensor().copy_(torch.from_numpy(raw))
    return buffer


def _read(buffer: Buffer) -> Bytes:
    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    if torch.cuda.is_available():  # copies into pinned memory are also asynchronous
        torch.cuda.synchronize()
    return buffer.bytes_tensor().cpu().numpy().copy()
