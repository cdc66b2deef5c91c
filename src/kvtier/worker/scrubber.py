"""Scrubber: verifies the blocks in host memory slowly in the background, because bits in memory flip over days.

    caller:  forget(slot) ──> write the slot ──> note(slot)
    thread:  compute the checksum of each new slot once, then verify the checksums of all slots in every round

A damaged block is reported in every round until its slot is written again. The cache treats the block as a miss.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from kvtier.transfer import HostMemory, block_checksums

BYTES_PER_SECOND = 64 << 20
"""Rate of the repeated verification. A round over 64 GiB takes 17 minutes and 1 % of a core (Xeon, 2026-11-15)."""


class Scrubber:
    """Keeps one checksum per host slot and cache group. A thread verifies the checksums without delaying transfers."""

    def __init__(self, hosts: Sequence[HostMemory], every_seconds: float = 0.5) -> None:
        self._hosts = hosts
        self._every = every_seconds
        self._lock = threading.Lock()  # protects _stamps, _new, _sums and _damaged
        self._reading = threading.Lock()  # held while host memory is read
        self._stamps: dict[int, int] = {}  # slot -> version of its contents, to discard checksums of old contents
        self._new: dict[int, None] = {}
        self._sums: dict[int, tuple[int, ...]] = {}  # the most recently verified slot is last
        self._damaged: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-scrub", daemon=True)
        self._thread.start()

    def forget(self, slots: Iterable[int]) -> None:
        """Stop verifying slots that are about to be written."""
        with self._lock:
            for slot in slots:
                self._stamps[slot] = self._stamps.get(slot, 0) + 1
                self._new.pop(slot, None)
                self._sums.pop(slot, None)
                self._damaged.discard(slot)

    def note(self, slots: Iterable[int]) -> None:
        """Start verifying slots that have been written."""
        with self._lock:
            self._new.update(dict.fromkeys(slots))

    def take_damaged(self) -> list[int]:
        """Return the slots that were found damaged since the last call and were not written afterwards."""
        if not self._damaged:  # avoids the lock, because this method is called several times per step
            return []
        with self._lock:
            taken, self._damaged = sorted(self._damaged), set()
            return taken

    def use(self, hosts: Sequence[HostMemory], num_slots: int) -> None:
        """Switch to new memory. Its first `num_slots` slots were copied from the old memory."""
        with self._reading, self._lock:
            self._hosts = hosts
            self._new = {slot: None for slot in self._new if slot < num_slots}
            self._sums = {slot: sums for slot, sums in self._sums.items() if slot < num_slots}

    def close(self) -> None:
        """Stop the thread, so that the memory can be freed. Idempotent."""
        self._closed.set()
        self._thread.join()

    # ---- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(0.0 if self._new else self._every):
            self._verify_some()

    def _verify_some(self) -> None:
        with self._reading:
            block_bytes = sum(host.group.block_bytes for host in self._hosts)
            limit = max(1, int(BYTES_PER_SECOND * max(self._every, 0.1)) // block_bytes)
            with self._lock:
                slots = list(itertools.islice(self._new or self._sums, limit))
                stamps = [self._stamps.get(slot, 0) for slot in slots]
            sums = [block_checksums(host, slots) for host in self._hosts] if slots else []
            with self._lock:  # _reading is still held, so that `use` cannot switch to smaller memory in between
                for slot, stamp in zip(slots, stamps, strict=True):
                    if self._stamps.get(slot, 0) == stamp:
                        self._compare(slot, tuple(of_group[slot] for of_group in sums))

    def _compare(self, slot: int, sums: tuple[int, ...]) -> None:
        self._new.pop(slot, None)
        known = self._sums[slot] = self._sums.pop(slot, sums)
        if known != sums:
            self._damaged.add(slot)
