"""Simulator: the scheduler and the cache on a trace, with simulated time.

StepCoalescer: several steps of a scheduler simulated as one, so that an hour of a service takes a minute.

A trace through the real scheduler and the real cache manager, with simulated time instead of a GPU.

arrivals ──> Scheduler ──Step──> StepCost says how long it computes ──results──> Scheduler
                 │ plan                                                           ^
                 └──────> SimulatedWorker says when its transfers are over ──reports
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.errors import RangeError, StateError
from kvtier.index import Chain, Namespace
from kvtier.replay.cost import StepCost, Work
from kvtier.replay.sim_worker import LinkUse, SimulatedWorker
from kvtier.replay.trace import TraceRequest
from kvtier.scheduler import Request, RequestState, Row, RowResult, Scheduler, SchedulerConfig, Step

MAX_GRAIN = 64
_GUESSES = (0,) * (MAX_GRAIN - 1)


class StepCoalescer:
    """How many steps the next one stands for.

    Steps that take no more than `quantum` seconds together are one: answers grow by several tokens, as if all had been
    guessed and were right, prompts by several chunks, and what happens meanwhile is seen at the end. Where all that run
    generate and nobody waits, that goes as far as to the next event. 0: every step by itself.
    """

    def __init__(self, scheduler: Scheduler, cost: StepCost, quantum: float) -> None:
        if quantum < 0:
            raise RangeError(f"a quantum is 0 seconds or more, got {quantum}")
        self.count = 1
        self._scheduler, self._cost, self._quantum = scheduler, cost, quantum
        config = scheduler.config
        self._max_tokens = config.max_step_tokens
        self._limits = {
            count: replace(config, max_step_tokens=self._max_tokens * count) for count in range(1, MAX_GRAIN + 1)
        }
        full = self._max_tokens
        self._prompt_seconds = cost.seconds(Work(1, full, full * full / 2, full))
        self._decode_seconds = self._prompt_seconds

    def choose(self, until_event: float) -> None:
        """Before a step: nothing comes from outside for so many seconds."""
        if not self._quantum:
            return
        horizon, seconds, prompts = self._quantum, self._decode_seconds, self._prompt_share()
        if prompts:
            seconds = max(seconds, prompts * self._prompt_seconds)
        else:
            horizon = max(horizon, until_event)
        self.count = int(max(1, min(MAX_GRAIN, horizon / seconds)))
        self._scheduler.config = self._limits[self.count]
        for request in self._scheduler.running:
            if request.is_generating:
                left = request.max_new_tokens - request.num_new_tokens
                request.draft = _GUESSES[: min(self.count, left) - 1]

    def seconds(self, step: Step) -> float:
        """What the step takes in all."""
        seconds = self._cost.seconds(Work.of(step).part(self.count))
        if len(step.rows) * self.count >= step.num_tokens:  # nobody's prompt is in it
            self._decode_seconds = seconds
        return seconds * self.count

    def share(self, done: float) -> float:
        """When a share of a step's prompts is computed, as a share of its time: at the end of one of those it is."""
        return math.ceil(done * self.count) / self.count

    def _prompt_share(self) -> float:
        """How much of a step's tokens are prompts that wait to be computed."""
        pending = 0
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            if not request.is_generating:
                pending += request.chain.num_tokens - request.num_computed
                if pending >= self._max_tokens:
                    return 1.0
        return pending / self._max_tokens


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What became of one request. Times are seconds from the first arrival; None: it never came to that."""

    arrival: float
    scheduled_at: float | None
    first_token_at: float | None
    finished_at: float | None
    prompt_tokens: int
    answer_tokens: int
    tokens_from: dict[str, int]
    """Of the prompt, cached tokens by the tier they were found in."""
    num_preempted: int
    is_refused: bool

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def queue_seconds(self) -> float | None:
        """Until it was first given KV."""
        return None if self.scheduled_at is None else self.scheduled_at - self.arrival


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Blocks that came into the cache, and how many of them were found again before they had left every tier."""

    num_computed: int
    num_reused: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a run came to."""

    requests: tuple[ServedRequest, ...]
    seconds: float
    """From the first arrival to the last token."""
    whole_seconds: float
    """To the last transfer: blocks are still saved after the last token, and links count that, too."""
    compute_seconds: float
    num_steps: int
    links: tuple[LinkUse, ...]
    blocks: BlockUse
    evictions: dict[str, int]
    """Blocks that left each tier for others."""


@dataclass(slots=True)
class _Live:
    """A request in the simulation."""

    number: int
    request: Request
    tokens: list[int]
    """Prompt and answer."""
    paths: list[int]
    """The number of every full block of it, with all before it."""
    first_token_at: float | None = None
    is_counted: bool = False
    num_found: int = 0


class Simulator:
    """One replica. Made for one run."""

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
    ) -> None:
        """`num_layers` is for steps that begin before their loads are done; `quantum` as in Grain."""
        self.manager = CacheManager(Namespace("replay", block_tokens=block_tokens), cache)
        self.scheduler = Scheduler(self.manager, scheduler)
        self._worker, self._num_layers = worker, num_layers
        self._grain = StepCoalescer(self.scheduler, cost, quantum)
        self._next_arrival = math.inf
        self._has_news = False
        """Whether something was reported since the scheduler was last asked."""
        self._now = self._last_token_at = self._compute_seconds = 0.0
        self._num_steps = 0
        self._live: dict[str, _Live] = {}
        self._served: dict[int, ServedRequest] = {}
        self._blocks = _Blocks()

    def run(self, trace: Sequence[TraceRequest], progress: Callable[[float], None] | None = None) -> Simulation:
        """Serve every request of a trace, in order of time."""
        start = trace[0].timestamp_ms if trace else 0.0
        arrivals = [(request.timestamp_ms - start) / 1000 for request in trace]
        at = num_idle = 0
        while at < len(trace) or self.scheduler.has_work() or self.manager.has_plans:
            while at < len(trace) and arrivals[at] <= self._now:
                self._arrive(at, trace[at], arrivals[at])
                at += 1
            self._next_arrival = arrivals[at] if at < len(trace) else math.inf
            step = self._step()
            num_idle = 0 if step.rows or self._has_news else num_idle + 1
            if num_idle > 1:  # asked twice: what it plans may be over as soon as it is planned
                following = min(self._next_arrival, self._worker.next_end)
                if not self._can_go_on(step, following):
                    break
                self._now = max(self._now, following)
            if progress is not None and self._num_steps % 256 == 0:
                progress(len(self._served) / len(trace))
        return self._result(len(trace))

    def _can_go_on(self, step: Step, following: float) -> bool:
        """Whether something will happen. If not, what waits waits for ever, which must not be."""
        if following < math.inf or step.refused or step.preempted:
            return True
        if self.scheduler.has_work():
            raise StateError(
                f"nothing is to come at {self._now:.3f} s, and {len(self.scheduler.waiting)} requests wait, "
                f"{len(self.scheduler.running)} run"
            )
        return False

    def _arrive(self, number: int, traced: TraceRequest, now: float) -> None:
        tokens = traced.sequence(number)
        chain = Chain(self.manager.namespace, tokens[: max(1, traced.input_tokens)])
        request = Request(str(number), chain, max(1, traced.output_tokens))
        paths = self._blocks.paths(traced)
        self._live[request.id] = _Live(number, request, tokens.tolist(), paths)
        self.scheduler.add(request, now)

    def _step(self) -> Step:
        """One step as the engine does it: what is over is told, then what comes next is asked and computed."""
        self._take_reports()
        self._grain.choose(min(self._next_arrival, self._worker.next_end) - self._now)
        began = self._now
        step = self.scheduler.schedule(began)
        self._worker.submit(step.plan, began)
        self._has_news = self._take_reports()
        if step.rows:
            self._now = self._end_of(step)
            self._num_steps += self._grain.count
            if step.loads:
                self._take_reports()
        for request in step.refused:
            self._end(request)
        results = [self._result_of(row) for row in step.rows]
        self.scheduler.update(step, results, self._now)
        if any(result.tokens for result in results):
            self._last_token_at = self._now
        self._settle(step, began)
        return step

    def _end_of(self, step: Step) -> float:
        """When the step is computed, and has not waited in vain for its loads."""
        work = self._grain.seconds(step)
        self._compute_seconds += work
        end = self._now + work
        if step.loads:
            # layer by layer: when the last layer's blocks are there, that layer is left to compute
            end = max(end, self._worker.end_of(step.loads) + work / self._num_layers)
        return end

    def _take_reports(self) -> bool:
        """Tell the manager what is over; whether there was something."""
        reports = self._worker.poll(self._now)
        for report in reports:
            self.manager.apply(report)
        return bool(reports)

    def _result_of(self, row: Row) -> RowResult:
        """The next tokens of the answer, as the trace has it."""
        live, request = self._live[row.request.id], row.request
        if not live.is_counted:
            live.is_counted = True
            live.num_found = self._blocks.found(live.paths, request.num_cached_tokens // self._block_tokens)
        if not row.wants_token:
            return RowResult()
        place = request.chain.num_tokens
        tokens = live.tokens[place : place + 1 + row.num_draft]
        return RowResult(tuple(tokens) or (0,))

    def _settle(self, step: Step, began: float) -> None:
        """First tokens come when their prompts are through, which within a step is by their order; then the ends."""
        prompts = sum(row.num_tokens for row in step.rows if self._live[row.request.id].first_token_at is None)
        done = 0
        for row in step.rows:
            request, live = row.request, self._live[row.request.id]
            if live.first_token_at is None:
                done += row.num_tokens
                if request.num_new_tokens:
                    share = self._grain.share(done / prompts)
                    live.first_token_at = began + share * (self._now - began)
            if request.state.is_over:
                self._blocks.came(live.paths[: request.num_computed // self._block_tokens], live.num_found)
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

    @property
    def _block_tokens(self) -> int:
        return self.manager.namespace.block_tokens

    def _result(self, num_requests: int) -> Simulation:
        evictions = {tier.name: tier.num_evicted for tier in self.manager.tree.tiers}
        evictions |= {name: store.num_evicted for name, store in self._worker.stores.items()}
        return Simulation(
            tuple(self._served[number] for number in range(num_requests)),
            self._last_token_at,
            self._now,
            self._compute_seconds,
            self._num_steps,
            self._worker.uses(),
            BlockUse(self._blocks.num_came, self._blocks.num_reused),
            evictions,
        )


@dataclass(slots=True)
class _Blocks:
    """Which blocks that were computed were found again: the others were dead on arrival.

    A block that is computed anew after it was lost counts again.
    """

    num_came: int = 0
    num_reused: int = 0
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    _waits: set[int] = field(default_factory=set)
    """Computed, and not found since."""

    def paths(self, traced: TraceRequest) -> list[int]:
        """The numbers of a request's full blocks, as far as the trace knows them."""
        paths, above = [], -1
        for id in traced.hash_ids if traced.has_answer else traced.prompt_ids:
            above = self._numbers.setdefault((above, id), len(self._numbers))
            paths.append(above)
        return paths

    def found(self, paths: list[int], count: int) -> int:
        """A request was given its first `count` blocks."""
        for path in paths[:count]:
            if path in self._waits:
                self._waits.remove(path)
                self.num_reused += 1
        return count

    def came(self, paths: list[int], num_found: int) -> None:
        """It has computed the others."""
        self.num_came += max(0, len(paths) - num_found)
        self._waits.update(paths[num_found:])
