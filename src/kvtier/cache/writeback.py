"""Copies of blocks from the device to the host and from the host to stores, made before the blocks are evicted.

WritebackQueue   queues blocks for copies to the next tier and limits the number of copies in flight
HostWriter       starts transfers from the device to the host
StoreIndex       records the keys in a store and starts transfers from the host to the store

Device eviction never waits for a copy. If no lower tier has an evicted block, the block is lost. A host block that is
loaded to the device also stays on the host, so that its next eviction from the device needs no new copy. An exclusive
host tier that needs slots, however, first evicts blocks that are also on the device. A store evicts blocks without
notice. The recorded keys may therefore be out of date, and a read that finds nothing is a miss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from kvtier.cache.config import StoreConfig, WritebackConfig, WritePolicy
from kvtier.cache.in_flight import Mask, PendingTransfer, TransferTracker, mask_runs
from kvtier.cache.store_events import StoreEvents
from kvtier.index import BlockPool, Chain, Lease, Listener, RadixTree, Shortage, Slots, Tier
from kvtier.index.node import IS_ABSENT, READABLE, Node, mask_and
from kvtier.index.transitions import begin_write, block_states
from kvtier.messages import Drop, Route, StoreLookup, split_keys


@dataclass(frozen=True, slots=True)
class WritebackJob:
    """Blocks [first, stop) of a chain. Some of the blocks may need a copy in the next tier."""

    chain: Chain
    first: int
    stop: int
    always: bool = False
    """True if CacheAdmin queued the job. `min_uses` is then ignored, and an exclusive host tier may evict other blocks
    for the copy."""


class WritebackQueue:
    """A queue of jobs for one target. It applies the write policy and the limits on copies.

    `above` is the pool of the tier to copy from. If there are more than `max_jobs` jobs, the oldest jobs are dropped.
    Their blocks have usually been evicted, because `max_jobs` is at least the number of slots in memory.
    """

    def __init__(
        self,
        tree: RadixTree,
        config: WritebackConfig,
        above: BlockPool,
        target: HostWriter | StoreIndex,
        max_jobs: int,
    ) -> None:
        self._tree, self._config, self._above, self._target = tree, config, above, target
        self.jobs: deque[WritebackJob] = deque(maxlen=max_jobs)
        self.num_saved_late = 0
        """Number of blocks that were copied because the tier above was about to evict them."""
        self._allowance = config.blocks_per_second  # copies that may start; `plan` adds more
        self._refilled_at: float | None = None

    def on_blocks_ready(self, lease: Lease, first: int, stop: int, *, queue: bool = False) -> None:
        """Handle blocks that became readable in the tier above, unless their path has left the tree.

        With write_through, start copies if the queue is empty and the limits allow it, otherwise queue the blocks.
        Other policies ignore the blocks, or queue them if `queue` is set.
        """
        if stop <= first or not lease.node.attached:
            return
        job = WritebackJob(lease.chain, first, stop)
        if self._config.write is WritePolicy.THROUGH and not self.jobs and (room := self._room()):
            self._start(job, lease, room)
        elif queue or self._config.write is WritePolicy.THROUGH:
            self.jobs.append(job)

    def on_reuse(self, lease: Lease) -> None:
        """Queue the cached blocks of a request if the policy is write_through_selective."""
        if self._config.write is WritePolicy.SELECTIVE and lease.num_matched and lease.node.attached:
            self.jobs.append(WritebackJob(lease.chain, 0, lease.num_matched))

    def on_finish(self, lease: Lease) -> None:
        """Queue the blocks of a finished request if the policy is write_back, because they can now be evicted."""
        if self._config.write is WritePolicy.BACK and lease.num_blocks and lease.node.attached:
            self.jobs.append(WritebackJob(lease.chain, 0, lease.num_blocks))

    @property
    def is_due(self) -> bool:
        """True if there are jobs to start. With write_back, jobs wait until the tier above has few free slots."""
        if self._config.write is not WritePolicy.BACK:
            return bool(self.jobs)
        return bool(self.jobs) and self._above.num_free < self._config.low_share * self._above.num_slots

    def plan(self, now: float, *, flush: bool = False) -> None:
        """Start as many copies as the limits allow. With `flush`, do so even if `is_due` is False."""
        if self._config.blocks_per_second < math.inf:
            limit = max(1.0, self._config.blocks_per_second)
            elapsed = 0.0 if self._refilled_at is None else max(0.0, now - self._refilled_at)
            self._allowance = min(limit, self._allowance + elapsed * self._config.blocks_per_second)
            self._refilled_at = now
        if not self.jobs or not (flush or self.is_due):
            return
        room = self._room()
        while self.jobs and room > 0:
            job = self.jobs.popleft()
            lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
            is_selective = self._config.write is WritePolicy.SELECTIVE and not job.always
            if not is_selective or lease.node.usage.uses >= self._config.min_uses:  # otherwise, drop the job
                room -= self._start(job, lease, room)
            self._tree.release(lease, used=False)

    def save_next_victims(self, num_spare: int) -> None:
        """Copy blocks that an exclusive host tier lacks and the device will evict soon (see HostWriter.look_ahead)."""
        if isinstance(self._target, HostWriter) and self._target.look_ahead(num_spare):
            min_uses = self._config.min_uses if self._config.write is WritePolicy.SELECTIVE else 0
            started = self._target.save_next_victims(self._room(), min_uses)
            self._allowance -= started
            self.num_saved_late += started

    def _start(self, job: WritebackJob, lease: Lease, room: int) -> int:
        """Copy at most `room` blocks of a job, and requeue the rest, if any. Return the number of started copies."""
        started, rest = self._target.save(job, lease, room)
        if rest is not None:
            self.jobs.appendleft(rest)
        self._allowance -= started
        return started

    def _room(self) -> int:
        room = self._config.max_blocks - self._target.num_in_flight
        return max(0, room if room <= self._allowance else int(self._allowance))


class HostWriter:
    """Starts copies from the device to the host.

    If `ahead_share` is 0, the host tier is inclusive, and a copy may take the slot of any evictable host block.

    Otherwise the host tier is exclusive. A block that only the host has is then worth more than a copy of a device
    block. Unless `is_early` is set, jobs of the write policy therefore copy blocks only into free host slots. A block
    without a copy can still be copied when the device is about to evict it.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: Tier,
        host: Tier,
        transfers: TransferTracker,
        *,
        ahead_share: float = 0.0,
        has_stores: bool = False,
        is_early: bool = False,
    ) -> None:
        """With `is_early`, blocks are saved early even to a full exclusive host tier, so that stores get them early."""
        self._tree, self._device, self._host, self._transfers = tree, device, host, transfers
        self._ahead_share, self._is_early = ahead_share, is_early
        self._needs_keys = has_stores and not is_early
        self._waiting: list[Node] = []
        """Nodes that the device will evict soon and that `save_next_victims` has not saved yet. New nodes come from
        `look_ahead`. A node stays while it is leased or too many blocks are in flight."""

    @property
    def num_in_flight(self) -> int:
        return self._transfers.num_blocks(Route.DEVICE_TO_HOST)

    def save(self, job: WritebackJob, lease: Lease, room: int) -> tuple[int, WritebackJob | None]:
        """Copy the device blocks of a job that the host lacks. Return the number of copies and the rest of the job.

        The rest is the part beyond `room`. It is None if nothing is left, or if the host slots run out. An exclusive
        host tier uses only its free slots, unless `job.always` or `is_early` is set.
        """
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0, None
        is_spare = self._ahead_share > 0 and not (self._is_early or job.always)
        if is_spare and not self._host.pool.num_free:
            return 0, None
        on_device = block_states(lease, self._device, first, stop).translate(READABLE)
        wanted = mask_and(on_device, block_states(lease, self._host, first, stop).translate(IS_ABSENT))
        for low, high in mask_runs(wanted, first):
            count = min(high - low, room - started)
            if is_spare:
                count = min(count, self._host.pool.num_free)
            count = self._start(self._tree.share(lease), low, low + count)
            started += count
            if low + count < high:
                return started, replace(job, first=low + count) if started == room else None
        return started, None

    def look_ahead(self, num_spare: int) -> bool:
        """Find the nodes that the device will evict next. Return True if there are nodes for `save_next_victims`.

        `num_spare` is the number of device slots that CacheManager.plan keeps free. HostConfig.ahead_share limits the
        number of blocks in the found nodes. Only an exclusive host tier looks ahead.
        """
        if not self._ahead_share:
            return False
        device_slots, host_slots = self._device.pool.num_slots, self._host.pool.num_slots
        self._waiting += self._device.look_ahead(
            math.ceil(min(self._ahead_share * device_slots, host_slots / 4)) + num_spare
        )
        return bool(self._waiting)

    def save_next_victims(self, room: int, min_uses: int) -> int:
        """Copy at most `room` blocks that the device will evict soon and the host lacks. Return the number of copies.

        Blocks with fewer than `min_uses` uses are not saved.
        """
        device, started = self._device, 0
        nodes, self._waiting = self._waiting, []
        for node in nodes:
            if node.usage.uses < min_uses or not node.attached:
                continue
            if started >= room or node.leases:  # blocks of the node may be in flight
                self._waiting.append(node)
            elif device.is_next(node):
                started += self._save_node(node, room - started)
        return started

    def _save_node(self, node: Node, room: int) -> int:
        """Copy at most `room` blocks of a node in eviction order, the last block first. Return the number of copies."""
        on_device, on_host = node.held[self._device.number], node.held[self._host.number]
        assert on_device is not None
        wanted = bytes(on_device.states.translate(READABLE))
        if on_host is not None:
            wanted = mask_and(wanted, bytes(on_host.states.translate(IS_ABSENT)))
        if 1 not in wanted:
            return 0
        chain, started = self._chain_of(node), 0
        for low, high in list(mask_runs(wanted, node.start))[::-1]:
            count = self._start(self._tree.lease_at(chain, node), max(low, high - (room - started)), high)
            started += count
            if low + count < high:
                if started >= room:
                    self._waiting.append(node)
                break
        return started

    def _chain_of(self, node: Node) -> Chain:
        """Return a chain for the lease of a transfer.

        The chain has tokens and keys only if the blocks must be offered to stores after the transfer. With `is_early`,
        the blocks were already offered to the stores when they were first saved.
        """
        if not self._needs_keys:
            return Chain(self._tree.namespace, salt=node.domain[0], adapter=node.domain[1])
        chain = Chain.of_node(self._tree.namespace, node)
        chain.take_keys(node)
        return chain

    def _start(self, lease: Lease, first: int, stop: int) -> int:
        """Copy blocks [first, stop) of a path, or as many of them as fit on the host. Return the number of copies.

        The lease becomes part of the transfer, or is released if there are no slots.
        """
        slots = reserve_up_to(self._tree, self._host, stop - first, lease.chain.salt)
        count = len(slots)
        if count:
            begin_write(lease, self._host, first, slots)
            self._transfers.start(Route.DEVICE_TO_HOST, lease, first, self._device, slots)
        else:
            self._tree.release(lease, used=False)
        return count


def reserve_up_to(tree: RadixTree, tier: Tier, num_blocks: int, salt: bytes) -> Slots:
    """Reserve `num_blocks` slots in a tier, or as many as are available to the tenant of `salt`."""
    slots = tree.reserve(tier, num_blocks, salt)
    if isinstance(slots, Shortage):
        slots = tree.reserve(tier, min(num_blocks, slots.free + slots.evictable), salt)
    return slots if isinstance(slots, Slots) else Slots(tier.name, np.empty(0, np.int32))


@dataclass(slots=True, eq=False)
class _Copies:
    """Bit mask of the ranks whose part of a block is in the store. 0 means that the write is in flight.

    The blocks of one write share an instance, so that one assignment marks all of them as written.
    """

    ranks: int = 0


class StoreIndex:
    """Records the keys in one store, as far as they are known, and starts writes to the store."""

    def __init__(
        self,
        tree: RadixTree,
        host: Tier,
        config: StoreConfig,
        transfers: TransferTracker,
        listener: Listener | None = None,
    ) -> None:
        self.config = config
        self._events = StoreEvents(config.name, listener) if listener is not None else None
        self._tree, self._host, self._transfers = tree, host, transfers
        self._known: dict[bytes, _Copies] = {}  # keys that are stored or being written, newest last
        self._looked_up: dict[int, _Copies] = {}
        """Bit mask of ranks -> the _Copies instance of all keys that lookups found on exactly these ranks."""
        self._all_ranks = (1 << transfers.num_ranks) - 1
        self._writes: dict[int, tuple[list[bytes], _Copies]] = {}  # by transfer id
        self.inventory_probe = 0 if config.is_shared else transfers.probe(config.name)
        """Id of the probe that lists all keys; 0 if no result is outstanding."""

    # ---- known keys ------------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        """Number of recorded blocks, without the blocks that are being written."""
        known, writes = self._known, self._writes.values()
        return len(known) - sum(known.get(key) is copies for keys, copies in writes for key in keys)

    def num_leading(self, keys: Sequence[bytes], first: int = 0) -> int:
        """Count the consecutive keys, beginning at index `first`, that are recorded as stored by all ranks."""
        known, everyone = self._known, self._all_ranks
        for at in range(first, len(keys)):
            copies = known.get(keys[at])
            if copies is None or copies.ranks != everyone:
                return at - first
        return len(keys) - first

    def on_lookup(self, rank: int, lookup: StoreLookup) -> None:
        """Record which keys a rank found in the store and which it did not. Ignore keys that are being written."""
        known, mine = self._known, 1 << rank
        present = ((key, known.get(key)) for key in split_keys(lookup.present))
        self._remember(
            {
                key: self._of_ranks((copies.ranks if copies is not None else 0) | mine)
                for key, copies in present
                if copies is None or copies.ranks
            }
        )
        for key in split_keys(lookup.absent):
            copies = known.get(key)
            if copies is not None and copies.ranks & mine:
                del known[key]
                if copies.ranks != mine:
                    known[key] = self._of_ranks(copies.ranks & ~mine)
        if self._events is not None:
            self._events.removed(split_keys(lookup.absent))

    def _of_ranks(self, ranks: int) -> _Copies:
        return self._looked_up.setdefault(ranks, _Copies(ranks))

    def drop(self, keys: bytes) -> None:
        for key in split_keys(keys):
            self._known.pop(key, None)  # also during a write: the store executes the drop after the write
        if self._events is not None:
            self._events.removed(split_keys(keys))
        if keys:
            self._transfers.drop(Drop(self.config.name, keys))

    def clear(self) -> None:
        """Remove all blocks of this cache from the store."""
        self._known.clear()
        if self._events is not None:
            self._events.removed_all()
        self._transfers.drop(Drop(self.config.name))

    def _remember(self, copies: dict[bytes, _Copies]) -> None:
        """Record keys. If there are more than `max_known` keys, remove the oldest."""
        self._known.update(copies)
        excess = len(self._known) - self.config.max_known
        if excess <= 0:
            return
        forgotten = list(islice(self._known, excess))
        for key in forgotten:
            del self._known[key]
        if self._events is not None:
            self._events.removed(forgotten)

    def on_reset(self) -> None:
        """Handle a reset of the tree. The tree's IndexCleared event also covers the blocks in this store."""
        if self._events is not None:
            self._events.reset()

    # ---- writes ----------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return self._transfers.num_blocks(Route.HOST_TO_STORE, self.config.name)

    def on_transfer_done(self, done: PendingTransfer) -> None:
        keys, copies = self._writes.pop(done.transfer.id)
        for key, ok in zip(keys, done.arrived, strict=True) if 0 in done.arrived else ():
            if not ok and self._known.get(key) is copies:
                del self._known[key]
        copies.ranks = self._all_ranks
        if self._events is not None:
            written = bytes([self._known.get(key) is copies for key in keys])  # 0 if failed, dropped or forgotten
            self._events.written(done.lease, done.first, written, self._tree.namespace)

    def save(self, job: WritebackJob, lease: Lease, room: int) -> tuple[int, WritebackJob | None]:
        """Write at most `room` blocks of a job that the store lacks. Return their number and the rest of the job."""
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0, None
        keys = job.chain.key_list(first, stop)
        wanted = mask_and(block_states(lease, self._host, first, stop).translate(READABLE), self._are_new(keys))
        for low, high in mask_runs(wanted, first):
            count = min(high - low, room - started)
            if count:
                own = keys[low - first : low - first + count]
                shared, name = self._tree.share(lease), self.config.name
                number = self._transfers.start(Route.HOST_TO_STORE, shared, low, self._host, name, b"".join(own))
                copies = _Copies()
                self._writes[number] = own, copies
                self._remember(dict.fromkeys(own, copies))
                started += count
            if low + count < high:
                return started, replace(job, first=low + count)
        return started, None

    def _are_new(self, keys: list[bytes]) -> Mask:
        """Return a mask of the keys that are neither recorded as complete in the store nor being written."""
        known = self._known
        if known.keys().isdisjoint(keys):
            return b"\1" * len(keys)
        enough = (0, self._all_ranks)
        return bytes([key not in known or known[key].ranks not in enough for key in keys])
