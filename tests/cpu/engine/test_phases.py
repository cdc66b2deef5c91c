"""The tokens are the same with one and two steps in flight, even if requests arrive, end, fail or are preempted."""

from __future__ import annotations

import os

import pytest

from phases_support import CacheReader, check_lives

NUM_LIVES = 100
"""Number of engines. Each has a random configuration and random requests (see `phases_support.Life`)."""
NUM_STEPS = 20_000 * int(os.environ.get("KVTIER_SOAK", "1")) // NUM_LIVES
"""Number of steps of each engine with `phases=2`."""


@pytest.mark.parametrize("phases", [1, 2])
def test_steps_in_flight_do_not_change_the_answers(phases):
    num_steps = NUM_STEPS if phases == 2 else NUM_STEPS // 4  # a quarter is enough if steps do not overlap
    seen = check_lives(CacheReader(), phases, range(NUM_LIVES), num_steps)
    if phases == 2:
        assert min(seen.values()) >= 20, seen
        assert len(seen) == 9, seen  # four error messages, and five other events that `Life` counts


@pytest.mark.parametrize("phases", [1, 2])
def test_faults_in_copies_and_stores_do_not_change_answers(phases):
    seen = check_lives(CacheReader(), phases, range(12), 60, lower_tiers=True)
    # the counts depend on the timing of the threads, so the limits are low
    assert seen["tokens from host"] + seen["tokens from disk"] > 0, seen
    assert seen["answers"] > 50, seen
