"""CacheRuntime: the tiered cache of one engine. Engine steps use it to move blocks. Operators use it to manage tiers.

    Engine.step ──> CacheManager.plan ──Plan──> Controller          start transfers
    Engine.step <── CacheManager.apply <──Report── Controller       finish transfers

Operations that resize or free memory wait until no transfer is in flight. They run on the engine thread between steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvtier.cache.admin import CacheAdmin
from kvtier.cache.in_flight import PendingTransfer
from kvtier.cache.manager import CacheManager
from kvtier.cache.metrics import CacheMetrics, Counted
from kvtier.engine.modules import DeviceCacheGroup, free_bytes
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Lease
from kvtier.memory import Event
from kvtier.messages import Plan, Report
from kvtier.metrics import Registry
from kvtier.scheduler import Scheduler
from kvtier.storage import ShardStores, Store
from kvtier.storage.cascade import for_each
from kvtier.worker.controller import CacheController, layout_of
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.sharding import Sharding

_POLL_SECONDS = 0.005
"""Maximum time of one wait for transfers. A request that arrives meanwhile is delayed by at most this time."""
TRAFFIC_SECONDS = 5.0
"""Length of the time window for TierTraffic.bytes_per_second."""


class Controller(Protocol):
    """Interface of an object that executes plans.

    CacheController executes plans on one rank, and Ranks on several ranks. An engine without a host tier or without
    prefix caching has a NullController. CacheController documents the methods.
    """

    overlaps_compute: bool

    @property
    def num_host_ready(self) -> int: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def is_copying(self) -> bool: ...
    def record_event(self) -> Event | None: ...
    def submit(self, plan: Plan, after: Event | None = None) -> None: ...
    def poll(self, *, loads_only: bool = False) -> Sequence[Report]: ...
    def wait(self, timeout: float) -> None: ...
    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits: ...
    def release(self) -> None: ...
    def register(self, caches: Sequence[torch.Tensor]) -> None: ...
    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor]) -> None: ...
    def close(self) -> None: ...


@dataclass
class NullController:
    """The controller of an engine without a host tier or without prefix caching. Such an engine has no transfers."""

    unused: Sequence[Store] = ()
    """Open stores of an engine without prefix caching. Only `close` uses them."""
    overlaps_compute = False
    num_host_ready = 0
    is_busy = False
    is_copying = False

    def record_event(self) -> None: ...
    def wait(self, timeout: float) -> None: ...
    def release(self) -> None: ...
    def register(self, caches: Sequence[torch.Tensor]) -> None: ...

    def close(self) -> None:
        for_each([store.close for store in self.unused])

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        assert not plan, f"{plan} (after {after}) needs a host tier"

    def poll(self, *, loads_only: bool = False) -> Sequence[Report]:  # noqa: ARG002
        return ()

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        raise StateError(f"without a host tier there are no loads to wait for: {transfer_ids}")

    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor]) -> None:
        raise StateError(f"cannot resize to {num_blocks} blocks for {len(caches)} caches: there is no host tier")


@dataclass(frozen=True, slots=True)
class TierState:
    name: str
    num_blocks: int
    """Capacity in blocks; 0 for a store, which has a capacity in bytes."""
    num_used: int
    block_bytes: int
    used_bytes: int
    max_bytes: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class TierTraffic:
    source: str
    target: str
    num_bytes: int
    bytes_per_second: float
    """Rate over the last TRAFFIC_SECONDS."""


class StepTransfers:
    """The transfers of one step. The loads are already in flight. `on_forward_launched` starts the `deferred` plan."""

    def __init__(
        self, runtime: CacheRuntime, controller: Controller, loads: Sequence[int], deferred: Plan | None
    ) -> None:
        self._runtime, self._controller, self._loads = runtime, controller, loads
        self._deferred = deferred
        self._after = controller.record_event() if deferred is not None else None
        self._waits = controller.layer_waits(loads) if loads else None

    def before_layer(self, group: int) -> Callable[[int], None] | None:
        """Return a function that waits until a given layer of the group is loaded, or None if the step has no loads."""
        return None if self._waits is None else partial(self._waits.before_layer, group=group)

    def have_arrived(self) -> bool:
        """Wait for the loads of rank 0. Return True if they succeeded. Called on the executor's thread."""
        return self._waits is None or self._waits.arrived()

    def have_succeeded(self) -> bool:
        """Apply the reports of the loads. Return True if no rank has reported a failure."""
        if self._loads:
            self._runtime.poll()
        return self._runtime.failed.isdisjoint(self._loads)

    def on_forward_launched(self) -> None:
        """With `overlaps_compute`, start deferred transfers and apply reports while the device computes."""
        if self._deferred is not None:
            self._controller.submit(self._deferred, self._after)
        if self._controller.overlaps_compute:
            self._runtime.poll()


class CacheRuntime:
    """The tiers of one engine. Engine steps call the methods under "for the step". Operators call the other methods."""

    def __init__(
        self,
        manager: CacheManager,
        groups: Sequence[DeviceCacheGroup],
        controller: Controller,
        stores: Mapping[str, Counted],
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        """`groups` are the cache groups of this rank. Every other rank has one group, whose blocks are as large as
        the blocks of groups[0]."""
        self._manager = manager
        self._admin = CacheAdmin(manager)
        self._groups = groups
        self._controller = controller
        self._stores = stores
        self._scheduler = scheduler
        self._clock = clock
        self._pins: dict[str, Lease] = {}
        self.failed: set[int] = set()
        """Ids of transfers that failed on at least one rank. `begin_step` removes ids of transfers that have ended."""
        self.is_asleep = False
        self.finish_steps: Callable[[], object] | None = None
        """Function of the engine that finishes the steps in flight. Called before requests are paused."""
        self._moved: Counter[tuple[str, str]] = Counter()
        self._moved_recently: deque[tuple[float, tuple[str, str], int]] = deque()
        self.metrics = Registry()
        self._cache_metrics = CacheMetrics(manager, stores, self.metrics)

    # ---- for the step ----------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> None:
        if plan:
            self._controller.submit(plan)

    def begin_step(self, plan: Plan, loads: Sequence[int]) -> StepTransfers:
        """Start the transfers of a plan. `loads` are the ids of the loads that the step waits for.

        With `overlaps_compute` (one rank, on a GPU), all other transfers are deferred until the forward pass is
        launched, because this thread needs half a millisecond to start a copy of hundreds of blocks.
        """
        self.failed = {number for number in self.failed if number in self._manager.transfers.in_flight}
        deferred = None
        if self._controller.overlaps_compute:
            plan, deferred = plan.only(loads), plan.without(loads)
        self.submit(plan)
        return StepTransfers(self, self._controller, loads, deferred or None)

    def poll(self, *, before_step: bool = False) -> None:
        """Apply new reports to the manager, without waiting.

        Applying a report takes 0.1 ms on this thread. With `before_step` and `overlaps_compute`, reports of copies to
        the host are therefore applied later, during the forward pass. No step waits for these copies.
        """
        for report in self._controller.poll(loads_only=before_step and self._controller.overlaps_compute):
            completed = self._manager.apply(report)
            self._cache_metrics.observe(completed)
            self._measure(completed)
            self.failed.update(result.transfer_id for result in report.results if not result.ok)

    def poll_while_waiting(self) -> bool:
        """If copies are in flight, apply new reports while the device computes. Return True if copies remain in flight.

        Applying a report at the start of the next step would leave the device idle. Transfers to and from stores do not
        count as copies, because they take longer than a step.
        """
        if not self._controller.is_copying:
            return False
        self.poll()
        return self._controller.is_copying

    def wait(self) -> None:
        """Wait at most _POLL_SECONDS for transfers, then apply new reports."""
        self._controller.wait(_POLL_SECONDS)
        self.poll()

    # ---- for operators ---------------------------------------------------------------------------------------------

    def states(self) -> list[TierState]:
        """Return the state of every tier, from the fastest to the slowest."""
        block_bytes = self._block_bytes
        states = []
        for tier in self._manager.stats.tiers:
            bytes_of = tier.num_used * block_bytes, tier.num_blocks * block_bytes
            if tier.name in self._stores:
                store = self._stores[tier.name].stats
                bytes_of = store.used_bytes, store.max_bytes
            states.append(TierState(tier.name, tier.num_blocks, tier.num_used, block_bytes, *bytes_of, tier.hit_tokens))
        return states

    def traffic(self) -> list[TierTraffic]:
        """Return the bytes moved between tiers, for each pair of source and target."""
        first = self._clock() - TRAFFIC_SECONDS
        recent: Counter[tuple[str, str]] = Counter()
        for at, ends, num_bytes in self._moved_recently:
            recent[ends] += num_bytes if at >= first else 0
        return [TierTraffic(*ends, total, recent[ends] / TRAFFIC_SECONDS) for ends, total in self._moved.items()]

    def pin(self, name: str, chain: Chain) -> int:
        """Protect a prompt's cached tokens from eviction until `unpin` or `reset`. Return their number."""
        if name in self._pins:
            raise ArgumentError(f"the name {name!r} is pinned already; unpin it first")
        self._pins[name] = pin = self._manager.pin(chain, now=self._clock())
        return pin.num_matched_tokens

    def unpin(self, name: str) -> None:
        if name not in self._pins:
            raise ArgumentError(f"no prompt is pinned as {name!r}; pinned names: {', '.join(self._pins) or 'none'}")
        self._manager.unpin(self._pins.pop(name))

    def prefetch(self, chain: Chain) -> int:
        """Fetch a prompt's blocks from stores, unless computing them is faster. Return the number of blocks fetched."""
        prefetch = self._manager.prefetch(chain, now=self._clock())
        if prefetch is None:
            return 0
        self._submit_planned()
        while not prefetch.is_over:
            self.wait()
            self._submit_planned()
        self._manager.end_prefetch(prefetch)
        return sum(prefetch.num_fetched.values())

    def save(self, chain: Chain) -> None:
        """Copy the cached blocks of a prompt to every lower tier, regardless of write policies."""
        for _ in range(2):  # first to the host, then from the host to the stores
            self._admin.save(chain)
            self._drain_saves()

    def demote(self, chain: Chain) -> int:
        """Copy a prompt's cached blocks to lower tiers, then demote the prompt as CacheAdmin.demote describes."""
        self._admin.save(chain)
        self._drain_saves()
        return self._admin.demote(chain)

    def drop(self, chain: Chain) -> int:
        """Drop a prompt as CacheAdmin.drop describes. Return the number of blocks dropped from memory."""
        self._drain()  # otherwise a planned write to a store could end after the deletion and restore the blocks
        num_dropped = self._admin.drop(chain)
        self._drain()
        return num_dropped

    def reset(self, *, clear_stores: bool = False) -> None:
        """Unpin all prompts and delete all cached blocks from memory. With `clear_stores`, clear the stores too."""
        self._drain()
        for name in list(self._pins):
            self.unpin(name)
        self._manager.reset()
        if clear_stores:
            self._admin.clear_stores()
            self._drain()

    def save_all(self) -> None:
        """Copy all blocks in memory to every lower tier, so that blocks in persistent stores survive a restart."""
        for _ in range(2):  # first to the host, then from the host to the stores
            self._admin.save_all()
            self._drain_saves()

    def set_quota(self, tier: str, salt: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of one tenant in a memory tier; None removes the limit."""
        self._admin.set_quota(tier, salt, num_blocks)

    def sleep(self) -> None:
        """Pause requests, copy all blocks to lower tiers, and free the memory of the device cache. Idempotent."""
        if self.is_asleep:
            return
        self._pause()
        try:
            self._admin.save_all()
            self._drain_saves()
            self._admin.vacate("device")
            self._controller.release()
        except BaseException:
            self._scheduler.resume()
            raise
        for group in self._groups:
            group.free()
        self.is_asleep = True

    def wake(self, num_blocks: int | None = None) -> None:
        """After `sleep`, allocate the device cache with its old size or `num_blocks` blocks, and resume requests."""
        if not self.is_asleep:
            return
        if num_blocks is not None:
            self._drain()  # writes from the host to stores may be in flight
            self._admin.resize("device", num_blocks)
        for group in self._groups:
            group.renew(self._manager.tree.tiers[0].pool.num_slots)
        self._controller.register([group.cache for group in self._groups])
        self.is_asleep = False
        self._scheduler.resume()

    def resize(self, tier: str, num_blocks: int) -> None:
        """Change the number of blocks of a memory tier. An evicted block stays cached if another tier has a copy."""
        self._admin.tier(tier)  # raises for an unknown tier
        if num_blocks < 1:
            raise RangeError(f"a tier needs at least one block, got {num_blocks} for the {tier} tier")
        self._must_fit(tier, num_blocks)
        if tier == "device":
            self._resize_device(num_blocks)
            return
        if self.is_asleep:
            raise StateError("the cache is asleep; wake it before you resize the host tier")
        self._pause()
        try:
            self._admin.save_all()
            self._drain_saves()
            # If `resize_host` fails, the tier keeps its old size. Only blocks in slots beyond the new size are lost.
            self._admin.vacate(tier, num_blocks)
            self._controller.resize_host(num_blocks, [group.cache for group in self._groups])
            self._admin.resize(tier, num_blocks)
        finally:
            self._scheduler.resume()

    def _resize_device(self, num_blocks: int) -> None:
        before, was_asleep = self._manager.num_blocks, self.is_asleep
        self.sleep()
        try:
            self.wake(num_blocks)
        except BaseException:  # the allocation failed
            self.wake(before)
            raise
        finally:
            if was_asleep:
                self.sleep()

    def close(self) -> None:
        """End all transfers, close the stores, and free the memory of the host and device tiers."""
        self._controller.close()
        for group in self._groups:
            group.free()

    def _pause(self) -> None:
        if self.finish_steps is not None:
            self.finish_steps()
        self._scheduler.pause(self._clock())

    @property
    def _block_bytes(self) -> int:
        """Bytes of one block, summed over all cache groups and all ranks."""
        others = (self._manager.transfers.num_ranks - 1) * self._groups[0].block_bytes
        return sum(group.block_bytes for group in self._groups) + others

    def _measure(self, completed: Sequence[PendingTransfer]) -> None:
        """Count the bytes of completed transfers by source and target."""
        now = self._clock()
        for done in completed:
            if done.num_bytes:
                ends = done.transfer.source, done.transfer.target
                self._moved[ends] += done.num_bytes
                self._moved_recently.append((now, ends, done.num_bytes))
        while self._moved_recently and self._moved_recently[0][0] < now - TRAFFIC_SECONDS:
            self._moved_recently.popleft()

    def _must_fit(self, tier: str, num_blocks: int) -> None:
        """Raise RangeError if there is not enough memory for the new size. Called before any block is evicted."""
        device = self._groups[0].cache.device if tier == "device" else torch.device("cpu")
        # ranks share the host memory, but each rank has its own GPU
        block_bytes = self._block_bytes
        if device.type == "cuda":
            block_bytes = sum(group.block_bytes for group in self._groups)
        wanted, free = num_blocks * block_bytes, free_bytes(device)
        if tier == "device":  # the old device cache is freed before the allocation, unlike the old host cache
            free += len(self._groups[0].cache) * block_bytes
        if wanted > free:
            raise RangeError(
                f"{num_blocks} blocks in the {tier} tier need {wanted / 2**30:.2f} GiB, but only "
                f"{free / 2**30:.2f} GiB are available"
            )

    def _submit_planned(self) -> None:
        self.submit(self._manager.plan(now=self._clock()))
        self.poll()

    def _drain(self) -> None:
        """Submit plans and apply reports until no transfer is in flight."""
        self._submit_planned()
        while self._controller.is_busy or self._manager.transfers.in_flight:
            self.wait()
            self._submit_planned()

    def _drain_saves(self) -> None:
        while self._admin.plan_saves(self._clock()):
            self._drain()
            self.wait()  # gives the budget for saves (`blocks_per_second`) time to refill
        self._drain()


def new_controller(
    num_host_blocks: int,
    groups: Sequence[DeviceCacheGroup],
    stores: Mapping[str, Store | ShardStores],
    namespace: bytes,
    sharding: Sharding | None = None,
    secret: bytes = b"",
) -> CacheController | NullController:
    """Create the controller for the cache groups of one rank, or a NullController if there are no host blocks."""
    if not num_host_blocks:
        return NullController()
    caches = [group.cache for group in groups]
    layout = layout_of(caches, groups[0].block_tokens)
    return CacheController(
        layout, caches, num_host_blocks, stores=stores, namespace=namespace, secret=secret, sharding=sharding
    )
