"""Traces, the generator and hit rates through the index, against a straightforward LRU."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError
from kvtier.index import Chain, GhostCache, Namespace
from kvtier.replay import SyntheticTrace, TraceRequest, generate, read_trace, replay_hits, write_trace

TRACE = Path(
    os.environ.get("KVTIER_TRACE", Path(__file__).resolve().parents[3] / "shared/traces/conversation_trace.jsonl")
)
LINE = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}


def lru_hits(requests, num_slots: int) -> tuple[int, int]:
    """Full blocks hit in an unbroken leading run; a request's last block is touched first."""
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = total = 0
    for request in requests:
        ids = request.hash_ids[: request.input_tokens // 512]
        paths = [ids[: i + 1] for i in range(len(ids))]
        total += len(paths)
        found = next((i for i, path in enumerate(paths) if path not in held), len(paths))
        hits += found
        if len(paths) > num_slots:
            continue
        for path in reversed(paths):
            held.pop(path, None)
            held[path] = None
        while len(held) > num_slots:
            held.popitem(last=False)
    return hits, total


def test_a_line_is_a_request():
    (request,) = read_lines(json.dumps(LINE)).requests
    assert request == TraceRequest(5, 1000, 7, (3, 4))
    assert request.tokens().tolist() == [*range(3 * 512, 4 * 512), *range(4 * 512, 4 * 512 + 488)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"timestamp": -1}, "timestamp must be a whole number >= 0, got -1"),
        ({"input_length": "9"}, "input_length must be a whole number"),
        ({"output_length": True}, "output_length"),
        ({"hash_ids": [1]}, "1000 tokens need 2 hash_ids of 512 tokens, got 1"),
        ({"hash_ids": [1, -2]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": None}, "hash_ids"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(change, what):
    trace = read_lines(json.dumps(LINE), "", json.dumps({**LINE, **change}), "{", "[1]")
    assert len(trace.requests) == 1
    assert [problem.line for problem in trace.problems] == [3, 4, 5]
    assert what in str(trace.problems[0])
    assert "no JSON" in trace.problems[1].what
    assert "an object is wanted, got list" in trace.problems[2].what


def read_lines(*lines: str):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return read_trace(path)


def test_several_files_compressed_too_are_merged_by_time(tmp_path):
    late, early = TraceRequest(9, 1, 1, (0,)), TraceRequest(2, 1, 1, (1,))
    assert write_trace([late], tmp_path / "a.jsonl") == 1
    write_trace([early], tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    assert read_trace(tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz").requests == (early, late)


def test_a_generated_trace_is_reproducible_ordered_and_reads_back(tmp_path):
    spec = SyntheticTrace(sessions=50, seed=3)
    requests = list(generate(spec))
    assert requests == list(generate(spec))
    assert requests != list(generate(SyntheticTrace(sessions=50, seed=4)))
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    write_trace(requests, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").requests == tuple(requests)


def test_a_sessions_next_turn_continues_its_last():
    requests = list(generate(SyntheticTrace(sessions=1, turns=6.0, system_prompts=1, seed=5)))
    assert len(requests) > 1
    for before, after in itertools.pairwise(requests):
        full = before.input_tokens // 512
        assert after.hash_ids[:full] == before.hash_ids[:full]
        assert after.input_tokens > before.input_tokens


def test_knobs_out_of_range_are_refused():
    for wrong in ({"sessions": 0}, {"turns": 0.5}, {"session_rate": 0.0}, {"agent_share": 0.9, "document_share": 0.2}):
        with pytest.raises(RangeError):
            SyntheticTrace(**wrong)


@given(
    num_slots=st.integers(1, 60),
    requests=st.lists(
        st.builds(
            lambda ids, tail: TraceRequest(0, len(ids) * 512 - tail, 1, tuple(ids)),
            st.lists(st.integers(0, 2), min_size=1, max_size=8),
            st.integers(0, 511),
        ),
        max_size=30,
    ),
)
@settings(deadline=None)
def test_hits_equal_a_plain_lru_over_prefixes(num_slots, requests):
    report = replay_hits(requests, block_tokens=512, num_slots=num_slots)
    assert (report.num_hits, report.num_blocks) == lru_hits(requests, num_slots)
    assert report.num_requests == len(requests)


def test_hits_of_a_synthetic_trace_equal_a_plain_lru():
    requests = list(generate(SyntheticTrace(sessions=80)))
    for num_slots in (50, 300, 5000):
        report = replay_hits(requests, block_tokens=512, num_slots=num_slots)
        assert (report.num_hits, report.num_blocks) == lru_hits(requests, num_slots)


@pytest.mark.skipif(not TRACE.exists(), reason="the production trace is not on this machine")
@pytest.mark.parametrize(("num_slots", "hit_rate"), [(1_000, 0.0470), (10_000, 0.2243), (100_000, 0.3795)])
def test_hit_rates_of_the_conversation_trace(num_slots, hit_rate):
    trace = read_trace(TRACE)
    assert not trace.problems
    report = replay_hits(trace.requests, block_tokens=512, num_slots=num_slots)
    assert report.num_blocks == 276_491
    assert abs(report.hit_rate - hit_rate) < 0.003


def test_the_ghost_knows_the_real_rate_and_errs_within_what_it_says():
    requests = list(generate(SyntheticTrace(sessions=600)))
    capacities = [200, 500, 1000, 4000]
    ghost = GhostCache(512, 1000, capacities=capacities, policies=("lru", "fifo", "s3fifo"), rate=1.0)
    real = replay_hits(requests, block_tokens=512, num_slots=1000, ghost=ghost)
    for estimate in ghost.curve():
        truth = replay_hits(requests, block_tokens=512, num_slots=estimate.capacity).hit_rate
        assert abs(estimate.hit_rate - truth) <= estimate.error + 0.02, estimate
    own = next(estimate for estimate in ghost.curve() if estimate.capacity == 1000)
    assert own.hit_rate == pytest.approx(real.hit_rate)
    assert own.error == 0
    assert len(ghost.curve("s3fifo")) == len(capacities)


def test_a_ghost_that_saw_nothing_says_so():
    ghost = GhostCache(16, 100, capacities=[10])
    assert [(estimate.hit_rate, estimate.error) for estimate in ghost.curve()] == [(0.0, 1.0)] * 2
    ghost.saw(Chain(Namespace("m", block_tokens=16), []), 0)
    assert ghost.curve()[0].error == 1.0
    with pytest.raises(RangeError, match="rate"):
        GhostCache(16, 100, rate=0)
    with pytest.raises(ArgumentError, match="no shadow of belady"):
        GhostCache(16, 100, policies=("belady",))
