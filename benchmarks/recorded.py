"""Recorded runs of our engine for benchmarks/replay: SmolLM2-135M on this CPU, with device, host and disk tiers.

The engine computes with one thread. On two cores, the other core is free for copies and the disk, so that they hardly
affect the time of a step. A request arrives when it is due, even if the current step has not ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.fitted_cost import FittedCost
from benchmarks.follow import Log, follow, read_log
from benchmarks.step_recorder import StepRecorder
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.replay.hardware import DiskSpec
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore

BLOCK = 16
# Four of the longest prompts fit on the device. With space for only two (96 blocks, prompts of 800 tokens), requests
# waited for memory, and small differences in time decided which of them waited: the p99 of two real runs differed by a
# fifth.
CACHE = CacheConfig(144, host=HostConfig(192), stores=(StoreConfig("disk"),), partial_scan=0)
DISK_BLOCKS = 2000
LIMITS = SchedulerConfig(max_rows=16, max_step_tokens=256)


@dataclass(frozen=True)
class Load:
    """Conversations at random times: a shared beginning, then turns that repeat everything before them."""

    seed: int
    seconds: float
    rate: float
    """Turns per second."""
    conversations: int = 14
    system_tokens: int = 96
    history_tokens: int = 160
    message_tokens: tuple[int, int] = (16, 96)
    answer_tokens: tuple[int, int] = (4, 12)
    longest: int = 450

    def arrivals(self) -> Iterator[tuple[float, int]]:
        """Return the time and the conversation of each turn."""
        chosen, now = random.Random(self.seed), 0.0
        while (now := now + chosen.expovariate(self.rate)) < self.seconds:
            yield now, min(int(chosen.expovariate(1 / 4)), self.conversations - 1)


@dataclass(frozen=True)
class Run:
    """A recorded run."""

    log: Log
    cache: CacheConfig
    scheduler: SchedulerConfig
    block_bytes: int
    phases: int
    others: float
    """Cores that other processes used during the run."""

    @property
    def ttfts(self) -> list[float]:
        return [each.ttft for each in self.log.requests.values() if each.ttft is not None]

    def hit_rate(self, tier: str) -> float:
        """Return the share of prompt tokens found in a tier."""
        requests = self.log.requests.values()
        found = sum(each.tokens_from.get(tier, 0) for each in requests)
        return found / sum(each.traced.input_tokens for each in requests)

    @property
    def busy_share(self) -> float:
        """Return the share of time spent in steps."""
        steps = [event for event in self.log.events if event["event"] == "step"]
        updates = [event for event in self.log.events if event["event"] == "update"]
        taken = before = 0.0
        for step, update in zip(steps, updates, strict=True):
            if step["rows"]:
                taken += update["t"] - max(step["t"], before)
            before = update["t"]
        return taken / before


@dataclass(frozen=True)
class Machine:
    """Speed of a machine, from recorded runs: steps, copies and disk."""

    cost: FittedCost
    link_bandwidth: float
    link_latency: float
    disk: DiskSpec


class Clock:
    """A clock of elapsed seconds that can be overridden for the arrival of a request."""

    def __init__(self) -> None:
        self.stamp: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.stamp is None else self.stamp


def record(model: Model, folder: Path, load: Load, cache: CacheConfig = CACHE, phases: int = 1) -> Run:
    """Serve the load in real time and record it."""
    folder.mkdir()
    block_bytes = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * 4 * BLOCK
    store = DiskStore(folder / "disk", DISK_BLOCKS * (block_bytes + 8192), min_free_bytes=0)
    clock = Clock()
    config = EngineConfig(BLOCK, cache, LIMITS, phases=phases)
    engine = Engine(model, config=config, stores={"disk": store}, clock=clock)
    talks = _Talks(load, model.config.vocab_size)
    with contextlib.closing(StepRecorder(folder / "log.jsonl")) as recorder:
        begin, others = clock(), _others_seconds()
        recorder.attach(engine.scheduler, now=begin)
        while talks.due or engine.has_work():
            for came, prompt, count in talks.ready(clock() - begin):
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
                clock.stamp = begin + came
                talks.asked(engine.add(prompt, params))
                clock.stamp = None
            if engine.has_work():
                for output in engine.step():
                    talks.answered(output.request_id, output.token_ids, clock() - begin, output.finish_reason)
            elif talks.due:
                time.sleep(min(0.002, max(0.0, talks.due[0][0] - (clock() - begin))))
        others = (_others_seconds() - others) / (clock() - begin)
    scheduler = engine.scheduler.config
    engine.close()
    return Run(read_log(folder / "log.jsonl"), cache, scheduler, block_bytes, phases, others)


def _others_seconds() -> float:
    """Return the CPU seconds of other processes, and stolen ones, so far."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


class _Talks:
    """The schedule of the conversations. A turn that is due waits for the answer before it."""

    def __init__(self, load: Load, vocab: int) -> None:
        self.due = list(load.arrivals())
        self._load, self._vocab = load, vocab
        self._chosen = random.Random(load.seed + 100)
        self._system = self._tokens(load.system_tokens)
        self._said = [self._system + self._tokens(load.history_tokens) for _ in range(load.conversations)]
        self._free_at = [0.0] * load.conversations
        self._talking: dict[str, int] = {}
        self._asking: list[int] = []

    def ready(self, now: float) -> Iterator[tuple[float, list[int], int]]:
        """Yield the turns that are due: time, prompt and length of the answer."""
        load = self._load
        for came, who in list(self.due):
            if came > now:
                return
            if who in self._talking.values():
                continue
            self.due.remove((came, who))
            if len(self._said[who]) > load.longest:
                self._said[who] = list(self._system)
            self._said[who] += self._tokens(self._chosen.randint(*load.message_tokens))
            self._asking.append(who)
            yield max(came, self._free_at[who]), list(self._said[who]), self._chosen.randint(*load.answer_tokens)

    def asked(self, name: str) -> None:
        """Record the request name of the turn yielded last."""
        self._talking[name] = self._asking.pop()

    def answered(self, name: str, tokens: tuple[int, ...], now: float, finished: object) -> None:
        """Append tokens of an answer."""
        who = self._talking[name]
        self._said[who] += tokens
        if finished is not None:
            del self._talking[name]
            self._free_at[who] = now

    def _tokens(self, count: int) -> list[int]:
        return [self._chosen.randrange(self._vocab) for _ in range(count)]


def calibration(model: Model, folder: Path, seed: int, seconds: float, phases: int) -> Run:
    """Return a short run of conversations other than the predicted ones.

    Its messages have all lengths, so that there are steps of all sizes, and it has less host memory, so that the disk
    is read.
    """
    load = Load(seed, seconds, 1.6, message_tokens=(8, 160), answer_tokens=(3, 8))
    return record(model, folder, load, replace(CACHE, host=HostConfig(160)), phases)


def machine_of(runs: Sequence[Run]) -> Machine:
    """Fit the speed of the machine to these runs."""
    known = [follow(run.log, run.cache, run.scheduler) for run in runs]
    outcomes = [outcome for each in known for outcome in each.outcomes]
    latency, bandwidth = _speed(outcomes, "load", "save")
    read_latency, read_bandwidth = _speed(outcomes, "fetch")
    _, write_bandwidth = _speed(outcomes, "store")
    disk = DiskSpec(read_bandwidth, write_bandwidth, read_latency)
    return Machine(FittedCost([step for each in known for step in each.steps]), bandwidth, latency, disk)


def _speed(outcomes: Sequence[tuple[str, int, float]], *purposes: str) -> tuple[float, float]:
    """Fit latency and bytes per second of one kind of transfer."""
    mine = np.array([(nbytes, seconds) for purpose, nbytes, seconds in outcomes if purpose in purposes])
    assert len(mine), f"no {' or '.join(purposes)} in the calibration: run it for longer"
    slope, fixed = np.polyfit(mine[:, 0], mine[:, 1], 1) if len(np.unique(mine[:, 0])) > 1 else (0.0, 0.0)
    if slope <= 0 or fixed < 0:  # too few, or all equal
        return 0.0, float(mine[:, 0].sum() / mine[:, 1].sum())
    return float(fixed), float(1 / slope)
