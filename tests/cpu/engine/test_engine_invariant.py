"""Batch-invariant mode in the whole engine: after the same tokens, the logits are always bit-identical.

The tests vary batches and chunks, and cause cache hits, partial block copies, evictions and preemptions.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_helpers import Answers, Recorder, alone, finish, greedy, prompts, recorded, serve
from kvtier.engine import InvariantOps, Model, SamplingParams, load_model
from kvtier.engine.sequence import FinishReason
from scheduler_support import check_scheduler

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(checkpoint, request):
    return load_model(checkpoint(request.param)[0], ops=InvariantOps())


def record_alone(recorder: Recorder, prompt, params):
    """Run a request alone, in one chunk and without prefix caching. Record the logits, and return the tokens."""
    engine, _ = recorded(recorder, 64, 4, max_step_tokens=256, prefix_caching=False, recorder=recorder)
    name = engine.add(prompt, params)
    return finish(engine)[name].tokens


def test_logits_are_bit_identical_in_any_batch(model):
    @given(
        seed=st.integers(0, 10**6),
        block_tokens=st.sampled_from([1, 4, 16]),
        room=st.sampled_from([48, 64, 256]),  # tokens that fit into the cache
        max_step_tokens=st.sampled_from([2, 7, 32, 256]),
        prefix_caching=st.booleans(),
    )
    @settings(max_examples=8 * SOAK, deadline=None)
    def check(seed, block_tokens, room, max_step_tokens, prefix_caching):
        random = np.random.default_rng(seed)
        given = prompts(seed, *random.integers(1, 20, 4).tolist(), shared=random.integers(0, 20, 4).tolist())
        requests = [(prompt, greedy(int(random.integers(1, 9)))) for prompt in given]
        recorder = Recorder(model)
        expected = [record_alone(recorder, *each) for each in requests]
        num_known, num_again = len(recorder.seen), recorder.num_again
        engine, _ = recorded(
            model,
            room // block_tokens,
            block_tokens,
            max_step_tokens=max_step_tokens,
            prefix_caching=prefix_caching,
            recorder=recorder,
        )
        assert [answer.tokens for answer in serve(engine, requests, seed)] == expected
        assert recorder.different == []
        # The logits of every answer token were compared with recorded logits.
        assert recorder.num_again - num_again >= sum(map(len, expected))
        assert len(recorder.seen) == num_known

    check()


def test_preemption_does_not_change_any_bit_of_the_logits(model):
    """Run two requests in a cache that is too small for both, so that blocks are evicted and recomputed."""
    given = prompts(1, 20, 21)
    recorder = Recorder(model)
    expected = [record_alone(recorder, prompt, greedy(10)) for prompt in given]
    engine, _ = recorded(model, 12, 4, recorder=recorder)
    names = [engine.add(prompt, greedy(10)) for prompt in given]
    answers = finish(engine)
    assert [answers[name].tokens for name in names] == expected
    assert sum(engine.explain(name).num_preempted for name in names) > 0
    assert recorder.different == []


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_cached_prefixes_do_not_change_any_bit_of_the_logits(model, block_tokens):
    (base,) = prompts(2, 40)
    cases = [base, base, base[:33], [*base[:30], 5, 6, 7], [*base[:9], 5], base[:1], [*base, 5, 6]]
    recorder = Recorder(model)
    expected = [record_alone(recorder, prompt, greedy(5)) for prompt in cases]
    engine, _ = recorded(model, 512 // block_tokens, block_tokens, recorder=recorder)
    cached = []
    for prompt, tokens in zip(cases, expected, strict=True):
        name = engine.add(prompt, greedy(5))
        assert finish(engine)[name].tokens == tokens
        cached.append(engine.explain(name).num_cached_tokens)
    # The first request stores 40 prompt tokens and 4 of its 5 answer tokens. `kept` of them are in full blocks.
    kept = 44 // block_tokens * block_tokens
    # A hit can end inside a block. At least one token of the prompt is computed.
    assert cached == [0, min(39, kept), 32, 30, 9, 0, min(40, kept)]
    assert recorder.different == []


class EngineMachine(RuleBasedStateMachine):
    """Adds and aborts requests with shared prefixes, runs steps and resets the cache. Checks logits and answers."""

    model: Model
    expected: dict[tuple[object, ...], list[int]]

    @initialize(
        block_tokens=st.sampled_from([1, 4]),
        room=st.sampled_from([24, 36, 60, 200]),  # tokens that fit into the cache
        max_step_tokens=st.sampled_from([3, 8, 40]),
        max_rows=st.integers(1, 4),
        prefix_caching=st.booleans(),
    )
    def begin(self, block_tokens, room, max_step_tokens, max_rows, prefix_caching):
        self.engine, self.recorder = recorded(
            self.model,
            room // block_tokens,
            block_tokens,
            max_step_tokens=max_step_tokens,
            max_rows=max_rows,
            prefix_caching=prefix_caching,
        )
        self.requests: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.answers = Answers()

    @rule(
        base=st.integers(0, 1),
        shared=st.integers(0, 12),
        own=st.integers(0, 6),
        count=st.integers(1, 7),
        seed=st.none() | st.integers(0, 3),
        n=st.integers(1, 2),
        priority=st.integers(0, 2),
    )
    def add(self, base, shared, own, count, seed, n, priority):
        prompt = (*range(10 + base, 10 + base + shared), *([100 + own] * own)) or (3,)
        params = greedy(count) if seed is None else SamplingParams(seed=seed, max_tokens=count, n=n)
        self.requests[self.engine.add(prompt, params, priority=priority)] = prompt, params

    @precondition(lambda self: self.engine.has_work())
    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.answers.take(self.engine.step())
            check_scheduler(self.engine.scheduler)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.engine.abort(name):
            self.aborted.add(name)

    @rule()
    def reset(self):
        self.engine.manager.reset()

    @invariant()
    def logits_are_bit_identical(self):
        if hasattr(self, "recorder"):
            assert self.recorder.different == []

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        finish(self.engine, self.answers)
        assert self.engine.manager.stats.num_allocations == 0
        assert self.engine.manager.num_available == self.engine.config.cache.num_blocks
        for name, (prompt, params) in self.requests.items():
            for index in range(params.n):
                answer = self.answers.get((name, index))
                if name in self.aborted:
                    assert answer is None or answer.reason in (None, FinishReason.LENGTH, FinishReason.STOP)
                    continue
                assert answer is not None
                assert answer.reason in (FinishReason.LENGTH, FinishReason.STOP)
                assert answer.tokens == self.tokens_alone(prompt, params)[index]

    def tokens_alone(self, prompt, params) -> list[list[int]]:
        key = (prompt, params)
        if key not in self.expected:
            self.expected[key] = tokens_of_all_answers(self.model, prompt, params)
        return self.expected[key]


def tokens_of_all_answers(model, prompt, params):
    """Run a request alone, without prefix caching. Return the tokens of each of its n answers."""
    engine, _ = recorded(model, 64, 4, max_step_tokens=256, prefix_caching=False)
    name = engine.add(prompt, params)
    answers = finish(engine)
    return [answers[name, index].tokens for index in range(params.n)]


def test_engine_machine_returns_correct_answers(checkpoint):
    class Machine(EngineMachine):
        model = load_model(checkpoint("llama")[0], ops=InvariantOps())
        expected: dict = {}  # noqa: RUF012

    case = Machine.TestCase
    case.settings = settings(max_examples=40 * SOAK, stateful_step_count=16, deadline=None)
    case("runTest").runTest()


def test_recorder_detects_a_changed_cache(model):
    """Check the Recorder itself: it must report a difference if the cache changes between two equal requests."""
    engine, recorder = recorded(model)
    (prompt,) = prompts(3, 20)
    for is_changed in (False, True):
        engine.add(prompt, greedy(3))
        if is_changed:
            engine.groups[0].cache[:, 0, 1] += torch.tensor(1e-6)
        finish(engine)
        assert bool(recorder.different) is is_changed


def test_alone_returns_same_tokens_as_recording_engine(model):
    """Check the helpers: `alone` and the recording engine must return the same tokens."""
    (prompt,) = prompts(4, 9)
    assert alone(model, prompt, greedy(5)).tokens == record_alone(Recorder(model), prompt, greedy(5))
