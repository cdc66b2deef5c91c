"""Connection table: limits on open connections, in total and per client address. One event loop; no I/O of its own."""

from __future__ import annotations

import enum
import ipaddress
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.server.config import Limits

SURPLUS = 16
"""Connections beyond each limit that are accepted for /health only."""
# Descriptors that are not connections: the event loop, the listener, the engine's socket, log and model files (19 in an
# idle front end, 2026-11-16), workers' pipes, and connections that were closed in this iteration of the event loop.
_RESERVED_DESCRIPTORS = 80


class Closable(Protocol):
    """A connection as the table sees it."""

    def evict(self) -> None:
        """Close at once."""


class Place(enum.Enum):
    """Result of adding a connection."""

    NORMAL = enum.auto()
    HEALTH_ONLY = enum.auto()
    """Every connection is in use; this one may ask for /health."""
    REFUSED = enum.auto()


@dataclass(slots=True)
class _Client:
    """The connections of one address."""

    num: int = 0
    idle: dict[Closable, None] = field(default_factory=dict)
    """Without a complete request head, oldest first."""


class ConnectionTable:
    """Counts connections and chooses which one to close when a limit is reached.

        idle --request head complete--> busy --response complete--> idle

    A new connection at a limit replaces the oldest idle one. An attacker without a key cannot keep a connection busy,
    so idle connections never lock out a health check. Busy connections are not closed.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._clients: dict[str, _Client] = {}
        self._addresses: dict[Closable, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[Closable]:
        return iter(self._addresses)

    def add(self, connection: Closable, address: str) -> Place:
        """Add an idle connection. May evict another one."""
        place = self._make_room(address)
        if place is not Place.REFUSED:
            client = self._clients.setdefault(address, _Client())
            client.num += 1
            client.idle[connection] = None
            self._addresses[connection] = address
        return place

    def remove(self, connection: Closable) -> None:
        """Forget a closed connection. Has no effect for one that is not in the table."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        client = self._clients[address]
        client.num -= 1
        client.idle.pop(connection, None)
        if not client.num:
            del self._clients[address]

    def set_busy(self, connection: Closable) -> None:
        """Protect a connection from eviction: it has a complete request head."""
        if (address := self._addresses.get(connection)) is not None:
            self._clients[address].idle.pop(connection, None)

    def set_idle(self, connection: Closable) -> None:
        """Allow eviction, as the newest idle connection."""
        if (address := self._addresses.get(connection)) is not None:
            self._clients[address].idle[connection] = None

    def _make_room(self, address: str) -> Place:
        own = self._clients.get(address, _Client())
        excess = max(own.num - self._max_per_address, len(self) - self._max_connections)
        if excess < 0:
            return Place.NORMAL
        victims = own.idle
        if own.num < self._max_per_address:  # the total is reached: the largest holder of idle connections gives one
            victims = max((client.idle for client in self._clients.values()), key=len)
        if victims:
            victim = next(iter(victims))
            self.remove(victim)
            victim.evict()
            return Place.NORMAL if excess == 0 else Place.HEALTH_ONLY
        return Place.HEALTH_ONLY if excess < SURPLUS else Place.REFUSED


def make_table(limits: Limits) -> ConnectionTable:
    """Make the table for this process: at most as many connections as its file descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.connections
    if soft != resource.RLIM_INFINITY:
        most = min(most, max(SURPLUS, soft - _RESERVED_DESCRIPTORS - SURPLUS))
    # one address never has all of them
    return ConnectionTable(most, min(limits.connections_per_address, max(1, most * 3 // 4)))


def address_group(host: str) -> str:
    """Return the key under which connections are counted: the IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
