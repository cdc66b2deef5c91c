"""CacheController: carries out plans. It moves bytes and decides nothing.

    Plan ──submit──> device <─TransferManager─> host <─StoreWorker─> stores ──poll──> Report

Nothing here waits for a copy but `wait` and `close`. Blocks of every cache group travel together: a block has arrived
when it has in all of them. A transfer that fails is reported as failed for exactly the blocks it lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtier.errors import ArgumentError, KvtierError, TransferTimeoutError
from kvtier.layout import CacheGroup, KVLayout
from kvtier.memory import Event, Placement
from kvtier.memory.copy_paths import run_path
from kvtier.messages import (
    I32,
    Plan,
    Report,
    Route,
    StoreLookup,
    TransferRequest,
    TransferResult,
    slot_bytes,
)
from kvtier.storage import ShardStores, Store
from kvtier.transfer import DeviceCache, HostMemory, TransferConfig, TransferManager, TransferReport
from kvtier.transfer import TransferHandle as Copy
from kvtier.transfer.staging import Mover
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.scrubber import Scrubber
from kvtier.worker.sharding import Sharding
from kvtier.worker.store_io import StoreWorker


@dataclass(slots=True)
class _CopyInFlight:
    """A load of a plan, or all its saves, under way: one copy for each cache group."""

    transfers: tuple[TransferRequest, ...]
    copies: list[Copy]
    reports: list[TransferReport] = field(default_factory=list)


class CacheController:
    """The engine's device caches, block-first, one per group of `layout`; as many blocks of each in host memory.

    It owns the host memory and the stores, and closes them. For one thread, but for `wait`.
    """

    def __init__(
        self,
        layout: KVLayout,
        caches: Sequence[torch.Tensor],
        num_host_blocks: int,
        *,
        stores: Mapping[str, Store | ShardStores] | None = None,
        namespace: bytes = bytes(32),
        secret: bytes = b"",
        sharding: Sharding | None = None,
        config: TransferConfig | None = None,
        mover: Mover = run_path,
    ) -> None:
        """`namespace` is the fingerprint that stored blocks carry, `secret` keys the digests of their tokens. With
        several ranks `layout` is this rank's own (KVLayout.of_rank). `mover` carries out copies; tests pass one that
        fails."""
        if len(caches) != len(layout.groups) or num_host_blocks < 1:
            raise ArgumentError(
                f"{len(layout.groups)} groups need as many caches and host blocks, got {len(caches)} and "
                f"{num_host_blocks}"
            )
        sharding = sharding or Sharding()
        self.rank = sharding.rank
        self.layout = layout
        self._device = Placement.parse(str(caches[0].device))
        self.overlaps_compute = caches[0].is_cuda
        """True if transfers may be started and polled while the device computes a step."""
        self._transfers = TransferManager(layout, self._device, config, mover=mover)
        self._hosts = self._new_hosts(num_host_blocks)
        for host in self._hosts:
            host.wait_ready(min(host.num_slots, host.piece_slots))
        self.register(caches)  # before there are threads: tensors that do not fit must leave nothing behind
        self._stores = StoreWorker(stores or {}, layout.groups, self._hosts, namespace, sharding, secret)
        self._under: dict[int, _CopyInFlight] = {}
        self._by_copy: dict[int, _CopyInFlight] = {}
        self._scrubber = Scrubber(self._hosts)
        self._to_host: dict[int, I32] = {}  # host slots that transfers write
        self._done: list[TransferResult] = []
        self._epoch = 0
        self._told_ready = 0

    # ---- memory ----------------------------------------------------------------------------------------------------

    def register(self, caches: Sequence[torch.Tensor]) -> None:
        """Use these tensors; those before must have been released."""
        for group, cache, host in zip(self.layout.groups, caches, self._hosts, strict=True):
            self._transfers.register(DeviceCache.block_first(group, cache), host)

    def release(self) -> None:
        """Wait for every copy, then forget the device tensors, so that they can be freed: for sleep and resize."""
        self._transfers.release()

    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor]) -> None:
        """Other host memory, with the blocks that are in both. Nothing may be under way; slots beyond are lost.

        OutOfMemoryError if there is not as much to be had: then it is as before.
        """
        old, new = self._hosts, self._new_hosts(num_blocks)
        try:
            for host in new:
                host.wait_ready(num_blocks)
        except BaseException:
            for host in new:
                host.free()
            raise
        self._transfers.release()
        self._hosts = new
        for before, after in zip(old, new, strict=True):
            count = min(before.num_ready, after.num_ready)
            after.slots()[:count].copy_(before.slots()[:count])
        self._scrubber.use(self._hosts, min(old[0].num_ready, self.num_host_ready))
        self._stores.use(self._hosts)
        for before in old:
            before.free()
        self._told_ready = 0
        self.register(caches)

    @property
    def num_host_ready(self) -> int:
        """Host slots that can be used by now; at least one piece of each group's memory."""
        return min(host.num_ready for host in self._hosts)

    def _new_hosts(self, num_blocks: int) -> list[HostMemory]:
        return [HostMemory(group, num_blocks, self._device) for group in self.layout.groups]

    # ---- plans -----------------------------------------------------------------------------------------------------

    def present(self) -> Event | None:
        """The end of what the current stream has been given: for a plan that is submitted later."""
        return self._transfers.present()

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        """Begin what a plan says. Copies come behind `after`; None: behind what the current stream has been given."""
        self._epoch = plan.epoch
        for drop in plan.drops:
            self._stores.drop(drop)
        for probe in plan.probes:
            self._stores.probe(probe)
        for transfer in plan.transfers:
            if transfer.route in (Route.STORE_TO_HOST, Route.DEVICE_TO_HOST):
                self._scrubber.forget(transfer.targets.tolist())
                self._to_host[transfer.id] = transfer.targets
            if transfer.route in (Route.STORE_TO_HOST, Route.HOST_TO_STORE):
                self._stores.move(transfer)
            elif transfer.route is Route.HOST_TO_DEVICE:
                self._copy((transfer,), after)
        # Nobody waits for a save, and a step of many rows has many of a block each: one copy is 0.3 ms of this thread.
        self._copy(tuple(transfer for transfer in plan.transfers if transfer.route is Route.DEVICE_TO_HOST), after)

    def poll(self, *, loads_only: bool = False) -> list[Report]:
        """What has been done since the last call: all of it, or all but the saves. Never waits."""
        for report in self._transfers.poll(only_urgent=loads_only):
            self._take(report)
        outcomes, self._done = [*self._done, *self._stores.take_outcomes()], []
        self._note(outcomes)
        found = self._scrubber.take_damaged()
        damaged = slot_bytes(np.array(found, np.int32)) if found else b""
        presences: list[StoreLookup] = self._stores.take_presences()
        ready = self.num_host_ready
        num_host_slots = ready if ready > self._told_ready else 0
        self._told_ready = ready
        if not (outcomes or presences or num_host_slots or damaged):
            return []
        return [Report(self._epoch, self.rank, tuple(outcomes), tuple(presences), num_host_slots, damaged)]

    @property
    def is_busy(self) -> bool:
        """Whether reports are still to come."""
        return bool(self._under or self._done or self._stores.is_busy)

    @property
    def is_copying(self) -> bool:
        """Whether blocks are on their way between device and host."""
        return bool(self._under)

    def wait(self, timeout: float) -> None:
        """Wait until something may have been done, at most so long. For when there is nothing else to do."""
        under_way = sorted(self._under.values(), key=lambda each: each.transfers[0].route is not Route.HOST_TO_DEVICE)
        if under_way and not self._stores.is_busy:
            with contextlib.suppress(TransferTimeoutError):
                under_way[0].copies[0].settle(timeout)
        else:  # copies beside a store's work are looked at again soon
            self._stores.has_news(min(timeout, 0.001) if under_way else timeout)

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        """For a step that starts before these loads are done."""
        copies = [self._under[number].copies for number in transfer_ids if number in self._under]
        failed = any(not outcome.ok and outcome.transfer_id in transfer_ids for outcome in self._done)
        return LayerWaits(copies, self._device, failed=failed)

    def close(self) -> None:
        """Finish what is under way, close the stores, free the host memory. Twice is fine."""
        self._stores.close()
        self._transfers.close()
        self._scrubber.close()
        for host in self._hosts:
            host.free()

    def _note(self, outcomes: Sequence[TransferResult]) -> None:
        """What has come to the host stays there: from now on it is looked after."""
        for outcome in outcomes:
            slots = self._to_host.pop(outcome.transfer_id, None)
            if slots is not None and (outcome.ok or outcome.arrived):
                arrived = slots[np.frombuffer(outcome.arrived, np.bool_)] if outcome.arrived else slots
                self._scrubber.note(arrived.tolist())

    def _copy(self, transfers: tuple[TransferRequest, ...], after: Event | None) -> None:
        """One copy for each group, of one load or of any number of saves, on the device's copy streams."""
        if not transfers:
            return
        under = _CopyInFlight(transfers, [])
        sources, targets = (
            np.concatenate([getattr(transfer, end) for transfer in transfers]).astype(np.int64)
            for end in ("sources", "targets")
        )
        try:
            for group in self.layout.groups:
                if transfers[0].route is Route.HOST_TO_DEVICE:
                    copy = self._transfers.load(targets, sources, group=group.name, layer_wise=True, after=after)
                else:
                    copy = self._transfers.save(sources, targets, group=group.name, after=after)
                under.copies.append(copy)
        except KvtierError as error:
            for copy in under.copies:  # what was started must be over before the slots are anybody else's
                copy.wait()
            if len(transfers) > 1:  # only those that cannot be done fail
                for transfer in transfers:
                    self._copy((transfer,), after)
                return
            reason = f"{type(error).__name__}: {error}"
            self._done.append(TransferResult(transfers[0].id, False, 0, 0.0, reason))
            return
        self._under.update((transfer.id, under) for transfer in transfers)
        self._by_copy.update((copy.id, under) for copy in under.copies)

    def _take(self, report: TransferReport) -> None:
        """A copy of one group is over."""
        under = self._by_copy.pop(report.id, None)
        if under is None:
            return  # it was waited for when its transfer failed to start
        under.reports.append(report)
        if len(under.reports) < len(under.copies):
            return
        lost = [failure.host_id for each in under.reports for failure in each.failures]
        reason = "; ".join(sorted({str(failure.error) for each in under.reports for failure in each.failures}))
        # of the copies, and not until somebody looked: a step may lie between
        seconds = max(each.seconds for each in under.reports)
        num_bytes = sum(each.nbytes for each in under.reports)
        num_blocks = sum(transfer.num_blocks for transfer in under.transfers)
        for transfer in under.transfers:
            del self._under[transfer.id]
            share = num_bytes * transfer.num_blocks // num_blocks
            slots = transfer.sources if transfer.route is Route.HOST_TO_DEVICE else transfer.targets
            arrived = ~np.isin(slots, lost) if lost else None
            if arrived is None or arrived.all():
                self._done.append(TransferResult(transfer.id, True, share, seconds))
            else:
                which = arrived.astype(np.uint8).tobytes()
                self._done.append(TransferResult(transfer.id, False, share, seconds, reason, which))


def layout_of(caches: Sequence[torch.Tensor], block_tokens: int) -> KVLayout:
    """The layout of block-first caches [block, layer, K/V, token, head, head size], the first one's group "main".

    Those who guess for it are small: with several ranks, the first has them whole.
    """
    groups = []
    for number, cache in enumerate(caches):
        _, num_layers, _, _, num_heads, head_dim = cache.shape
        name = "main" if not number else f"draft-{number}"
        element = str(cache.dtype).removeprefix("torch.")
        group = CacheGroup.attention(name, num_layers, num_heads, head_dim, element, block_tokens)
        groups.append(group if not number else group.kept_whole())
    return KVLayout(block_tokens, tuple(groups))
