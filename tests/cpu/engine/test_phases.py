"""One and two steps in flight give the same tokens, during arrivals, ends, failures and preemptions."""

from __future__ import annotations

import os

import pytest

from phases_support import CacheReader, check_lives

NUM_LIVES = 100
NUM_STEPS = 20_000 * int(os.environ.get("KVTIER_SOAK", "1")) // NUM_LIVES


@pytest.mark.parametrize("phases", [1, 2])
def test_steps_in_flight_do_not_change_the_answers(phases):
    seen = check_lives(CacheReader(), phases, range(NUM_LIVES), NUM_STEPS // (1 if phases == 2 else 4))
    if phases == 2:
        assert min(seen.values()) >= 20, seen
        assert len(seen) == 9, seen


@pytest.mark.parametrize("phases", [1, 2])
def test_faults_in_copies_and_stores_do_not_change_answers(phases):
    seen = check_lives(CacheReader(), phases, range(12), 60, below=True)
    assert seen["tokens from host"] + seen["tokens from disk"] > 0, seen  # how many depends on the threads
    assert seen["answers"] > 50, seen
