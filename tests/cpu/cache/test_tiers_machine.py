"""The tiers on the CPU: real copies, real threads, a store that fails."""

from __future__ import annotations

from tiers_machine import TiersMachine, run


def test_tiers_machine_never_reads_wrong_bytes():
    """At least 5,000 steps; KVTIER_SOAK=200 makes a million."""
    run(TiersMachine, 150)
