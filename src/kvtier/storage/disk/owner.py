"""SlotServer: the owner of a folder manages slots for other processes, which read and write the payloads themselves.

    other process                         owner                          files
      hold(keys)        ------------->    holds objects
                        <-------------    records
      reads payloads    ------------------------------------------->     slots
      release(places)   ------------->    releases objects

      reserve(record)   ------------->    reserves a slot,               table (blank records)
                        <-------------    evicts objects if necessary
      writes payload    ------------------------------------------->     slots
      commit(records)   ------------->    publishes                      table (records)

While an object is held, its slot is not reused. If a process ends, the kernel closes its connections. The owner then
releases the holds of the process and frees its reserved slots. A connection can also end while a thread of the process
is still writing to a slot. That thread has locked the bytes of the slot, and the owner frees the slot later (space.py).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvtier.errors import FormatError
from kvtier.storage.disk.catalog import Entry, SlotRef
from kvtier.storage.disk.files import FILE_MODE
from kvtier.storage.disk.sealing import pack_record, unpack_record
from kvtier.storage.disk.space import SlotAllocator
from kvtier.storage.disk.wire import SOCKET, VERSION, Values, receive, send, short_path, socket_stamp, split
from kvtier.storage.record import BLANK, RECORD_BYTES, Record, Seal
from kvtier.storage.store import KEY_BYTES

_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: process, user and group of the client
_SEALED = Seal(bytes(16))  # placeholder in the record of an object that the client encrypts after the reservation
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Temporary errors of `accept`, for example a lack of descriptors. Later calls can succeed."""
_RETRY_S = 0.1  # pause before the next `accept` after a temporary error


class SlotServer:
    """The socket of the owner. One thread accepts connections, and one thread per connection answers requests.

    The constructor creates a new socket in the folder. Clients of the previous owner start no more writes, because they
    check the socket before each write. The owner can then find the slots to which these clients are still writing.
    `start` begins to accept connections.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._sessions: list[_Session] = []
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._is_closing = threading.Event()
        self._stamp: list[int] = []
        os.register_at_fork(after_in_child=functools.partial(_abandon, weakref.ref(self)))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(folder) as path:
                new = f"{path}/{SOCKET}.{secrets.token_hex(4)}.new"
                listener.bind(new)
                os.chmod(new, FILE_MODE)
                listener.listen(1024)
                os.replace(new, f"{path}/{SOCKET}")
        except OSError:  # the filesystem has no sockets, so other processes cannot use the folder
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, SOCKET))
            return
        self._listener, self._stamp = listener, socket_stamp(folder)

    def start(self, slots: SlotAllocator, *, is_sealed: bool) -> None:
        if self._listener is not None:
            accept = functools.partial(self._accept, self._listener, slots, is_sealed)
            self._thread = threading.Thread(target=accept, name="kvtier-disk-owner", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """End all connections and wait for running requests. The caller must still hold the lock of the folder.

        Return False if a request does not end within `timeout_s`.
        """
        with self._lock:
            listener, self._listener = self._listener, None
        self._is_closing.set()
        if listener is not None:
            if socket_stamp(self._folder) == self._stamp:  # otherwise the folder was deleted or replaced
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, SOCKET))
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            if self._thread is not None:
                self._thread.join()
            listener.close()
        for session in self._sessions:
            session.end()
        give_up = time.monotonic() + timeout_s
        return all(session.join(max(0.0, give_up - time.monotonic())) for session in self._sessions)

    def abandon(self) -> None:
        """Close the sockets in a forked child. The parent still uses them."""
        listener, self._listener = self._listener, None
        for each in ([listener] if listener else []) + [session.connection for session in self._sessions]:
            with contextlib.suppress(OSError):
                os.close(each.detach())
        self._sessions = []

    def _accept(self, listener: socket.socket, slots: SlotAllocator, is_sealed: bool) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno not in _SHORTAGES or self._is_closing.wait(_RETRY_S):
                    return  # closed
                continue
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] not in (os.geteuid(), 0):
                connection.close()
                continue
            session = _Session(connection, slots, [VERSION, is_sealed, os.getpid(), *self._stamp])
            with self._lock:
                self._sessions = [each for each in self._sessions if each.is_running]
                if self._listener is None:
                    connection.close()
                    return
                self._sessions.append(session)
                session.start()


def _abandon(reference: weakref.ref[SlotServer]) -> None:
    server = reference()
    if server is not None:
        server.abandon()


class _Session:
    """One connection, with the holds and reserved slots of its client. A thread answers one request at a time."""

    def __init__(self, connection: socket.socket, slots: SlotAllocator, greeting: Values) -> None:
        self.connection, self._slots, self._greeting = connection, slots, greeting
        self._held: dict[SlotRef, list[Entry]] = {}
        self._discarded: set[SlotRef] = set()
        self._reserved: set[SlotRef] = set()
        self._thread = threading.Thread(target=self._run, name="kvtier-disk-session", daemon=True)
        self._methods: dict[str, Callable[[list[Any], bytes], tuple[Values, bytes]]] = {
            "contains": self._contains,
            "hold": self._hold,
            "quarantine": functools.partial(self._for_held, slots.quarantine),
            "forget": functools.partial(self._for_held, slots.forget),
            "sync_object": functools.partial(self._for_held, slots.sync_object),
            "list": self._list,
            "stats": lambda _, __: (list(slots.figures().items()), b""),
            "sequences": lambda values, _: ([slots.next_sequences(int(values[0])).start], b""),
            "reserve": self._reserve,
            "commit": self._commit,
            "give_back": self._give_back,
            "discard": self._discard,
            "wipe": self._wipe,
            "sync": self._sync,
            "limit": self._limit,
        }

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread. Return False if it does not end in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            send(self.connection, [None, *self._greeting])
            while True:
                values, data = receive(self.connection)
                self._answer(values, data)
        except (OSError, ValueError, KeyError, FormatError):
            pass  # the client has ended, or does not use this protocol
        finally:
            self.connection.close()
            self._clean_up()

    def _answer(self, values: list[Any], data: bytes) -> None:
        method, *rest = values
        if method == "release":
            self._release(_places(rest))
            return
        try:
            results, blob = self._methods[method](rest, data)
        except OSError as error:
            send(self.connection, [error.errno or errno.EIO, str(error)])
        else:
            send(self.connection, [None, *results], blob)

    def _clean_up(self) -> None:
        self._slots.release([entry for entries in self._held.values() for entry in entries])
        self._slots.give_back(self._reserved)
        with contextlib.suppress(OSError):  # a slot whose record cannot be blanked is not reused
            self._slots.wipe(self._discarded)

    # --- requests

    def _contains(self, _: list[Any], data: bytes) -> tuple[Values, bytes]:
        return (), bytes(self._slots.contains(split(data, KEY_BYTES)))

    def _hold(self, _: list[Any], data: bytes) -> tuple[Values, bytes]:
        entries = self._slots.hold(split(data, KEY_BYTES))
        sizes, records = [], []
        for entry in entries:
            record = BLANK if entry is None else pack_record(entry.record, self._slots.keys)
            if entry is not None and record == BLANK:
                self._slots.forget(entry)  # the encryption key of the object was deleted
                self._slots.release([entry])
            elif entry is not None:
                self._held.setdefault(entry.place, []).append(entry)
                records.append(record)
            sizes.append(0 if entry is None or record == BLANK else entry.slot_bytes)
        return sizes, b"".join(records)

    def _release(self, places: Iterable[SlotRef]) -> None:
        self._slots.release([self._held[place].pop() for place in places if self._held.get(place)])

    def _for_held(self, action: Callable[[Entry], None], values: list[Any], _: bytes) -> tuple[Values, bytes]:
        """Call `action` for objects that the client holds. The client releases the holds later."""
        for place in _places(values):
            entries = self._held.get(place)
            if entries:
                action(entries[-1])
        return (), b""

    def _list(self, values: list[Any], _: bytes) -> tuple[Values, bytes]:
        segment, slot, limit = map(int, values)
        records = self._slots.list_after(segment, slot, limit)
        return (), b"".join(pack_record(record, self._slots.keys) for record in records)

    def _reserve(self, values: list[Any], data: bytes) -> tuple[Values, bytes]:
        record, (is_sealed, sync) = Record.unpack(data), values
        place = self._slots.reserve(replace(record, seal=_SEALED) if is_sealed else record, sync=bool(sync))
        if not isinstance(place, SlotRef):
            return [place.status.value, place.reason], b""
        self._reserved.add(place)
        return [*place, self._slots.slot_bytes(place)], b""

    def _commit(self, values: list[Any], data: bytes) -> tuple[Values, bytes]:
        packed: dict[SlotRef, bytes] = {}
        records = []
        for each in split(data, RECORD_BYTES):
            record = unpack_record(each, self._slots.keys)
            if not isinstance(record, Record) or SlotRef(record.segment, record.slot) not in self._reserved:
                raise OSError(errno.EINVAL, "the owner cannot read the record, or the client has not reserved its slot")
            packed[SlotRef(record.segment, record.slot)] = each
            records.append(record)
        self._reserved -= packed.keys()
        self._slots.commit(packed, records, sync=bool(values[0]))
        return (), b""

    def _give_back(self, values: list[Any], _: bytes) -> tuple[Values, bytes]:
        places = self._reserved & set(_places(values))
        self._reserved -= places
        self._slots.give_back(places)
        return (), b""

    def _discard(self, _: list[Any], data: bytes) -> tuple[Values, bytes]:
        places = self._slots.discard(split(data, KEY_BYTES))
        self._discarded.update(place for place in places if place is not None)
        return places, b""

    def _wipe(self, values: list[Any], _: bytes) -> tuple[Values, bytes]:
        sync, *numbers = values
        places = self._discarded & set(_places(numbers))
        self._discarded -= places
        self._slots.wipe(places)
        if sync:
            self._slots.sync_blanks()
        return (), b""

    def _sync(self, _: list[Any], __: bytes) -> tuple[Values, bytes]:
        errors = self._slots.sync_all()
        if errors:
            raise errors[0]
        return (), b""

    def _limit(self, values: list[Any], _: bytes) -> tuple[Values, bytes]:
        self._slots.limit(int(values[0]))
        return (), b""


def _places(numbers: Sequence[int]) -> list[SlotRef]:
    return [SlotRef(int(segment), int(slot)) for segment, slot in zip(numbers[::2], numbers[1::2], strict=True)]
