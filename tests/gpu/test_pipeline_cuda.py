"""The pipeline on a GPU: rows in device memory, streams that run in parallel with the host, and one wait per step."""

import json
import threading
import warnings

import numpy as np
import pytest
import torch

from kvtier.batch import BATCH, COPY, BatchOp, Executor, Module, Pipeline, TicketStatus, Timeline
from kvtier.memory import PINNED, Buffer, Placement, Stream, current_stream
from kvtier.state import State
from support import check_pipeline, inline_executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = Placement("cuda", 0)
MAX_ROWS, WIDTH = 8, 512
SLEEP_CYCLES = 2_000_000  # about a millisecond
PER_BATCH = [op for op in BatchOp if op.per_batch]


class InjectedError(Exception):
    pass


class Request:
    def __init__(self, name):
        self.name, self.count, self.removed = name, 0, 0


def per_phase(phases, placement):
    return [Buffer(MAX_ROWS * WIDTH, "i64", placement) for _ in range(phases)]


class Counter(Module):
    """Counts the steps of each request in its State row. The counts pass through every per-batch op of the pipeline."""

    def __init__(self, phases, cycles=SLEEP_CYCLES):
        self.state = State((MAX_ROWS, WIDTH), "i64", GPU)
        self.staged, self.fetched = per_phase(phases, PINNED), per_phase(phases, PINNED)
        self.initial, self.kept = per_phase(phases, GPU), per_phase(phases, GPU)
        self.cycles, self.fail_at, self.streams = cycles, None, {}

    def rows(self, buffers, batch):
        return buffers[batch.phase].torch().view(MAX_ROWS, WIDTH)[: batch.bsz]

    def _enter(self, op, env):
        self.streams[op] = (torch.cuda.current_stream(), current_stream(GPU).native)
        if self.fail_at is op:
            self.fail_at = None
            raise InjectedError(op.name)
        return env.at(BATCH)

    def setup(self, env):
        batch = self._enter(BatchOp.SETUP, env)
        counts = [ticket.request.count + ticket.num_in_flight for ticket in batch.requests]
        self.rows(self.staged, batch).copy_(torch.tensor(counts, dtype=torch.int64)[:, None])
        env.at(COPY)(self.staged[batch.phase], batch.bsz * WIDTH, self.initial[batch.phase])

    def prepare(self, env):
        batch = self._enter(BatchOp.PREPARE, env)
        self.state.warp(batch.perm, env.at(COPY), new=self.rows(self.initial, batch))

    def forward(self, env):
        batch = self._enter(BatchOp.FORWARD, env)
        torch.cuda._sleep(self.cycles)
        self.state.front[: batch.bsz].add_(1)

    def unprep(self, env):
        batch = self._enter(BatchOp.UNPREP, env)
        self.rows(self.kept, batch).copy_(self.state.front[: batch.bsz])

    def fetch(self, env):
        batch = self._enter(BatchOp.FETCH, env)
        env.at(COPY)(self.kept[batch.phase], batch.bsz * WIDTH, self.fetched[batch.phase])

    def update(self, env):
        batch = self._enter(BatchOp.UPDATE, env)
        counts = self.rows(self.fetched, batch).numpy()
        for row, ticket in enumerate(batch.requests):
            if ticket.error is None:
                ticket.request.count += 1
                assert (counts[row] == ticket.request.count).all(), (ticket, batch.sequence)

    def remove(self, requests):
        for request in requests:
            request.removed += 1


def pipeline_of(phases, executor=Executor, **options):
    counter = Counter(phases)
    return Pipeline([counter], phases=phases, placement=GPU, executor=executor, **options), counter


@pytest.mark.parametrize("executor", [Executor, inline_executor])
@pytest.mark.parametrize("phases", [1, 2, 3])
def test_pipeline_rows_follow_their_requests(phases, executor):
    random = np.random.default_rng(phases)
    pipeline, _ = pipeline_of(phases, executor)
    tickets, expected = [pipeline.add(Request(f"r{k}")) for k in range(MAX_ROWS + 3)], {}
    for _ in range(60):
        chosen = [tickets[k] for k in random.permutation(len(tickets))[: random.integers(0, MAX_ROWS + 1)]]
        generating = chosen[: random.integers(0, len(chosen) + 1)]
        pipeline.step(chosen, generating=generating)
        check_pipeline(pipeline)
        for ticket in chosen:
            expected[ticket] = expected.get(ticket, 0) + 1
    pipeline.close()
    assert [ticket.error for ticket in tickets] == [None] * len(tickets)
    assert {ticket: ticket.request.count for ticket in expected} == expected


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("op", PER_BATCH)
def test_module_error_on_cuda_fails_only_one_batch(op, phases):
    pipeline, counter = pipeline_of(phases)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    for _ in range(3):
        pipeline.step([a, b])
    pipeline.drain()
    counter.fail_at = op
    pipeline.step([a])
    for _ in range(4):
        pipeline.step([b])
    pipeline.drain()
    assert (a.status, str(a.error), a.request.removed) == (TicketStatus.FAILED, op.name, 1)
    assert b.error is None
    before = b.request.count
    for _ in range(3):
        pipeline.step([b])
    pipeline.drain()
    assert b.request.count == before + 3
    pipeline.close()


def test_torch_and_kvtier_use_the_same_stream_per_side():
    pipeline, counter = pipeline_of(2)
    pipeline.step([pipeline.add(Request("a"))])
    pipeline.close()
    assert all(of_torch == of_kvtier for of_torch, of_kvtier in counter.streams.values())
    used = {side: {counter.streams[op][0] for op in PER_BATCH if op.side == side} for side in ("engine", "executor")}
    assert [len(streams) for streams in used.values()] == [1, 1]
    assert len({torch.cuda.default_stream(), *used["engine"], *used["executor"]}) == 3


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_pipeline_on_cuda_synchronizes_once_per_step(monkeypatch, phases):
    pipeline, _ = pipeline_of(phases)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    pipeline.step([a, b])  # one-time work, such as compiling kernels, is allowed to synchronize
    pipeline.step([b])
    pipeline.drain()
    waits, synchronize = [], Stream.synchronize

    def wait(stream):
        waits.append(stream)
        torch.cuda.set_sync_debug_mode("default")  # only this wait is allowed
        synchronize(stream)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Stream, "synchronize", wait)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in ([a, b], [b], [b, a], [a, b], [a]):
            pipeline.step(rows)
        pipeline.drain()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (len(waits), a.error, b.error) == (5, None, None)
    pipeline.close()


def test_next_batch_is_set_up_while_gpu_is_busy():
    class WatchesStream(Module):
        """Checks in SETUP of batch 1 that the executor's stream still runs batch 0."""

        def __init__(self):
            self.enqueued, self.busy = threading.Event(), None

        def setup(self, env):
            if env.at(BATCH).sequence == 1:
                assert self.enqueued.wait(20)
                self.busy = not self.stream.query()

        def forward(self, env):
            if env.at(BATCH).sequence == 0:
                self.stream = torch.cuda.current_stream()
                torch.cuda._sleep(100 * SLEEP_CYCLES)
                self.enqueued.set()

    watches = WatchesStream()
    pipeline = Pipeline([watches], placement=GPU)
    ticket = pipeline.add("a")
    pipeline.step([ticket])
    pipeline.step([ticket])
    pipeline.close()
    assert watches.busy


def test_timeline_shows_gpu_spans_in_order(tmp_path):
    timeline = Timeline()
    pipeline, _ = pipeline_of(2, timeline=timeline)
    tickets = [pipeline.add(Request(name)) for name in "ab"]
    for rows in (tickets, tickets[:1], tickets):
        pipeline.step(rows)
    pipeline.close()
    host, device = [span for span in timeline.spans if span.step >= 0], timeline.stream_spans()
    assert len(host) == len(device) == 3 * (len(PER_BATCH) + 3)  # SETUP, PREPARE and FETCH have one copy span each
    assert {span.track for span in device} == {"engine stream", "executor stream"}
    assert all(span.copied_bytes for span in device if span.name == "copy")
    for step in range(3):
        on_host, on_device = ({s.name: s for s in spans if s.step == step} for spans in (host, device))
        forward, fetch = on_device["FORWARD"], on_device["FETCH"]
        assert forward.end - forward.start > 2e-4  # FORWARD sleeps on the device, not on the host
        assert on_host["FORWARD"].start < forward.end <= fetch.end
        assert forward.end <= on_host["UPDATE"].start + 1e-3  # host and device clocks differ
    assert timeline.save(tmp_path / "trace.json") == len(host) + len(device) + 4  # two ADD and two REMOVE spans
    tracks = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "M"]
    assert len(tracks) == 4
