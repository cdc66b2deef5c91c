"""KvtierRouter: plugs kvtier.router into the request router interface of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvtier.errors import RangeError
from kvtier.integrations.ray.subscriber import follow
from kvtier.integrations.ray.ticket import RouteTicket
from kvtier.router import ReplicaCosts, Router, RouterConfig, median_costs

_log = logging.getLogger("ray.serve")


class KvtierRouter(RequestRouter):
    """Sends each request to the replica that Router.route chooses. One instance per front end.

    Ray Serve calls all methods on one event loop. A request without a RouteTicket goes to the shortest queue.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Create the router. `settings` are the fields of RouterConfig."""
        self._router = Router(RouterConfig(**settings))
        self._following: dict[str, asyncio.Task[None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        known = {replica.replica_id.to_full_id_str(): replica for replica in replicas}
        for name in [name for name in self._router.replicas if name not in known]:
            self._remove(name)
        for name, replica in known.items():
            if name not in self._router.replicas:
                self._add(name, replica)
        costs = [ReplicaCosts(**replica.routing_stats) for replica in replicas if replica.routing_stats]
        if costs:
            # All replicas get the median, because a new replica has no measurements of its own.
            typical = median_costs(costs)
            for name in self._router.replicas:
                self._router.set_costs(name, typical)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if (name := replica_id.to_full_id_str()) in self._router.replicas:
            self._remove(name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        ticket = _ticket(pending_request)
        name = ticket.choose(self._router, frozenset(candidates)) if ticket is not None else None
        if name is None:
            return [list(candidate_replicas)]
        chosen = candidates.pop(name)
        return [[chosen], [*candidates.values()]]  # Ray tries the others if the chosen replica accepts no requests

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (ticket := _ticket(pending_request)) is not None:
            ticket.on_routed(self._router, replica_id.to_full_id_str())

    def _add(self, name: str, replica: RunningReplica) -> None:
        try:
            self._router.add(name)
        except RangeError as error:
            _log.warning("the router ignores replica %s: %s", name, error)
            return
        addresses = replica.replica_metadata
        if addresses.get("events"):
            work = follow(self._router.feed(name), addresses["events"], addresses.get("replay", ""))
            self._following[name] = asyncio.get_running_loop().create_task(work)

    def _remove(self, name: str) -> None:
        self._router.remove(name)
        if (task := self._following.pop(name, None)) is not None:
            task.cancel()


def _ticket(pending_request: PendingRequest | None) -> RouteTicket | None:
    args: Sequence[Any] = pending_request.args if pending_request is not None else ()
    return args[0] if args and isinstance(args[0], RouteTicket) else None
