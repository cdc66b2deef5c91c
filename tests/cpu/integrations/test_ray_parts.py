"""Parts of the Ray integration that need no Ray: tickets, merged replies, configuration, and the event subscriber."""

from __future__ import annotations

import asyncio
import pickle
import sys

import msgspec
import pytest

from kvtier.cli.main import main
from kvtier.cli.serve import fleet_config_of
from kvtier.errors import ArgumentError, RangeError
from kvtier.events import EventConfig, publish_events
from kvtier.index import Chain, Namespace
from kvtier.index.events import BlocksStored
from kvtier.integrations.ray.config import RayConfig
from kvtier.integrations.ray.merge import labelled, merged
from kvtier.integrations.ray.subscriber import follow
from kvtier.integrations.ray.ticket import RouteTicket
from kvtier.metrics import CollectedMetric, Distribution, Registry
from kvtier.router import Router, RouterConfig, hashes_of
from kvtier.server.config import ServerConfig
from kvtier.server.messages import Reply, decode_message, encode_message

NAMESPACE = Namespace("model", block_tokens=4)


def make_router(names="ab"):
    router = Router(RouterConfig(4, 8))
    for name in names:
        router.add(name)
    return router


def make_ticket(num_blocks=3):
    chain = Chain(NAMESPACE, list(range(4 * num_blocks)))
    return RouteTicket(hashes_of(chain.keys()), 4 * num_blocks)


def test_ticket_avoids_failed_replicas_until_all_failed():
    async def run():
        router, ticket, every = make_router(), make_ticket(), frozenset("ab")
        first = ticket.choose(router, every)
        ticket.avoid = frozenset({first})
        second = ticket.choose(router, every)
        assert {first, second} == {"a", "b"}
        ticket.avoid = every
        assert ticket.choose(router, frozenset("b")) == "b"
        assert ticket.choose(router, frozenset()) is None
        router.check()

    asyncio.run(run())


def test_finished_ticket_leaves_no_decision_in_router():
    async def run():
        router, ticket = make_router(), make_ticket()
        chosen = ticket.choose(router, frozenset("ab"))
        ticket.on_routed(router, "a" if chosen == "b" else "b")  # Ray Serve chose the other replica
        ticket.on_first_token()
        ticket.finish()
        ticket.finish()
        await asyncio.sleep(0)
        assert router.index.num_blocks == 0
        router.check()
        assert ticket.choose(router, frozenset("ab")) is None

    asyncio.run(run())


def test_pickled_ticket_is_empty():
    copy = pickle.loads(pickle.dumps(make_ticket()))
    assert len(copy.hashes) == copy.num_tokens == 0


def test_merged_replies_add_counts_and_merge_rows_by_name():
    one = {"asleep": False, "running": 1, "tiers": [{"name": "device", "num_used": 3, "block_bytes": 8}], "ghost": None}
    two = {
        "asleep": True,
        "running": 2,
        "tiers": [{"name": "device", "num_used": 4, "block_bytes": 8}],
        "ghost": {"a": 1},
    }
    assert merged([one, two]) == {
        "asleep": False,
        "running": 3,
        "tiers": [{"name": "device", "num_used": 7, "block_bytes": 8}],
        "ghost": {"a": 1},
    }


def test_merged_replies_keep_ghost_curve_of_first_replica():
    curves = [[{"num_blocks": n, "hit_rate": n * scale, "error": 0.01} for n in (5, 10)] for scale in (0.01, 0.02)]
    first, second = ({"ghost": {"policy": "lru", "num_blocks": 5, "points": points}} for points in curves)
    assert merged([{"ghost": None}, first, second]) == first


def test_merged_replies_keep_rows_if_the_first_has_none():
    row = {"source": "host", "target": "device", "bytes": 5}
    assert merged([{"transfers": []}, {"transfers": [row]}, {"transfers": None}]) == {"transfers": [row]}


def test_merged_metrics_have_series_of_every_replica():
    def reply(replica, hits):
        registry = Registry()
        registry.counter("kvtier_hit_tokens_total", "Tokens.", ("tier",)).of("host").add(hits)
        registry.histogram("kvtier_wait_seconds", "Seconds.", bounds=(1.0,)).of().observe(hits)
        value = {"metrics": registry.collect()}
        collected = decode_message(encode_message(Reply(0, value))).value["metrics"]
        return {"metrics": labelled(collected, replica)}

    joined = merged([reply("a", 3), reply("b", 4)])["metrics"]
    hits, waits = msgspec.convert(joined, tuple[CollectedMetric, ...])
    assert hits.labels == ("tier", "replica")
    assert hits.series == ((("host", "a"), 3.0), (("host", "b"), 4.0))
    assert waits.series == ((("a",), Distribution((1.0,), (0, 1), 3.0)), (("b",), Distribution((1.0,), (0, 1), 4.0)))


def test_ray_serve_config_file_accepts_options_of_kvtier_serve():
    config = fleet_config_of(
        {"replicas": 3, "max_replicas": 5, "blocks": 64, "tenants": [{"name": "t", "key": "12345678"}]}
    )
    assert (config.num_replicas, config.most_replicas, config.gpus) == (3, 5, 0.0)
    assert config.server.engine.tiers.blocks == 64
    assert config.server.tenants[0].name == "t"


def test_fleet_config_with_impossible_values_is_an_error():
    with pytest.raises(RangeError, match="at least one replica"):
        RayConfig(num_replicas=3, max_replicas=2)
    with pytest.raises(ArgumentError, match="must be ray"):
        RayConfig(cluster="slurm")
    with pytest.raises(ArgumentError, match="--metrics-port"):
        RayConfig(ServerConfig(metrics_port=9), "ray")


@pytest.fixture
def publisher():
    address = "tcp://127.0.0.1:*"
    opened = publish_events(EventConfig(address, address, token_ids=False))
    yield opened
    opened.close()


def store(publisher, tokens):
    """Publish the blocks of a prompt. Return the hashes of the blocks."""
    chain = Chain(NAMESPACE, tokens)
    publisher(BlocksStored("device", NAMESPACE.root_key(), chain.keys(), chain.labels, True, b"", b""))
    return hashes_of(chain.keys())


def test_subscriber_receives_early_and_late_events(publisher):
    early = store(publisher, list(range(12)))

    async def run():
        router = make_router("a")
        task = asyncio.create_task(follow(router.feed("a"), publisher.endpoint, publisher.replay_endpoint))

        async def wait_for(hashes):
            async with asyncio.timeout(30):
                while router.index.match(hashes)[0, 0] != len(hashes):
                    await asyncio.sleep(0.01)

        await wait_for(early)
        for first in (100, 200):
            await wait_for(store(publisher, list(range(first, first + 8))))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        router.check()

    asyncio.run(run())


def test_serve_on_cluster_without_ray_prints_extra_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kvtier.integrations.ray.launch", raising=False)
    assert main(["serve", "--cluster", "ray"]) == 1
    assert "pip install 'kvtier[ray]'" in capsys.readouterr().err


def test_fleet_option_without_cluster_is_an_error(capsys):
    assert main(["serve", "--replicas", "3"]) == 1
    assert "need --cluster ray" in capsys.readouterr().err
