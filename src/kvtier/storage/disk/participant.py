"""Participant: makes a store the owner of its folder, or a client of the process that owns the folder.

    start  --the folder is unlocked: lock it-----------> owner (SlotAllocator and SlotServer)
    start  --the folder is locked: connect to its owner> client (SlotClient)
    client --connection lost---------------------------> start, at the next call
    owner  --close() or end of the process-------------> the folder is unlocked

The first process that opens a folder owns it. When the owner has ended, the next process that makes a call takes over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtier.errors import StoreError, StoreInUseError
from kvtier.storage.disk.client import SlotClient
from kvtier.storage.disk.owner import SlotServer
from kvtier.storage.disk.recovery import FolderLock
from kvtier.storage.disk.space import SlotAllocator

_POLL_S = 0.005  # pause between attempts to lock the folder or to connect to its owner
_MAX_SILENCE_S = 2.0
"""Longest wait of `open` for the socket of a locked folder. An owner creates its socket directly after it has locked
the folder. No socket accepts connections if the owner is closing the store, is on another machine, or runs an earlier
kvtier. Some filesystems do not support sockets."""


class Participant:
    """Owns a folder, or uses slots that the folder's owner manages. Thread-safe.

    `own` opens the folder after this process has locked it. `connect` connects to the owner in another process.
    """

    def __init__(
        self, folder: str, own: Callable[[], SlotAllocator], connect: Callable[[], SlotClient], *, is_sealed: bool
    ) -> None:
        self._folder, self._own, self._connect, self._is_sealed = folder, own, connect, is_sealed
        self._lock = threading.Lock()
        self._folder_lock: FolderLock | None = None
        self._server: SlotServer | None = None
        self.client: SlotClient | None = None
        """The connection to the owner, if another process owns the folder. The connection may be lost."""
        self.owned: SlotAllocator | None = None
        """The slots, if this process owns the folder. The process stays the owner until the store is closed."""

    def open(self) -> None:
        """Become the owner of the folder or connect to its owner. Raise StoreError if both fail."""
        try:
            self.slots()
        except OSError as error:
            raise StoreError(f"cannot open the store in {self._folder!r}: {error}") from error

    def slots(self, patience_s: float = _MAX_SILENCE_S) -> SlotAllocator | SlotClient:
        """Return the slots. Connect to the owner or take over the folder, if necessary.

        Raise StoreError if the folder cannot be opened, or if it is locked but no socket accepts connections within
        `patience_s`. Raise OSError for other errors, for example if the owner accepts a connection but does not reply.
        """
        if self.owned is not None:
            return self.owned
        with self._lock:
            if self.owned is not None:
                return self.owned
            if self.client is not None and not self.client.is_lost:
                return self.client
            if self.client is not None:
                self.client.close()
                self.client = None
            return self._join(patience_s)

    def _join(self, patience_s: float) -> SlotAllocator | SlotClient:
        give_up = time.monotonic() + patience_s
        while True:
            try:
                self._folder_lock = FolderLock(self._folder)
            except StoreInUseError as in_use:
                try:
                    self.client = self._connect()
                    return self.client
                except (ConnectionError, FileNotFoundError):  # the owner is starting or ending
                    if time.monotonic() > give_up:
                        raise in_use from None
            else:
                return self._start_owning()
            time.sleep(_POLL_S)

    def _start_owning(self) -> SlotAllocator:
        self._server = SlotServer(self._folder)
        try:
            owned = self._own()
        except BaseException:
            self._server.close(0.0)
            self.unlock()
            raise
        self._server.start(owned, is_sealed=self._is_sealed)
        self.owned = owned
        return owned

    def leave(self, timeout_s: float) -> bool:
        """End the connections of this owner or client. Return False if a request to the owner does not end in time."""
        if self._server is not None:
            return self._server.close(timeout_s)
        if self.client is not None:
            self.client.close()
        return True

    def unlock(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.release()
            self._folder_lock = None
