"""A report of damaged host slots removes the blocks in these slots. Earlier blocks of the prompt stay."""

from __future__ import annotations

import numpy as np

from cache_support import Lab, disk, prompt
from kvtier.index.transitions import block_slots
from kvtier.messages import Report, slot_bytes


def slots_of(lab: Lab, chain, first: int, stop: int) -> np.ndarray:
    lease = lab.manager.tree.match(chain)
    slots = block_slots(lease, lab.control.tier("host"), first, stop).copy()
    lab.manager.tree.release(lease, used=False)
    return slots


def report_damage(lab: Lab, slots: np.ndarray, rank: int = 0) -> None:
    lab.manager.apply(Report(lab.manager.transfers.epoch, rank, damaged=slot_bytes(slots)))
    lab.manager.check()


def test_damaged_host_block_is_a_miss_but_earlier_blocks_hit():
    lab = Lab(12)
    chain = prompt(1, 5)
    lab.serve(chain)
    lab.evict()
    report_damage(lab, slots_of(lab, chain, 2, 3))
    assert lab.num_in("host", chain) == 2
    assert lab.manager.num_damaged == 1
    assert lab.serve(chain).lease.num_matched == 2  # `serve` verifies the loaded contents
    assert lab.num_in("host", chain) == 5


def test_damaged_host_block_is_saved_again_from_device():
    lab = Lab(12)
    chain = prompt(1, 5)
    lab.serve(chain)
    report_damage(lab, slots_of(lab, chain, 0, 5))
    assert (lab.num_in("host", chain), lab.num_in("device", chain)) == (0, 5)
    lab.control.save(chain)
    lab.settle()
    assert lab.num_in("host", chain) == 5


def test_damaged_host_block_is_fetched_again_from_store():
    lab = Lab(12, stores=[disk()])
    chain = prompt(1, 5)
    lab.serve(chain)
    lab.evict()
    report_damage(lab, slots_of(lab, chain, 1, 4))
    assert lab.num_in("host", chain) == 1
    assert lab.serve(chain).lease.num_matched == 5
    assert lab.num_in("host", chain) == 5


def test_damaged_host_block_is_kept_while_load_reads_it():
    lab = Lab(12)
    chain = prompt(1, 5)
    lab.serve(chain)
    lab.evict()
    slots = slots_of(lab, chain, 0, 2)
    allocation = lab.manager.match(chain)
    assert lab.manager.allocate(allocation, chain.num_tokens) is None
    report_damage(lab, slots)
    assert lab.manager.num_damaged == 0
    lab.plan()
    lab.run_workers()
    report_damage(lab, slots)
    assert lab.manager.num_damaged == 2
    assert lab.manager.is_ready(allocation)
    lab.manager.abort(allocation)
    assert lab.num_in("device", chain) == 5


def test_damage_report_for_unfinished_or_free_slots_is_ignored():
    lab = Lab(12)
    chain = prompt(1, 5)
    allocation = lab.start(chain)
    lab.compute(allocation)
    lab.plan()  # the saves are in flight
    report_damage(lab, np.arange(20, dtype=np.int32))  # all host slots
    lab.run_workers()
    assert lab.num_in("host", chain) == 5
    lab.manager.finish(allocation)
    lab.evict("host")
    report_damage(lab, np.arange(20, dtype=np.int32))
    assert lab.manager.num_damaged == 0


def test_damage_report_from_one_rank_removes_block():
    lab = Lab(12, num_ranks=2)
    chain = prompt(1, 5)
    lab.serve(chain)
    report_damage(lab, slots_of(lab, chain, 4, 5), rank=1)
    assert lab.num_in("host", chain) == 4
