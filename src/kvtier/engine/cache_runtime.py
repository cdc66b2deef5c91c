"""CacheRuntime: an engine's cache memory, and what an operator may do with it.

Ties the two sides together: the manager's plans go to the controller, its reports to the manager. Operations that
change memory wait until no transfer is under way; they are for the engine's thread, between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.cache.admin import CacheAdmin
from kvtier.cache.manager import CacheManager
from kvtier.cache.metrics import CacheMetrics, Counted
from kvtier.engine.modules import DeviceCacheGroup
from kvtier.engine.parallel import RankedController
from kvtier.engine.traffic import TierTraffic, TransferMeter
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Lease
from kvtier.memory import Event
from kvtier.messages import Plan, Report
from kvtier.metrics import Registry
from kvtier.scheduler import Scheduler
from kvtier.storage import ShardStores, Store, StoreStats
from kvtier.worker.controller import CacheController, layout_of
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.sharding import Sharding

Controller = CacheController | RankedController
_POLL_SECONDS = 0.005
"""How long an engine with nothing to compute waits for its transfers at a time: a new request is seen as soon."""


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier as an operator sees it."""

    name: str
    num_blocks: int
    """0 where it is not counted in blocks."""
    num_used: int
    num_pinned: int
    block_bytes: int
    used_bytes: int
    max_bytes: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class _Deferred:
    """What is begun when the device computes, and behind what its copies come."""

    plan: Plan
    after: Event | None


class StepWaits:
    """For a step that starts before its blocks are loaded: holds each layer back; tells afterwards, for all ranks."""

    def __init__(self, own: LayerWaits, transfer_ids: Sequence[int], tiers: CacheRuntime) -> None:
        self._own, self._ids, self._tiers = own, transfer_ids, tiers

    def before_layer(self, layer: int, group: int = 0) -> None:
        """Until its blocks are there, on this rank."""
        self._own.before_layer(layer, group)

    def arrived(self) -> bool:
        """Wait until all of it is over here; whether every block is there, on every rank that has told."""
        arrived = self._own.arrived()
        return self._tiers.all_arrived(self._ids) and arrived


class CacheRuntime:
    """The tiers of one engine: `submit` to `wait` for its step, the rest for operators."""

    def __init__(
        self,
        manager: CacheManager,
        groups: Sequence[DeviceCacheGroup],
        controller: Controller | None,
        stores: Mapping[str, Counted],
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        """`groups` are this rank's; of the first, every rank has as much."""
        self._manager = manager
        self._control = CacheAdmin(manager)
        self._groups = groups
        self._controller = controller
        self._stores = stores
        self._scheduler = scheduler
        self._clock = clock
        self._pins: dict[str, Lease] = {}
        self._lost: set[int] = set()
        """Transfers that some rank failed to do, as long as others are at them."""
        self.is_asleep = False
        self.waits_for_compute = groups[0].model.weights.device.type == "cuda"
        """Whether this thread only waits while a step is computed."""
        self.saves_polled = False
        """Of saves, while the last step was computed, so that they need not be asked for outside of it."""
        self._later: _Deferred | None = None
        self._meter = TransferMeter(clock, manager.transfers.num_ranks)
        self.metrics = Registry()
        CacheMetrics(manager, stores, self.metrics)

    # ---- for the step ----------------------------------------------------------------------------------------------

    def submit(self, plan: Plan, needed: Collection[int] | None = None) -> None:
        """Begin what the manager has decided.

        With `needed` a step follows that needs these loads and no other: on a GPU the rest is begun by
        `submit_deferred`, while
        it computes, since to begin a copy of hundreds of blocks takes half a millisecond of this thread.
        """
        self.submit_deferred()  # what a step that was interrupted has left
        self.saves_polled = False
        self._lost = {number for number in self._lost if self._manager.transfers.is_in_flight(number)}
        if self._controller is None or not plan:
            return
        self._meter.began(plan)
        if needed is None or not self.waits_for_compute or isinstance(self._controller, RankedController):
            self._controller.submit(plan)
            return
        if needed:
            self._controller.submit(plan.only(needed))
        self._later = _Deferred(plan.without(needed), self._controller.present())

    def submit_deferred(self) -> None:
        """Begin what was put off. Twice is fine."""
        later, self._later = self._later, None
        if later is not None and isinstance(self._controller, CacheController):
            self._controller.submit(later.plan, later.after)

    def on_forward_launched(self) -> None:
        """The device computes: begin what was put off, and tell the manager what is done."""
        self.submit_deferred()
        if self.waits_for_compute:
            self.apply()
            self.saves_polled = True

    def poll_while_waiting(self) -> bool:
        """While this thread waits for the device: tell the manager what is done; whether copies are still under way.

        What is heard now costs nobody anything; at the start of the next step the device would wait for it. Stores take
        longer than a step: nobody listens for them alone.
        """
        if not isinstance(self._controller, CacheController) or not self._controller.is_copying:
            return False
        self.apply()
        return self._controller.is_copying

    def apply(self, *, loads_only: bool = False) -> None:
        """Tell the manager what is done. Nobody waits for saves: where a GPU computes step after step, they are heard
        of meanwhile, since a report is a tenth of a millisecond of this thread."""
        for report in self._poll(loads_only):
            self._meter.done(report)
            self._manager.apply(report)
            self._lost.update(outcome.transfer_id for outcome in report.results if not outcome.ok)

    def _poll(self, loads_only: bool) -> Sequence[Report]:
        if isinstance(self._controller, CacheController):
            return self._controller.poll(loads_only=loads_only)
        return self._controller.poll() if self._controller is not None else ()

    def wait(self) -> None:
        """There is nothing to compute: wait a moment for transfers."""
        if self._controller is not None:
            self._controller.wait(_POLL_SECONDS)

    def layer_waits(self, transfer_ids: Sequence[int]) -> StepWaits | None:
        """For a step that starts before these loads are done."""
        if self._controller is None or not transfer_ids:
            return None
        return StepWaits(self._controller.layer_waits(transfer_ids), transfer_ids, self)

    def all_arrived(self, transfer_ids: Sequence[int]) -> bool:
        """Whether no rank has told that it failed to do one of these."""
        self.apply()
        return self._lost.isdisjoint(transfer_ids)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def states(self) -> list[TierState]:
        """All tiers, the fastest first."""
        block_bytes = self._block_bytes
        pinned = sum(pin.num_blocks for pin in self._pins.values())
        states = []
        for tier in self._manager.stats.tiers:
            store = self._stores[tier.name].stats if tier.name in self._stores else StoreStats()
            in_memory = tier.num_blocks > 0
            states.append(
                TierState(
                    tier.name,
                    tier.num_blocks,
                    tier.num_used,
                    pinned if tier.name == "device" else 0,
                    block_bytes,
                    tier.num_used * block_bytes if in_memory else store.used_bytes,
                    tier.num_blocks * block_bytes if in_memory else store.max_bytes,
                    tier.hit_tokens,
                )
            )
        return states

    def traffic(self) -> list[TierTraffic]:
        """What went between tiers, direction by direction."""
        return self._meter.traffic()

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def pin(self, name: str, chain: Chain) -> int:
        """Keep what is cached of a prompt, under a name, until it is unpinned; returns the tokens kept."""
        if name in self._pins:
            raise ArgumentError(f"something is pinned as {name!r} already; unpin it first")
        self._pins[name] = pin = self._manager.pin(chain, now=self._clock())
        return pin.num_matched_tokens

    def unpin(self, name: str) -> None:
        """It may be evicted again."""
        if name not in self._pins:
            raise ArgumentError(f"nothing is pinned as {name!r}; pinned are {', '.join(self._pins) or 'none'}")
        self._manager.unpin(self._pins.pop(name))

    def prefetch(self, chain: Chain) -> int:
        """Bring what stores have of a prompt to the host; returns the blocks that have arrived."""
        prefetch = self._manager.prefetch(chain, now=self._clock())
        if prefetch is None:
            return 0
        self._drain(lambda: prefetch.is_over)
        self._manager.end_prefetch(prefetch)
        return sum(prefetch.num_fetched.values())

    def save(self, chain: Chain) -> None:
        """Copy what is cached of a prompt to every tier below, whatever the write policies say."""
        for _ in range(2):  # what has come to the host goes on to the stores
            self._control.save(chain)
            self._drain_saves()

    def demote(self, chain: Chain) -> int:
        """Copy what is cached of a prompt to the tiers below, then free the device of it; returns the blocks freed."""
        self._control.save(chain)
        self._drain_saves()
        return self._control.demote(chain)

    def drop(self, chain: Chain) -> int:
        """Forget a prompt, in every tier; returns the blocks that were in memory."""
        self._drain()  # what is planned for a store must be there before it is forgotten, not after
        num_dropped = self._control.drop(chain)
        self._drain()
        return num_dropped

    # ---- tiers -----------------------------------------------------------------------------------------------------

    def reset(self, *, clear_stores: bool = False) -> None:
        """Forget everything in memory, and with `clear_stores` in the stores too."""
        self._drain()
        for name in list(self._pins):
            self.unpin(name)
        self._manager.reset()
        if clear_stores:
            self._control.clear_stores()
            self._drain()

    def save_all(self) -> None:
        """Copy all that is in memory to the lowest tier; so that a restart finds it."""
        self._control.save_all()
        self._drain_saves()
        self._control.save_all()  # what has come to the host by now goes on to the stores
        self._drain_saves()

    def set_quota(self, tier: str, salt: bytes, num_blocks: int | None) -> None:
        """At most so many blocks of a memory tier for one tenant; None: no limit."""
        self._control.set_quota(tier, salt, num_blocks)

    def sleep(self) -> None:
        """Free the device's memory. Requests wait; what the host holds stays. Sleeping twice is fine."""
        if self.is_asleep:
            return
        self._scheduler.pause(self._clock())
        try:
            self._control.save_all()
            self._drain_saves()
            self._control.vacate("device")
            if self._controller is not None:
                self._controller.release()
        except BaseException:
            self._scheduler.resume()
            raise
        for group in self._groups:
            group.free()
        self.is_asleep = True

    def wake(self, num_blocks: int | None = None) -> None:
        """Have device memory again, with as many blocks as before or another number; requests go on."""
        if not self.is_asleep:
            return
        if num_blocks is not None:
            self._drain()  # the host may have been writing to stores meanwhile
            self._control.resize("device", num_blocks)
        for group in self._groups:
            group.renew(self._manager.tree.tiers[0].pool.num_slots)
        if self._controller is not None:
            self._controller.register([group.cache for group in self._groups])
        self.is_asleep = False
        self._scheduler.resume()

    def resize(self, tier: str, num_blocks: int) -> None:
        """Another number of blocks for a memory tier. What is cached stays as far as the host or a store has it."""
        self._control.tier(tier)
        self._must_fit(tier, num_blocks)
        was_asleep = self.is_asleep
        if num_blocks < 1:
            raise RangeError(f"a tier needs at least one block, got {num_blocks} for {tier}")
        if tier == "device":
            self._resize_device(num_blocks, stays_asleep=was_asleep)
            return
        assert self._controller is not None
        if was_asleep:
            raise StateError("the cache is asleep: wake it to resize the host tier")
        self._scheduler.pause(self._clock())
        try:
            self._control.save_all()
            self._drain_saves()
            # Memory that cannot be had leaves the tier as it was, but for what lies beyond the new size.
            self._control.vacate(tier, num_blocks)
            self._controller.resize_host(num_blocks, [group.cache for group in self._groups])
            self._control.resize(tier, num_blocks)
        finally:
            self._scheduler.resume()

    def _resize_device(self, num_blocks: int, *, stays_asleep: bool) -> None:
        before = self._manager.num_blocks
        self.sleep()
        try:
            self.wake(num_blocks)
        except BaseException:  # there is no memory for it after all
            self.wake(before)
            raise
        finally:
            if stays_asleep:
                self.sleep()

    def close(self) -> None:
        """Finish what is under way, close the stores, free host memory."""
        if self._controller is not None:
            self._controller.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _block_bytes(self) -> int:
        """Of one block of all groups, on all ranks."""
        others = (self._manager.transfers.num_ranks - 1) * self._groups[0].block_bytes
        return sum(group.block_bytes for group in self._groups) + others

    def _must_fit(self, tier: str, num_blocks: int) -> None:
        """Refuse what the machine has no memory for, before anything is given up for it."""
        device = self._groups[0].cache.device if tier == "device" else torch.device("cpu")
        # ranks share the machine's memory, and have a GPU each
        block_bytes = self._block_bytes
        if device.type == "cuda":
            block_bytes = sum(group.block_bytes for group in self._groups)
        wanted, free = num_blocks * block_bytes, _free_bytes(device)
        if tier == "device":  # the old cache goes before the new one comes; a new host tier comes first
            free += len(self._groups[0].cache) * block_bytes
        if wanted > free:
            raise RangeError(
                f"{num_blocks} blocks of the {tier} tier take {wanted / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
            )

    def _drain(self, is_done: Callable[[], bool] | None = None) -> None:
        """Carry out what is planned until nothing is under way, or something is done."""
        while self._controller is not None:
            self.submit(self._manager.plan(now=self._clock()))
            self.apply()
            if (
                is_done()
                if is_done is not None
                else not (self._controller.is_busy or self._manager.transfers.in_flight)
            ):
                return
            self._controller.wait(_POLL_SECONDS)

    def _drain_saves(self) -> None:
        while self._control.plan_saves(self._clock()):
            self._drain()
            self.wait()  # a bandwidth budget refills
        self._drain()


def _free_bytes(device: torch.device) -> int:
    """Memory that could be had there now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def new_controller(
    manager_host_blocks: int,
    groups: Sequence[DeviceCacheGroup],
    stores: Mapping[str, Store | ShardStores],
    namespace: bytes,
    sharding: Sharding | None = None,
    secret: bytes = b"",
) -> CacheController:
    """A controller for an engine's groups, those of one rank."""
    caches = [group.cache for group in groups]
    layout = layout_of(caches, groups[0].block_tokens)
    return CacheController(
        *(layout, caches, manager_host_blocks),
        stores=stores,
        namespace=namespace,
        secret=secret,
        sharding=sharding,
    )
