"""SimulatedWorker: returns the reports of a plan after the time that real links and disks would take. Moves no bytes.

    device ──"to host"──> host ──┐
    device <─"to device"─ host <─┴─"disk"─> store

Each direction of the link and each disk executes one transfer at a time. Reads from a disk interrupt writes.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.errors import ArgumentError, RangeError
from kvtier.messages import Plan, Probe, Report, Route, StoreLookup, TransferRequest, TransferResult, split_keys
from kvtier.replay.hardware import DiskSpec

TO_HOST, TO_DEVICE = "to host", "to device"
_URGENT = (Route.HOST_TO_DEVICE, Route.STORE_TO_HOST)


@dataclass(slots=True)
class _Job:
    transfer: TransferRequest
    num_bytes: int
    seconds_left: float
    began: float | None = None
    """Start of the transfer, after the wait in the queue."""


class SimulatedLink:
    """A link that carries one job at a time. Urgent jobs (loads and fetches) interrupt other jobs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self.busy_seconds = 0.0
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._time = 0.0

    def add(self, job: _Job) -> None:
        """Queue a job. The link must have been advanced to the current time."""
        (self._urgent if job.transfer.route in _URGENT else self._bulk).append(job)

    def advance(self, now: float) -> list[tuple[_Job, float]]:
        """Advance the link to the time `now`. Return the jobs that ended, each with its end time."""
        ended = []
        while self._urgent or self._bulk:
            queue = self._urgent or self._bulk
            job = queue[0]
            if job.began is None and (now > self._time or not job.seconds_left):
                job.began = self._time
            if self._time + job.seconds_left > now:
                spent = max(0.0, now - self._time)
                job.seconds_left -= spent
                self.busy_seconds += spent
                break
            self._time += job.seconds_left
            self.busy_seconds += job.seconds_left
            self.num_bytes += job.num_bytes
            ended.append((queue.popleft(), self._time))
        self._time = max(self._time, now)
        return ended

    @property
    def next_end(self) -> float:
        """Time at which the current job ends if no job is added; infinity if there is no job."""
        queue = self._urgent or self._bulk
        return self._time + queue[0].seconds_left if queue else math.inf

    def end_of(self, transfer_id: int) -> float | None:
        """Return the end time of an urgent job; None if the job is not queued. Later jobs do not delay urgent jobs."""
        end = self._time
        for job in self._urgent:
            end += job.seconds_left
            if job.transfer.id == transfer_id:
                return end
        return None


class SimulatedStore:
    """The keys of a store that holds at most `num_blocks` blocks. Evicts by LRU, like DiskStore."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise RangeError(f"a store needs room for at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def write(self, keys: list[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)
            self.num_evicted += 1

    def read(self, keys: list[bytes]) -> bytes:
        """Return one byte per key: 1 if the key is present, 0 otherwise. Mark the present keys as recently used."""
        present = bytes(key in self._keys for key in keys)
        for key in itertools.compress(keys, present):
            self._keys.move_to_end(key)
        return present

    def lookup(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the present and the absent keys. If `keys` is empty, return all keys of the store."""
        if not keys:
            return list(self._keys), []
        return [key for key in keys if key in self._keys], [key for key in keys if key not in self._keys]

    def forget(self, keys: list[bytes]) -> None:
        """Remove these keys, or all keys of the store if `keys` is empty."""
        if not keys:
            self._keys.clear()
        for key in keys:
            self._keys.pop(key, None)


class SimulatedWorker:
    """Executes the plans of one rank and returns reports. The caller passes the current time."""

    def __init__(
        self,
        block_bytes: int,
        link_bandwidth: float,
        *,
        disk: DiskSpec | None = None,
        stores: Mapping[str, SimulatedStore] | None = None,
        latency_seconds: float = 20e-6,
    ) -> None:
        """`latency_seconds` is the fixed time of a transfer between host and device."""
        self.stores = dict(stores or {})
        if self.stores and disk is None:
            raise ArgumentError(f"the stores {', '.join(self.stores)} need a disk")
        self._block_bytes = block_bytes
        self._link = link_bandwidth, latency_seconds
        self._disk = disk
        self.links = {name: SimulatedLink(name) for name in (TO_DEVICE, TO_HOST, *self.stores)}
        self._epoch = 0
        self._results: list[TransferResult] = []
        self._lookups: list[StoreLookup] = []

    def submit(self, plan: Plan, now: float) -> None:
        self._epoch = plan.epoch
        self._advance(now)
        for drop in plan.drops:
            self._store(drop.store).forget(split_keys(drop.keys))
        for probe in plan.probes:
            self._lookups.append(self._lookup(probe))
        for transfer in plan.transfers:
            link, seconds = self._link_and_seconds(transfer)
            link.add(_Job(transfer, transfer.num_blocks * self._block_bytes, seconds))

    def poll(self, now: float) -> list[Report]:
        self._advance(now)
        if not (self._results or self._lookups):
            return []
        report = Report(self._epoch, 0, tuple(self._results), tuple(self._lookups))
        self._results, self._lookups = [], []
        return [report]

    @property
    def next_end(self) -> float:
        """Time at which the next transfer ends if no transfer is added. 0 if `poll` has results to return."""
        if self._results or self._lookups:
            return 0.0
        return min(link.next_end for link in self.links.values())

    def end_of(self, transfer_ids: tuple[int, ...]) -> float:
        """Return the time at which the last of the loads `transfer_ids` ends, or 0 if all have ended."""
        ends = [self.links[TO_DEVICE].end_of(number) for number in transfer_ids]
        return max((end for end in ends if end is not None), default=0.0)

    def _link_and_seconds(self, transfer: TransferRequest) -> tuple[SimulatedLink, float]:
        """Return the link of a transfer, and the seconds that the transfer takes without waits."""
        num_bytes = transfer.num_blocks * self._block_bytes
        is_to_host = transfer.target == "host"
        name = transfer.source if is_to_host else transfer.target
        if name == "device":
            bandwidth, latency = self._link
            return self.links[TO_HOST if is_to_host else TO_DEVICE], latency + num_bytes / bandwidth
        self._store(name)
        assert self._disk is not None
        bandwidth = self._disk.read_bandwidth if is_to_host else self._disk.write_bandwidth
        return self.links[name], self._disk.latency_seconds + num_bytes / bandwidth

    def _store(self, name: str) -> SimulatedStore:
        if name not in self.stores:
            known = ", ".join(("device", "host", *self.stores))
            raise ArgumentError(f"unknown tier {name!r}; this simulation has {known}")
        return self.stores[name]

    def _advance(self, now: float) -> None:
        for link in self.links.values():
            for job, end in link.advance(now):
                self._results.append(self._result(job, end))

    def _result(self, job: _Job, end: float) -> TransferResult:
        # as in a real worker, the reported time of a transfer does not include its wait in the queue
        transfer, seconds = job.transfer, end - (end if job.began is None else job.began)
        if transfer.route is Route.HOST_TO_STORE:
            self.stores[transfer.target].write(split_keys(transfer.keys))
        if transfer.route is not Route.STORE_TO_HOST:
            return TransferResult(transfer.id, True, job.num_bytes, seconds)
        keys = split_keys(transfer.keys)
        present = self.stores[transfer.source].read(keys)
        if 0 not in present:
            return TransferResult(transfer.id, True, job.num_bytes, seconds)
        absent = b"".join(key for key, is_present in zip(keys, present, strict=True) if not is_present)
        self._lookups.append(StoreLookup(transfer.source, absent=absent))
        num_bytes = sum(present) * self._block_bytes
        return TransferResult(transfer.id, False, num_bytes, seconds, "evicted from the store", present)

    def _lookup(self, probe: Probe) -> StoreLookup:
        """Answer without delay, because a lookup takes far less time than a read."""
        present, absent = self._store(probe.store).lookup(split_keys(probe.keys))
        return StoreLookup(probe.store, b"".join(present), b"".join(absent), probe.id)
