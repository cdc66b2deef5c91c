"""Blocks in a Mooncake Store: memory of many machines, one master that knows what is where. Needs the extra `mooncake`.

Blocks are sent from where they are: over TCP from any memory, over RDMA from memory that was registered (`register`),
such as the host tier; what is not registered goes through memory that is. Objects of Mooncake cannot be changed, so one
that is to be replaced is removed first. The client cannot list names; the master's administration port can.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.store import MooncakeDistributedStore

from kvtier.storage.checksum import address_of
from kvtier.storage.remote.bucket import BucketError, Listing, Parts, Put, RequestSize, join
from kvtier.storage.workers import Scratch

# What the client answers where it does not count bytes.
_OK = 0
_TOO_SMALL = -600
_NO_ROOM = -200
_NOT_FOUND = -704
_GONE = (-703, _NOT_FOUND, -710, -712)  # not written to its end, not there, or its memory left the pool
_TCP = "tcp"


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Where the master is, and what this process adds."""

    master: str
    """host:port"""
    local_host: str = "127.0.0.1"
    """How others reach this machine."""
    metadata: str = "P2PHANDSHAKE"
    """How clients find each other: by hand-shake, or the URL of a metadata server."""
    protocol: str = _TCP
    """tcp or rdma"""
    device: str = ""
    """For rdma: the network devices, such as mlx5_0."""
    segment_bytes: int = 0
    """Memory this process lends to the pool; gone when it ends."""
    buffer_bytes: int = 64 << 20
    """The client's own memory for transfers."""
    admin_port: int = 0
    """The master's administration port (its --metrics_port), without which there is no inventory."""
    prefix: str = "kvtier-"


class MooncakeBucket:
    """Named objects in a Mooncake Store. A master that cannot be reached is a BucketError when this is made."""

    # One request moves its objects in parallel by itself: 32 of 1 MiB at 1,117 MiB/s in one, 799 in two halves at once,
    # 769 in four quarters (2026-11-15, TCP, loopback, 2 cores). So there is one thread unless more are asked for, and
    # what is put, which takes three calls of the master, goes at once.
    request_size = RequestSize(max_names=1024, max_put_bytes=64 << 20)

    def __init__(self, config: MooncakeConfig, timeout_s: float) -> None:
        self._config, self._prefix, self._timeout_s = config, config.prefix, timeout_s
        self._registered: dict[int, memoryview] = {}  # the views keep the memory from being given back
        self._lock = threading.Lock()  # of the dictionary
        self._changing = threading.Lock()  # nobody else waits while gigabytes are pinned
        _knock(config.master, timeout_s)
        self._client = MooncakeDistributedStore()
        code = self._client.setup(
            *(config.local_host, config.metadata, config.segment_bytes, config.buffer_bytes),
            *(config.protocol, config.device, config.master),
        )
        if code != _OK:
            raise BucketError(f"the client could not be set up, code {code}", is_transient=False)

    def register(self, memory: memoryview) -> None:
        """Let the network device read this memory where it is, from now on."""
        # Over TCP there is no such device: blocks are sent from any memory. And there, other than over RDMA, the client
        # lets whoever connects read and write what is registered.
        if self._config.protocol != _TCP:
            with self._changing:
                self._add(memory)

    def unregister(self, memory: memoryview) -> None:
        """From now on what is in this memory is copied before it is sent."""
        at = address_of(memory)
        with self._changing:
            with self._lock:
                view = self._registered.pop(at, None)
            if view is None:
                return
            code = self._client.unregister_buffer(at)
            if code != _OK:
                with self._lock:
                    self._registered[at] = view  # stays mapped: other memory at its address would be refused, or worse
                raise BucketError(f"{len(view)} bytes could not be unregistered, code {code}", is_transient=False)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there."""
        codes = self._client.batch_is_exist(self._full(names))
        self._check(codes, (0, 1))
        return [code == 1 for code in codes]

    def fetch(self, names: Sequence[str], rooms: Sequence[int], scratch: Scratch) -> list[memoryview | None]:
        """Their values, in the scratch memory; of one that does not fit as much as does."""
        full, room = self._full(names), self._take(scratch, sum(rooms))
        ends = [sum(rooms[: number + 1]) for number in range(len(rooms))]
        places = [room[end - nbytes : end] for end, nbytes in zip(ends, rooms, strict=True)]
        addresses = [address_of(place) for place in places]
        counts = self._client.batch_get_into(full, addresses, list(rooms))
        found: list[memoryview | None] = []
        for name, place, count in zip(full, places, counts, strict=True):
            if count == _TOO_SMALL:
                count = self._part(name, place)
            if count < 0 and count not in _GONE:
                raise BucketError(f"an object could not be read, code {count}")
            found.append(place[:count] if count >= 0 else None)
        return found

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:
        """The first bytes of their values."""
        full, room = self._full(names), self._take(scratch, nbytes * len(names))
        offsets = range(0, len(room), nbytes)
        zeros, sizes = [[0] for _ in full], [[nbytes] for _ in full]
        told = self._client.get_into_ranges([address_of(room)], [full], [[[at] for at in offsets]], [zeros], [sizes])
        heads: list[bytes | None] = []
        for name, at, (count,) in zip(full, offsets, told[0], strict=True):
            if count < 0 and count not in _GONE:
                count = self._part(name, room[at : at + nbytes])  # shorter than a head
            heads.append(bytes(room[at : at + count]) if count >= 0 else None)
        return heads

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        """Put those that are not there, or all."""
        if replace:
            self.delete(names)
        there = [False] * len(names) if replace else self.exists(names)
        left = [index for index, is_there in enumerate(there) if not is_there]
        done = [Put.EXISTS] * len(names)
        if left:
            wanted = values[:] if len(left) == len(values) else [values[index] for index in left]
            pieces = self._pieces(wanted, scratch)
            codes = self._client.batch_put_from_multi_buffers(
                self._full([names[index] for index in left]),
                [[address_of(part) for part in parts] for parts in pieces],
                [[len(part) for part in parts] for parts in pieces],
            )
            self._check(codes, (_OK, _NO_ROOM))
            for index, code in zip(left, codes, strict=True):
                done[index] = Put.STORED if code == _OK else Put.FULL
        return done

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Forget them, also while somebody reads: each read gives an object a lease, 10 s by default, for which the
        master would refuse. Who reads then may get the bytes of whatever comes into that memory."""
        codes = self._client.batch_remove(self._full(names), True)
        self._check(codes, (_OK, *_GONE))
        return [code == _OK for code in codes]

    def list_names(self, cursor: str, limit: int) -> Listing:
        """Names in their order; the master tells all of them every time."""
        if not self._config.admin_port:
            raise BucketError(
                "the client of Mooncake cannot list objects; give the master's administration port, admin=9003",
                is_transient=False,
            )
        url = f"http://{self._config.master.rpartition(':')[0]}:{self._config.admin_port}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_s) as answer:
                keys = answer.read().decode("utf-8", "replace").split()
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise BucketError(f"{url}: {error}") from error
        ours = re.compile(re.escape(self._prefix) + "[0-9a-f]{64}")
        names = sorted(key.removeprefix(self._prefix) for key in keys if ours.fullmatch(key))
        names = [name for name in names if name > cursor][: limit + 1]
        return Listing(tuple(names[:limit]), names[limit - 1] if len(names) > limit else "")

    def reset(self) -> None:
        """The client looks after its connections."""

    def close(self) -> None:
        """Leave the pool."""
        self._client.close()

    def _take(self, scratch: Scratch, nbytes: int) -> memoryview:
        """Scratch memory the client can use; ranges of objects are read into nothing else, over TCP neither."""
        room = scratch.take(nbytes)
        self._add(memoryview(room.obj))  # all of it: the same memory is taken in other lengths
        return room

    def _add(self, memory: memoryview) -> None:
        at = address_of(memory)
        with self._lock:
            if at in self._registered:
                return
        code = self._client.register_buffer(at, len(memory))
        if code != _OK:
            raise BucketError(f"{len(memory)} bytes could not be registered, code {code}", is_transient=False)
        with self._lock:
            self._registered[at] = memory

    def _full(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _part(self, name: str, place: memoryview) -> int:
        """The first bytes of an object, as many as there are and fit; their number, or a code below 0."""
        stored = self._client.get_size(name)
        count = min(stored, len(place))
        if count <= 0:
            return int(count)
        answer = self._client.get_into_ranges([address_of(place)], [[name]], [[[0]]], [[[0]]], [[[count]]])
        return int(answer[0][0][0])

    def _pieces(self, values: Sequence[Parts], scratch: Scratch) -> list[list[memoryview]]:
        """The parts of values where they are, or, if the network device cannot read them there, in scratch memory."""
        if self._config.protocol == _TCP:
            return [[part for part in parts if len(part)] for parts in values]
        others = [part for parts in values for part in parts if not self._is_registered(part)]
        room = self._take(scratch, sum(map(len, others)))
        pieces: list[list[memoryview]] = []
        for parts in values:
            pieces.append([])
            for part in parts:
                if len(part) and not self._is_registered(part):
                    place, room = room[: len(part)], room[len(part) :]
                    part = join([part], place)
                if len(part):
                    pieces[-1].append(part)
        return pieces

    def _is_registered(self, part: memoryview) -> bool:
        begin = address_of(part)
        with self._lock:
            return any(at <= begin and begin + len(part) <= at + len(m) for at, m in self._registered.items())

    def _check(self, codes: Sequence[int], expected: Sequence[int]) -> None:
        wrong = [code for code in codes if code not in expected]
        if wrong:
            raise BucketError(f"{len(wrong)} of {len(codes)} objects failed with code {wrong[0]}")


def _knock(master: str, timeout_s: float) -> None:
    """A BucketError unless somebody listens there: the client would try for a minute and a half."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        raise BucketError(f"no master at {master}: {error}") from error
