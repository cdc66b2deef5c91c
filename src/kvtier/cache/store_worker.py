"""StoreWorker: reads and writes stores for a CacheController, on threads of its own.

Of each store reads and probes have one thread, since requests wait for them, and writes another: a store that hangs
holds up no other, and in a write not its own reads. Stores batch and parallelise by themselves, and end every call by
their deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from kvtier.cache.plan import Drop, Outcome, Presence, Probe, Purpose, Transfer, split_keys
from kvtier.layout import CacheGroup
from kvtier.storage import Label, Read, Results, Status, Store, Write
from kvtier.storage.store import DIGEST_BYTES
from kvtier.transfer import HostMemory

_SCAN_PAGE = 4096


class StoreWorker:
    """Moves blocks between the host slots of every group and stores. A block is one object per group."""

    def __init__(
        self, stores: Mapping[str, Store], groups: Sequence[CacheGroup], hosts: Sequence[HostMemory], namespace: bytes
    ) -> None:
        self.hosts = hosts
        self._stores = dict(stores)
        self._groups = groups
        self._namespaces = [_of_group(namespace, group.name, i) for i, group in enumerate(groups)]
        self._outcomes: list[Outcome] = []
        self._presences: list[Presence] = []
        self._num_open = 0
        self._changed = threading.Condition()
        self._queues: dict[tuple[str, str], queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for name, kind in itertools.product(stores, ("read", "write")):
            todo = self._queues[name, kind] = queue.SimpleQueue()
            thread = threading.Thread(target=_run, args=(todo,), name=f"kvtier-{name}-{kind}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- for the controller ----------------------------------------------------------------------------------------

    def move(self, transfer: Transfer) -> None:
        """Fetch or store blocks."""
        kind = "read" if transfer.purpose is Purpose.FETCH else "write"
        self._put(transfer.store, kind, lambda: self._move(transfer))

    def probe(self, probe: Probe) -> None:
        """Look which keys are there."""
        self._put(probe.store, "read", lambda: self._probe(probe))

    def drop(self, drop: Drop) -> None:
        """Forget blocks."""
        self._put(drop.store, "write", lambda: self._drop(drop))

    def take_outcomes(self) -> list[Outcome]:
        """Of transfers that are over."""
        with self._changed:
            taken, self._outcomes = self._outcomes, []
            return taken

    def take_presences(self) -> list[Presence]:
        """What was found to be there."""
        with self._changed:
            taken, self._presences = self._presences, []
            return taken

    @property
    def is_busy(self) -> bool:
        """Whether something is to come."""
        with self._changed:
            return bool(self._num_open or self._outcomes or self._presences)

    def has_news(self, timeout: float) -> bool:
        """Whether there is something to take; waits for it at most so long."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._outcomes or self._presences), timeout)

    def close(self) -> None:
        """Finish what was asked for, then close the stores."""
        for todo in self._queues.values():
            todo.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        for store in self._stores.values():
            store.close()

    # ---- on the threads --------------------------------------------------------------------------------------------

    def _put(self, store: str, kind: str, task: Callable[[], None]) -> None:
        todo = self._queues[store, kind]
        with self._changed:
            self._num_open += 1
        todo.put(task)

    def _tell(self, outcome: Outcome | None, presence: Presence | None, *, is_over: bool = True) -> None:
        with self._changed:
            self._num_open -= is_over
            if outcome is not None:
                self._outcomes.append(outcome)
            if presence is not None:
                self._presences.append(presence)
            self._changed.notify_all()

    def _move(self, transfer: Transfer) -> None:
        began = time.perf_counter()
        is_fetch, name = transfer.purpose is Purpose.FETCH, transfer.store
        slots = (transfer.targets if is_fetch else transfer.sources).tolist()
        keys = split_keys(transfer.keys)
        width = DIGEST_BYTES
        digests = [transfer.digests[at : at + width] for at in range(0, len(transfer.digests), width)]
        good, gone, num_bytes, reasons = np.ones(len(keys), np.bool_), np.zeros(len(keys), np.bool_), 0, set[str]()
        try:
            for number in range(len(self._groups)):
                results = self._of_group(self._stores[name], is_fetch, number, keys, digests, slots)
                good &= [outcome.ok for outcome in results]
                gone |= [outcome.status in (Status.MISSING, Status.CORRUPT) for outcome in results]
                reasons |= {outcome.reason for outcome in results if outcome.reason}
                num_bytes += results.nbytes
        except Exception as error:  # whatever a store raises is this transfer's failure, and not the thread's
            good[:] = False
            reasons.add(f"{type(error).__name__}: {error}")
        absent = b"".join(key for key, lost in zip(keys, gone.tolist(), strict=True) if lost)
        arrived = b"" if good.all() else good.astype(np.uint8).tobytes()
        reason = "; ".join(sorted(reasons)[:3])
        outcome = Outcome(transfer.id, bool(good.all()), num_bytes, time.perf_counter() - began, reason, arrived)
        self._tell(outcome, Presence(name, absent=absent) if absent else None)

    def _of_group(
        self, store: Store, is_fetch: bool, number: int, keys: list[bytes], digests: list[bytes], slots: list[int]
    ) -> Results:
        """The objects of one group."""
        host, name, namespace = self.hosts[number], self._groups[number].name, self._namespaces[number]
        memory = [host.block(slot).memoryview() for slot in slots]
        labels = [Label(namespace, digest) for digest in digests]
        mine = [_of_group(key, name, number) for key in keys]
        if is_fetch:
            return store.read_into([Read(*each) for each in zip(mine, labels, memory, strict=True)])
        return store.write([Write(*each) for each in zip(mine, labels, memory, strict=True)])

    def _probe(self, probe: Probe) -> None:
        store, keys = self._stores[probe.store], split_keys(probe.keys)
        found = np.ones(len(keys), np.bool_)
        try:
            if keys:
                for number, group in enumerate(self._groups):
                    found &= [
                        outcome.ok for outcome in store.contains([_of_group(k, group.name, number) for k in keys])
                    ]
            else:
                self._scan(probe)
        except Exception:  # a store that cannot be asked has nothing
            found[:] = False
        present = b"".join(itertools.compress(keys, found.tolist()))
        absent = b"".join(itertools.compress(keys, (~found).tolist()))
        self._tell(None, Presence(probe.store, present, absent, probe.id))

    def _scan(self, probe: Probe) -> None:
        """Tell page by page what a store has of this cache."""
        for keys in self._pages(self._stores[probe.store], self._namespaces[:1]):
            if keys:
                self._tell(None, Presence(probe.store, b"".join(keys)), is_over=False)

    def _drop(self, drop: Drop) -> None:
        store, keys = self._stores[drop.store], split_keys(drop.keys)
        try:
            if drop.keys:
                for number, group in enumerate(self._groups):
                    store.remove([_of_group(key, group.name, number) for key in keys])
            else:
                for page in list(self._pages(store, self._namespaces)):
                    store.remove(page)
        finally:
            self._tell(None, None)

    def _pages(self, store: Store, namespaces: Sequence[bytes]) -> Iterator[list[bytes]]:
        """What a store has of this cache, as far as it can tell."""
        cursor = ""
        while True:
            page = store.scan(cursor, _SCAN_PAGE)
            yield [each.key for each in page.objects if each.label.namespace in namespaces]
            cursor = page.cursor
            if page.reason or not cursor:
                return


def _run(todo: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := todo.get()) is not None:
        with contextlib.suppress(Exception):  # a drop that failed: what is left is right, and a probe finds it again
            task()


def _of_group(name: bytes, group: str, number: int) -> bytes:
    """The key or namespace of one group's object: the first group's is the block's own."""
    return name if not number else hashlib.sha256(name + group.encode()).digest()
