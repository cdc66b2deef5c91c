"""RemoteStore: blocks on a server that may lose, delay or corrupt them. See docs/stores.md."""

from __future__ import annotations

import copy
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from kvtier.errors import ArgumentError, FormatError, StoreError
from kvtier.storage.calls import Batch, Breaker, CallRunner, Job
from kvtier.storage.codec import Scratch, joined, scatter
from kvtier.storage.record import Record
from kvtier.storage.remote.bucket import Bucket, BucketError, Parts, Put
from kvtier.storage.remote.envelope import EXPIRED, Envelope, Packed
from kvtier.storage.store import (
    DEFAULT_TIMEOUT_S,
    MISSING,
    Meter,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    StoreStats,
    UsesMemory,
    Write,
    last_writes,
    num_bytes,
    outcomes_of,
    views_of,
)

Arguments = ParamSpec("Arguments")
Response = TypeVar("Response")
Work = Callable[[Sequence[int], Batch, Scratch], None]
"""Handles the objects of one request, given their indices in the batch."""
DEFAULT_RETRIES = 2  # further attempts after a transient error
_MIN_SHARE_BYTES = 1 << 20  # a batch is not split into smaller requests just to use more threads
_MAX_READ_BYTES = 4 << 20
"""Limit of a read request; a larger object has its own request. With a higher limit, values would leave the CPU cache
before they are verified. With a lower limit, requests would spend much of their time on the round trip."""


class RemoteStore:
    """A store on a server, shared by any number of processes.

    At most `num_threads` requests run in parallel. `where` names the server in messages. A request with a transient
    error is retried up to `num_retries` times. The wait before a retry is random. Its upper limit is `first_wait_s`
    seconds for the first retry, and doubles for each further retry. `stats` does not count the stored objects.
    """

    def __init__(
        self,
        bucket: Bucket,
        where: str,
        *,
        envelope: Envelope | None = None,
        num_threads: int = 4,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_retries: int = DEFAULT_RETRIES,
        first_wait_s: float = 0.05,
        breaker: Breaker | None = None,
    ) -> None:
        if num_threads < 1 or timeout_s <= 0 or num_retries < 0:
            raise ArgumentError(
                "a RemoteStore needs num_threads of at least 1, timeout_s above 0 and num_retries of at least 0, "
                f"got {num_threads=}, {timeout_s=}, {num_retries=}"
            )
        self._bucket, self._where, self._timeout_s = bucket, where, timeout_s
        self._envelope = envelope or Envelope()
        self._num_retries, self._first_wait_s = num_retries, first_wait_s
        self._breaker = breaker or Breaker()
        self._num_threads = num_threads
        self._calls = CallRunner(num_threads, "kvtier-remote", self._breaker, timeout_s)
        self._meter = Meter(f"the store on {where}")
        self._lock = threading.Lock()
        self._num_quarantined = 0

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Look up objects. A damaged or expired object may be FOUND here, although a read rejects it."""
        begin = self._meter.begin(keys)
        outcomes = self._run_by_name(keys, self._bucket.exists, ObjectResult(ObjectStatus.FOUND), timeout_s)
        return self._meter.end("lookups", outcomes, begin)

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        begin = self._meter.begin([read.key for read in reads])
        views = [views_of(read.into, writable=True) for read in reads]
        names = [self._envelope.name(read.key) for read in reads]

        def fetch(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> dict[int, ObjectResult]:
            """Settle objects. Return damaged and expired objects, which must be deleted before they are settled."""
            limits = [num_bytes(views[index]) + self._envelope.extra_bytes for index in chunk]
            values = self._request(batch, self._bucket.fetch, [names[index] for index in chunk], limits, scratch)
            useless = {}
            for index, value in zip(chunk, values, strict=True):
                outcome, payload = self._envelope.open(reads[index], num_bytes(views[index]), value)
                if outcome is EXPIRED or outcome.status is ObjectStatus.CORRUPT:
                    useless[index] = outcome
                else:
                    copy = functools.partial(scatter, views[index], payload) if payload is not None else None
                    batch.settle({index: outcome}, copy)
            return useless

        def load(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            useless = fetch(chunk, batch, scratch)
            doubtful = [index for index, outcome in useless.items() if outcome.status is ObjectStatus.CORRUPT]
            self._quarantine(batch, {i: (names[i], useless[i]) for i in useless if i not in doubtful})
            if doubtful:
                # The stored object may be intact. Another client may have removed the object and reused its memory
                # during the read (Mooncake). A bit may have flipped in transit. The connection may have delivered the
                # reply to an earlier request. Therefore read the object again.
                self._bucket.reset()
                self._run_chunk(confirm, doubtful, batch, scratch)

        def confirm(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            self._quarantine(batch, {i: (names[i], outcome) for i, outcome in fetch(chunk, batch, scratch).items()})

        return self._meter.end("reads", self._run([num_bytes(view) for view in views], load, timeout_s), begin)

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        """Store objects. An equal stored object may be kept instead, unless its lifetime must be extended."""
        begin = self._meter.begin([write.key for write in writes])
        last = last_writes(writes)
        chosen = [writes[index] for index in last.values()]
        views = [views_of(write.payload) for write in writes]
        chosen_views = [views[index] for index in last.values()]

        def save(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            parcels = _Parcels(self._envelope, {index: (chosen[index], chosen_views[index]) for index in chunk}, batch)
            self._save(batch, parcels, scratch)

        sizes = [num_bytes(view) for view in chosen_views]
        outcomes = outcomes_of(writes, last, self._run(sizes, save, timeout_s, is_put=True))
        return self._meter.end("writes", outcomes, begin)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        """Delete objects. If a failed attempt has deleted an object, the retry reports it as MISSING."""
        begin = self._meter.begin(keys)
        outcomes = self._run_by_name(keys, self._bucket.delete, ObjectResult(ObjectStatus.REMOVED), timeout_s)
        return self._meter.end("removals", outcomes, begin)

    def _run_by_name(
        self,
        keys: Sequence[bytes],
        request: Callable[[Sequence[str]], list[bool]],
        done: ObjectResult,
        timeout_s: float | None,
    ) -> Sequence[ObjectResult]:
        """Run a request that returns a bool per name. True becomes the result `done`, False becomes MISSING."""
        names = [self._envelope.name(key) for key in keys]

        def work(chunk: Sequence[int], batch: Batch, _: Scratch) -> None:
            existed = self._request(batch, request, [names[index] for index in chunk])
            batch.settle({index: done if exists else MISSING for index, exists in zip(chunk, existed, strict=True)})

        return self._run([0] * len(keys), work, timeout_s)

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        begin = self._meter.begin()
        done = ObjectResult(ObjectStatus.FOUND)
        listing: list[tuple[list[str], str]] = []

        def list_names(_: Sequence[int], batch: Batch, __: Scratch) -> None:
            page = self._request(batch, self._bucket.list_names, cursor, limit)
            batch.settle({0: done}, lambda: listing.append(page))

        listed = self._run([0], list_names, timeout_s)
        names, following = listing[0] if listing else ([], "")
        heads: dict[int, bytes | None] = {}

        def fetch_heads(chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
            chosen = [names[index] for index in chunk]
            fetched = self._request(batch, self._bucket.fetch_heads, chosen, self._envelope.head_bytes, scratch)
            batch.settle(dict.fromkeys(chunk, done), lambda: heads.update(zip(chunk, fetched, strict=True)))

        left_s = (self._timeout_s if timeout_s is None else timeout_s) - (time.perf_counter() - begin)
        fetched = self._run([0] * len(names), fetch_heads, max(0.0, left_s))
        failed = next((outcome.reason for outcome in (*listed, *fetched) if not outcome.ok), "")
        if failed:
            return Page((), cursor, time.perf_counter() - begin, failed)
        records = [self._record(names[index], heads[index]) for index in sorted(heads) if heads[index] is not None]
        valid = [record for record in records if record is not None and not self._envelope.is_expired(record)]
        objects = tuple(record.stored_object for record in valid)
        return Page(objects, following, time.perf_counter() - begin, num_unreadable=records.count(None))

    def register(self, memory: memoryview) -> None:
        """From now on, send blocks in this memory without copies, if the server's client library supports that."""
        self._meter.begin()
        if isinstance(self._bucket, UsesMemory):
            self._translate(self._bucket.register, memory)

    def unregister(self, memory: memoryview) -> None:
        if isinstance(self._bucket, UsesMemory) and not self._meter.is_closed:
            self._translate(self._bucket.unregister, memory)

    def _translate(self, call: Callable[[memoryview], None], memory: memoryview) -> None:
        try:
            call(memory)
        except BucketError as error:
            raise StoreError(f"{self._where}: {error}") from error

    def close(self) -> None:
        """Finish running calls, for at most `timeout_s` seconds, then disconnect. Closing twice is allowed."""
        with self._lock:
            if self._meter.is_closed:
                return
            self._meter.is_closed = True
        self._calls.close()
        self._bucket.close()

    @property
    def stats(self) -> StoreStats:
        return replace(self._meter.stats, num_quarantined=self._num_quarantined, num_refused=self._breaker.num_refused)

    # --- every call

    def _run(
        self, sizes: Sequence[int], work: Work, timeout_s: float | None, *, is_put: bool = False
    ) -> Sequence[ObjectResult]:
        """Run `work` on chunks of objects, in parallel."""
        if not sizes:
            return ()

        def plan(batch: Batch) -> list[Job]:
            chunks = self._chunks(sizes, is_put=is_put)
            return [functools.partial(self._run_chunk, work, chunk, batch) for chunk in chunks]

        return self._calls.run(len(sizes), plan, timeout_s)

    def _chunks(self, sizes: Sequence[int], *, is_put: bool) -> list[list[int]]:
        """Split a batch into about one request per thread, or about `num_puts` puts, within the size limits."""
        limits = self._bucket.request_size
        max_bytes = limits.max_put_bytes if is_put else _MAX_READ_BYTES
        num_requests = (is_put and limits.num_puts) or self._num_threads
        share = max(sum(sizes) / num_requests, _MIN_SHARE_BYTES)
        chunks: list[list[int]] = [[]]
        # `nbytes` is the size of the last chunk. `taken` adds the bytes by which earlier chunks exceeded `share`.
        nbytes, taken = 0, 0.0
        for index, size in enumerate(sizes):
            is_full = taken >= share or nbytes + size > max_bytes or len(chunks[-1]) == limits.max_names
            if is_full and chunks[-1]:
                chunks.append([])
                nbytes, taken = 0, max(0.0, taken - share)
            chunks[-1].append(index)
            nbytes, taken = nbytes + size, taken + size
        return chunks

    # --- jobs, on the threads

    def _run_chunk(self, work: Work, chunk: Sequence[int], batch: Batch, scratch: Scratch) -> None:
        if batch.is_expired:
            return  # the call returned before this chunk started
        try:
            work(chunk, batch, scratch)
        except BucketError as error:
            batch.trouble = f"{self._where}: {error}"
            batch.settle(dict.fromkeys(chunk, ObjectResult(ObjectStatus.FAILED, reason=batch.trouble)))

    def _request(
        self, batch: Batch, request: Callable[Arguments, Response], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Response:
        """Send a request. After a transient error, retry up to `num_retries` times, unless the call has returned."""
        attempt = 0
        while not batch.is_expired:
            try:
                return request(*args, **options)
            except BucketError as error:
                if not error.is_transient or attempt == self._num_retries:
                    raise
            # The wait is random, so that clients do not retry at the same time.
            time.sleep(random.uniform(0, self._first_wait_s * 2**attempt))
            attempt += 1
        raise BucketError("the deadline has passed")

    def _save(self, batch: Batch, parcels: _Parcels, scratch: Scratch) -> None:
        exist = self._put(batch, parcels, scratch, replace=False)
        if exist.indices:
            heads = self._request(batch, self._bucket.fetch_heads, exist.names, self._envelope.head_bytes, scratch)
            same = {
                index
                for index, name, head in zip(exist.indices, exist.names, heads, strict=True)
                if self._is_current(self._record(name, head), exist.record(index))
            }
            batch.settle(dict.fromkeys(same, ObjectResult(ObjectStatus.STORED, reason="already stored")))
            others = exist.only([index for index in exist.indices if index not in same])
            if others.indices:
                self._put(batch, others, scratch, replace=True)

    def _put(self, batch: Batch, parcels: _Parcels, scratch: Scratch, *, replace: bool) -> _Parcels:
        """Send objects. Return the objects that were skipped because their names exist."""
        puts = self._request(batch, self._bucket.put, parcels.names, parcels, scratch, replace=replace)
        done = dict(zip(parcels.indices, puts, strict=True))
        full = ObjectResult(ObjectStatus.FAILED, reason=f"{self._where} is full")
        batch.settle({index: full for index, put in done.items() if put is Put.FULL})
        stored = [index for index, put in done.items() if put is Put.STORED]
        batch.settle({index: ObjectResult(ObjectStatus.STORED, parcels.record(index).nbytes) for index in stored})
        return parcels.only([index for index, put in done.items() if put is Put.EXISTS])

    def _record(self, name: str, head: bytes | None) -> Record | None:
        """Return the record in a value's head, or None if the head is missing or invalid."""
        try:
            return self._envelope.read_head(name, head) if head is not None else None
        except FormatError:
            return None

    def _is_current(self, stored: Record | None, record: Record) -> bool:
        return stored is not None and stored.is_same_object(record) and self._envelope.is_fresh(stored)

    def _quarantine(self, batch: Batch, useless: dict[int, tuple[str, ObjectResult]]) -> None:
        """Delete damaged and expired objects, then settle them."""
        if not useless:
            return
        corrupt = sum(outcome.status is ObjectStatus.CORRUPT for _, outcome in useless.values())
        with self._lock:
            self._num_quarantined += corrupt
        if corrupt:
            self._bucket.reset()  # the connection may deliver the reply to an earlier request
        failure = ""
        try:
            self._request(batch, self._bucket.delete, [name for name, _ in useless.values()])
        except BucketError as error:
            failure = f"; deleting it failed: {error}"
        batch.settle({i: replace(outcome, reason=outcome.reason + failure) for i, (_, outcome) in useless.items()})


class _Parcels(Sequence[Parts]):
    """The values of one request. `indices` are the positions of the objects in the batch.

    A value is packed when it is accessed. Its checksum is thus computed while earlier values are sent, and its bytes
    are in the CPU cache when they are sent.

    A call can return at its deadline while this request still runs. The caller may then change the payloads in memory,
    but changed bytes must not get a valid checksum:

        packed before the call returned          the checksum covers the original bytes, so a read detects changed bytes
        being packed while the call returned     the checksum may cover changed bytes, so nothing is sent
    """

    def __init__(
        self, envelope: Envelope, writes: Mapping[int, tuple[Write, Sequence[memoryview]]], batch: Batch
    ) -> None:
        self._envelope, self._writes, self._batch = envelope, writes, batch
        self._packed: dict[int, Packed] = {}
        self.indices = list(writes)

    def only(self, indices: list[int]) -> _Parcels:
        """Return a sequence with some of the objects. Both sequences share the packed values."""
        part = copy.copy(self)
        part.indices = indices
        return part

    @property
    def names(self) -> list[str]:
        return [self._envelope.name(self._writes[index][0].key) for index in self.indices]

    def record(self, index: int) -> Record:
        return self._pack([index])[0][0]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [parts for _, parts in self._pack(self.indices[number])]
        return self._pack([self.indices[number]])[0][1]

    def _pack(self, indices: Sequence[int]) -> list[Packed]:
        left = [index for index in indices if index not in self._packed]
        if left:
            packed = self._envelope.pack_all(
                [(write, joined(pieces)) for write, pieces in map(self._writes.__getitem__, left)]
            )
            if self._batch.is_expired:
                raise BucketError("the deadline has passed")
            self._packed.update(zip(left, packed, strict=True))
        return [self._packed[index] for index in indices]
