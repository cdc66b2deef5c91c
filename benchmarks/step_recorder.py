"""StepRecorder: a request log that also has all calls of the scheduler and all reports, for benchmarks/follow.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.cache.in_flight import PendingTransfer
from kvtier.messages import KEY_BYTES, Report
from kvtier.replay.recorder import Recorder
from kvtier.scheduler import Request, RowResult, Scheduler, Step


class StepRecorder:
    """A Recorder whose log has the events add, step, report, update, fail, discard and cancel as well."""

    def __init__(self, path: str | Path, *, secret: bytes | None = None) -> None:
        self._log = Recorder(path, secret=secret)
        self._begin = 0.0
        self._wrapped: list[tuple[object, str]] = []

    def attach(self, scheduler: Scheduler, *, now: float) -> None:
        """Start recording, with an empty cache; `now` is time 0 of the log."""
        self._log.attach(scheduler, now=now)
        self._begin = now
        self._wrap(scheduler, "add", self._add)
        self._wrap(scheduler, "schedule", self._schedule)
        self._wrap(scheduler, "update", self._update)
        self._wrap(scheduler, "fail", self._fail)
        self._wrap(scheduler, "discard", self._discard)
        self._wrap(scheduler, "cancel", self._cancel)
        self._wrap(scheduler.manager, "apply", self._apply)

    def close(self) -> None:
        """Detach from the scheduler and close the file. Idempotent."""
        self._log.close()
        for target, name in self._wrapped:
            vars(target).pop(name, None)

    def _wrap(self, target: object, name: str, through: Callable[..., Any]) -> None:
        inner = getattr(target, name)
        setattr(target, name, lambda *args, **options: through(inner, *args, **options))
        self._wrapped.append((target, name))

    def _write(self, event: str, now: float, **fields: Any) -> None:
        self._log.write(event=event, t=now - self._begin, **fields)

    def _add(self, inner: Callable[..., None], request: Request, now: float) -> None:
        inner(request, now)
        self._write(
            "add",
            now,
            id=request.id,
            prompt_tokens=request.num_prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            priority=request.priority,
        )

    def _schedule(self, inner: Callable[..., Step], now: float) -> Step:
        step = inner(now)
        self._write("step", now, **describe(step))
        return step

    def _update(self, inner: Callable[..., None], step: Step, results: Sequence[RowResult], now: float) -> None:
        self._write("update", now, results=[[len(result.tokens), result.finished] for result in results])
        inner(step, results, now)

    def _fail(self, inner: Callable[..., tuple[Request, ...]], step: Step, now: float) -> tuple[Request, ...]:
        failed = inner(step, now)
        self._write("fail", now)
        return failed

    def _discard(self, inner: Callable[..., None], step: Step, now: float) -> None:
        inner(step, now)
        self._write("discard", now)

    def _cancel(self, inner: Callable[..., bool], request: Request, now: float) -> bool:
        was_live = inner(request, now)
        if was_live:
            self._write("cancel", now, id=request.id)
        return was_live

    def _apply(self, inner: Callable[..., list[PendingTransfer]], report: Report) -> list[PendingTransfer]:
        names = self._log.names
        self._log.write(
            event="report",
            epoch=report.epoch,
            rank=report.rank,
            outcomes=[[o.transfer_id, o.ok, o.num_bytes, o.seconds, o.arrived.hex()] for o in report.results],
            presences=[[p.store, names(p.present), names(p.absent), p.probe_id] for p in report.lookups],
            sizes=[["host", report.num_host_slots]] if report.num_host_slots else [],
            damaged=report.damaged.hex(),
        )
        return inner(report)


def describe(step: Step) -> dict[str, Any]:
    """Return the log fields of a step."""
    return {
        "rows": [[row.request.id, row.first, row.num_tokens, row.num_draft] for row in step.rows],
        "transfers": [[t.id, t.route.value, t.num_blocks] for t in step.plan.transfers],
        "probes": [[p.id, p.store, len(p.keys) // KEY_BYTES] for p in step.plan.probes],
    }
