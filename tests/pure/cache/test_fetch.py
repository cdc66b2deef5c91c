"""Prefetches from stores: phases, concurrent requests, failures, drops, resets and ranks."""

from __future__ import annotations

import pytest

from cache_support import BLOCK, Lab, chain_of, content, disk, prompt
from kvtier.cache.config import HostConfig, WaitPolicy
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain
from kvtier.messages import Probe, Report, Route, StoreLookup, TransferResult, split_keys


def store_contents(chain: Chain, num_blocks: int | None = None) -> dict[bytes, object]:
    """Return the contents of a store that holds the first blocks of a prompt."""
    return {key: content(chain, block) for block, key in enumerate(split_keys(chain.keys(num_blocks)))}


def lab_with_stored(*chains: Chain, config=None, **options) -> Lab:
    """Return a lab whose store holds these prompts and whose manager has read the store's inventory."""
    lab = Lab(**{"num_blocks": 20, "stores": [config or disk()], **options})
    for chain in chains:
        lab.worker.stores["disk"].update(store_contents(chain))
    lab.settle()
    return lab


def fetches(lab: Lab) -> list[int]:
    return [transfer.num_blocks for transfer in lab.worker.done if transfer.route is Route.STORE_TO_HOST]


# ---- phases --------------------------------------------------------------------------------------------------------


def test_prefetch_waits_for_all_pages_of_store_inventory():
    lab = Lab(20, stores=[disk()])
    lab.worker.stores["disk"].update(store_contents(prompt(1, 5)))
    fetch = lab.manager.prefetch(prompt(1, 5))
    assert not fetch.is_over
    (probe,) = lab.plan().probes
    assert probe.keys == b""
    assert lab.manager.stores["disk"].num_known == 0
    pages = lab.worker.work().lookups
    assert [len(page.present) // 32 for page in pages] == [2, 2, 1, 0]
    for page in pages[:-1]:
        lab.manager.apply(Report(0, 0, lookups=(page,)))
        assert not lab.plan().transfers  # more pages can follow
    assert lab.manager.stores["disk"].num_known == 5
    lab.manager.apply(Report(0, 0, lookups=pages[-1:]))
    assert [transfer.num_blocks for transfer in lab.plan().transfers] == [5]


def test_prefetch_probes_store_before_it_transfers_blocks():
    lab = Lab(20, stores=[disk(is_shared=True)])
    lab.worker.stores["disk"].update(store_contents(prompt(1, 5)))
    chain = prompt(1, 5)
    fetch = lab.manager.prefetch(chain)
    (probe,) = lab.plan().probes
    assert probe.keys == chain.keys(5)
    assert not lab.manager.is_prefetched(fetch)
    lab.run_workers()
    assert not lab.manager.is_prefetched(fetch)
    (move,) = lab.plan().transfers
    assert (move.route, move.source, move.target, move.keys) == (Route.STORE_TO_HOST, "disk", "host", probe.keys)
    lab.run_workers()
    assert lab.manager.is_prefetched(fetch)
    assert fetch.num_fetched == {"disk": 5}
    allocation = lab.start(chain, fetch)
    assert allocation.tokens_from == {"disk": 5 * BLOCK, "host": 0, "device": 0}
    lab.manager.end_prefetch(fetch)
    with pytest.raises(StateError, match="already ended"):
        lab.manager.end_prefetch(fetch)


def test_prefetch_of_unknown_blocks_ends_immediately():
    lab = lab_with_stored(prompt(1, 4))
    assert lab.manager.prefetch(prompt(2, 4)).is_over
    assert lab.manager.prefetch(chain_of(1, 1)).is_over  # a prompt without a full block
    assert Lab(20).manager.prefetch(prompt(2, 4)) is None  # without stores, there is no prefetch


def test_prefetch_does_not_fetch_block_with_last_prompt_token():
    """The prompt ends with a full block. This block is not fetched, because the last token must be computed anyway."""
    lab = lab_with_stored(chain_of(*[1] * 16))
    assert lab.fetched(chain_of(*[1] * 16)).num_fetched == {"disk": 3}


def test_prefetch_skips_blocks_in_memory():
    lab = lab_with_stored(prompt(1, 8))
    lab.serve(prompt(1, 3))
    assert fetches(lab) == [3]
    lab.evict("device")
    fetch = lab.fetched(prompt(1, 8))
    assert fetches(lab) == [3, 5]
    allocation = lab.start(prompt(1, 8), fetch)
    assert allocation.tokens_from == {"disk": 5 * BLOCK, "host": 3 * BLOCK, "device": 0}


def test_tokens_from_counts_hit_tokens_of_each_tier():
    lab = Lab(8, host=HostConfig(20), stores=[disk("near"), disk("far")])
    lab.worker.stores["near"].update(store_contents(prompt(1, 10), 6))
    lab.worker.stores["far"].update(store_contents(prompt(1, 10)))
    lab.settle()
    lab.manager.abort(lab.start(prompt(1, 2), lab.fetched(prompt(1, 2))))  # now two blocks are on the device
    fetch = lab.fetched(prompt(1, 5))
    assert fetch.num_fetched == {"near": 3}
    allocation = lab.start(prompt(1, 5), fetch)
    assert allocation.tokens_from == {"near": 3 * BLOCK, "host": 0, "device": 2 * BLOCK}
    lab.compute(allocation)
    assert {tier.name: tier.hit_tokens for tier in lab.manager.stats.tiers} == {
        "device": 2 * BLOCK,
        "host": 0,
        "near": 3 * BLOCK,
        "far": 0,
    }


def test_prefetch_reads_missing_blocks_from_next_store():
    lab = Lab(20, stores=[disk("near"), disk("far")])
    everything = store_contents(prompt(1, 9))
    keys = list(everything)
    lab.worker.stores["near"].update({key: everything[key] for key in (*keys[:2], *keys[5:6])})
    lab.worker.stores["far"].update({key: everything[key] for key in (*keys[1:8],)})
    lab.settle()
    fetch = lab.fetched(prompt(1, 9))
    parts = [(move.source, move.num_blocks) for move in lab.worker.done]
    assert parts == [("near", 2), ("far", 6)]  # no store holds the ninth block
    assert fetch.num_fetched == {"near": 2, "far": 6}
    lab.start(prompt(1, 9), fetch)


def test_prefetch_of_blocks_in_memory_is_retried_after_eviction():
    """A waiting request has no lease on blocks in memory. If these blocks are evicted, a retry fetches the blocks."""
    lab = Lab(20, stores=[disk()])
    lab.serve(prompt(1, 6))
    waiting = lab.fetched(prompt(1, 6))
    assert waiting.num_blocks == 0  # all blocks are in memory
    lab.evict("device")
    lab.evict("host")
    assert lab.num_in("device", prompt(1, 6)) == lab.num_in("host", prompt(1, 6)) == 0
    allocation = lab.manager.match(prompt(1, 6), prefetch=waiting)
    assert allocation.num_cached_tokens == 0
    assert lab.manager.retry_prefetch(waiting, allocation)
    lab.manager.abort(allocation)
    while not lab.manager.is_prefetched(waiting):
        lab.plan()
        lab.run_workers()
    allocation = lab.start(prompt(1, 6), waiting)
    assert allocation.tokens_from == {"disk": 6 * BLOCK, "host": 0, "device": 0}
    assert not lab.manager.retry_prefetch(waiting, allocation)
    lab.manager.end_prefetch(waiting)
    lab.manager.abort(allocation)
    lab.manager.check()


def test_prefetch_is_not_retried_if_no_store_holds_its_blocks():
    lab = lab_with_stored(prompt(1, 3))
    waiting = lab.fetched(prompt(2, 3))
    allocation = lab.manager.match(prompt(2, 3), prefetch=waiting)
    assert not lab.manager.retry_prefetch(waiting, allocation)
    lab.manager.abort(allocation)
    lab.manager.end_prefetch(waiting)


def test_retried_prefetch_waits_for_free_host_slots():
    lab = lab_with_stored(prompt(1, 4), prompt(2, 4), host=HostConfig(4))
    first = lab.fetched(prompt(1, 4))
    assert first.num_fetched == {"disk": 4}
    second = lab.fetched(prompt(2, 4))
    assert second.num_blocks == 0  # no free host slot
    allocation = lab.manager.match(prompt(2, 4), prefetch=second)
    assert lab.manager.retry_prefetch(second, allocation)
    lab.manager.abort(allocation)
    lab.plan()
    assert not lab.manager.is_prefetched(second)
    lab.manager.end_prefetch(first)
    while not lab.manager.is_prefetched(second):
        lab.plan()
        lab.run_workers()
    assert second.num_fetched == {"disk": 4}
    lab.manager.end_prefetch(second)
    lab.manager.check()


# ---- concurrent prefetches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_more", [0, 3])
def test_concurrent_prefetches_of_same_blocks_share_transfer(num_more):
    lab = lab_with_stored(prompt(1, 4 + num_more))
    first, second = prompt(1, 4), prompt(1, 4 + num_more)
    one, two = lab.manager.prefetch(first), lab.manager.prefetch(second)
    lab.plan()
    assert not two.is_over
    lab.run_workers()
    lab.plan()
    assert one.is_over
    lab.run_workers()
    lab.plan()
    assert two.is_over
    assert fetches(lab) == ([4, num_more] if num_more else [4])
    assert lab.start(second, two).num_cached_tokens == (4 + num_more) * BLOCK
    assert two.num_fetched == ({"disk": num_more} if num_more else {})


def test_prefetch_that_waits_for_another_evicts_no_block():
    lab = lab_with_stored(prompt(1, 5), prompt(2, 5), num_blocks=20, host=HostConfig(10))
    lab.serve(prompt(2, 5))
    lab.evict("device")
    one, two = lab.manager.prefetch(prompt(1, 5)), lab.manager.prefetch(prompt(1, 5))
    for _ in range(3):
        lab.plan()
    assert lab.num_in("host", prompt(2, 5)) == 5
    lab.run_workers()
    lab.plan()
    assert one.is_over
    assert two.is_over


def test_prefetch_ends_if_prefetch_of_same_blocks_fails():
    """The first prefetch fetched no block, but still has a lease. The second prefetch must not wait for the first."""
    lab = lab_with_stored(prompt(1, 4))
    one, two = lab.manager.prefetch(prompt(1, 4)), lab.manager.prefetch(prompt(1, 4))
    lab.worker.stores["disk"].clear()
    lab.plan()
    lab.run_workers()
    lab.plan()
    assert one.is_over
    assert two.is_over
    assert lab.start(prompt(1, 4), two).num_cached_tokens == 0


def test_prefetch_does_not_wait_for_pinned_block_in_no_tier():
    lab = lab_with_stored(prompt(2, 1), host=HostConfig(2))
    lab.serve(prompt(1, 4))
    pin = lab.manager.pin(prompt(1, 4))
    # `vacate` removes pinned blocks too. The last two of the four blocks were only on the device.
    lab.control.vacate("device")
    fetch = lab.fetched(prompt(1, 4))
    allocation = lab.start(prompt(1, 4), fetch)
    assert allocation.num_cached_tokens == 2 * BLOCK
    lab.compute(allocation)
    assert lab.start(prompt(1, 4)).num_cached_tokens == 4 * BLOCK
    lab.manager.unpin(pin)


# ---- wait ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (WaitPolicy.BEST_EFFORT, [True, True, True]),
        (WaitPolicy.DEADLINE, [False, False, True]),
        (WaitPolicy.WAIT, [False] * 3),
    ],
)
def test_wait_policy_sets_maximum_wait_for_prefetch(wait, expected):
    lab = lab_with_stored(prompt(1, 4), config=disk(wait=wait, wait_seconds=2.0))
    lab.now = 10.0
    fetch = lab.manager.prefetch(prompt(1, 4), now=lab.now)
    lab.plan()
    assert [lab.manager.is_prefetched(fetch, now=lab.now + seconds) for seconds in (0.0, 1.9, 2.0)] == expected
    lab.run_workers()
    assert lab.manager.is_prefetched(fetch, now=lab.now)


def test_prefetch_uses_longest_wait_of_all_stores():
    lab = Lab(20, stores=[disk("a", wait=WaitPolicy.BEST_EFFORT), disk("b", wait=WaitPolicy.WAIT)])
    fetch = lab.manager.prefetch(prompt(1, 4))
    assert not lab.manager.is_prefetched(fetch, now=1e9)


def test_blocks_of_late_prefetch_serve_next_request():
    lab = lab_with_stored(prompt(1, 4), config=disk(wait=WaitPolicy.BEST_EFFORT))
    fetch = lab.manager.prefetch(prompt(1, 4))
    lab.plan()
    allocation = lab.start(prompt(1, 4), fetch)
    lab.manager.end_prefetch(fetch)
    assert allocation.num_cached_tokens == 0
    lab.compute(allocation)
    lab.manager.finish(allocation)
    lab.settle()
    lab.evict("device")
    assert lab.start(prompt(1, 4)).tokens_from == {"host": 4 * BLOCK, "device": 0}


# ---- failures ------------------------------------------------------------------------------------------------------


def test_partial_prefetch_uses_blocks_before_first_gap():
    lab = lab_with_stored(prompt(1, 5))
    fetch = lab.fetched(prompt(1, 5), lose=lambda _move, _: [False, False, True, False, False])
    assert fetch.num_fetched == {"disk": 4}
    allocation = lab.start(prompt(1, 5), fetch)
    lab.manager.end_prefetch(fetch)
    assert allocation.num_cached_tokens == 2 * BLOCK
    assert allocation.tokens_from == {"disk": 2 * BLOCK, "host": 0, "device": 0}
    lab.manager.abort(allocation)
    assert lab.control.tier("host").pool.num_used == 2  # the blocks after the gap were freed


def test_store_index_forgets_missing_but_not_unreadable_blocks():
    lab = lab_with_stored(prompt(1, 4))
    known = lab.manager.stores["disk"]
    lab.manager.end_prefetch(lab.fetched(prompt(1, 4), lose=lambda _move, _: [True] * 4))
    assert known.num_known == 4
    for key in list(store_contents(prompt(1, 4)))[2:]:
        del lab.worker.stores["disk"][key]
    fetch = lab.fetched(prompt(1, 4))
    assert fetch.num_fetched == {"disk": 2}
    assert known.num_known == 2
    lab.manager.end_prefetch(fetch)
    assert lab.manager.transfers.counts[Route.STORE_TO_HOST].num_failed == 4 + 2  # 4 unreadable, 2 missing


def test_retried_prefetch_counts_as_one_refused_load():
    """The cost model decides twice about a retried prefetch, but must count the two decisions as one refusal.

    After 31 refusals, the cost model allows a load.
    """
    lab = lab_with_stored(prompt(1, 4), always_load=False)
    lab.manager.cost_model.observe_transfer((Route.STORE_TO_HOST, "disk"), 1, 100.0)
    lab.manager.cost_model.observe_transfer((Route.HOST_TO_DEVICE, ""), 1, 100.0)
    lab.manager.cost_model.observe_compute(100, 0.0, 1.0)
    num_refused = 0
    while True:
        fetch = lab.manager.prefetch(prompt(1, 4))
        lab.settle()
        allocation = lab.manager.match(prompt(1, 4), prefetch=fetch)
        lab.manager.retry_prefetch(fetch, allocation)
        is_loaded = fetch.decision is not None and fetch.decision.load
        lab.settle()
        lab.manager.abort(allocation)
        lab.manager.end_prefetch(fetch)
        if is_loaded:
            break
        num_refused += 1
    assert num_refused == 31


@pytest.mark.parametrize("num_host", [1, 3])
def test_prefetch_into_small_host_tier_fetches_leading_blocks(num_host):
    lab = lab_with_stored(prompt(1, 6), host=HostConfig(num_host))
    assert lab.fetched(prompt(1, 6)).num_fetched == {"disk": num_host}


def test_prefetch_into_full_host_tier_ends_without_blocks():
    lab = lab_with_stored(prompt(1, 4), prompt(2, 4), host=HostConfig(4))
    lab.fetched(prompt(1, 4))
    second = lab.manager.prefetch(prompt(2, 4))
    assert second.is_over
    assert lab.start(prompt(2, 4), second).num_cached_tokens == 0


def test_prefetch_is_limited_by_host_quota():
    chain = prompt(1, 6, salt=b"tenant")
    lab = lab_with_stored(chain)
    lab.control.set_quota("host", b"tenant", 4)
    assert lab.fetched(chain).num_fetched == {"disk": 4}


def test_prefetch_larger_than_in_flight_limit_runs_alone():
    lab = lab_with_stored(prompt(1, 6), prompt(2, 2), config=disk(max_fetching_blocks=3))
    small, large = lab.manager.prefetch(prompt(2, 2)), lab.manager.prefetch(prompt(1, 6))
    assert [move.num_blocks for move in lab.plan().transfers] == [2]
    lab.run_workers()
    assert small.is_over
    assert [move.num_blocks for move in lab.plan().transfers] == [6]
    lab.run_workers()
    assert large.is_over


def test_in_flight_limit_applies_to_each_store_separately():
    """A store at its limit does not delay transfers from another store."""
    near, far = disk("near", max_fetching_blocks=4), disk("far", max_fetching_blocks=4)
    lab = Lab(20, stores=[near, far])
    lab.worker.stores["near"].update(store_contents(prompt(1, 4)))
    lab.worker.stores["far"].update({**store_contents(prompt(2, 4)), **store_contents(prompt(3, 4))})
    lab.settle()
    for number in (1, 2, 3):
        lab.manager.prefetch(prompt(number, 4))
    assert [move.source for move in lab.plan().transfers] == ["near", "far"]
    lab.run_workers(count=1)
    assert [move.source for move in lab.plan().transfers] == []
    lab.run_workers()
    assert [move.source for move in lab.plan().transfers] == ["far"]


def test_prefetch_with_always_load_ignores_costs():
    lab = lab_with_stored(prompt(1, 4), always_load=True)
    lab.manager.cost_model.observe_compute(1000, 1000.0, 1e-9)
    lab.manager.cost_model.observe_transfer((Route.STORE_TO_HOST, "disk"), 1, 100.0)
    lab.manager.cost_model.observe_transfer((Route.HOST_TO_DEVICE, ""), 1, 100.0)
    assert lab.fetched(prompt(1, 4)).num_fetched == {"disk": 4}


# ---- cancel, drop and reset in every phase -------------------------------------------------------------------------


def prefetch_in_phase(lab: Lab, chain: Chain, phase: str):
    """Return a prefetch that has reached `phase`."""
    fetch = lab.manager.prefetch(chain)
    if phase == "created":
        return fetch
    lab.plan()  # sends the probe
    if phase == "probing":
        return fetch
    lab.run_workers()
    if phase == "answered":
        return fetch
    lab.plan()
    if phase == "moving":
        return fetch
    lab.run_workers()
    assert fetch.is_over
    return fetch


PHASES = ["created", "probing", "answered", "moving", "over"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("action", ["cancel", "reset", "drop", "cancel and reset", "drop and clear"])
def test_prefetch_interrupted_in_any_phase_frees_all_slots(phase, action):
    lab = Lab(20, stores=[disk(is_shared=True)])
    chain = prompt(1, 5)
    lab.worker.stores["disk"].update(store_contents(chain))
    fetch = prefetch_in_phase(lab, chain, phase)
    if "cancel" in action:
        lab.manager.end_prefetch(fetch)
    if "reset" in action:
        lab.manager.reset()
    if "drop" in action:
        lab.control.drop(chain)
    if "clear" in action:
        lab.control.clear_stores()
    lab.manager.check()
    lab.settle()
    if "cancel" not in action:
        for _ in range(5):
            lab.plan()
            lab.run_workers()
        assert lab.manager.is_prefetched(fetch)
        allocation = lab.start(chain, fetch)
        lab.manager.abort(allocation)
        lab.manager.end_prefetch(fetch)
    lab.manager.check()
    assert lab.manager.tree.num_leases == 0
    lab.evict("device")
    lab.evict("host")
    assert [lab.control.tier(name).pool.num_used for name in ("device", "host")] == [0, 0]


def test_prefetch_ended_by_reset_ignores_later_reports():
    lab = Lab(20, stores=[disk("near"), disk("far")])
    lab.worker.stores["near"].update(store_contents(prompt(1, 6), 3))
    lab.worker.stores["far"].update(store_contents(prompt(1, 6)))
    lab.settle()
    fetch = lab.manager.prefetch(prompt(1, 6))
    lab.plan()
    lab.manager.reset()
    assert lab.manager.is_prefetched(fetch)
    lab.run_workers(count=1)
    assert lab.manager.is_prefetched(fetch)
    lab.run_workers()
    assert lab.manager.is_prefetched(fetch)
    assert fetch.num_fetched in ({}, {"near": 0, "far": 0})


def test_report_from_old_epoch_frees_only_slots_of_old_transfer():
    lab = lab_with_stored(prompt(1, 5))
    old = lab.manager.prefetch(prompt(1, 5))
    assert lab.plan().epoch == 0
    lab.manager.reset()
    lab.manager.end_prefetch(old)
    assert lab.control.tier("host").pool.num_used == 5  # the old transfer still writes to these slots
    new = lab.manager.prefetch(prompt(1, 5))
    assert lab.plan().epoch == 1
    assert lab.control.tier("host").pool.num_used == 10
    lab.run_workers(count=1)
    assert lab.control.tier("host").pool.num_used == 5
    assert not new.is_over
    lab.run_workers()
    assert new.num_fetched == {"disk": 5}
    lab.start(prompt(1, 5), new)


def test_block_dropped_during_store_write_is_unknown_afterwards():
    lab = lab_with_stored()
    lab.compute(allocation := lab.start(prompt(1, 4)))
    lab.manager.finish(allocation)
    lab.plan()
    lab.run_workers()
    assert [move.route for move in lab.plan().transfers] == [Route.HOST_TO_STORE]
    lab.control.drop(prompt(1, 4))
    lab.plan()
    lab.run_workers()
    assert lab.worker.stores["disk"] == {}
    assert lab.manager.stores["disk"].num_known == 0


@pytest.mark.parametrize("num_lost", [0, 1, 4])
def test_stored_block_is_known_only_after_write_is_reported(num_lost):
    lab = lab_with_stored()
    lab.compute(allocation := lab.start(prompt(1, 4)))
    lab.manager.finish(allocation)
    lab.plan()
    lab.run_workers()
    (move,) = lab.plan().transfers
    keys, store = split_keys(move.keys), lab.manager.stores["disk"]
    # A lookup does not change the state of keys that are being written.
    lab.manager.apply(Report(0, 0, lookups=(StoreLookup("disk", keys[0], keys[1]),)))
    assert move.route is Route.HOST_TO_STORE
    assert (store.num_known, store.num_leading(keys)) == (0, 0)
    arrived = bytes([1] * (4 - num_lost) + [0] * num_lost)
    lab.manager.apply(Report(0, 0, results=(TransferResult(move.id, not num_lost, 0, 0.0, arrived=arrived),)))
    assert (store.num_known, store.num_leading(keys)) == (4 - num_lost, 4 - num_lost)
    lab.manager.apply(Report(0, 0, lookups=(StoreLookup("disk", b"", keys[0]),)))
    assert store.num_leading(keys) == 0
    lab.manager.check()


def test_number_of_known_keys_per_store_is_bounded():
    """Stores do not report evictions, so the manager cannot remove the keys of evicted blocks.

    Instead, the manager remembers a limited number of keys and forgets the oldest keys.
    """
    lab = lab_with_stored(config=disk(max_known=10), num_blocks=40, host=HostConfig(40))
    for number in range(5):
        lab.serve(prompt(number, 4))
    assert lab.manager.stores["disk"].num_known == 10
    assert lab.manager.stores["disk"].num_leading(split_keys(prompt(4, 4).keys(4))) == 4


# ---- ranks ---------------------------------------------------------------------------------------------------------


def test_store_block_is_present_only_if_all_ranks_hold_it():
    lab = Lab(20, stores=[disk()], num_ranks=3)
    keys = list(store_contents(prompt(1, 5)))
    for rank, worker in enumerate(lab.workers):
        worker.stores["disk"].update({k: v for k, v in store_contents(prompt(1, 5)).items() if k != keys[4 - rank]})
    lab.settle()
    fetch = lab.fetched(prompt(1, 5))
    assert fetch.num_fetched == {"disk": 2}  # blocks 2, 3 and 4 are each missing on one rank
    assert lab.start(prompt(1, 5), fetch).num_cached_tokens == 2 * BLOCK


def test_block_lost_on_one_rank_counts_as_not_fetched():
    lab = Lab(20, stores=[disk()], num_ranks=2)
    for worker in lab.workers:
        worker.stores["disk"].update(store_contents(prompt(1, 5)))
    lab.settle()
    fetch = lab.fetched(prompt(1, 5), lose=lambda _move, rank: [i == 4 - rank for i in range(5)])
    assert fetch.num_fetched == {"disk": 3}
    lab.start(prompt(1, 5), fetch)


def test_fetch_starts_after_all_ranks_have_answered_the_probe():
    lab = Lab(20, stores=[disk(is_shared=True)], num_ranks=2)
    for worker in lab.workers:
        worker.stores["disk"].update(store_contents(prompt(1, 5)))
    fetch = lab.manager.prefetch(prompt(1, 5))
    lab.plan()
    lab.manager.apply(lab.workers[0].work())
    assert not lab.plan().transfers
    lab.manager.apply(lab.workers[1].work())
    assert [move.num_blocks for move in lab.plan().transfers] == [5]
    assert not fetch.is_over


def test_host_pool_grows_to_smallest_size_of_all_ranks():
    lab = Lab(20, num_ranks=2)
    pool = lab.control.tier("host").pool
    lab.control.resize("host", 4)
    lab.manager.apply(Report(0, 0, num_host_slots=9))
    assert pool.num_slots == 4
    lab.manager.apply(Report(0, 1, num_host_slots=6))
    assert pool.num_slots == 6


def test_report_from_unknown_rank_raises_and_changes_nothing():
    lab = lab_with_stored(prompt(1, 4))
    keys = b"".join(store_contents(prompt(2, 4)))
    with pytest.raises(ArgumentError, match="rank 7"):
        lab.manager.apply(Report(0, 7, lookups=(StoreLookup("disk", keys),)))
    assert lab.manager.stores["disk"].num_known == 4


def test_invalid_store_config_raises():
    for bad in ({"name": "host"}, {"name": ""}, {"wait_seconds": -1.0}, {"max_fetching_blocks": 0}, {"max_known": 0}):
        with pytest.raises(RangeError):
            disk(**{"name": "disk", **bad})
    with pytest.raises(ArgumentError, match="different names"):
        Lab(4, stores=[disk(), disk()])
    assert Probe(1, "disk").keys == b""  # no keys: the probe asks for the inventory
