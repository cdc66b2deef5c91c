"""Turn collected copies into steps. A step is a set of pieces (merged copies) with one direction and one path."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.memory import cuda
from kvtier.memory.context import hold, launch, run_after
from kvtier.memory.copy_paths import CopyContext, Direction, PathName, Pieces, run_path, usable_paths, why_not
from kvtier.memory.copy_plan import ALONE, I64, NBYTES, CopyPlan, plan_copies, scan
from kvtier.memory.costs import CostTable, cost_table, saved_costs
from kvtier.memory.native import native
from kvtier.memory.placement import Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Stream


@dataclass(slots=True)
class Chunk:
    """Copies that were added together. All of them have the same direction and the same scope (see copy_plan.py)."""

    table: I64
    direction: Direction
    scope: int
    has_empty: bool
    """True if some copy has zero bytes."""
    nbytes: int | None = None
    """Total bytes. Set only if the copies are known to be independent and sorted, with nothing to merge."""


@dataclass(slots=True)
class CopyStep:
    """Pieces that run together. With path "loop" they run one after another and need not be independent."""

    job: CopyContext
    pieces: Pieces
    path: PathName
    why: str
    """The reason for the path, without the estimates."""
    estimates_us: Mapping[PathName, float] = field(default_factory=dict)
    """Estimated time of each measured path, from the cost table."""

    @property
    def reason(self) -> str:
        """The reason for this path, with the estimates and the reasons that exclude other paths."""
        ranked = sorted(self.estimates_us.items(), key=lambda item: item[1])
        estimates = ", ".join(f"{path} {us:.0f} us" for path, us in ranked)
        return (self.why + (estimates and f"estimated {estimates}")).rstrip("; ")

    def run(self) -> None:
        ran = run_path(self.path, self.job, self.pieces)
        if ran != self.path:
            before = f"{self.why.rstrip('; ')}; " if self.why else ""
            self.why = f"{before}the driver refused the batch, so its pieces ran one by one; "
            self.path = ran


Directions = tuple[tuple[Direction, ...], I64 | None]
"""The directions of a batch, and the index of the direction of each copy (None if there is only one direction)."""


def plan_chunks(chunks: Sequence[Chunk]) -> tuple[CopyPlan, Directions]:
    """Join the chunks, drop copies of zero bytes, find waves and merge."""
    if len(chunks) == 1 and chunks[0].nbytes is not None:
        table = chunks[0].table
        return CopyPlan(table, chunks[0].nbytes, [0, table.shape[1]], table, None), ((chunks[0].direction,), None)
    table, scopes, directions = _join(chunks)
    code = native().code
    scan_with = scan if code is None else code.scan
    if not any(chunk.has_empty for chunk in chunks):
        return plan_copies(table, scopes, scan_with), directions
    moving = np.flatnonzero(table[NBYTES])
    plan = plan_copies(table.take(moving, axis=1), None if scopes is None else scopes[moving], scan_with)
    return replace(plan, order=moving if plan.order is None else moving[plan.order]), directions


def _join(chunks: Sequence[Chunk]) -> tuple[I64, I64 | None, Directions]:
    if len(chunks) == 1:
        only = chunks[0]
        scopes = None if only.scope != ALONE else np.full(only.table.shape[1], ALONE)
        return only.table, scopes, ((only.direction,), None)
    directions = tuple(dict.fromkeys(chunk.direction for chunk in chunks))
    lengths = [chunk.table.shape[1] for chunk in chunks]
    kinds = [directions.index(chunk.direction) for chunk in chunks]
    # entries of different directions never merge, even if their addresses are adjacent
    scopes = np.repeat(
        [
            ALONE if chunk.scope == ALONE else chunk.scope * len(directions) + kind
            for chunk, kind in zip(chunks, kinds, strict=True)
        ],
        lengths,
    )
    table = np.concatenate([chunk.table for chunk in chunks], axis=1)
    return table, scopes, (directions, np.repeat(kinds, lengths) if len(directions) > 1 else None)


def plan_steps(
    plan: CopyPlan, directions: Directions, stream: Stream | None, forced: PathName | None
) -> tuple[CopyStep, ...]:
    """Choose a path for the pieces of each wave and direction."""
    capturing = stream is not None and stream.placement.is_device and cuda.is_capturing(stream)
    jobs = [CopyContext(src, dst, stream, capturing) for src, dst in directions[0]]
    kinds, pieces = directions[1], Pieces(plan.table, plan)
    if kinds is None and plan.num_waves == 1 and not (plan.in_order or plan.overlapping):
        return (_choose(jobs[0], pieces, forced),)  # the usual case
    if kinds is not None:
        kinds = kinds[plan.first_entries()]
    if plan.in_order:
        reason = _only_loop("the pieces have too many dependencies for waves, so they run one by one", forced)
        return tuple(CopyStep(jobs[kind], pieces.part(run), "loop", reason) for kind, run in _runs(kinds, len(pieces)))
    return tuple(
        step
        for kind, group in _groups(pieces, plan.wave_starts, kinds)
        for step in _independent_steps(jobs[kind], group, plan.overlapping, forced)
    )


def run_steps(steps: Sequence[CopyStep], stream: Stream | None, holdings: list[MemoryRef]) -> None:
    """Run the steps in order. Except in a graph capture, keep `holdings` alive until the steps are done."""
    if not steps:
        return
    if not any(step.job.on_device for step in steps):
        # the partial refers to `holdings`, so that a host stream keeps the memory alive until the task has run
        return launch(functools.partial(_run_all, steps, holdings), stream, on_device=False, holdings=())
    assert stream is not None
    try:
        for step in steps:
            if step.job.on_device:
                step.run()
            else:
                run_after(stream, step.run)
    finally:  # if a step fails, earlier steps may be in flight
        if holdings and not steps[0].job.capturing:
            hold(stream, holdings)


def _run_all(steps: Sequence[CopyStep], _kept: list[MemoryRef]) -> None:
    for step in steps:
        step.run()


def _runs(kinds: I64 | None, count: int) -> Iterator[tuple[int, slice]]:
    """Yield each run of consecutive pieces with the same direction, as (index of the direction, slice)."""
    if kinds is None:
        yield 0, slice(0, count)
        return
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), count], strict=True):
        yield int(kinds[start]), slice(start, stop)


def _groups(pieces: Pieces, wave_starts: Sequence[int], kinds: I64 | None) -> Iterator[tuple[int, Pieces]]:
    """Yield (index of the direction, pieces) for each wave and each direction in the wave."""
    for start, stop in itertools.pairwise(wave_starts):
        wave = pieces.part(slice(start, stop))
        if kinds is None:
            yield 0, wave
            continue
        kinds_here = kinds[start:stop]
        for kind in np.unique(kinds_here).tolist():
            yield kind, wave.part(kinds_here == kind)


def _independent_steps(
    job: CopyContext, pieces: Pieces, overlapping: bool, forced: PathName | None
) -> Iterator[CopyStep]:
    if overlapping:
        src, dst, nbytes = pieces.table
        onto_itself = np.abs(src - dst) < nbytes
        if onto_itself.any():
            reason = _only_loop("source and destination of a piece overlap", forced)
            yield CopyStep(job, pieces.part(onto_itself), "loop", reason)
            pieces = pieces.part(~onto_itself)
    if len(pieces):
        yield _choose(job, pieces, forced)


def _only_loop(why: str, forced: PathName | None) -> str:
    return why if forced in (None, "loop") else f"{forced} was forced, but {why}"


def _choose(job: CopyContext, pieces: Pieces, forced: PathName | None) -> CopyStep:
    costs: CostTable | None = None
    if forced is None and job.on_device:
        device = job.dst if job.dst.is_device else job.src
        costs = saved_costs(device) if job.capturing else cost_table(device)  # a capture prevents calibration
    return CopyStep(job, pieces, *_decide(job.src, job.dst, job.capturing, forced, costs, len(pieces), pieces.nbytes))


# Cached, because batches of the same shape recur, and this function takes longer than all other planning.
@functools.lru_cache(maxsize=4096)
def _decide(
    src: Placement,
    dst: Placement,
    capturing: bool,
    forced: PathName | None,
    costs: CostTable | None,
    num_pieces: int,
    nbytes: int,
) -> tuple[PathName, str, Mapping[PathName, float]]:
    """Return the path, the reason for it, and the estimated times of the measured paths."""
    job = CopyContext(src, dst, None, capturing)
    why = ""
    if forced is not None:
        refusal = why_not(forced, job)
        if refusal is None:
            return forced, "forced", {}
        why = f"{forced} was forced, but {refusal}; "
    usable, refusals = usable_paths(job)
    why += refusals
    if not job.on_device:
        return usable[0], why or "compiled copier", {}
    if len(usable) == 1:
        return usable[0], why, {}
    if costs is None:  # during a capture, or because an unusable path was forced
        return usable[0], f"{why}no costs known", {}
    estimates = costs.estimate_us(job, num_pieces, nbytes)
    return min(usable, key=lambda path: estimates.get(path, math.inf)), why, estimates
