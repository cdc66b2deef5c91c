"""TransferManager: copies blocks between the device cache and host memory in both directions while the model runs."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from typing import Self

from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.layout import KVLayout
from kvtier.memory import CPU, Event, Placement, current_stream
from kvtier.memory.copy_paths import run_path
from kvtier.transfer.block_view import Direction, Ids, as_direction
from kvtier.transfer.compiled import CompiledTransfer, compile_transfer
from kvtier.transfer.device_cache import DeviceCache
from kvtier.transfer.handle import TransferHandle, TransferReport
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.lane import Lane
from kvtier.transfer.staging import Mover
from kvtier.transfer.strategy import Strategy, TransferConfig

_UNSLICED = 1 << 62  # a slice size above that of any transfer, for urgent transfers that do not use staging memory


class TransferManager:
    """Moves blocks of every cache group of `layout` between a device ("cuda:0", or "cpu") and host memory.

        manager = TransferManager(layout, "cuda:0")
        manager.register(DeviceCache.block_first(group, tensor), HostMemory(group, 1000, "cuda:0"))
        save = manager.save([3, 7], [0, 1])                       # bulk, after work on the current stream
        load = manager.load([5, 6], [0, 1], layer_wise=True)      # urgent; compute waits on load.layers
        for report in manager.poll(): ...                         # transfers that ended since the last poll

    Copies wait for the event `after`. The default is an event at the end of the current stream. An unrecorded Event()
    means that copies start immediately. If some blocks of a transfer fail, or the transfer is cancelled or exceeds its
    `timeout`, the report lists the blocks that did not arrive. All other blocks are valid. Thread-safe.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: Placement | str = CPU,
        config: TransferConfig | None = None,
        *,
        mover: Mover = run_path,
    ) -> None:
        """`mover` executes the copies. Tests pass a mover that fails."""
        self.layout = layout
        self.placement = Placement.parse(device).require()
        self.config = config or TransferConfig()
        self._caches: dict[str, tuple[DeviceCache, HostMemory]] = {}
        self._lanes = {way: Lane(way, self.placement, self.config, mover) for way in Direction}
        self._live: dict[int, TransferHandle] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    # ---- caches ----

    def register(self, cache: DeviceCache, host: HostMemory) -> None:
        """Use this cache and host memory for their group. An earlier cache of the group must be released first."""
        group = self.layout.group(cache.group.name)
        if group != cache.group or group != host.group:
            raise ArgumentError(f"the cache or the host memory is for another layout of group {group.name!r}")
        if cache.placement != self.placement:
            raise ArgumentError(f"this manager moves blocks on {self.placement}, but the cache is on {cache.placement}")
        host_end = host.pointer + host.num_slots * host.slot_bytes
        if any(start < host_end and host.pointer < end for start, end in cache.extent):
            raise ArgumentError("the device cache and the host memory overlap in memory; allocate them separately")
        with self._lock:
            if group.name in self._caches and not self._caches[group.name][0].is_released:
                raise StateError(f"group {group.name!r} already has a cache; call release() first")
            self._caches[group.name] = (cache, host)

    def release(self, group: str | None = None) -> None:
        """Wait for all transfers, then drop the device tensors of one group or all groups. Host memory is not freed."""
        self.wait_all()
        with self._lock:
            for name in [group] if group is not None else list(self._caches):
                if name in self._caches:
                    self._caches.pop(name)[0].release()
        for lane in self._lanes.values():
            lane.drop_staging()

    # ---- transfers ----

    def compile(
        self,
        direction: Direction | str,
        device_ids: Ids,
        host_ids: Ids,
        *,
        group: str | None = None,
        layers: range | None = None,
        layer_wise: bool = False,
        urgent: bool = False,
        strategy: Strategy | None = None,
    ) -> CompiledTransfer:
        """Prepare a transfer that can be submitted once or repeatedly."""
        name = self.layout.groups[0].name if group is None else self.layout.group(group).name
        with self._lock:
            registered = self._caches.get(name)
        if registered is None:
            raise StateError(f"no cache is registered for group {name!r}")
        cache, host = registered
        wanted = cache.group.check_layers(layers)
        way, config, parts = as_direction(direction), self.config, [wanted]
        if layer_wise:
            parts = cache.group.layer_groups(wanted, config.group_piece_bytes, config.min_layer_groups)
        slice_bytes = _UNSLICED if urgent else config.slice_bytes
        return compile_transfer(
            cache, host, way, device_ids, host_ids, parts, config, slice_bytes=slice_bytes, strategy=strategy
        )

    def submit(
        self,
        compiled: CompiledTransfer,
        *,
        urgent: bool = False,
        after: Event | None = None,
        timeout: float | None = None,
    ) -> TransferHandle:
        """Start a compiled transfer. Slices that are still queued after `timeout` seconds are dropped."""
        if self._closed:
            raise ClosedError("this TransferManager was closed; create another one")
        if compiled.cache.is_released:
            raise ClosedError(f"the cache of group {compiled.cache.group.name!r} was released after compile()")
        keep = [*compiled.cache.holdings, compiled.host.keep()]
        deadline = None if timeout is None else time.monotonic() + timeout
        after = self.record_event() if after is None else after
        number = next(self._numbers)
        transfer = TransferHandle(number, compiled, urgent=urgent, after=after, deadline=deadline, keep=keep)
        with self._lock:
            self._live = {k: each for k, each in self._live.items() if not each.was_waited_for}  # wait() reported it
            self._live[number] = transfer
        self._lanes[compiled.direction].submit(transfer)
        return transfer

    def save(
        self,
        device_ids: Ids,
        host_ids: Ids,
        *,
        group: str | None = None,
        urgent: bool = False,
        after: Event | None = None,
        timeout: float | None = None,
        strategy: Strategy | None = None,
    ) -> TransferHandle:
        """Copy blocks to the host. The event `after` marks the end of the computation that writes the blocks."""
        compiled = self.compile(Direction.D2H, device_ids, host_ids, group=group, urgent=urgent, strategy=strategy)
        return self.submit(compiled, urgent=urgent, after=after, timeout=timeout)

    def load(
        self,
        device_ids: Ids,
        host_ids: Ids,
        *,
        group: str | None = None,
        layer_wise: bool = False,
        urgent: bool = True,
        after: Event | None = None,
        timeout: float | None = None,
        strategy: Strategy | None = None,
    ) -> TransferHandle:
        """Copy blocks to the device. With `layer_wise`, `TransferHandle.layers` can wait for single layers."""
        compiled = self.compile(
            Direction.H2D, device_ids, host_ids, group=group, layer_wise=layer_wise, urgent=urgent, strategy=strategy
        )
        return self.submit(compiled, urgent=urgent, after=after, timeout=timeout)

    def poll(self, *, only_urgent: bool = False) -> list[TransferReport]:
        """Return the reports of ended transfers, each report once. `only_urgent` skips bulk transfers. Never waits."""
        with self._lock:
            live = [each for each in self._live.values() if each.urgent or not only_urgent]
        ended = [report for transfer in live if (report := transfer.report) is not None]
        with self._lock:
            return [report for report in ended if self._live.pop(report.id, None) is not None]

    def wait_all(self, timeout: float | None = None) -> None:
        """Wait until every transfer submitted so far has ended. poll() still returns their reports.

        Raises TransferTimeoutError after `timeout` seconds.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            live = list(self._live.values())
        for transfer in live:
            transfer.settle(None if limit is None else max(0.0, limit - time.monotonic()))

    def record_event(self) -> Event | None:
        """Record an event at the end of the current stream; None if there is no stream."""
        stream = current_stream(self.placement)
        return None if stream is None else stream.record()

    def present(self) -> Event | None:
        """Deprecated: use `record_event`."""
        warnings.warn("present() is now record_event()", DeprecationWarning, stacklevel=2)
        return self.record_event()

    def close(self) -> None:
        """Drop all slices not yet submitted, wait for the others, and release the caches. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        for transfer in list(self._live.values()):
            transfer.cancel()
        for lane in self._lanes.values():
            lane.close()
        for cache, _ in self._caches.values():
            cache.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # False if __init__ raised
            self.close()  # tensors must not return to torch's pool while copies use them
