"""The current stream and allocator of a thread, and the stream a copy runs on.

The stream and the allocators in force, per thread and per asyncio task (contextvars).

Running one piece of work on the right stream, with the memory it uses kept alive until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from kvtier.errors import ArgumentError, StateError
from kvtier.memory.allocator import Allocator, default_allocator
from kvtier.memory.cuda import is_capturing
from kvtier.memory.placement import CPU, Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Event, Stream


@dataclass(frozen=True, slots=True)
class _Context:
    stream: Stream | None = None
    allocators: Mapping[Placement, Allocator] = field(default_factory=lambda: MappingProxyType({}))


_DEFAULTS = _Context()
_current: ContextVar[_Context] = ContextVar("kvtier_context", default=_DEFAULTS)


@contextmanager
def context(
    *, stream: Stream | None = None, allocator: Allocator | Iterable[Allocator] | None = None
) -> Iterator[None]:
    """Inside the block, use this stream and these allocators (one per placement). None keeps what is in force.

    Blocks nest. A new thread starts with the defaults. torch's own current stream is left alone.
    """
    outer = _current.get()
    given = [] if allocator is None else [allocator] if isinstance(allocator, Allocator) else list(allocator)
    if stream is not None and not isinstance(stream, Stream):
        raise ArgumentError(f"a stream is needed, got {type(stream).__name__}; Stream.wrap() takes foreign ones")
    if len({each.placement for each in given}) < len(given):
        raise ArgumentError("two allocators of one placement were given; only one can be in force")
    token = _current.set(
        _Context(stream or outer.stream, {**outer.allocators, **{each.placement: each for each in given}})
    )
    try:
        yield
    finally:
        _current.reset(token)


def current_stream(placement: Placement, *others: Placement) -> Stream | None:
    """The stream that work on memory at `placement`, or between it and `others`, goes to.

    The context's, else torch's current stream for a GPU, else None: host work without a stream is done at once.
    """
    stream = _current.get().stream
    if stream is None:
        return Stream.wrap(torch.cuda.current_stream(placement.torch)) if placement.is_device else None
    if placement.is_device and stream.placement not in (placement, *others):
        raise ArgumentError(
            f"the stream in force is on {stream.placement}, but the memory is on {placement}: "
            f"use `with context(stream=Stream({str(placement)!r}))` around this call"
        )
    return stream


def allocate(nbytes: int, placement: Placement, allocator: Allocator | None = None) -> MemoryRef:
    """Memory from `allocator`, else the current one, for use on the stream in force.

    torch's pool hands out memory that work on its own current stream may still be using, in the order of that stream;
    so that stream is made the one in force while it is asked.
    """
    source, stream = allocator or current_allocator(placement), _current.get().stream
    if stream is None or not placement.is_device or stream.placement != placement:
        return source.allocate(nbytes)
    with torch.cuda.stream(stream.native):
        return source.allocate(nbytes)


def current_allocator(placement: Placement) -> Allocator:
    """The allocator for `placement`: the context's, else the default one."""
    return _current.get().allocators.get(placement) or default_allocator(placement)


def choose_stream(stream: Stream | None, *placements: Placement) -> Stream | None:
    """The stream for work on memory at `placements`: the given one if it fits, else the current one. None: at once."""
    devices = [each for each in placements if each.is_device]
    if stream is None:
        return current_stream(*reversed(devices)) if devices else current_stream(CPU)
    if devices and stream.placement not in devices:
        raise ArgumentError(
            f"work on {devices[-1]} memory cannot go to a stream on {stream.placement}; pass a stream on {devices[-1]}"
        )
    return stream


def launch(
    task: Callable[[], object], stream: Stream | None, *, on_device: bool, holdings: Iterable[MemoryRef]
) -> None:
    """Run `task` in the order of `stream`. `on_device` says whether it touches GPU memory.

    On a host stream, `task` itself must keep its memory alive (its closure does); on CUDA the holdings are kept.
    """
    if stream is None:
        task()
    elif not stream.placement.is_device:
        stream.enqueue(task)
    elif on_device:
        try:
            with torch.cuda.stream(stream.native):
                task()
        finally:  # if it fails, part of it may be under way
            if not is_capturing(stream):  # a graph replays: its memory is the caller's to keep
                hold(stream, holdings)
    else:
        run_after(stream, task)


def run_after(stream: Stream, task: Callable[[], object]) -> None:
    """Host work in the order of a CUDA stream: wait for the stream, then do it here."""
    if is_capturing(stream):
        raise StateError("a copy between host memories cannot be captured in a CUDA graph: do it outside the capture")
    stream.synchronize()
    task()


def hold(stream: Stream, holdings: Iterable[MemoryRef]) -> None:
    """Keep this memory from being reused until what `stream` has been given so far is done."""
    event: Event | None = None
    for holding in holdings:
        if not holding.used_in_pool(stream):
            event = event or stream.record()
            holding.used_by(stream, event)
