"""RouteTicket: the data of a request that KvtierRouter needs to choose a replica."""

from __future__ import annotations

import asyncio
import threading

from kvtier.router import RouteDecision, Router
from kvtier.router.placement import U64, as_hashes


class RouteTicket:
    """First argument of a call to a replica. A ticket connects the front end with the router, which has its own thread.

    The replica receives an empty ticket, because it does not need the data. For the router, the request runs until
    `finish`.
    """

    def __init__(self, hashes: U64 | None = None, num_tokens: int = 0) -> None:
        self.hashes = as_hashes([]) if hashes is None else hashes
        self.num_tokens = num_tokens
        self.avoid: frozenset[str] = frozenset()
        """Replicas that have already failed to run this request."""
        self.replica = ""
        """The replica that received the request in the current attempt; empty before a replica has received it."""
        self._lock = threading.Lock()
        self._place: tuple[asyncio.AbstractEventLoop, Router, RouteDecision] | None = None
        self._is_closed = False

    def __reduce__(self) -> tuple[type[RouteTicket], tuple[()]]:
        return RouteTicket, ()

    def choose(self, router: Router, among: frozenset[str]) -> str | None:
        """Choose a replica in `among` and drop the previous choice. Call it on the router's thread."""
        with self._lock:
            self._drop()
            if self._is_closed:
                return None
            others = frozenset(router.replicas) - among
            decision = router.route(self.hashes, self.num_tokens, without=others | self.avoid)
            if decision is None:  # every replica has already failed, so try all of them again
                decision = router.route(self.hashes, self.num_tokens, without=others)
            if decision is None:
                return None
            self._place = (asyncio.get_running_loop(), router, decision)
            return decision.replica

    def on_routed(self, router: Router, replica: str) -> None:
        """Record which replica received the request. Call it on the router's thread."""
        if (self._place is None or self._place[2].replica != replica) and replica in router.replicas:
            self.choose(router, frozenset({replica}))
        self.replica = replica

    def on_first_token(self) -> None:
        """Remove the prompt from the router's queue for the chosen replica."""
        with self._lock:
            if self._place is not None:
                loop, router, decision = self._place
                loop.call_soon_threadsafe(router.on_first_token, decision)

    def finish(self) -> None:
        """End the request in the router. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._place is not None:
                loop, router, decision = self._place
                loop.call_soon_threadsafe(router.on_finish, decision)
                self._place = None

    def _drop(self) -> None:
        if self._place is not None:
            _, router, decision = self._place
            router.on_finish(decision)
            self._place = None
