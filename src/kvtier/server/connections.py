"""Connection table: limits on open connections, in total and per client address. Not thread-safe."""

from __future__ import annotations

import enum
import ipaddress
import resource
from collections import Counter, defaultdict
from typing import Any, Generic, TypeVar

from kvtier.server.config import Limits

Connection = TypeVar("Connection")
SURPLUS = 16
"""Number of additional connections above each limit. They may request only probes such as /health."""
# File descriptors reserved for sockets of workers, connections that are being closed, the event loop, the listener, the
# engine's socket, logs and model files. An idle front end uses 19 (2026-11-16).
_RESERVED_DESCRIPTORS = 80


class Place(enum.Enum):
    NORMAL = enum.auto()
    HEALTH_ONLY = enum.auto()
    """The connection is above a limit. It may request only probes such as /health."""
    REFUSED = enum.auto()


class ConnectionTable(Generic[Connection]):
    """Counts connections, and selects one to close when a limit is reached.

        idle --request head complete--> busy --response complete--> idle

    If an address is at its limit, its new connections replace its longest-idle connections. At the total limit, a new
    connection replaces the longest-idle connection of the address that has the most idle connections. Busy connections
    are not closed. An attacker without a key has only idle connections, because requests without a key are answered at
    once. New connections, such as those of health checks, can therefore replace these connections.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self.addresses: dict[Connection, str] = {}
        self._num: Counter[str] = Counter()
        self._idle: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        """Idle connections by address, in the order in which they became idle."""

    def add(self, connection: Connection, address: str) -> tuple[Place, Connection | None]:
        """Add a connection as idle unless its place is REFUSED. Return the place and a connection to close, if any."""
        place, victim = self._make_room(address)
        if place is not Place.REFUSED:
            self._num[address] += 1
            self._idle[address][connection] = None
            self.addresses[connection] = address
        return place, victim

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. No effect if it is not in the table."""
        address = self.addresses.pop(connection, None)
        if address is None:
            return
        self._num[address] -= 1
        self._idle[address].pop(connection, None)
        if not self._num[address]:
            del self._num[address], self._idle[address]

    def set_busy(self, connection: Connection) -> None:
        """Protect a connection from eviction, because its request head is complete."""
        if (address := self.addresses.get(connection)) is not None:
            self._idle[address].pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Allow eviction of a connection. Other idle connections of the same address are evicted first."""
        if (address := self.addresses.get(connection)) is not None:
            self._idle[address][connection] = None

    def _make_room(self, address: str) -> tuple[Place, Connection | None]:
        num = self._num[address]
        excess = max(num - self._max_per_address, len(self.addresses) - self._max_connections)
        if excess < 0:
            return Place.NORMAL, None
        idle = self._idle.get(address, {})
        if num < self._max_per_address:  # at the total limit, evict from the address with the most idle connections
            idle = max(self._idle.values(), key=len)
        if idle:
            victim = next(iter(idle))
            self.remove(victim)
            return (Place.NORMAL if excess == 0 else Place.HEALTH_ONLY), victim
        return (Place.HEALTH_ONLY if excess < SURPLUS else Place.REFUSED), None


def make_table(limits: Limits) -> ConnectionTable[Any]:
    """Make a table whose limits respect this process's limit on file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.connections
    if soft != resource.RLIM_INFINITY:
        most = min(most, max(SURPLUS, soft - _RESERVED_DESCRIPTORS - SURPLUS))
    # A single address must not use all connections.
    return ConnectionTable(most, min(limits.connections_per_address, max(1, most * 3 // 4)))


def address_group(host: str) -> str:
    """Return the name under which connections are counted: the IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
