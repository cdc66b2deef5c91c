"""Write blocks down early: device to host, and host to stores.

WritebackQueue   blocks of the upper tier that may get a copy below, in order
HostWriteback    copies in host memory, and loads from it
StoreWriteback   keys that a store is known to have, and writes to it

Device eviction never waits: a block with a host copy is found there again, a block without one is a miss. A copy stays
after a load, so that a second eviction is free, until the host tier evicts it. A store keeps blocks by key, outside the
tree, and evicts by itself: the recorded keys may be out of date, and a read that finds nothing is a miss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from kvtier.cache.config import HostConfig, StoreConfig, WritebackConfig, WritePolicy
from kvtier.cache.in_flight import Mask, PendingTransfer, TransferTracker, mask_and, mask_runs
from kvtier.index import Chain, Lease, RadixTree, Shortage, Slots, Tier
from kvtier.index.node import IS_ABSENT, READABLE
from kvtier.index.pool import I32
from kvtier.index.transitions import begin_write, block_slots, block_states
from kvtier.messages import Drop, Route, StoreLookup, split_keys


@dataclass(frozen=True, slots=True)
class WritebackJob:
    """Blocks [first, stop) of a chain might want a copy."""

    chain: Chain
    first: int
    stop: int
    always: bool = False
    """Whatever the policy says: somebody asked for it."""

    def after(self, block: int) -> WritebackJob:
        """What is left of it from a block on."""
        return replace(self, first=block)


Save = Callable[[WritebackJob, Lease, int], int]
"""Start saving what of a job lacks a copy, at most so many blocks, of a path that is held; returns the blocks started.
Where there are more than may start, the rest of the job is put back."""


class WritebackQueue:
    """Jobs in the order they came, by policy, and how many blocks of them may go now."""

    def __init__(
        self,
        tree: RadixTree,
        saving: WritebackConfig,
        above: Tier,
        save: Save,
        num_moving: Callable[[], int],
        max_jobs: int,
    ) -> None:
        """For what is in tier `above`. `num_moving` tells how many blocks are on their way.

        Beyond `max_jobs` the oldest are forgotten: more than a tier has slots cannot all have blocks there.
        """
        self.saving = saving
        self._tree, self._pool, self._save, self._num_moving = tree, above.pool, save, num_moving
        self._jobs: deque[WritebackJob] = deque(maxlen=max_jobs)
        self._allowance = saving.blocks_per_second  # a second's worth may go at once
        self._counted_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._jobs)

    # ---- what might want a copy ------------------------------------------------------------------------------------

    def on_blocks_ready(self, lease: Lease, first: int, stop: int) -> None:
        """Blocks of a path are in the tier above since now: with write_through they go at once, if nobody waits.

        While the path is held they need not be looked for.
        """
        if self.saving.write is not WritePolicy.THROUGH or stop <= first or not lease.node.attached:
            return
        job, room = WritebackJob(lease.chain, first, stop), 0 if self._jobs else self._room()
        if room:
            self._allowance -= self._save(job, lease, room)
        else:
            self._jobs.append(job)

    def on_reuse(self, lease: Lease) -> None:
        """A request was given cached blocks."""
        if self.saving.write is WritePolicy.SELECTIVE and lease.num_matched and lease.node.attached:
            self._jobs.append(WritebackJob(lease.chain, 0, lease.num_matched))

    def on_finish(self, lease: Lease) -> None:
        """A request is over; its blocks are the next to get cold."""
        if self.saving.write is WritePolicy.BACK and lease.num_blocks and lease.node.attached:
            self._jobs.append(WritebackJob(lease.chain, 0, lease.num_blocks))

    def put(self, job: WritebackJob) -> None:
        """Another job."""
        self._jobs.append(job)

    def requeue(self, job: WritebackJob) -> None:
        """It is next again."""
        self._jobs.appendleft(job)

    def clear(self) -> None:
        """Nothing of it is there any more."""
        self._jobs.clear()

    # ---- what goes now ---------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there is something to save, and with write_back a reason to: the tier above runs low."""
        if self.saving.write is not WritePolicy.BACK:
            return bool(self._jobs)
        return bool(self._jobs) and self._pool.num_free < self.saving.low_share * self._pool.num_slots

    def plan(self, now: float, *, all_of_them: bool = False) -> None:
        """Start as many saves as may be under way."""
        if self.saving.blocks_per_second < math.inf:
            limit = max(1.0, self.saving.blocks_per_second)
            gone = 0.0 if self._counted_at is None else max(0.0, now - self._counted_at)
            self._allowance = min(limit, self._allowance + gone * self.saving.blocks_per_second)
            self._counted_at = now
        if not (self.is_due or (all_of_them and self._jobs)):
            return
        room = self._room()
        while self._jobs and room > 0:
            job = self._jobs.popleft()
            lease = self._tree.match(job.chain, now=now, max_blocks=job.stop)
            started = self._save(job, lease, room) if self._is_worth(job, lease) else 0
            self._tree.release(lease, used=False)
            self._allowance -= started
            room -= started

    def _is_worth(self, job: WritebackJob, lease: Lease) -> bool:
        """Whether blocks of this path were used often enough, or somebody wants them saved."""
        is_selective = self.saving.write is WritePolicy.SELECTIVE and not job.always
        return not is_selective or lease.node.usage.uses >= self.saving.min_uses

    def _room(self) -> int:
        """Blocks that may start now."""
        return max(0, min(self.saving.max_blocks - self._num_moving(), int(min(self._allowance, 1 << 30))))


class HostWriteback:
    """Decides saves and loads between the two memories of a tree, and plans them as moves."""

    def __init__(
        self, tree: RadixTree, device: Tier, host: Tier, config: HostConfig, moves: TransferTracker, max_jobs: int
    ) -> None:
        self.host = host
        self.queue = WritebackQueue(tree, config.saving, device, self._save, self._num_saving, max_jobs)
        self._tree, self._device, self._moves = tree, device, moves
        self._sizes = [0] * moves.num_ranks
        self.num_damaged = 0
        """Blocks that were found to have changed."""

    def set_capacity(self, rank: int, num_slots: int) -> None:
        """A rank has so many slots by now: what all of them have can be used."""
        self._sizes[rank] = num_slots
        if min(self._sizes) > self.host.pool.num_slots:
            self.host.pool.resize(min(self._sizes))

    def invalidate(self, slots: I32) -> None:
        """The blocks in these slots changed by themselves: they are no copies any more, but for those being read."""
        self.num_damaged += self._tree.invalidate(self.host, slots)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def _num_saving(self) -> int:
        return self._moves.num_blocks(Route.DEVICE_TO_HOST)

    def _save(self, job: WritebackJob, lease: Lease, room: int) -> int:
        """Start saving what of a job is on the device and not on the host, as far as the host has room."""
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0
        on_device, on_host = (block_states(lease, tier, first, stop) for tier in (self._device, self.host))
        wanted = mask_and(on_device.translate(READABLE), on_host.translate(IS_ABSENT))
        for low, high in mask_runs(wanted, first):
            slots = reserve_up_to(self._tree, self.host, min(high - low, room - started), job.chain.salt)
            count = len(slots)
            if count:
                sources = Slots(self._device.name, block_slots(lease, self._device, low, low + count))
                shared = self._tree.share(lease)
                begin_write(shared, self.host, low, slots)
                self._moves.start(Route.DEVICE_TO_HOST, shared, low, sources, slots)
                started += count
            if low + count < high:
                if started == room:  # else the host is full of leased blocks
                    self.queue.requeue(job.after(low + count))
                break
        return started

    # ---- loading ---------------------------------------------------------------------------------------------------

    def device_states(self, lease: Lease) -> bytes:
        """How each block that was found stands on the device."""
        return block_states(lease, self._device, 0, lease.num_matched) if lease.num_matched else b""

    def load(self, lease: Lease, slots: Slots) -> list[int]:
        """Start loading what of a path is not on the device, into slots reserved there. Returns the moves' ids."""
        absent = self.device_states(lease).translate(IS_ABSENT)
        at, ids = 0, []
        for first, stop in mask_runs(absent, 0):
            sources = Slots(self.host.name, block_slots(lease, self.host, first, stop))
            targets = Slots(slots.tier, slots.ids[at : at + stop - first])
            at += stop - first
            shared = self._tree.share(lease)
            begin_write(shared, self._device, first, targets)
            ids.append(self._moves.start(Route.HOST_TO_DEVICE, shared, first, sources, targets))
        return ids


def reserve_up_to(tree: RadixTree, tier: Tier, num_blocks: int, salt: bytes) -> Slots:
    """As many slots of a tier as a tenant can have, at most so many."""
    slots = tree.reserve(tier, num_blocks, salt)
    if isinstance(slots, Shortage):
        slots = tree.reserve(tier, min(num_blocks, slots.free + slots.evictable), salt)
    return slots if isinstance(slots, Slots) else Slots(tier.name, np.empty(0, np.int32))


@dataclass(slots=True, eq=False)
class _Copies:
    """Which ranks' part of a block a store has, as bits. Blocks that go there together share one: when they have
    arrived, it is told once for all of them."""

    ranks: int = 0
    """None: on their way."""


class StoreWriteback:
    """What is known of one store, and what is written to it."""

    def __init__(self, tree: RadixTree, host: Tier, config: StoreConfig, moves: TransferTracker, max_jobs: int) -> None:
        self.config = config
        self.queue = WritebackQueue(tree, config.saving, host, self._save, self._num_storing, max_jobs)
        self._tree, self._host, self._moves = tree, host, moves
        self._known: dict[bytes, _Copies] = {}  # those it has, and those on their way; learned of last at the end
        self._found: dict[int, _Copies] = {}  # ranks -> for what was not stored by us
        self._all_ranks = (1 << moves.num_ranks) - 1
        self._writes: dict[int, tuple[list[bytes], _Copies]] = {}  # transfer -> its keys
        self.inventory_probe = 0 if config.is_shared else moves.probe(config.name)
        """The probe for all that it has, until it is answered; then 0."""

    # ---- what it has -----------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        """Blocks it is known to have, for some rank."""
        known, writes = self._known, self._writes.values()
        return len(known) - sum(known.get(key) is copies for keys, copies in writes for key in keys)

    def num_leading(self, keys: Sequence[bytes], first: int = 0) -> int:
        """How many of these, from `first` on, it is known to have."""
        known, everyone = self._known, self._all_ranks
        for at in range(first, len(keys)):
            found = known.get(keys[at])
            if found is None or found.ranks != everyone:
                return at - first
        return len(keys) - first

    def on_lookup(self, rank: int, presence: StoreLookup) -> None:
        """It was found to have some, and not to have others. What is on its way there is none of them."""
        known, mine = self._known, 1 << rank
        present = ((key, known.get(key)) for key in split_keys(presence.present))
        self._know(
            {
                key: self._of_ranks((copies.ranks if copies is not None else 0) | mine)
                for key, copies in present
                if copies is None or copies.ranks
            }
        )
        for key in split_keys(presence.absent):
            copies = known.get(key)
            if copies is not None and copies.ranks & mine:
                del known[key]
                if copies.ranks != mine:
                    known[key] = self._of_ranks(copies.ranks & ~mine)

    def _of_ranks(self, ranks: int) -> _Copies:
        return self._found.setdefault(ranks, _Copies(ranks))

    def on_probe_result(self, probe_id: int) -> None:
        """A probe was answered by every rank."""
        if probe_id == self.inventory_probe:
            self.inventory_probe = 0

    def drop(self, keys: bytes) -> None:
        """Have it forget these blocks."""
        for key in split_keys(keys):
            self._known.pop(key, None)  # what is on its way there is forgotten behind it
        if keys:
            self._moves.drop(Drop(self.config.name, keys))

    def clear(self) -> None:
        """Have it forget all of this cache."""
        self._known.clear()
        self._moves.drop(Drop(self.config.name))

    def _know(self, copies: dict[bytes, _Copies]) -> None:
        """Remember who has these keys; beyond the limit, those learned of first are forgotten."""
        self._known.update(copies)
        for key in list(islice(self._known, max(0, len(self._known) - self.config.max_known))):
            del self._known[key]

    # ---- what it gets ----------------------------------------------------------------------------------------------

    def on_blocks_ready(self, lease: Lease, first: int, stop: int) -> None:
        """Blocks of a path are on the host since now. Whether they are stored is the policy's to say."""
        if self.config.saving.write is WritePolicy.THROUGH:
            self.queue.on_blocks_ready(lease, first, stop)
        elif lease.node.attached:
            self.queue.put(WritebackJob(lease.chain, first, stop))

    def on_transfer_done(self, move: PendingTransfer, there: Mask) -> None:
        """A write to this store is over."""
        keys, copies = self._writes.pop(move.transfer.id)
        for key, ok in zip(keys, there, strict=True) if 0 in there else ():
            if not ok and self._known.get(key) is copies:
                del self._known[key]
        copies.ranks = self._all_ranks

    def _save(self, job: WritebackJob, lease: Lease, room: int) -> int:
        """Start storing what of a job is on the host and not in the store."""
        first, stop, started = job.first, min(job.stop, lease.num_blocks), 0
        if stop <= first:
            return 0
        keys = job.chain.key_list(first, stop)
        wanted = mask_and(block_states(lease, self._host, first, stop).translate(READABLE), self._are_new(keys))
        for low, high in mask_runs(wanted, first):
            count = min(high - low, room - started)
            if count < high - low:
                self.queue.requeue(job.after(low + count))
            if not count:
                break
            mine = keys[low - first : low - first + count]
            sources = Slots(self._host.name, block_slots(lease, self._host, low, low + count))
            shared, name = self._tree.share(lease), self.config.name
            number = self._moves.start(Route.HOST_TO_STORE, shared, low, sources, name, b"".join(mine))
            copies = _Copies()
            self._writes[number] = mine, copies
            self._know(dict.fromkeys(mine, copies))  # they were looked up just now: the table's places are in the cache
            started += count
        return started

    def _num_storing(self) -> int:
        return self._moves.num_blocks(Route.HOST_TO_STORE, self.config.name)

    def _are_new(self, keys: list[bytes]) -> Mask:
        """Which of these it is not known to have, nor about to get."""
        known = self._known
        if known.keys().isdisjoint(keys):
            return b"\1" * len(keys)
        enough = (0, self._all_ranks)
        return bytes([key not in known or known[key].ranks not in enough for key in keys])
