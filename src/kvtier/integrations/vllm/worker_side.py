"""WorkerSide: the part of the connector that runs in a vLLM worker. It copies blocks as planned by the scheduler side.

    vLLM        handle_preemptions  bind_connector_metadata  forward  start_load_kv  wait_for_save  get_transfer_results
    WorkerSide  begin_step          start_early                       start_loads    start_others   poll

Loads wait for the work that was queued before the step, because earlier kernels may still use the target blocks. Loads
run during the forward pass. On a GPU, loads start after the launch of the forward pass. On a CPU, the forward pass is
synchronous, so loads start before it. Saves wait for the forward pass, which writes their source blocks. In a step that
computes no tokens, `poll` waits briefly for transfers. In all other steps, no method waits for transfers.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvtier.errors import ArgumentError
from kvtier.index import Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.layout import KVLayout
from kvtier.memory import Event
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Plan, Report, Route, TransferResult
from kvtier.storage import ShardStores, Store, open_shards
from kvtier.transfer import DeviceCache
from kvtier.transfer.staging import Mover
from kvtier.worker.controller import CacheController
from kvtier.worker.sharding import Sharding

logger = logging.getLogger("vllm.kvtier")

_IDLE_SECONDS = 0.002
"""Longest wait for transfers in a step without tokens. vLLM repeats such steps about every millisecond."""
_POLL_SECONDS = 0.1
"""Interval of polls while no transfer is in flight. These polls report newly usable host memory and damaged blocks."""


@dataclass(frozen=True, slots=True)
class Load:
    """The request of a load, and the device blocks that the load writes."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step. All workers get the same plan."""

    plan: Plan
    loads: Mapping[int, Load] = field(default_factory=dict)
    """Transfer id -> load."""
    is_idle: bool = False
    """True if the step computes no tokens."""
    namespace: bytes = b""
    """New fingerprint of the namespace of stored blocks; empty if the fingerprint does not change."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """Properties of a worker's cache, sent to the scheduler side at start."""

    namespace: Namespace
    num_host_blocks: int
    num_host_ready: int


@dataclass(slots=True)
class StepResults:
    """Results since the last poll."""

    loaded: set[str] = field(default_factory=set)
    """Requests whose load has ended, successfully or not."""
    failed_blocks: set[int] = field(default_factory=set)
    """Device blocks that a load did not fill."""
    failed_requests: set[str] = field(default_factory=set)
    """Requests whose load did not fill all its device blocks."""
    reports: list[Report] = field(default_factory=list)


class WorkerSide:
    """Host memory, stores and copies of one rank. Not thread-safe."""

    def __init__(
        self,
        config: ConnectorConfig,
        namespace: Namespace,
        cache: DeviceCache,
        sharding: Sharding,
        *,
        stores: Mapping[str, Store | ShardStores] | None = None,
        mover: Mover = run_path,
    ) -> None:
        """Open the stores of `config`, unless `stores` are given. `mover` runs copies. Tests pass one that fails."""
        self.namespace, self._group = namespace, cache.group
        num_blocks = config.host_bytes // sharding.num_ranks // self._group.slot_bytes
        if num_blocks < 1:
            raise ArgumentError(
                f"host_bytes is {config.host_bytes} for {sharding.num_ranks} ranks, but one block of a rank has "
                f"{self._group.slot_bytes} bytes: raise host_bytes"
            )
        if stores is None:
            replicated = any(spec.head_axis is None for _, spec, _ in self._group.tensors())
            stores = {
                store.config.name: open_shards([store.url], sharding.shards, sharding.num_shards, replicated=replicated)
                for store in config.stores
            }
        self.num_host_blocks = num_blocks
        self.controller = CacheController(
            KVLayout(namespace.block_tokens, (self._group,)),
            [cache],
            num_blocks,
            stores=stores,
            namespace=namespace.fingerprint,
            secret=config.secret,
            sharding=sharding,
            layer_wise=False,
            mover=mover,
        )
        self._loads: dict[int, Load] = {}
        self._load_slots: dict[int, list[int]] = {}
        """Transfer id of a load in flight -> host slots that the load reads."""
        self._damaged: set[int] = set()
        """Host slots that were reported as damaged and have not been written since then."""
        self._before: Event | None = None
        """Event that the loads of this step wait for. None if the step has no loads or the device has no streams."""
        self._next_poll = 0.0
        self._verifier: LoadVerifier | None = None

    @property
    def handshake(self) -> Handshake:
        return Handshake(self.namespace, self.num_host_blocks, self.controller.num_host_ready)

    def verify_loads(self, layers: Sequence[torch.Tensor]) -> None:
        """Compare the blocks of later loads with the checksums of the saved blocks. `layers` are the cache tensors."""
        self._verifier = LoadVerifier(self.controller, layers)

    def begin_step(self, step: StepPlan) -> None:
        """Use the new namespace, if any. If the step has loads, record an event that they will wait for."""
        if step.namespace:
            self.controller.use_namespace(step.namespace)
        self._before = self.controller.record_event() if step.loads else None

    def start_early(self, step: StepPlan) -> None:
        """Start the loads if the device has no streams. At this point, vLLM has prepared the step's device blocks."""
        if step.loads and self._before is None:
            self._submit_loads(step)

    def start_loads(self, step: StepPlan) -> None:
        """Start the loads that `start_early` has not started."""
        if step.loads and self._before is not None:
            self._submit_loads(step)

    def _submit_loads(self, step: StepPlan) -> None:
        self._loads.update(step.loads)
        loads = step.plan.only(step.loads)
        self._load_slots.update((each.id, each.sources.tolist()) for each in loads.transfers)
        if self._verifier is not None:
            self._verifier.on_submit(step.plan)
        self.controller.submit(loads, self._before)

    def start_others(self, step: StepPlan) -> None:
        """Start all work of the plan except loads. Saves wait for all earlier work on the device."""
        others = step.plan.without(step.loads)
        if others:
            if self._verifier is not None and not step.loads:
                self._verifier.on_submit(step.plan)
            for transfer in others.transfers if self._damaged else ():
                if transfer.route in (Route.DEVICE_TO_HOST, Route.STORE_TO_HOST):
                    self._damaged.difference_update(transfer.targets.tolist())
            self.controller.submit(others)

    def poll(self, *, is_idle: bool) -> StepResults:
        """Return the results since the last call. In an idle step, wait up to `_IDLE_SECONDS` for the first result."""
        results, now = StepResults(), time.monotonic()
        if self.controller.is_busy:
            if is_idle:
                self.controller.wait(_IDLE_SECONDS)
        elif now < self._next_poll:
            return results
        self._next_poll = now + _POLL_SECONDS
        for report in map(self._without_damaged, self.controller.poll()):
            if self._verifier is not None:
                report = self._verifier.checked(report)
            results.reports.append(report)
            for result in report.results:
                load = self._loads.pop(result.transfer_id, None)
                if load is not None:
                    del self._load_slots[result.transfer_id]
                    results.loaded.add(load.request_id)
                    results.failed_blocks |= failed_blocks(load, result)
                    if not result.ok:
                        results.failed_requests.add(load.request_id)
                if not result.ok:
                    logger.warning(
                        "KV transfer %d failed: %s", result.transfer_id, result.reason or "blocks are missing"
                    )
        return results

    def _without_damaged(self, report: Report) -> Report:
        """Mark loads from damaged host slots as failed. Return the new report.

        An idle engine does not poll. The scheduler side may therefore plan a load before the damage is reported.
        """
        self._damaged.update(np.frombuffer(report.damaged, "<i4").tolist())
        return replace(report, results=tuple(map(self._check_slots, report.results))) if self._damaged else report

    def _check_slots(self, result: TransferResult) -> TransferResult:
        slots = self._load_slots.get(result.transfer_id, ())
        if self._damaged.isdisjoint(slots):
            return result
        arrived = result.arrived or bytes([result.ok]) * len(slots)
        intact = bytes(ok and slot not in self._damaged for ok, slot in zip(arrived, slots, strict=True))
        return replace(result, ok=False, arrived=intact, reason="host memory was damaged")

    def close(self) -> None:
        """Finish all transfers and close the stores. Idempotent."""
        self.controller.close()


def failed_blocks(load: Load, result: TransferResult) -> set[int]:
    """Return the device blocks that a load did not fill."""
    if result.ok:
        return set()
    arrived = result.arrived or bytes(len(load.blocks))
    return {block for block, ok in zip(load.blocks, arrived, strict=True) if not ok}


class LoadVerifier:
    """Compares loaded device blocks with the device blocks that were saved (`verify_loads`)."""

    def __init__(self, controller: CacheController, layers: Sequence[torch.Tensor]) -> None:
        self._controller, self._layers = controller, layers
        self._transfers: dict[int, tuple[Route, np.ndarray, np.ndarray]] = {}
        self._checksums: dict[int, int] = {}
        """Host slot -> checksum of the device block that was saved there. A block from a store has none."""
        self.num_verified = 0

    def on_submit(self, plan: Plan) -> None:
        for transfer in plan.transfers:
            self._transfers[transfer.id] = transfer.route, transfer.sources, transfer.targets

    def checked(self, report: Report) -> Report:
        """Mark loads as failed if their blocks differ from the saved blocks. Return the new report."""
        return replace(report, results=tuple(map(self._check, report.results)))

    def _check(self, result: TransferResult) -> TransferResult:
        route, sources, targets = self._transfers.pop(result.transfer_id)
        arrived = result.arrived or bytes([result.ok]) * max(len(sources), len(targets))
        if route is Route.DEVICE_TO_HOST:
            for block, slot, ok in zip(sources.tolist(), targets.tolist(), arrived, strict=True):
                self._checksums.pop(slot, None)
                if ok:
                    self._checksums[slot] = self._checksum(block)
        elif route is Route.STORE_TO_HOST:
            for slot in targets.tolist():
                self._checksums.pop(slot, None)
        elif route is Route.HOST_TO_DEVICE:
            pairs = zip(sources.tolist(), targets.tolist(), arrived, strict=True)
            equal = bytes(ok and self._is_equal(slot, block) for slot, block, ok in pairs)
            self.num_verified += equal.count(1)
            if 0 in equal and result.ok:
                logger.error("KV transfer %d: %d loaded blocks differ", result.transfer_id, equal.count(0))
                return replace(result, ok=False, arrived=equal, reason="loaded blocks differ from the saved blocks")
        return result

    def _is_equal(self, slot: int, block: int) -> bool:
        expected = self._checksums.get(slot)
        return expected is None or expected == self._checksum(block)

    def _checksum(self, block: int) -> int:
        checksum = 0
        for layer in self._layers:
            page = layer[block].contiguous().cpu().view(torch.uint8)
            checksum = zlib.crc32(page.numpy().tobytes(), checksum)
        return checksum
