"""Running one piece of work on the right stream, with the memory it uses kept alive until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kvtier.errors import PlacementError, StateError
from kvtier.memory.context import current_stream
from kvtier.memory.cuda import is_capturing
from kvtier.memory.placement import CPU, Placement
from kvtier.memory.region import Holding
from kvtier.memory.stream import Event, Stream


def choose_stream(stream: Stream | None, *placements: Placement) -> Stream | None:
    """The stream for work on memory at `placements`: the given one if it fits, else the current one. None: at once."""
    devices = [each for each in placements if each.is_device]
    if stream is None:
        return current_stream(*reversed(devices)) if devices else current_stream(CPU)
    if devices and stream.placement not in devices:
        raise PlacementError(
            f"work on {devices[-1]} memory cannot go to a stream on {stream.placement}; pass a stream on {devices[-1]}"
        )
    return stream


def launch(task: Callable[[], object], stream: Stream | None, *, on_device: bool, holdings: Iterable[Holding]) -> None:
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


def hold(stream: Stream, holdings: Iterable[Holding]) -> None:
    """Keep this memory from being reused until what `stream` has been given so far is done."""
    event: Event | None = None
    for holding in holdings:
        if not holding.used_in_pool(stream):
            event = event or stream.record()
            holding.used_by(stream, event)
