"""Shared by the GPU benchmarks of transfers: block shapes, contiguous copies for comparison, a spinning kernel.

Times are device times (CUDA events) unless a column says wall. A case is queued behind a kernel that spins until
everything is enqueued, as a save waits for the step that computes its blocks; host time has its own bar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.transfer import make_cache
from kvtier.layout import CacheGroup, KVLayout
from kvtier.memory import Buffer, Event, Placement, Stream, cuda
from kvtier.transfer import CompiledTransfer, DeviceCache, HostMemory, TransferConfig, TransferManager
from kvtier.transfer.block_view import Direction

GPU = Placement("cuda", 0)
SHAPES = {
    "Llama-3-8B, 16 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 16),
    "Llama-3-8B, 64 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 64),
    "DeepSeek-MLA, 16 tokens": CacheGroup.mla("main", 61, 576, "bf16", 16),
    "Qwen3-0.6B, 16 tokens": CacheGroup.attention("main", 28, 8, 128, "bf16", 16),
}
FORMS = ("block-first", "layer-first")
LARGE, SMALL, MARGIN = 1 << 30, 64 << 20, 32 << 20
ROUNDS = 5
SPIN = 10_000_000  # cycles: about 5 ms, longer than enqueueing takes
NO_WAIT = Event()


@dataclass
class Case:
    """One block shape in one cache layout, with scattered ids for 1 GiB and for 64 MiB."""

    shape: str
    form: str
    group: CacheGroup
    manager: TransferManager
    cache: DeviceCache
    host: HostMemory

    def ids(self, nbytes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return scattered device and host ids for a number of bytes."""
        count = -(-nbytes // self.group.block_bytes)
        random = np.random.default_rng(seed)
        return random.permutation(self.cache.num_blocks)[:count], random.permutation(self.host.num_ready)[:count]


def make_case(shape: str, form: str, config: TransferConfig | None = None, host: HostMemory | None = None) -> Case:
    """Return a case with twice the moved blocks on both sides."""
    group = SHAPES[shape]
    count = 2 * LARGE // group.block_bytes + 4
    cache = make_cache(group, count, form, GPU.torch)
    host = host or HostMemory(group, count, GPU)
    host.wait_ready()
    manager = TransferManager(KVLayout(16, (group,)), GPU, config)
    manager.register(cache, host)
    return Case(shape, form, group, manager, cache, host)


def spin(stream: Stream | None = None, *, timing: bool = False) -> Event:
    """Return an event behind a kernel that spins."""
    stream = stream or Stream.wrap(torch.cuda.current_stream())
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(SPIN)
    return stream.record(Event(timing=timing))


class Link:
    """Contiguous copies, and copies of peers, on a separate stream."""

    def __init__(self) -> None:
        self.stream, self.other = Stream(GPU), Stream(GPU)
        self.device, self.host = Buffer(LARGE + MARGIN, "u8", GPU), Buffer(LARGE + MARGIN, "u8", "pinned")
        self.device2, self.host2 = Buffer(LARGE + MARGIN, "u8", GPU), Buffer(LARGE + MARGIN, "u8", "pinned")
        for buffer in (self.host, self.host2):
            buffer.fill(1)
        self.call = cuda.batch_call(GPU)
        torch.cuda.synchronize()

    def copy(self, direction: Direction, nbytes: int, stream: Stream, *, second: bool = False) -> None:
        """Enqueue one contiguous copy."""
        device, host = (self.device2, self.host2) if second else (self.device, self.host)
        src, dst = (device, host) if direction is Direction.D2H else (host, device)
        cuda.memcpy_async(dst.data(), src.data(), nbytes, stream)

    def seconds(self, direction: Direction, nbytes: int) -> float:
        """Return the seconds of one contiguous copy."""
        return self.timed(lambda: self.copy(direction, nbytes, self.stream))

    def raw_batch(self, compiled: CompiledTransfer) -> None:
        """Enqueue the driver's batch call on the pieces."""
        for part in compiled.slices:
            assert self.call.submit(part.tables[0], self.stream) is None

    def timed(self, task: Callable[[], object]) -> float:
        """Return the device seconds of `task`, behind a spinning kernel."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait(spin())
        begin.record(self.stream.native)
        task()
        end.record(self.stream.native)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def num_copies(compiled: CompiledTransfer) -> int:
    """Return the copies of the submitted slices, over the link and inside the device."""
    tables = [table for part in compiled.slices for table in part.made or ()]
    return sum(table.shape[1] for table in tables if table is not None)
