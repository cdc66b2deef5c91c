"""The current stream and allocators of a thread or asyncio task, and functions that run work in stream order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import torch

from kvtier.errors import ArgumentError, StateError
from kvtier.memory.allocator import Allocator, default_allocator
from kvtier.memory.cuda import is_capturing
from kvtier.memory.placement import Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Event, Stream

_stream: ContextVar[Stream | None] = ContextVar("kvtier_stream", default=None)
_allocators: ContextVar[Mapping[Placement, Allocator]] = ContextVar(
    "kvtier_allocators",
    default=MappingProxyType({}),
)


@contextmanager
def context(
    *, stream: Stream | None = None, allocator: Allocator | Iterable[Allocator] | None = None
) -> Iterator[None]:
    """Use this stream and at most one allocator per placement in the `with` body. None keeps the current values.

    Contexts can be nested. A new thread starts with the defaults. torch's own current stream is not changed.
    """
    given = [] if allocator is None else [allocator] if isinstance(allocator, Allocator) else list(allocator)
    if stream is not None and not isinstance(stream, Stream):
        raise ArgumentError(f"expected a Stream, got {type(stream).__name__}; wrap other types with Stream.wrap()")
    if len({each.placement for each in given}) < len(given):
        raise ArgumentError("two allocators of one placement were given; only one can be current")
    stream_token = _stream.set(stream or _stream.get())
    allocators_token = _allocators.set({**_allocators.get(), **{each.placement: each for each in given}})
    try:
        yield
    finally:
        _allocators.reset(allocators_token)
        _stream.reset(stream_token)


def current_stream(placement: Placement) -> Stream | None:
    """Return the stream for work on memory at `placement`.

    This is the stream of the context. If the context has no stream, the result is torch's current stream for GPU
    memory, and None for host memory. None means that the work runs immediately.
    """
    return choose_stream(None, placement)


def allocate(nbytes: int, placement: Placement, allocator: Allocator | None = None) -> MemoryRef:
    """Allocate memory from `allocator` (default: the current allocator) for use on the current stream.

    torch's pool may return memory that is still used by pending work on torch's current stream. If the current kvtier
    stream is on the GPU of `placement`, this function therefore allocates with that stream as torch's current stream.
    """
    source, stream = allocator or current_allocator(placement), _stream.get()
    if stream is None or not placement.is_device or stream.placement != placement:
        return source.allocate(nbytes)
    with torch.cuda.stream(stream.native):
        return source.allocate(nbytes)


def current_allocator(placement: Placement) -> Allocator:
    """Return the context's allocator for `placement`, or else the default allocator."""
    return _allocators.get().get(placement) or default_allocator(placement)


def choose_stream(stream: Stream | None, *placements: Placement) -> Stream | None:
    """Return `stream` if given, otherwise the current stream for work on `placements` (see `current_stream`).

    None means that the caller must do the work immediately.
    """
    stream, devices = stream or _stream.get(), [each for each in placements if each.is_device]
    if stream is None:
        return Stream.wrap(torch.cuda.current_stream(devices[-1].torch)) if devices else None
    if devices and stream.placement not in devices:
        raise ArgumentError(
            f"work on {devices[-1]} memory cannot run on a stream on {stream.placement}; pass another stream, or use "
            f"`with context(stream=Stream({str(devices[-1])!r}))`"
        )
    return stream


def launch(
    task: Callable[[], object], stream: Stream | None, *, on_device: bool, holdings: Iterable[MemoryRef]
) -> None:
    """Run `task` in the order of `stream`, or immediately without a stream.

    `on_device` is True if the task accesses GPU memory. On a host stream, `task` must itself refer to the memory that
    it uses. On a CUDA stream, the memory in `holdings` is kept alive until the work is done, except during a capture.
    """
    if stream is None:
        task()
    elif not stream.placement.is_device:
        stream.enqueue(task)
    elif on_device:
        try:
            with torch.cuda.stream(stream.native):
                task()
        finally:  # if the task fails, a part of its work may be in flight
            if not is_capturing(stream):  # the graph can be replayed later, so the caller must keep the memory
                hold(stream, holdings)
    else:
        run_after(stream, task)


def run_after(stream: Stream, task: Callable[[], object]) -> None:
    """Run host work in the order of a CUDA stream: wait for the stream, then run the task on this thread."""
    if is_capturing(stream):
        raise StateError("a copy between host memories cannot be captured in a CUDA graph: copy outside the capture")
    stream.synchronize()
    task()


def hold(stream: Stream, holdings: Iterable[MemoryRef]) -> None:
    """Keep the memory in `holdings` from being freed or reused until the current work of `stream` is done."""
    event: Event | None = None
    for holding in holdings:
        if not holding.used_in_pool(stream):
            event = event or stream.record()
            holding.used_by(stream, event)
