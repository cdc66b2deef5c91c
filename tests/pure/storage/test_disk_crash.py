"""Kill a writer at random moments. The store keeps all objects that were reported as stored and not removed later."""

from __future__ import annotations

import os
import random

import pytest

from kvtier.storage import Sync
from storage_crash import Victim
from storage_support import check_disk, put

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
ROUNDS = 20 if SOAK == 1 else 200


@pytest.mark.parametrize("workload", ["small", "encrypted"])
def test_disk_store_keeps_stored_objects_when_writer_is_killed(tmp_path, workload):
    rng, victim = random.Random(7), Victim(tmp_path / "store", workload)
    try:
        for seed in range(1, ROUNDS + 1):
            num_lines, spin_ns = rng.randint(0, 25), rng.randrange(3_000_000)
            victim.kill_after(num_lines, spin_ns, seed, rng.choice([*Sync]))
            damage = victim.inspect()
            assert damage.is_none, damage
        assert victim.num_stored > ROUNDS
        store = victim.workload.open(victim.folder)
        assert put(store, *range(1000, 1200)).ok, "the store lost space"
        check_disk(store)
        store.close()
    finally:
        victim.close()
