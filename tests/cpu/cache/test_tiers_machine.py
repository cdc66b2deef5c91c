"""State machine of the tiers on the CPU: real copies, real threads, a failing store."""

from __future__ import annotations

from tiers_machine import TiersMachine, run


def test_tiers_machine_never_reads_wrong_bytes():
    """Run at least 5,000 steps; KVTIER_SOAK=200 runs a million."""
    run(TiersMachine, 150)
