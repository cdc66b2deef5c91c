"""State machine of the tiers on the CPU, with real copies, real threads and a failing store."""

from __future__ import annotations

from tiers_machine import TiersMachine, run


def test_tiers_machine_never_reads_wrong_bytes():
    """Run at least 6,000 steps (40 per example on average). KVTIER_SOAK=200 runs at least a million steps."""
    run(TiersMachine, 150)
