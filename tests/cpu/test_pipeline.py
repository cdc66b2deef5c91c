"""The pipeline: order of ops and rows, life cycle of requests, failures, timelines, and random runs."""

import json
import threading
import time
from collections import deque
from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.batch import BATCH, COPY, BatchOp, Executor, Module, Pipeline, TicketStatus, Timeline
from kvtier.errors import ArgumentError, ClosedError
from kvtier.memory import CPU, Stream, current_stream
from kvtier.state import State
from support import FINAL_STATUSES, check_pipeline, inline_executor, new_stream

MAX_ROWS = 8


class Request:
    def __init__(self, name):
        self.name, self.count, self.added, self.removed = name, 0, 0, 0

    def __repr__(self):
        return self.name


class PlannedError(Exception):
    pass


def on_stream(task):
    stream = current_stream(CPU)
    task() if stream is None else stream.enqueue(task)


class Counter(Module):
    """Counts the forward passes of each request in a State, and compares the result with a count on the host."""

    def __init__(self, phases):
        self.state = State((MAX_ROWS,), "i64")
        self.initial = [torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(phases)]
        self.kept = [torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(phases)]
        self.log, self.fail_at, self.error = [], None, PlannedError

    def _enter(self, op, env):
        batch = env.at(BATCH)
        self.log.append((op.name, batch.sequence, threading.current_thread().name))
        if self.fail_at is op:
            self.fail_at = None
            raise self.error(op.name)
        return batch

    def add(self, requests):
        for request in requests:
            if request.name == "refused":
                raise PlannedError("ADD")
            request.added += 1

    def setup(self, env):
        batch = self._enter(BatchOp.SETUP, env)
        for row, ticket in enumerate(batch.requests):
            self.initial[batch.phase][row] = ticket.request.count + ticket.num_in_flight

    def prepare(self, env):
        batch = self._enter(BatchOp.PREPARE, env)
        self.state.warp(batch.perm, env.at(COPY), new=self.initial[batch.phase])

    def forward(self, env):
        batch = self._enter(BatchOp.FORWARD, env)
        front, rows = self.state.front, batch.bsz
        on_stream(lambda: front[:rows].add_(1))

    def unprep(self, env):
        batch = self._enter(BatchOp.UNPREP, env)
        front, kept, rows = self.state.front, self.kept[batch.phase], batch.bsz
        on_stream(lambda: kept[:rows].copy_(front[:rows]))

    def fetch(self, env):
        self._enter(BatchOp.FETCH, env)

    def update(self, env):
        batch = self._enter(BatchOp.UPDATE, env)
        for row, ticket in enumerate(batch.requests):
            if not ticket.is_running:
                continue  # if the request failed in an earlier step, its count in the State is unknown
            ticket.request.count += 1
            assert int(self.kept[batch.phase][row]) == ticket.request.count, (ticket, batch.sequence)

    def remove(self, requests):
        for request in requests:
            request.removed += 1


class SeededExecutor:
    """Runs batches on the calling thread. The seed decides how many waiting batches run in each call of `submit`."""

    def __init__(self, work, seed):
        self._work, self._random = work, Random(seed)
        self._waiting, self._done = deque(), deque()

    def submit(self, batch):
        self._waiting.append(batch)
        while self._waiting and self._random.random() < 0.5:
            self._run_one()

    def collect(self):
        while not self._done:
            self._run_one()
        return self._done.popleft()

    def close(self):
        while self._waiting:
            self._run_one()

    def _run_one(self):
        batch = self._waiting.popleft()
        self._work(batch)
        self._done.append(batch)


def pipeline_of(phases=2, seed=None):
    counter = Counter(phases)
    executor = Executor if seed is None else lambda work: SeededExecutor(work, seed)
    return Pipeline([counter], phases=phases, executor=executor), counter


def names(pipeline):
    return [ticket.request.name for ticket in pipeline._order.tickets]


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 0])
def test_pipeline_results_arrive_phases_minus_one_steps_later(phases, seed):
    pipeline, counter = pipeline_of(phases, seed)
    ticket = pipeline.add(Request("a"))
    for step in range(1, 8):
        pipeline.step([ticket])
        assert ticket.request.count == max(0, step - (phases - 1))
        assert pipeline.num_in_flight == min(step, phases - 1)
    pipeline.drain()
    assert ticket.request.count == 7
    pipeline.close()
    per_step = [[op for op, sequence, _ in counter.log if sequence == k] for k in range(7)]
    assert per_step == [[op.name for op in BatchOp if op.per_batch]] * 7


def test_engine_and_executor_ops_run_on_separate_threads():
    pipeline, counter = pipeline_of()
    pipeline.step([pipeline.add(Request("a"))])
    pipeline.close()
    engine_thread = threading.current_thread().name
    assert {op: name for op, _, name in counter.log} == {
        op.name: engine_thread if op.side == "engine" else "kvtier-executor" for op in BatchOp if op.per_batch
    }


def test_batch_order_is_generating_rows_first_then_other_rows():
    """Both kinds of rows have this order: rows of the previous batch, then resumed rows, then new rows."""
    pipeline, _ = pipeline_of(1, 0)
    a, b, c = (pipeline.add(Request(name)) for name in "abc")
    pipeline.step([a, b, c])
    pipeline.step([c, a])  # b is preempted
    assert names(pipeline) == ["a", "c"]
    d = pipeline.add(Request("d"))
    pipeline.step([d, b, c, a])
    assert names(pipeline) == ["a", "c", "b", "d"]
    pipeline.step([a, b, c, d], generating=[d, c])
    assert names(pipeline) == ["c", "d", "a", "b"]
    pipeline.close()


def test_cancelled_request_is_removed_after_its_last_batch():
    pipeline, _ = pipeline_of(3, 0)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    pipeline.step([a, b])
    a.cancel()
    a.finish()  # no effect after cancel
    assert a.status is TicketStatus.RETIRING
    pipeline.step([a, b])  # the pipeline skips request a
    assert names(pipeline) == ["b"]
    assert a.request.removed == 0
    pipeline.drain()
    assert (a.status, a.request.removed) == (TicketStatus.CANCELLED, 1)
    with pytest.raises(ArgumentError, match="not in this pipeline"):
        pipeline.step([a])
    pipeline.close()
    assert (b.status, b.request.removed) == (TicketStatus.CANCELLED, 1)


def test_request_rejected_by_module_fails_at_once():
    pipeline, _ = pipeline_of(1, 0)
    ticket = pipeline.add(Request("refused"))
    assert ticket.status is TicketStatus.FAILED
    assert isinstance(ticket.error, PlannedError)
    pipeline.close()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("op", [op for op in BatchOp if op.per_batch])
def test_module_error_fails_only_one_batch(op, phases, seed):
    pipeline, counter = pipeline_of(phases, seed)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    for _ in range(3):
        pipeline.step([a, b])
    pipeline.drain()
    counter.fail_at = op
    pipeline.step([a])
    pipeline.drain()
    assert a.status is TicketStatus.FAILED
    assert str(a.error) == op.name
    assert (a.request.removed, b.status in FINAL_STATUSES) == (1, False)
    for _ in range(4):
        pipeline.step([b])
    pipeline.drain()
    assert b.request.count == 7
    pipeline.close()


@pytest.mark.parametrize("executor", [Executor, inline_executor])
def test_timeline_has_every_op_and_copy_with_rows_and_bytes(executor, tmp_path):
    timeline = Timeline()
    pipeline = Pipeline([Counter(2)], executor=executor, timeline=timeline)
    tickets = [pipeline.add(Request(name)) for name in "ab"]
    for rows in (tickets, tickets[:1], tickets, tickets):
        pipeline.step(rows)
    pipeline.close()
    ops = [op.name for op in BatchOp if op.per_batch]
    for step, (num_rows, num_pieces) in enumerate([(2, 1), (1, 1), (2, 2), (2, 0)]):
        spans = [span for span in timeline.spans if span.step == step]
        copies = [span for span in spans if span.name == "copy"]
        spans = [span for span in spans if span.name != "copy"]
        assert [span.name for span in spans] == ops
        assert {(span.num_rows, span.phase) for span in (*spans, *copies)} == {(num_rows, spans[0].phase)}
        assert all(span.start <= span.end for span in (*spans, *copies))
        assert [span.track for span in spans] == [op.side for op in BatchOp if op.per_batch]
        # A row of the State has 8 bytes. PREPARE copies all rows, except in the last step, whose rows are unchanged.
        assert [(span.copied_bytes, span.num_pieces, span.track) for span in copies] == [
            (8 * num_rows, num_pieces, "executor")
        ] * bool(num_pieces)
        assert spans[1].copied_bytes == (8 * num_rows if num_pieces else 0)
        assert all(spans[1].start <= span.start <= span.end <= spans[1].end for span in copies)
    others = [(span.name, span.num_rows, span.phase) for span in timeline.spans if span.step == -1]
    assert others == [("ADD", 1, -1)] * 2 + [("REMOVE", 1, -1)] * 2
    # There are 24 spans of ops, 3 of copies and 4 of ADD and REMOVE. With streams, each op and each copy has a second
    # span for the execution on the stream.
    on_streams = 24 + 3 if executor is Executor else 0
    assert timeline.save(tmp_path / "trace.json") == 31 + on_streams
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    complete_events = [event for event in events if event["ph"] == "X"]
    assert len(complete_events) == 31 + on_streams
    assert {names[event["tid"]] for event in complete_events} == {span.track for span in timeline.spans} | {
        f"{side} stream" for side in ("engine", "executor") if on_streams
    }
    assert min(event["ts"] for event in complete_events) == 0
    assert {event["args"].get("pieces") for event in complete_events if event["name"] == "copy"} == {1, 2}


def test_timeline_stream_spans_show_execution_time():
    timeline = Timeline()
    with new_stream() as stream:
        kind = {"track": "executor", "phase": 0, "step": 0, "num_rows": 1, "stream": stream}
        gate = threading.Event()
        with timeline.span("first", **kind):
            pass
        with timeline.span("held", **kind) as enqueued:
            stream.enqueue(gate.wait)
        opened = time.perf_counter()
        gate.set()
        _, ran = timeline.stream_spans()
        assert (ran.name, ran.track) == ("held", "executor stream")
        assert enqueued.end < opened < ran.end

        with timeline.span("fails", **kind):
            stream.enqueue(lambda: int("fails"))
        assert [span.name for span in timeline.stream_spans()] == ["first", "held"]
        assert [span.name for span in timeline.spans] == ["first", "held", "fails"]


def test_timeline_includes_failed_op():
    timeline, counter = Timeline(), Counter(1)
    pipeline = Pipeline([counter], phases=1, executor=inline_executor, timeline=timeline)
    counter.fail_at = BatchOp.FORWARD
    pipeline.step([pipeline.add(Request("a"))])
    pipeline.close()
    assert [span.name for span in timeline.spans] == ["ADD", "SETUP", "copy", "PREPARE", "FORWARD", "REMOVE"]


def test_empty_timeline_saves_empty_trace(tmp_path):
    assert Timeline().save(tmp_path / "trace.json") == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_pipeline_step_with_invalid_argument_changes_nothing():
    pipeline, _ = pipeline_of(1, 0)
    ticket = pipeline.add(Request("a"))
    for wrong in ({"tokens": 5}, {"generating": [[]]}):
        with pytest.raises(TypeError):
            pipeline.step([ticket], **wrong)
        check_pipeline(pipeline)
    pipeline.step([ticket], tokens=[5])
    assert ticket.request.count == 1
    pipeline.close()


def test_unchanged_rows_reuse_the_identity_permutation():
    class Permutations(Module):
        seen: ClassVar[list] = []

        def setup(self, env):
            self.seen.append(env.at(BATCH).perm)

    pipeline = Pipeline([Permutations()], phases=1, executor=inline_executor)
    a, b, c = (pipeline.add(name) for name in "abc")
    for rows, generating in (([a, b], []), ([b, a], []), ([a, b], [a]), ([a, b], [b, a]), ([a, b], [b]), ([b, c], [])):
        pipeline.step(rows, generating=generating)
    pipeline.close()
    seen = Permutations.seen
    assert seen[1] is seen[2] is seen[3]
    assert [perm.index.tolist() for perm in seen] == [[0, 0], [0, 1], [0, 1], [0, 1], [1, 0], [0, 2]]
    assert [perm.size0 for perm in seen] == [0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_pipeline_synchronizes_once_per_step(monkeypatch, phases):
    waits, synchronize = [], Stream.synchronize
    monkeypatch.setattr(Stream, "synchronize", lambda self: (waits.append(self), synchronize(self)))
    pipeline, _ = pipeline_of(phases)
    tickets = [pipeline.add(Request(name)) for name in "ab"]
    for rows in (tickets, tickets[:1], tickets, tickets):
        pipeline.step(rows)
    pipeline.drain()
    assert len(waits) == 4
    pipeline.close()


@pytest.mark.parametrize("op", [BatchOp.SETUP, BatchOp.PREPARE, BatchOp.FETCH])
def test_failed_batch_is_collected_after_its_stream_work_ends(op):
    class Slow(Module):
        """In batch 0, enqueues slow work on the stream, and fails the op while this work runs."""

        def run(self, env):
            if env.at(BATCH).sequence == 0:
                self.stream = current_stream(CPU)
                self.stream.enqueue(lambda: time.sleep(0.05))
                raise PlannedError

    setattr(Slow, op.value, Slow.run)
    slow = Slow()
    pipeline = Pipeline([slow])
    pipeline.step([pipeline.add("a")])
    pipeline.drain()
    assert slow.stream.query()
    pipeline.close()


@pytest.mark.parametrize("op", [BatchOp.SETUP, BatchOp.FETCH, BatchOp.UPDATE])
def test_interrupt_propagates_and_pipeline_stays_consistent(op):
    pipeline, counter = pipeline_of(2)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    counter.fail_at, counter.error = op, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the op decides which call raises
        pipeline.step([a])
        pipeline.drain()
    check_pipeline(pipeline)
    assert (a.status, pipeline.num_in_flight) == (TicketStatus.FAILED, 0)
    pipeline.step([b])
    pipeline.close()
    assert b.request.count == 1


class FailsOnTheStream(Module):
    """Enqueues a failing task in the batch with sequence number `at`. The error occurs on the stream, not in the op."""

    def __init__(self):
        self.at = None

    def forward(self, env):
        def fail():
            raise PlannedError("on the stream")

        if env.at(BATCH).sequence == self.at:
            on_stream(fail)


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_stream_error_fails_only_one_batch(phases):
    counter, device = Counter(phases), FailsOnTheStream()
    pipeline = Pipeline([counter, device], phases=phases)
    a, b = pipeline.add(Request("a")), pipeline.add(Request("b"))
    for _ in range(3):
        pipeline.step([a, b])
    pipeline.drain()
    device.at = 3
    pipeline.step([a])
    for _ in range(3):
        pipeline.step([b])
        check_pipeline(pipeline)
    pipeline.drain()
    assert (a.status, str(a.error)) == (TicketStatus.FAILED, "on the stream")
    assert b.is_running
    before = b.request.count
    for _ in range(3):
        pipeline.step([b])
    pipeline.drain()
    assert b.request.count == before + 3
    pipeline.close()


def test_system_exit_in_module_does_not_end_executor():
    class Exits(Module):
        def forward(self, env):
            if env.at(BATCH).sequence == 0:
                raise SystemExit

    pipeline = Pipeline([Exits()])
    a, b = pipeline.add("a"), pipeline.add("b")
    pipeline.step([a])
    pipeline.drain()
    pipeline.step([b])
    pipeline.drain()
    assert (a.status, b.is_running) == (TicketStatus.FAILED, True)
    pipeline.close()


def test_pipeline_use_after_close_raises():
    pipeline, _ = pipeline_of()
    ticket = pipeline.add(Request("a"))
    pipeline.close()
    pipeline.close()
    for use in (lambda: pipeline.step([ticket]), lambda: pipeline.add(Request("b"))):
        with pytest.raises(ClosedError):
            use()


def test_pipeline_close_raises_first_error_of_remove():
    class FailsOnRemove(Module):
        def remove(self, requests):
            raise PlannedError(str(requests))

    pipeline = Pipeline([FailsOnRemove()])
    a, b = pipeline.add("a"), pipeline.add("b")
    pipeline.step([a, b])
    with pytest.raises(PlannedError, match="a"):
        pipeline.close()
    assert [a.status, b.status] == [TicketStatus.CANCELLED] * 2
    pipeline.close()


@pytest.mark.parametrize("phases", [0, -1])
def test_pipeline_without_phase_raises(phases):
    with pytest.raises(ArgumentError, match="at least one phase"):
        Pipeline([], phases=phases)


class PipelineMachine(RuleBasedStateMachine):
    """Adds, steps, preempts, finishes, cancels and fails requests at random. Each request must end exactly once."""

    @initialize(phases=st.integers(1, 3), seed=st.integers(0, 99))
    def start(self, phases, seed):
        self.pipeline, self.counter = pipeline_of(phases, seed)
        self.tickets, self.ended = [], {}

    @property
    def running(self):
        return [ticket for ticket in self.tickets if ticket.is_running]

    @rule(refused=st.booleans())
    def add(self, refused):
        name = "refused" if refused and len(self.tickets) % 7 == 0 else f"r{len(self.tickets)}"
        self.tickets.append(self.pipeline.add(Request(name)))

    @rule(data=st.data())
    def step(self, data):
        rows = data.draw(st.permutations(self.running))[: data.draw(st.integers(0, MAX_ROWS))]
        generating = rows[: data.draw(st.integers(0, len(rows)))]
        before = list(self.pipeline._order.tickets)
        self.pipeline.step(rows, generating=generating)
        if before == list(self.pipeline._order.tickets):
            return  # SETUP failed, or the new order equals the old order
        is_generating = [ticket in generating for ticket in self.pipeline._order.tickets]
        assert is_generating == sorted(is_generating, reverse=True), "generating requests must come first"

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 20))
    def steps(self, seed, count):
        """Run many steps from one seed, because hypothesis rarely generates long runs."""
        random = Random(seed)
        for _ in range(count):
            rows = random.sample(self.running, random.randint(0, min(MAX_ROWS, len(self.running))))
            self.pipeline.step(rows, generating=rows[: random.randint(0, len(rows))])
            check_pipeline(self.pipeline)

    @rule(data=st.data(), how=st.sampled_from(["finish", "cancel"]))
    def end(self, data, how):
        if self.running:
            getattr(data.draw(st.sampled_from(self.running)), how)()

    @rule(op=st.sampled_from([op for op in BatchOp if op.per_batch]))
    def plan_failure(self, op):
        self.counter.fail_at = op

    @rule()
    def collect(self):
        self.pipeline.collect()

    @rule()
    def drain(self):
        self.pipeline.drain()
        assert all(ticket.num_in_flight == 0 for ticket in self.tickets)

    @invariant()
    def tickets_are_consistent(self):
        if not hasattr(self, "pipeline"):
            return
        check_pipeline(self.pipeline)
        for number, ticket in enumerate(self.tickets):
            assert ticket.num_in_flight >= 0
            if ticket.status in FINAL_STATUSES:
                assert self.ended.setdefault(number, ticket.status) is ticket.status
                assert (ticket.request.removed, ticket.num_in_flight) == (1, 0)
            else:
                assert number not in self.ended
                assert ticket.request.removed == 0
            # `Counter.update` raises AssertionError if a row is wrong.
            assert not isinstance(ticket.error, AssertionError), ticket.error

    def teardown(self):
        if hasattr(self, "pipeline"):
            self.pipeline.close()
            assert all(ticket.status in FINAL_STATUSES and ticket.request.removed == 1 for ticket in self.tickets)


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def test_all_executors_produce_the_same_counts():
    def counts(seed):
        random = np.random.default_rng(5)
        pipeline, _ = pipeline_of(2, seed)
        tickets = [pipeline.add(Request(f"r{k}")) for k in range(MAX_ROWS)]
        for _ in range(60):
            pipeline.step([tickets[k] for k in random.permutation(MAX_ROWS)[: random.integers(0, MAX_ROWS + 1)]])
        pipeline.close()
        return [ticket.request.count for ticket in tickets]

    assert counts(None) == counts(0) == counts(7)
