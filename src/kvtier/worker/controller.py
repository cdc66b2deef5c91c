"""CacheController: executes plans. It moves blocks and makes no policy decisions.

    Plan ──submit──> device <─TransferManager─> host <─StoreWorker─> stores ──poll──> Report

Only `wait`, `release`, `resize_host` and `close` wait for copies. `submit` waits only if one of its copies cannot
start. A block has arrived when its data has arrived in all cache groups. The result of a failed transfer identifies
exactly the lost blocks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtier.errors import ArgumentError, KvtierError, TransferTimeoutError
from kvtier.layout import CacheGroup, KVLayout
from kvtier.memory import Event, Placement
from kvtier.memory.copy_paths import run_path
from kvtier.messages import I32, Plan, Report, Route, TransferRequest, TransferResult, slot_bytes
from kvtier.storage import ShardStores, Store
from kvtier.transfer import DeviceCache, HostMemory, TransferConfig, TransferHandle, TransferManager, TransferReport
from kvtier.transfer.staging import Mover
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.scrubber import Scrubber
from kvtier.worker.sharding import Sharding
from kvtier.worker.store_io import StoreWorker


@dataclass(slots=True)
class _CopyJob:
    """One load, or several saves of a plan that are copied together. There is one copy per cache group."""

    transfers: tuple[TransferRequest, ...]
    copies: list[TransferHandle]
    reports: list[TransferReport] = field(default_factory=list)


class CacheController:
    """Moves blocks between device caches (one per group of `layout`), host memory and stores.

    A device cache is a block-first tensor or a DeviceCache. The controller owns the host memory and the stores.
    Only `wait` is thread-safe.
    """

    def __init__(
        self,
        layout: KVLayout,
        caches: Sequence[torch.Tensor | DeviceCache],
        num_host_blocks: int,
        *,
        stores: Mapping[str, Store | ShardStores] | None = None,
        namespace: bytes = bytes(32),
        secret: bytes = b"",
        sharding: Sharding | None = None,
        config: TransferConfig | None = None,
        layer_wise: bool = True,
        lazy_host: bool = False,
        mover: Mover = run_path,
    ) -> None:
        """`namespace` is the fingerprint in the labels of stored blocks. `secret` is the key for the token digests in
        these labels. `layout` is the layout of this rank (see KVLayout.of_rank). With `layer_wise`, loads make layers
        available one after another; otherwise loads use fewer, larger copies. With `lazy_host`, pageable host memory
        becomes resident when it is first used, instead of in the background. `mover` executes copies.
        """
        if len(caches) != len(layout.groups) or num_host_blocks < 1:
            raise ArgumentError(
                f"need one cache for each of {len(layout.groups)} groups and at least 1 host block, got {len(caches)} "
                f"caches and {num_host_blocks} host blocks"
            )
        sharding = sharding or Sharding()
        self.rank = sharding.rank
        self.layout = layout
        first = caches[0]
        self._device = Placement.parse(str(first.device)) if isinstance(first, torch.Tensor) else first.placement
        self._layer_wise, self._lazy_host = layer_wise, lazy_host
        self.overlaps_compute = self._device.is_device
        """True if the caller may start and poll transfers while the device computes a step."""
        self._transfers = TransferManager(layout, self._device, config, mover=mover)
        self._hosts = self._new_hosts(num_host_blocks)
        for host in self._hosts:
            host.wait_ready(min(host.num_slots, host.piece_slots))
        self.register(caches)  # may fail, so it must run before the stores and the scrubber start their threads
        self._stores = StoreWorker(stores or {}, layout.groups, self._hosts, namespace, sharding, secret)
        self._in_flight: dict[int, _CopyJob] = {}
        self._by_copy: dict[int, _CopyJob] = {}
        self._scrubber = Scrubber(self._hosts)
        self._to_host: dict[int, I32] = {}  # transfer id -> host slots that the transfer writes
        self._done: list[TransferResult] = []
        self._epoch = 0
        self._reported_ready = 0

    # ---- memory ----------------------------------------------------------------------------------------------------

    def register(self, caches: Sequence[torch.Tensor | DeviceCache]) -> None:
        """Use these device caches for all later transfers. Any previous caches must have been released."""
        for group, cache, host in zip(self.layout.groups, caches, self._hosts, strict=True):
            used = DeviceCache.block_first(group, cache) if isinstance(cache, torch.Tensor) else cache
            self._transfers.register(used, host)

    def release(self) -> None:
        """Wait for all copies, then drop the references to the device tensors, so that the caller can free them."""
        self._transfers.release()

    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor | DeviceCache]) -> None:
        """Replace the host memory, and copy as many blocks as fit. No transfer may be in flight.

        Drop the previous device caches, and use `caches` for later transfers. If the memory cannot be allocated, raise
        OutOfMemoryError and keep the old memory.
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
        self._reported_ready = 0
        self.register(caches)

    @property
    def num_host_ready(self) -> int:
        """Number of host slots that are ready in all cache groups."""
        return min(host.num_ready for host in self._hosts)

    def _new_hosts(self, num_blocks: int) -> list[HostMemory]:
        return [HostMemory(group, num_blocks, self._device, lazy=self._lazy_host) for group in self.layout.groups]

    def use_namespace(self, fingerprint: bytes) -> None:
        """Use another namespace in the labels of all later reads and writes of stores."""
        self._stores.namespace = fingerprint

    # ---- plans -----------------------------------------------------------------------------------------------------

    def record_event(self) -> Event | None:
        """Record an event after the work queued so far on the current stream, to be passed to `submit` as `after`."""
        return self._transfers.record_event()

    def present(self) -> Event | None:
        """Deprecated: use `record_event`."""
        warnings.warn("present() is now record_event()", DeprecationWarning, stacklevel=2)
        return self.record_event()

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        """Start a plan. Device copies wait for the event `after` (default: the work queued on the current stream)."""
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
        # All saves share one copy per cache group, because a step has many saves and starting a copy takes 0.3 ms.
        self._copy(tuple(transfer for transfer in plan.transfers if transfer.route is Route.DEVICE_TO_HOST), after)

    def poll(self, *, loads_only: bool = False) -> list[Report]:
        """Return the results since the last call, without waiting. With `loads_only`, a later call reports saves."""
        for report in self._transfers.poll(only_urgent=loads_only):
            self._take(report)
        from_stores, lookups = self._stores.take()
        results, self._done = [*self._done, *from_stores], []
        for result in results:
            slots = self._to_host.pop(result.transfer_id, None)
            if slots is not None and (result.ok or result.arrived):
                arrived = slots[np.frombuffer(result.arrived, np.bool_)] if result.arrived else slots
                self._scrubber.note(arrived.tolist())
        bad_slots = self._scrubber.take_damaged()
        damaged = slot_bytes(np.array(bad_slots, np.int32)) if bad_slots else b""
        ready = self.num_host_ready
        num_host_slots = ready if ready > self._reported_ready else 0
        self._reported_ready = ready
        if not (results or lookups or num_host_slots or damaged):
            return []
        return [Report(self._epoch, self.rank, tuple(results), tuple(lookups), num_host_slots, damaged)]

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight or self._done or self._stores.is_busy)

    @property
    def is_copying(self) -> bool:
        """True if copies between device and host are in flight."""
        return bool(self._in_flight)

    def wait(self, timeout: float) -> None:
        """Wait for a copy or a store to end, at most `timeout` seconds. Wait for a load rather than a save.

        If copies and stores are busy, wait at most 1 ms.
        """
        copies = sorted(self._in_flight.values(), key=lambda job: job.transfers[0].route is not Route.HOST_TO_DEVICE)
        if copies and not self._stores.is_busy:
            with contextlib.suppress(TransferTimeoutError):
                copies[0].copies[0].settle(timeout)
        else:  # if copies are in flight too, return soon to poll them
            self._stores.wait(min(timeout, 0.001) if copies else timeout)

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        """Return the LayerWaits for a step that starts before these loads have ended."""
        copies = [self._in_flight[number].copies for number in transfer_ids if number in self._in_flight]
        failed = any(not result.ok and result.transfer_id in transfer_ids for result in self._done)
        return LayerWaits(copies, self._device, failed=failed)

    def close(self) -> None:
        """Close the stores and free the host memory. Idempotent.

        Transfers with stores run to their end. A copy between device and host stops after the slices that were
        already submitted.
        """
        try:
            self._stores.close()
        finally:
            self._transfers.close()
            self._scrubber.close()
            for host in self._hosts:
                host.free()

    def _copy(self, transfers: tuple[TransferRequest, ...], after: Event | None) -> None:
        """Start one copy per cache group for one load or for any number of saves."""
        if not transfers:
            return
        job = _CopyJob(transfers, [])
        sources, targets = (
            np.concatenate([getattr(transfer, end) for transfer in transfers]).astype(np.int64)
            for end in ("sources", "targets")
        )
        try:
            for group in self.layout.groups:
                if transfers[0].route is Route.HOST_TO_DEVICE:
                    copy = self._transfers.load(
                        targets, sources, group=group.name, layer_wise=self._layer_wise, after=after
                    )
                else:
                    copy = self._transfers.save(sources, targets, group=group.name, after=after)
                job.copies.append(copy)
        except KvtierError as error:
            for copy in job.copies:  # started copies must end before their slots are reused
                copy.wait()
            if len(transfers) > 1:  # retry each transfer alone, so that only invalid transfers fail
                for transfer in transfers:
                    self._copy((transfer,), after)
                return
            reason = f"{type(error).__name__}: {error}"
            self._done.append(TransferResult(transfers[0].id, False, 0, 0.0, reason))
            return
        self._in_flight.update((transfer.id, job) for transfer in transfers)
        self._by_copy.update((copy.id, job) for copy in job.copies)

    def _take(self, report: TransferReport) -> None:
        job = self._by_copy.pop(report.id, None)
        if job is None:
            return  # `_copy` gave up this job, because the copy of another cache group could not start
        job.reports.append(report)
        if len(job.reports) < len(job.copies):
            return
        failures = [failure for one in job.reports for failure in one.failures]
        lost = [failure.host_id for failure in failures]
        reason = "; ".join(sorted({str(failure.error) for failure in failures}))
        # Use the duration of the copies, because a whole step may run between the end of the copies and this poll.
        seconds = max(one.seconds for one in job.reports)
        num_bytes = sum(one.nbytes for one in job.reports)
        num_blocks = sum(transfer.num_blocks for transfer in job.transfers)
        for transfer in job.transfers:
            del self._in_flight[transfer.id]
            share = num_bytes * transfer.num_blocks // num_blocks
            slots = transfer.sources if transfer.route is Route.HOST_TO_DEVICE else transfer.targets
            arrived = ~np.isin(slots, lost) if lost else None
            if arrived is None or arrived.all():
                self._done.append(TransferResult(transfer.id, True, share, seconds))
            else:
                mask = arrived.astype(np.uint8).tobytes()
                self._done.append(TransferResult(transfer.id, False, share, seconds, reason, mask))


def layout_of(caches: Sequence[torch.Tensor], block_tokens: int) -> KVLayout:
    """Return the layout of block-first caches [block, layer, K/V, token, head, head size].

    The first cache is the group "main". All others belong to draft models, which are small and not sharded over ranks.
    """
    groups = []
    for number, cache in enumerate(caches):
        _, num_layers, _, _, num_heads, head_dim = cache.shape
        name = "main" if not number else f"draft-{number}"
        element = str(cache.dtype).removeprefix("torch.")
        group = CacheGroup.attention(name, num_layers, num_heads, head_dim, element, block_tokens)
        groups.append(group if not number else group.unsharded())
    return KVLayout(block_tokens, tuple(groups))
