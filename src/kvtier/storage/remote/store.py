"""RemoteStore: blocks on a server, which is taken to be lossy, slow and wrong. docs/stores.md has the whole story."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from kvtier.errors import ArgumentError, ClosedError, FormatError, StoreError
from kvtier.storage.calls import Batch, Breaker, CallRunner
from kvtier.storage.codec import copy_bytes
from kvtier.storage.remote.bucket import Bucket, BucketError, Listing, Parts, Put
from kvtier.storage.remote.envelope import Envelope, Packed
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
    Kind,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    StoredObject,
    StoreStats,
    UsesMemory,
    Write,
    check_keys,
    view_of,
)
from kvtier.storage.workers import Job, Scratch, Workers

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a request is made again, and how long to wait before: anything up to twice the last most, by chance,
    so that clients that failed together do not come back together."""

    num_retries: int = 2
    first_wait_s: float = 0.05

    def __post_init__(self) -> None:
        if self.num_retries < 0 or self.first_wait_s < 0:
            raise ArgumentError(f"retries cannot be negative, got {self}")

    def wait_s(self, attempt: int) -> float:
        """Before trying again after this many failures, from 0."""
        return random.uniform(0, self.first_wait_s * 2**attempt)


class RemoteStore:
    """A store on a server, for any number of processes at a time.

    Requests run on `num_threads` threads, so many of them at a time. `where` names the server in messages.
    What it holds is not known here: `stats` counts calls only.
    """

    def __init__(
        self,
        bucket: Bucket,
        where: str,
        *,
        envelope: Envelope | None = None,
        num_threads: int = 4,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        if num_threads < 1 or timeout_s <= 0:
            raise ArgumentError(f"a RemoteStore needs positive {num_threads=} and {timeout_s=}")
        self._bucket, self._where, self._timeout_s = bucket, where, timeout_s
        self._envelope = envelope or Envelope()
        self._retry = retry or Retry()
        self._breaker = breaker or Breaker()
        self._workers = Workers(num_threads, "kvtier-remote")
        self._num_threads = num_threads
        self._calls = CallRunner(self._workers, self._breaker, timeout_s)
        self._meter = Meter()
        self._lock = threading.Lock()
        self._num_quarantined = 0
        self._is_closed = False

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Which of these objects are there. One that is damaged or expired may be FOUND here and not when read."""
        begin = self._begin(keys)
        names = [self._envelope.name(key) for key in keys]

        def find(chunk: Sequence[int], batch: Batch, _: Scratch) -> None:
            found = self._ask(batch, self._bucket.exists, [names[index] for index in chunk])
            told = {True: ObjectResult(ObjectStatus.FOUND), False: ObjectResult(ObjectStatus.MISSING)}
            batch.settle({index: told[is_there] for index, is_there in zip(chunk, found, strict=True)})

        return self._end(Kind.LOOKUP, self._run([0] * len(keys), find, timeout_s), begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        """Fill the given memory with verified bytes; where the outcome is not FOUND it holds what it held."""
        begin = self._begin([read.key for read in reads])
        views = [view_of(read.into, writable=True) for read in reads]
        names = [self._envelope.name(read.key) for read in reads]

        def look(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> dict[int, ObjectResult]:
            rooms = [len(views[index]) + self._envelope.extra_bytes for index in chunk]
            values = self._ask(batch, self._bucket.fetch, [names[index] for index in chunk], rooms, scratch)
            useless = {}
            for index, value in zip(chunk, values, strict=True):
                verdict = self._envelope.judge(reads[index], len(views[index]), value)
                if verdict.is_useless:
                    useless[index] = verdict.outcome  # settled when it is gone
                elif verdict.payload is None:
                    batch.settle({index: verdict.outcome})
                else:
                    batch.settle({index: verdict.outcome}, functools.partial(copy_bytes, views[index], verdict.payload))
            return useless

        def load(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            useless = look(chunk, batch, scratch)
            doubtful = [index for index, outcome in useless.items() if outcome.status is ObjectStatus.CORRUPT]
            self._quarantine(batch, {i: (names[i], useless[i]) for i in useless if i not in doubtful})
            if doubtful:
                # It need not be the object: a removal may have overtaken the read, whose memory then held another's
                # (Mooncake), a bit may have flipped on the way, the connection may be out of step. Damage lasts.
                self._bucket.reset()
                self._do(confirm, doubtful, batch, scratch)

        def confirm(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            self._quarantine(batch, {i: (names[i], outcome) for i, outcome in look(chunk, batch, scratch).items()})

        return self._end(Kind.READ, self._run([len(view) for view in views], load, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store objects, replacing others of their keys. One that is there already is not always sent again."""
        begin = self._begin([write.key for write in writes])
        last = {write.key: index for index, write in enumerate(writes)}  # of several under one key it counts
        chosen = [writes[index] for index in last.values()]
        views = [view_of(write.payload) for write in writes]
        chosen_views = [views[index] for index in last.values()]

        def save(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            parcels = _Parcels(self._envelope, {index: (chosen[index], chosen_views[index]) for index in chunk}, batch)
            self._save(batch, parcels, scratch)

        sizes, limits = [len(view) for view in chosen_views], self._bucket.request_size
        outcomes = dict(
            zip(last, self._run(sizes, save, timeout_s, _Cut(limits.num_puts, limits.max_put_bytes)), strict=True)
        )
        told = [
            outcomes[w.key] if last[w.key] == i else replace(outcomes[w.key], nbytes=0) for i, w in enumerate(writes)
        ]
        return self._end(Kind.WRITE, told, begin)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Forget objects. One that a failed first attempt removed is MISSING at the next."""
        begin = self._begin(keys)
        names = [self._envelope.name(key) for key in keys]

        def drop(chunk: Sequence[int], batch: Batch, _: Scratch) -> None:
            gone = self._ask(batch, self._bucket.delete, [names[index] for index in chunk])
            told = {True: ObjectResult(ObjectStatus.REMOVED), False: ObjectResult(ObjectStatus.MISSING)}
            batch.settle({index: told[was_there] for index, was_there in zip(chunk, gone, strict=True)})

        return self._end(Kind.REMOVAL, self._run([0] * len(keys), drop, timeout_s), begin)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        """The inventory, in the server's order."""
        begin = self._begin([])
        found: list[Listing] = []

        def list_names(_: Sequence[int], batch: Batch, __: Scratch) -> None:
            listing = self._ask(batch, self._bucket.list_names, cursor, limit)
            batch.settle({0: ObjectResult(ObjectStatus.FOUND)}, lambda: found.append(listing))

        listed = self._run([0], list_names, timeout_s)
        names = found[0].names if found else ()
        seen = _Seen()

        def look(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            chosen = [names[index] for index in chunk]
            heads = self._ask(batch, self._bucket.fetch_heads, chosen, self._envelope.head_bytes, scratch)
            batch.settle(
                dict.fromkeys(chunk, ObjectResult(ObjectStatus.FOUND)),
                lambda: seen.add(self._envelope, chunk, chosen, heads),
            )

        left_s = (self._timeout_s if timeout_s is None else timeout_s) - (time.perf_counter() - begin)
        looked = self._run([0] * len(names), look, max(0.0, left_s))
        failed = next((each.reason for each in (*listed, *looked) if not each.ok), "")
        if failed:
            return Page((), cursor, time.perf_counter() - begin, failed)
        objects = tuple(seen.objects[index] for index in sorted(seen.objects))
        return Page(objects, found[0].cursor, time.perf_counter() - begin, num_unreadable=seen.num_unreadable)

    def register(self, memory: memoryview) -> None:
        """Send blocks from this memory without copying them first, where the server's client can do that."""
        self._begin([])
        if isinstance(self._bucket, UsesMemory):
            try:
                self._bucket.register(memory)
            except BucketError as error:
                raise StoreError(f"{self._where}: {error}") from error

    def unregister(self, memory: memoryview) -> None:
        """No longer; a closed store has none."""
        if isinstance(self._bucket, UsesMemory) and not self._is_closed:
            try:
                self._bucket.unregister(memory)
            except BucketError as error:
                raise StoreError(f"{self._where}: {error}") from error

    def close(self) -> None:
        """Finish what was begun, end the threads, disconnect; after the deadline without waiting any longer."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._workers.close(self._timeout_s)
        self._bucket.close()

    @property
    def stats(self) -> StoreStats:
        """What it did. What the server holds is for `scan` to tell."""
        return replace(self._meter.stats, num_quarantined=self._num_quarantined, num_refused=self._breaker.num_refused)

    # --- every call

    def _begin(self, keys: Sequence[bytes]) -> float:
        if self._is_closed:
            raise ClosedError(f"the store on {self._where} is closed")
        check_keys(keys)
        return time.perf_counter()

    def _end(self, kind: Kind, outcomes: Sequence[ObjectResult], begin: float) -> Results:
        return self._meter.count(kind, Results(tuple(outcomes), time.perf_counter() - begin))

    def _run(
        self,
        sizes: Sequence[int],
        work: Callable[[Sequence[int], Batch, Scratch], None],
        timeout_s: float | None,
        cut: _Cut | None = None,
    ) -> Sequence[ObjectResult]:
        """Have the work done in chunks of objects, each on some thread."""
        if not sizes:
            return ()

        def plan(batch: Batch) -> list[Job]:
            return [
                functools.partial(self._do, work, chunk, batch)
                for chunk in self._chunks(sizes, cut or _Cut(None, self._bucket.request_size.max_bytes))
            ]

        return self._calls.run(len(sizes), plan, timeout_s)

    def _chunks(self, sizes: Sequence[int], cut: _Cut) -> list[list[int]]:
        """Numbers of objects that go into one request: so many that every thread has its share and a single request,
        unless that were too large."""
        limits = self._bucket.request_size
        share = max(sum(sizes) / (cut.num_requests or self._num_threads), limits.min_bytes)
        chunks: list[list[int]] = [[]]
        nbytes, taken = 0, 0.0  # in the last one, and of its share: what one has too much the next has less
        for index, size in enumerate(sizes):
            is_full = taken >= share or nbytes + size > cut.max_bytes or len(chunks[-1]) == limits.max_names
            if is_full and chunks[-1]:
                chunks.append([])
                nbytes, taken = 0, max(0.0, taken - share)
            chunks[-1].append(index)
            nbytes, taken = nbytes + size, taken + size
        return chunks

    # --- jobs, on the workers' threads

    def _do(
        self,
        work: Callable[[Sequence[int], Batch, Scratch], None],
        chunk: Sequence[int],
        batch: Batch,
        scratch: Scratch,
    ) -> None:
        if batch.is_expired:
            return  # it waited behind a request that hung
        try:
            work(chunk, batch, scratch)
        except BucketError as error:
            batch.trouble = f"{self._where}: {error}"
            batch.settle(dict.fromkeys(chunk, ObjectResult(ObjectStatus.FAILED, reason=batch.trouble)))

    def _ask(
        self, batch: Batch, request: Callable[Asked, Answer], *args: Asked.args, **options: Asked.kwargs
    ) -> Answer:
        """The server's answer; transient errors are retried. Once nobody waits for it any more nothing is asked."""
        attempt = 0
        while not batch.is_expired:
            try:
                return request(*args, **options)
            except BucketError as error:
                if not error.is_transient or attempt == self._retry.num_retries:
                    raise
            time.sleep(self._retry.wait_s(attempt))
            attempt += 1
        raise BucketError("the deadline came first")

    def _save(self, batch: Batch, parcels: _Parcels, scratch: Scratch) -> None:
        """Send objects; those that are there already only if they are others."""
        exist = self._put(batch, parcels, parcels.indices, scratch, replace=False)
        if exist:
            names = [parcels.name(index) for index in exist]
            heads = self._ask(batch, self._bucket.fetch_heads, names, self._envelope.head_bytes, scratch)
            told = zip(exist, names, heads, strict=True)
            same = {index for index, name, head in told if self._is_there(name, parcels[index], head)}
            batch.settle(dict.fromkeys(same, ObjectResult(ObjectStatus.STORED, reason="was there already")))
            others = [index for index in exist if index not in same]
            if others:
                self._put(batch, parcels, others, scratch, replace=True)

    def _put(
        self, batch: Batch, parcels: _Parcels, chosen: Sequence[int], scratch: Scratch, *, replace: bool
    ) -> list[int]:
        """Send objects; returns those that were left alone because something of their name exists."""
        names = [parcels.name(index) for index in chosen]
        values = _Values(parcels, chosen)
        done = dict(
            zip(chosen, self._ask(batch, self._bucket.put, names, values, scratch, replace=replace), strict=True)
        )
        full = ObjectResult(ObjectStatus.FAILED, reason=f"{self._where} has no room for it")
        batch.settle({index: full for index, put in done.items() if put is Put.FULL})
        stored = [index for index, put in done.items() if put is Put.STORED]
        batch.settle({index: ObjectResult(ObjectStatus.STORED, parcels[index].record.nbytes) for index in stored})
        return [index for index, put in done.items() if put is Put.EXISTS]

    def _is_there(self, name: str, packed: Packed, head: bytes | None) -> bool:
        try:
            found = self._envelope.read_head(name, head) if head is not None else None
        except FormatError:
            return False
        return found is not None and found.is_same_object(packed.record) and self._envelope.is_fresh(found)

    def _quarantine(self, batch: Batch, useless: dict[int, tuple[str, ObjectResult]]) -> None:
        """Objects nobody may get again are deleted, before anybody hears of them."""
        if not useless:
            return
        corrupt = sum(outcome.status is ObjectStatus.CORRUPT for _, outcome in useless.values())
        with self._lock:
            self._num_quarantined += corrupt
        if corrupt:
            self._bucket.reset()  # what deletes must not go over a connection that is out of step
        failure = ""
        try:
            self._ask(batch, self._bucket.delete, [name for name, _ in useless.values()])
        except BucketError as error:
            failure = f"; it could not be deleted: {error}"
        batch.settle({i: replace(each, reason=each.reason + failure) for i, (_, each) in useless.items()})


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a batch becomes requests."""

    num_requests: int | None
    """None: as many as there are threads."""
    max_bytes: int


class _Parcels:
    """The objects of one request by number, packed when they are asked for: while the first are on their way the
    checksums of the others are taken, and what is sent is in the cache.

    Memory that the caller may have changed must not get a checksum that is right:

        memory read, call still open   the checksum is the block's; if other bytes are sent later, who reads finds out
        memory read, call returned     nobody knows what it is the checksum of: nothing is sent
    """

    def __init__(self, envelope: Envelope, writes: Mapping[int, tuple[Write, memoryview]], batch: Batch) -> None:
        self._envelope, self._writes, self._batch = envelope, writes, batch
        self._packed: dict[int, Packed] = {}
        self.indices = list(writes)

    def name(self, index: int) -> str:
        """Of its object."""
        return self._envelope.name(self._writes[index][0].key)

    def __getitem__(self, index: int) -> Packed:
        return self.together([index])[0]

    def together(self, indices: Sequence[int]) -> list[Packed]:
        """Several at once."""
        left = [index for index in indices if index not in self._packed]
        if left:
            packed = self._envelope.pack_all([self._writes[index] for index in left])
            if self._batch.is_expired:
                raise BucketError("the deadline came first")
            self._packed.update(zip(left, packed, strict=True))
        return [self._packed[index] for index in indices]


class _Values(Sequence[Parts]):
    """What of some parcels is sent, as a bucket takes it."""

    def __init__(self, parcels: _Parcels, chosen: Sequence[int]) -> None:
        self._parcels, self._chosen = parcels, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [packed.parts for packed in self._parcels.together(self._chosen[number])]
        return self._parcels[self._chosen[number]].parts


class _Seen:
    """What an inventory found, by its place in it."""

    def __init__(self) -> None:
        self.objects: dict[int, StoredObject] = {}
        self.num_unreadable = 0

    def add(
        self, envelope: Envelope, chunk: Sequence[int], names: Sequence[str], heads: Sequence[bytes | None]
    ) -> None:
        """Note these; one that is gone meanwhile, or whose time is over, is none."""
        for index, name, head in zip(chunk, names, heads, strict=True):
            if head is None:
                continue
            try:
                record = envelope.read_head(name, head)
            except FormatError:
                self.num_unreadable += 1
                continue
            if not envelope.is_expired(record):
                self.objects[index] = StoredObject(record.key, record.label, record.nbytes)
