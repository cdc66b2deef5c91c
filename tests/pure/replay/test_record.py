"""The log of a run can be read as a trace, reproduces the hits of the run, and contains no prompt text."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.follow import follow, read_log
from benchmarks.step_recorder import StepRecorder
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, FormatError, StateError
from kvtier.index import Chain, Hints, Namespace, Outcome
from kvtier.messages import Report, slot_bytes
from kvtier.replay import read_trace
from kvtier.replay.hardware import DiskSpec
from kvtier.replay.recorder import Recorder
from kvtier.replay.sim_worker import SimulatedStore, SimulatedWorker
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, SchedulerConfig

BLOCK = 4
START = 100.0  # time at which each server starts
LIMITS = SchedulerConfig(max_rows=4, max_step_tokens=24, starts_early=True)


@dataclass
class Server:
    """An engine without a model. Arrivals, answers, cancellations, step times and damaged blocks are random."""

    cache: CacheConfig
    rng: random.Random
    num_ranks: int = 1
    failures: float = 0.0
    """Probability that a step with rows fails."""

    def __post_init__(self) -> None:
        namespace = Namespace("served", block_tokens=BLOCK)
        self.manager = CacheManager(namespace, self.cache, num_ranks=self.num_ranks)
        self.scheduler = Scheduler(self.manager, LIMITS)
        stores = {store.name: SimulatedStore(30) for store in self.cache.stores}
        self.worker = SimulatedWorker(1, 20.0, disk=DiskSpec(8.0, 5.0, 0.1), stores=stores)
        self.now = START
        self.requests: list[Request] = []

    def serve(self, prompts: list[list[int]]) -> None:
        waiting = list(enumerate(prompts))
        for _ in range(10_000):
            if waiting and (self.rng.random() < 0.3 or not self.scheduler.has_work()):
                number, prompt = waiting.pop(0)
                chain = Chain(self.manager.namespace, prompt)
                self.requests.append(Request(f"r{number}", chain, self.rng.randint(1, 9)))
                self.scheduler.add(self.requests[-1], self.now)
            if not waiting and not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the server still has work after 10,000 steps")

    def step(self) -> None:
        self.apply()
        step = self.scheduler.schedule(self.now)
        self.worker.submit(step.plan, self.now)
        self.now += self.rng.random() + (0.5 if step.rows else 0.0)
        if step.loads:
            self.now = max(self.now, self.worker.end_of(step.loads))
        self.apply()
        if step.rows and self.failures and self.rng.random() < self.failures:
            self.scheduler.fail(step, self.now)
            return
        results = [
            RowResult((self.rng.randrange(1000),) if row.wants_token else (), self.rng.random() < 0.1)
            for row in step.rows
        ]
        self.scheduler.update(step, results, self.now)
        if self.scheduler.running and self.rng.random() < 0.03:
            self.scheduler.cancel(self.scheduler.running[0], self.now)

    def apply(self) -> None:
        for report in self.worker.poll(self.now):
            for rank in range(self.num_ranks):
                self.manager.apply(replace(report, rank=rank))
        if self.cache.host is not None and self.rng.random() < 0.05:
            slots = np.array(self.rng.sample(range(self.cache.host.num_blocks), 2), np.int32)
            self.manager.apply(Report(self.manager.transfers.epoch, 0, damaged=slot_bytes(slots)))


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return the prompts of conversations that begin with one of three shared messages."""
    openings = [[rng.randrange(1000) for _ in range(13)] for _ in range(3)]
    conversations = [list(rng.choice(openings)) for _ in range(5)]
    turns = []
    for _ in range(count):
        conversation = rng.choice(conversations)
        conversation += [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
        turns.append(list(conversation) if len(conversation) < 70 else list(rng.choice(openings)))
    return turns


CONFIGS = {
    "device": CacheConfig(24, partial_scan=0),
    "host": CacheConfig(22, host=HostConfig(40), partial_scan=0),
    "disk": CacheConfig(22, host=HostConfig(10), stores=(StoreConfig(),), partial_scan=0),
}


@pytest.mark.parametrize("config", CONFIGS)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 2), failures=st.sampled_from([0.0, 0.05]))
@settings(deadline=None, max_examples=12)
def test_follow_reproduces_logged_hits_of_each_tier(config, seed, num_ranks, failures, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    rng = random.Random(seed)
    server = Server(CONFIGS[config], rng, num_ranks, failures)
    with contextlib.closing(StepRecorder(path)) as recorder:
        recorder.attach(server.scheduler, now=server.now)
        server.serve(prompts(rng, 25))
    log = read_log(path)
    found = follow(log, CONFIGS[config], LIMITS)
    assert found.tokens_from == {request.id: request.tokens_from for request in server.requests}
    assert found.tokens_from == {name: logged.tokens_from for name, logged in log.requests.items()}
    assert found.steps
    for name, logged in log.requests.items():
        assert logged.ttft is None or logged.ttft > 0, name


def recorded(tmp_path, config: str = "host", recorder_type=Recorder, **options) -> tuple[Server, Path]:
    server = Server(CONFIGS[config], random.Random(5))
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)  # the recorder refuses to overwrite a log
    with contextlib.closing(recorder_type(path, **options)) as recorder:
        recorder.attach(server.scheduler, now=server.now)
        server.serve(prompts(random.Random(5), 20))
    return server, path


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_log_can_be_read_as_trace_of_served_requests(tmp_path):
    server, path = recorded(tmp_path)
    trace = read_trace(path)
    assert trace.problems == ()
    assert len(trace.requests) == len(server.requests)
    served = {request.arrival - START: request for request in server.requests}
    for traced in trace.requests:
        request = min(served.items(), key=lambda item: abs(item[0] * 1000 - traced.timestamp_ms))[1]
        assert traced.input_tokens == request.num_prompt_tokens
        assert traced.output_tokens == request.num_new_tokens
        assert len(traced.hash_ids) == request.chain.num_tokens // BLOCK
    prefixes = set()
    for request in server.requests:
        for block in range(request.chain.num_blocks):
            prefixes.add(request.chain.labels[: (block + 1) * BLOCK * 4])  # a token id has 4 bytes
    names = {name for line in lines(path) for name in json.loads(line).get("keys", ())}
    assert len(names) == len(prefixes), "the log must contain one name per distinct prefix"


def test_log_contains_no_tokens_and_no_keys(tmp_path):
    server, path = recorded(tmp_path, recorder_type=StepRecorder)
    text = path.read_text()
    for request in server.requests:
        assert request.chain.keys()[:32].hex()[:16] not in text
    for line in text.splitlines():
        assert set(json.loads(line)) <= {
            "event", "version", "block_tokens", "slots", "t", "id", "prompt_tokens", "max_new_tokens", "priority",
            "rows", "transfers", "probes", "results", "epoch", "outcomes", "presences", "sizes", "arrival",
            "answer_tokens", "keys", "tokens_from", "ttft", "state", "ranks", "rank", "damaged", "finish_reason",
        }  # fmt: skip


def test_names_of_keys_are_equal_only_if_secrets_are_equal(tmp_path):
    names = []
    for secret in (b"a", b"a", b"b", None):
        _, path = recorded(tmp_path, secret=secret)
        names.append([json.loads(line).get("keys") for line in lines(path)])
    assert names[0] == names[1]
    assert names[0] != names[2] != names[3]


def test_close_detaches_recorder_from_scheduler(tmp_path):
    server, _ = recorded(tmp_path)
    assert not {"add", "schedule", "update", "fail", "cancel"} & set(vars(server.scheduler))
    assert "apply" not in vars(server.manager)
    server.serve([[1, 2, 3]])
    assert server.requests[-1].state is not RequestState.WAITING


def test_requests_in_failed_step_are_logged_and_forgotten(tmp_path):
    server = Server(CONFIGS["host"], random.Random(5), failures=0.2)
    path = tmp_path / "log.jsonl"
    with contextlib.closing(Recorder(path)) as recorder:
        recorder.attach(server.scheduler, now=server.now)
        server.serve(prompts(random.Random(5), 20))
        assert recorder._first_tokens == {}
    logged = [event for event in map(json.loads, lines(path)) if event["event"] == "request"]
    assert sorted((event["id"], event["state"], event["answer_tokens"]) for event in logged) == sorted(
        (request.id, request.state.value, request.num_new_tokens) for request in server.requests
    )
    assert any(event["state"] == "cancelled" and event["answer_tokens"] and event["ttft"] for event in logged)


@pytest.mark.parametrize(("count", "ends_early"), [(20, True), (1, False)])
def test_full_disk_closes_log_with_warning_and_serving_continues(count, ends_early):
    """The log of a single request is short, so it is written only when the recorder is closed."""
    server = Server(CONFIGS["host"], random.Random(5))
    recorder = StepRecorder("/dev/full")

    def serve() -> None:
        with contextlib.closing(recorder):
            recorder.attach(server.scheduler, now=server.now)
            server.serve(prompts(random.Random(5), count))
            assert ("update" not in vars(server.scheduler)) is ends_early

    with pytest.warns(RuntimeWarning, match=r"stopped writing the log /dev/full: .*No space left") as warned:
        serve()
    assert len(warned) == 1
    assert len(server.requests) == count
    assert all(request.state.is_over for request in server.requests)
    assert not {"add", "schedule", "update", "fail", "cancel"} & set(vars(server.scheduler))
    with pytest.raises(StateError, match="or closed"):
        recorder.attach(server.scheduler, now=server.now)


def test_second_attach_of_recorder_raises(tmp_path):
    server = Server(CONFIGS["device"], random.Random(1))
    with contextlib.closing(Recorder(tmp_path / "log.jsonl")) as recorder:
        recorder.attach(server.scheduler, now=0.0)
        with pytest.raises(StateError, match="attached or closed"):
            recorder.attach(server.scheduler, now=0.0)
        recorder.close()


def test_follow_with_other_config_raises(tmp_path):
    _, path = recorded(tmp_path, recorder_type=StepRecorder)
    with pytest.raises(StateError, match="in the run and has"):
        follow(read_log(path), CacheConfig(100, host=HostConfig(40), partial_scan=0), LIMITS)


def test_follow_with_invalid_or_incomplete_log_raises(tmp_path):
    _, path = recorded(tmp_path)
    with pytest.raises(FormatError, match="no steps to follow"):
        read_log(path)
    (tmp_path / "bad").write_text('{"event": "start", "version": 9, "block_tokens": 4, "slots": {}}\n')
    with pytest.raises(FormatError, match="of version 9, this reads up to 1"):
        read_log(tmp_path / "bad")
    (tmp_path / "bad").write_text("{\n")
    with pytest.raises(FormatError, match="bad:1: not JSON"):
        read_log(tmp_path / "bad")
    _, path = recorded(tmp_path, recorder_type=StepRecorder)
    kept = [
        f"{line}\n"
        for line in lines(path)
        if json.loads(line).get("id") != "r0" or json.loads(line)["event"] != "request"
    ]
    (tmp_path / "cut").write_text("".join(kept))
    with pytest.raises(StateError, match="r0 has no end in the log"):
        follow(read_log(tmp_path / "cut"), CONFIGS["host"], LIMITS)


def test_log_file_is_readable_by_owner_only(tmp_path):
    before = os.umask(0)
    try:
        Recorder(tmp_path / "log.jsonl").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "folder"])
def test_recorder_refuses_existing_file(tmp_path, kind):
    path, victim = tmp_path / "log.jsonl", tmp_path / "victim"
    victim.write_text("precious")
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(victim if kind == "link" else tmp_path / "none")
    with pytest.raises(ArgumentError, match=r"cannot create the log .*log\.jsonl: File exists"):
        Recorder(path)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "none").exists()


def test_log_with_hints_can_be_read_back(tmp_path):
    server = Server(CONFIGS["host"], random.Random(5))
    path = tmp_path / "log.jsonl"
    hints = Hints("chat-with-ann", session_over=True, expects_return_seconds=30.0)
    with contextlib.closing(Recorder(path)) as recorder:
        recorder.attach(server.scheduler, now=server.now)
        for number, salt in enumerate((b"a\0x", b"a\0y", b"b")):
            chain = Chain(server.manager.namespace, [number] * BLOCK, salt=salt)
            server.scheduler.add(Request(f"r{number}", chain, 1, hints=hints), server.now)
            server.serve([])
            server.now += 1.0
        server.scheduler.close_session("chat-with-ann", b"a", server.now + 60.0)
    assert "ann" not in path.read_text()
    first, second, third = read_trace(path).requests
    assert first.hints.session_id == second.hints.session_id != third.hints.session_id
    assert (first.hints.session_over, first.hints.expects_return_seconds) == (True, 30.0)
    assert first.outcome == Outcome(1, "length", first.hints)
    assert [each.closed_at_ms for each in (first, second, third)] == [
        None,
        pytest.approx((server.now + 60.0 - START) * 1000),
        None,
    ]
