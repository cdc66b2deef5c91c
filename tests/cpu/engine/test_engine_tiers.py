"""Host and disk tiers never change an answer. The tests use tiny pools, all write policies and failing copies."""

from __future__ import annotations

import os

import pytest
import torch
from benchmarks.random_weights import random_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import conversations, greedy, talk
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.speculate import DraftProposer
from kvtier.messages import Route
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore
from scheduler_support import check_scheduler

TINY = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
SOAK = int(os.environ.get("KVTIER_SOAK", "1"))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cpu"), seed=3), InvariantOps())


def make(
    model: Model,
    num_blocks: int,
    host: HostConfig | None,
    *,
    caching: bool = True,
    disk: StoreConfig | None = None,
    **options,
) -> Engine:
    cache = CacheConfig(num_blocks, prefix_caching=caching, host=host, stores=(disk,) if disk else (), always_load=True)
    return Engine(model, config=EngineConfig(4, cache, SchedulerConfig(max_rows=4, max_step_tokens=16)), **options)


@given(
    random=st.randoms(use_true_random=False),
    num_blocks=st.sampled_from([16, 20, 40]),
    host=st.builds(
        HostConfig,
        st.sampled_from([3, 12, 100]),
        saving=st.builds(
            WritebackConfig,
            st.sampled_from(WritePolicy),
            max_blocks=st.sampled_from([2, 100]),
            low_share=st.sampled_from([0.3, 1.0]),
        ),
    ),
    overlaps_compute=st.booleans(),
)
@settings(max_examples=6 * SOAK, deadline=None)
def test_host_tier_never_changes_an_answer(model, random, num_blocks, host, overlaps_compute):
    talks = conversations(random, 5)
    expected = talk(make(model, 400, None, caching=False), talks)
    engine = make(model, num_blocks, host)
    if overlaps_compute:  # as on a GPU, saves start and are polled during the forward pass
        engine.tiers._controller.overlaps_compute = True
        poll_while_collecting(engine)
    assert talk(engine, talks) == expected


def poll_while_collecting(engine: Engine) -> None:
    """Make `engine` wait for all copies between device and host before it collects the results of a step.

    During the wait, the engine applies new reports, as it does with a GPU.
    """
    collect = engine._pipeline.collect

    def polled():
        while engine.tiers.poll_while_waiting():
            engine.tiers.wait()
        return collect()

    engine._pipeline.collect = polled


def test_poll_while_waiting_returns_true_only_during_copies(model):
    engine = make(model, 40, None)
    assert not engine.tiers.poll_while_waiting()  # there are no lower tiers
    engine.close()
    engine = make(model, 40, HostConfig(40))
    assert not engine.tiers.poll_while_waiting()
    run(engine, [1] * 21, 1)
    assert engine.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks == 5
    assert not engine.tiers.poll_while_waiting()
    engine.add([2] * 21, greedy(1))
    engine.step()
    engine.step()
    engine.tiers.submit(engine.manager.plan())
    while engine.tiers.poll_while_waiting():
        engine.tiers.wait()
    assert engine.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks == 10
    assert not engine.manager.transfers.in_flight
    engine.close()


def test_poll_while_waiting_ignores_store_transfers(model, tmp_path):
    engine = make(model, 40, HostConfig(40), disk=StoreConfig("disk"), stores={"disk": DiskStore(tmp_path, 1 << 20)})
    engine.add([1] * 21, greedy(1))
    while engine.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks < 5:
        engine.step()
    engine.tiers.submit(engine.manager.plan())  # write the blocks in host memory to the disk
    assert engine.manager.transfers.num_blocks(Route.HOST_TO_STORE, "disk") > 0
    assert not engine.tiers.poll_while_waiting()
    engine.close()


def test_step_submits_loads_before_and_saves_after_compute(model):
    engine = make(model, 40, HostConfig(40))
    engine.tiers._controller.overlaps_compute = True
    order: list[str] = []
    controller, logits = engine.tiers._controller, engine.groups[0].logits
    submit = controller.submit

    def recorded_submit(plan, after=None):
        order.extend(transfer.route.value for transfer in plan.transfers)
        submit(plan, after)

    def recorded_logits(*arguments):
        order.append("compute")
        return logits(*arguments)

    controller.submit, engine.groups[0].logits = recorded_submit, recorded_logits
    run(engine, [1] * 21, 6)
    assert order == ["compute", "compute", "save", *order[3:]]
    assert order.count("save") >= 2
    engine.tiers.demote(engine.chain([1] * 21))
    order.clear()
    run(engine, [1] * 21, 1)
    assert order == ["load", "compute"]
    assert not engine.manager.plan()
    engine.close()


def test_saves_are_polled_after_compute_and_when_idle(model):
    """A step without rows polls saves at once, because a block cannot be evicted before its save has been polled."""
    engine = make(model, 40, HostConfig(40))
    engine.tiers._controller.overlaps_compute = True
    order: list[str] = []
    controller, logits = engine.tiers._controller, engine.groups[0].logits
    poll = controller.poll

    def recorded_poll(*, loads_only=False):
        order.append("loads" if loads_only else "all")
        return poll(loads_only=loads_only)

    def recorded_logits(*arguments):
        order.append("compute")
        return logits(*arguments)

    controller.poll, engine.groups[0].logits = recorded_poll, recorded_logits
    engine.add([1] * 21, greedy(6))
    engine.step()
    engine.step()
    assert order == ["loads", "compute", "all", "loads", "compute", "all"]
    while engine.scheduler.has_work():
        engine.step()
    order.clear()
    engine.step()
    assert order == ["loads", "all"]
    while engine.has_work():
        engine.step()
    assert engine.manager.stats.tiers[1].num_used > 0
    engine.close()


def test_failed_step_still_submits_its_plan(model):
    engine = make(model, 40, HostConfig(40))
    engine.tiers._controller.overlaps_compute = True
    engine.add([1] * 21, greedy(6))
    engine.step()

    def broken(*_):
        raise RuntimeError("the device failed")

    engine.groups[0].logits = broken
    while engine.scheduler.has_work():
        engine.step()
    assert engine.manager.transfers.in_flight or engine.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks
    while engine.manager.has_plans:
        engine.step()
    assert engine.manager.transfers.counts[Route.DEVICE_TO_HOST].num_blocks > 0
    engine.manager.check()
    engine.close()


def run(engine: Engine, prompt: list[int], num_tokens: int) -> None:
    engine.add(prompt, greedy(num_tokens))
    while engine.has_work():
        engine.step()


def break_copies(engine: Engine, faults, share: float) -> None:
    """Make each copy between device and host fail with probability `share`."""
    for lane in engine.tiers._controller._transfers._lanes.values():
        mover = lane._mover

        def sometimes(*arguments, mover=mover):
            if faults.random() < share:
                raise RuntimeError("the link is down")
            return mover(*arguments)

        lane._mover = sometimes


def test_answers_are_unchanged_by_failing_copies(model):
    import random

    talks = conversations(random.Random(1), 6)
    expected = talk(make(model, 400, None, caching=False), talks)
    engine = make(model, 16, HostConfig(60))
    break_copies(engine, random.Random(2), 0.3)
    assert talk(engine, talks) == expected
    counts = engine.manager.transfers.counts
    assert counts[Route.DEVICE_TO_HOST].num_failed > 0
    assert counts[Route.HOST_TO_DEVICE].num_failed > 0


def test_host_hits_are_counted(model):
    engine = make(model, 16, HostConfig(200))
    prompts = [[i] * 21 for i in range(6)]
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(2), request_id=str(i))
            while engine.has_work():
                engine.step()
    assert engine.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks >= 20
    assert all(engine.explain(str(i)).num_cached_tokens >= 20 for i in range(6))


def test_blocks_of_draft_and_main_model_move_together(model):
    """The draft model is the main model itself.

    The blocks of both cache groups are saved and loaded in one transfer.
    """
    import random

    talks = conversations(random.Random(5), 4)
    expected = talk(make(model, 400, None, caching=False), talks)
    engine = make(model, 24, HostConfig(100), proposer=DraftProposer(model, 3))
    assert talk(engine, talks) == expected
    assert engine.manager.transfers.counts[Route.HOST_TO_DEVICE].num_blocks > 0


@given(
    random=st.randoms(use_true_random=False),
    num_blocks=st.sampled_from([16, 40]),
    num_host=st.sampled_from([6, 12, 100]),
    wait=st.sampled_from(WaitPolicy),
    is_shared=st.booleans(),
    saving=st.builds(WritebackConfig, st.sampled_from(WritePolicy), low_share=st.sampled_from([0.3, 1.0])),
)
@settings(max_examples=6 * SOAK, deadline=None)
def test_disk_and_restart_never_change_an_answer(
    model, random, num_blocks, num_host, wait, is_shared, saving, tmp_path_factory
):
    talks = conversations(random, 5)
    expected = talk(make(model, 400, None, caching=False), talks)
    folder = tmp_path_factory.mktemp("disk")
    disk = StoreConfig("disk", saving, wait, is_shared=is_shared)
    for _ in range(2):  # the second engine reads blocks that the first engine wrote
        store = DiskStore(folder, 64 << 20, segment_bytes=1 << 20, min_free_bytes=0)
        engine = make(model, num_blocks, HostConfig(num_host), disk=disk, stores={"disk": store})
        assert talk(engine, talks) == expected
        engine.tiers.save_all()
        check_scheduler(engine.scheduler)
        engine.close()


def test_recorded_keys_are_limited_by_the_capacity_of_the_store(model, tmp_path):
    """The store does not report evictions. Without a limit, the manager would keep the keys of all evicted blocks."""
    store = DiskStore(tmp_path, 1 << 16, segment_bytes=1 << 14, min_free_bytes=0)
    engine = make(model, 16, HostConfig(100), disk=StoreConfig("disk"), stores={"disk": store})
    most = 4 * (1 << 16) // engine.groups[0].block_bytes  # 4 keys per block that fits into the store (_KNOWN_PER_BLOCK)
    for number in range(most // 4):  # each run saves 5 blocks, so all runs together save more than `most` blocks
        run(engine, [number % 50, number // 50] * 10 + [1], 1)
        engine.tiers.save_all()
    known = engine.manager.stores["disk"].num_known
    engine.close()
    assert most // 2 < known <= most


def test_disk_hits_are_counted_after_a_restart(model, tmp_path):
    prompts = [[i] * 21 for i in range(6)]
    hits = []
    for _ in range(2):
        store = DiskStore(tmp_path, 64 << 20, segment_bytes=1 << 20, min_free_bytes=0)
        disk = StoreConfig("disk", wait=WaitPolicy.WAIT)
        engine = make(model, 16, HostConfig(100), disk=disk, stores={"disk": store})
        for i, prompt in enumerate(prompts):
            engine.add(prompt, greedy(2), request_id=str(i))
            while engine.has_work():
                engine.step()
        hits.append([engine.explain(str(i)).tokens_from for i in range(6)])
        engine.close()
    assert all(each.get("disk", 0) == 0 for each in hits[0])
    assert all(each["disk"] == 20 for each in hits[1])
