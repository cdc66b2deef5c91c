"""The number of replicas that scaling chooses for a load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RangeError
from kvtier.router.scaling import ReplicaLoad, ScalingConfig, num_replicas_for

LOADS = st.lists(st.builds(ReplicaLoad, st.floats(0, 20), st.floats(0, 1)), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [  # a load is (requests, pressure)
        ([(0.0, 0.0)] * 3, 1),
        ([(0.7, 0.1)] * 3, 3),
        ([(0.8, 0.1)] * 3, 4),
        ([(0.1, 1.0)] * 2, 3),  # cache pressure alone
        ([(5.0, 0.2)], 8),
    ],
)
def test_num_replicas_follows_queue_and_cache_pressure(loads, expected):
    assert num_replicas_for([ReplicaLoad(*load) for load in loads], len(loads)) == expected


def test_num_replicas_without_loads_is_unchanged():
    assert num_replicas_for([], 5) == 5


@given(LOADS)
def test_load_per_replica_is_at_most_the_limit(loads):
    config = ScalingConfig(requests=0.5, pressure=0.6)
    number = num_replicas_for(loads, len(loads), config)
    assert number >= 1
    assert sum(load.requests for load in loads) <= 0.5 * number + 1e-6
    assert sum(load.pressure for load in loads) <= 0.6 * number + 1e-6


def test_scaling_config_with_zero_limit_raises():
    with pytest.raises(RangeError, match="above 0"):
        ScalingConfig(requests=0)
