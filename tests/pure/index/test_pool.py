"""BlockPool: allocation, release, resizing and errors, compared with sets of slots."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from index_cases import slots
from kvtier.errors import ArgumentError, KvtierError, RangeError, StateError
from kvtier.index import BlockPool, Shortage


def runs(free: set[int]) -> list[int]:
    """Return the lengths of all runs of consecutive free slots."""
    lengths = []
    for slot in sorted(free):
        if slot - 1 in free:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def state(pool: BlockPool) -> tuple:
    return pool.free_slots().tolist(), pool.num_free, pool.num_used


@pytest.mark.parametrize("n", range(12))
def test_pool_allocates_up_to_its_size(n):
    pool = BlockPool("device", 10)
    found = pool.allocate(n)
    pool.check()
    if n > 10:
        assert found == Shortage("device", n, 10)
        assert pool.num_free == 10
    else:
        assert found.tier == "device"
        assert len(found) == n
        assert not set(found.ids.tolist()) & set(pool.free_slots().tolist())
        assert sorted(found.ids.tolist() + pool.free_slots().tolist()) == list(range(10))


def test_allocation_of_zero_slots_from_full_pool_is_empty():
    pool = BlockPool("device", 3)
    pool.allocate(3)
    assert len(pool.allocate(0)) == 0
    assert isinstance(pool.allocate(1), Shortage)


def test_pool_with_negative_size_raises():
    with pytest.raises(RangeError, match="cannot have -1 slots"):
        BlockPool("device", -1)
    with pytest.raises(RangeError, match="cannot have -2 slots"):
        BlockPool("device", 4).resize(-2)


def test_allocate_negative_count_raises():
    with pytest.raises(RangeError, match="-1"):
        BlockPool("device", 4).allocate(-1)


@pytest.mark.parametrize("ids", [[-1], [-2], [-7], [3, -2], [-3, 3], [8], [3, 8], [100]])
@pytest.mark.parametrize("others", [0, 70])
def test_release_of_slots_outside_pool_raises(ids, others):
    """With 70 `others`, the list has more than 64 slots, so the pool finds runs of slots with numpy, not in a loop."""
    pool = BlockPool("device", 8 + others)
    pool.allocate(8 + others)
    before = state(pool)
    ids = [slot + others if slot >= 8 else slot for slot in ids]
    with pytest.raises(RangeError, match=r"slot -?\d+ is not in"):
        pool.release(slots("device", *range(8, 8 + others), *ids))
    assert state(pool) == before
    pool.check()


@pytest.mark.parametrize(
    "ids", [[3, 3], [4, 5, 4], [5, 4, 5], [4, 5, 5, 6], [1], [3, 1], [1, 3], [3, 4, 5, 6, 7, 3], [*range(2, 90), 3]]
)
def test_release_of_free_slots_raises(ids):
    pool = BlockPool("device", 100)
    pool.allocate(100)
    pool.release(slots("device", 1))
    before = state(pool)
    with pytest.raises(StateError, match=r"slot \d+ was released"):
        pool.release(slots("device", *ids))
    assert state(pool) == before
    pool.check()


def test_release_of_slots_from_other_tier_raises():
    device, host = BlockPool("device", 4), BlockPool("host", 4)
    host_slots = host.allocate(2)
    device.allocate(4)
    with pytest.raises(ArgumentError, match="slots of host were released to the pool of device"):
        device.release(host_slots)
    assert (device.num_used, host.num_used) == (4, 2)


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.data())
def test_allocation_is_contiguous_if_run_of_double_size_is_free(is_used, data):
    """The allocation of n slots is contiguous if a run of 2n slots is free, or if all free slots form one run.

    In other cases, the pool may miss a free run of n slots.
    """
    pool = BlockPool("device", len(is_used))
    pool.allocate(len(is_used))
    pool.release(slots("device", *[slot for slot, used in enumerate(is_used) if not used]))
    free = set(pool.free_slots().tolist())
    n = data.draw(st.integers(0, len(free)))
    longest = max(runs(free), default=0)
    found = pool.allocate(n).ids
    assert set(found.tolist()) <= free
    if longest >= 2 * n:
        assert (np.diff(found) == 1).all()
    if runs(free) == [longest]:
        assert (np.diff(found) == 1).all()
    pool.check()


@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.integers(0, 59), unique=True))
def test_resize_raises_only_if_it_would_remove_used_slots(old, new, used):
    used = [slot for slot in used if slot < old]
    pool = BlockPool("host", old)
    pool.allocate(old)
    pool.release(slots("host", *sorted(set(range(old)) - set(used))))
    if max(used, default=-1) >= new:
        before = state(pool)
        with pytest.raises(StateError, match=f"cannot shrink to {new} slots, because slot {max(used)} is in use"):
            pool.resize(new)
        assert state(pool) == before
    else:
        pool.resize(new)
        assert pool.num_slots == new
        assert pool.free_slots().tolist() == sorted(set(range(new)) - set(used))
    pool.check()
    pool.release(slots("host", *used))
    assert pool.num_free == pool.num_slots


class PoolMachine(RuleBasedStateMachine):
    """Compares a pool with a plain list of the used slots."""

    @initialize(num_slots=st.integers(0, 80))
    def start(self, num_slots):
        self.num_slots = num_slots
        self.pool = BlockPool("device", num_slots)
        self.used: list[int] = []

    @property
    def free(self) -> set[int]:
        return set(range(self.num_slots)) - set(self.used)

    @rule(n=st.integers(0, 90))
    def allocate(self, n):
        free = self.free
        found = self.pool.allocate(n)
        if n > len(free):
            assert found == Shortage("device", n, len(free))
            return
        ids = found.ids.tolist()
        assert len(set(ids)) == n
        assert set(ids) <= free
        self.used += ids

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.used), unique=True))
        self.pool.release(slots("device", *ids))
        self.used = [slot for slot in self.used if slot not in ids]

    @precondition(lambda self: self.used)
    @rule(first=st.integers(0, 80), count=st.integers(0, 80))
    def release_neighbours(self, first, count):
        ids = sorted(self.used)[first : first + count]
        self.pool.release(slots("device", *ids))
        self.used = [slot for slot in self.used if slot not in ids]

    @rule(ids=st.lists(st.integers(-3, 90), min_size=1, max_size=4))
    def release_invalid_slots(self, ids):
        if len(set(ids)) == len(ids) and set(ids) <= set(self.used):
            return
        with pytest.raises(KvtierError):
            self.pool.release(slots("device", *ids))

    @rule(num_slots=st.integers(0, 90))
    def resize(self, num_slots):
        if num_slots < max(self.used, default=-1) + 1:
            with pytest.raises(KvtierError):
                self.pool.resize(num_slots)
        else:
            self.pool.resize(num_slots)
            self.num_slots = num_slots

    @invariant()
    def check_against_model(self):
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free_slots().tolist() == sorted(self.free)
            assert self.pool.num_free == len(self.free)
            assert self.pool.num_used == len(self.used)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
