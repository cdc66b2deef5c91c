"""Simulator: runs a trace on the real scheduler and cache manager, with simulated time instead of a GPU.

arrivals ──> Scheduler ──Step──> StepCost: seconds of compute ──results──> Scheduler
                 │ plan                                                       ^
                 └──────> SimulatedWorker: end of the transfers ──reports─────┘

With two phases, a step is scheduled while the device computes the step before it, as in the engine:

    host      schedule t+1 | results of t | schedule t+2 | results of t+1 ..
    device    t .............|  t+1 ....................|  t+2 ..
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.errors import RangeError, StateError
from kvtier.index import Chain, Namespace
from kvtier.replay.cost import StepCost, Work
from kvtier.replay.sim_worker import SimulatedLink, SimulatedWorker
from kvtier.replay.trace import TraceRequest, number_paths
from kvtier.scheduler import Request, RequestState, Row, RowResult, Scheduler, SchedulerConfig, Step
from kvtier.scheduler.scheduler import MAX_IN_FLIGHT

_MAX_STEPS = 64  # maximum number of steps that are merged into one
_DRAFT = (0,) * (_MAX_STEPS - 1)


class StepCoalescer:
    """Simulates several steps as one, so that an hour of serving is simulated in a minute.

    Up to 64 steps that together take about `quantum` seconds become one step. Answers then grow by several tokens,
    as with accepted draft tokens, and prompts advance by several chunks. Events during the step take effect at its end.
    If no prompt is left to compute, a step may last until the next event. With `quantum` 0, no steps are merged.

    `host_cost` returns the part of a step's time in which the host prepares the step. This part overlaps with the
    previous step. `host_cost` is None if steps do not overlap. Merged steps overlap with each other, so each of them
    takes as long as its host time or its device time, whichever is longer.
    """

    def __init__(self, scheduler: Scheduler, cost: StepCost, quantum: float, host_cost: StepCost | None) -> None:
        if quantum < 0:
            raise RangeError(f"quantum must be 0 seconds or more, got {quantum}")
        self.count = 1
        self._scheduler, self._cost, self._host_cost, self._quantum = scheduler, cost, host_cost, quantum
        config = scheduler.config
        self._max_tokens = config.max_step_tokens
        self._limits = {
            count: replace(config, max_step_tokens=self._max_tokens * count) for count in range(1, _MAX_STEPS + 1)
        }
        full = self._max_tokens
        self._prompt_seconds = max(self._parts(Work(1, full, full * full / 2, full)))
        self._decode_seconds = self._prompt_seconds

    def choose(self, until_event: float) -> None:
        """Set the number of steps to merge into one. The next event happens in `until_event` seconds."""
        if not self._quantum:
            return
        horizon, seconds, prompts = self._quantum, self._decode_seconds, self._prompt_share()
        if prompts:
            seconds = max(seconds, prompts * self._prompt_seconds)
        else:
            horizon = max(horizon, until_event)
        self.count = int(max(1, min(_MAX_STEPS, horizon / seconds)))
        self._scheduler.config = self._limits[self.count]
        for request in self._scheduler.running:
            if request.is_generating:
                left = request.max_new_tokens - request.num_new_tokens
                request.draft = _DRAFT[: min(self.count, left) - 1]

    def seconds(self, step: Step) -> tuple[float, float]:
        """Return the host time before the device can begin the step (0 if steps are merged), and the device time."""
        host, device = self._parts(Work.of(step).part(self.count))
        if len(step.rows) * self.count >= step.num_tokens:  # the step computes no prompts
            self._decode_seconds = max(host, device)
        return (host, device) if self.count == 1 else (0.0, max(host, device) * self.count)

    def _parts(self, work: Work) -> tuple[float, float]:
        host = 0.0 if self._host_cost is None else self._host_cost(work)
        return host, self._cost(work) - host

    def share(self, done: float) -> float:
        """Return the share of a step's time after which the share `done` of its prompt tokens is computed."""
        return math.ceil(done * self.count) / self.count

    def _prompt_share(self) -> float:
        """Return the share of a step's token limit that pending prompts fill, at most 1."""
        pending = 0
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            if not request.is_generating:
                pending += request.chain.num_tokens - request.num_computed
                if pending >= self._max_tokens:
                    return 1.0
        return pending / self._max_tokens


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Result of one request. Times are in seconds since the first arrival of the trace.

    A time is None if its event did not happen. A refused request has no `finished_at`.
    """

    arrival: float
    scheduled_at: float | None
    first_token_at: float | None
    finished_at: float | None
    prompt_tokens: int
    answer_tokens: int
    tokens_from: dict[str, int]
    """Cached prompt tokens by tier."""
    num_preempted: int
    is_refused: bool

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def queue_seconds(self) -> float | None:
        return None if self.scheduled_at is None else self.scheduled_at - self.arrival


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of the simulation of one replica."""

    requests: tuple[ServedRequest, ...]
    seconds: float
    """From the first arrival to the last token."""
    whole_seconds: float
    """From the first arrival to the end of all steps and transfers. Transfers may end after the last token."""
    compute_seconds: float
    num_steps: int
    links: tuple[SimulatedLink, ...]
    num_computed_blocks: int
    num_reused_blocks: int
    """Number of computed blocks that were hit later. A block that is recomputed and hit again is counted again."""
    evictions: dict[str, int]
    """Number of evicted blocks by tier."""
    num_duplicates_evicted: int
    """Number of blocks that the host evicted because the device had them too."""


@dataclass(slots=True)
class _Live:
    """A request that has arrived and has not ended."""

    number: int
    request: Request
    tokens: list[int]
    """Tokens of the prompt and the answer."""
    paths: list[int]
    """Path numbers (see `number_paths`) of the full blocks for which the trace contains ids."""
    first_token_at: float | None = None
    is_counted: bool = False  # True once `num_hits` is set
    num_hits: int = 0  # cached blocks of the prompt at admission


@dataclass(frozen=True, slots=True)
class _Running:
    """A step in flight, with the time at which the device begins it and the time of its results."""

    step: Step
    began: float
    end: float


class Simulator:
    """Simulates one replica. An instance can be run once."""

    def __init__(
        self,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        cost: StepCost,
        worker: SimulatedWorker,
        *,
        block_tokens: int,
        num_layers: int = 1,
        quantum: float = 0.0,
        phases: int = 1,
        host_cost: StepCost | None = None,
    ) -> None:
        """`num_layers` affects steps that start before their loads end. `quantum` is passed to StepCoalescer.

        `phases` is the number of steps in flight. With two, the host time of a step (`host_cost`, which is part of
        `cost`) overlaps with the previous step.
        """
        if phases not in range(1, MAX_IN_FLIGHT + 1):
            raise RangeError(f"phases must be 1 or {MAX_IN_FLIGHT}, got {phases}")
        self.manager = CacheManager(Namespace("replay", block_tokens=block_tokens), cache)
        self.scheduler = Scheduler(self.manager, scheduler)
        self._worker, self._block_tokens, self._num_layers = worker, block_tokens, num_layers
        self._phases = phases
        self._steps = StepCoalescer(self.scheduler, cost, quantum, host_cost if phases > 1 else None)
        self._in_flight: deque[_Running] = deque()  # oldest first
        self._device_free_at = 0.0
        self._next_arrival = math.inf
        self._has_reports = False
        """True if a report arrived after the last call to `schedule`."""
        self._now = self._last_token_at = self._compute_seconds = 0.0
        self._num_steps = 0
        self._live: dict[str, _Live] = {}
        self._served: dict[int, ServedRequest] = {}
        self._path_numbers: dict[tuple[int, int], int] = {}
        self._unused: set[int] = set()
        """Computed paths that have not been hit since their computation."""
        self._num_computed_blocks = self._num_reused_blocks = 0

    def run(self, trace: Sequence[TraceRequest], progress: Callable[[float], None] | None = None) -> Simulation:
        """Serve every request of a trace, in order of time."""
        start = trace[0].timestamp_ms if trace else 0.0
        arrivals = [(request.timestamp_ms - start) / 1000 for request in trace]
        closes = sorted(
            ((request.closed_at_ms - start) / 1000, request.hints.session_id)
            for request in trace
            if request.closed_at_ms is not None
        )
        at = num_idle = num_closed = 0
        while at < len(trace) or self._in_flight or self.scheduler.has_work() or self.manager.has_plans:
            while at < len(trace) and arrivals[at] <= self._now:
                self._arrive(at, trace[at], arrivals[at])
                at += 1
            while num_closed < len(closes) and closes[num_closed][0] <= self._now:
                self.scheduler.close_session(closes[num_closed][1], b"", closes[num_closed][0])
                num_closed += 1
            self._next_arrival = arrivals[at] if at < len(trace) else math.inf
            num_before, step = len(self._in_flight), self._step()
            num_idle = 0 if num_before or step is None or step.rows or self._has_reports else num_idle + 1
            if step is not None and num_idle > 1:  # the first idle step may end a prefetch, whose request can then run
                following = min(self._next_arrival, self._worker.next_end)
                if not self._can_go_on(step, following):
                    break
                if following < math.inf:
                    self._now = max(self._now, following)
            if progress is not None and self._num_steps % 256 == 0:
                progress(len(self._served) / max(1, len(trace)))
        return self._result(len(trace))

    def _can_go_on(self, step: Step, following: float) -> bool:
        """True if an event follows or the step changed the queue. Otherwise, raise StateError if requests are left."""
        if following < math.inf or step.refused or step.preempted:
            return True
        if self.scheduler.has_work():
            raise StateError(
                f"no event is left at {self._now:.3f} s, but {len(self.scheduler.waiting)} requests wait and "
                f"{len(self.scheduler.running)} run"
            )
        return False

    def _arrive(self, number: int, traced: TraceRequest, now: float) -> None:
        tokens = traced.sequence(number)
        chain = Chain(self.manager.namespace, tokens[: max(1, traced.input_tokens)])
        num_new = max(1, traced.output_tokens)
        # With two steps in flight, the engine schedules one row too many if an answer ends before its limit.
        # The result of this row is discarded. A limit of one more token makes the scheduler do the same here.
        is_stopped = self._phases > 1 and traced.finish_reason != "length"
        request = Request(str(number), chain, num_new + is_stopped, hints=traced.hints)
        paths = number_paths(traced.hash_ids if traced.has_answer else traced.prompt_ids, self._path_numbers)
        self._live[request.id] = _Live(number, request, tokens.tolist(), paths)
        self.scheduler.add(request, now)

    def _step(self) -> Step | None:
        """Start and return one step. Before a merged step, first wait for the steps in flight and return None."""
        self._take_reports()
        self._steps.choose(min(self._next_arrival, self._worker.next_end) - self._now)
        if self._steps.count > 1 and self._in_flight:
            self._collect(0)
            return None
        step = self.scheduler.schedule(self._now)
        self._worker.submit(step.plan, self._now)
        self._has_reports = self._take_reports()
        for request in step.refused:
            self._end(request)
        if step.rows:
            self._start(step)
            self._collect(0 if self._steps.count > 1 else self._phases - 1)
        else:
            self._collect(0)
            self.scheduler.update(step, [], self._now)
        return step

    def _start(self, step: Step) -> None:
        host, device = self._steps.seconds(step)
        self._now += host
        self._compute_seconds += device
        self._num_steps += self._steps.count
        began = max(self._now, self._device_free_at)
        end = began + device
        if step.loads:
            # Loads arrive layer by layer, so one layer is left to compute when the last load ends.
            end = max(end, self._worker.end_of(step.loads) + device / self._num_layers)
        self._device_free_at = end
        self._in_flight.append(_Running(step, began, end))

    def _collect(self, num_left: int) -> None:
        """Wait for the results of the oldest steps, until `num_left` steps are in flight."""
        while len(self._in_flight) > num_left:
            running = self._in_flight.popleft()
            step, self._now = running.step, max(self._now, running.end)
            if step.loads:
                self._take_reports()
            results = [self._result_of(row) for row in step.rows]
            self.scheduler.update(step, results, self._now)
            if any(result.tokens for result in results):
                self._last_token_at = self._now
            self._settle(step, running.began)

    def _take_reports(self) -> bool:
        """Apply the reports of the worker. True if there were reports."""
        reports = self._worker.poll(self._now)
        for report in reports:
            self.manager.apply(report)
        return bool(reports)

    def _result_of(self, row: Row) -> RowResult:
        request = row.request
        if request.state.is_over:  # the request ended while the row was in flight
            return RowResult()
        live = self._live[request.id]
        if not live.is_counted:
            live.is_counted = True
            live.num_hits = request.num_cached_tokens // self._block_tokens
            reused = self._unused.intersection(live.paths[: live.num_hits])
            self._unused -= reused
            self._num_reused_blocks += len(reused)
        if not row.wants_token:
            return RowResult()
        place = request.chain.num_tokens
        tokens = live.tokens[place : place + 1 + row.num_draft]
        return RowResult(tuple(tokens) or (0,), finished=place + len(tokens) >= len(live.tokens))

    def _settle(self, step: Step, began: float) -> None:
        """End finished requests. Set first-token times as if the step computed its prompts one after another."""
        rows = [row for row in step.rows if row.request.id in self._live]  # without ended requests
        prompts = sum(row.num_tokens for row in rows if self._live[row.request.id].first_token_at is None)
        done = 0
        for row in rows:
            request, live = row.request, self._live[row.request.id]
            if live.first_token_at is None:
                done += row.num_tokens
                if request.num_new_tokens:
                    share = self._steps.share(done / prompts)
                    live.first_token_at = began + share * (self._now - began)
            if request.state.is_over:
                computed = live.paths[live.num_hits : request.num_computed // self._block_tokens]
                self._num_computed_blocks += len(computed)
                self._unused.update(computed)
                self._end(request)

    def _end(self, request: Request) -> None:
        live = self._live.pop(request.id)
        is_refused = request.state is RequestState.REFUSED
        self._served[live.number] = ServedRequest(
            request.arrival,
            request.scheduled_at,
            live.first_token_at,
            None if is_refused else self._now,
            request.num_prompt_tokens,
            request.num_new_tokens,
            dict(request.tokens_from),
            request.num_preempted,
            is_refused,
        )

    def _result(self, num_requests: int) -> Simulation:
        evictions = {tier.name: tier.num_evicted for tier in self.manager.tree.tiers}
        evictions |= {name: store.num_evicted for name, store in self._worker.stores.items()}
        return Simulation(
            tuple(self._served[number] for number in range(num_requests)),
            self._last_token_at,
            self._now,
            self._compute_seconds,
            self._num_steps,
            tuple(self._worker.links.values()),
            self._num_computed_blocks,
            self._num_reused_blocks,
            evictions,
            sum(tier.num_duplicates_evicted for tier in self.manager.tree.tiers),
        )
