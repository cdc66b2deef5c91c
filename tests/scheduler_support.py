"""A simulated device for tests of the scheduler. For each row, the device checks that the slots hold the right KV."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.cache.config import CacheConfig, HostConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import Chain, Namespace
from kvtier.messages import Report, TransferRequest, TransferResult
from kvtier.scheduler import Request, RequestState, Row, RowResult, Scheduler, SchedulerConfig, Step

BLOCK = 4
WORTHLESS = RowResult((77,), finished=True)
"""Result that the scheduler must ignore, as after a failed load. The simulated model never samples token 77."""


class Inputs(NamedTuple):
    """Inputs of a row as the host sends them. A token that a step in flight has not sampled yet is missing."""

    tokens: tuple[int, ...]
    draft: tuple[int, ...]
    table: list[int]

    @classmethod
    def of(cls, request: Request) -> Inputs:
        return cls(tuple(request.chain.tokens.tolist()), request.draft, request.allocation.table.tolist())


class Device:
    """Simulated memory and model.

    `kv` and `host` map a place (slot, offset) to a token sequence. The place contains the KV of the sequence's last
    token. `move` executes transfers. Until a transfer succeeds, its target slots contain the mark "rubbish".
    """

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.planned: list[tuple[int, TransferRequest]] = []
        self.ended: dict[int, bool] = {}  # success of each executed transfer
        self.sampled: dict[str, int] = {}  # the last sampled token of each request

    def move(self, scheduler: Scheduler, count: int = 1000, *, ok: bool = True) -> None:
        """Execute the `count` oldest transfers and apply their reports. With ok=False, the transfers fail."""
        for epoch, transfer in self.planned[:count]:
            if ok:
                source, target = (self.host, self.kv) if transfer.source == "host" else (self.kv, self.host)
                for one, other in zip(transfer.sources.tolist(), transfer.targets.tolist(), strict=True):
                    for offset in range(BLOCK):
                        target[other, offset] = source[one, offset]
            self.ended[transfer.id] = ok
            result = TransferResult(transfer.id, ok, 100 * transfer.num_blocks * ok, 0.1)
            scheduler.manager.apply(Report(epoch, 0, (result,)))
        del self.planned[:count]

    def run(
        self, step: Step, finish: set[str] = frozenset(), *, scheduler: Scheduler | None = None, ok: bool = True
    ) -> list[RowResult]:
        """Queue the transfers of a step, execute and report its loads, and compute its rows.

        With ok=False, the loads fail.
        """
        return self.compute(step, self.submit(step), finish, scheduler=scheduler, ok=ok)

    def submit(self, step: Step) -> list[Inputs]:
        """Queue the transfers of a step. Return the inputs that the host sends for each row."""
        for transfer in step.plan.transfers:
            self.planned.append((step.plan.epoch, transfer))
            for slot in transfer.targets.tolist():
                for offset in range(BLOCK):
                    (self.kv if transfer.target == "device" else self.host)[slot, offset] = ("rubbish",)
        return [Inputs.of(row.request) for row in step.rows]

    def compute(
        self,
        step: Step,
        inputs: Sequence[Inputs],
        finish: set[str] = frozenset(),
        *,
        scheduler: Scheduler | None = None,
        ok: bool = True,
    ) -> list[RowResult]:
        if step.loads:
            self._load(scheduler, step.loads, ok=ok)
        for copy in step.copies:
            for offset in range(copy.num_tokens):
                self.kv[copy.target, offset] = self.kv[copy.source, offset]
        rows = zip(step.rows, inputs, strict=True)
        return [
            self._compute(row, sent, finish) if all(self.ended[load] for load in row.loads) else WORTHLESS
            for row, sent in rows
        ]

    def spoil(self, step: Step, inputs: Sequence[Inputs]) -> None:
        """Overwrite the KV of all rows with rubbish. This simulates a step that fails after the model has run."""
        for row, sent in zip(step.rows, inputs, strict=True):
            for position in range(row.first, row.stop):
                self.kv[sent.table[position // BLOCK], position % BLOCK] = ("rubbish",)

    def _load(self, scheduler: Scheduler, ids: Sequence[int], *, ok: bool) -> None:
        chosen = [each for each in self.planned if each[1].id in ids]
        assert len(chosen) + len(self.ended.keys() & ids) == len(ids), "a step needs loads that were not planned"
        self.planned = [*chosen, *(each for each in self.planned if each[1].id not in ids)]
        self.move(scheduler, len(chosen), ok=ok)

    def _compute(self, row: Row, sent: Inputs, finish: set[str]) -> RowResult:
        request, table, known = row.request, sent.table, sent.tokens
        if row.first == len(known):  # the inputs lack the token that the previous step sampled
            known += (self.sampled[request.id],)
        assert row.first < len(known)
        tokens = known + sent.draft
        for position in range(row.first):  # all earlier positions must contain the KV of `tokens`
            assert self.kv[table[position // BLOCK], position % BLOCK] == tokens[: position + 1]
        for position in range(row.first, row.stop):
            self.kv[table[position // BLOCK], position % BLOCK] = tokens[: position + 1]
        new = self.sample(row, tokens)
        if new:
            self.sampled[request.id] = new[-1]
        return RowResult(new, request.id in finish)

    def sample(self, row, tokens) -> tuple[int, ...]:
        if not row.wants_token:
            return ()
        known = row.stop - row.num_draft
        new = [next_token(tokens[:known])]
        for guess in tokens[known : row.stop]:
            if guess != new[-1]:
                break
            new.append(next_token((*tokens[:known], *new)))
        return tuple(new)


def next_token(prefix: tuple[int, ...]) -> int:
    """Return the token that the simulated model generates after a prefix."""
    return zlib.crc32(repr(prefix).encode()) % 3


def alone(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the tokens that a request generates without other requests."""
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


def make(
    num_blocks: int = 8,
    *,
    prefix_caching: bool = True,
    host: HostConfig | None = None,
    policy: str = "lru",
    **limits,
) -> Scheduler:
    namespace = Namespace("model", block_tokens=BLOCK)
    config = CacheConfig(num_blocks, prefix_caching=prefix_caching, host=host, always_load=True, policy=policy)
    manager = CacheManager(namespace, config)
    return Scheduler(manager, SchedulerConfig(**{"max_rows": 4, "max_step_tokens": 8, **limits}))


def request(
    scheduler: Scheduler, name: str, prompt, new: int = 4, *, now: float = 0.0, salt: bytes = b"", **options
) -> Request:
    made = Request(name, Chain(scheduler.manager.namespace, list(prompt), salt=salt), new, **options)
    scheduler.add(made, now)
    return made


def run(scheduler: Scheduler, device: Device, steps: int = 1000, *, check: bool = True) -> int:
    """Run steps until there is no work and no transfer to plan. Return the number of steps before the last one."""
    for taken in range(steps):
        had_work = scheduler.has_work()
        step = scheduler.schedule(float(taken))
        scheduler.update(step, device.run(step, scheduler=scheduler), float(taken))
        device.move(scheduler)
        if check:
            check_scheduler(scheduler)
        if not had_work and not step.plan:
            return taken
    raise AssertionError(f"the scheduler still has work after {steps} steps")


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise an error if the states of requests or the metadata of the cache are inconsistent."""
    waiting, running, leaving = scheduler._waiting, scheduler._running, scheduler._leaving
    for request in waiting:
        assert request.state is RequestState.WAITING, f"{request!r} is in the waiting list"
        assert request.allocation is None, f"{request!r} is in the waiting list, but holds KV"
    for request in running:
        assert request.state is RequestState.RUNNING, f"{request!r} is in the running list"
        assert request.allocation is not None, f"{request!r} is in the running list, but holds no KV"
    assert len({id(request) for request in (*waiting, *running)}) == len(waiting) + len(running), "listed twice"
    for request in leaving:
        assert request.state.is_over, f"{request!r} has not ended"
        assert request.in_flight, f"{request!r} keeps its KV, but it has no row in flight"
        assert request.allocation is not None, f"{request!r} has a row in flight, but holds no KV"
    in_flight = {id(row.request) for step, _ in scheduler._steps for row in step.rows}
    for request in (*waiting, *running, *leaving):
        assert bool(request.in_flight) == (id(request) in in_flight), (
            f"{request!r} has {len(request.in_flight)} rows in flight, but the steps disagree"
        )
    assert len(running) + len(leaving) == scheduler.manager.stats.num_allocations, (
        "the numbers of requests with KV and of allocations differ"
    )
    scheduler.manager.check()


def verify_step(scheduler: Scheduler, step: Step, ran: Sequence[Request]) -> None:
    """Check the invariants of a step. `ran` contains the requests that were running before the step."""
    limits, rows = scheduler.config, step.rows
    assert step.num_tokens == sum(row.num_tokens for row in rows) <= limits.max_step_tokens
    assert len({row.request.id for row in rows}) == len(rows)
    assert len(scheduler.running) <= limits.max_rows
    for row in rows:
        _verify_row(row)
        if row.request not in ran:
            ahead = limits.lookahead_tokens if row.wants_token else 0
            if row.request.allocation.copy is None:
                # A hit that ends inside a block needs a copy. When slots are short, the manager can give up the part
                # of the hit in this block. Then the row stops up to BLOCK - 1 tokens earlier, but the request keeps
                # its slots. This check cannot detect that case, so it allows slots for BLOCK - 1 more tokens.
                ahead += BLOCK - 1
            assert len(row.request.allocation.table) <= -(-(row.stop + ahead) // BLOCK), (
                "a new request has more slots than the step needs"
            )
    for request in (*step.preempted, *step.refused):
        assert (request.allocation, request.num_computed, request.draft) == (None, 0, ())
    assert all(request.state is RequestState.REFUSED and request.reason for request in step.refused)
    assert all(request.prefetch is None for request in step.refused)
    places = [(row.request not in ran, row.request in ran and not _continues(row)) for row in rows]
    assert places == sorted(places), "rows must be ordered: generating requests, then started prompts, then new prompts"
    if step.preempted:
        assert all(row.request in ran for row in rows), "a step that preempted a request also admitted one"
    elif len(scheduler._steps) == 1 and step.num_tokens < limits.max_step_tokens:
        assert all(row.wants_token for row in rows), "a prompt was cut although the step could take more tokens"
        idle = [other for other in ran if other in scheduler.running and other not in [row.request for row in rows]]
        assert all(other.allocation.is_loading for other in idle) or scheduler.manager.transfers.in_flight


def _continues(row: Row) -> bool:
    """True if only the newest known token of the request remained to be computed, as for a generating request."""
    return row.first > 0 and row.wants_token and row.num_tokens - row.num_draft == 1


def _verify_row(row: Row) -> None:
    request = row.request
    *earlier, last = request.in_flight
    assert last is row
    known = request.chain.num_tokens + sum(each.wants_token for each in earlier)
    assert known - request.num_prompt_tokens < request.max_new_tokens, "the request has all its tokens already"
    assert request.state is RequestState.RUNNING
    assert row.first == (earlier[-1].stop if earlier else request.num_computed)
    assert row.first < row.stop <= len(request.allocation.table) * BLOCK
    assert row.num_draft == max(0, row.stop - known) <= len(request.draft)
    assert row.wants_token is (row.stop >= known)
    for each in earlier:
        assert not each.loads
        assert not each.num_draft
        assert not (each.wants_token and request.waits_for_token)
