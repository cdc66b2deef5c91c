"""CacheManager: loads and their failures, prompts that differ only in salt, adapter or image, and message sizes."""

from __future__ import annotations

import pickle

import pytest

from cache_support import BLOCK, Lab, chain_of, content, disk, prompt
from kvtier.cache.config import CacheConfig, HostConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.cache.manager import CacheManager
from kvtier.errors import ArgumentError, LoadError, RangeError, StateError
from kvtier.index import MediaItem, Namespace
from kvtier.messages import Plan, Report, Route, StoreLookup, TransferRequest, TransferResult
from kvtier.scheduler import Request, RequestState, RowResult, Scheduler, SchedulerConfig
from scheduler_support import check_scheduler

CAT, DOG = MediaItem(5, 6, b"a cat"), MediaItem(5, 6, b"a dog")
IDENTITIES = {
    "plain": {},
    "tenant": {"salt": b"tenant"},
    "other tenant": {"salt": b"third"},
    "adapter": {"adapter": b"lora"},
    "tenant and adapter": {"salt": b"tenant", "adapter": b"lora"},
    "cat": {"media": [CAT]},
    "dog": {"media": [DOG]},
    "cat at later position": {"media": [MediaItem(6, 6, b"a cat")]},
    "tenant and cat": {"media": [CAT], "salt": b"tenant"},
}


def test_prompts_share_only_blocks_before_first_difference():
    """Serve the same tokens with nine combinations of salt, adapter and image.

    Blocks are evicted between the requests, so that later requests read blocks from the host and from the store.
    """
    lab = Lab(12, host=HostConfig(12), stores=[disk()])
    chains = {name: prompt(1, 4, **identity) for name, identity in IDENTITIES.items()}
    first = {name: lab.serve(chain).num_cached_tokens for name, chain in chains.items()}
    # prompts with the same tenant and adapter share the block before the image
    shared = {"cat": BLOCK, "dog": BLOCK, "cat at later position": BLOCK, "tenant and cat": BLOCK}
    assert first == {name: shared.get(name, 0) for name in IDENTITIES}
    assert len(lab.worker.stores["disk"]) == 4 * 9 - 4
    for _ in range(2):
        for chain in chains.values():
            lab.evict("device")
            lab.evict("host")
            allocation = lab.serve(chain)
            assert allocation.tokens_from == {"disk": 4 * BLOCK, "host": 0, "device": 0}
    for chain in chains.values():
        lab.evict("device")
        lab.serve(chain)  # reads some blocks from host memory and others from the store, and verifies each block


def test_finished_load_makes_blocks_ready_for_other_requests():
    lab = Lab(20)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    one = lab.manager.match(prompt(1, 4))
    assert lab.manager.allocate(one, 17) is None  # the prompt has four blocks and one more token
    two = lab.manager.match(prompt(1, 4))
    assert lab.manager.allocate(two, 17) is None
    (load,) = lab.plan().transfers
    assert (load.route, load.num_blocks) == (Route.HOST_TO_DEVICE, 4)
    assert not lab.manager.is_ready(one)
    assert not lab.manager.is_ready(two)
    lab.run_workers()
    assert lab.manager.is_ready(one)
    assert lab.manager.is_ready(two)
    lab.verify(one)
    lab.verify(two)


def test_request_for_blocks_being_loaded_waits_for_load():
    lab = Lab(20)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    one = lab.manager.match(prompt(1, 4))
    lab.manager.allocate(one, 17)
    two = lab.manager.match(prompt(1, 4))
    assert lab.manager.allocate(two, 4 * BLOCK) is None  # `two` needs slots only for the matched blocks
    assert not lab.manager.is_ready(two)
    lab.plan()
    lab.run_workers()
    assert lab.manager.is_ready(two)
    lab.verify(two)


@pytest.mark.parametrize("mask", ["1101", "0000", "0111"])
def test_block_that_failed_to_load_is_recomputed(mask):
    lab = Lab(20)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    allocation = lab.manager.match(prompt(1, 4))
    lab.manager.allocate(allocation, 17)
    lab.plan()
    lab.run_workers(lose=lambda *_: [bit == "0" for bit in mask])
    with pytest.raises(LoadError):
        lab.manager.is_ready(allocation)
    lab.manager.abort(allocation)
    without = lab.manager.match(prompt(1, 4), may_load=False)
    assert without.num_cached_tokens == mask.index("0") * BLOCK
    assert lab.manager.allocate(without, 17) is None
    assert lab.manager.is_ready(without)
    lab.verify(without)
    lab.compute(without)
    assert lab.num_in("device", prompt(1, 4)) == 4
    assert lab.num_in("host", prompt(1, 4)) == 4  # the host copy is still valid


@pytest.mark.parametrize("how", ["abort", "finish", "reset"])
@pytest.mark.parametrize("when", ["planned", "moving", "arrived"])
def test_request_that_ends_during_load_releases_all_leases(how, when):
    lab = Lab(20)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    allocation = lab.manager.match(prompt(1, 4))
    lab.manager.allocate(allocation, 17)
    if when != "planned":
        lab.plan()
    if when == "arrived":
        lab.run_workers()
    if how == "reset":
        lab.manager.reset()
        lab.manager.abort(allocation)
    else:
        getattr(lab.manager, how)(allocation)
    lab.manager.check()
    lab.settle()
    assert lab.manager.tree.num_leases == 0
    used = [lab.control.tier(name).pool.num_used for name in ("device", "host")]
    assert used == ([0, 0] if how == "reset" else [4, 4])
    lab.serve(prompt(1, 4))


def test_host_slots_of_load_are_not_reused_before_report():
    """The host tier is full, so a save would have to evict the blocks that the load reads."""
    lab = Lab(20, host=HostConfig(4))
    lab.serve(prompt(1, 4))
    lab.evict("device")
    allocation = lab.manager.match(prompt(1, 4))
    lab.manager.allocate(allocation, 17)
    other = lab.start(prompt(2, 4))
    lab.compute(other)
    # `other` is not saved, because no host slot is free and none can be freed
    assert [move.route for move in lab.plan().transfers] == [Route.HOST_TO_DEVICE]
    lab.settle()
    assert lab.manager.is_ready(allocation)
    lab.verify(allocation)


def test_load_ends_only_after_reports_from_all_ranks():
    lab = Lab(20, num_ranks=3)
    lab.serve(prompt(1, 4))
    lab.evict("device")
    allocation = lab.manager.match(prompt(1, 4))
    lab.manager.allocate(allocation, 17)
    lab.plan()
    for worker in lab.workers[:2]:
        lab.manager.apply(worker.work())
        assert not lab.manager.is_ready(allocation)
    lab.manager.apply(lab.workers[2].work(lambda *_: [False, False, False, True]))
    with pytest.raises(LoadError):
        lab.manager.is_ready(allocation)


def test_invalid_report_raises():
    lab = Lab(20)
    lab.compute(lab.start(prompt(1, 4)))
    (save,) = lab.plan().transfers
    for report, error in (
        (Report(0, 1), ArgumentError),
        (Report(0, 0, (TransferResult(99, True, 0, 0.0),)), StateError),
        (Report(0, 0, (TransferResult(save.id, False, 0, 0.0, "", b"\1"),)), ArgumentError),
    ):
        with pytest.raises(error, match=r"\d"):
            lab.manager.apply(report)
    lab.run_workers()
    with pytest.raises(StateError, match="not in flight on this rank"):
        lab.manager.apply(Report(0, 0, (TransferResult(save.id, True, 0, 0.0),)))


def test_invalid_transfer_request_raises():
    for bad in (
        {},
        {"source_slots": b"\0" * 4},
        {"source_slots": b"\0" * 8, "target_slots": b"\0" * 4},
        {"keys": b"x"},
    ):
        with pytest.raises(ArgumentError):
            TransferRequest(1, Route.HOST_TO_DEVICE, "host", "device", **bad)


def test_manager_without_prefix_caching_plans_nothing():
    config = CacheConfig(8, prefix_caching=False, host=HostConfig(8), stores=(disk(),))
    manager = CacheManager(Namespace("model", block_tokens=BLOCK), config)
    assert manager.prefetch(prompt(1, 2)) is None
    allocation = manager.match(prompt(1, 2))
    assert manager.allocate(allocation, 9) is None
    assert manager.is_ready(allocation)
    manager.publish(allocation, 9)
    manager.finish(allocation)
    assert not manager.plan()
    assert not manager.has_plans


def test_invalid_cache_config_raises():
    with pytest.raises(ArgumentError, match="needs a host tier for reads"):
        CacheConfig(8, stores=(disk(),))
    for bad in ({"num_blocks": 0}, {"free_share": 1.0}, {"partial_scan": -1}):
        with pytest.raises(RangeError):
            CacheConfig(**{"num_blocks": 8, **bad})
    for bad in ({"num_blocks": 0}, {"free_share": -0.1}):
        with pytest.raises(RangeError):
            HostConfig(**{"num_blocks": 8, **bad})


# ---- with a scheduler ----------------------------------------------------------------------------------------------


def run(scheduler: Scheduler, lab: Lab, steps: int = 200) -> None:
    """Run steps until the scheduler and the workers have no work. Verify the cached blocks of every row."""
    for _ in range(steps):
        lab.now += 0.1
        step = scheduler.schedule(lab.now)
        for worker in lab.workers:
            worker.submit(step.plan)
        for row in step.rows:
            allocation = row.request.allocation
            lab.verify(allocation)
            for worker in lab.workers:
                for block in range(row.first // BLOCK, -(-row.stop // BLOCK)):
                    worker.device[int(allocation.table[block])] = content(row.request.chain, block)
        results = [RowResult((5,) if row.wants_token else (), False) for row in step.rows]
        scheduler.update(step, results, lab.now)
        lab.run_workers()
        check_scheduler(scheduler)
        if not scheduler.has_work() and not any(worker.todo for worker in lab.workers):
            return
    raise AssertionError(f"the scheduler still has work after {steps} steps")


@pytest.mark.parametrize("wait", WaitPolicy)
def test_requests_finish_under_any_wait_policy(wait):
    lab = Lab(20, stores=[disk(wait=wait, wait_seconds=0.3)])
    scheduler = Scheduler(lab.manager, SchedulerConfig(max_rows=4, max_step_tokens=64))
    for turn in range(3):
        requests = [Request(f"{turn}-{number}", prompt(number % 3, 5), 3) for number in range(6)]
        for request in requests:
            scheduler.add(request, lab.now)
        run(scheduler, lab)
        assert all(request.state is RequestState.FINISHED for request in requests)
        lab.evict("device")
        lab.evict("host")
    assert lab.manager.tree.num_leases == 0


def test_request_keeps_sources_of_tokens_and_load_decision():
    lab = Lab(20, stores=[disk()], always_load=False)
    scheduler = Scheduler(lab.manager, SchedulerConfig(max_rows=4, max_step_tokens=64))
    for name in ("first", "second"):
        request = Request(name, prompt(1, 5), 2)
        scheduler.add(request, lab.now)
        run(scheduler, lab)
        lab.settle()
        lab.manager.reset()
    assert request.tokens_from == {"disk": 5 * BLOCK, "host": 0, "device": 0}
    assert request.why_loaded == "load 20 tokens: not enough measurements yet"


def test_request_keeps_times_of_fetch_and_load():
    lab = Lab(20, stores=[disk()])
    scheduler = Scheduler(lab.manager, SchedulerConfig(max_rows=4, max_step_tokens=64))
    computed, fetched = Request("computed", prompt(1, 5), 2), Request("fetched", prompt(1, 5), 2)
    for request in (computed, fetched):
        scheduler.add(request, lab.now)
        run(scheduler, lab)
        lab.settle()
        lab.manager.reset()
    assert (computed.fetch_times, computed.loaded_at) == (None, None)
    start, end = fetched.fetch_times
    # The fetch takes one step and the load takes another step. The steps are 0.1 s apart.
    assert fetched.arrival <= start < end == fetched.scheduled_at < fetched.loaded_at


# ---- sizes of messages ---------------------------------------------------------------------------------------------


def message_sizes(num_blocks: int) -> dict[str, int]:
    """Compute a prompt, then fetch its blocks from the store.

    Return the pickled sizes of the largest plan, of the largest report and of the chain.
    """
    big = WritebackConfig(WritePolicy.THROUGH, max_blocks=1 << 20)
    lab = Lab(
        2 * num_blocks + 2,
        host=HostConfig(2 * num_blocks, saving=big),
        stores=[disk(is_shared=True, max_fetching_blocks=1 << 20, saving=big)],
    )
    tokens = [block % 1000 for block in range(num_blocks * BLOCK)]
    sizes = {"plan": 0, "report": 0}
    for _ in range(2):
        chain = chain_of(*tokens, 1)
        fetch = lab.manager.prefetch(chain)
        run_and_measure(lab, sizes)
        allocation = lab.manager.match(chain, prefetch=fetch)
        assert lab.manager.allocate(allocation, chain.num_tokens) is None
        run_and_measure(lab, sizes)
        assert lab.manager.is_ready(allocation)
        lab.compute(allocation)
        lab.manager.finish(allocation)
        lab.manager.end_prefetch(fetch)
        run_and_measure(lab, sizes)
        lab.manager.reset()
    sizes["chain"] = len(pickle.dumps(chain_of(*tokens, 1)))
    return sizes


def run_and_measure(lab: Lab, sizes: dict[str, int]) -> None:
    while (plan := lab.plan()) or lab.worker.todo:
        sizes["plan"] = max(sizes["plan"], len(pickle.dumps(plan)))
        assert pickle.loads(pickle.dumps(plan)) == plan
        while lab.worker.todo:
            report = lab.worker.work()
            sizes["report"] = max(sizes["report"], len(pickle.dumps(report)))
            lab.manager.apply(pickle.loads(pickle.dumps(report)))


def test_message_sizes_grow_linearly_with_blocks():
    """A plan grows by at most 60 bytes per block. A block key has 32 bytes, and a slot number has 4 bytes.

    A report grows by at most 34 bytes per block, and a chain by at most 4 bytes per token.
    """
    sizes = {n: message_sizes(n) for n in (10, 100, 1000, 2000)}
    for few, many in ((10, 100), (100, 1000), (1000, 2000)):
        for name, max_bytes in (("plan", 60), ("report", 34), ("chain", 4 * BLOCK)):
            grown = sizes[many][name] - sizes[few][name]
            assert grown <= max_bytes * (many - few) + 100, (name, few, many, grown / (many - few))
    assert sizes[10]["plan"] < 1500


def test_messages_are_immutable_and_picklable():
    assert pickle.loads(pickle.dumps(StoreLookup("disk", b"x" * 32))) == StoreLookup("disk", b"x" * 32)
    assert not Plan(1, 0)
    with pytest.raises(AttributeError):
        Plan(1, 0).epoch = 3
