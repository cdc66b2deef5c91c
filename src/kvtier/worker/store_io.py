"""StoreWorker: reads and writes stores on its own threads, for a CacheController.

Each store has one thread for reads and probes (lookups), and one for writes and drops. Inference requests wait only for
reads and probes. A slow store does not delay other stores, and a slow write does not delay reads. The stores apply
their own timeouts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvtier.errors import StoreError
from kvtier.layout import CacheGroup
from kvtier.messages import KEY_BYTES, Drop, Probe, Route, StoreLookup, TransferRequest, TransferResult, split_keys
from kvtier.storage import Label, ObjectStatus, Read, Results, ShardStores, Store, UsesMemory, Write, digest_tokens
from kvtier.storage.audit import pages
from kvtier.storage.cascade import for_each
from kvtier.transfer import HostMemory
from kvtier.worker.sharding import Bytes, ObjectPart, Sharding, parts_of

_SCAN_PAGE = 4096  # maximum number of objects per page of a listing
_GATHER_BYTES = 16 << 20
"""Maximum bytes of non-contiguous parts that are gathered for one call to a store. A larger block has its own call.

malloc can reuse freed buffers of this size for the next call.
"""


class StoreWorker:
    """Moves blocks between host slots and stores. A block is stored as one object per part (see sharding.py)."""

    def __init__(
        self,
        stores: Mapping[str, Store | ShardStores],
        groups: Sequence[CacheGroup],
        hosts: Sequence[HostMemory],
        namespace: bytes,
        sharding: Sharding,
        secret: bytes = b"",
    ) -> None:
        self.hosts = hosts
        self._stores = dict(stores)
        self._users = {name: store for name, store in stores.items() if isinstance(store, UsesMemory)}
        self._parts = parts_of(groups, sharding)
        self.namespace, self._secret = namespace, secret
        self._results: list[TransferResult] = []
        self._lookups: list[StoreLookup] = []
        self._num_open = 0
        self._changed = threading.Condition()
        self._queues: dict[tuple[str, str], queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for name, kind in itertools.product(stores, ("read", "write")):
            todo = self._queues[name, kind] = queue.SimpleQueue()
            thread = threading.Thread(target=_run, args=(todo,), name=f"kvtier-{name}-{kind}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._register()

    # ---- for the controller ----------------------------------------------------------------------------------------

    def move(self, transfer: TransferRequest) -> None:
        kind = "read" if transfer.route is Route.STORE_TO_HOST else "write"
        self._put(transfer.store, kind, lambda: self._move(transfer))

    def probe(self, probe: Probe) -> None:
        self._put(probe.store, "read", lambda: self._probe(probe))

    def drop(self, drop: Drop) -> None:
        self._put(drop.store, "write", lambda: self._drop(drop))

    def use(self, hosts: Sequence[HostMemory]) -> None:
        """Switch to other host memory and unregister the old memory from all stores. No transfer may be in flight."""
        done = threading.Semaphore(0)

        def unregister(user: UsesMemory) -> None:
            try:
                _for_each_host(user.unregister, self.hosts)
            finally:
                done.release()

        for name, user in self._users.items():  # through the queue, where the earlier registration may still wait
            self._queues[name, "write"].put(functools.partial(unregister, user))
        for _ in self._users:
            done.acquire()
        self.hosts = hosts
        self._register()

    def take(self) -> tuple[list[TransferResult], list[StoreLookup]]:
        with self._changed:
            taken = self._results, self._lookups
            self._results, self._lookups = [], []
            return taken

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._num_open or self._results or self._lookups)

    def wait(self, timeout: float) -> bool:
        """Wait until there are results to take. Return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._results or self._lookups), timeout)

    def close(self) -> None:
        for todo in self._queues.values():
            todo.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        for user in self._users.values():
            _for_each_host(user.unregister, self.hosts)
        self._users.clear()
        for_each([store.close for store in self._stores.values()])

    # ---- on the threads --------------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Register the host memory with each store. This runs on the write threads, because pinning may take long."""
        for name, user in self._users.items():
            self._queues[name, "write"].put(functools.partial(_for_each_host, user.register, self.hosts))

    def _put(self, store: str, kind: str, task: Callable[[], None]) -> None:
        todo = self._queues[store, kind]
        with self._changed:
            self._num_open += 1
        todo.put(task)

    def _report(self, result: TransferResult | None, lookup: StoreLookup | None, *, is_done: bool = True) -> None:
        with self._changed:
            self._num_open -= is_done
            if result is not None:
                self._results.append(result)
            if lookup is not None:
                self._lookups.append(lookup)
            self._changed.notify_all()

    def _by_store(self, name: str) -> list[tuple[Store, list[ObjectPart]]]:
        """Return the stores of a tier, each with its parts. A tier has either a single store or one store per shard."""
        tier = self._stores[name]
        if not isinstance(tier, ShardStores):
            return [(tier, list(self._parts))]
        return [(store, [part for part in self._parts if tier.of(part.shard) is store]) for store in tier.all]

    def _move(self, transfer: TransferRequest) -> None:
        began = time.perf_counter()
        is_fetch, count = transfer.route is Route.STORE_TO_HOST, transfer.num_blocks
        good, gone, num_bytes, reasons = np.ones(count, np.bool_), np.zeros(count, np.bool_), 0, set[str]()
        try:
            for store, parts in self._by_store(transfer.store):
                mine = [part for part in parts if is_fetch or part.is_written]
                for some in _batches(mine, count):
                    results = self._exchange(store, mine, transfer, some)
                    good[some] &= _by_block([result.ok for result in results], mine).all(axis=0)
                    lost = [result.status in (ObjectStatus.MISSING, ObjectStatus.CORRUPT) for result in results]
                    gone[some] |= _by_block(lost, mine).any(axis=0)
                    reasons |= {result.reason for result in results if result.reason}
                    num_bytes += results.nbytes
        except Exception as error:  # an error in a store fails this transfer, not the thread
            good[:] = False
            reasons.add(f"{type(error).__name__}: {error}")
        absent = b"".join(itertools.compress(split_keys(transfer.keys), gone.tolist()))
        arrived = b"" if good.all() else good.astype(np.uint8).tobytes()
        reason = "; ".join(sorted(reasons)[:3])
        result = TransferResult(transfer.id, bool(good.all()), num_bytes, time.perf_counter() - began, reason, arrived)
        self._report(result, StoreLookup(transfer.store, absent=absent) if absent else None)

    def _exchange(self, store: Store, parts: Sequence[ObjectPart], transfer: TransferRequest, some: slice) -> Results:
        """Read or write some of a transfer's blocks in one call. Return the results, ordered by part, then by block."""
        is_fetch = transfer.route is Route.STORE_TO_HOST
        slots = (transfer.targets if is_fetch else transfer.sources)[some].tolist()
        block_keys = transfer.keys[some.start * KEY_BYTES : some.stop * KEY_BYTES]
        # The label contains a digest of the block's key, which identifies all tokens up to the end of the block.
        digests = [digest_tokens(key, self._secret) for key in split_keys(block_keys)]
        keys = [key for part in parts for key in part.key_list(block_keys)]
        namespaces = [part.namespace(self.namespace) for part in parts]
        labels = [Label(namespace, digest) for namespace in namespaces for digest in digests]
        gathered = {part: np.empty((len(slots), part.nbytes), np.uint8) for part in parts if part.span is None}
        memory = [view for part in parts for view in self._memory(part, slots, gathered.get(part))]
        # The outer loops are over blocks, because a block fits into the CPU cache. With outer loops over parts,
        # gathering would take twice as long.
        if not is_fetch:
            for at, slot in enumerate(slots):
                for part, objects in gathered.items():
                    part.gather(self.hosts[part.group].block(slot).numpy(), objects[at])
            fields = zip(keys, labels, memory, strict=True)
            return store.write([Write(*each, transfer.tenant) for each in fields])
        results = store.read_into([Read(*fields) for fields in zip(keys, labels, memory, strict=True)])
        found = dict(zip(parts, _by_block([result.ok for result in results], parts).tolist(), strict=True))
        for at, slot in enumerate(slots):
            for part, objects in gathered.items():
                if found[part][at]:
                    part.scatter(objects[at], self.hosts[part.group].block(slot).numpy())
        return results

    def _memory(self, part: ObjectPart, slots: Sequence[int], gathered: Bytes | None) -> list[memoryview]:
        """Return a part's memory for each slot: rows of `gathered`, or views of the blocks if `gathered` is None."""
        if gathered is not None:
            return [memoryview(row) for row in gathered]
        span, host = part.span, self.hosts[part.group]
        assert span is not None
        return [host.block(slot).memoryview()[span.offset : span.offset + span.nbytes] for slot in slots]

    def _probe(self, probe: Probe) -> None:
        keys = split_keys(probe.keys)
        found = np.ones(len(keys), np.bool_)
        try:
            if not keys:
                self._scan(probe)
            for store, parts in self._by_store(probe.store) if keys else ():
                asked = [key for part in parts for key in part.key_list(probe.keys)]
                found &= _by_block([result.ok for result in store.contains(asked)], parts).all(axis=0)
        except Exception:  # a store that fails counts as empty
            found[:] = False
        present = b"".join(itertools.compress(keys, found.tolist()))
        absent = b"".join(itertools.compress(keys, (~found).tolist()))
        self._report(None, StoreLookup(probe.store, present, absent, probe.id))

    def _scan(self, probe: Probe) -> None:
        """List the stores of a tier. After each page, report the blocks of which all parts have been found."""
        lacking: dict[bytes, set[ObjectPart]] = {}  # block key -> parts that were not found yet
        for store, parts in self._by_store(probe.store):
            for page in self._pages(store, parts):
                whole = []
                for part, keys in page.items():
                    for key in part.key_list(b"".join(keys)):
                        left = lacking.setdefault(key, {*self._parts})
                        left.discard(part)
                        if not left:
                            whole.append(key)
                            del lacking[key]
                if whole:
                    self._report(None, StoreLookup(probe.store, b"".join(whole)), is_done=False)

    def _drop(self, drop: Drop) -> None:
        try:
            for store, parts in self._by_store(drop.store):
                if drop.keys:
                    store.remove([key for part in parts for key in part.key_list(drop.keys)])
                    continue
                for page in list(self._pages(store, parts)):  # no keys: drop every block of the namespace
                    store.remove([key for keys in page.values() for key in keys])
        finally:
            self._report(None, None)

    def _pages(self, store: Store, parts: Sequence[ObjectPart]) -> Iterator[dict[ObjectPart, list[bytes]]]:
        """Yield the keys of the objects on each page of a store, grouped by part."""
        known = {part.namespace(self.namespace): part for part in parts}
        for page in pages(store, limit=_SCAN_PAGE):
            keys: dict[ObjectPart, list[bytes]] = {}
            for stored in page.objects:
                if (part := known.get(stored.label.namespace)) is not None:
                    keys.setdefault(part, []).append(stored.key)
            yield keys


def _for_each_host(call: Callable[[memoryview], None], hosts: Sequence[HostMemory]) -> None:
    """Call `call` (register or unregister) with each host memory.

    StoreErrors are ignored, because stores also read and write memory that is not registered.
    """
    for host in hosts:
        with contextlib.suppress(StoreError):
            call(host.view())


def _batches(parts: Sequence[ObjectPart], num_blocks: int) -> Iterator[slice]:
    """Split the blocks into runs of at most _GATHER_BYTES gathered bytes. A larger block is a run of its own."""
    gathered = sum(part.nbytes for part in parts if part.span is None)
    step = max(1, _GATHER_BYTES // gathered) if gathered else num_blocks
    for start in range(0, num_blocks if parts else 0, step):
        yield slice(start, min(start + step, num_blocks))


def _by_block(answers: Sequence[bool], parts: Sequence[ObjectPart]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Arrange results that are sorted by part, then by block, as an array [part, block]."""
    return np.array(answers, np.bool_).reshape(len(parts), -1)


def _run(todo: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := todo.get()) is not None:
        with contextlib.suppress(Exception):  # a failed drop may leave blocks in the store, but these blocks are valid
            task()
