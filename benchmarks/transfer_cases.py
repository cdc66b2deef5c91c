"""What the GPU benchmarks of transfers share: shapes of blocks, contiguous copies to compare with, a closed gate.

Times are device times (CUDA events) unless a column says wall. A case is held behind a kernel that spins until
everything is enqueued, as a save is behind the step that computes its blocks; the host's own time is a bar of its own.
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
    """One shape of blocks in one form of cache, with scattered ids for 1 GiB and for 64 MiB."""

    shape: str
    form: str
    group: CacheGroup
    manager: TransferManager
    cache: DeviceCache
    host: HostMemory

    def ids(self, nbytes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Scattered device and host ids of so many bytes."""
        count = -(-nbytes // self.group.block_bytes)
        random = np.random.default_rng(seed)
        return random.permutation(self.cache.num_blocks)[:count], random.permutation(self.host.num_ready)[:count]


def make_case(shape: str, form: str, config: TransferConfig | None = None, host: HostMemory | None = None) -> Case:
    """Twice the blocks that move, on both sides."""
    group = SHAPES[shape]
    count = 2 * LARGE // group.block_bytes + 4
    cache = make_cache(group, count, form, GPU.torch)
    host = host or HostMemory(group, count, GPU)
    host.wait_ready()
    manager = TransferManager(KVLayout(16, (group,)), GPU, config)
    manager.register(cache, host)
    return Case(shape, form, group, manager, cache, host)


def spin(stream: Stream | None = None, *, timing: bool = False) -> Event:
    """An event behind a kernel that spins for a while."""
    stream = stream or Stream.wrap(torch.cuda.current_stream())
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(SPIN)
    return stream.record(Event(timing=timing))


class Link:
    """Contiguous copies, and copies of peers, on a stream of their own."""

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
        """Of one contiguous copy."""
        return self.timed(lambda: self.copy(direction, nbytes, self.stream))

    def raw_batch(self, compiled: CompiledTransfer) -> None:
        """The driver's batch call on the pieces as they lie."""
        for part in compiled.slices:
            assert self.call.submit(part.tables[0], self.stream) is None

    def timed(self, task: Callable[[], object]) -> float:
        """Device seconds of what `task` enqueues, behind a spinning kernel."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait(spin())
        begin.record(self.stream.native)
        task()
        end.record(self.stream.native)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
