"""Run SchedulerSide inside vLLM's schedulers with random requests and faults. vllm_steps simulates the workers."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter

import pytest

import vllm_models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from torch and vLLM
    pytest.importorskip("vllm.v1", reason="vLLM is not installed here: make vllm, then make test-vllm")
    from vllm_steps import EngineSetup, SteppedEngine

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_RUNS = 24 * int(os.environ.get("KVTIER_SOAK", "1"))
NUM_STEPS = 400
SYSTEMS = [[1] * 9, [2] * 8, [1] * 5 + [3] * 12, [7, 8] * 11]
OPTIONS = [None] * 8 + [{"save": False}, {"load": False}, {"explain": True}, {"priority": 1}]
STORE = ("stores", ("memory:?bytes=1MiB",))
EXTRAS = [(), (), (("max_saving_blocks", 1),), (("save_generated", False),), (("on_reset", "weights"),)]
EXTRAS += [(STORE,), (STORE,), (STORE, ("on_reset", "weights"))]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return vllm_models.make_llama(tmp_path_factory.mktemp("scheduler-llama"))


class RandomRun:
    """Random requests, aborts, resets, and late and failed transfers. The seed determines everything."""

    def __init__(self, model, seed: int, *, is_async: bool) -> None:
        self.draws = draws = random.Random(seed)
        setup = EngineSetup(
            is_async=is_async,
            num_device_blocks=draws.choice([17, 20, 30]),
            num_host_blocks=draws.choice([3, 12, 60, 200]),
            num_host_ready=draws.choice([3, 200]),
            num_ranks=draws.choice([1, 1, 2]),
            max_running=draws.choice([2, 5]),
            max_step_tokens=draws.choice([3, 8, 40]),
            num_drafts=draws.choice([0, 0, 2]),
            window=draws.choice([0, 0, 0, 9]),
            policy=draws.choice(["fcfs", "priority"]),
            caches_prefixes=draws.choice([True, True, False]),
            extra=draws.choice(EXTRAS),
        )
        self.engine = SteppedEngine(model, setup)
        self.engine.guesses_right = lambda: draws.random() < 0.6
        self.ending, self.failing, self.load = 1.0, 0.0, 0.3

    def run(self) -> Counter[str]:
        for number in range(NUM_STEPS):
            if number % 25 == 0:
                self.change_phase()
            self.act()
            self.engine.end_copies(self.draws, self.ending, self.failing)
            self.engine.step()
            self.engine.check()
        self.engine.drain()
        return self.engine.totals()

    def change_phase(self) -> None:
        """Change how fast transfers end, how many of them fail, and how many requests arrive."""
        self.ending = self.draws.choice([0.0, 0.02, 0.2, 1.0])
        self.failing = self.draws.choice([0.0, 0.0, 0.0, 0.2, 0.8])
        self.load = self.draws.choice([0.05, 0.3, 0.6])

    def act(self) -> None:
        draws, engine = self.draws, self.engine
        if draws.random() < self.load and len(engine.unfinished) < 8:
            self.add()
        if draws.random() < 0.2:
            engine.execute()
        if draws.random() < 0.03 and engine.unfinished:
            engine.abort(draws.choice(engine.unfinished))
        if draws.random() < 0.02:
            engine.reset(preempts=draws.random() < 0.5, is_deep=draws.random() < 0.3)
        worker = draws.choice(engine.workers)
        if draws.random() < 0.03:
            worker.grow(draws.randint(1, 20))
        if draws.random() < 0.02:
            worker.damage(draws.randrange(worker.num_host_ready))
        engine.now += draws.choice([0.001, 0.001, 1.0])

    def add(self) -> None:
        """Add a new prompt, or continue an earlier conversation."""
        draws, engine = self.draws, self.engine
        salt, prompt = draws.choice(["", "", "a"]), draws.choice(SYSTEMS) + draws.choices([4, 5], k=draws.randrange(8))
        if engine.conversations and draws.random() < 0.5:
            name = draws.choice(list(engine.conversations)[-8:])
            earlier = engine.conversations[name]
            if len(earlier.prompt) + len(engine.outputs[name]) < 40:
                salt, prompt = earlier.salt, [*earlier.prompt, *engine.outputs[name], 6]
        engine.add(
            prompt,
            draws.choice([1, 2, 5, 12, 20]),
            salt=salt,
            options=draws.choice(OPTIONS),
            priority=draws.randrange(2),
            skips_cache=draws.random() < 0.05,
        )


def test_random_requests_read_only_their_own_kv(model):
    totals: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        try:
            totals += RandomRun(model, seed, is_async=seed % 2 == 1).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    events = ["load", "load failed", "save", "save failed", "fetch", "store", "preempted", "new weights"]
    assert [event for event in events if not totals[event]] == []


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_outside_a_sliding_window_are_not_copied(model, is_async):
    """vLLM replaces device blocks outside the window by its null block, which contains no KV."""
    engine = SteppedEngine(model, EngineSetup(is_async=is_async, window=10, num_device_blocks=40))
    prompt = [*range(30)]
    engine.add(prompt, 12)
    for _ in range(6):
        engine.step()
    # All copies fail. The next save therefore copies all blocks of the request that are still inside the window.
    engine.end_copies(random.Random(0), 1.0, 1.0)
    engine.drain()
    for length in (9, 14, 30):
        engine.reset()
        engine.add(prompt[:length], 12)
        engine.drain()
    totals = engine.totals()
    assert totals["save"] > 0
    assert totals["load"] > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_load_with_sliding_window_restarts_request(model, is_async):
    """The last block of a load does not arrive. vLLM must restart the request instead of resuming it at that block.

    vLLM has already freed earlier blocks, which the sliding window of that block needs.
    """
    engine = SteppedEngine(model, EngineSetup(is_async=is_async, window=10, num_device_blocks=40))
    prompt = [*range(30)]
    engine.add(prompt, 1)
    engine.drain()
    engine.reset()
    engine.add(prompt, 12)
    while not (loads := [copy for copy in engine.workers[0].copies if copy.load is not None]):
        engine.step()
        engine.execute()
    engine.workers[0].finish(loads[0], {loads[0].request.num_blocks - 1})
    engine.drain()
    assert engine.totals()["load failed"] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_abort_during_load_saves_no_incomplete_block(model, is_async):
    """vLLM counts the blocks of a load as computed before they arrive.

    After a reset, the host has no copy of these blocks, so the connector could save them although they are incomplete.
    """
    engine = SteppedEngine(model, EngineSetup(is_async=is_async, num_device_blocks=40))
    prompt, worker = [*range(30)], engine.workers[0]
    engine.add(prompt, 1)
    engine.drain()
    engine.reset()
    name = engine.add(prompt, 12)
    while not (loads := [copy for copy in worker.copies if copy.load is not None]):
        engine.step()
        engine.execute()
    engine.reset(is_deep=True)
    engine.abort(name)
    worker.finish(loads[0], set(range(loads[0].request.num_blocks)))
    engine.drain()
    engine.reset()
    engine.add(prompt, 12)
    engine.drain()
