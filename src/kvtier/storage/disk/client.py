"""SlotClient: uses the slots of a folder that another process owns (owner.py).

A client is connected to one owner. If the connection ends, `release`, `give_back` and `sync_all` do nothing, because
owners release and flush everything themselves. All other requests raise ConnectionError, and the caller continues with
the next owner (participant.py). A thread of the client may then be about to write to a slot that an owner has already
given to another process. Locks prevent such a write:

    A client that writes to a slot:
        1. locks the slot,
        2. raises ConnectionError if the connection has ended or if the owner's socket in the folder has changed,
        3. writes the payload and unlocks the slot.

    An owner that frees the slots of a client:
        1. ends the connection or, if the client belongs to the previous owner, creates a new socket,
        2. frees the slots that are not locked, and later the locked slots.

The lock is a byte-range lock of an open file. The kernel removes it if the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtier.errors import FormatError, StoreError
from kvtier.storage.disk.catalog import Entry, SlotRef
from kvtier.storage.disk.files import Files
from kvtier.storage.disk.keys import TenantKeys
from kvtier.storage.disk.sealing import unpack_record
from kvtier.storage.disk.segment import slots_name
from kvtier.storage.disk.wire import SOCKET, VERSION, Values, receive, send, short_path, socket_stamp, split
from kvtier.storage.record import RECORD_BYTES, Record
from kvtier.storage.store import ObjectResult, ObjectStatus


class SlotClient:
    """The counterpart of SlotAllocator in a process that does not own the folder. Thread-safe.

    Lookups and writes use separate connections, so that a lookup does not wait while the owner makes room for a write.
    Requests for held objects use the connection for lookups, so a lookup may wait for `sync_object`.
    """

    def __init__(
        self, folder: str, files: Files, keys: TenantKeys | None, *, max_bytes: int, direct: bool, timeout_s: float
    ) -> None:
        """Connect to the owner. Raise OSError if the owner does not reply.

        Raise StoreError if the protocol versions differ, or if only one of the processes has a secret.
        """
        self._folder, self._files, self.keys, self._direct = folder, files, keys, direct
        self._slot_bytes: dict[int, int] = {}
        self.is_lost = False
        self._reads = self._writes = _Connection(folder, timeout_s)
        try:
            self._writes = _Connection(folder, timeout_s)
            os.register_at_fork(after_in_child=functools.partial(_abandon, weakref.ref(self)))
            version, is_sealed, self.owner, *self._stamp = self._reads.greeting
            if version != VERSION or is_sealed != (keys is not None):
                raise StoreError(
                    f"process {self.owner} has opened {folder!r} {'with' if is_sealed else 'without'} a secret and "
                    f"with protocol {version}, but this process has {'no' if keys is None else 'a'} secret and "
                    f"protocol {VERSION}; use the same settings and the same version of kvtier"
                )
            if self._writes.greeting != self._reads.greeting:
                raise ConnectionResetError(f"the owner of {folder!r} changed while this process connected")
            self._call(self._writes, ["limit", max_bytes])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections. The owner then releases the holds and slots of this process."""
        self.is_lost = True
        for connection in (self._reads, self._writes):
            connection.close()

    def abandon(self) -> None:
        """Close the connections in a forked child. The parent still uses them."""
        self.is_lost = True
        for connection in (self._reads, self._writes):
            connection.abandon()

    # --- lookups

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(byte) for byte in self._call(self._reads, ["contains"], b"".join(keys))[1]]

    def hold(self, keys: Sequence[bytes]) -> list[Entry | None]:
        sizes, data = self._call(self._reads, ["hold"], b"".join(keys))
        records = iter(split(data, RECORD_BYTES))
        return [self._entry(next(records), size) if size else None for size in sizes]

    def _entry(self, data: bytes, slot_bytes: int) -> Entry | None:
        record = self._record(data)
        if record is None:
            return None  # cannot be decrypted; the hold of the object ends with the connection
        self._slot_bytes[record.segment] = slot_bytes
        return Entry(record, slot_bytes)

    def _record(self, data: bytes) -> Record | None:
        try:
            record = unpack_record(data, self.keys)
        except FormatError:
            return None
        return record if isinstance(record, Record) else None

    def release(self, entries: Iterable[Entry]) -> None:
        with contextlib.suppress(ConnectionError):  # the end of the connection releases everything
            self._call(self._reads, ["release", *_numbers(entry.place for entry in entries)], is_answered=False)

    def quarantine(self, entry: Entry) -> None:
        self._call(self._reads, ["quarantine", *entry.place])

    def forget(self, entry: Entry) -> None:
        self._call(self._reads, ["forget", *entry.place])

    def sync_object(self, entry: Entry) -> None:
        self._call(self._reads, ["sync_object", *entry.place])

    def list_after(self, segment: int, slot: int, limit: int) -> list[Record]:
        _, data = self._call(self._reads, ["list", segment, slot, limit])
        records = [self._record(each) for each in split(data, RECORD_BYTES)]
        return [record for record in records if record is not None]

    def figures(self) -> dict[str, int]:
        return dict(self._call(self._reads, ["stats"])[0])

    # --- changes

    def next_sequences(self, count: int) -> range:
        first = int(self._call(self._writes, ["sequences", count])[0][0])
        return range(first, first + count)

    def reserve(self, record: Record, *, sync: bool) -> SlotRef | ObjectResult:
        values, _ = self._call(self._writes, ["reserve", record.seal is not None, sync], record.pack())
        if isinstance(values[0], str):
            return ObjectResult(ObjectStatus(values[0]), reason=values[1])
        segment, slot, self._slot_bytes[segment] = values
        return SlotRef(segment, slot)

    def commit(self, packed: Mapping[SlotRef, bytes], records: Sequence[Record], *, sync: bool) -> None:
        data = b"".join(packed[SlotRef(record.segment, record.slot)] for record in records)
        self._call(self._writes, ["commit", sync], data)

    def give_back(self, places: Iterable[SlotRef]) -> None:
        with contextlib.suppress(ConnectionError):  # the end of the connection gives everything back
            self._call(self._writes, ["give_back", *_numbers(places)])

    def discard(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        values, _ = self._call(self._writes, ["discard"], b"".join(keys))
        return [SlotRef(*place) if place else None for place in values]

    def wipe(self, places: Iterable[SlotRef]) -> None:
        self._call(self._writes, ["wipe", False, *_numbers(places)])

    def sync_blanks(self) -> None:
        self._call(self._writes, ["wipe", True])

    def sync_all(self) -> list[OSError]:
        try:
            self._call(self._writes, ["sync"])
        except OSError as error:
            return [] if isinstance(error, ConnectionError) else [error]  # owners flush everything themselves
        return []

    # --- payloads

    def is_direct(self, _: SlotRef | None = None) -> bool:
        return self._direct

    def read_slot(self, place: SlotRef, buffer: memoryview) -> int:
        def read(descriptor: int, offset: int) -> int:
            return self._files.read(descriptor, buffer, offset)

        return self._transfer(place, read)

    def write_slot(self, place: SlotRef, buffers: Sequence[memoryview]) -> None:
        def write(descriptor: int, offset: int) -> int:
            self._files.lock(descriptor, offset, self._slot_bytes[place.segment])
            self.check_owner()
            self._files.write(descriptor, buffers, offset)
            return 0

        self._transfer(place, write)

    def _transfer(self, place: SlotRef, operation: Any) -> int:
        """Open the slots file for one transfer. If the file stayed open, deleting it would not free its space."""
        path = os.path.join(self._folder, slots_name(place.segment))
        while True:
            is_direct = self._direct
            try:
                descriptor = self._files.open(path, direct=is_direct)
                try:
                    count: int = operation(descriptor, place.slot * self._slot_bytes[place.segment])
                    return count
                finally:
                    self._files.close(descriptor)
            except FileNotFoundError:
                self.check_owner()  # the next owner may have deleted the segment
                raise
            except OSError as error:
                if not is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct = False  # the filesystem has no direct I/O

    def check_owner(self) -> None:
        """Raise ConnectionError if the connection has ended or the owner has changed."""
        if self.is_lost or socket_stamp(self._folder) != self._stamp:
            self._end()  # even if only the socket was deleted, because all later checks would fail too
            raise ConnectionResetError(f"the connection to process {self.owner} has ended")

    def _call(
        self, connection: _Connection, values: Values, data: bytes = b"", *, is_answered: bool = True
    ) -> tuple[list[Any], bytes]:
        try:
            return connection.call(values, data, is_answered=is_answered)
        except ConnectionError:
            self._end()
            raise

    def _end(self) -> None:
        self.is_lost = True
        for each in (self._reads, self._writes):
            each.end()


class _Connection:
    """A connection to the owner, with one request at a time."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._is_ended = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            with short_path(folder) as path:
                self._socket.connect(f"{path}/{SOCKET}")
            self.greeting = receive(self._socket)[0][1:]
        except (OSError, ValueError, FormatError):
            self._socket.close()
            raise

    def call(self, values: Values, data: bytes, *, is_answered: bool) -> tuple[list[Any], bytes]:
        """Send a request and return the reply.

        Raise ConnectionError if the connection ended or the owner did not reply in time. Raise another OSError if the
        owner reports an I/O error.
        """
        with self._lock:
            if self._is_ended:
                raise ConnectionResetError("the connection to the owner of the folder has ended")
            try:
                send(self._socket, values, data)
                if not is_answered:
                    return [], b""
                (error, *results), blob = receive(self._socket)
            except (OSError, ValueError, FormatError) as reason:
                raise ConnectionResetError(f"the owner of the folder does not answer: {reason}") from reason
        if error is not None:
            raise OSError(error, results[0])
        return results, blob

    def end(self) -> None:
        """End the connection. A thread that is waiting for a reply gets a ConnectionError."""
        self._is_ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        with self._lock:
            self._socket.close()

    def abandon(self) -> None:
        self._is_ended = True
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


def _abandon(reference: weakref.ref[SlotClient]) -> None:
    client = reference()
    if client is not None:
        client.abandon()


def _numbers(places: Iterable[SlotRef]) -> list[int]:
    return [number for place in places for number in place]
