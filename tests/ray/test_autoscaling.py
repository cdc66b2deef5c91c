"""The number of replicas follows the load."""

from __future__ import annotations

from ray_support import Load


def test_replicas_follow_the_load(cluster):
    cluster.run(1, max_replicas=2, upscale_seconds=1.0, downscale_seconds=2.0)
    cluster.wait_for_replicas(1)
    load = Load(cluster, num_clients=16, max_tokens=64)
    with load.running():
        cluster.wait_for_replicas(2)
        load.more(16)
    cluster.wait_for_replicas(1)
    assert load.errors == []
