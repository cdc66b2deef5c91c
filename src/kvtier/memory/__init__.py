"""Memory: typed buffers, placements, allocators, streams, and batched copies, on the CPU and on CUDA."""

from kvtier.memory.allocator import Allocator, AllocatorStats, default_allocator
from kvtier.memory.batch_copy import BatchCopy, CopyResult, clear, copy, empty_like
from kvtier.memory.buffer import Buffer
from kvtier.memory.context import context, current_allocator, current_stream
from kvtier.memory.costs import CostTable, calibrate, cost_table
from kvtier.memory.placement import CPU, PINNED, Placement, best_host
from kvtier.memory.serialize import Loaded, load, save, saved_nbytes
from kvtier.memory.stream import Event, Stream

__all__ = [
    "CPU",
    "PINNED",
    "Allocator",
    "AllocatorStats",
    "BatchCopy",
    "Buffer",
    "CopyResult",
    "CostTable",
    "Event",
    "Loaded",
    "Placement",
    "Stream",
    "best_host",
    "calibrate",
    "clear",
    "context",
    "copy",
    "cost_table",
    "current_allocator",
    "current_stream",
    "default_allocator",
    "empty_like",
    "load",
    "save",
    "saved_nbytes",
]
