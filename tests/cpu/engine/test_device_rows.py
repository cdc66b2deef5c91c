"""Row data stays in device memory between steps, so a step copies only changed data to the device.

If a sequence ends, the rows of other sequences can move.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import finish, greedy
from kvtier.batch import Timeline
from kvtier.cache.config import CacheConfig
from kvtier.engine import Model
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.errors import RangeError
from kvtier.scheduler import SchedulerConfig

SHAPE = ModelConfig("llama", 1, 32, 48, 2, 1, 16, 61, 512, norm_eps=1e-5, rope=RopeConfig(10000.0))
BLOCK = 16


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE, random_weights(SHAPE, torch.float32, torch.device("cpu"), seed=3))


def make(model: Model, phases: int, timeline: Timeline | None = None, blocks: int = 64) -> Engine:
    limits = SchedulerConfig(max_rows=4, max_step_tokens=64)
    return Engine(model, config=EngineConfig(BLOCK, CacheConfig(blocks), limits, phases=phases), timeline=timeline)


@pytest.mark.parametrize("phases", [1, 2])
def test_unchanged_decode_step_copies_nothing_to_the_device(model, phases):
    timeline = Timeline()
    engine = make(model, phases, timeline)
    for start in range(3):  # the prompts have different lengths, so that the rows get new blocks in different steps
        engine.add([start + 1] * (start + 2), greedy(40))
    finish(engine)
    engine.close()
    copied = Counter()
    for span in timeline.spans:
        if span.name in ("SETUP", "PREPARE"):
            copied[span.step] += span.copied_bytes
    steps = [copied[step] for step in sorted(copied)]
    assert len(steps) >= 40
    assert steps[0] > 0  # the first step copies the prompts
    changed = [number for number, num_bytes in enumerate(steps) if num_bytes]
    # The first step copies. Each of the three rows gets new blocks in two steps, for its tokens 16 and 32, and ends in
    # one step. No other step copies.
    assert len(changed) <= 1 + 3 * 2 + 3
    assert steps.count(0) >= 30
    steps_with_new_blocks = changed[1:7]
    new_block_bytes = 4 + 4  # the id of the block, copied to staging memory and from there to the block table
    # One new block is expected in each of these steps. The assertion tolerates two.
    assert max(copied[step] for step in steps_with_new_blocks) <= 2 * new_block_bytes, "a step copied too many bytes"


def test_rows_follow_their_sequences_when_neighbours_end(model):
    """Sequences end at different steps, so that the rows of the remaining sequences move."""
    prompts = [[number + 1] * (3 * number + 1) for number in range(8)]
    engine = make(model, 1)
    expected = []
    for number, prompt in enumerate(prompts):
        name = engine.add(prompt, greedy(5 + 3 * (number % 4)))
        expected.append(finish(engine)[name].tokens)
    engine.close()
    for phases in (1, 2):
        engine = make(model, phases)
        names = [engine.add(prompt, greedy(5 + 3 * (number % 4))) for number, prompt in enumerate(prompts)]
        answers = finish(engine)
        assert [answers[name].tokens for name in names] == expected
        engine.close()


def test_default_keeps_one_step_in_flight_on_a_cpu(model):
    engine = make(model, 0)
    assert engine.config.phases == 1
    engine.close()
    with pytest.raises(RangeError, match="phases must be 1 or 2, or 0"):
        EngineConfig(phases=3)
