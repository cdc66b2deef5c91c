"""MooncakeBucket: blocks in a Mooncake Store, a pool of memory on many machines. Needs the extra `mooncake`.

Over TCP, blocks are sent from any memory without a copy. Over RDMA, only blocks in registered memory (`register`), such
as the host tier, are sent without a copy; other blocks are first copied to registered memory. Objects are immutable, so
an object is replaced by a removal and a put. The client cannot list names, so `list_names` uses the master's
administration port.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore

from kvtier.storage.checksum import address_of
from kvtier.storage.codec import Scratch
from kvtier.storage.remote.bucket import BucketError, Parts, Put, RequestSize, join

# Return codes of the client. Errors are negative, because some functions return a number of bytes on success.
_OK = 0
_TOO_SMALL = -600
_NO_ROOM = -200
_NOT_FOUND = -704
_GONE = (-703, _NOT_FOUND, -710, -712)  # the object is incomplete or missing, or its memory left the pool
_TCP = "tcp"


class MooncakeBucket:
    """Objects in a Mooncake Store. Raises BucketError if the master does not respond.

    master          host:port
    local_host      address at which other machines reach this machine
    metadata        P2PHANDSHAKE, or the URL of a metadata server through which clients find each other
    protocol        tcp or rdma
    device          for rdma: the network devices, such as mlx5_0
    segment_bytes   memory that this process lends to the pool while it runs
    buffer_bytes    the client's own memory for transfers
    admin_port      the master's administration port (its --metrics_port), needed by `list_names`
    """

    # The client moves the objects of one request in parallel, so parallel requests are not faster. 32 objects of 1 MiB
    # reach 1,117 MiB/s in one request, 799 MiB/s in two parallel requests and 769 MiB/s in four (2026-11-15, TCP,
    # loopback, 2 cores). The default is therefore one thread, and one put request per 64 MiB of a batch.
    request_size = RequestSize(max_names=1024, max_put_bytes=64 << 20)

    def __init__(
        self,
        master: str,
        *,
        timeout_s: float,
        local_host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = _TCP,
        device: str = "",
        segment_bytes: int = 0,
        buffer_bytes: int = 64 << 20,
        admin_port: int = 0,
        prefix: str = "kvtier-",
    ) -> None:
        self._prefix, self._timeout_s, self._is_tcp = prefix, timeout_s, protocol == _TCP
        self._admin_port = admin_port
        self._admin_url = f"http://{master.rpartition(':')[0]}:{admin_port}/get_all_keys"
        self._registered: dict[int, memoryview] = {}  # the views keep the memory alive
        self._lock = threading.Lock()  # protects `_registered`
        self._changing = threading.Lock()  # held while gigabytes are pinned; requests do not need this lock
        _check_reachable(master, timeout_s)
        self._client = MooncakeDistributedStore()
        code = self._client.setup(local_host, metadata, segment_bytes, buffer_bytes, protocol, device, master)
        if code != _OK:
            raise BucketError(f"the setup of the client failed with code {code}", is_transient=False)

    def register(self, memory: memoryview) -> None:
        # Over TCP, any peer could read and write registered memory, so only the memory of `_take` is registered.
        if not self._is_tcp:
            with self._changing:
                self._add(memory)

    def unregister(self, memory: memoryview) -> None:
        at = address_of(memory)
        with self._changing:
            with self._lock:
                view = self._registered.pop(at, None)
            if view is None:
                return
            code = self._client.unregister_buffer(at)
            if code != _OK:
                with self._lock:
                    self._registered[at] = view  # still registered; the view keeps the memory alive
                raise BucketError(f"unregistering {len(view)} bytes failed with code {code}", is_transient=False)

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._client.batch_is_exist(self._full(names))
        self._check(codes, (0, 1))
        return [code == 1 for code in codes]

    def fetch(self, names: Sequence[str], limits: Sequence[int], scratch: Scratch) -> list[memoryview | None]:
        full, memory = self._full(names), self._take(scratch, sum(limits))
        ends = [sum(limits[: number + 1]) for number in range(len(limits))]
        places = [memory[end - nbytes : end] for end, nbytes in zip(ends, limits, strict=True)]
        addresses = [address_of(place) for place in places]
        counts = self._client.batch_get_into(full, addresses, list(limits))
        values: list[memoryview | None] = []
        for name, place, count in zip(full, places, counts, strict=True):
            if count == _TOO_SMALL:
                count = self._part(name, place)
            if count < 0 and count not in _GONE:
                raise BucketError(f"reading an object failed with code {count}")
            values.append(place[:count] if count >= 0 else None)
        return values

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:
        full, memory = self._full(names), self._take(scratch, nbytes * len(names))
        offsets = range(0, len(memory), nbytes)
        zeros, sizes = [[0] for _ in full], [[nbytes] for _ in full]
        counts = self._client.get_into_ranges(
            [address_of(memory)], [full], [[[at] for at in offsets]], [zeros], [sizes]
        )
        heads: list[bytes | None] = []
        for name, at, (count,) in zip(full, offsets, counts[0], strict=True):
            if count < 0 and count not in _GONE:
                count = self._part(name, memory[at : at + nbytes])  # the object may be shorter than a head
            heads.append(bytes(memory[at : at + count]) if count >= 0 else None)
        return heads

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        if replace:
            self.delete(names)
        existing = [False] * len(names) if replace else self.exists(names)
        left = [index for index, exists in enumerate(existing) if not exists]
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
        """Delete objects by force. Without force, the master keeps recently read objects (by default for 10 s).

        A forced deletion has a drawback: a concurrent read may get the bytes of a new object in the same memory.
        """
        codes = self._client.batch_remove(self._full(names), True)
        self._check(codes, (_OK, *_GONE))
        return [code == _OK for code in codes]

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        """Return names in order. Every call fetches all names from the master."""
        if not self._admin_port:
            raise BucketError(
                "the Mooncake client cannot list objects; add the master's administration port to the URL of the "
                "store, for example admin=9003",
                is_transient=False,
            )
        try:
            with urllib.request.urlopen(self._admin_url, timeout=self._timeout_s) as response:
                keys = response.read().decode("utf-8", "replace").split()
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise BucketError(f"{self._admin_url}: {error}") from error
        ours = re.compile(re.escape(self._prefix) + "[0-9a-f]{64}")
        names = sorted(key.removeprefix(self._prefix) for key in keys if ours.fullmatch(key))
        names = [name for name in names if name > cursor][: limit + 1]
        return names[:limit], names[limit - 1] if len(names) > limit else ""

    def reset(self) -> None:
        """Do nothing, because the client manages its connections."""

    def close(self) -> None:
        self._client.close()

    def _take(self, scratch: Scratch, nbytes: int) -> memoryview:
        """Return registered scratch memory. Even over TCP, `get_into_ranges` needs registered memory."""
        memory = scratch.take(nbytes)
        self._add(memoryview(memory.obj))  # register all scratch memory, because the next take may be longer
        return memory

    def _add(self, memory: memoryview) -> None:
        at = address_of(memory)
        with self._lock:
            if at in self._registered:
                return
        code = self._client.register_buffer(at, len(memory))
        if code != _OK:
            raise BucketError(f"registering {len(memory)} bytes failed with code {code}", is_transient=False)
        with self._lock:
            self._registered[at] = memory

    def _full(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _part(self, name: str, place: memoryview) -> int:
        """Read the first bytes of an object, as many as fit into `place`. Return their number, or an error code."""
        stored = self._client.get_size(name)
        count = min(stored, len(place))
        if count <= 0:
            return int(count)
        counts = self._client.get_into_ranges([address_of(place)], [[name]], [[[0]]], [[[0]]], [[[count]]])
        return int(counts[0][0][0])

    def _pieces(self, values: Sequence[Parts], scratch: Scratch) -> list[list[memoryview]]:
        """Return the parts of values. For RDMA, parts in memory that is not registered are copied to scratch memory."""
        if self._is_tcp:
            return [[part for part in parts if len(part)] for parts in values]
        others = [part for parts in values for part in parts if not self._is_registered(part)]
        memory = self._take(scratch, sum(map(len, others)))
        pieces: list[list[memoryview]] = []
        for parts in values:
            pieces.append([])
            for part in parts:
                if len(part) and not self._is_registered(part):
                    place, memory = memory[: len(part)], memory[len(part) :]
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


def _check_reachable(master: str, timeout_s: float) -> None:
    """Raise BucketError if no server listens at this address. Without this check, the client retries for 90 seconds."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        raise BucketError(f"no master at {master}: {error}") from error
