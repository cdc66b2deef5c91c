"""Follow a recorded log step by step: repeat its calls, with the same times, on a new scheduler and manager.

Their decisions must equal the recorded ones, so the hits by tier are exact. Reuse inside a block depends on tokens that
are not in the log. The run must therefore be recorded with `partial_scan=0`, which turns this reuse off.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.step_recorder import describe
from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.errors import FormatError, StateError
from kvtier.index import Chain, Namespace
from kvtier.messages import Report, StoreLookup, TransferResult, split_keys
from kvtier.replay.cost import Work
from kvtier.replay.recorder import LOG_VERSION
from kvtier.replay.trace import TraceRequest, parse_line
from kvtier.scheduler import Request, RowResult, Scheduler, SchedulerConfig, Step


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log."""

    traced: TraceRequest
    tokens_from: dict[str, int]
    ttft: float | None


@dataclass(frozen=True, slots=True)
class Log:
    """A log recorded with `steps=True`."""

    block_tokens: int
    slots: dict[str, int]
    """Slots of each memory tier at the start; host memory may have grown later."""
    events: tuple[dict[str, Any], ...]
    requests: dict[str, LoggedRequest]
    numbers: dict[str, int]
    """Numbers of the block names, as in the hash ids of requests."""
    num_ranks: int = 1

    @property
    def trace(self) -> tuple[TraceRequest, ...]:
        """Return the requests as a trace."""
        requests = (logged.traced for logged in self.requests.values())
        return tuple(sorted(requests, key=lambda request: request.timestamp_ms))


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    """The result of following a log: tokens by tier for each request, and the recorded times."""

    tokens_from: dict[str, dict[str, int]]
    num_steps: int
    steps: tuple[tuple[Work, float], ...]
    """Steps without a wait for a load; costs are fitted to these. The time of a step begins with the result of the step
    before it, if that step was in flight."""
    outcomes: tuple[tuple[str, int, float], ...]
    """Route, bytes and seconds of every transfer that succeeded."""


def read_log(path: str | Path) -> Log:
    """Read a log that was recorded with `steps`."""
    events, requests, numbers = [], {}, dict[str, int]()
    block_tokens, slots, num_ranks = 0, dict[str, int](), 1
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        result = parse_line(line, numbers)
        if isinstance(result, str):
            raise FormatError(f"{path}:{number}: {result}")
        record = json.loads(line)
        if record["event"] == "start":
            if record["version"] > LOG_VERSION:
                raise FormatError(f"{path} is of version {record['version']}, this reads up to {LOG_VERSION}")
            block_tokens, slots, num_ranks = record["block_tokens"], record["slots"], record.get("ranks", 1)
        elif result is not None:
            requests[record["id"]] = LoggedRequest(result, record["tokens_from"], record["ttft"])
        else:
            events.append(record)
    if not block_tokens or not events:
        raise FormatError(f"{path} has no steps to follow; record it with steps=True")
    return Log(block_tokens, slots, tuple(events), requests, numbers, num_ranks)


def follow(log: Log, cache: CacheConfig, scheduler: SchedulerConfig) -> ReplayDiff:
    """Repeat the calls of the log; raise if a decision differs. The configuration must be that of the run."""
    return _Follower(log, cache, scheduler).run()


class _Follower:
    def __init__(self, log: Log, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        namespace = Namespace("replay", block_tokens=log.block_tokens)
        ready = log.slots.get("host")
        self._manager = CacheManager(namespace, cache, num_ranks=log.num_ranks, num_host_ready=ready)
        self._scheduler = Scheduler(self._manager, scheduler)
        self._log = log
        self._requests: dict[str, Request] = {}
        self._tokens: dict[str, list[int]] = {}
        self._keys = self._keys_of_names(namespace)
        self._in_flight: deque[tuple[Step, float]] = deque()  # oldest first, with the times of schedule()
        self._updated_at = 0.0
        self._routes: dict[int, str] = {}
        self._steps: list[tuple[Work, float]] = []
        self._transfers: list[tuple[str, int, float]] = []
        self._num_steps = 0

    def run(self) -> ReplayDiff:
        do: dict[str, Callable[[dict[str, Any]], None]] = {
            "add": self._add,
            "step": self._schedule,
            "report": self._report,
            "update": self._update,
            "fail": lambda event: self._scheduler.fail(self._oldest()[0], event["t"]),
            "discard": lambda event: self._scheduler.discard(self._oldest()[0], event["t"]),
            "cancel": lambda event: self._cancel(event["id"], event["t"]),
        }
        for event in self._log.events:
            do[event["event"]](event)
        result = {name: dict(request.tokens_from) for name, request in self._requests.items()}
        return ReplayDiff(result, self._num_steps, tuple(self._steps), tuple(self._transfers))

    def _keys_of_names(self, namespace: Namespace) -> dict[int, bytes]:
        """Return the key of every block of the requests, by its number in the log."""
        keys: dict[int, bytes] = {}
        for number, (name, logged) in enumerate(self._log.requests.items()):
            tokens = logged.traced.sequence(number)
            self._tokens[name] = tokens.tolist()
            mine = split_keys(Chain(namespace, tokens).keys())
            keys.update(zip(logged.traced.hash_ids, mine, strict=True))
        return keys

    def _add(self, event: dict[str, Any]) -> None:
        name, count = event["id"], event["prompt_tokens"]
        if name not in self._tokens:
            raise StateError(f"request {name} has no end in the log; close the recorder after the last request")
        chain = Chain(self._manager.namespace, self._tokens[name][:count])
        self._requests[name] = Request(name, chain, event["max_new_tokens"], priority=event["priority"])
        self._scheduler.add(self._requests[name], event["t"])

    def _schedule(self, event: dict[str, Any]) -> None:
        for name, _, _, num_draft in event["rows"]:
            self._requests[name].draft = (0,) * num_draft
        step = self._scheduler.schedule(event["t"])
        self._in_flight.append((step, event["t"]))
        self._num_steps += 1
        decisions = describe(step)
        for what in ("rows", "transfers", "probes"):
            if decisions[what] != event[what]:
                raise StateError(
                    f"step {self._num_steps} had {what} {event[what]} in the run and has {decisions[what]} now: "
                    f"another configuration, or one with partial_scan"
                )
        self._routes.update((number, purpose) for number, purpose, _ in decisions["transfers"])

    def _report(self, event: dict[str, Any]) -> None:
        results = []
        for number, ok, num_bytes, seconds, arrived in event["outcomes"]:
            results.append(TransferResult(number, ok, num_bytes, seconds, "", bytes.fromhex(arrived)))
            if ok:
                self._transfers.append((self._routes[number], num_bytes, seconds))
        lookups = [
            StoreLookup(store, self._known(present), self._known(absent), probe)
            for store, present, absent, probe in event["presences"]
        ]
        num_host_slots = max((count for _, count in event["sizes"]), default=0)
        damaged = bytes.fromhex(event.get("damaged", ""))
        rank = event.get("rank", 0)
        self._manager.apply(Report(event["epoch"], rank, tuple(results), tuple(lookups), num_host_slots, damaged))

    def _known(self, names: list[str]) -> bytes:
        """Return the keys of blocks that requests of the log have."""
        numbers = (self._log.numbers.get(name, -1) for name in names)
        return b"".join(self._keys.get(number, b"") for number in numbers)

    def _update(self, event: dict[str, Any]) -> None:
        step, began = self._oldest()
        results = []
        for row, (count, finished) in zip(step.rows, event["results"], strict=True):
            place = row.request.chain.num_tokens
            results.append(RowResult(tuple(self._tokens[row.request.id][place : place + count]), finished))
        if step.rows and not step.loads:
            self._steps.append((Work.of(step), event["t"] - max(began, self._updated_at)))
        self._updated_at = event["t"]
        self._scheduler.update(step, results, event["t"])

    def _oldest(self) -> tuple[Step, float]:
        if not self._in_flight:
            raise StateError("the log has the result of a step that is not in flight")
        return self._in_flight.popleft()

    def _cancel(self, name: str, now: float) -> None:
        self._scheduler.cancel(self._requests[name], now)
