"""What the link between a GPU and the host can do at most, and what using it costs the model beside it.

Part of the one calibration (costs.py), which keeps the result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from kvtier.memory import cuda
from kvtier.memory.buffer import Buffer
from kvtier.memory.copy_paths import Job, PathName, Pieces, run_path, why_not
from kvtier.memory.copy_plan import DST, NBYTES, SRC
from kvtier.memory.placement import PINNED, Placement
from kvtier.memory.stream import Stream

_ROUNDS = 3
_PIECE_BYTES = 1 << 20  # as large as DMA likes them, and blocks are
_MATRIX = 4096  # bf16, 0.2 ms on an H200
_PRODUCTS = 12
_BESIDE: tuple[PathName, ...] = ("driver", "gather", "loop")


def measure_links(device: Buffer, host: Buffer, stream: Stream) -> dict[str, float]:
    """GB/s of one contiguous copy, by direction ("cuda>pinned")."""
    limits = {}
    for src, dst in ((device, host), (host, device)):
        best = math.inf
        for _ in range(_ROUNDS + 1):
            stream.synchronize()
            start = time.perf_counter()
            _copy_all(src, dst, stream)
            stream.synchronize()
            best = min(best, time.perf_counter() - start)
        limits[_key(src, dst)] = src.nbytes / best / 1e9
    return limits


def measure_lost(
    placement: Placement, device: Buffer, host: Buffer, limits: dict[str, float]
) -> dict[str, dict[PathName, float]]:
    """The share of its time that a matrix product loses beside each path, by direction."""
    compute, stream = Stream(placement), Stream(placement)
    with torch.cuda.stream(compute.native):
        a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=placement.torch) for _ in range(2))
        out = torch.empty_like(a)
    alone = min(_time_products(a, b, out, compute) for _ in range(_ROUNDS))
    lost: dict[str, dict[PathName, float]] = {}
    for src, dst in ((device, host), (host, device)):
        job, pieces = Job(src.placement, dst.placement, stream), _pieces(src, dst)
        for path in _BESIDE:
            if why_not(path, job) is not None:
                continue
            seconds = pieces.nbytes / limits[_key(src, dst)] / 1e9
            copies = int(2 * alone / seconds) + 1  # so that a copy is under way all the time

            def start(path: PathName = path, job: Job = job, pieces: Pieces = pieces, copies: int = copies) -> None:
                for _ in range(copies):
                    run_path(path, job, pieces)

            beside = min(_time_products(a, b, out, compute, start, stream) for _ in range(_ROUNDS))
            lost.setdefault(_key(src, dst), {})[path] = max(0.0, 1 - alone / beside)
    return lost


def _time_products(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    compute: Stream,
    start: Callable[[], None] | None = None,
    beside: Stream | None = None,
) -> float:
    """Seconds of a row of products, with what `start` enqueues on another stream under way."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if start is not None:
        start()
    with torch.cuda.stream(compute.native):
        begin.record()
        for _ in range(_PRODUCTS):
            torch.mm(a, b, out=out)
        end.record()
    end.synchronize()
    if beside is not None:
        beside.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _copy_all(src: Buffer, dst: Buffer, stream: Stream) -> None:
    if cuda.has_driver():
        cuda.memcpy_async(dst.data(), src.data(), src.nbytes, stream)
        return
    with torch.cuda.stream(stream.native):
        dst.bytes_tensor().copy_(src.bytes_tensor(), non_blocking=True)


def _pieces(src: Buffer, dst: Buffer) -> Pieces:
    count = src.nbytes // _PIECE_BYTES
    table = np.empty((3, count), np.int64)
    table[SRC] = src.data() + np.random.default_rng(0).permutation(count) * _PIECE_BYTES
    table[DST] = dst.data() + np.random.default_rng(1).permutation(count) * _PIECE_BYTES
    table[NBYTES] = _PIECE_BYTES
    return Pieces(table)


def _key(src: Buffer, dst: Buffer) -> str:
    assert PINNED in (src.placement, dst.placement)
    return f"{src.placement.kind}>{dst.placement.kind}"
