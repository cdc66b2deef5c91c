"""From collected copies to steps: each a set of independent pieces of one direction, on the path chosen for it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.memory import cuda
from kvtier.memory.copy_paths import Direction, Job, PathName, Pieces, run_path, why_not
from kvtier.memory.copy_plan import ALONE, I64, CopyPlan, Entries, plan_copies
from kvtier.memory.costs import CostTable, cost_table, saved_costs
from kvtier.memory.launch import hold, launch, run_after
from kvtier.memory.region import Holding
from kvtier.memory.stream import Stream


@dataclass(frozen=True, slots=True)
class Chunk:
    """Copies added together: of one direction and one scope."""

    src: I64
    dst: I64
    nbytes: I64
    direction: Direction
    scope: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A whole batch, merged and in waves."""

    merged: CopyPlan
    directions: tuple[Direction, ...]
    kinds: I64 | None
    """For each entry, which of `directions`; None if there is only one."""
    origin: I64 | None
    """For each entry, its number among the calls; None if it is the same (no call was of zero bytes)."""
    num_calls: int


@dataclass(frozen=True, slots=True)
class Step:
    """Pieces that run together. With path "loop" they run one after another and need not be independent."""

    job: Job
    pieces: Pieces
    path: PathName
    reason: str
    """Why this path: the estimate it won by, or what ruled the others out."""

    def run(self) -> None:
        """Carry it out, or give it to the job's stream."""
        run_path(self.path, self.job, self.pieces)


@dataclass(frozen=True, slots=True)
class _Choice:
    path: PathName
    reason: str


def plan_chunks(chunks: Sequence[Chunk]) -> BatchPlan:
    """Join the chunks, drop what moves no bytes, find waves and merge."""
    directions = tuple(dict.fromkeys(chunk.direction for chunk in chunks))
    num_calls = sum(len(chunk.src) for chunk in chunks)
    kinds: I64 | None = None
    if len(chunks) == 1:
        only = chunks[0]
        scope = None if only.scope != ALONE else np.full(num_calls, ALONE)
        entries = Entries(only.src, only.dst, only.nbytes, scope)
    else:
        lengths = [len(chunk.src) for chunk in chunks]
        kind_of_chunk = np.array([directions.index(chunk.direction) for chunk in chunks])
        # pieces of two directions never merge, though their addresses may happen to touch
        scopes = np.array([chunk.scope if chunk.scope == ALONE else chunk.scope * len(directions) for chunk in chunks])
        scopes = np.where(scopes == ALONE, ALONE, scopes + kind_of_chunk)
        entries = Entries(
            np.concatenate([chunk.src for chunk in chunks]),
            np.concatenate([chunk.dst for chunk in chunks]),
            np.concatenate([chunk.nbytes for chunk in chunks]),
            np.repeat(scopes, lengths),
        )
        kinds = np.repeat(kind_of_chunk, lengths) if len(directions) > 1 else None
    origin: I64 | None = None
    if not bool(entries.nbytes.all()):
        origin = np.flatnonzero(entries.nbytes)
        entries = entries.take(origin)
        kinds = None if kinds is None else kinds[origin]
    return BatchPlan(plan_copies(entries), directions, kinds, origin, num_calls)


def plan_steps(
    plan: BatchPlan, stream: Stream | None, forced: PathName | None, costs: CostTable | None
) -> tuple[Step, ...]:
    """Choose a path for the pieces of each wave and direction."""
    merged = plan.merged
    capturing = stream is not None and stream.placement.is_device and cuda.is_capturing(stream)
    jobs = [Job(src, dst, stream, capturing) for src, dst in plan.directions]
    first = merged.order[merged.parts[:-1]]
    origin = first if plan.origin is None else plan.origin[first]
    pieces = Pieces(merged.src, merged.dst, merged.nbytes, origin)
    kinds = None if plan.kinds is None else plan.kinds[first]
    if merged.in_order:
        reason = "the pieces depend on each other too much for waves, so they run one by one"
        return tuple(Step(jobs[kind], pieces.part(run), "loop", reason) for kind, run in _runs(kinds, len(pieces)))
    return tuple(
        step
        for kind, group in _groups(pieces, merged, kinds)
        for step in _independent_steps(jobs[kind], group, merged.overlapping, forced, costs)
    )


def run_steps(steps: Sequence[Step], stream: Stream | None, holdings: list[Holding]) -> None:
    """Run the steps in order. Memory in `holdings` is kept until they are done."""
    if not any(step.job.on_device for step in steps):
        # bound, so that a host stream keeps the memory until it has come to this
        return launch(functools.partial(_run_all, steps, holdings), stream, on_device=False, holdings=())
    assert stream is not None
    for step in steps:
        if step.job.on_device:
            step.run()
        else:
            run_after(stream, step.run)
    if holdings and not steps[0].job.capturing:
        hold(stream, holdings)


def _run_all(steps: Sequence[Step], _kept: list[Holding]) -> None:
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
    if merged.num_waves == 1 and kinds is None:
        yield 0, pieces
        return
    for start, stop in itertools.pairwise(merged.wave_starts.tolist()):
        wave = pieces.part(slice(start, stop))
        if kinds is None:
            yield 0, wave
            continue
        kinds_here = kinds[start:stop]
        for kind in np.unique(kinds_here).tolist():
            yield kind, wave.part(kinds_here == kind)


def _independent_steps(
    job: Job, pieces: Pieces, overlapping: bool, forced: PathName | None, costs: CostTable | None
) -> Iterator[Step]:
    if overlapping:
        onto_itself = np.abs(pieces.src - pieces.dst) < pieces.nbytes
        if onto_itself.any():
            yield Step(job, pieces.part(onto_itself), "loop", "source and destination of a piece overlap")
            pieces = pieces.part(~onto_itself)
    if len(pieces):
        choice = _choose(job, pieces, forced, costs)
        yield Step(job, pieces, choice.path, choice.reason)


def _choose(job: Job, pieces: Pieces, forced: PathName | None, costs: CostTable | None) -> _Choice:
    note = ""
    if forced is not None:
        refusal = why_not(forced, job)
        if refusal is None:
            return _Choice(forced, "forced")
        note = f"{forced} was forced, but {refusal}; "
    if not job.on_device:
        refusal = why_not("host", job)
        return (
            _Choice("host", f"{note}compiled copier")
            if refusal is None
            else _Choice("loop", f"{note}no host path: {refusal}")
        )
    refusals = {path: why_not(path, job) for path in ("gather", "driver", "loop")}
    able: list[PathName] = [path for path, refusal in refusals.items() if refusal is None]  # type: ignore[misc]
    unable = "; ".join(f"no {path}: {refusal}" for path, refusal in refusals.items() if refusal is not None)
    if len(able) == 1:
        return _Choice(able[0], f"{note}{unable}")
    device = job.dst if job.dst.is_device else job.src
    table = costs or (saved_costs(device) if job.capturing else cost_table(device))
    if table is None:
        return _Choice(able[0], f"{note}no costs measured yet, and none can be during graph capture")
    nbytes = int(pieces.nbytes.sum())
    estimates = {path: table.estimate_us(job, path, len(pieces), nbytes) for path in able}
    best = min(estimates, key=lambda path: estimates[path])
    told = ", ".join(f"{path} {us:.0f} us" for path, us in sorted(estimates.items(), key=lambda item: item[1]))
    return _Choice(best, f"{note}estimated {told}" + (f"; {unable}" if unable else ""))
