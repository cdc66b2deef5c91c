"""The scrubber reports host blocks whose bits changed, but not blocks that were forgotten or written again."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvtier import dtype as dt
from kvtier.layout import CacheGroup
from kvtier.transfer import HostMemory
from kvtier.worker import scrubber
from kvtier.worker.scrubber import Scrubber

GROUPS = [CacheGroup.attention("main", 3, 2, 8, dt.f16, 4), CacheGroup.attention("draft-1", 1, 1, 8, dt.f32, 4)]


class ScrubbedMemory:
    """Host memory of two cache groups, and a scrubber of this memory. By default, the scrubber runs without pauses."""

    def __init__(self, every_seconds: float = 0.0) -> None:
        self.hosts = self.new(6)
        self.random = np.random.default_rng(1)
        self.scrubber = Scrubber(self.hosts, every_seconds)

    def new(self, num_slots: int) -> list[HostMemory]:
        return [HostMemory(group, num_slots, "cpu", background=False) for group in GROUPS]

    def write(self, *slots: int) -> None:
        self.scrubber.forget(slots)
        for host in self.hosts:
            for slot in slots:
                host.block(slot).numpy()[:] = self.random.integers(0, 256, host.group.block_bytes)
        self.scrubber.note(slots)

    def flip(self, slot: int, group: int) -> None:
        block = self.hosts[group].block(slot).numpy()
        block[self.random.integers(len(block))] ^= 1 << self.random.integers(8)

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_until_known(self, *slots: int) -> None:
        self.wait_for(lambda: all(slot in self.scrubber._sums for slot in slots))

    def wait_for_damage(self) -> list[int]:
        damaged: list[int] = []
        self.wait_for(lambda: damaged.extend(self.scrubber.take_damaged()) or damaged)
        return damaged


@pytest.fixture
def memory():
    made = ScrubbedMemory()
    yield made
    made.scrubber.close()
    for host in made.hosts:
        host.free()


@pytest.fixture
def quiet():
    """Yield a ScrubbedMemory whose scrubber thread sleeps. Tests call `_verify_some` themselves."""
    made = ScrubbedMemory(every_seconds=3600.0)
    yield made
    made.scrubber.close()
    for host in made.hosts:
        host.free()


@pytest.mark.parametrize("group", [0, 1])
def test_scrubber_reports_only_the_corrupt_block(memory, group):
    memory.write(0, 2, 5)
    memory.wait_until_known(0, 2, 5)
    memory.flip(2, group)
    assert memory.wait_for_damage() == [2]
    assert memory.wait_for_damage() == [2]  # reported in every round until the slot is written
    memory.write(2)
    memory.wait_until_known(2)
    memory.flip(5, group)
    assert memory.wait_for_damage() == [5]


def test_scrubber_does_not_report_rewritten_blocks(memory):
    for number in range(400):
        memory.write(number % 3, 3)
        assert memory.scrubber.take_damaged() == []
    memory.wait_until_known(0, 1, 2, 3)
    assert memory.scrubber.take_damaged() == []


def test_scrubber_skips_forgotten_slots(memory):
    memory.write(1, 4)
    memory.wait_until_known(1, 4)
    memory.scrubber.forget([1])
    memory.flip(1, 0)
    memory.flip(4, 0)
    assert memory.wait_for_damage() == [4]


def test_use_of_new_memory_keeps_checksums_of_copied_slots(memory):
    memory.write(0, 4)
    memory.wait_until_known(0, 4)
    old, new = memory.hosts, memory.new(3)
    for before, after in zip(old, new, strict=True):
        after.slots()[:3].copy_(before.slots()[:3])
    memory.scrubber.use(new, 3)
    for host in old:
        host.free()
    memory.hosts = new
    assert set(memory.scrubber._sums) == {0}
    memory.flip(0, 1)
    assert memory.wait_for_damage() == [0]


def test_second_close_of_scrubber_has_no_effect(memory):
    memory.write(0)
    memory.scrubber.close()
    memory.scrubber.close()
    assert not memory.scrubber._thread.is_alive()


BLOCK_BYTES = sum(group.block_bytes for group in GROUPS)


# A round verifies at least one block, even if the limit is below the size of a block.
@pytest.mark.parametrize(("num_blocks", "num_verified"), [(2, 2), (3, 3), (0, 1)])
def test_scrubber_round_is_limited_by_bytes_per_second(quiet, monkeypatch, num_blocks, num_verified):
    # A round of `quiet` may verify BYTES_PER_SECOND * 3600 bytes: num_blocks blocks and one byte.
    monkeypatch.setattr(scrubber, "BYTES_PER_SECOND", (num_blocks * BLOCK_BYTES + 1) / 3600.0)
    quiet.write(0, 1, 2, 3)
    quiet.scrubber._verify_some()
    assert list(quiet.scrubber._sums) == [0, 1, 2, 3][:num_verified]
    assert list(quiet.scrubber._new) == [0, 1, 2, 3][num_verified:]


def test_scrubber_without_pause_has_a_byte_limit_per_round(monkeypatch):
    # Without a pause, a round may verify BYTES_PER_SECOND * 0.1 bytes: two blocks and one byte.
    monkeypatch.setattr(scrubber, "BYTES_PER_SECOND", (2 * BLOCK_BYTES + 1) / 0.1)
    memory = ScrubbedMemory()
    memory.scrubber.close()  # stop the thread, so that only the test calls `_verify_some`
    memory.write(0, 1, 2)
    memory.scrubber._verify_some()
    assert list(memory.scrubber._sums) == [0, 1]
    for host in memory.hosts:
        host.free()


def test_scrubber_verifies_every_block_over_several_rounds(quiet, monkeypatch):
    monkeypatch.setattr(scrubber, "BYTES_PER_SECOND", (2 * BLOCK_BYTES + 1) / 3600.0)
    quiet.write(0, 1, 2, 3, 4)
    for _ in range(3):
        quiet.scrubber._verify_some()
    assert not quiet.scrubber._new
    for slot in range(5):
        quiet.flip(slot, 0)
    damaged = []
    for _ in range(3):
        quiet.scrubber._verify_some()
        damaged.append(quiet.scrubber.take_damaged())
    assert set(damaged[0]).isdisjoint(damaged[1])  # the first two rounds verify different blocks
    assert {slot for found in damaged for slot in found} == {0, 1, 2, 3, 4}


def test_scrubber_computes_checksum_of_a_new_slot(quiet):
    quiet.scrubber.note([2])
    quiet.scrubber._verify_some()
    assert set(quiet.scrubber._sums) == {2}
    quiet.flip(2, 1)
    quiet.scrubber._verify_some()
    assert quiet.scrubber.take_damaged() == [2]
    assert quiet.scrubber.take_damaged() == []


def test_scrubber_skips_slot_forgotten_before_a_round(quiet):
    quiet.write(1, 2)
    quiet.scrubber.forget([1])
    quiet.scrubber._verify_some()
    assert set(quiet.scrubber._sums) == {2}


def test_scrubber_does_not_report_damage_of_forgotten_slot(quiet):
    quiet.write(1, 2)
    quiet.scrubber._verify_some()
    quiet.flip(1, 0)
    quiet.flip(2, 0)
    quiet.scrubber._verify_some()
    quiet.scrubber.forget([1])
    assert quiet.scrubber.take_damaged() == [2]


def test_use_of_smaller_memory_forgets_slots_that_do_not_fit(quiet):
    quiet.write(0, 3)
    quiet.scrubber._verify_some()
    quiet.write(2, 4)
    quiet.scrubber.note([3])
    quiet.hosts, old = quiet.new(3), quiet.hosts
    quiet.scrubber.use(quiet.hosts, 3)
    for host in old:
        host.free()
    assert (set(quiet.scrubber._new), set(quiet.scrubber._sums)) == ({2}, {0})
    quiet.scrubber._verify_some()
    assert set(quiet.scrubber._sums) == {0, 2}
    quiet.write(1)
    quiet.scrubber.use(quiet.hosts, 3)
    assert set(quiet.scrubber._new) == {1}
