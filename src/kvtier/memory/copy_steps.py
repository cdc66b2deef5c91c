"""From collected copies to steps: each a set of independent pieces of one direction, on the path chosen for it."""

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
from kvtier.memory.copy_plan import ALONE, I64, NBYTES, CopyPlan, Entries, plan_copies, scan
from kvtier.memory.costs import CostTable, cost_table, saved_costs
from kvtier.memory.native import native
from kvtier.memory.placement import Placement
from kvtier.memory.region import MemoryRef
from kvtier.memory.stream import Stream


@dataclass(slots=True)
class Chunk:
    """Copies added together: of one direction and one scope."""

    table: I64
    """Rows as in Entries."""
    direction: Direction
    scope: int
    has_empty: bool
    """Whether some copy is of zero bytes."""
    nbytes: int | None = None
    """Of all copies together, if they are known to be independent and sorted, with nothing to merge."""


@dataclass(slots=True)
class BatchPlan:
    """A whole batch, merged and in waves."""

    merged: CopyPlan
    directions: tuple[Direction, ...]
    kinds: I64 | None
    """For each call, which of `directions`; None if there is only one."""
    num_calls: int


@dataclass(slots=True)
class CopyStep:
    """Pieces that run together. With path "loop" they run one after another and need not be independent."""

    job: CopyContext
    pieces: Pieces
    path: PathName
    why: str
    """What led here, but for the estimates."""
    estimates_us: Mapping[PathName, float] = field(default_factory=dict)
    """What each able path would have taken, by the cost table."""

    @property
    def reason(self) -> str:
        """Why this path: the estimate it won by, or what ruled the others out."""
        ranked = sorted(self.estimates_us.items(), key=lambda item: item[1])
        told = ", ".join(f"{path} {us:.0f} us" for path, us in ranked)
        return (self.why + (told and f"estimated {told}")).rstrip("; ")

    def run(self) -> None:
        """Carry it out, or give it to the job's stream."""
        ran = run_path(self.path, self.job, self.pieces)
        if ran != self.path:
            before = f"{self.why.rstrip('; ')}; " if self.why else ""
            self.why = f"{before}the driver refused the batch, so its pieces ran one by one; "
            self.path = ran


def plan_chunks(chunks: Sequence[Chunk]) -> BatchPlan:
    """Join the chunks, drop what moves no bytes, find waves and merge."""
    if len(chunks) == 1 and chunks[0].nbytes is not None:
        table = chunks[0].table
        count = table.shape[1]
        merged = CopyPlan(table, chunks[0].nbytes, [0, count], Entries(table), None)
        return BatchPlan(merged, (chunks[0].direction,), None, count)
    entries, directions, kinds = _join(chunks)
    num_calls = len(entries)
    code = native().code
    look = scan if code is None else code.scan
    if not any(chunk.has_empty for chunk in chunks):
        return BatchPlan(plan_copies(entries, look), directions, kinds, num_calls)
    moving = np.flatnonzero(entries.table[NBYTES])
    merged = plan_copies(entries.take(moving), look)
    order = moving if merged.order is None else moving[merged.order]
    return BatchPlan(replace(merged, order=order), directions, kinds, num_calls)


def _join(chunks: Sequence[Chunk]) -> tuple[Entries, tuple[Direction, ...], I64 | None]:
    """All chunks as entries, with the directions there are and which of them each entry has (None: all the one)."""
    if len(chunks) == 1:
        only = chunks[0]
        scope = None if only.scope != ALONE else np.full(only.table.shape[1], ALONE)
        return Entries(only.table, scope), (only.direction,), None
    directions = tuple(dict.fromkeys(chunk.direction for chunk in chunks))
    lengths = [chunk.table.shape[1] for chunk in chunks]
    kinds = [directions.index(chunk.direction) for chunk in chunks]
    # pieces of two directions never merge, though their addresses may happen to touch
    scopes = [
        ALONE if chunk.scope == ALONE else chunk.scope * len(directions) + kind
        for chunk, kind in zip(chunks, kinds, strict=True)
    ]
    entries = Entries(np.concatenate([chunk.table for chunk in chunks], axis=1), np.repeat(scopes, lengths))
    return entries, directions, np.repeat(kinds, lengths) if len(directions) > 1 else None


def plan_steps(
    plan: BatchPlan, stream: Stream | None, forced: PathName | None, costs: CostTable | None
) -> tuple[CopyStep, ...]:
    """Choose a path for the pieces of each wave and direction."""
    merged = plan.merged
    capturing = stream is not None and stream.placement.is_device and cuda.is_capturing(stream)
    jobs = [CopyContext(src, dst, stream, capturing) for src, dst in plan.directions]
    pieces = Pieces(merged.table, merged)
    if plan.kinds is None and merged.num_waves == 1 and not (merged.in_order or merged.overlapping):
        return (_choose(jobs[0], pieces, forced, costs),)  # the usual case, spared the detours below
    kinds = None if plan.kinds is None else plan.kinds[merged.first_entries()]
    if merged.in_order:
        reason = _only_loop("the pieces depend on each other too much for waves, so they run one by one", forced)
        return tuple(CopyStep(jobs[kind], pieces.part(run), "loop", reason) for kind, run in _runs(kinds, len(pieces)))
    return tuple(
        step
        for kind, group in _groups(pieces, merged, kinds)
        for step in _independent_steps(jobs[kind], group, merged.overlapping, forced, costs)
    )


def run_steps(steps: Sequence[CopyStep], stream: Stream | None, holdings: list[MemoryRef]) -> None:
    """Run the steps in order. Memory in `holdings` is kept until they are done."""
    if not steps:
        return
    if not any(step.job.on_device for step in steps):
        # bound, so that a host stream keeps the memory until it has come to this
        return launch(functools.partial(_run_all, steps, holdings), stream, on_device=False, holdings=())
    assert stream is not None
    try:
        for step in steps:
            if step.job.on_device:
                step.run()
            else:
                run_after(stream, step.run)
    finally:  # if one fails, those before it are under way
        if holdings and not steps[0].job.capturing:
            hold(stream, holdings)


def _run_all(steps: Sequence[CopyStep], _kept: list[MemoryRef]) -> None:
    for step in steps:
        step.run()


def _runs(kinds: I64 | None, count: int) -> Iterator[tuple[int, slice]]:
    """Stretches of neighbouring pieces of one direction."""
    if kinds is None:
        yield 0, slice(0, count)
        return
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), count], strict=True):
        yield int(kinds[start]), slice(start, stop)


def _groups(pieces: Pieces, merged: CopyPlan, kinds: I64 | None) -> Iterator[tuple[int, Pieces]]:
    """The pieces by wave, then by direction."""
    for start, stop in itertools.pairwise(merged.wave_starts):
        wave = pieces.part(slice(start, stop))
        if kinds is None:
            yield 0, wave
            continue
        kinds_here = kinds[start:stop]
        for kind in np.unique(kinds_here).tolist():
            yield kind, wave.part(kinds_here == kind)


def _independent_steps(
    job: CopyContext, pieces: Pieces, overlapping: bool, forced: PathName | None, costs: CostTable | None
) -> Iterator[CopyStep]:
    if overlapping:
        src, dst, nbytes = pieces.table
        onto_itself = np.abs(src - dst) < nbytes
        if onto_itself.any():
            reason = _only_loop("source and destination of a piece overlap", forced)
            yield CopyStep(job, pieces.part(onto_itself), "loop", reason)
            pieces = pieces.part(~onto_itself)
    if len(pieces):
        yield _choose(job, pieces, forced, costs)


def _only_loop(why: str, forced: PathName | None) -> str:
    return why if forced in (None, "loop") else f"{forced} was forced, but {why}"


def _choose(job: CopyContext, pieces: Pieces, forced: PathName | None, costs: CostTable | None) -> CopyStep:
    if costs is None and forced is None and job.on_device:
        device = job.dst if job.dst.is_device else job.src
        costs = saved_costs(device) if job.capturing else cost_table(device)  # nothing can be measured in a capture
    choice = _decide(job.src, job.dst, job.capturing, forced, costs, len(pieces), pieces.nbytes)
    return CopyStep(job, pieces, choice.path, choice.why, choice.estimates_us)


@dataclass(frozen=True, slots=True)
class _PathChoice:
    path: PathName
    why: str
    estimates_us: Mapping[PathName, float] = field(default_factory=dict)


# Batches of one shape come again and again, and deciding costs more than all else that is left to do in Python.
@functools.lru_cache(maxsize=4096)
def _decide(
    src: Placement,
    dst: Placement,
    capturing: bool,
    forced: PathName | None,
    costs: CostTable | None,
    num_pieces: int,
    nbytes: int,
) -> _PathChoice:
    """The path to take, and why the others cannot or would take longer."""
    job = CopyContext(src, dst, None, capturing)
    why = ""
    if forced is not None:
        refusal = why_not(forced, job)
        if refusal is None:
            return _PathChoice(forced, "forced")
        why = f"{forced} was forced, but {refusal}; "
    usable, refusals = usable_paths(job)
    why += refusals
    if not job.on_device:
        return _PathChoice(usable[0], why or "compiled copier")
    if len(usable) == 1:
        return _PathChoice(usable[0], why)
    if costs is None:  # in a capture, or another path was forced
        return _PathChoice(usable[0], f"{why}no costs known")
    estimates = costs.estimate_us(job, num_pieces, nbytes)
    return _PathChoice(min(usable, key=lambda path: estimates.get(path, math.inf)), why, estimates)
