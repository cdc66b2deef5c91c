"""Scheduler: continuous batching with chunked prefill, preemption and priorities.

It asks the CacheManager for KV and never touches a pool. `now` is the caller's clock, seconds; the engine passes real
time and the replay simulated time to the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.cache.allocation import Allocation
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, LoadError, StateError
from kvtier.index import Chain, Shortage
from kvtier.index.tier import tenant_of
from kvtier.scheduler.request import ControlOp, Request, RequestState, Row, RowResult, SchedulerConfig, Step


class Scheduler:
    """Owns the requests that are not over. One step is under way at a time: schedule, then update."""

    def __init__(self, manager: CacheManager, config: SchedulerConfig | None = None) -> None:
        self.manager = manager
        self.config = config or SchedulerConfig()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._controls: deque[ControlOp] = deque()
        self._step: Step | None = None
        self._began = 0.0
        self.is_paused = False
        """Whether requests are kept waiting; controls and transfers go on."""

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests in no step."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold KV, in the order they were admitted."""
        return tuple(self._running)

    def has_work(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self._controls or (not self.is_paused and (self._waiting or self._running)))

    def add(self, request: Request, now: float) -> None:
        """A request has arrived."""
        if request.state is not RequestState.WAITING or request in self._waiting:
            raise StateError(f"{request!r} is in a scheduler already, or over")
        request.arrival = now
        self._waiting.append(request)

    def control(self, control: ControlOp) -> None:
        """Do something before the next step, once."""
        if not isinstance(control, ControlOp):
            raise ArgumentError(f"a control is wanted, got {type(control).__name__}; requests go to add()")
        self._controls.append(control)

    def cancel(self, request: Request, now: float) -> bool:
        """Nobody wants it any more; False if it was over. In a step under way its result is ignored."""
        return self._end(request, RequestState.CANCELLED, now)

    def schedule(self, now: float) -> Step:
        """Choose the next step. The caller runs it and hands the results to `update`."""
        if self._step is not None:
            raise StateError("the results of the last step have not been given to update() yet")
        if self._controls:  # they may change anything, so nothing is chosen before they have run
            self._step = Step(tuple(self._controls), (), (), (), (), self.manager.plan(now=now))
            self._controls.clear()
            return self._step
        self._began = now
        choice = _StepBuilder(self.config.max_step_tokens)
        if not self.is_paused:
            self._choose(choice, now)
        rows = tuple([row for row in choice.rows if row.request.state is RequestState.RUNNING])
        allocations = [_held(row.request) for row in rows]
        for allocation in allocations:
            if not allocation.lease.committed:  # mostly it is: they generate
                self.manager.on_scheduled(allocation, now=now)
        copies = tuple(
            [
                allocation.copy
                for row, allocation in zip(rows, allocations, strict=True)
                if allocation.copy is not None and row.first == allocation.num_cached_tokens  # before its first tokens
            ]
        )
        plan = self.manager.plan(now=now)
        self._step = Step((), rows, copies, tuple(choice.preempted), tuple(choice.refused), plan)
        return self._step

    def _choose(self, choice: _StepBuilder, now: float) -> None:
        for request in self._waiting:
            if request.prefetch is None and request.may_load:
                request.prefetch = self.manager.prefetch(request.chain, now=now, retention=request.retention)
        # Those that generate come first: a step of theirs is one token, and somebody is reading along.
        for request in sorted(self._running, key=lambda request: not request.is_generating):
            if request.state is RequestState.RUNNING:
                self._continue(request, choice, now)
        if not choice.preempted and not choice.is_full:
            self._admit(choice, now)
        if not choice.rows and self.config.starts_early:
            self._start_early(choice)

    def pause(self, now: float) -> None:
        """Keep all requests waiting until `resume`; they let go of what they hold and start again from the cache.

        For controls: no step may be under way.
        """
        if self._step is not None:
            raise StateError("a step is under way: pause between update() and schedule()")
        self.is_paused = True
        for request in list(self._running):
            self._to_waiting(request, now)
            request.num_preempted += 1
        self._let_fetches_go()

    def resume(self) -> None:
        """Go on."""
        self.is_paused = False

    def update(self, step: Step, results: Sequence[RowResult], now: float) -> None:
        """The step was run: one result per row. What is computed becomes matchable, tokens are appended."""
        if step is not self._step:
            raise StateError("update() is for the step that schedule() returned last, once")
        if len(results) != len(step.rows):
            raise ArgumentError(f"{len(step.rows)} rows were run, {len(results)} results given")
        self._step = None
        if step.rows and not step.loads:
            self.manager.on_computed(step.num_tokens, step.attended_tokens, now - self._began)
        for row, result in zip(step.rows, results, strict=True):
            if row.request.state is RequestState.RUNNING and (not row.loads or self._has_loaded(row, now)):
                self._take_result(row, result, now)

    def fail(self, step: Step, now: float) -> tuple[Request, ...]:
        """The step could not be run: its requests are over, nothing of it counts. Returns them."""
        if step is not self._step:
            raise StateError("fail() is for the step that schedule() returned last, once")
        self._step = None
        failed = tuple(row.request for row in step.rows if row.request.state is RequestState.RUNNING)
        for request in failed:
            self._end(request, RequestState.CANCELLED, now)
        return failed

    def check(self) -> None:
        """Raise unless every request is where its state says, and the cache's books agree."""
        for request in self._waiting:
            if request.state is not RequestState.WAITING or request.allocation is not None:
                raise StateError(f"{request!r} waits and holds KV, or is not waiting")
        for request in self._running:
            if request.state is not RequestState.RUNNING or request.allocation is None:
                raise StateError(f"{request!r} runs without KV, or is not running")
        if len({id(request) for request in (*self._waiting, *self._running)}) < len(self._waiting) + len(self._running):
            raise StateError("a request is kept twice")
        if len(self._running) != self.manager.stats.num_allocations:
            raise StateError(f"{len(self._running)} requests run, {self.manager.stats.num_allocations} hold KV")
        self.manager.check()

    # ---- choosing --------------------------------------------------------------------------------------------------

    def _continue(self, request: Request, choice: _StepBuilder, now: float) -> None:
        """The next tokens of a running request, if need be at the cost of others that run."""
        if _held(request).is_loading and not self._is_ready(request, now):
            return
        known = request.chain.num_tokens - request.num_computed
        count = min(known, choice.budget)
        if not count:
            return
        # Room for guesses is a wish: nobody is preempted for it.
        guesses = min(len(request.draft), choice.budget - count) if known == 1 else 0
        ahead = guesses + (self.config.lookahead_tokens if count == known else 0)
        if ahead and self.manager.allocate(_held(request), request.num_computed + count + ahead) is None:
            choice.take(Row.of(request, count + guesses))
            return
        while True:
            shortage = self.manager.allocate(_held(request), request.num_computed + count)
            if shortage is None:
                choice.take(Row.of(request, count))
                return
            victim = self._victim(request, shortage)
            if victim is request and self._is_alone(request, shortage):
                if self._let_fetches_go(request, shortage):
                    continue
                if self._is_moving(request, shortage):
                    choice.is_full = True
                    return
                # It has all there is. To begin again helps once, since copies of its own of what others have published
                # go; but not twice from the same token: it would get as far, at the cost of another like it, for ever.
                if request.stuck_at == request.chain.num_tokens:
                    self._to_waiting(request, now)
                    self._refuse(request, choice, _no_room(shortage))
                    return
                request.stuck_at = request.chain.num_tokens
            self._preempt(victim, choice, now)
            if victim is request:
                return

    def _admit(self, choice: _StepBuilder, now: float) -> None:
        """New and resumed requests, in order of priority and time waited; the first that does not fit ends it.

        So a large request is not overtaken for ever by small ones behind it. Where only a tenant's quota is in its way,
        the tenant's other requests wait behind it, and nobody else.
        """
        if not choice.budget or len(self._running) >= self.config.max_rows:
            return
        full: set[bytes] = set()
        for request in sorted(self._waiting, key=lambda request: self._rank(request, now)):
            if not choice.budget or len(self._running) >= self.config.max_rows:
                return
            if request.prefetch is not None and not self.manager.is_prefetched(request.prefetch, now=now):
                continue  # its blocks are on their way; others go first
            if tenant_of(request.chain.salt) in full or self._never_fits(request, choice):
                continue
            allocation = self._take_in(request, choice.budget, now)
            if (
                isinstance(allocation, Shortage)
                and self._is_alone(request, allocation)
                and self._let_fetches_go(request, allocation)
            ):
                allocation = self._take_in(request, choice.budget, now)
            if allocation is None:
                continue
            if isinstance(allocation, Shortage):
                if self._is_alone(request, allocation) and not self._is_moving(request, allocation):
                    self._refuse(request, choice, _no_room(allocation))
                elif allocation.quota:
                    full.add(tenant_of(request.chain.salt))
                else:
                    return
                continue
            stop = min(request.chain.num_tokens, allocation.num_cached_tokens + choice.budget)
            if stop == request.chain.num_tokens:
                self.manager.allocate(allocation, stop + self.config.lookahead_tokens)  # a wish
            self._waiting.remove(request)
            self._running.append(request)
            self._admitted(request, allocation, now)
            if self._is_ready(request, now):
                choice.take(Row.of(request, min(stop - allocation.num_cached_tokens, choice.budget)))

    def _take_in(self, request: Request, budget: int, now: float) -> Allocation | Shortage | None:
        """KV for the first step of a request, or why there is no room; None if it waits for its blocks once more."""
        allocation = self.manager.match(
            request.chain, now=now, retention=request.retention, may_load=request.may_load, prefetch=request.prefetch
        )
        if (
            request.prefetch is not None
            and request.may_load
            and self.manager.retry_prefetch(request.prefetch, allocation, now=now)
        ):
            self.manager.abort(allocation, now=now)
            return None
        shortage = self._lacks_room(request, allocation)
        if shortage is None:
            shortage = self.manager.allocate(
                allocation, min(request.chain.num_tokens, allocation.num_cached_tokens + budget)
            )
        if shortage is None:
            return allocation
        self.manager.abort(allocation, now=now)
        return shortage

    def _lacks_room(self, request: Request, allocation: Allocation) -> Shortage | None:
        """Why a whole prompt has no room beside what others that run still need for theirs; None: it has, or is alone.

        Half of it would be computed and then preempted for want of the rest: twice the work, where nothing is cached
        (16 users and room for 3 prompts, 2026-11-16).
        """
        prompts = [allocation, *(_held(each) for each in self._running if not each.is_generating)]
        own = [each for each in prompts if tenant_of(each.chain.salt) == tenant_of(request.chain.salt)]
        shortage = self.manager.shortage_for(sum(each.num_blocks_needed for each in prompts))
        shortage = shortage or self.manager.shortage_for(
            sum(each.num_blocks_needed for each in own), request.chain.salt
        )
        return None if shortage is None or self._is_alone(request, shortage) else shortage

    def _is_alone(self, request: Request, shortage: Shortage) -> bool:
        """Whether no other request runs that could give it room when it ends."""
        others = (other for other in self._running if other is not request)
        return not any(_may_help(other.chain, request, shortage) for other in others)

    def _is_moving(self, request: Request, shortage: Shortage) -> bool:
        """Whether transfers are under way that could give it room when they are done."""
        return any(_may_help(lease.chain, request, shortage) for lease in self.manager.transfers.leases)

    def _let_fetches_go(self, request: Request | None = None, shortage: Shortage | None = None) -> bool:
        """Those that wait hold what was fetched for them, on the device too: if that is in somebody's way, let go."""
        holding = [other for other in self._waiting if other.prefetch is not None]
        if request is not None and shortage is not None:
            holding = [other for other in holding if _may_help(other.chain, request, shortage)]
        for other in holding:
            self._end_fetch(other)
        return bool(holding)

    def _admitted(self, request: Request, allocation: Allocation, now: float) -> None:
        request.state, request.allocation = RequestState.RUNNING, allocation
        request.num_computed = allocation.num_cached_tokens
        self._end_fetch(request)
        request.scheduled_at = now if request.scheduled_at is None else request.scheduled_at
        if not request.num_preempted:
            request.num_cached_tokens, request.tokens_from = allocation.num_cached_tokens, allocation.tokens_from
            request.why_loaded = str(allocation.decision or "")

    def _start_early(self, choice: _StepBuilder) -> None:
        """Nobody else has work: the first whose blocks are on their way starts, and waits for them layer by layer.

        Beside others it would hold them up, so then it waits for its blocks first.
        """
        for request in self._running:
            allocation = _held(request)
            loads = self.manager.overlap(allocation)
            count = min(request.chain.num_tokens - request.num_computed, choice.budget)
            if loads and count and self.manager.allocate(allocation, request.num_computed + count) is None:
                choice.take(Row.of(request, count, loads))
                return

    def _has_loaded(self, row: Row, now: float) -> bool:
        """After a step: whether the blocks it waited for layer by layer have all arrived. If not, it starts again."""
        if self._is_ready(row.request, now):
            return True
        if row.request.state is RequestState.RUNNING:
            raise StateError(f"{row.request!r}: its loads were not reported before update()")
        return False

    def _end_fetch(self, request: Request) -> None:
        if request.prefetch is not None:
            self.manager.end_prefetch(request.prefetch)
            request.prefetch = None

    def _is_ready(self, request: Request, now: float) -> bool:
        """Whether its cached blocks are on the device. What cannot be brought there is computed: it waits again."""
        try:
            return self.manager.is_ready(_held(request))
        except LoadError:
            self._to_waiting(request, now)
            request.may_load = False
            return False

    def _never_fits(self, request: Request, choice: _StepBuilder) -> bool:
        """Refuse a request that could not run even alone."""
        tokens, num_blocks = request.chain.num_tokens, self.manager.num_blocks
        quota = self.manager.tree.tiers[0].quota(request.chain.salt)
        if quota is not None:
            num_blocks = min(quota, num_blocks)
        capacity = num_blocks * self.manager.namespace.block_tokens
        if tokens < min(capacity, self.config.max_context):
            return False
        whose = "the cache" if quota is None else "its tenant"
        why = (
            f"{tokens} tokens and one to generate do not fit: {whose} has room for {capacity} tokens, "
            f"a request may have {self.config.max_context}"
        )
        self._refuse(request, choice, why)
        return True

    def _refuse(self, request: Request, choice: _StepBuilder, why: str) -> None:
        request.reason = why
        self._waiting.remove(request)
        self._end_fetch(request)
        request.state = RequestState.REFUSED
        choice.refused.append(request)

    def _rank(self, request: Request, now: float) -> tuple[float, float]:
        waited = (now - request.arrival) / self.config.age_seconds
        return -(request.priority + waited), request.arrival

    def _victim(self, request: Request, shortage: Shortage) -> Request:
        """Whose KV goes when there is too little: the lowest priority, and of those the one that came last."""
        others = [
            (-other.priority, other.arrival, place)
            for place, other in enumerate(self._running)
            if other.priority <= request.priority and _may_help(other.chain, request, shortage)
        ]
        return self._running[max(others)[2]]

    def _preempt(self, request: Request, choice: _StepBuilder, now: float) -> None:
        self._to_waiting(request, now)
        request.num_preempted += 1
        choice.give_back(request)

    def _to_waiting(self, request: Request, now: float) -> None:
        """Let go of its KV; what it published stays to be found again."""
        allocation = _held(request)
        if allocation.lease.committed:
            self.manager.preempt(allocation, now=now)
        else:
            self.manager.abort(allocation, now=now)
        self._running.remove(request)
        self._waiting.append(request)
        request.state, request.allocation, request.num_computed = RequestState.WAITING, None, 0
        request.draft = ()

    # ---- results ---------------------------------------------------------------------------------------------------

    def _take_result(self, row: Row, result: RowResult, now: float) -> None:
        request, allocation = row.request, _held(row.request)
        num_rejected = row.num_draft + 1 - len(result.tokens) if row.wants_token else 0
        if row.wants_token != bool(result.tokens) or num_rejected < 0 or num_rejected > row.num_draft:
            raise ArgumentError(f"{request!r}: {len(result.tokens)} tokens for a row with {row.num_draft} guesses")
        # of the guesses that are kept, the KV is there: they were fed
        self.manager.extend(allocation, result.tokens)
        request.num_computed = row.stop - num_rejected
        request.draft = ()
        self.manager.publish(allocation, request.num_computed, now=now)
        is_full = request.num_new_tokens >= request.max_new_tokens
        if result.finished or is_full or request.chain.num_tokens >= self.config.max_context:
            self._end(request, RequestState.FINISHED, now)

    def _end(self, request: Request, state: RequestState, now: float) -> bool:
        if request.state.is_over:
            return False
        if request.allocation is not None:
            end = self.manager.finish if state is RequestState.FINISHED else self.manager.abort
            end(request.allocation, now=now)
            request.allocation = None
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._end_fetch(request)
        else:
            raise StateError(f"{request!r} is not in this scheduler")
        request.state = state
        return True


def _may_help(chain: Chain, request: Request, shortage: Shortage) -> bool:
    """Whether blocks of this chain could be of use: where a quota is in the way, only the tenant's own."""
    return not shortage.quota or tenant_of(chain.salt) == tenant_of(request.chain.salt)


def _no_room(shortage: Shortage) -> str:
    return f"{shortage}; what is left is pinned. Unpin something, or ask later"


def _held(request: Request) -> Allocation:
    assert request.allocation is not None
    return request.allocation


class _StepBuilder:
    """A step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.preempted: list[Request] = []
        self.refused: list[Request] = []
        self.is_full = False
        """Whether somebody stays without a row until transfers under way give room, or turn out not to."""

    def take(self, row: Row) -> None:
        """A row more."""
        self.rows.append(row)
        self.budget -= row.num_tokens

    def give_back(self, request: Request) -> None:
        """A request is preempted, perhaps one that had a row."""
        self.preempted.append(request)
        for row in [row for row in self.rows if row.request is request]:
            self.rows.remove(row)
            self.budget += row.num_tokens
