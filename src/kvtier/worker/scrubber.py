"""Scrubber: looks, slowly and in the background, whether what lies in host memory is still what was put there.

    forget ──> somebody writes the slot ──> note ──thread──> summed ──thread, round after round──> the same, or damaged

Memory that is used for days does change by itself. A block that did is told of, in every round, and so is a miss.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from kvtier.transfer import HostMemory, block_checksums

BYTES_PER_SECOND = 64 << 20
"""64 GiB in a quarter of an hour, for 1 % of a core (CRC-32 at 7 GB/s; Xeon, 2026-11-15)."""


class Scrubber:
    """The checksums of host slots, over all groups, and the thread that compares. Never blocks whoever moves blocks."""

    def __init__(self, hosts: Sequence[HostMemory], every_seconds: float = 0.5) -> None:
        self._hosts = hosts
        self._every = every_seconds
        self._lock = threading.Lock()  # of what is known
        self._reading = threading.Lock()  # of the memory
        self._stamps: dict[int, int] = {}  # slot -> which of its contents it has; a reader that saw another is late
        self._new: dict[int, None] = {}
        self._sums: dict[int, tuple[int, ...]] = {}  # those looked at last at the end
        self._damaged: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-scrub", daemon=True)
        self._thread.start()

    def forget(self, slots: Iterable[int]) -> None:
        """These are about to be written, or nobody's any more."""
        with self._lock:
            for slot in slots:
                self._stamps[slot] = self._stamps.get(slot, 0) + 1
                self._new.pop(slot, None)
                self._sums.pop(slot, None)
                self._damaged.discard(slot)

    def note(self, slots: Iterable[int]) -> None:
        """These have been written, and stay."""
        with self._lock:
            self._new.update(dict.fromkeys(slots))

    def take_damaged(self) -> list[int]:
        """Slots whose block was found not to be what it was, and that were not written since."""
        if not self._damaged:  # asked several times a step
            return []
        with self._lock:
            taken, self._damaged = sorted(self._damaged), set()
            return taken

    def use(self, hosts: Sequence[HostMemory], num_slots: int) -> None:
        """Other memory from now on, with the same in its first slots."""
        with self._reading, self._lock:
            self._hosts = hosts
            self._new = {slot: None for slot in self._new if slot < num_slots}
            self._sums = {slot: sums for slot, sums in self._sums.items() if slot < num_slots}

    def close(self) -> None:
        """Look at nothing any more: the memory may be freed. Twice is fine."""
        self._closed.set()
        self._thread.join()

    # ---- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(0.0 if self._new else self._every):
            self._look()

    def _look(self) -> None:
        """Look at some blocks, new ones first."""
        with self._reading:
            block_bytes = sum(host.group.block_bytes for host in self._hosts)
            most = max(1, int(BYTES_PER_SECOND * max(self._every, 0.1)) // block_bytes)
            with self._lock:
                slots = list(itertools.islice(self._new or self._sums, most))
                stamps = [self._stamps.get(slot, 0) for slot in slots]
            found = [block_checksums(host, slots) for host in self._hosts] if slots else []
            with self._lock:  # still reading: other memory may have fewer slots
                for slot, stamp in zip(slots, stamps, strict=True):
                    if self._stamps.get(slot, 0) == stamp:
                        self._compare(slot, tuple(sums[slot] for sums in found))

    def _compare(self, slot: int, found: tuple[int, ...]) -> None:
        self._new.pop(slot, None)
        known = self._sums[slot] = self._sums.pop(slot, found)
        if known != found:
            self._damaged.add(slot)
