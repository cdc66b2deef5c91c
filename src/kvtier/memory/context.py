"""The stream and the allocators in force, per thread and per asyncio task (contextvars)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from kvtier.errors import ArgumentError, PlacementError
from kvtier.memory.allocator import Allocator, default_allocator
from kvtier.memory.placement import Placement
from kvtier.memory.region import Holding
from kvtier.memory.stream import Stream


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
        raise PlacementError(
            f"the stream in force is on {stream.placement}, but the memory is on {placement}: "
            f"use `with context(stream=Stream({str(placement)!r}))` around this call"
        )
    return stream


def allocate(nbytes: int, placement: Placement, allocator: Allocator | None = None) -> Holding:
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
