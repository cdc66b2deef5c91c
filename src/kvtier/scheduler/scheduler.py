"""Scheduler: continuous batching with chunked prefill, preemption and priorities.

The scheduler allocates KV only through the CacheManager. `now` is the caller's time in seconds, which is real in the
engine and simulated in the replay.

Two steps can be in flight. The second step is scheduled as if no request ends early in the first step:

    schedule(t) -> schedule(t+1) -> update(t) -> schedule(t+2) -> update(t+1) ..

    If a request must be preempted but has a row in flight, it gets no new row, and the next `schedule` preempts it.
    If a request ends, its row in the later step is computed, but the result is ignored. Then the request's KV is freed.
    If step t waits for loads while it runs, step t+1 has no rows.
    If step t fails, its requests end and step t+1 is discarded. Requests that are only in step t+1 run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvtier.cache.allocation import Allocation
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, LoadError, StateError
from kvtier.index import Chain, Outcome, Shortage
from kvtier.index.tier import tenant_of
from kvtier.scheduler.request import Request, RequestState, Row, RowResult, SchedulerConfig, Step

MAX_IN_FLIGHT = 2


class Scheduler:
    """Owns the requests that have not ended, and ended requests that still have a row in flight."""

    def __init__(self, manager: CacheManager, config: SchedulerConfig | None = None) -> None:
        self.manager = manager
        self.config = config or SchedulerConfig()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._leaving: list[Request] = []  # requests that ended with a row in flight, which still writes to their KV
        self._steps: list[tuple[Step, float]] = []  # steps in flight, oldest first, each with the time of `schedule`
        self._updated_at = -math.inf  # time of the last `update`; the next step begins no earlier
        self.is_paused = False
        """True if no request may run. Transfers continue."""

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests in the state RUNNING, in the order of their admission."""
        return tuple(self._running)

    def has_work(self) -> bool:
        """True if requests wait or run, and the scheduler is not paused."""
        return bool(not self.is_paused and (self._waiting or self._running))

    def add(self, request: Request, now: float) -> None:
        if request.state is not RequestState.WAITING or request in self._waiting:
            raise StateError(f"{request!r} was already added, or has ended")
        request.arrival = now
        self._waiting.append(request)

    def cancel(self, request: Request, now: float) -> bool:
        """Cancel a request. Return False if it had already ended. Results of its rows in flight are ignored."""
        return self._end(request, RequestState.CANCELLED, now)

    def close_session(self, session_id: str, salt: bytes, now: float) -> int:
        """Record that no further request of a session is expected.

        Return the number of blocks whose last use was the last request of the session. If requests of the session have
        not ended, mark these requests as the last ones of the session and return 0.
        """
        mine = [each for each in (*self._waiting, *self._running) if each.hints.session_id == session_id]
        mine = [each for each in mine if tenant_of(each.chain.salt) == tenant_of(salt)]
        for request in mine:
            request.hints = replace(request.hints, session_over=True)
        return 0 if mine else self.manager.close_session(session_id, salt, now=now)

    def schedule(self, now: float) -> Step:
        """Build the next step. The caller runs the step and passes the results to `update`.

        One earlier step may be in flight. The caller must run steps in order.
        """
        if len(self._steps) == MAX_IN_FLIGHT:
            raise StateError(f"{MAX_IN_FLIGHT} steps have no results yet; call update() first")
        builder = _StepBuilder(self.config.max_step_tokens)
        # Add no rows while a step in flight waits for loads. If such a load fails, its blocks become absent, and
        # `update` ignores the row that waited for them. If a new row loaded the same blocks again, they would no longer
        # be absent, and `update` would accept the wrong result of the row that waited.
        if not self.is_paused and not any(step.loads for step, _ in self._steps):
            self._build(builder, now)
        copies = []
        for row in builder.rows:
            allocation = _held(row.request)
            if row.first == allocation.num_cached_tokens:  # the first row, or the row that replaces it after `discard`
                self.manager.on_scheduled(allocation, now=now)
                if allocation.copy is not None:
                    copies.append(allocation.copy)
            row.request.in_flight += (row,)
        plan = self.manager.plan(now=now)
        step = Step(tuple(builder.rows), tuple(copies), tuple(builder.preempted), tuple(builder.refused), plan)
        self._steps.append((step, now))
        return step

    def _build(self, builder: _StepBuilder, now: float) -> None:
        for request in self._waiting:
            if request.prefetch is None and request.may_load:
                request.prefetch = self.manager.prefetch(
                    request.chain, now=now, retention=request.retention, max_tokens=request.max_cached_tokens
                )
        # Generating requests run first, because each needs only one token and users wait for their output.
        for request in sorted(self._running, key=lambda request: not request.is_generating):
            if request.state is RequestState.RUNNING:
                self._continue(request, builder, now)
        if not builder.preempted and not builder.is_full:
            self._admit(builder, now)
        if not builder.rows and self.config.starts_early:
            self._start_early(builder)

    def pause(self, now: float) -> None:
        """Preempt all running requests, end all prefetches, and run no request until `resume`."""
        if self._steps:
            raise StateError("cannot pause while a step is in flight; pause between update() and schedule()")
        self.is_paused = True
        for request in list(self._running):
            self._preempt(request, now)
        for request in self._waiting:
            self._end_prefetch(request)

    def resume(self) -> None:
        self.is_paused = False

    def update(self, step: Step, results: Sequence[RowResult], now: float) -> None:
        """Apply one result per row of a step: publish the computed blocks and append the sampled tokens."""
        if len(results) != len(step.rows):
            raise ArgumentError(f"a step with {len(step.rows)} rows needs one result per row, got {len(results)}")
        began = max(self._take_oldest(step), self._updated_at)
        self._updated_at = now
        if step.rows and not step.loads:
            self.manager.cost_model.observe_compute(step.num_tokens, step.attended_tokens, now - began)
        for row, result in zip(step.rows, results, strict=True):
            if row.request.state is not RequestState.RUNNING:
                continue
            if not row.loads or self._is_ready(row.request, now):
                self._take_result(row, result, now)
            elif row.request.allocation is not None:  # None if a load failed; the request then waits again
                raise StateError(f"apply the reports of the loads of {row.request!r} before update()")
        self._free_leaving(now)

    def fail(self, step: Step, now: float) -> tuple[Request, ...]:
        """Cancel and return the running requests of a failed step. The caller then discards the next step, if any."""
        self._take_oldest(step)
        failed = tuple(row.request for row in step.rows if row.request.state is RequestState.RUNNING)
        for request in failed:
            self._end(request, RequestState.CANCELLED, now)
        self._free_leaving(now)
        return failed

    def discard(self, step: Step, now: float) -> None:
        """Drop the step that follows a failed step. Requests of the dropped step that still run get new rows."""
        self._take_oldest(step)
        if self._steps:
            raise StateError("only the last step can be discarded, because later rows build on its results")
        self._free_leaving(now)

    def _take_oldest(self, step: Step) -> float:
        """Record that the oldest step and its rows are no longer in flight. Return the time of its `schedule`."""
        if not self._steps or step is not self._steps[0][0]:
            raise StateError("call update(), fail() or discard() once for each step, in the order of schedule()")
        _, began = self._steps.pop(0)
        for row in step.rows:
            row.request.in_flight = row.request.in_flight[1:]
        return began

    def _free_leaving(self, now: float) -> None:
        """Release the KV of ended requests that have no more rows in flight."""
        for request in [request for request in self._leaving if not request.in_flight]:
            self._leaving.remove(request)
            self._release(request, now)

    def _continue(self, request: Request, builder: _StepBuilder, now: float) -> None:
        """Add a row for a running request. If too few blocks are available, preempt or refuse a request, or wait."""
        if request in builder.to_preempt or not self._may_continue(request, now):
            return
        first = request.num_scheduled
        known = request.num_known - first
        count = min(known, builder.budget)
        if not count:
            return
        # A row has drafts only if it computes a single known token. No request is preempted to make room for drafts.
        drafts = min(len(request.draft), builder.budget - count) if known == 1 and not request.in_flight else 0
        ahead = drafts + (self.config.lookahead_tokens if count == known else 0)
        while (shortage := self.manager.allocate(_held(request), first + count + ahead)) is not None:
            if ahead:
                drafts = ahead = 0  # drafts and look-ahead are optional
                continue
            if any(_may_help(other.chain, request, shortage) for other in self._leaving):
                builder.is_full = True  # `update` of the step in flight releases the blocks of ended requests
                return
            victim = self._victim(request, shortage)
            if victim.in_flight:
                builder.to_preempt.append(victim)
                builder.is_full = True
                builder.drop_row(victim)
                return
            if victim is request and self._is_alone(request, shortage):
                if self._end_prefetches(request, shortage):
                    continue
                if self._is_moving(request, shortage):
                    builder.is_full = True
                    return
                # The request holds all blocks that it can get. Other requests may have published copies of some of
                # these blocks. After a restart, the request shares the copies. Refuse it if a restart did not help.
                if request.stuck_at == request.chain.num_tokens:
                    self._to_waiting(request, now)
                    self._refuse(request, builder, _no_room(shortage), now)
                    return
                request.stuck_at = request.chain.num_tokens
            self._preempt(victim, now)
            builder.preempted.append(victim)
            builder.drop_row(victim)
            if victim is request:
                return
        builder.take(Row.of(request, count + drafts))

    def _may_continue(self, request: Request, now: float) -> bool:
        """True if a running request needs another row, and the host can build the row now.

        The row may read a token that is still being sampled, because the token stays on the device. The host cannot
        build the row while the request's blocks are being loaded or its drafts are being verified. With
        `waits_for_token`, the host cannot build the row while a token is being sampled.
        """
        if not request.in_flight:
            return not _held(request).is_loading or self._is_ready(request, now)
        row = request.in_flight[-1]
        if row.num_draft or (row.wants_token and request.waits_for_token):
            return False
        return not self._is_complete(request, request.num_known)

    def _is_complete(self, request: Request, num_tokens: int) -> bool:
        """True if a request with `num_tokens` tokens has `max_new_tokens` new tokens, or fills the context."""
        is_done = num_tokens - request.num_prompt_tokens >= request.max_new_tokens
        return is_done or num_tokens >= self.config.max_context

    def _admit(self, builder: _StepBuilder, now: float) -> None:
        """Admit waiting requests in the order of `_rank`, while the limits of the step allow.

        If a request must wait for blocks, all later requests wait too, so that small requests do not delay a large
        request forever. If the quota of a tenant is full, the later requests of other tenants do not wait. Requests
        with a prefetch in flight are skipped. Requests that would lack blocks even if they ran alone are refused.
        """
        if not builder.budget or len(self._running) >= self.config.max_rows:
            return
        full: set[bytes] = set()
        for request in sorted(self._waiting, key=lambda request: self._rank(request, now)):
            if not builder.budget or len(self._running) >= self.config.max_rows:
                return
            if request.prefetch is not None and not self.manager.is_prefetched(request.prefetch, now=now):
                continue  # its blocks are still being fetched, so later requests go first
            if request.prefetch is not None and request.prefetch.num_blocks and request.fetch_times is None:
                request.fetch_times = request.prefetch.started, now
            if tenant_of(request.chain.salt) in full or self._never_fits(request, builder, now):
                continue
            found = self._allocate(request, builder.budget, now)
            if isinstance(found, Shortage) and self._is_alone(request, found) and self._end_prefetches(request, found):
                found = self._allocate(request, builder.budget, now)
            if found is None:
                continue
            if isinstance(found, Shortage):
                if self._is_alone(request, found) and not self._is_moving(request, found):
                    self._refuse(request, builder, _no_room(found), now)
                elif found.quota:
                    full.add(tenant_of(request.chain.salt))
                else:
                    return
                continue
            stop = min(request.chain.num_tokens, found.num_cached_tokens + builder.budget)
            if stop == request.chain.num_tokens:
                self.manager.allocate(found, stop + self.config.lookahead_tokens)  # optional: a shortage is ignored
            self._waiting.remove(request)
            self._running.append(request)
            self._on_admitted(request, found, now)
            if self._is_ready(request, now):
                builder.take(Row.of(request, min(stop - found.num_cached_tokens, builder.budget)))

    def _allocate(self, request: Request, budget: int, now: float) -> Allocation | Shortage | None:
        """Allocate KV for a waiting request. Return a Shortage, or None if the request must wait for its prefetch."""
        prefetch = request.prefetch
        allocation = self.manager.match(
            request.chain,
            now=now,
            retention=request.retention,
            may_load=request.may_load,
            prefetch=prefetch,
            max_tokens=request.max_cached_tokens,
        )
        if prefetch is not None and request.may_load and self.manager.retry_prefetch(prefetch, allocation, now=now):
            self.manager.abort(allocation, now=now)
            return None
        num_tokens = min(request.chain.num_tokens, allocation.num_cached_tokens + budget)
        shortage = self._shortage_with_others(request, allocation) or self.manager.allocate(allocation, num_tokens)
        if shortage is None:
            return allocation
        self.manager.abort(allocation, now=now)
        return shortage

    def _shortage_with_others(self, request: Request, allocation: Allocation) -> Shortage | None:
        """Return a Shortage if the whole prompt does not fit together with the unfinished prompts of running requests.

        Return None also if no other request could free blocks. Without this check, a prompt would be computed in part,
        preempted for lack of room and computed again. With 16 users and room for 3 prompts, this doubled the work
        (2026-11-16).
        """
        prompts = [allocation, *(_held(each) for each in self._running if not each.is_generating)]
        own = [each for each in prompts if tenant_of(each.chain.salt) == tenant_of(request.chain.salt)]
        shortage = self.manager.shortage_for(sum(each.num_blocks_needed for each in prompts))
        shortage = shortage or self.manager.tree.tiers[0].quota_shortage(
            request.chain.salt, sum(each.num_blocks_needed for each in own)
        )
        return None if shortage is None or self._is_alone(request, shortage) else shortage

    def _is_alone(self, request: Request, shortage: Shortage) -> bool:
        """True if no other running or leaving request holds blocks that could resolve a shortage."""
        others = (other for other in (*self._running, *self._leaving) if other is not request)
        return not any(_may_help(other.chain, request, shortage) for other in others)

    def _is_moving(self, request: Request, shortage: Shortage) -> bool:
        """True if the end of a transfer in flight could resolve a shortage."""
        return any(_may_help(lease.chain, request, shortage) for lease in self.manager.transfers.leases)

    def _end_prefetches(self, request: Request, shortage: Shortage) -> bool:
        """End the prefetches whose blocks could help `request`. Return True if there were any."""
        prefetching = [other for other in self._waiting if other.prefetch is not None]
        prefetching = [other for other in prefetching if _may_help(other.chain, request, shortage)]
        for other in prefetching:
            self._end_prefetch(other)
        return bool(prefetching)

    def _on_admitted(self, request: Request, allocation: Allocation, now: float) -> None:
        request.state, request.allocation = RequestState.RUNNING, allocation
        request.num_computed = allocation.num_cached_tokens
        self._end_prefetch(request)
        request.scheduled_at = now if request.scheduled_at is None else request.scheduled_at
        if not request.num_preempted:
            request.num_cached_tokens, request.tokens_from = allocation.num_cached_tokens, allocation.tokens_from
            request.why_loaded = str(allocation.decision or "")

    def _start_early(self, builder: _StepBuilder) -> None:
        """Add a row that waits for its loads layer by layer, for the first running request for which this is possible.

        Call this only if there are no other rows, because the waits would delay all rows of the step.
        """
        for request in [request for request in self._running if not request.in_flight]:
            allocation = _held(request)
            loads = self.manager.overlap(allocation)
            count = min(request.chain.num_tokens - request.num_computed, builder.budget)
            if loads and count and self.manager.allocate(allocation, request.num_computed + count) is None:
                builder.take(Row.of(request, count, loads))
                return

    def _end_prefetch(self, request: Request) -> None:
        if request.prefetch is not None:
            self.manager.end_prefetch(request.prefetch)
            request.prefetch = None

    def _is_ready(self, request: Request, now: float) -> bool:
        """True if the request's cached blocks are on the device. After a failed load, queue the request again."""
        was_loading = _held(request).is_loading
        try:
            is_ready = self.manager.is_ready(_held(request))
            if was_loading and is_ready and request.loaded_at is None:
                request.loaded_at = now
            return is_ready
        except LoadError:
            self._to_waiting(request, now)
            request.may_load = False
            return False

    def _never_fits(self, request: Request, builder: _StepBuilder, now: float) -> bool:
        """Refuse a request that does not fit even if it runs alone. Return True if the request was refused."""
        tokens, quota = request.chain.num_tokens, self.manager.tree.tiers[0].quota(request.chain.salt)
        num_blocks = self.manager.num_blocks if quota is None else min(quota, self.manager.num_blocks)
        capacity = num_blocks * self.manager.namespace.block_tokens
        if tokens < min(capacity, self.config.max_context):
            return False
        whose = "the cache" if quota is None else "the tenant"
        why = (
            f"{tokens} tokens and one generated token do not fit: {whose} has room for {capacity} tokens, and a "
            f"request may have at most {self.config.max_context}"
        )
        self._refuse(request, builder, why, now)
        return True

    def _refuse(self, request: Request, builder: _StepBuilder, why: str, now: float) -> None:
        request.reason = why
        self._end(request, RequestState.REFUSED, now)
        builder.refused.append(request)

    def _rank(self, request: Request, now: float) -> tuple[float, float]:
        waited = (now - request.arrival) / self.config.age_seconds
        return -(request.priority + waited), request.arrival

    def _victim(self, request: Request, shortage: Shortage) -> Request:
        """Select a running request to preempt, possibly `request` itself.

        Only requests whose blocks could resolve the shortage and whose priority is at most that of `request` qualify.
        Among these, select the lowest priority, then the latest arrival.
        """
        others = [
            other
            for other in reversed(self._running)  # the latest admission first, because `max` prefers the first maximum
            if other.priority <= request.priority and _may_help(other.chain, request, shortage)
        ]
        return max(others, key=lambda other: (-other.priority, other.arrival))

    def _preempt(self, request: Request, now: float) -> None:
        self._to_waiting(request, now)
        request.num_preempted += 1

    def _to_waiting(self, request: Request, now: float) -> None:
        """Release the KV of a request and queue the request again. Published blocks stay in the cache.

        The request must not have a row in flight. Such a row would write to released blocks while a load could write
        to the same blocks.
        """
        assert not request.in_flight
        self.manager.abort(_held(request), now=now)
        self._running.remove(request)
        self._waiting.append(request)
        request.state, request.allocation, request.num_computed = RequestState.WAITING, None, 0
        request.draft = ()

    def _take_result(self, row: Row, result: RowResult, now: float) -> None:
        request, allocation = row.request, _held(row.request)
        num_rejected = row.num_draft + 1 - len(result.tokens) if row.wants_token else 0
        if row.wants_token != bool(result.tokens) or num_rejected < 0 or num_rejected > row.num_draft:
            wanted = f"1 to {row.num_draft + 1}" if row.wants_token else "0"
            raise ArgumentError(f"the row of {request!r} needs {wanted} sampled tokens, got {len(result.tokens)}")
        # The KV of accepted drafts is already computed, because the drafts were inputs of the step.
        self.manager.extend(allocation, result.tokens)
        request.num_computed = row.stop - num_rejected
        if request.max_cached_tokens is not None:
            request.max_cached_tokens = max(request.max_cached_tokens, request.num_computed)
        request.draft = ()
        self.manager.publish(allocation, request.num_computed, now=now)
        if result.finished or self._is_complete(request, request.chain.num_tokens):
            self._end(request, RequestState.FINISHED, now)

    def _end(self, request: Request, state: RequestState, now: float) -> bool:
        if request.state.is_over:
            return False
        if request.allocation is not None:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._end_prefetch(request)
        else:
            raise StateError(f"{request!r} is not in this scheduler")
        request.state = state
        if request.in_flight:
            self._leaving.append(request)
        elif request.allocation is not None:
            self._release(request, now)
        return True

    def _release(self, request: Request, now: float) -> None:
        """Release the KV of a request that ended."""
        if request.state is RequestState.FINISHED:
            is_full = request.num_new_tokens >= request.max_new_tokens
            outcome = Outcome(request.num_new_tokens, "length" if is_full else "stop", request.hints)
            self.manager.finish(_held(request), now=now, outcome=outcome)
        else:
            self.manager.abort(_held(request), now=now)
        request.allocation = None


def _may_help(chain: Chain, request: Request, shortage: Shortage) -> bool:
    """True if freeing blocks of `chain` could resolve the shortage. If a quota is full, the tenants must be equal."""
    return not shortage.quota or tenant_of(chain.salt) == tenant_of(request.chain.salt)


def _no_room(shortage: Shortage) -> str:
    return f"{shortage}; the blocks that this request does not hold are pinned. Unpin a prompt, or try again later"


def _held(request: Request) -> Allocation:
    assert request.allocation is not None
    return request.allocation


class _StepBuilder:
    """Collects the rows of a step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.preempted: list[Request] = []
        self.refused: list[Request] = []
        self.to_preempt: list[Request] = []
        """Requests to be preempted that have a row in flight. They get no new row, and the next step preempts them."""
        self.is_full = False
        """True if a running request has to wait until transfers or a step in flight release blocks."""

    def take(self, row: Row) -> None:
        self.rows.append(row)
        self.budget -= row.num_tokens

    def drop_row(self, request: Request) -> None:
        for row in [row for row in self.rows if row.request is request]:
            self.rows.remove(row)
            self.budget += row.num_tokens
