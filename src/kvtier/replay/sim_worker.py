"""SimulatedWorker: answers plans with reports after the time that links and disks would have taken. It moves nothing.

Knows plans, transfers and reports, and nothing of who decides. Blocks take these ways:

    device --"to host"--> host --+             loads and fetches go before saves and stores: they are waited for
    device <-"to device"- host <-+-"disk"-> store        reads and writes share the disk
"""

from __future__ import annotations

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
    """When it was first carried: before, it waited."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link has carried."""

    name: str
    num_bytes: int
    busy_seconds: float


class SimulatedLink:
    """One thing at a time, the urgent first; what is not urgent is put aside for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self.busy_seconds = 0.0
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._time = 0.0

    def add(self, job: _Job) -> None:
        """The link must have been advanced to the time the job began."""
        (self._urgent if job.transfer.route in _URGENT else self._bulk).append(job)

    def advance(self, now: float) -> list[tuple[_Job, float]]:
        """Go on to a time; what ended until then, and when."""
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
        """When the first of what it has ends, if nothing more comes."""
        queue = self._urgent or self._bulk
        return self._time + queue[0].seconds_left if queue else math.inf

    def end_of(self, transfer_id: int) -> float | None:
        """When an urgent job will end: nothing that comes later is put before it. None if it is not here."""
        end = self._time
        for job in self._urgent:
            end += job.seconds_left
            if job.transfer.id == transfer_id:
                return end
        return None


class SimulatedStore:
    """Which keys a store of so many blocks would have, the least recently used going first, as DiskStore does."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise RangeError(f"a store needs room for a block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def write(self, keys: list[bytes]) -> None:
        """They are there now."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)
            self.num_evicted += 1

    def read(self, keys: list[bytes]) -> bytes:
        """One byte for each key: 1 if it is there, which counts as a use."""
        there = bytes(key in self._keys for key in keys)
        for key, found in zip(keys, there, strict=True):
            if found:
                self._keys.move_to_end(key)
        return there

    def has(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Those that are there and those that are not; without keys, all that are there."""
        if not keys:
            return list(self._keys), []
        return [key for key in keys if key in self._keys], [key for key in keys if key not in self._keys]

    def forget(self, keys: list[bytes]) -> None:
        """They are gone; without keys, all are."""
        if not keys:
            self._keys.clear()
        for key in keys:
            self._keys.pop(key, None)


class SimulatedWorker:
    """Takes plans and gives reports, with the caller's clock. One rank."""

    def __init__(
        self,
        block_bytes: int,
        link_bandwidth: float,
        *,
        disk: DiskSpec | None = None,
        stores: Mapping[str, SimulatedStore] | None = None,
        latency_seconds: float = 20e-6,
    ) -> None:
        """`latency_seconds` is what a transfer over the host link takes besides its bytes."""
        self.stores = dict(stores or {})
        if self.stores and disk is None:
            raise ArgumentError(f"{', '.join(self.stores)} needs a disk to be on")
        self._block_bytes = block_bytes
        self._link = link_bandwidth, latency_seconds
        self._disk = disk
        self.links = {name: SimulatedLink(name) for name in (TO_DEVICE, TO_HOST, *self.stores)}
        self._epoch = 0
        self._ended: list[TransferResult] = []
        self._found: list[StoreLookup] = []

    def submit(self, plan: Plan, now: float) -> None:
        """Begin what a plan says."""
        self._epoch = plan.epoch
        self._advance(now)
        for drop in plan.drops:
            self._store(drop.store).forget(split_keys(drop.keys))
        for probe in plan.probes:
            self._found.append(self._answer(probe))
        for transfer in plan.transfers:
            link, seconds = self._way(transfer)
            num_bytes = transfer.num_blocks * self._block_bytes
            link.add(_Job(transfer, num_bytes, seconds))

    def poll(self, now: float) -> list[Report]:
        """What is over by now."""
        self._advance(now)
        if not (self._ended or self._found):
            return []
        report = Report(self._epoch, 0, tuple(self._ended), tuple(self._found))
        self._ended, self._found = [], []
        return [report]

    @property
    def next_end(self) -> float:
        """When there is something to poll for next."""
        if self._ended or self._found:
            return 0.0
        return min(link.next_end for link in self.links.values())

    def end_of(self, transfer_ids: tuple[int, ...]) -> float:
        """When the last of these loads will be over; those that are over do not count."""
        ends = [self.links[TO_DEVICE].end_of(number) for number in transfer_ids]
        return max((end for end in ends if end is not None), default=0.0)

    def uses(self) -> tuple[LinkUse, ...]:
        """Of every link."""
        return tuple(LinkUse(link.name, link.num_bytes, link.busy_seconds) for link in self.links.values())

    def _way(self, transfer: TransferRequest) -> tuple[SimulatedLink, float]:
        """The link a transfer takes, and how long it takes alone."""
        num_bytes = transfer.num_blocks * self._block_bytes
        ends = transfer.source, transfer.target
        if ends in (("device", "host"), ("host", "device")):
            bandwidth, latency = self._link
            return self.links[TO_HOST if transfer.target == "host" else TO_DEVICE], latency + num_bytes / bandwidth
        name = transfer.source if transfer.target == "host" else transfer.target
        self._store(name)
        assert self._disk is not None
        is_read = transfer.target == "host"
        bandwidth = self._disk.read_bandwidth if is_read else self._disk.write_bandwidth
        return self.links[name], self._disk.latency_seconds + num_bytes / bandwidth

    def _store(self, name: str) -> SimulatedStore:
        if name not in self.stores:
            known = ", ".join(("device", "host", *self.stores))
            raise ArgumentError(f"no tier is called {name!r} in this simulation; there are {known}")
        return self.stores[name]

    def _advance(self, now: float) -> None:
        for link in self.links.values():
            for job, end in link.advance(now):
                self._ended.append(self._outcome(job, end))

    def _outcome(self, job: _Job, end: float) -> TransferResult:
        # as workers measure: without the wait for others, which whoever decides by it counts by itself
        transfer, seconds = job.transfer, end - (end if job.began is None else job.began)
        if transfer.route is Route.HOST_TO_STORE:
            self.stores[transfer.target].write(split_keys(transfer.keys))
        if transfer.route is not Route.STORE_TO_HOST:
            return TransferResult(transfer.id, True, job.num_bytes, seconds)
        keys = split_keys(transfer.keys)
        there = self.stores[transfer.source].read(keys)
        if 0 not in there:
            return TransferResult(transfer.id, True, job.num_bytes, seconds)
        absent = b"".join(key for key, found in zip(keys, there, strict=True) if not found)
        self._found.append(StoreLookup(transfer.source, absent=absent))
        num_bytes = sum(there) * self._block_bytes
        return TransferResult(transfer.id, False, num_bytes, seconds, "evicted from the store", there)

    def _answer(self, probe: Probe) -> StoreLookup:
        """At once: what a look-up takes is nothing beside a read."""
        present, absent = self._store(probe.store).has(split_keys(probe.keys))
        return StoreLookup(probe.store, b"".join(present), b"".join(absent), probe.id)
